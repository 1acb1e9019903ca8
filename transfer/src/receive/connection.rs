//! One connection: performs the actions of the protocol's state machine.

use std::{
    io::{ErrorKind, Read},
    net::Shutdown as Direction,
    sync::{Arc, atomic::Ordering, mpsc},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;
use shardpack_identity::{Acting, Channel, Role};

use super::{
    acting,
    event::ReceiveEvent,
    give::{self, Giver, OpenRequest},
    listing,
    node::Node,
    operations,
    serve_chunks::Served,
    stage::{Meter, Stage},
    store::StoreError,
};
use crate::protocol::{
    ChunkPlace, Failure, FailureCode, FrameError, Incoming, Intent, Join, MAX_JSON_BYTES, Message,
    Operation, PackageKey, PutOutcome, Receiver, ReceiverAction, SharedMap, StartRank, Wire,
    WireError,
};

/// Interval of a busy node's keep-alives: several within the shortest sensible idle timeout.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// How long the other side may take to read a last message.
const LINGER: Duration = Duration::from_secs(2);

type SetTimeout = fn(&Channel, Duration) -> std::io::Result<()>;

/// A connection of a controller.
pub(super) struct Connection<'a> {
    node: &'a Node,
    wire: Wire<Channel, SetTimeout>,
    receiver: Receiver,
    /// What is being received, on this stream or on several.
    stage: Option<Arc<Stage>>,
    /// The package of which chunks were asked for last.
    served: Option<Served>,
    /// What a ticket lets the caller fetch.
    giver: Option<Giver>,
    caller: Caller,
}

/// Who is at the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Caller {
    /// A controller; on this machine without TLS, anybody.
    Controller,
    /// A server that a node runs for a controller.
    Front,
    /// Another node, which fetches files of a push.
    Node,
}

impl Caller {
    /// Whether the caller may have this done; else what it may.
    fn may(self, action: &ReceiverAction, has_ticket: bool) -> Result<(), &'static str> {
        match (self, action) {
            (Self::Controller, _)
            | (_, ReceiverAction::Reply(_))
            | (Self::Front, ReceiverAction::List | ReceiverAction::StartRank(_)) => Ok(()),
            (Self::Node, ReceiverAction::Operate(it)) if it.name == give::OPEN => Ok(()),
            (Self::Node, ReceiverAction::Fetch(_)) if has_ticket => Ok(()),
            (Self::Front, _) => Err("a front may list packages and start ranks, and nothing else"),
            (Self::Node, _) => Err("a node may fetch what a ticket names, and nothing else"),
        }
    }
}

/// Why an action failed.
enum ActionError {
    /// Reported to the controller.
    Failed(Failure),
    /// It cannot be.
    Wire(WireError),
}

impl From<StoreError> for ActionError {
    fn from(error: StoreError) -> Self {
        let reason = std::error::Error::source(&error).map(|source| format!(": {source}"));
        let message = format!("{error}{}", reason.unwrap_or_default());
        Self::Failed(Failure { code: error.code(), message })
    }
}

impl From<Failure> for ActionError {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl From<WireError> for ActionError {
    fn from(error: WireError) -> Self {
        Self::Wire(error)
    }
}

impl<'a> Connection<'a> {
    pub(super) fn new(node: &'a Node, channel: Channel) -> Self {
        let caller = match channel.peer().and_then(|peer| peer.role) {
            Some(Role::Front) => Caller::Front,
            Some(Role::Node) => Caller::Node,
            Some(Role::Controller) | None => Caller::Controller,
        };
        let set_timeout: SetTimeout = |channel, timeout| {
            channel.set_read_timeout(Some(timeout))?;
            channel.set_write_timeout(Some(timeout))
        };
        // Answers are small and awaited.
        let _ = channel.socket().set_nodelay(true);
        let wire = Wire::new(channel, set_timeout, node.options.timeouts);
        let receiver = Receiver::new();
        Self { node, wire, receiver, stage: None, served: None, giver: None, caller }
    }

    /// Answers until the controller is done or something fails; returns what failed.
    pub(super) fn run(mut self) -> Result<(), String> {
        let ended = self.converse();
        // What has been stored counts, however the connection ended.
        let synced = self.stage.as_ref().map_or(Ok(()), |stage| stage.sync());
        ended?;
        synced.map_err(|error| error.to_string())
    }

