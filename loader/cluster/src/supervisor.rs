//! The front's side: one supervisor per served model. It owns the connections to the ranks, and
//! their processes where they are its children; takes commands, gives events, keeps the status
//! true. A group that served and loses a rank is formed again by its rules in [`recovery`].
//! Threads and public names are here, the decisions are in [`core`].

mod core;
mod event;
mod recovery;
mod requests;
mod weights;

use core::Core;
use std::{
    io,
    net::TcpStream,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, Receiver, SyncSender},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use shardpack_collectives::Deadline;
use shardpack_engine_api::{Command, EngineHandle, Event, RequestId};
use shardpack_identity::{
    Channel, Credentials, ExpectedPeer, HandshakeDeadline, HandshakeError, Role, Service, is_local,
};

use super::{
    announce::Announcement,
    identity::{Identity, IdentityError},
    message::{FromRank, Hello, LinkChoice},
    process::RankProcess,
    wire::{self, MAX_HELLO_BYTES, MAX_MESSAGE_BYTES, Sender, Until, WireError},
};
pub use event::{GroupEvent, GroupEventSink};
pub use recovery::{RecoveryOptions, Survivors};
use weights::Giving;
pub use weights::{WEIGHT_STREAMS, WeightsSource};

/// Restarts a node's rank, on a thread of its own; ends what is left of the old one. Its
/// argument counts the recoveries of the group: ranks that are started in the same one may
/// agree on things by it.
pub type Restart = Arc<dyn Fn(u32) -> Result<Restarted, RestartError> + Send + Sync>;

/// Why a rank was not started again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RestartError {
    /// Its node does not answer; it is tried again until it does.
    #[error("its node cannot be reached: {0}")]
    Unreachable(String),
    /// It did not start; it is tried again some times.
    #[error("it cannot be started again: {0}")]
    Failed(String),
    /// Its package is damaged and was not repaired.
    #[error("{0}")]
    Unrepaired(String),
    /// Another server has it, by somebody's wish.
    #[error("another server has it: {0}")]
    Taken(String),
}

/// Where a rank is that was started again, and its process where it is a child.
pub type Restarted = (Announcement, Option<RankProcess>);

/// Repairs a node's package, on a thread of its own, or says why it is damaged still.
pub type Repair = Arc<dyn Fn() -> Result<(), String> + Send + Sync>;

/// A rank process that is up.
pub struct Node {
    /// What people call it.
    pub name: String,
    /// Where it is.
    pub announcement: Announcement,
    /// The front's TLS credentials, where the rank uses TLS.
    pub credentials: Option<Credentials>,
    /// The process, where it is a child of this one.
    pub process: Option<RankProcess>,
    /// How it is brought up again. A group is formed again only where every node has one.
    pub restart: Option<Restart>,
    /// What gives it its package, where its rank has none on its disk.
    pub weights: Option<WeightsSource>,
    /// How its package is repaired where its rank finds it damaged; then the rank is started again,
    /// even before the group has served.
    pub repair: Option<Repair>,
}

/// How the supervisor works, and how long it waits.
#[derive(Clone, Debug)]
pub struct SupervisorOptions {
    /// For a rank to accept a connection and send its identity.
    pub connect_timeout: Duration,
    /// For all ranks to load.
    pub load_timeout: Duration,
    /// For all ranks to connect to each other.
    pub form_timeout: Duration,
    /// For ranks to end after a shutdown message; then children are killed.
    pub stop_timeout: Duration,
    /// After a lost rank.
    pub recovery: RecoveryOptions,
    /// What may carry the links between ranks.
    pub links: LinkChoice,
    /// Takes what happens to the group.
    pub events: GroupEventSink,
}

impl Default for SupervisorOptions {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(5),
            // 500 GB from a slow network disk.
            load_timeout: Duration::from_hours(2),
            // Longer than the ranks' own limit, so that theirs names the culprit.
            form_timeout: Duration::from_secs(15),
            stop_timeout: Duration::from_secs(5),
            recovery: RecoveryOptions::default(),
            links: LinkChoice::default(),
            events: GroupEventSink::default(),
        }
    }
}

