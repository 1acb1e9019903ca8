//! Slots for unauthenticated connections. Each connection costs a thread, so there are few slots,
//! and no caller can hold them: if all are in use, a new connection takes the slot of the oldest
//! connection of its own address, or of the address with the most connections. A handshake takes
//! milliseconds, so callers that can authenticate do so before they are evicted.

use std::{
    net::{IpAddr, Shutdown, TcpStream},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

/// Limit of open connections, evicted ones included, as a multiple of the slots. New connections
/// beyond it are refused until threads of evicted connections have ended.
const EVICTING_FACTOR: usize = 2;

/// Descriptors that an unauthenticated connection takes: its own, and two to close it by from elsewhere.
const DESCRIPTORS_PER_CONNECTION: usize = 3;

/// Descriptors that are left to everything else.
const OTHER_DESCRIPTORS: usize = 40;

/// Fewest slots, however few descriptors there are.
const FEWEST_SLOTS: usize = 2;

/// A limited number of slots, in all and per address.
pub struct ConnectionSlots {
    limit: usize,
    limit_per_address: usize,
    held: Mutex<Held>,
}

#[derive(Default)]
struct Held {
    next: u64,
    /// In order of arrival.
    taken: Vec<Taken>,
    /// Evicted connections whose threads have not ended yet.
    leaving: usize,
}

struct Taken {
    number: u64,
    ip: IpAddr,
    socket: TcpStream,
    lost: Arc<AtomicBool>,
}

/// One slot, held until it is dropped.
pub struct ConnectionSlot {
    of: Arc<ConnectionSlots>,
    number: u64,
    lost: Arc<AtomicBool>,
}

impl ConnectionSlots {
    /// At most `limit` slots, `limit_per_address` of them for one address.
    #[must_use]
    pub fn new(limit: usize, limit_per_address: usize) -> Arc<Self> {
        Arc::new(Self { limit, limit_per_address, held: Mutex::default() })
    }

    /// The same, with fewer slots where this process may have too few descriptors for them.
    #[must_use]
    pub fn within_descriptors(limit: usize, limit_per_address: usize) -> Arc<Self> {
        let most = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        // None: unlimited.
        let most = most.and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX);
        let each = EVICTING_FACTOR * DESCRIPTORS_PER_CONNECTION;
        let fit = most.saturating_sub(OTHER_DESCRIPTORS) / each;
        let limit = limit.min(fit).max(FEWEST_SLOTS);
        Self::new(limit, limit_per_address.min(limit / 2).max(1))
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A slot for a connection from `ip`. If none is free, another connection is evicted and its
    /// socket is closed. `None` if too many evicted connections are still ending.
    pub fn enter(self: &Arc<Self>, ip: IpAddr, socket: &TcpStream) -> Option<ConnectionSlot> {
        let ip = ip.to_canonical();
        let socket = socket.try_clone().ok()?;
        let mut held = self.lock();
        if held.taken.len() + held.leaving >= EVICTING_FACTOR * self.limit {
            return None;
        }
        if let Some(index) = self.index_to_evict(&held.taken, ip) {
            let evicted = held.taken.remove(index);
            evicted.lost.store(true, Ordering::SeqCst);
            // It may have been closed already.
            let _ = evicted.socket.shutdown(Shutdown::Both);
            held.leaving += 1;
        }
        let (number, lost) = (held.next, Arc::<AtomicBool>::default());
        held.next += 1;
        held.taken.push(Taken { number, ip, socket, lost: Arc::clone(&lost) });
        drop(held);
        Some(ConnectionSlot { of: Arc::clone(self), number, lost })
    }

    /// The connection to evict for a new one from `ip`, if one must be.
    fn index_to_evict(&self, taken: &[Taken], ip: IpAddr) -> Option<usize> {
        let count = |ip: IpAddr| taken.iter().filter(|it| it.ip == ip).count();
        let oldest = |ip: IpAddr| taken.iter().position(|it| it.ip == ip);
        if count(ip) >= self.limit_per_address {
            return oldest(ip);
        }
        if taken.len() < self.limit {
            return None;
        }
        // Of several addresses with as many, the one whose connection is the oldest.
        let most = taken.iter().map(|it| count(it.ip)).max()?;
        taken.iter().position(|it| count(it.ip) == most)
    }
}

impl ConnectionSlot {
    /// Whether the connection was evicted.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::SeqCst)
    }
}

impl Drop for ConnectionSlot {
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
        let slots = ConnectionSlots::new(4, 2);
        let enter = |last| {
            let (far, near) = socket(&listener);
            (slots.enter(ip(last), &far).unwrap(), far, near)
        };
        let mut of_one = vec![enter(1), enter(1)];
        assert!(of_one.iter().all(|it| !it.0.is_lost()));
        // Its own oldest, though there is room for others.
        of_one.push(enter(1));
        let lost = |of: &[(ConnectionSlot, TcpStream, TcpStream)]| -> Vec<bool> {
            of.iter().map(|it| it.0.is_lost()).collect()
        };
        assert_eq!(lost(&of_one), [true, false, false]);
        assert_eq!((&of_one[0].2).read(&mut [0]).unwrap(), 0, "the socket is closed");
        // All slots are taken: the address with the most gives one, and nobody else.
        let others = [enter(2), enter(3)];
        let last = enter(4);
        assert_eq!(lost(&of_one), [true, true, false]);
        assert!(lost(&others).iter().all(|lost| !lost) && !last.0.is_lost());
        // One each: the oldest of all.
        let newest = enter(5);
        assert_eq!(lost(&of_one), [true, true, true]);
        drop((of_one, others, last, newest));
        let held = slots.lock();
        assert_eq!((held.taken.len(), held.leaving), (0, 0));
    }

    #[test]
    fn those_about_to_leave_are_bounded_too() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let slots = ConnectionSlots::new(2, 2);
        let (far, _near) = socket(&listener);
        let mut entered: Vec<ConnectionSlot> =
            (0..20).filter_map(|_| slots.enter(ip(1), &far)).collect();
        assert_eq!(entered.len(), EVICTING_FACTOR * 2);
        entered.remove(0);
        assert!(slots.enter(ip(2), &far).is_some());
    }

    #[test]
    fn an_address_is_the_same_in_both_spellings() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let slots = ConnectionSlots::new(4, 1);
        let (far, _near) = socket(&listener);
        let first = slots.enter(ip(1), &far).unwrap();
        let mapped = IpAddr::V6(Ipv4Addr::new(10, 0, 0, 1).to_ipv6_mapped());
        let second = slots.enter(mapped, &far).unwrap();
        assert!(first.is_lost() && !second.is_lost());
    }
}
