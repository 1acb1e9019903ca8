//! A connection between two machines: plain TCP within one machine, TLS otherwise.
//!
//! A channel behaves as the socket under it does, blocking or not, with its timeouts. One thread
//! may read while another writes: the session is locked while bytes are sealed or opened, never
//! while the socket waits. Two rules differ from a socket's:
//! - A read that took bytes which do not complete a record ends with [`ErrorKind::Interrupted`],
//!   so that a caller with a deadline can check it; `read_exact` and the like retry by themselves.
//! - A write that fails for want of room or time may have sealed its bytes already; repeat
//!   it with the same bytes, or call [`Channel::begin`] if it will not be repeated.
//!
//! A connection that ends without TLS's `close_notify` counts as an ordinary end: the protocols on a
//! channel are framed, so they detect truncation.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::{Shutdown, SocketAddr, TcpStream},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use rustls::{ClientConnection, Connection, ServerConfig, pki_types::ServerName};

use crate::{
    Credentials, ExpectedPeer, HandshakeDeadline, HandshakeError, Peer, PeerKey, Role, Service,
    credentials::{client_of_stranger, peer_of},
    handshake::{WELCOME, accept, await_welcome, drive},
};

/// Plaintext that is sealed at a time: four records, so that large frames cost few calls and
/// the other direction gets its turns.
const SEAL_BYTES: usize = 64 << 10;

/// Bytes that one read takes from the socket.
const READ_BYTES: usize = 64 << 10;

/// A connection; clones are the same one.
#[derive(Clone)]
pub struct Channel(Arc<Inner>);

struct Inner {
    socket: TcpStream,
    secured: Option<Secured>,
}

struct Secured {
    session: Mutex<Connection>,
    incoming: Mutex<Incoming>,
    outgoing: Mutex<Outgoing>,
    peer: Option<Peer>,
    service: Option<Service>,
}