    fn converse(&mut self) -> Result<(), String> {
        loop {
            let answered = match self.wire.receive() {
                Ok(message) => {
                    self.receiver.handle(message).map_err(ActionError::Failed).and_then(|action| {
                        let answer = self.perform(action)?;
                        Ok(self.wire.send(&answer)?)
                    })
                }
                Err(WireError::Frame(FrameError::Closed)) => return Ok(()),
                // The controller has nothing to say as long as chunks come from another node, which
                // has deadlines of its own.
                Err(WireError::Idle(_)) if self.is_relaying() => Ok(()),
                Err(WireError::Frame(error)) if is_foreign(&error) => {
                    Err(ActionError::Failed(Failure {
                        code: FailureCode::Malformed,
                        message: error.to_string(),
                    }))
                }
                Err(error) => Err(ActionError::Wire(error)),
            };
            match answered {
                Ok(()) => {}
                Err(ActionError::Failed(failure)) => {
                    let message = failure.message.clone();
                    if self.wire.send(&Message::Failed(failure)).is_ok() {
                        self.linger();
                    }
                    return Err(message);
                }
                Err(ActionError::Wire(error)) => return Err(error.to_string()),
            }
        }
    }

    fn is_relaying(&self) -> bool {
        self.stage.as_ref().is_some_and(|stage| stage.is_relaying())
    }

    fn perform(&mut self, action: ReceiverAction) -> Result<Message, ActionError> {
        if let Err(message) = self.caller.may(&action, self.giver.is_some()) {
            let (code, message) = (FailureCode::Refused, message.to_owned());
            return Err(ActionError::Failed(Failure { code, message }));
        }
        // A front serves on, and nodes relay, whoever controls the cluster.
        if self.caller == Caller::Controller && acting::changes(&action) {
            self.acting()?;
        }
        match action {
            ReceiverAction::Reply(message) => {
                if let Message::ChunkRefused { file, chunk, .. } = message
                    && let Some(stage) = &self.stage
                {
                    let Incoming { key: package, manifest, .. } = stage.incoming();
                    let file = manifest.files[file as usize].name.clone();
                    self.tell(&ReceiveEvent::ChunkRefused { package: *package, file, chunk });
                }
                Ok(message)
            }
            ReceiverAction::Stage(incoming) => self.stage(incoming),
            ReceiverAction::Join(join) => self.join(join),
            ReceiverAction::Store { file, chunk, offset, bytes } => {
                let stage = self.under_way();
                stage.write(file, chunk, offset, &bytes)?;
                let event = ReceiveEvent::ChunkStored {
                    package: stage.incoming().key,
                    file: stage.incoming().manifest.files[file as usize].name.clone(),
                    chunk,
                    size_bytes: bytes.len() as u64,
                };
                self.tell(&event);
                Ok(self.receiver.stored(file, chunk))
            }
            ReceiverAction::Seal => self.seal(),
            ReceiverAction::Activate(package) => {
                self.tell(&ReceiveEvent::Activating { package });
                let previous = self.node.store.activate(package)?;
                self.tell(&ReceiveEvent::Activated {
                    package,
                    previous,
                    release: None,
                    restores: None,
                });
                Ok(Message::Activated { previous })
            }
            ReceiverAction::List => self.list(),
            ReceiverAction::StartRank(request) => self.start_rank(&request),
            ReceiverAction::Operate(operation) => self.operate(&operation),
            ReceiverAction::Fetch(place) => self.fetch(place),
            ReceiverAction::Put { place, bytes } => self.put(place, &bytes),
        }
    }

    /// Lets the caller change the node, if no other controller has taken over. None takes over while what
    /// is returned is held.
    fn acting(&self) -> Result<Option<Acting<'a>>, Failure> {
        let Some(guard) = &self.node.guard else { return Ok(None) };
        let caller = self.wire.stream().peer().map(|peer| peer.key);
        guard.acting(caller).map(Some).map_err(|replaced| acting::refusal(&replaced))
    }