/// Why a model is not served.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ServeError {
    /// A rank process could not be connected to.
    #[error("{node} cannot be reached: {reason}")]
    Unreachable {
        /// The node.
        node: String,
        /// What was seen.
        reason: String,
    },
    /// The packages do not belong together.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// A rank failed or is gone.
    #[error("{}: {reason}", culprit(*.rank, .node.as_deref()))]
    Lost {
        /// Its number, where that is known.
        rank: Option<u32>,
        /// Its node, where that is known.
        node: Option<String>,
        /// What was seen.
        reason: String,
    },
    /// A rank cannot load its package.
    #[error("{}: {reason}", culprit(*.rank, .node.as_deref()))]
    Package {
        /// Its number, where that is known.
        rank: Option<u32>,
        /// Its node, where that is known.
        node: Option<String>,
        /// Its error.
        reason: String,
    },
    /// Something took too long.
    #[error("{doing} took more than {} s", .limit.as_secs())]
    Slow {
        /// What.
        doing: String,
        /// The limit.
        limit: Duration,
    },
    /// The group was formed again too often.
    #[error("given up after {attempts} attempts to form the group again: {last}")]
    GivenUp {
        /// How often.
        attempts: u32,
        /// What ended the last attempt.
        last: Box<ServeError>,
    },
    /// It was stopped on purpose.
    #[error("the server is shutting down")]
    Stopped,
}

fn culprit(rank: Option<u32>, node: Option<&str>) -> String {
    match (rank, node) {
        // Ranks on this machine are named by their number.
        (Some(rank), Some(node)) if node != format!("rank {rank}") => {
            format!("rank {rank} ({node})")
        }
        (Some(rank), _) => format!("rank {rank}"),
        (None, Some(node)) => node.to_owned(),
        (None, None) => "the group".to_owned(),
    }
}

/// Interval between attempts to connect to a rank that closed the connection.
const RECONNECT_INTERVAL: Duration = Duration::from_millis(20);

/// An event for the supervisor's thread.
enum SupervisorEvent {
    /// Of one node, in one incarnation: a rank that was started again has another.
    Rank {
        node: usize,
        incarnation: u32,
        event: RankEvent,
    },
    Command(Command),
    Stop,
}

/// An event of a rank.
enum RankEvent {
    Connected { sender: Arc<Sender>, identity: Identity },
    Unreachable(String),
    Message(FromRank),
    Disconnected(String),
    Restarted(Result<Restarted, RestartError>),
}

/// The outcome of starting the group, for threads that wait.
#[derive(Default)]
struct Outcome {
    state: Mutex<Option<Result<(), ServeError>>>,
    changed: Condvar,
}

impl Outcome {
    fn set(&self, outcome: Result<(), ServeError>) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
        self.changed.notify_all();
    }

    /// It is open again.
    fn clear(&self) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// Most events that wait for the supervisor's thread, which takes each at once: some for each rank,
/// and far more requests than the server admits. Beyond that nothing is lost: a rank is not read
/// from until there is room, so that it waits itself, within its own deadlines, and requests wait
/// in their own queue.
const MAX_EVENTS: usize = 1024;

/// The running supervisor; stops when dropped.
pub struct Supervisor {
    handle: EngineHandle,
    events: SyncSender<SupervisorEvent>,
    stopping: Arc<AtomicBool>,
    outcome: Arc<Outcome>,
    pump: Option<JoinHandle<()>>,
    core: Option<JoinHandle<()>>,
}

