//! One connection: performs the actions of the protocol's state machine.

use std::{
    io::{ErrorKind, Read},
    net::Shutdown as Direction,
    sync::{Arc, atomic::Ordering, mpsc},
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use shardpack_identity::Channel;

use super::{
    event::ReceiveEvent,
    node::Node,
    stage::{Meter, Stage},
    store::StoreError,
};
use crate::protocol::{
    Failure, FailureCode, FrameError, Incoming, Intent, Join, MAX_JSON_BYTES, Message, PackageKey,
    Receiver, ReceiverAction, SharedMap, StartRank, Wire, WireError,
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

impl From<WireError> for ActionError {
    fn from(error: WireError) -> Self {
        Self::Wire(error)
    }
}

impl<'a> Connection<'a> {
    pub(super) fn new(node: &'a Node, channel: Channel) -> Self {
        let set_timeout: SetTimeout = |channel, timeout| {
            channel.set_read_timeout(Some(timeout))?;
            channel.set_write_timeout(Some(timeout))
        };
        // Answers are small and awaited.
        let _ = channel.socket().set_nodelay(true);
        let wire = Wire::new(channel, set_timeout, node.options.timeouts);
        Self { node, wire, receiver: Receiver::new(), stage: None }
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

    fn perform(&mut self, action: ReceiverAction) -> Result<Message, ActionError> {
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
                self.tell(&ReceiveEvent::Activated { package, previous });
                Ok(Message::Activated { previous })
            }
            ReceiverAction::List => self.list(),
            ReceiverAction::StartRank(request) => self.start_rank(&request),
        }
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

    fn list(&self) -> Result<Message, ActionError> {
        let key = |key: PackageKey| json!({"layout": key.layout, "rank": key.rank});
        let packages = self.node.store.packages()?;
        let active = self.node.store.active()?;
        let models: serde_json::Map<String, Value> = active
            .models
            .into_iter()
            .map(|(name, model)| {
                let previous = model.previous.map(key);
                (name, json!({"current": key(model.current), "previous": previous}))
            })
            .collect();
        let held: Vec<Value> = packages.iter().map(|package| key(package.key)).collect();
        Ok(Message::Listing(bounded(json!({"packages": held, "active": models}).to_string())?))
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
                    Err(mpsc::RecvTimeoutError::Timeout) => self.wire.send(&Message::Working {
                        done_bytes: meter.done_bytes.load(Ordering::Relaxed),
                        total_bytes: meter.total_bytes.load(Ordering::Relaxed),
                    })?,
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
