//! The lifecycle of a rank process: wait for a front, load, form groups, serve, end with the front or
//! keep the weights for the next one.
//!
//! The calling thread keeps the connection to the front and sends a heartbeat every second; a
//! second thread loads, connects to the peers and runs the engine ([`worker`]).

mod commands;
mod front;
mod step_watch;
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
use shardpack_engine::{engine::RankEngine, loading::WeightStream};
use shardpack_engine_api::Event;
use shardpack_identity::{Channel, Credentials};
use shardpack_sensors::Sensors;

use super::{
    acceptor::{Acceptor, refuse},
    identity::Identity,
    links::LinkMaker,
    mesh::{self, MAX_WAITING_PEERS, Mailbox, PeerConnection},
    message::{FromRank, Hello, LOWEST_PROTOCOL, PROTOCOL, Progress, ToRank, common_protocol},
    token::Token,
    vitals::StepStats,
    wire::{self, MAX_MESSAGE_BYTES, Sender, WireError},
};
use commands::{Command, CommandSender, Rejected};
use front::Front;
#[cfg(test)]
pub(super) use step_watch::MEASURED;
use step_watch::{Overdue, StepWatch};
use worker::{CurrentGroup, Worker};

/// Heartbeat interval to the front.
pub(super) const ALIVE_INTERVAL: Duration = Duration::from_millis(500);

/// Heartbeats between two reports of memory and steps.
const TICKS_PER_REPORT: u32 = 2;

/// How long the front may say nothing before it counts as gone: its machine may have lost power, which no
/// connection tells. More than a front needs that was stopped for a moment.
const FRONT_SILENCE: Duration = Duration::from_secs(30);

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
    /// How long the front may say nothing before it counts as gone. It is counted in heartbeats, so that
    /// a rank that was itself stopped does not blame its front.
    pub front_silence: Duration,
    /// How long it keeps its weights after a front has gone, for another one; zero: it ends with its
    /// front.
    pub keep: Duration,
    /// Is told whether there is a front, when that changes.
    pub on_front: fn(bool),
    /// Bytes of one token's hidden vector, the message that ranks exchange most.
    pub vector_bytes: usize,
    /// For the ranks to connect to each other.
    pub form_timeout: Duration,
    /// How long any step may take; longer ones are judged by the slowest before.
    pub step_timeout: Duration,
    /// Takes the front's connections on which the package comes, where the rank has none on its disk.
    pub weights: Option<SyncSender<Box<dyn WeightStream>>>,
}

/// How long who has the package may send or take nothing, on a connection on which it comes.
const WEIGHTS_TIMEOUT: Duration = Duration::from_secs(20);

/// Longer than a machine that is woken, or swaps for a moment, keeps a step waiting.
const STEP_TIMEOUT: Duration = Duration::from_secs(30);

/// Of a hidden size of 4096, in f32.
const COMMON_VECTOR_BYTES: usize = 16 << 10;

impl Default for RankOptions {
    fn default() -> Self {
        // A front connects as soon as it has read the announcement.
        Self {
            front_timeout: Duration::from_mins(1),
            credentials: None,
            front_silence: FRONT_SILENCE,
            keep: Duration::ZERO,
            on_front: |_| (),
            vector_bytes: COMMON_VECTOR_BYTES,
            form_timeout: mesh::FORM_TIMEOUT,
            step_timeout: STEP_TIMEOUT,
            weights: None,
        }
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
    /// The front sent nothing for too long.
    #[error("nothing came from the front for {} s", .waited.as_secs())]
    FrontSilent {
        /// How long.
        waited: Duration,
    },
    /// The front sent more commands than a working front could.
    #[error("the front sent too many commands: thousands are queued")]
    Flooded,
    /// The package could not be loaded.
    #[error("the package cannot be loaded: {0}")]
    Load(String),
    /// The device may refuse further work of this process; a new one begins with a fresh driver.
    #[error("the device failed in a step: {0}")]
    Device(String),
    /// The engine does not come back from a step.
    #[error(
        "a step has taken {} s and is not over, the slowest one before took {} ms: the device hangs",
        .taken.as_secs(), .slowest.as_millis()
    )]
    Stuck {
        /// How long it has taken.
        taken: Duration,
        /// How long the slowest one took.
        slowest: Duration,
    },
    /// Our bug.
    #[error("the engine's thread panicked")]
    Panicked,
    /// No threads or sockets.
    #[error("the system gave no thread or socket")]
    System(#[from] io::Error),
}

