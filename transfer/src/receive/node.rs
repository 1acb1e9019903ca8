//! The node's port: accepts connections, each on a thread of its own.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown as Direction, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;
use shardpack_identity::{
    ConnectionOutcome, ConnectionSlot, ConnectionSlots, Guard, HandshakeError, is_local,
    resolve_address,
};

use super::{
    connection::Connection,
    event::{Observer, ReceiveEvent},
    store::{PackageDir, Store},
};
use crate::protocol::Timeouts;

/// Starts the engine of the rank whose package this is, with the controller's parameters, and
/// answers what the controller needs to reach it, or a sentence why not.
pub type StartRankHook = Box<dyn Fn(&PackageDir, Value) -> Result<Value, String> + Send + Sync>;

/// Carries out an operation by its name, with the controller's parameters; `None` of one that it does
/// not know.
pub type OperateHook = Box<dyn Fn(&str, Value) -> Option<Result<Value, String>> + Send + Sync>;

/// Most authenticated connections at a time. Each may hold a chunk, or a
/// manifest of up to 256 MiB.
const MAX_CONNECTIONS: usize = 16;

/// Of these, connections of other nodes, which fetch files of a push: one per push and node in a chain, and
/// never so many that a controller is kept out.
const MAX_RELAYS: usize = 4;

/// Slots for connections that have not authenticated; each costs a thread for the few seconds that
/// a handshake may take, or until a new connection evicts it.
const UNAUTHENTICATED_SLOTS: usize = 64;

/// Of these, slots for one address: more than a controller ever opens at the same time.
const UNAUTHENTICATED_SLOTS_PER_ADDRESS: usize = 8;

/// A pause after a failed accept, which may fail again at once (no more file descriptors).
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// How long a new connection waits for the threads of evicted ones to end.
const EVICTION_WAIT: Duration = Duration::from_secs(2);

/// How a node behaves.
pub struct NodeOptions {
    /// How long it waits for a controller.
    pub timeouts: Timeouts,
    /// Receives its events.
    pub observer: Observer,
    /// Starts engines.
    pub start_rank: StartRankHook,
}

/// The node cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// An address beyond this machine.
    #[error(
        "{address} is not a loopback address: a node without mutual TLS serves only this machine (127.0.0.1 or ::1)"
    )]
    NotLoopback {
        /// The address.
        address: SocketAddr,
    },
    /// An address that cannot be resolved.
    #[error("{address:?} is not an address with a port")]
    Address {
        /// As given.
        address: String,
        /// What the system said.
        source: io::Error,
    },
    /// The port cannot be listened on.
    #[error("could not listen on {address}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// What the system said.
        source: io::Error,
    },
    /// The listener's own address is unknown.
    #[error("could not ask the listener for its address")]
    Listener(#[source] io::Error),
}

/// Listens on a loopback address (`127.0.0.1:0` takes any free port).
pub fn bind(address: &str) -> Result<TcpListener, ServeError> {
    let resolved = resolve(address)?;
    match resolved.iter().find(|address| !is_local(address.ip())) {
        Some(address) => Err(ServeError::NotLoopback { address: *address }),
        None => listen(&resolved),
    }
}

/// Listens on any address, for a node with a [`Guard`].
pub fn bind_guarded(address: &str) -> Result<TcpListener, ServeError> {
    listen(&resolve(address)?)
}

fn resolve(address: &str) -> Result<Vec<SocketAddr>, ServeError> {
    let unknown = |source| ServeError::Address { address: address.to_owned(), source };
    let resolved: Vec<SocketAddr> = resolve_address(address).map_err(unknown)?;
    if resolved.is_empty() {
        return Err(unknown(io::ErrorKind::NotFound.into()));
    }
    Ok(resolved)
}

fn listen(addresses: &[SocketAddr]) -> Result<TcpListener, ServeError> {
    TcpListener::bind(addresses)
        .map_err(|source| ServeError::Listen { address: addresses[0], source })
}

/// Ends a node from another thread; clones end the same one.
#[derive(Clone, Default)]
pub struct Shutdown {
    inner: Arc<Served>,
}

struct Served {
    stopped: AtomicBool,
    address: Mutex<Option<SocketAddr>>,
    connections: Mutex<Connections>,
    next: AtomicU64,
    unauthenticated: Arc<ConnectionSlots>,
}