    fn stage(&mut self, incoming: Box<Incoming>) -> Result<Message, ActionError> {
        let store = &self.node.store;
        if incoming.intent == Intent::Ask {
            let (held, reused_bytes) =
                self.with_keep_alives(|_| Stage::ask(store, &incoming))??;
            let held = SharedMap::new(held);
            return Ok(self.receiver.staged(held, store.free_bytes()?, reused_bytes));
        }
        // The stage of an earlier offer on this connection is sealed.
        self.stage = None;
        let package = incoming.key;
        // Longer than a connection whose controller has vanished is kept.
        let timeout = self.node.options.timeouts.idle + LINGER;
        let stage =
            self.with_keep_alives(|meter| Stage::open(store, incoming, timeout, meter))??;
        let held = stage.held().clone();
        let reused_bytes = stage.reused_bytes;
        self.stage = Some(stage);
        let (held_bytes, missing_bytes) = {
            let held = held.lock();
            (held.held_bytes(), held.missing_bytes())
        };
        self.tell(&ReceiveEvent::Offered { package, held_bytes, reused_bytes, missing_bytes });
        Ok(self.receiver.staged(held, store.free_bytes()?, reused_bytes))
    }

    /// Takes chunks of a package that another connection has offered.
    fn join(&mut self, join: Join) -> Result<Message, ActionError> {
        let stage = Stage::find(&self.node.store, join)?;
        let (manifest, held) = (Arc::clone(&stage.incoming().manifest), stage.held().clone());
        self.stage = Some(stage);
        self.tell(&ReceiveEvent::StreamJoined { package: join.package });
        Ok(self.receiver.joined(manifest, held))
    }

    fn seal(&mut self) -> Result<Message, ActionError> {
        let stage = self.stage.take().expect("a package that is sealed is staged");
        let package = stage.incoming().key;
        self.tell(&ReceiveEvent::Verifying { package });
        self.with_keep_alives(move |meter| stage.seal(meter))??;
        self.tell(&ReceiveEvent::Prepared { package });
        Ok(self.receiver.sealed())
    }

    /// A stored package of which a chunk is asked for.
    fn served(&mut self, key: PackageKey) -> Result<&Served, StoreError> {
        let served = match self.served.take() {
            Some(served) if served.key() == key && served.is_current()? => served,
            _ => Served::open(&self.node.store, key)?,
        };
        Ok(self.served.insert(served))
    }

    /// Reads a chunk, for a controller or for a node with a ticket.
    fn fetch(&mut self, place: ChunkPlace) -> Result<Message, ActionError> {
        let Some(mut giver) = self.giver.take() else {
            return Ok(Message::Fetched(self.served(place.package)?.read(place)?));
        };
        // It may be yet to come.
        let read = self.with_keep_alives(|_| giver.read(place))?;
        self.giver = Some(giver);
        Ok(Message::Fetched(read.map_err(ActionError::Failed)?))
    }

    /// Takes a ticket.
    fn open_relay(&mut self, parameters: &Value) -> Result<Message, ActionError> {
        let caller = self.wire.stream().peer();
        let opened = operations::parse::<OpenRequest>(give::OPEN, parameters)
            .and_then(|request| Giver::open(self.node, caller, &request));
        self.giver = Some(opened.map_err(|error| ActionError::Failed(error.into()))?);
        Ok(Message::Operated(Value::Null.to_string()))
    }

    /// Replaces a damaged chunk.
    fn put(&mut self, place: ChunkPlace, bytes: &[u8]) -> Result<Message, ActionError> {
        let served = self.served(place.package)?;
        let outcome = served.replace(place, bytes)?;
        if outcome == PutOutcome::Replaced {
            let event = ReceiveEvent::ChunkRepaired {
                package: place.package,
                file: served.name(place.file).to_owned(),
                chunk: place.chunk,
                size_bytes: bytes.len() as u64,
            };
            self.tell(&event);
        }
        Ok(Message::PutDone(outcome))
    }

    fn list(&self) -> Result<Message, ActionError> {
        let listing = listing::of(&self.node.store)?;
        Ok(Message::Listing(bounded(listing.to_string())?))
    }

    fn start_rank(&mut self, request: &StartRank) -> Result<Message, ActionError> {
        let not_started = |message: String| {
            ActionError::Failed(Failure { code: FailureCode::NotStarted, message })
        };
        let package = self.node.store.package(request.package)?;
        let parameters: Value = serde_json::from_str(&request.parameters)
            .map_err(|error| not_started(format!("parameters: {error}")))?;
        let start = &self.node.options.start_rank;
        let answer = self.with_keep_alives(|_| start(&package, parameters))?;
        Ok(Message::RankStarted(bounded(answer.map_err(not_started)?.to_string())?))
    }