/// An event for the calling thread.
enum RankThreadEvent {
    Control {
        hello: Hello,
        stream: Channel,
    },
    /// Of the front of this number.
    FromFront(u32, ToRank),
    FrontGone(u32, WireError),
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
    let RankOptions {
        front_timeout,
        credentials,
        front_silence,
        keep,
        on_front,
        vector_bytes,
        form_timeout,
        step_timeout,
        weights,
    } = options;
    let admit = admit(events.clone(), peers, weights);
    let address = listener.local_addr()?;
    let _acceptor = Acceptor::start(listener, token, credentials.clone(), admit)?;
    let first = wait_for_front(&received, front_timeout)?;
    let (commands, receiver) = commands::channel();
    let current = Arc::new(CurrentGroup::default());
    let stats = Arc::new(StepStats::default());
    let watch = Arc::new(StepWatch::new(step_timeout));
    let front = Arc::new(Front::new(Arc::clone(&current)));
    let worker = Worker {
        identity,
        credentials,
        address,
        commands: receiver,
        mailbox: Mailbox::new(peer_connections),
        links: LinkMaker::new(vector_bytes),
        front: Arc::clone(&front),
        current: Arc::clone(&current),
        stats: Arc::clone(&stats),
        watch: Arc::clone(&watch),
        form_timeout,
    };
    let identity = worker.identity.clone();
    let mut fronts = Fronts {
        received: &received,
        events: &events,
        identity: &identity,
        front: &front,
        front_silence,
        watch: &watch,
        number: 0,
    };
    let keeping = (keep, on_front);
    let result = fronts.serve(first, (worker, load), keeping, (&commands, &current, &stats));
    current.end("the rank ends");
    drop(commands);
    let result = match result {
        Ok(Some(())) => Ok(()),
        Ok(None) => wait_for_worker(&received),
        Err(error) => Err(error),
    };
    front.leave();
    result
}

/// Heartbeats of this rank since the front said something.
struct FrontSilence {
    ticks: u32,
    most: Duration,
}

impl FrontSilence {
    const fn new(most: Duration) -> Self {
        Self { ticks: 0, most }
    }

    /// A heartbeat of this rank's; how long the front has been silent, where that is too long.
    fn tick(&mut self) -> Option<Duration> {
        self.ticks += 1;
        let waited = ALIVE_INTERVAL * self.ticks;
        (waited >= self.most).then_some(waited)
    }

    /// The front has said something.
    const fn end(&mut self) {
        self.ticks = 0;
    }
}

/// The fronts of a rank, one at a time.
struct Fronts<'a> {
    received: &'a Receiver<RankThreadEvent>,
    events: &'a SyncSender<RankThreadEvent>,
    identity: &'a Identity,
    front: &'a Front,
    front_silence: Duration,
    watch: &'a StepWatch,
    /// Of the present one; tells its messages from an earlier one's.
    number: u32,
}