impl Supervisor {
    /// Connects to `nodes`, in any order, watches them load, forms their group and serves what
    /// comes through `commands`, the other end of `handle`. Returns at once; until the group
    /// is formed, requests fail with an error that says so.
    pub fn start(
        nodes: Vec<Node>,
        handle: EngineHandle,
        commands: Receiver<Command>,
        options: SupervisorOptions,
    ) -> io::Result<Self> {
        let (events, received) = mpsc::sync_channel(MAX_EVENTS);
        let (stopping, outcome) = (Arc::<AtomicBool>::default(), Arc::<Outcome>::default());
        for (index, node) in nodes.iter().enumerate() {
            start_reader((index, 0), node, options.connect_timeout, &events)?;
        }
        let core = Core::new(nodes, handle.clone(), options, Arc::clone(&outcome), events.clone());
        let core = thread::Builder::new()
            .name("supervisor".to_owned())
            .spawn(move || core.run(&received))?;
        let (to_core, stopped) = (events.clone(), Arc::clone(&stopping));
        let pump = thread::Builder::new()
            .name("commands".to_owned())
            .spawn(move || pump(&commands, &to_core, &stopped))?;
        let (pump, core) = (Some(pump), Some(core));
        Ok(Self { handle, events, stopping, outcome, pump, core })
    }

    /// Waits until requests are served, or never will be.
    pub fn wait_until_ready(&self, timeout: Duration) -> Result<(), ServeError> {
        let state = self.outcome.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (state, _) = self
            .outcome
            .changed
            .wait_timeout_while(state, timeout, |state| state.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        let slow = || ServeError::Slow { doing: "starting".to_owned(), limit: timeout };
        state.clone().unwrap_or_else(|| Err(slow()))
    }

    /// Why requests are not served any more, if so.
    #[must_use]
    pub fn failure(&self) -> Option<ServeError> {
        let state = self.outcome.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.clone().and_then(Result::err)
    }

    /// Fails what is running, ends the ranks, and returns when no child is left.
    pub fn stop(self) {
        drop(self);
    }
}

/// Never given to a request (they count from 1), so ending it only wakes the pump.
const NO_REQUEST: RequestId = RequestId(0);

impl Drop for Supervisor {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::SeqCst);
        self.handle.cancel(NO_REQUEST);
        // Their own panics have been printed; there is nothing to add.
        let _ = self.pump.take().map(JoinHandle::join);
        // The pump is gone, so no command comes after this and is forgotten.
        let _ = self.events.send(SupervisorEvent::Stop);
        let _ = self.core.take().map(JoinHandle::join);
    }
}

/// Passes commands to the supervisor's thread, since a thread cannot wait for two channels.
fn pump(commands: &Receiver<Command>, events: &SyncSender<SupervisorEvent>, stopping: &AtomicBool) {
    while !stopping.load(Ordering::SeqCst)
        && let Ok(command) = commands.recv()
    {
        if let Err(mpsc::SendError(SupervisorEvent::Command(command))) =
            events.send(SupervisorEvent::Command(command))
        {
            refuse(command, "the server has stopped");
        }
    }
    for command in commands.try_iter() {
        refuse(command, "the server is shutting down");
    }
}

/// Fails a request before it has begun.
fn refuse(command: Command, message: &str) {
    if let Command::Submit { id, events, .. } = command {
        let message = message.to_owned();
        events(Event::Failed { request: id, message, retryable: true });
    }
}

/// Starts the thread of one incarnation of a node: it connects, then reads until the connection
/// ends.
fn start_reader(
    place: (usize, u32),
    node: &Node,
    timeout: Duration,
    events: &SyncSender<SupervisorEvent>,
) -> io::Result<()> {
    let (announcement, events) = (node.announcement.clone(), events.clone());
    let (credentials, weights) = (node.credentials.clone(), node.weights.clone());
    let attend =
        move || attend(place, (&announcement, credentials.as_ref()), weights, timeout, &events);
    thread::Builder::new().name(format!("rank-{}", node.name)).spawn(attend).map(drop)
}

