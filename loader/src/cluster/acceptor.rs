//! The door of a rank process: takes connections, reads how they begin, and lets in whoever
//! shows the token. What they want is for others to say.

use std::{
    io::Write as _,
    net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use shardpack_collectives::Deadline;

use super::{
    message::{FromRank, Opening, PeerReply},
    token::Token,
    wire::{self, MAX_OPENING_BYTES, Until},
};

/// How long a connection may take to say what it is; a front or peer says it at once.
const OPENING_TIMEOUT: Duration = Duration::from_secs(5);

/// Connections that may be undecided at the same time: two of every peer and the front's, and
/// room for strangers, each of which costs a thread until [`OPENING_TIMEOUT`].
const MAX_UNDECIDED: usize = 64;

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
    /// Gives every connection that shows `token` to `admit`, on a thread of its own.
    pub(super) fn start(
        listener: TcpListener,
        token: Token,
        admit: impl Fn(Opening, TcpStream) + Send + Sync + 'static,
    ) -> std::io::Result<Self> {
        let address = listener.local_addr()?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let accept = move || accept_all(&listener, &token, &Arc::new(admit), &stopped);
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

fn accept_all<F>(listener: &TcpListener, token: &Token, admit: &Arc<F>, stop: &AtomicBool)
where
    F: Fn(Opening, TcpStream) + Send + Sync + 'static,
{
    let undecided = Arc::new(AtomicUsize::new(0));
    loop {
        let accepted = listener.accept();
        if stop.load(Ordering::SeqCst) {
            return;
        }
        let Ok((stream, _)) = accepted else {
            thread::sleep(SHORTAGE_PAUSE);
            continue;
        };
        if undecided.load(Ordering::SeqCst) >= MAX_UNDECIDED {
            continue;
        }
        undecided.fetch_add(1, Ordering::SeqCst);
        let (token, admit, one) = (token.clone(), Arc::clone(admit), Arc::clone(&undecided));
        let decide = move || {
            let opened = open(&stream, &token);
            one.fetch_sub(1, Ordering::SeqCst);
            if let Some(opening) = opened {
                admit(opening, stream);
            }
        };
        if thread::Builder::new().name("opening".to_owned()).spawn(decide).is_err() {
            undecided.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// How the connection begins, if it shows the token; others are told no more than that.
fn open(stream: &TcpStream, token: &Token) -> Option<Opening> {
    let deadline = Deadline::after(OPENING_TIMEOUT);
    let opening: Opening = wire::read(&mut Until(stream, deadline), MAX_OPENING_BYTES).ok()?;
    if opening.token().matches(token) {
        stream.set_nodelay(true).ok()?;
        return Some(opening);
    }
    refuse(stream, &opening, "the token is wrong");
    None
}

/// Says why a connection is not wanted, and closes it.
pub(super) fn refuse(mut stream: &TcpStream, opening: &Opening, reason: &str) {
    let reason = reason.to_owned();
    let reply = match opening {
        Opening::Control { .. } => wire::encode(&FromRank::Refused(reason)),
        Opening::Peer { .. } => wire::encode(&PeerReply::Refused(reason)),
    };
    // One that does not listen is not wanted either; a sentence fits any socket's buffer.
    let _ = reply.map(|reply| stream.write_all(&reply));
    let _ = stream.shutdown(Shutdown::Both);
}