/// Queues connections; when a queue is full they are refused, since a peer with the token could
/// otherwise exhaust the memory.
fn admit(
    events: SyncSender<RankThreadEvent>,
    peers: SyncSender<PeerConnection>,
    weights: Option<SyncSender<Box<dyn WeightStream>>>,
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
            Hello::Weights { .. } => {
                let has_timeouts = stream
                    .set_read_timeout(Some(WEIGHTS_TIMEOUT))
                    .and_then(|()| stream.set_write_timeout(Some(WEIGHTS_TIMEOUT)));
                // One that is not taken is closed: loading is over, or there are enough.
                if let (Ok(()), Some(weights)) = (has_timeouts, &weights) {
                    let _ = weights.try_send(Box::new(stream));
                }
                return;
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

/// Waits for the connection of a front that speaks a version which this rank speaks too.
fn wait_for_front(
    events: &Receiver<RankThreadEvent>,
    timeout: Duration,
) -> Result<Channel, RankError> {
    let deadline = Deadline::after(timeout);
    loop {
        let Ok(event) = events.recv_timeout(deadline.left()) else {
            return Err(RankError::NoFront { waited: timeout });
        };
        let (hello, stream) = match event {
            RankThreadEvent::Control { hello, stream } => (hello, stream),
            // Between two fronts.
            RankThreadEvent::WorkerDone(result) => {
                return Err(result.err().unwrap_or(RankError::Panicked));
            }
            RankThreadEvent::FromFront(..) | RankThreadEvent::FrontGone(..) => continue,
        };
        match hello {
            Hello::Control { protocol: lowest, highest, .. } => {
                let theirs = [lowest, highest.unwrap_or(lowest)];
                if common_protocol(theirs, [LOWEST_PROTOCOL, PROTOCOL]).is_some() {
                    return Ok(stream);
                }
                let what = if lowest > PROTOCOL { "the rank's node" } else { "the server" };
                let reason = format!(
                    "this rank speaks rank protocol {LOWEST_PROTOCOL} to {PROTOCOL}, the server {} to \
                     {}: upgrade {what}",
                    theirs[0], theirs[1]
                );
                refuse(&stream, &hello, &reason);
            }
            // They are queued elsewhere.
            Hello::Peer { .. } | Hello::Weights { .. } => return Ok(stream),
        }
    }
}

/// Forwards the front's messages, on a thread that ends with the connection.
fn read_front(
    number: u32,
    mut front: Channel,
    events: SyncSender<RankThreadEvent>,
) -> io::Result<()> {
    front.set_read_timeout(None)?;
    let read = move || {
        loop {
            let event = match wire::read(&mut front, MAX_MESSAGE_BYTES) {
                Ok(message) => RankThreadEvent::FromFront(number, message),
                Err(error) => RankThreadEvent::FrontGone(number, error),
            };
            let last = matches!(event, RankThreadEvent::FrontGone(..));
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

impl Fronts<'_> {
    /// Serves one front after the other, each of which finds the weights that the first had loaded. Returns
    /// with the worker's result, or none where it is to be waited for.
    fn serve<L>(
        &mut self,
        first: Channel,
        (worker, load): (Worker, L),
        (keep, on_front): (Duration, fn(bool)),
        (commands, current, stats): (&CommandSender, &CurrentGroup, &StepStats),
    ) -> Result<Option<()>, RankError>
    where
        L: FnOnce(&mut dyn FnMut(Progress)) -> Result<Box<dyn RankEngine>, LoadError>
            + Send
            + 'static,
    {
        let mut channel = first;
        let mut waiting = Some((worker, load));
        loop {
            self.enter(channel)?;
            on_front(true);
            if let Some((worker, load)) = waiting.take() {
                start_worker(worker, load, self.events.clone())?;
            }
            let ended = self.supervise(commands, current, stats);
            let gone = match ended {
                Some(Err(error @ (RankError::FrontGone(_) | RankError::FrontSilent { .. }))) => {
                    error
                }
                other => return other.map_or(Ok(None), |result| result.map(Some)),
            };
            self.front.leave();
            if keep.is_zero() {
                return Err(gone);
            }
            // Its requests end with the group; the weights stay.
            current.abandon("the front is gone");
            on_front(false);
            channel = wait_for_front(self.received, keep)?;
        }
    }

    /// A front has connected.
    fn enter(&mut self, channel: Channel) -> Result<(), RankError> {
        self.number += 1;
        let sender = Arc::new(Sender::new(channel.clone())?);
        read_front(self.number, channel, self.events.clone())?;
        // One that is gone again is noticed by the thread that reads it.
        let _ = self.front.enter(&sender, self.identity);
        Ok(())
    }

    /// Executes the front's messages. Returns once the front is gone or the process is to end: with the
    /// result, or none where the worker's is to be waited for.
    fn supervise(
        &self,
        commands: &CommandSender,
        current: &CurrentGroup,
        stats: &StepStats,
    ) -> Option<Result<(), RankError>> {
        let mut next_alive = Instant::now() + ALIVE_INTERVAL;
        // Looking for sensors takes a moment on some machines; nobody waits for it.
        let mut sensors = None;
        let mut silence = FrontSilence::new(self.front_silence);
        let mut ticks = 0_u32;
        loop {
            let left = next_alive.saturating_duration_since(Instant::now());
            let message = match self.received.recv_timeout(left) {
                Err(RecvTimeoutError::Timeout) => {
                    if let Some(waited) = silence.tick() {
                        return Some(Err(RankError::FrontSilent { waited }));
                    }
                    if let Some(Overdue { taken, slowest }) = self.watch.overdue() {
                        let error = RankError::Stuck { taken, slowest };
                        self.front.say(&FromRank::Failed(error.to_string()));
                        return Some(Err(error));
                    }
                    self.front.say(&FromRank::Alive);
                    ticks = ticks.wrapping_add(1);
                    if ticks.is_multiple_of(TICKS_PER_REPORT) {
                        let machine = sensors.get_or_insert_with(Sensors::open).read();
                        self.front.say(&FromRank::Vitals(stats.report(machine)));
                    }
                    next_alive = Instant::now() + ALIVE_INTERVAL;
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => return Some(Err(RankError::Panicked)),
                Ok(RankThreadEvent::Control { hello, stream }) => {
                    refuse(&stream, &hello, "this rank has a front already");
                    continue;
                }
                Ok(RankThreadEvent::WorkerDone(result)) => {
                    if let Err(error) = &result {
                        self.front.say(&FromRank::Failed(error.to_string()));
                    }
                    return Some(result);
                }
                Ok(RankThreadEvent::FrontGone(number, error)) if number == self.number => {
                    return Some(Err(RankError::FrontGone(error)));
                }
                Ok(RankThreadEvent::FromFront(number, message)) if number == self.number => message,
                // An earlier front's.
                Ok(RankThreadEvent::FrontGone(..) | RankThreadEvent::FromFront(..)) => continue,
            };
            let command = match message {
                ToRank::Alive => {
                    silence.end();
                    continue;
                }
                ToRank::Shutdown => return None,
                ToRank::Form(plan) => {
                    current.supersede(plan.epoch);
                    Command::Form(plan)
                }
                ToRank::Submit { id, request } => Command::Submit(id, request),
                ToRank::Cancel(id) => Command::Cancel(id),
            };
            match commands.send(command) {
                Ok(()) => {}
                Err(Rejected::Request(request)) => {
                    let most = commands::MAX_WAITING_REQUESTS;
                    let message = format!("{most} requests are already waiting for the model");
                    let event = Event::Failed { request, message, retryable: true };
                    self.front.say(&FromRank::Event(event));
                }
                Err(Rejected::Flood) => return Some(Err(RankError::Flooded)),
            }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_front_is_silent_by_this_ranks_own_heartbeats_since_its_last_word() {
        let mut silence = FrontSilence::new(ALIVE_INTERVAL * 4);
        for _ in 0..10 {
            assert_eq!([(); 3].map(|()| silence.tick()), [None; 3]);
            silence.end();
        }
        assert_eq!([(); 3].map(|()| silence.tick()), [None; 3]);
        assert_eq!(silence.tick(), Some(ALIVE_INTERVAL * 4));
    }
}