/// Sealed bytes that came and were not opened yet.
struct Incoming {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

/// Sealed bytes that were not sent yet.
#[derive(Default)]
struct Outgoing {
    sealed: Vec<u8>,
    sent: usize,
    /// Plaintext bytes of a failed write that are among them.
    carried: usize,
}

impl Outgoing {
    fn flush(&mut self, mut socket: &TcpStream) -> io::Result<()> {
        while self.sent < self.sealed.len() {
            match socket.write(&self.sealed[self.sent..]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.sealed.clear();
        self.sent = 0;
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is behind the locks is whole between any two statements, or the connection fails.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl From<TcpStream> for Channel {
    /// Without TLS.
    fn from(socket: TcpStream) -> Self {
        Self(Arc::new(Inner { socket, secured: None }))
    }
}

impl Channel {
    /// Connects to a member of the cluster, which must be the `expected` one.
    pub fn call(
        socket: TcpStream,
        credentials: &Credentials,
        service: Service,
        expected: ExpectedPeer,
        deadline: HandshakeDeadline<'_>,
    ) -> Result<Self, HandshakeError> {
        let config = credentials.client(service, expected).map_err(unusable)?;
        Self::call_with(socket, config, service, deadline)
    }

    /// Connects to a node that has not joined, authenticated by its key only.
    pub(crate) fn call_stranger(
        socket: TcpStream,
        key: PeerKey,
        deadline: HandshakeDeadline<'_>,
    ) -> Result<Self, HandshakeError> {
        let config = client_of_stranger(key).map_err(unusable)?;
        Self::call_with(socket, config, Service::Join, deadline)
    }

    fn call_with(
        socket: TcpStream,
        config: Arc<rustls::ClientConfig>,
        service: Service,
        deadline: HandshakeDeadline<'_>,
    ) -> Result<Self, HandshakeError> {
        // It is neither sent nor compared; the library wants one.
        let name = ServerName::try_from("shardpack.internal").expect("this is a DNS name");
        let session = ClientConnection::new(config, name).map_err(HandshakeError::Tls)?;
        let mut session = Connection::from(session);
        socket.set_nodelay(true).map_err(HandshakeError::Io)?;
        drive(&socket, &mut session, deadline, Some(service))?;
        await_welcome(&socket, &mut session, deadline, service)?;
        Self::secured(socket, session)
    }

    /// Answers members of the cluster in one of `roles`.
    pub fn answer(
        socket: TcpStream,
        credentials: &Credentials,
        services: &[Service],
        roles: &[Role],
        deadline: HandshakeDeadline<'_>,
    ) -> Result<Self, HandshakeError> {
        let config = credentials.server(services, roles).map_err(unusable)?;
        Self::answer_with(socket, &|_| Arc::clone(&config), deadline)
    }

    /// Answers with the configuration of the service that the caller asks for.
    pub(crate) fn answer_with(
        socket: TcpStream,
        choose: &dyn Fn(Option<Service>) -> Arc<ServerConfig>,
        deadline: HandshakeDeadline<'_>,
    ) -> Result<Self, HandshakeError> {
        socket.set_nodelay(true).map_err(HandshakeError::Io)?;
        let mut session = Connection::from(accept(&socket, deadline, choose)?);
        drive(&socket, &mut session, deadline, None)?;
        session.writer().write_all(&[WELCOME]).map_err(HandshakeError::Io)?;
        drive(&socket, &mut session, deadline, None)?;
        Self::secured(socket, session)
    }

    fn secured(socket: TcpStream, mut session: Connection) -> Result<Self, HandshakeError> {
        socket.set_read_timeout(None).map_err(HandshakeError::Io)?;
        socket.set_write_timeout(None).map_err(HandshakeError::Io)?;
        // What is sealed at a time is bounded here.
        session.set_buffer_limit(None);
        let peer = session.peer_certificates().and_then(|chain| peer_of(chain.first()?));
        let service = session.alpn_protocol().and_then(Service::of_protocol);
        let incoming = Incoming { bytes: vec![0; READ_BYTES], start: 0, end: 0 };
        let secured = Secured {
            session: Mutex::new(session),
            incoming: Mutex::new(incoming),
            outgoing: Mutex::default(),
            peer,
            service,
        };
        Ok(Self(Arc::new(Inner { socket, secured: Some(secured) })))
    }

    /// The peer; unknown without TLS, and of a caller that adds a node to a cluster.
    #[must_use]
    pub fn peer(&self) -> Option<Peer> {
        self.0.secured.as_ref()?.peer
    }

    /// The purpose of the connection; unknown without TLS.
    #[must_use]
    pub fn service(&self) -> Option<Service> {
        self.0.secured.as_ref()?.service
    }

    /// The socket, for its options and its end. Bytes go through the channel.
    #[must_use]
    pub fn socket(&self) -> &TcpStream {
        &self.0.socket
    }

    /// Declares that the next write is not a repetition of a failed one.
    pub fn begin(&self) {
        if let Some(secured) = &self.0.secured {
            lock(&secured.outgoing).carried = 0;
        }
    }

    /// See [`TcpStream::set_read_timeout`].
    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.0.socket.set_read_timeout(timeout)
    }

    /// See [`TcpStream::set_write_timeout`].
    pub fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.0.socket.set_write_timeout(timeout)
    }

    /// See [`TcpStream::shutdown`].
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        self.0.socket.shutdown(how)
    }

    /// Where the other end is.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.0.socket.peer_addr()
    }
}

fn unusable(error: crate::CredentialsError) -> HandshakeError {
    HandshakeError::Io(io::Error::other(error))
}

impl Secured {
    fn read(&self, mut socket: &TcpStream, into: &mut [u8]) -> io::Result<usize> {
        if into.is_empty() {
            return Ok(0);
        }
        let mut incoming = lock(&self.incoming);
        let mut waited = false;
        loop {
            {
                let mut session = lock(&self.session);
                match session.reader().read(into) {
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(0),
                    result => return result,
                }
                let Incoming { bytes, start, end } = &mut *incoming;
                if *start < *end {
                    let mut rest = &bytes[*start..*end];
                    *start += session.read_tls(&mut rest)?;
                    session
                        .process_new_packets()
                        .map_err(|error| io::Error::new(ErrorKind::InvalidData, error))?;
                    continue;
                }
            }
            if waited {
                return Err(ErrorKind::Interrupted.into());
            }
            let count = socket.read(&mut incoming.bytes)?;
            if count == 0 {
                return Ok(0);
            }
            (incoming.start, incoming.end) = (0, count);
            waited = true;
        }
    }

    fn write(&self, socket: &TcpStream, bytes: &[u8]) -> io::Result<usize> {
        let mut outgoing = lock(&self.outgoing);
        outgoing.flush(socket)?;
        if outgoing.carried > 0 {
            let count = outgoing.carried.min(bytes.len());
            outgoing.carried = 0;
            return Ok(count);
        }
        let count = {
            let mut session = lock(&self.session);
            let count = session.writer().write(&bytes[..bytes.len().min(SEAL_BYTES)])?;
            while session.wants_write() {
                session.write_tls(&mut outgoing.sealed)?;
            }
            count
        };
        outgoing.carried = count;
        outgoing.flush(socket)?;
        outgoing.carried = 0;
        Ok(count)
    }
}

impl Read for &Channel {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let Inner { socket, secured } = &*self.0;
        match secured {
            None => (&mut &*socket).read(into),
            Some(secured) => secured.read(socket, into),
        }
    }
}

impl Write for &Channel {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let Inner { socket, secured } = &*self.0;
        match secured {
            None => (&mut &*socket).write(bytes),
            Some(secured) => secured.write(socket, bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for Channel {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        (&mut &*self).read(into)
    }
}

impl Write for Channel {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (&mut &*self).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
