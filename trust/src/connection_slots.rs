//! Places for connections that have not proven who they are. They are few, since each costs a
//! thread, and nobody can keep them: whoever comes when all are taken gets that of the oldest
//! connection of its own address, or of the address that has the most. Proving oneself takes
//! milliseconds, so those who can do it are through before others have pushed them out.

use std::{
    net::{IpAddr, Shutdown, TcpStream},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

/// Connections that have lost their place may take this many times the places until their
/// threads have noticed it; beyond that, newcomers are turned away.
const LEAVING_FACTOR: usize = 2;

/// Places, so many in all and of one address.
pub struct Places {
    most: usize,
    most_of_one: usize,
    held: Mutex<Held>,
}

#[derive(Default)]
struct Held {
    next: u64,
    /// In the order in which they came.
    taken: Vec<Taken>,
    /// Lost their place, and have not left yet.
    leaving: usize,
}

struct Taken {
    number: u64,
    ip: IpAddr,
    socket: TcpStream,
    lost: Arc<AtomicBool>,
}

/// One place, until dropped.
pub struct Place {
    of: Arc<Places>,
    number: u64,
    lost: Arc<AtomicBool>,
}

impl Places {
    /// At most `most` places, `most_of_one` of them for one address.
    #[must_use]
    pub fn new(most: usize, most_of_one: usize) -> Arc<Self> {
        Arc::new(Self { most, most_of_one, held: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a connection from `ip`; where there is none left, another loses its place and
    /// its socket is closed. None when too many of those are still about to leave.
    pub fn enter(self: &Arc<Self>, ip: IpAddr, socket: &TcpStream) -> Option<Place> {
        let ip = ip.to_canonical();
        let socket = socket.try_clone().ok()?;
        let mut held = self.lock();
        if held.taken.len() + held.leaving >= LEAVING_FACTOR * self.most {
            return None;
        }
        if let Some(index) = self.whose_to_take(&held.taken, ip) {
            let loser = held.taken.remove(index);
            loser.lost.store(true, Ordering::SeqCst);
            // It may have been closed already.
            let _ = loser.socket.shutdown(Shutdown::Both);
            held.leaving += 1;
        }
        let (number, lost) = (held.next, Arc::<AtomicBool>::default());
        held.next += 1;
        held.taken.push(Taken { number, ip, socket, lost: Arc::clone(&lost) });
        drop(held);
        Some(Place { of: Arc::clone(self), number, lost })
    }

    /// Who makes room for a newcomer from `ip`, where somebody must.
    fn whose_to_take(&self, taken: &[Taken], ip: IpAddr) -> Option<usize> {
        let count = |ip: IpAddr| taken.iter().filter(|it| it.ip == ip).count();
        let oldest = |ip: IpAddr| taken.iter().position(|it| it.ip == ip);
        if count(ip) >= self.most_of_one {
            return oldest(ip);
        }
        if taken.len() < self.most {
            return None;
        }
        // Of several that have as many, the one whose connection is the oldest.
        let most = taken.iter().map(|it| count(it.ip)).max()?;
        taken.iter().position(|it| count(it.ip) == most)
    }
}

impl Place {
    /// Whether another has it now.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::SeqCst)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut held = self.of.lock();
        match held.taken.iter().position(|it| it.number == self.number) {
            Some(index) => drop(held.taken.remove(index)),
            None => held.leaving -= 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::Read as _,
        net::{Ipv4Addr, TcpListener},
    };

    use super::*;

    /// A connection, and its other end.
    fn socket(listener: &TcpListener) -> (TcpStream, TcpStream) {
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (listener.accept().unwrap().0, near)
    }

    fn ip(last: u8) -> IpAddr {
        IpAddr::V4(Ipv4Addr::new(10, 0, 0, last))
    }

    #[test]
    fn the_oldest_makes_room_and_its_socket_is_closed() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let places = Places::new(4, 2);
        let enter = |last| {
            let (far, near) = socket(&listener);
            (places.enter(ip(last), &far).unwrap(), far, near)
        };
        let mut of_one = vec![enter(1), enter(1)];
        assert!(of_one.iter().all(|it| !it.0.is_lost()));
        // Its own oldest, though there is room for others.
        of_one.push(enter(1));
        let lost = |of: &[(Place, TcpStream, TcpStream)]| -> Vec<bool> {
            of.iter().map(|it| it.0.is_lost()).collect()
        };
        assert_eq!(lost(&of_one), [true, false, false]);
        assert_eq!((&of_one[0].2).read(&mut [0]).unwrap(), 0, "the socket is closed");
        // All places are taken: the address with the most gives one, and nobody else.
        let others = [enter(2), enter(3)];
        let last = enter(4);
        assert_eq!(lost(&of_one), [true, true, false]);
        assert!(lost(&others).iter().all(|lost| !lost) && !last.0.is_lost());
        // One each: the oldest of all.
        let newest = enter(5);
        assert_eq!(lost(&of_one), [true, true, true]);
        drop((of_one, others, last, newest));
        let held = places.lock();
        assert_eq!((held.taken.len(), held.leaving), (0, 0));
    }

    #[test]
    fn those_about_to_leave_are_bounded_too() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let places = Places::new(2, 2);
        let (far, _near) = socket(&listener);
        let mut entered: Vec<Place> = (0..20).filter_map(|_| places.enter(ip(1), &far)).collect();
        assert_eq!(entered.len(), LEAVING_FACTOR * 2);
        entered.remove(0);
        assert!(places.enter(ip(2), &far).is_some());
    }

    #[test]
    fn an_address_is_the_same_in_both_spellings() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let places = Places::new(4, 1);
        let (far, _near) = socket(&listener);
        let first = places.enter(ip(1), &far).unwrap();
        let mapped = IpAddr::V6(Ipv4Addr::new(10, 0, 0, 1).to_ipv6_mapped());
        let second = places.enter(mapped, &far).unwrap();
        assert!(first.is_lost() && !second.is_lost());
    }
}
