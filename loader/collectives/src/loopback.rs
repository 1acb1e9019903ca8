//! A group of processes on one machine, for measurements and self-tests. A process that connects is
//! trusted to be the rank that it claims; ranks that serve authenticate each other.

use std::{
    io::{self, ErrorKind, Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    thread,
    time::Duration,
};

use crate::{
    group::Deadline,
    link::{Link, TcpLink},
    linked::LinkedGroup,
};

/// Interval between two tries to accept a connection.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Rank `rank` of the group of processes that listen at `addresses`, this one at `listener`. Each
/// connects to those below it, twice.
pub fn join_on_loopback(
    rank: u32,
    listener: &TcpListener,
    addresses: &[SocketAddr],
    deadline: Deadline,
) -> io::Result<LinkedGroup> {
    let size = addresses.len();
    if rank as usize >= size || !addresses.iter().all(|address| address.ip().is_loopback()) {
        let problem = format!(
            "rank {rank} of {addresses:?}: the rank must be below the number of addresses, and every address a loopback address"
        );
        return Err(io::Error::new(ErrorKind::InvalidInput, problem));
    }
    let mut streams: Vec<Vec<TcpStream>> = (0..size).map(|_| Vec::new()).collect();
    for (streams, address) in streams.iter_mut().zip(addresses).take(rank as usize) {
        for _ in 0..2 {
            let left = deadline.left().max(POLL_INTERVAL);
            let mut stream = TcpStream::connect_timeout(address, left)?;
            stream.write_all(&rank.to_le_bytes())?;
            streams.push(stream);
        }
    }
    listener.set_nonblocking(true)?;
    for _ in 0..2 * (size - 1 - rank as usize) {
        let (mut stream, mut from) = (accept(listener, deadline)?, [0; 4]);
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(deadline.left().max(POLL_INTERVAL)))?;
        stream.read_exact(&mut from)?;
        stream.set_read_timeout(None)?;
        let from = u32::from_le_bytes(from);
        let place = streams.get_mut(from as usize).filter(|it| from > rank && it.len() < 2);
        let problem = || {
            io::Error::new(
                ErrorKind::InvalidData,
                format!("an unexpected or third connection from rank {from}"),
            )
        };
        place.ok_or_else(problem)?.push(stream);
    }
    let links = streams.into_iter().map(|mut streams| {
        let (Some(control), Some(data)) = (streams.pop(), streams.pop()) else {
            return Ok(None);
        };
        Ok(Some(Box::new(TcpLink::new(data, control)?) as Box<dyn Link>))
    });
    LinkedGroup::new(rank, 1, links.collect::<io::Result<_>>()?)
}

fn accept(listener: &TcpListener, deadline: Deadline) -> io::Result<TcpStream> {
    loop {
        match listener.accept() {
            Ok((stream, _)) => return Ok(stream),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        if deadline.left().is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        thread::sleep(POLL_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::Group as _;

    const TIMEOUT: Duration = Duration::from_mins(10);

    #[test]
    fn ranks_find_each_other_and_sum() {
        let bind = |_| TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let listeners: Vec<_> = (0..3).map(bind).collect();
        let addresses: Vec<_> = listeners.iter().map(|it| it.local_addr().unwrap()).collect();
        let sums: Vec<f32> = thread::scope(|scope| {
            let ranks = (0..).zip(&listeners).map(|(rank, listener)| {
                let addresses = &addresses;
                scope.spawn(move || {
                    let deadline = Deadline::after(TIMEOUT);
                    let group = join_on_loopback(rank, listener, addresses, deadline).unwrap();
                    let mut values = [rank as f32 + 1.0];
                    group.all_reduce_sum(&mut values, deadline).unwrap();
                    group.barrier(deadline).unwrap();
                    values[0]
                })
            });
            let ranks: Vec<_> = ranks.collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        assert_eq!(sums, [6.0; 3]);
    }

    #[test]
    fn a_rank_that_does_not_come_is_not_waited_for_long() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let here = listener.local_addr().unwrap();
        let join = |addresses: &[SocketAddr]| {
            let deadline = Deadline::after(Duration::from_millis(20));
            join_on_loopback(0, &listener, addresses, deadline).map(drop).unwrap_err().kind()
        };
        assert_eq!(join(&[here, here]), ErrorKind::TimedOut);
        assert_eq!(join(&[here, "192.0.2.1:9".parse().unwrap()]), ErrorKind::InvalidInput);
    }
}
