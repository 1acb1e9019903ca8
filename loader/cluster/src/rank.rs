//! The lifecycle of a rank process: wait for a front, load, form groups, serve, end with the front.
//!
//! The calling thread keeps the connection to the front and sends a heartbeat every second; a
//! second thread loads, connects to the peers and runs the engine ([`worker`]).

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
    message::{FromRank, Hello, PROTOCOL, Progress, ToRank},
    token::Token,
    vitals::StepStats,
    wire::{self, MAX_MESSAGE_BYTES, Sender, WireError},
};
use commands::{Command, CommandSender, Rejected};
use worker::{CurrentGroup, Worker};

/// Heartbeat interval to the front.
pub(super) const ALIVE_INTERVAL: Duration = Duration::from_secs(1);

/// How long the engine may take to leave its step when the process ends. Loading is not waited
/// for: the process's end ends it.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(2);

/// Most events that wait for the calling thread, which takes each at once. Beyond that a front is
/// not read from until there is room, so that it waits itself, and other callers are refused.
const MAX_EVENTS: usize = 64;

/// Why a package could not be loaded; the front receives the chain of sources.
pub type LoadError = Box<dyn Error + Send + Sync>;

/// Options of a rank process.
#[derive(Clone, Debug)]
pub struct RankOptions {
    /// How long it waits for a front to connect.
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
    /// No front connected.
    #[error("no front connected within {} s", .waited.as_secs())]
    NoFront {
        /// How long was waited.
        waited: Duration,
    },
    /// The front's connection ended or made no sense.
    #[error("lost the connection to the front")]
    FrontGone(#[source] WireError),
    /// The front sent more commands than a working front could.
    #[error("the front sent too many commands: thousands are queued")]
    Flooded,
    /// The package could not be loaded.
    #[error("the package cannot be loaded: {0}")]
    Load(String),
    /// The device may refuse further work of this process; a new one begins with a fresh driver.
    #[error("the device failed in a step: {0}")]
    Device(String),
    /// Our bug.
    #[error("the engine's thread panicked")]
    Panicked,
    /// No threads or sockets.
    #[error("the system gave no thread or socket")]
    System(#[from] io::Error),
}

/// An event for the calling thread.
enum RankThreadEvent {
    Control { hello: Hello, stream: Channel },
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
    let (events, received) = sync_channel(MAX_EVENTS);
    let (peers, peer_connections) = sync_channel(MAX_WAITING_PEERS);
    let admit = admit(events.clone(), peers);
    let RankOptions { front_timeout, credentials } = options;
    let _acceptor = Acceptor::start(listener, token, credentials.clone(), admit)?;
    let front = wait_for_front(&received, front_timeout)?;
    let sender = Arc::new(Sender::new(front.clone())?);
    let result = (|| {
        sender.send(&FromRank::Identity(identity.clone())).map_err(RankError::FrontGone)?;
        read_front(front, events.clone())?;
        let (commands, receiver) = commands::channel();
        let current = Arc::new(CurrentGroup::default());
        let stats = Arc::new(StepStats::default());
        let worker = Worker {
            identity,
            credentials,
            commands: receiver,
            mailbox: Mailbox::new(peer_connections),
            front: Arc::clone(&sender),
            current: Arc::clone(&current),
            stats: Arc::clone(&stats),
        };
        start_worker(worker, load, events)?;
        let result = supervise_worker(&received, &sender, &commands, &current, &stats);
        current.end("the rank ends");
        drop(commands);
        result.unwrap_or_else(|| wait_for_worker(&received))
    })();
    sender.close();
    result
}

/// Queues connections; when a queue is full they are refused, since a peer with the token could
/// otherwise exhaust the memory.
fn admit(
    events: SyncSender<RankThreadEvent>,
    peers: SyncSender<PeerConnection>,
) -> impl Fn(Hello, Channel) + Send + Sync {
    // Who comes after the end is not served.
    move |hello, stream| {
        let turned_away = match hello {
            Hello::Control { .. } => {
                match events.try_send(RankThreadEvent::Control { hello, stream }) {
                    Err(TrySendError::Full(RankThreadEvent::Control { hello, stream })) => {
                        (hello, stream)
                    }
                    Ok(()) | Err(_) => return,
                }
            }
            Hello::Peer { .. } => match peers.try_send(PeerConnection { hello, stream }) {
                Err(TrySendError::Full(PeerConnection { hello, stream })) => (hello, stream),
                Ok(()) | Err(_) => return,
            },
        };
        let (hello, stream) = turned_away;
        refuse(&stream, &hello, "too many connections are pending");
    }
}

/// Waits for the connection of a front with this protocol version.
fn wait_for_front(
    events: &Receiver<RankThreadEvent>,
    timeout: Duration,
) -> Result<Channel, RankError> {
    let deadline = Deadline::after(timeout);
    loop {
        let Ok(event) = events.recv_timeout(deadline.left()) else {
            return Err(RankError::NoFront { waited: timeout });
        };
        let RankThreadEvent::Control { hello, stream } = event else { continue };
        match hello {
            Hello::Control { protocol, .. } if protocol != PROTOCOL => {
                let reason =
                    format!("this rank speaks protocol version {PROTOCOL}, not {protocol}");
                refuse(&stream, &hello, &reason);
            }
            _ => return Ok(stream),
        }
    }
}

/// Forwards the front's messages, on a thread that ends with the connection.
fn read_front(mut front: Channel, events: SyncSender<RankThreadEvent>) -> io::Result<()> {
    front.set_read_timeout(None)?;
    let read = move || {
        loop {
            let event = match wire::read(&mut front, MAX_MESSAGE_BYTES) {
                Ok(message) => RankThreadEvent::FromFront(message),
                Err(error) => RankThreadEvent::FrontGone(error),
            };
            let last = matches!(event, RankThreadEvent::FrontGone(_));
            if events.send(event).is_err() || last {
                return;
            }
        }
    };
    thread::Builder::new().name("front".to_owned()).spawn(read).map(drop)
}

/// Reports that the worker is done, however its thread ends.
struct Done {
    events: SyncSender<RankThreadEvent>,
    result: Option<Result<(), RankError>>,
}

impl Drop for Done {
    fn drop(&mut self) {
        let result = self.result.take().unwrap_or(Err(RankError::Panicked));
        // Nobody waits when the front has gone.
        let _ = self.events.send(RankThreadEvent::WorkerDone(result));
    }
}

fn start_worker<L>(worker: Worker, load: L, events: SyncSender<RankThreadEvent>) -> io::Result<()>
where
    L: FnOnce(&mut dyn FnMut(Progress)) -> Result<Box<dyn RankEngine>, LoadError> + Send + 'static,
{
    let run = move || {
        let mut done = Done { events, result: None };
        done.result = Some(worker.run(load));
    };
    thread::Builder::new().name("engine".to_owned()).spawn(run).map(drop)
}

/// Executes the front's messages. Returns once the process is to end: with the result, or none
/// where the worker's is to be waited for.
fn supervise_worker(
    events: &Receiver<RankThreadEvent>,
    front: &Sender,
    commands: &CommandSender,
    current: &CurrentGroup,
    stats: &StepStats,
) -> Option<Result<(), RankError>> {
    let mut next_alive = Instant::now() + ALIVE_INTERVAL;
    // Looking for sensors takes a moment on some machines; nobody waits for it.
    let mut sensors = None;
    loop {
        let left = next_alive.saturating_duration_since(Instant::now());
        let command = match events.recv_timeout(left) {
            Err(RecvTimeoutError::Timeout) => {
                // A connection that fails here fails the reading thread too, which says so.
                let _ = front.send(&FromRank::Alive);
                let machine = sensors.get_or_insert_with(Sensors::open).read();
                let _ = front.send(&FromRank::Vitals(stats.report(machine)));
                next_alive = Instant::now() + ALIVE_INTERVAL;
                continue;
            }
            Err(RecvTimeoutError::Disconnected) => return Some(Err(RankError::Panicked)),
            Ok(RankThreadEvent::Control { hello, stream }) => {
                refuse(&stream, &hello, "this rank has a front already");
                continue;
            }
            Ok(RankThreadEvent::FrontGone(error)) => return Some(Err(RankError::FrontGone(error))),
            Ok(RankThreadEvent::WorkerDone(result)) => {
                if let Err(error) = &result {
                    // The front may have disconnected.
                    let _ = front.send(&FromRank::Failed(error.to_string()));
                }
                return Some(result);
            }
            Ok(RankThreadEvent::FromFront(ToRank::Shutdown)) => return None,
            Ok(RankThreadEvent::FromFront(ToRank::Form { epoch, peers })) => {
                current.supersede(epoch);
                Command::Form { epoch, peers }
            }
            Ok(RankThreadEvent::FromFront(ToRank::Submit { id, request })) => {
                Command::Submit(id, request)
            }
            Ok(RankThreadEvent::FromFront(ToRank::Cancel(id))) => Command::Cancel(id),
        };
        match commands.send(command) {
            Ok(()) => {}
            Err(Rejected::Request(request)) => {
                let most = commands::MAX_WAITING_REQUESTS;
                let message = format!("{most} requests are already waiting for the model");
                let event = Event::Failed { request, message, retryable: true };
                // The front may have disconnected.
                let _ = front.send(&FromRank::Event(event));
            }
            Err(Rejected::Flood) => return Some(Err(RankError::Flooded)),
        }
    }
}

fn wait_for_worker(events: &Receiver<RankThreadEvent>) -> Result<(), RankError> {
    let deadline = Deadline::after(LEAVE_TIMEOUT);
    loop {
        match events.recv_timeout(deadline.left()) {
            Ok(RankThreadEvent::WorkerDone(Err(RankError::Panicked))) => {
                return Err(RankError::Panicked);
            }
            // The front wanted the end, so a worker that is busy, or failed now, is no news.
            Ok(RankThreadEvent::WorkerDone(_)) | Err(_) => return Ok(()),
            Ok(_) => {}
        }
    }
}