impl Default for Served {
    fn default() -> Self {
        Self {
            stopped: AtomicBool::default(),
            address: Mutex::default(),
            connections: Mutex::default(),
            next: AtomicU64::default(),
            unauthenticated: ConnectionSlots::within_descriptors(
                UNAUTHENTICATED_SLOTS,
                UNAUTHENTICATED_SLOTS_PER_ADDRESS,
            ),
        }
    }
}

#[derive(Default)]
struct Connections {
    streams: HashMap<u64, TcpStream>,
    authenticated: usize,
    /// Of these, other nodes'.
    relays: usize,
}

/// Whether a connection is authenticated; until then it holds a slot from which it may be evicted.
enum Authentication {
    Done,
    /// As another node.
    Node,
    Pending(ConnectionSlot),
}

impl Shutdown {
    /// A node that serves until [`Self::stop`].
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether it was stopped.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.inner.stopped.load(Ordering::SeqCst)
    }

    /// Closes the port and all connections. What was stored stays; a verification under way ends
    /// first.
    pub fn stop(&self) {
        self.inner.stopped.store(true, Ordering::SeqCst);
        for stream in lock(&self.inner.connections).streams.values() {
            let _ = stream.shutdown(Direction::Both);
        }
        let address = *lock(&self.inner.address);
        if let Some(mut address) = address {
            if address.ip().is_unspecified() {
                address.set_ip(match address {
                    SocketAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
                    SocketAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
                });
            }
            // Wakes the thread that waits for a connection.
            let _ = TcpStream::connect_timeout(&address, Duration::from_secs(1));
        }
    }

    /// Makes `stop` close the stream too, unless there are too many or it has come too late.
    /// A connection from an address in `unauthenticated` has yet to authenticate. Those that it evicts
    /// end in a moment, which it waits for: on a busy machine their threads may not have run yet.
    fn register(
        &self,
        stream: &TcpStream,
        unauthenticated: Option<IpAddr>,
    ) -> Option<Registration<'_>> {
        let begun = Instant::now();
        let (clone, authentication) = loop {
            if let Some(entered) = self.enter(stream, unauthenticated) {
                break entered;
            }
            if self.is_stopped() || begun.elapsed() > EVICTION_WAIT {
                return None;
            }
            thread::sleep(ACCEPT_PAUSE);
        };
        let mut connections = lock(&self.inner.connections);
        if self.is_stopped() {
            return None;
        }
        if matches!(authentication, Authentication::Done) {
            connections.authenticate()?;
        }
        let number = self.inner.next.fetch_add(1, Ordering::Relaxed);
        connections.streams.insert(number, clone);
        Some(Registration { shutdown: self, number, authentication })
    }

    /// A second handle of the stream, and a slot if its caller has yet to authenticate; nothing where
    /// descriptors or slots are held by evicted connections.
    fn enter(
        &self,
        stream: &TcpStream,
        unauthenticated: Option<IpAddr>,
    ) -> Option<(TcpStream, Authentication)> {
        let clone = stream.try_clone().ok()?;
        let authentication = match unauthenticated {
            Some(ip) => Authentication::Pending(self.inner.unauthenticated.enter(ip, stream)?),
            None => Authentication::Done,
        };
        Some((clone, authentication))
    }
}

impl Connections {
    /// Counts one more authenticated connection, unless there are too many.
    fn authenticate(&mut self) -> Option<()> {
        let has_room = self.authenticated < MAX_CONNECTIONS;
        self.authenticated += usize::from(has_room);
        has_room.then_some(())
    }
}

struct Registration<'a> {
    shutdown: &'a Shutdown,
    number: u64,
    authentication: Authentication,
}

impl Registration<'_> {
    /// Marks the connection as authenticated; false if there are too many.
    fn authenticate(&mut self) -> bool {
        let has_room = lock(&self.shutdown.inner.connections).authenticate().is_some();
        if has_room {
            self.authentication = Authentication::Done;
        }
        has_room
    }

    /// Marks the connection as another node's; false if there are too many.
    fn authenticate_node(&mut self) -> bool {
        let mut connections = lock(&self.shutdown.inner.connections);
        let has_room = connections.relays < MAX_RELAYS && connections.authenticate().is_some();
        if has_room {
            connections.relays += 1;
            drop(connections);
            self.authentication = Authentication::Node;
        }
        has_room
    }

    /// Whether it was evicted from its slot.
    fn has_lost(&self) -> bool {
        matches!(&self.authentication, Authentication::Pending(slot) if slot.is_lost())
    }

    /// Ends all other connections.
    fn close_others(&self) {
        let connections = lock(&self.shutdown.inner.connections);
        for (_, stream) in connections.streams.iter().filter(|(number, _)| **number != self.number)
        {
            let _ = stream.shutdown(Direction::Both);
        }
    }
}

