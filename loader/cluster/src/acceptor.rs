//! The door of a rank process: takes connections, reads how they begin, and lets in whoever
//! shows the token. What they want is for others to say.

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
    message::{FromRank, Opening, PeerReply},
    token::Token,
    wire::{self, MAX_OPENING_BYTES, Until},
};

/// How long a connection may take to say what it is; a front or peer says it at once.
const OPENING_TIMEOUT: Duration = Duration::from_secs(5);

/// Places for connections that have not said what they are: two of every peer and the front's,
/// and room for strangers, each of which costs a thread until [`OPENING_TIMEOUT`] or until
/// somebody new needs the place.
const UNDECIDED_PLACES: usize = 64;

/// Of these for one address: ranks of one machine come together.
const UNDECIDED_PLACES_OF_ONE: usize = 32;

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
    /// `credentials`, that is inside TLS and of whoever has the role for what it wants.
    pub(super) fn start(
        listener: TcpListener,
        token: Token,
        credentials: Option<Credentials>,
        admit: impl Fn(Opening, Channel) + Send + Sync + 'static,
    ) -> std::io::Result<Self> {
        let address = listener.local_addr()?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let door = Arc::new(Door { token, credentials });
        let accept = move || accept_all(&listener, &door, &Arc::new(admit), &stopped);
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
        let woken = TcpStream::connect_timeout(&address, OPENING_TIMEOUT).is_ok();
        if let Some(thread) = self.thread.take().filter(|_| woken) {
            // It holds nothing that a panic could leave half done.
            let _ = thread.join();
        }
    }
}

/// What whoever comes in must show.
struct Door {
    token: Token,
    credentials: Option<Credentials>,
}

fn accept_all<F>(listener: &TcpListener, door: &Arc<Door>, admit: &Arc<F>, stop: &AtomicBool)
where
    F: Fn(Opening, Channel) + Send + Sync + 'static,
{
    let undecided = ConnectionSlots::new(UNDECIDED_PLACES, UNDECIDED_PLACES_OF_ONE);
    loop {
        let accepted = listener.accept();
        if stop.load(Ordering::SeqCst) {
            return;
        }
        let Ok((stream, peer)) = accepted else {
            thread::sleep(SHORTAGE_PAUSE);
            continue;
        };
        let Some(place) = undecided.enter(peer.ip(), &stream) else { continue };
        let (door, admit) = (Arc::clone(door), Arc::clone(admit));
        let decide = move || {
            let opened = door.open(stream, &place);
            drop(place);
            if let Some((opening, channel)) = opened {
                admit(opening, channel);
            }
        };
        // Without a thread the place is free again, and the connection closed.
        let _ = thread::Builder::new().name("opening".to_owned()).spawn(decide);
    }
}

impl Door {
    /// How the connection begins, if it shows what it must; others are told no more than that.
    fn open(&self, stream: TcpStream, place: &ConnectionSlot) -> Option<(Opening, Channel)> {
        let deadline = Deadline::after(OPENING_TIMEOUT);
        stream.set_nodelay(true).ok()?;
        let channel = match &self.credentials {
            None => Channel::from(stream),
            Some(credentials) => {
                let patience =
                    HandshakeDeadline { at: deadline.moment(), is_cancelled: &|| place.is_lost() };
                let roles = [Role::Controller, Role::Node];
                Channel::answer(stream, credentials, &[Service::Rank], &roles, patience).ok()?
            }
        };
        let opening: Opening =
            wire::read(&mut Until(&channel, deadline), MAX_OPENING_BYTES).ok()?;
        // A front is a controller's, a rank a node's.
        let role = match opening {
            Opening::Control { .. } => Role::Controller,
            Opening::Peer { .. } => Role::Node,
        };
        if channel.peer().is_some_and(|peer| peer.role != Some(role)) {
            refuse(&channel, &opening, "its certificate has not the role for that");
            return None;
        }
        if !opening.token().matches(&self.token) {
            refuse(&channel, &opening, "the token is wrong");
            return None;
        }
        // Its socket is closed where it has lost its place in the last moment.
        (!place.is_lost()).then_some((opening, channel))
    }
}

/// Says why a connection is not wanted, and closes it.
pub(super) fn refuse(mut stream: &Channel, opening: &Opening, reason: &str) {
    let reason = reason.to_owned();
    let reply = match opening {
        Opening::Control { .. } => wire::encode(&FromRank::Refused(reason)),
        Opening::Peer { .. } => wire::encode(&PeerReply::Refused(reason)),
    };
    // One that does not listen is not wanted either; a sentence fits any socket's buffer.
    let _ = reply.map(|reply| stream.write_all(&reply));
    let _ = stream.shutdown(Shutdown::Both);
}
