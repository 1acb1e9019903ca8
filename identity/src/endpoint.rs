//! How a node is reached: plain TCP on loopback, mutual TLS with the node's pinned key otherwise.

use std::{
    fmt, io,
    net::{IpAddr, SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use crate::{
    Channel, Credentials, ExpectedPeer, HandshakeDeadline, HandshakeError, PeerKey, Role, Service,
    address::resolve_address,
};

/// No connection to a node.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The address cannot be resolved.
    #[error("{address}: not a HOST:PORT address, or the host name does not resolve")]
    Address {
        /// As given.
        address: String,
        /// What the system said.
        source: io::Error,
    },
    /// Packages would cross a network without TLS.
    #[error(
        "{address} is on another machine and is not a member of the cluster: nodes on other machines require mutual TLS; start the node there and run the `shardpack cluster add` command that it prints"
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
    /// The handshake failed.
    #[error("{node}")]
    Handshake {
        /// The node.
        node: String,
        /// Why.
        source: HandshakeError,
    },
}

/// How the two ends of a TLS connection to a node prove their identity.
#[derive(Clone, Debug)]
pub struct TlsPeer {
    /// The caller's credentials.
    pub credentials: Credentials,
    /// The key that the node must prove to have.
    pub key: PeerKey,
}

/// Where a node is, and how it is authenticated.
#[derive(Clone, Debug)]
pub struct Endpoint {
    name: String,
    address: String,
    tls: Option<TlsPeer>,
}

/// Whether an address is a loopback address; all others require TLS.
#[must_use]
pub const fn is_local(ip: IpAddr) -> bool {
    ip.to_canonical().is_loopback()
}

impl Endpoint {
    /// A node on this machine, without TLS.
    #[must_use]
    pub fn plain(address: impl Into<String>) -> Self {
        let address = address.into();
        Self { name: address.clone(), address, tls: None }
    }

    /// A member of the cluster that answers with `key`.
    #[must_use]
    pub const fn member(
        name: String,
        address: String,
        credentials: Credentials,
        key: PeerKey,
    ) -> Self {
        Self { name, address, tls: Some(TlsPeer { credentials, key }) }
    }

    /// What people call it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Host and port.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// How the connection is authenticated; `None` without TLS.
    #[must_use]
    pub const fn tls(&self) -> Option<&TlsPeer> {
        self.tls.as_ref()
    }

    /// The socket addresses that the address resolves to.
    pub fn resolve(&self) -> Result<Vec<SocketAddr>, ConnectError> {
        resolve(&self.address)
    }

    /// Connects to the first resolved address that answers.
    pub fn connect(&self, service: Service, timeout: Duration) -> Result<Channel, ConnectError> {
        let resolved = self.resolve()?;
        let node = self.to_string();
        let Some(TlsPeer { credentials, key }) = &self.tls else {
            if let Some(address) = resolved.iter().find(|address| !is_local(address.ip())) {
                return Err(ConnectError::NotLoopback { address: *address });
            }
            let socket = reach(&node, &resolved, Instant::now() + timeout)?;
            let failed = |source| ConnectError::Connect { node, source };
            // Replies are small.
            socket.set_nodelay(true).map_err(failed)?;
            return Ok(socket.into());
        };
        let deadline = HandshakeDeadline::after(timeout);
        let expected = ExpectedPeer { role: Role::Node, key: Some(*key) };
        let socket = reach(&node, &resolved, deadline.at)?;
        Channel::call(socket, credentials, service, expected, deadline)
            .map_err(|source| ConnectError::Handshake { node, source })
    }
}

pub(crate) fn resolve(address: &str) -> Result<Vec<SocketAddr>, ConnectError> {
    let unknown = |source| ConnectError::Address { address: address.to_owned(), source };
    resolve_address(address).map_err(unknown)
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
