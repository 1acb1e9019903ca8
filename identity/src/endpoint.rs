//! How a node is reached: in the clear within this machine, in TLS with its own key otherwise.

use std::{
    fmt, io,
    net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs},
    time::{Duration, Instant},
};

use crate::{Channel, Credentials, HandshakeError, Patience, PeerKey, Role, Service};

/// No connection to a node.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The address means nothing.
    #[error("{address}: not an address with a port, or its host is not known")]
    Address {
        /// As given.
        address: String,
        /// What the system said.
        source: io::Error,
    },
    /// Packages would cross a network in the clear.
    #[error(
        "{address} is on another machine and is not in the cluster: nodes of other machines speak mutual TLS alone; start the node there and say the `shardpack cluster add` line that it prints"
    )]
    NotLoopback {
        /// The address.
        address: SocketAddr,
    },
    /// No answer.
    #[error("{node}: could not connect")]
    Connect {
        /// The node.
        node: String,
        /// What the system said.
        source: io::Error,
    },
    /// No agreement.
    #[error("{node}")]
    Handshake {
        /// The node.
        node: String,
        /// Why.
        source: HandshakeError,
    },
}

/// Where a node is, and how one knows that it is the one.
#[derive(Clone, Debug)]
pub struct Endpoint {
    name: String,
    address: String,
    guarded: Option<(Credentials, PeerKey)>,
}

/// Whether an address is of this machine's loopback: no other is spoken to in the clear.
#[must_use]
pub const fn is_local(ip: IpAddr) -> bool {
    ip.to_canonical().is_loopback()
}

impl Endpoint {
    /// A node of this machine, in the clear.
    #[must_use]
    pub fn plain(address: impl Into<String>) -> Self {
        let address = address.into();
        Self { name: address.clone(), address, guarded: None }
    }

    /// A member of the cluster that answers with `key`.
    #[must_use]
    pub const fn member(
        name: String,
        address: String,
        credentials: Credentials,
        key: PeerKey,
    ) -> Self {
        Self { name, address, guarded: Some((credentials, key)) }
    }

    /// Host and port.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The caller's credentials and the node's key; none in the clear.
    #[must_use]
    pub const fn guarded(&self) -> Option<&(Credentials, PeerKey)> {
        self.guarded.as_ref()
    }

    /// What the address stands for.
    pub fn resolve(&self) -> Result<Vec<SocketAddr>, ConnectError> {
        resolve(&self.address)
    }

    /// Connects to the first meaning of the address that answers.
    pub fn connect(&self, service: Service, timeout: Duration) -> Result<Channel, ConnectError> {
        let resolved = self.resolve()?;
        let node = self.to_string();
        let Some((credentials, key)) = &self.guarded else {
            if let Some(address) = resolved.iter().find(|address| !is_local(address.ip())) {
                return Err(ConnectError::NotLoopback { address: *address });
            }
            let socket = reach(&node, &resolved, Instant::now() + timeout)?;
            let failed = |source| ConnectError::Connect { node, source };
            // What is awaited is small.
            socket.set_nodelay(true).map_err(failed)?;
            return Ok(socket.into());
        };
        let patience = Patience::of(timeout);
        let socket = reach(&node, &resolved, patience.deadline)?;
        Channel::call(socket, credentials, service, (Role::Node, Some(*key)), patience)
            .map_err(|source| ConnectError::Handshake { node, source })
    }
}

pub(crate) fn resolve(address: &str) -> Result<Vec<SocketAddr>, ConnectError> {
    let unknown = |source| ConnectError::Address { address: address.to_owned(), source };
    Ok(address.to_socket_addrs().map_err(unknown)?.collect())
}

/// A socket to the first of the addresses that answers.
pub(crate) fn reach(
    node: &str,
    addresses: &[SocketAddr],
    deadline: Instant,
) -> Result<TcpStream, ConnectError> {
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for address in addresses {
        let left = deadline.saturating_duration_since(Instant::now());
        match TcpStream::connect_timeout(address, left.max(Duration::from_millis(1))) {
            Ok(socket) => return Ok(socket),
            Err(error) => last = error,
        }
    }
    Err(ConnectError::Connect { node: node.to_owned(), source: last })
}

impl From<SocketAddr> for Endpoint {
    fn from(address: SocketAddr) -> Self {
        Self::plain(address.to_string())
    }
}

impl From<String> for Endpoint {
    fn from(address: String) -> Self {
        Self::plain(address)
    }
}

impl From<&Endpoint> for Endpoint {
    fn from(endpoint: &Endpoint) -> Self {
        endpoint.clone()
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.name == self.address {
            f.write_str(&self.address)
        } else {
            write!(f, "{} ({})", self.name, self.address)
        }
    }
}
