//! The node's port: accepts connections, each on a thread of its own.

use std::{
    collections::HashMap,
    io,
    net::{Shutdown as Direction, SocketAddr, TcpListener, TcpStream, ToSocketAddrs},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use serde_json::Value;
use shardpack_manifests::transfer::Timeouts;

use super::{
    connection::Connection,
    event::{Observer, ReceiveEvent},
    store::{PackageDir, Store},
};

/// Starts the engine of the rank whose package this is, with the controller's parameters, and
/// answers what the controller needs to reach it, or a sentence why not.
pub type StartRankHook = Box<dyn Fn(&PackageDir, Value) -> Result<Value, String> + Send + Sync>;

/// Most connections at a time. Each may hold a chunk, or a manifest of up to 256 MiB.
const MAX_CONNECTIONS: usize = 16;

/// A pause after a failed accept, which may fail again at once (no more file descriptors).
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// How a node behaves.
pub struct NodeOptions {
    /// How long it waits for a controller.
    pub timeouts: Timeouts,
    /// Hears what it does.
    pub observer: Observer,
    /// Starts engines.
    pub start_rank: StartRankHook,
}

/// The node cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// An address beyond this machine.
    #[error(
        "{address} is not a loopback address: until connections are protected by mutual TLS, a node serves this machine alone (127.0.0.1 or ::1)"
    )]
    NotLoopback {
        /// The address.
        address: SocketAddr,
    },
    /// An address that means nothing.
    #[error("{address:?} is not an address with a port")]
    Address {
        /// As given.
        address: String,
        /// What the system said.
        source: io::Error,
    },
    /// The port cannot be had.
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
    let unknown = |source| ServeError::Address { address: address.to_owned(), source };
    let resolved: Vec<SocketAddr> = address.to_socket_addrs().map_err(unknown)?.collect();
    if let Some(address) = resolved.iter().find(|address| !is_loopback(address)) {
        return Err(ServeError::NotLoopback { address: *address });
    }
    let first = *resolved.first().ok_or_else(|| unknown(io::ErrorKind::NotFound.into()))?;
    TcpListener::bind(&*resolved).map_err(|source| ServeError::Listen { address: first, source })
}

fn is_loopback(address: &SocketAddr) -> bool {
    address.ip().to_canonical().is_loopback()
}

/// Ends a node from another thread; clones end the same one.
#[derive(Clone, Default)]
pub struct Shutdown {
    inner: Arc<Served>,
}

#[derive(Default)]
struct Served {
    stopped: AtomicBool,
    address: Mutex<Option<SocketAddr>>,
    streams: Mutex<HashMap<u64, TcpStream>>,
    next: AtomicU64,
}

impl Shutdown {
    /// A node that serves until told otherwise.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Closes the port and all connections. What was stored stays; a verification under way ends
    /// first.
    pub fn stop(&self) {
        self.inner.stopped.store(true, Ordering::SeqCst);
        for stream in lock(&self.inner.streams).values() {
            let _ = stream.shutdown(Direction::Both);
        }
        let address = *lock(&self.inner.address);
        if let Some(address) = address {
            // Wakes the thread that waits for a connection.
            let _ = TcpStream::connect_timeout(&address, Duration::from_secs(1));
        }
    }

    fn is_stopped(&self) -> bool {
        self.inner.stopped.load(Ordering::SeqCst)
    }

    /// Makes `stop` close the stream too, unless there are too many or it has come too late.
    fn register(&self, stream: &TcpStream) -> Option<Registration<'_>> {
        let mut streams = lock(&self.inner.streams);
        if streams.len() >= MAX_CONNECTIONS || self.is_stopped() {
            return None;
        }
        let number = self.inner.next.fetch_add(1, Ordering::Relaxed);
        streams.insert(number, stream.try_clone().ok()?);
        Some(Registration { shutdown: self, number })
    }
}

struct Registration<'a> {
    shutdown: &'a Shutdown,
    number: u64,
}

impl Drop for Registration<'_> {
    fn drop(&mut self) {
        lock(&self.shutdown.inner.streams).remove(&self.number);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Answers controllers over a store.
pub struct Node {
    pub(super) store: Arc<Store>,
    pub(super) options: NodeOptions,
}

impl Node {
    /// A node over `store`.
    #[must_use]
    pub fn new(store: Arc<Store>, options: NodeOptions) -> Self {
        Self { store, options }
    }

    /// Serves until `shutdown` says otherwise, and until the last connection has ended.
    pub fn serve(&self, listener: &TcpListener, shutdown: &Shutdown) -> Result<(), ServeError> {
        let address = listener.local_addr().map_err(ServeError::Listener)?;
        if !is_loopback(&address) {
            return Err(ServeError::NotLoopback { address });
        }
        *lock(&shutdown.inner.address) = Some(address);
        thread::scope(|scope| {
            while !shutdown.is_stopped() {
                let Ok((stream, peer)) = listener.accept() else {
                    thread::sleep(ACCEPT_PAUSE);
                    continue;
                };
                // A listener on loopback gets none from elsewhere; a strange route might.
                if !is_loopback(&peer) {
                    continue;
                }
                let Some(registration) = shutdown.register(&stream) else { continue };
                scope.spawn(move || {
                    let _registration = registration;
                    self.answer(stream, peer);
                });
            }
        });
        Ok(())
    }

    fn answer(&self, stream: TcpStream, peer: SocketAddr) {
        (self.options.observer)(&ReceiveEvent::Connected { peer });
        let problem = Connection::new(self, stream).run().err();
        (self.options.observer)(&ReceiveEvent::Disconnected { peer, problem });
    }
}