fn attend(
    (node, incarnation): (usize, u32),
    (announcement, credentials): (&Announcement, Option<&Credentials>),
    weights: Option<WeightsSource>,
    timeout: Duration,
    events: &SyncSender<SupervisorEvent>,
) {
    // A supervisor that is gone needs no events.
    let send = |event| events.send(SupervisorEvent::Rank { node, incarnation, event }).is_ok();
    let mut stream = match reach(announcement, credentials, Deadline::after(timeout)) {
        Ok((stream, sender, identity)) => {
            let sender = Arc::new(sender);
            send(RankEvent::Connected { sender, identity });
            stream
        }
        Err(error) => {
            send(RankEvent::Unreachable(error.to_string()));
            return;
        }
    };
    // Until the rank has loaded, or is gone.
    let mut giving = weights.map(|source| Giving::start(announcement, credentials, &source));
    loop {
        let error = match wire::read(&mut stream, MAX_MESSAGE_BYTES) {
            Ok(message) => {
                if matches!(message, FromRank::Loaded { .. }) {
                    giving = None;
                }
                if send(RankEvent::Message(message)) {
                    continue;
                }
                return;
            }
            Err(error) => error,
        };
        drop(giving);
        let reason = match error {
            WireError::Closed | WireError::Io(_) => "its connection ended".to_owned(),
            other => format!("it sent {other}"),
        };
        send(RankEvent::Disconnected(reason));
        return;
    }
}

#[derive(Debug, thiserror::Error)]
enum ConnectError {
    #[error("{0}")]
    Connect(io::Error),
    #[error("{0}")]
    Handshake(#[from] HandshakeError),
    #[error(
        "it requires TLS, and this front has no cluster credentials: run `shardpack cluster init`"
    )]
    NoCluster,
    #[error("it does not use TLS, which this front requires")]
    InTheClear,
    #[error("it refused: {0}")]
    Refused(String),
    #[error("its first message is not its identity")]
    NoIdentity,
    #[error("it sent no identity: {0}")]
    Reply(#[from] WireError),
}

/// Connects, and retries where the rank closed the connection before its first message: it does so
/// to free a slot when unknown clients hold them all. A process that has ended does not answer.
fn reach(
    to: &Announcement,
    credentials: Option<&Credentials>,
    deadline: Deadline,
) -> Result<(Channel, Sender, Identity), ConnectError> {
    loop {
        match connect(to, credentials, deadline) {
            Err(ConnectError::Handshake(HandshakeError::Closed))
                if deadline.left() > RECONNECT_INTERVAL =>
            {
                thread::sleep(RECONNECT_INTERVAL);
            }
            result => return result,
        }
    }
}

fn connect(
    to: &Announcement,
    credentials: Option<&Credentials>,
    deadline: Deadline,
) -> Result<(Channel, Sender, Identity), ConnectError> {
    let stream = open(to, credentials, deadline)?;
    let sender = Sender::new(stream.clone()).map_err(ConnectError::Connect)?;
    sender.send(&Hello::control(to.token.clone()))?;
    match wire::read(&mut Until(&stream, deadline), MAX_HELLO_BYTES)? {
        FromRank::Identity(identity) => {
            stream.set_read_timeout(None).map_err(ConnectError::Connect)?;
            Ok((stream, sender, identity))
        }
        FromRank::Refused(reason) => Err(ConnectError::Refused(reason)),
        _ => Err(ConnectError::NoIdentity),
    }
}

/// A connection to a rank, before its first message.
fn open(
    to: &Announcement,
    credentials: Option<&Credentials>,
    deadline: Deadline,
) -> Result<Channel, ConnectError> {
    let left = deadline.left().max(Duration::from_millis(1));
    let socket = TcpStream::connect_timeout(&to.address, left).map_err(ConnectError::Connect)?;
    socket.set_nodelay(true).map_err(ConnectError::Connect)?;
    Ok(match (to.key, credentials) {
        (None, None) if is_local(to.address.ip()) => Channel::from(socket),
        (None, _) => return Err(ConnectError::InTheClear),
        (Some(_), None) => return Err(ConnectError::NoCluster),
        (Some(key), Some(credentials)) => {
            let limit = HandshakeDeadline { at: deadline.moment(), is_cancelled: &|| false };
            let expected = ExpectedPeer { role: Role::Node, key: Some(key) };
            Channel::call(socket, credentials, Service::Rank, expected, limit)?
        }
    })
}
