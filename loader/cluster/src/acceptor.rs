//! The acceptor of a rank process: accepts connections, reads their hello, and admits those with
//! the right token and certificate. What they are for is not known here.

use std::{
    io::Write as _,
    net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use shardpack_collectives::Deadline;
use shardpack_identity::{
    Channel, ConnectionSlot, ConnectionSlots, Credentials, HandshakeDeadline, Role, Service,
};

use super::{
    message::{FromRank, Hello, PeerReply},
    token::Token,
    wire::{self, MAX_HELLO_BYTES, Until},
};

/// Timeout of a connection's TLS handshake and hello; a front or peer sends it at once.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);

/// Slots for connections that have not sent their hello: two of every peer and the front's, and
/// room for unknown clients, each of which costs a thread until [`HELLO_TIMEOUT`] or until a new
/// connection needs the slot.
const PENDING_CONNECTIONS: usize = 64;

/// Slots for one address: ranks of one machine connect at the same time.
const PENDING_CONNECTIONS_PER_ADDRESS: usize = 32;

/// How long to rest when the system has no connection to give, which is a shortage of
/// descriptors or memory.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(50);

/// Takes connections until dropped.
pub(super) struct Acceptor {
    stop: Arc<AtomicBool>,
    address: SocketAddr,
    thread: Option<JoinHandle<()>>,
}

impl Acceptor {
    /// Gives every connection that shows `token` to `admit`, on a thread of its own. With
    /// `credentials`, that is inside TLS, and only for peers whose role allows the connection.
    pub(super) fn start(
        listener: TcpListener,
        token: Token,
        credentials: Option<Credentials>,
        admit: impl Fn(Hello, Channel) + Send + Sync + 'static,
    ) -> std::io::Result<Self> {
        let address = listener.local_addr()?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let admission = Arc::new(Admission { token, credentials });
        let accept = move || accept_all(&listener, &admission, &Arc::new(admit), &stopped);
        let thread = thread::Builder::new().name("accept".to_owned()).spawn(accept)?;
        Ok(Self { stop, address, thread: Some(thread) })
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let mut address = self.address;
        if address.ip().is_unspecified() {
            address.set_ip(IpAddr::V4(Ipv4Addr::LOCALHOST));
        }
        // A blocked accept has no other way to be woken. Where even this fails, the thread is
        // left to the end of the process.
        let woken = TcpStream::connect_timeout(&address, HELLO_TIMEOUT).is_ok();
        if let Some(thread) = self.thread.take().filter(|_| woken) {
            // It holds nothing that a panic could leave half done.
            let _ = thread.join();
        }
    }
}

/// What a connection is checked against before it is admitted.
struct Admission {
    token: Token,
    credentials: Option<Credentials>,
}

fn accept_all<F>(
    listener: &TcpListener,
    admission: &Arc<Admission>,
    admit: &Arc<F>,
    stop: &AtomicBool,
) where
    F: Fn(Hello, Channel) + Send + Sync + 'static,
{
    let pending =
        ConnectionSlots::within_descriptors(PENDING_CONNECTIONS, PENDING_CONNECTIONS_PER_ADDRESS);
    loop {
        let accepted = listener.accept();
        if stop.load(Ordering::SeqCst) {
            return;
        }
        let Ok((stream, peer)) = accepted else {
            thread::sleep(SHORTAGE_PAUSE);
            continue;
        };
        let Some(slot) = pending.enter(peer.ip(), &stream) else { continue };
        let (admission, admit) = (Arc::clone(admission), Arc::clone(admit));
        let decide = move || {
            let opened = admission.handshake(stream, &slot);
            drop(slot);
            if let Some((hello, channel)) = opened {
                admit(hello, channel);
            }
        };
        // Without a thread the slot is free again, and the connection closed.
        let _ = thread::Builder::new().name("hello".to_owned()).spawn(decide);
    }
}

impl Admission {
    /// Reads and checks the hello; a refused connection learns the reason and nothing else.
    fn handshake(&self, stream: TcpStream, slot: &ConnectionSlot) -> Option<(Hello, Channel)> {
        let deadline = Deadline::after(HELLO_TIMEOUT);
        stream.set_nodelay(true).ok()?;
        let channel = match &self.credentials {
            None => Channel::from(stream),
            Some(credentials) => {
                let limit =
                    HandshakeDeadline { at: deadline.moment(), is_cancelled: &|| slot.is_lost() };
                let roles = [Role::Controller, Role::Node, Role::Front];
                Channel::answer(stream, credentials, &[Service::Rank], &roles, limit).ok()?
            }
        };
        let hello: Hello = wire::read(&mut Until(&channel, deadline), MAX_HELLO_BYTES).ok()?;
        // A front is a controller's or runs on a node for one, a rank is a node's.
        let roles = match hello {
            Hello::Control { .. } | Hello::Weights { .. } => &[Role::Controller, Role::Front][..],
            Hello::Peer { .. } => &[Role::Node],
        };
        let has_role = |role: Option<Role>| role.is_some_and(|role| roles.contains(&role));
        if channel.peer().is_some_and(|peer| !has_role(peer.role)) {
            refuse(&channel, &hello, "its certificate does not have the required role");
            return None;
        }
        if !hello.token().matches(&self.token) {
            refuse(&channel, &hello, "the token is wrong");
            return None;
        }
        // Its socket is closed where it has just lost its slot.
        (!slot.is_lost()).then_some((hello, channel))
    }
}

/// Refuses a connection with a reason, and closes it.
pub(super) fn refuse(mut stream: &Channel, hello: &Hello, reason: &str) {
    let reason = reason.to_owned();
    let reply = match hello {
        Hello::Control { .. } | Hello::Weights { .. } => wire::encode(&FromRank::Refused(reason)),
        Hello::Peer { .. } => wire::encode(&PeerReply::Refused(reason)),
    };
    // One that does not listen is not wanted either; a sentence fits any socket's buffer.
    let _ = reply.map(|reply| stream.write_all(&reply));
    let _ = stream.shutdown(Shutdown::Both);
}
