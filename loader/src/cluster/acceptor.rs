//! The door of a rank process: takes connections, reads how they begin, and lets in whoever
//! shows the token. What they want is for others to say.

use std::{
    collections::HashMap,
    io::Write as _,
    net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use shardpack_collectives::Deadline;
use shardpack_trust::{Channel, Credentials, Patience, Role, Service};

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

/// Of these, connections from one address that have not said anything yet: ranks of one machine
/// come together, a stranger should not keep them out alone.
const MAX_UNDECIDED_OF_ONE: usize = 32;

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

/// Connections that have not said what they are, by address.
#[derive(Default)]
struct Undecided(Mutex<HashMap<IpAddr, usize>>);

/// One of them; dropped when it has.
struct Place {
    of: Arc<Undecided>,
    ip: IpAddr,
}

impl Undecided {
    fn enter(self: &Arc<Self>, ip: IpAddr) -> Option<Place> {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let of_one = counts.get(&ip).copied().unwrap_or(0);
        if counts.values().sum::<usize>() >= MAX_UNDECIDED || of_one >= MAX_UNDECIDED_OF_ONE {
            return None;
        }
        counts.insert(ip, of_one + 1);
        Some(Place { of: Arc::clone(self), ip })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut counts = self.of.0.lock().unwrap_or_else(PoisonError::into_inner);
        let left = counts.get(&self.ip).map_or(0, |count| count - 1);
        if left == 0 {
            counts.remove(&self.ip);
        } else {
            counts.insert(self.ip, left);
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
    let undecided = Arc::<Undecided>::default();
    loop {
        let accepted = listener.accept();
        if stop.load(Ordering::SeqCst) {
            return;
        }
        let Ok((stream, peer)) = accepted else {
            thread::sleep(SHORTAGE_PAUSE);
            continue;
        };
        let Some(place) = undecided.enter(peer.ip()) else { continue };
        let (door, admit) = (Arc::clone(door), Arc::clone(admit));
        let decide = move || {
            let opened = door.open(stream);
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
    fn open(&self, stream: TcpStream) -> Option<(Opening, Channel)> {
        let deadline = Deadline::after(OPENING_TIMEOUT);
        stream.set_nodelay(true).ok()?;
        let channel = match &self.credentials {
            None => Channel::from(stream),
            Some(credentials) => {
                let patience = Patience { deadline: deadline.moment(), given_up: &|| false };
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
        Some((opening, channel))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_does_not_take_every_place() {
        let undecided = Arc::<Undecided>::default();
        let enter = |last| undecided.enter(IpAddr::V4(Ipv4Addr::new(10, 0, 0, last)));
        let mut places: Vec<Place> = (0..MAX_UNDECIDED_OF_ONE).filter_map(|_| enter(1)).collect();
        assert!(places.len() == MAX_UNDECIDED_OF_ONE && enter(1).is_none());
        places.extend((2..=255).filter_map(enter));
        assert_eq!(places.len(), MAX_UNDECIDED);
        places.clear();
        assert!(enter(1).is_some());
    }
}