impl Drop for Registration<'_> {
    fn drop(&mut self) {
        let mut connections = lock(&self.shutdown.inner.connections);
        connections.streams.remove(&self.number);
        let is_node = matches!(self.authentication, Authentication::Node);
        let is_done = is_node || matches!(self.authentication, Authentication::Done);
        connections.authenticated -= usize::from(is_done);
        connections.relays -= usize::from(is_node);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Answers controllers over a store.
pub struct Node {
    pub(super) store: Arc<Store>,
    pub(super) options: NodeOptions,
    pub(super) guard: Option<Arc<Guard>>,
    pub(super) operate: Option<OperateHook>,
}

impl Node {
    /// A node over `store`, for this machine only.
    #[must_use]
    pub fn new(store: Arc<Store>, options: NodeOptions) -> Self {
        Self { store, options, guard: None, operate: None }
    }

    /// Requires TLS, and accepts only callers that `guard` admits.
    #[must_use]
    pub fn with_guard(self, guard: Arc<Guard>) -> Self {
        Self { guard: Some(guard), ..self }
    }

    /// Carries out operations with `operate`.
    #[must_use]
    pub fn with_operations(self, operate: OperateHook) -> Self {
        Self { operate: Some(operate), ..self }
    }

    /// Serves until `shutdown` says otherwise, and until the last connection has ended.
    pub fn serve(&self, listener: &TcpListener, shutdown: &Shutdown) -> Result<(), ServeError> {
        let address = listener.local_addr().map_err(ServeError::Listener)?;
        if self.guard.is_none() && !is_local(address.ip()) {
            return Err(ServeError::NotLoopback { address });
        }
        *lock(&shutdown.inner.address) = Some(address);
        thread::scope(|scope| {
            while !shutdown.is_stopped() {
                let Ok((stream, peer)) = listener.accept() else {
                    thread::sleep(ACCEPT_PAUSE);
                    continue;
                };
                let unauthenticated = match self.guard {
                    Some(_) => Some(peer.ip()),
                    None if is_local(peer.ip()) => None,
                    // A listener on loopback gets none from elsewhere; a strange route might.
                    None => continue,
                };
                let Some(registration) = shutdown.register(&stream, unauthenticated) else {
                    continue;
                };
                scope.spawn(move || self.answer(stream, peer, registration));
            }
        });
        Ok(())
    }

    fn answer(&self, stream: TcpStream, peer: SocketAddr, registration: Registration<'_>) {
        let tell = |event| (self.options.observer)(&event);
        tell(ReceiveEvent::Connected { peer });
        let problem = match &self.guard {
            None => Connection::new(self, stream.into()).run().err(),
            Some(guard) => self.receive(guard, stream, registration).err(),
        };
        tell(ReceiveEvent::Disconnected { peer, problem });
    }

    /// Lets a caller in, if the guard does.
    fn receive(
        &self,
        guard: &Guard,
        stream: TcpStream,
        mut registration: Registration<'_>,
    ) -> Result<(), String> {
        let received = guard.receive(stream, &|| registration.has_lost());
        let why = |error: HandshakeError| {
            let lost = registration.has_lost();
            if lost {
                "evicted to make room for other connections".to_owned()
            } else {
                error.to_string()
            }
        };
        let event = match received.map_err(why)? {
            ConnectionOutcome::Controller(channel) if registration.authenticate() => {
                return Connection::new(self, channel).run();
            }
            ConnectionOutcome::Relay(channel) if registration.authenticate_node() => {
                return Connection::new(self, channel).run();
            }
            ConnectionOutcome::Relay(_) => {
                return Err(format!("{MAX_RELAYS} other nodes are being served already"));
            }
            ConnectionOutcome::Controller(_) => {
                return Err(format!("there are {MAX_CONNECTIONS} connections already"));
            }
            ConnectionOutcome::Refused(reason) => return Err(reason),
            ConnectionOutcome::Joined(joined) => ReceiveEvent::JoinedCluster(joined),
            ConnectionOutcome::Renewed(joined) => ReceiveEvent::Renewed(joined),
            ConnectionOutcome::Left(_) => {
                // They are of the controller that it has left.
                registration.close_others();
                ReceiveEvent::LeftCluster
            }
        };
        (self.options.observer)(&event);
        Ok(())
    }
}
