//! The first phase at one node: until its package is prepared, over one stream or several.
//!
//! Stream 0 offers the package. Others join it once the first chunk has gone fast enough that they
//! can share the network; each has its own thread and connection, and all take chunks from one
//! [`Sender`]. A stream that is lost leaves its chunks to the others.

use std::{
    mem,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, Scope},
    time::{Duration, Instant},
};

use super::{
    NodeError, NodeProgress, NodeReport, PushEvent, PushMode, PushObserver, PushOptions, Target,
    Traffic,
    open::Package,
    relay::{self, Order, Relays},
    retry::NodeJob,
    stream::Stream,
};
use crate::{
    limit::Limit,
    protocol::{Intent, Offer, Outgoing, SendError, Sender, Timeouts},
};

/// How often a stream with nothing to do looks up though nobody has called it.
const LOOK_UP: Duration = Duration::from_secs(1);

/// Pushes one package, or asks what a push would send; once. Not the first time, the node fetches nothing
/// from others.
pub(super) fn send(job: &NodeJob, is_first: bool) -> NodeReport {
    let NodeJob { set, package, target, number, options, limit, relays, observer } = *job;
    let start = Instant::now();
    let package_bytes = package.manifest.files.iter().map(|file| file.size).sum();
    let offer = Offer {
        intent: match options.mode {
            PushMode::Send(_) => Intent::Send,
            PushMode::DryRun => Intent::Ask,
        },
        manifest: package.manifest_bytes.clone(),
        set: set.bytes.clone(),
        signature: package.signature.clone(),
    };
    let shared = Shared {
        sender: Sender::new(package.manifest.clone(), offer, window(options)),
        traffic: Traffic { package_bytes, streams: 1, ..Traffic::default() },
        error: None,
        lost: None,
        ends: Vec::new(),
        orders: Vec::new(),
    };
    let push = NodePush {
        package,
        target,
        number,
        options,
        limit,
        relays,
        may_fetch: is_first && matches!(options.mode, PushMode::Send(_)),
        observer,
        shared: Mutex::new(shared),
        happened: Condvar::new(),
    };
    thread::scope(|scope| push.run(0, scope));
    let Shared { traffic, error, .. } =
        push.shared.into_inner().unwrap_or_else(PoisonError::into_inner);
    let progress = match (&error, options.mode) {
        (Some(_), _) => NodeProgress::NotPrepared,
        (None, PushMode::DryRun) => NodeProgress::Asked,
        (None, PushMode::Send(_)) => NodeProgress::Prepared,
    };
    let traffic = Traffic { seconds: start.elapsed().as_secs_f64(), ..traffic };
    NodeReport { target: target.clone(), package: package.key, progress, traffic, error }
}

/// Chunks of each stream ahead of their answers: two keep it busy.
fn window(options: &PushOptions) -> usize {
    options.window_chunks.div_ceil(options.streams.max(1)).max(2.min(options.window_chunks)).max(1)
}

/// A push to one node, which its streams share.
pub(super) struct NodePush<'a> {
    pub(super) package: &'a Package,
    pub(super) target: &'a Target,
    number: usize,
    pub(super) options: &'a PushOptions,
    pub(super) limit: Option<&'a Limit>,
    pub(super) relays: &'a Relays<'a>,
    may_fetch: bool,
    pub(super) observer: PushObserver<'a>,
    shared: Mutex<Shared>,
    /// Notified whenever a stream has sent or received something that may concern the others.
    happened: Condvar,
}

/// What streams agree on.
pub(super) struct Shared {
    pub(super) sender: Sender,
    pub(super) traffic: Traffic,
    /// Why the push has failed.
    error: Option<NodeError>,
    /// Why a stream was lost first.
    lost: Option<NodeError>,
    /// Ends the streams that are open.
    ends: Vec<Box<dyn FnOnce() + Send>>,
    /// What the node is to fetch from others.
    orders: Vec<Order>,
}

