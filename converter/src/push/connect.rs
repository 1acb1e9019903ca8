//! A connection to a node.

use std::{
    io,
    net::{SocketAddr, TcpStream, ToSocketAddrs},
    time::Duration,
};

use shardpack_manifests::transfer::{Timeouts, Wire};

use super::NodeError;

type SetTimeout = fn(&TcpStream, Duration) -> io::Result<()>;

/// Frames on a TCP connection.
pub(super) type NodeWire = Wire<TcpStream, SetTimeout>;

/// Connects to the first of the address's meanings that answers.
pub(super) fn connect(address: &str, timeouts: Timeouts) -> Result<NodeWire, NodeError> {
    let unknown = |source| NodeError::Address { address: address.to_owned(), source };
    let resolved: Vec<SocketAddr> = address.to_socket_addrs().map_err(unknown)?.collect();
    let is_loopback = |address: &&SocketAddr| address.ip().to_canonical().is_loopback();
    if let Some(address) = resolved.iter().find(|address| !is_loopback(address)) {
        return Err(NodeError::NotLoopback { address: *address });
    }
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for candidate in &resolved {
        match TcpStream::connect_timeout(candidate, timeouts.connect) {
            Ok(stream) => {
                let failed = |source| NodeError::Connect { address: address.to_owned(), source };
                // A commit is small and awaited.
                stream.set_nodelay(true).map_err(failed)?;
                let set_timeout: SetTimeout = |stream, timeout| {
                    stream.set_read_timeout(Some(timeout))?;
                    stream.set_write_timeout(Some(timeout))
                };
                return Ok(Wire::new(stream, set_timeout, timeouts));
            }
            Err(error) => last = error,
        }
    }
    Err(NodeError::Connect { address: address.to_owned(), source: last })
}
