//! A rank process's life: be found by a front, load, form groups, serve, end with the front.
//!
//! The calling thread keeps the connection to the front and says every second that the process
//! lives; a second thread loads, connects to the peers and runs the engine ([`worker`]).

mod commands;
mod worker;

use std::{
    error::Error,
    io,
    net::TcpListener,
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use shardpack_collectives::Deadline;
use shardpack_engine::engine::RankEngine;
use shardpack_engine_api::Event;
use shardpack_identity::{Channel, Credentials};
use shardpack_sensors::Sensors;

use super::{
    acceptor::{Acceptor, refuse},
    identity::Identity,
    mesh::{MAX_WAITING_PEERS, Mailbox, PeerConnection},
    message::{FromRank, Opening, PROTOCOL, Progress, ToRank},
    token::Token,
    vitals::Pace,
    wire::{self, MAX_MESSAGE_BYTES, Sender, WireError},
};
use commands::{NotTaken, Order, Orderer};
use worker::{Current, Worker};

/// How often the front hears that the process runs.
pub(super) const ALIVE_INTERVAL: Duration = Duration::from_secs(1);

/// How long the engine may take to leave its step when the process ends. Loading is not waited
/// for: the process's end ends it.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(2);

/// Most notes that wait for the calling thread, which takes each at once. Beyond that a front is
/// not read from until there is room, so that it waits itself, and other callers are refused.
const MAX_NOTES: usize = 64;

/// Why a package could not be loaded; the chain of sources is told to the front.
pub type LoadError = Box<dyn Error + Send + Sync>;

/// How a rank deals with what is outside its group.
#[derive(Clone, Debug)]
pub struct RankOptions {
    /// How long it waits for a front to connect, before it takes it for dead.
    pub front_timeout: Duration,
    /// Its node's certificate and key: front and peers are then spoken to inside TLS alone.
    pub credentials: Option<Credentials>,
}

impl Default for RankOptions {
    fn default() -> Self {
        // A front connects as soon as it has read the announcement.
        Self { front_timeout: Duration::from_mins(1), credentials: None }
    }
}

/// Why a rank process ended otherwise than by the front's wish.
#[derive(Debug, thiserror::Error)]
pub enum RankError {
    /// Nobody came.
    #[error("no front connected within {} s", .waited.as_secs())]
    NoFront {
        /// How long was waited.
        waited: Duration,
    },
    /// The front's connection ended or made no sense.
    #[error("the front is gone")]
    FrontGone(#[source] WireError),
    /// The front sent more orders than any could mean.
    #[error("the front does not stop giving orders; thousands wait")]
    Flooded,
    /// The package could not be loaded.
    #[error("the package cannot be loaded: {0}")]
    Load(String),
    /// Our bug.
    #[error("the engine's thread panicked")]
    Panicked,
    /// No threads or sockets.
    #[error("the system gave no thread or socket")]
    System(#[from] io::Error),
}

/// What the calling thread learns.
enum Note {
    Control { opening: Opening, stream: Channel },
    FromFront(ToRank),
    FrontGone(WireError),
    WorkerDone(Result<(), RankError>),
}

/// Serves one package behind `listener`, whose address and `token` the caller announces, until
/// the front ends it. `load` runs while the front listens; its argument reports progress.
///
/// After an error the engine's thread may still run; the process is expected to end.
pub fn run_rank<L>(
    listener: TcpListener,
    token: Token,
    identity: Identity,
    options: RankOptions,
    load: L,
) -> Result<(), RankError>
where
    L: FnOnce(&mut dyn FnMut(Progress)) -> Result<Box<dyn RankEngine>, LoadError> + Send + 'static,
{
    let (notes, noted) = sync_channel(MAX_NOTES);
    let (peers, peer_connections) = sync_channel(MAX_WAITING_PEERS);
    let admit = admit(notes.clone(), peers);
    let RankOptions { front_timeout, credentials } = options;
    let _acceptor = Acceptor::start(listener, token, credentials.clone(), admit)?;
    let front = wait_for_front(&noted, front_timeout)?;
    let sender = Arc::new(Sender::new(front.clone())?);
    let result = (|| {
        sender.send(&FromRank::Identity(identity.clone())).map_err(RankError::FrontGone)?;
        read_front(front, notes.clone())?;
        let (orders, ordered) = commands::orders();
        let current = Arc::new(Current::default());
        let pace = Arc::new(Pace::default());
        let worker = Worker {
            identity,
            credentials,
            orders: ordered,
            mailbox: Mailbox::new(peer_connections),
            front: Arc::clone(&sender),
            current: Arc::clone(&current),
            pace: Arc::clone(&pace),
        };
        start_worker(worker, load, notes)?;
        let result = keep(&noted, &sender, &orders, &current, &pace);
        current.end("the rank ends");
        drop(orders);
        result.unwrap_or_else(|| wait_for_worker(&noted))
    })();
    sender.close();
    result
}

/// Passes connections on; those that nobody has time for are refused, since whoever has the token
/// could otherwise take all memory with them.
fn admit(
    notes: SyncSender<Note>,
    peers: SyncSender<PeerConnection>,
) -> impl Fn(Opening, Channel) + Send + Sync {
    // Who comes after the end is not served.
    move |opening, stream| {
        let turned_away = match opening {
            Opening::Control { .. } => match notes.try_send(Note::Control { opening, stream }) {
                Err(TrySendError::Full(Note::Control { opening, stream })) => (opening, stream),
                Ok(()) | Err(_) => return,
            },
            Opening::Peer { .. } => match peers.try_send(PeerConnection { opening, stream }) {
                Err(TrySendError::Full(PeerConnection { opening, stream })) => (opening, stream),
                Ok(()) | Err(_) => return,
            },
        };
        let (opening, stream) = turned_away;
        refuse(&stream, &opening, "as many connections as any group has wait here already");
    }
}

/// The connection of a front that speaks this protocol.
fn wait_for_front(notes: &Receiver<Note>, timeout: Duration) -> Result<Channel, RankError> {
    let deadline = Deadline::after(timeout);
    loop {
        let Ok(note) = notes.recv_timeout(deadline.left()) else {
            return Err(RankError::NoFront { waited: timeout });
        };
        let Note::Control { opening, stream } = note else { continue };
        match opening {
            Opening::Control { protocol, .. } if protocol != PROTOCOL => {
                let reason =
                    format!("this rank speaks protocol version {PROTOCOL}, not {protocol}");
                refuse(&stream, &opening, &reason);
            }
            _ => return Ok(stream),
        }
    }
}

/// Passes on what the front says, from a thread that ends with the connection.
fn read_front(mut front: Channel, notes: SyncSender<Note>) -> io::Result<()> {
    front.set_read_timeout(None)?;
    let read = move || {
        loop {
            let note = match wire::read(&mut front, MAX_MESSAGE_BYTES) {
                Ok(message) => Note::FromFront(message),
                Err(error) => Note::FrontGone(error),
            };
            let last = matches!(note, Note::FrontGone(_));
            if notes.send(note).is_err() || last {
                return;
            }
        }
    };
    thread::Builder::new().name("front".to_owned()).spawn(read).map(drop)
}

/// Says that the worker is done, however its thread ends.
struct Done {
    notes: SyncSender<Note>,
    result: Option<Result<(), RankError>>,
}

impl Drop for Done {
    fn drop(&mut self) {
        let result = self.result.take().unwrap_or(Err(RankError::Panicked));
        // Nobody waits when the front has gone.
        let _ = self.notes.send(Note::WorkerDone(result));
    }
}

fn start_worker<L>(worker: Worker, load: L, notes: SyncSender<Note>) -> io::Result<()>
where
    L: FnOnce(&mut dyn FnMut(Progress)) -> Result<Box<dyn RankEngine>, LoadError> + Send + 'static,
{
    let run = move || {
        let mut done = Done { notes, result: None };
        done.result = Some(worker.run(load));
    };
    thread::Builder::new().name("engine".to_owned()).spawn(run).map(drop)
}

/// Carries out what the front says. Returns once the process is to end: with the result, or none
/// where the worker's is to be waited for.
fn keep(
    notes: &Receiver<Note>,
    front: &Sender,
    orders: &Orderer,
    current: &Current,
    pace: &Pace,
) -> Option<Result<(), RankError>> {
    let mut next_alive = Instant::now() + ALIVE_INTERVAL;
    // Looking for sensors takes a moment on some machines; nobody waits for it.
    let mut sensors = None;
    loop {
        let left = next_alive.saturating_duration_since(Instant::now());
        let order = match notes.recv_timeout(left) {
            Err(RecvTimeoutError::Timeout) => {
                // A connection that fails here fails the reading thread too, which says so.
                let _ = front.send(&FromRank::Alive);
                let machine = sensors.get_or_insert_with(Sensors::open).read();
                let _ = front.send(&FromRank::Vitals(pace.report(machine)));
                next_alive = Instant::now() + ALIVE_INTERVAL;
                continue;
            }
            Err(RecvTimeoutError::Disconnected) => return Some(Err(RankError::Panicked)),
            Ok(Note::Control { opening, stream }) => {
                refuse(&stream, &opening, "this rank has a front already");
                continue;
            }
            Ok(Note::FrontGone(error)) => return Some(Err(RankError::FrontGone(error))),
            Ok(Note::WorkerDone(result)) => {
                if let Err(error) = &result {
                    // A front that is gone need not be told.
                    let _ = front.send(&FromRank::Failed(error.to_string()));
                }
                return Some(result);
            }
            Ok(Note::FromFront(ToRank::Shutdown)) => return None,
            Ok(Note::FromFront(ToRank::Form { epoch, peers })) => {
                current.supersede(epoch);
                Order::Form { epoch, peers }
            }
            Ok(Note::FromFront(ToRank::Submit { id, request })) => Order::Submit(id, request),
            Ok(Note::FromFront(ToRank::Cancel(id))) => Order::Cancel(id),
        };
        match orders.give(order) {
            Ok(()) => {}
            Err(NotTaken::Request(request)) => {
                let most = commands::MAX_WAITING_REQUESTS;
                let message = format!("{most} requests wait for the model already");
                let event = Event::Failed { request, message, retryable: true };
                // A front that is gone need not be told.
                let _ = front.send(&FromRank::Event(event));
            }
            Err(NotTaken::Flood) => return Some(Err(RankError::Flooded)),
        }
    }
}

fn wait_for_worker(notes: &Receiver<Note>) -> Result<(), RankError> {
    let deadline = Deadline::after(LEAVE_TIMEOUT);
    loop {
        match notes.recv_timeout(deadline.left()) {
            Ok(Note::WorkerDone(Err(RankError::Panicked))) => return Err(RankError::Panicked),
            // The front wanted the end, so a worker that is busy, or failed now, is no news.
            Ok(Note::WorkerDone(_)) | Err(_) => return Ok(()),
            Ok(_) => {}
        }
    }
}