impl NodePush<'_> {
    /// Drives a stream until there is nothing left for it.
    fn run<'scope>(&'scope self, number: usize, scope: &'scope Scope<'scope, '_>) {
        let _waker = Waker(self);
        let driven = Stream::open(self, number)
            .and_then(|mut stream| self.drive(&mut stream, number, scope));
        if let Err(error) = driven {
            self.lose(number, error);
        }
    }

    fn drive<'scope>(
        &'scope self,
        stream: &mut Stream<'_>,
        number: usize,
        scope: &'scope Scope<'scope, '_>,
    ) -> Result<(), NodeError> {
        let mut first = (number == 0).then(Instant::now);
        while let Some(next) = self.next(number) {
            match next {
                Outgoing::Message(message) => stream.say(&message)?,
                Outgoing::Chunk { file, chunk, range } => {
                    let begun = Instant::now();
                    stream.send(file, chunk, range)?;
                    if first.take().is_some() && self.options.streams > 1 {
                        stream.hear()?;
                        if self.can_be_shared(begun.elapsed()) {
                            self.widen(scope);
                        }
                    }
                }
                Outgoing::Wait => {
                    stream.hear()?;
                    self.relay(scope);
                }
                Outgoing::Rest => unreachable!("waited for"),
                Outgoing::Done => return Ok(()),
            }
        }
        // The push has failed elsewhere and is reported there.
        Ok(())
    }

    /// Whether streams that share a network on which one chunk took so long keep their deadlines,
    /// twice over.
    fn can_be_shared(&self, chunk: Duration) -> bool {
        let Timeouts { idle, frame, .. } = self.options.timeouts;
        let streams = u32::try_from(self.options.streams).unwrap_or(u32::MAX);
        chunk.saturating_mul(streams.saturating_mul(2)) < idle.min(frame)
    }

    /// Opens further streams, at most as many as there are chunks for them.
    fn widen<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) {
        let further = (self.options.streams - 1).min(self.lock().sender.waiting_chunks());
        for _ in 0..further {
            let number = self.lock().sender.join();
            scope.spawn(move || self.run(number, scope));
        }
    }

    /// Decides what the node fetches from others and what it is sent first; it has said what it lacks.
    pub(super) fn plan_relays(&self) {
        if !matches!(self.options.mode, PushMode::Send(_)) {
            return;
        }
        let mut shared = self.lock();
        let plan = self.relays.plan(self.number, &shared.sender.missing_files(), self.may_fetch);
        shared.sender.hurry(&plan.first);
        plan.orders.iter().for_each(|order| shared.sender.withhold(&order.files));
        shared.orders = plan.orders;
    }

    /// Has the node fetch from others what it is to fetch.
    fn relay<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) {
        let orders = mem::take(&mut self.lock().orders);
        for order in orders {
            scope.spawn(move || {
                let _waker = Waker(self);
                relay::carry_out(self, &order);
            });
        }
    }

    /// What to do next on a stream, once there is anything; nothing when the push has failed.
    fn next(&self, number: usize) -> Option<Outgoing> {
        let mut shared = self.lock();
        while shared.error.is_none() {
            match shared.sender.next(number) {
                Outgoing::Rest => {
                    let woken = self.happened.wait_timeout(shared, LOOK_UP);
                    shared = woken.unwrap_or_else(PoisonError::into_inner).0;
                }
                next => return Some(next),
            }
        }
        None
    }

    /// Looks at, or changes, what streams agree on; those that rest look again.
    pub(super) fn with<T>(&self, change: impl FnOnce(&mut Shared) -> T) -> T {
        let result = change(&mut self.lock());
        self.happened.notify_all();
        result
    }

    /// Has a stream ended when the push fails; whether it may begin at all.
    pub(super) fn register(&self, end: impl FnOnce() + Send + 'static) -> bool {
        let mut shared = self.lock();
        shared.ends.push(Box::new(end));
        shared.error.is_none()
    }

    /// Whether nothing more comes of it.
    pub(super) fn has_failed(&self) -> bool {
        self.lock().error.is_some()
    }

    /// A stream failed: its chunks go over the others, or the push has failed.
    fn lose(&self, number: usize, error: NodeError) {
        let rank = self.target.rank;
        let mut shared = self.lock();
        if shared.error.is_some() {
            return;
        }
        if is_of_stream(&error) && shared.sender.lose(number) {
            drop(shared);
            (self.observer)(&PushEvent::StreamLost { rank, stream: number, error: &error });
            self.lock().lost.get_or_insert(error);
            return;
        }
        // That none can join any more is what came of the first one's end.
        let is_consequence = matches!(error, NodeError::Send(SendError::NotJoined(_)));
        let first = shared.lost.take().filter(|_| is_consequence);
        shared.error = Some(first.unwrap_or(error));
        let ends = mem::take(&mut shared.ends);
        drop(shared);
        for end in ends {
            end();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether an error concerns one stream only. A chunk that was refused was right when
/// it left, or the error would be another one.
fn is_of_stream(error: &NodeError) -> bool {
    matches!(
        error,
        NodeError::Connect(_)
            | NodeError::Wire(_)
            | NodeError::Send(SendError::NotJoined(_) | SendError::ChunkRefused { .. })
    )
}

/// Wakes the streams that rest when one has ended, however it did.
struct Waker<'a, 'b>(&'a NodePush<'b>);

impl Drop for Waker<'_, '_> {
    fn drop(&mut self) {
        self.0.happened.notify_all();
    }
}