    fn operate(&mut self, operation: &Operation) -> Result<Message, ActionError> {
        let Operation { name, parameters } = operation;
        let failed = |code, message: String| ActionError::Failed(Failure { code, message });
        let parameters: Value = serde_json::from_str(parameters).map_err(|error| {
            failed(FailureCode::Malformed, format!("parameters of {name}: {error}"))
        })?;
        if name == give::OPEN {
            return self.open_relay(&parameters);
        }
        let node = self.node;
        let caller = self.wire.stream().peer().map(|peer| peer.key);
        let answer = self.with_keep_alives(|meter| {
            // A release is prepared or made current wholly before or wholly after a handover; what may
            // take minutes does not hold one up.
            let guard = node.guard.as_ref().filter(|_| acting::is_release_step(name));
            let held = guard.map(|guard| guard.acting(caller)).transpose();
            let _acting = match held {
                Ok(acting) => acting,
                Err(replaced) => return Some(Err(acting::refusal(&replaced))),
            };
            operations::carry_out(node, name, &parameters, meter).or_else(|| {
                let answer = node.operate.as_ref()?(name, parameters.clone())?;
                let code = FailureCode::NotOperated;
                Some(answer.map_err(|message| Failure { code, message }))
            })
        })?;
        let answer = answer.unwrap_or_else(|| {
            let message = format!("this node does not know the operation {name:?}: upgrade it");
            Err(Failure { code: FailureCode::NoOperation, message })
        });
        let answer = answer.map_err(ActionError::Failed)?;
        Ok(Message::Operated(bounded(answer.to_string())?))
    }

    /// Runs a long action and sends the controller keep-alives meanwhile.
    fn with_keep_alives<T: Send>(
        &mut self,
        action: impl FnOnce(&Meter) -> T + Send,
    ) -> Result<T, ActionError> {
        let meter = Meter::default();
        let (sender, receiver) = mpsc::sync_channel(1);
        thread::scope(|scope| {
            let meter = &meter;
            scope.spawn(move || {
                // Nobody waits for it only when the controller is gone; it runs to its end.
                let _ = sender.send(action(meter));
            });
            loop {
                match receiver.recv_timeout(HEARTBEAT) {
                    Ok(result) => return Ok(result),
                    Err(mpsc::RecvTimeoutError::Timeout) => {
                        let working = Message::Working {
                            done_bytes: meter.done_bytes.load(Ordering::Relaxed),
                            total_bytes: meter.total_bytes.load(Ordering::Relaxed),
                        };
                        if let Err(error) = self.wire.send(&working) {
                            meter.is_cancelled.store(true, Ordering::Relaxed);
                            return Err(error.into());
                        }
                    }
                    Err(mpsc::RecvTimeoutError::Disconnected) => {
                        let message = "the action ended without a result".to_owned();
                        let failure = Failure { code: FailureCode::Storage, message };
                        return Err(ActionError::Failed(failure));
                    }
                }
            }
        })
    }

    fn under_way(&self) -> &Stage {
        self.stage.as_ref().expect("chunks come after the offer was staged")
    }

    /// Lets the controller read the last message: a socket closed with unread bytes takes back what
    /// was sent before.
    fn linger(&self) {
        let mut stream = self.wire.stream();
        let deadline = Instant::now() + LINGER;
        let _ = stream.shutdown(Direction::Write);
        let mut unread = [0; 16 << 10];
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || stream.set_read_timeout(Some(left)).is_err() {
                return;
            }
            match stream.read(&mut unread) {
                Ok(1..) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                _ => return,
            }
        }
    }

    fn tell(&self, event: &ReceiveEvent) {
        (self.node.options.observer)(event);
    }
}

/// Whether these bytes came from a peer that understands an answer.
fn is_foreign(error: &FrameError) -> bool {
    !matches!(error, FrameError::Closed | FrameError::Truncated | FrameError::Io(_))
}

fn bounded(json: String) -> Result<String, ActionError> {
    if json.len() as u64 <= MAX_JSON_BYTES {
        return Ok(json);
    }
    let message = format!("an answer of {} bytes, at most {MAX_JSON_BYTES} are sent", json.len());
    Err(ActionError::Failed(Failure { code: FailureCode::Storage, message }))
}
