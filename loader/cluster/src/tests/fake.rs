//! An engine without a model: a request's tokens count up from the last one of its prompt. Each
//! is summed over the group, so a group that does not work gives other tokens.

use std::{
    cell::Cell,
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
        mpsc::{self, Receiver},
    },
    time::{Duration, Instant},
};

use shardpack_collectives::{Deadline, Group, GroupError};
use shardpack_engine::engine::{RankEngine, StepOutcome};
use shardpack_engine_api::{
    Command, EngineHandle, Event, EventSink, FinishReason, GenerateRequest, RequestId, TokenId,
    Usage,
};

use crate::{Identity, LoadError, PROTOCOL, Progress, RankOptions, SupervisorOptions};

/// Only a test that hangs waits that long.
pub(super) const LONG: Duration = Duration::from_mins(10);

/// Longer than any test. Deadlines are that long where another cause than time must end a wait.
pub(super) const NEVER: Duration = Duration::from_hours(1000);

/// How long the leader waits for the first step of [`IMPATIENT`].
const BRIEF: Duration = Duration::from_millis(100);

/// A token for which a process that leads waits briefly, once: its peer does not answer. Sums of it and of what
/// follows are exact for two ranks.
pub(super) const IMPATIENT: u32 = 6_000_000;

/// Whether this process has led a brief step.
static WAS_IMPATIENT: AtomicBool = AtomicBool::new(false);

/// A token at which every follower's thread panics.
pub(super) const PANIC: u32 = 13_000_013;

/// A token at which the leader's device hangs.
pub(super) const HANG: u32 = 13_000_213;

/// A token at which every follower's device fails.
pub(super) const DEVICE_FAILURE: u32 = 13_000_113;

#[derive(Default)]
pub(super) struct FakeEngine {
    device_failure: Option<&'static str>,
    requests: BTreeMap<RequestId, (GenerateRequest, u32)>,
    cancelled: Vec<RequestId>,
    /// That a follower has heard.
    heartbeats: Arc<AtomicU32>,
}

impl FakeEngine {
    /// One that counts the heartbeats that it hears as a follower.
    pub(super) fn with_heartbeats(heartbeats: Arc<AtomicU32>) -> Self {
        Self { heartbeats, ..Self::default() }
    }

    fn sum(group: &dyn Group, tokens: &[u32], deadline: Deadline) -> Result<Vec<u32>, GroupError> {
        let mut values: Vec<f32> = tokens.iter().map(|token| *token as f32).collect();
        group.all_reduce_sum(&mut values, deadline)?;
        Ok(values.iter().map(|sum| (*sum / group.size() as f32) as u32).collect())
    }
}

impl RankEngine for FakeEngine {
    fn submit(&mut self, id: RequestId, request: GenerateRequest) {
        let done = request.generated.len() as u32;
        self.requests.insert(id, (request, done));
    }

    fn cancel(&mut self, id: RequestId) {
        self.cancelled.push(id);
    }

    fn lead(
        &mut self,
        group: &dyn Group,
        events: &mut dyn FnMut(Event),
    ) -> Result<StepOutcome, GroupError> {
        let finish = |request, reason, done| {
            let usage = Usage { completion_tokens: done, ..Usage::default() };
            Event::Finished { request, reason, usage }
        };
        for id in std::mem::take(&mut self.cancelled) {
            if let Some((_, done)) = self.requests.remove(&id) {
                events(finish(id, FinishReason::Cancelled, done));
            }
        }
        if self.requests.is_empty() {
            return Ok(StepOutcome::Idle);
        }
        let next =
            |(request, done): &(GenerateRequest, u32)| request.prompt.last().unwrap().0 + 1 + done;
        let plan: Vec<u32> = self.requests.values().map(next).collect();
        while plan.contains(&HANG) {
            std::thread::sleep(LONG);
        }
        let mut bytes = serde_json::to_vec(&plan).unwrap();
        let is_brief = plan.contains(&IMPATIENT) && !WAS_IMPATIENT.swap(true, Ordering::SeqCst);
        let deadline = Deadline::after(if is_brief { BRIEF } else { NEVER });
        group.broadcast(0, &mut bytes, deadline)?;
        let tokens = Self::sum(group, &plan, deadline)?;
        for ((id, (_, done)), token) in self.requests.iter_mut().zip(tokens) {
            *done += 1;
            events(Event::Token { request: *id, token: TokenId(token), logprobs: None });
        }
        self.requests.retain(|id, (request, done)| {
            let over = *done >= request.max_tokens;
            if over {
                events(finish(*id, FinishReason::Length, *done));
            }
            !over
        });
        Ok(StepOutcome::Worked)
    }

    fn heartbeat(&mut self, group: &dyn Group) -> Result<(), GroupError> {
        group.broadcast(0, &mut b"[]".to_vec(), Deadline::after(NEVER))
    }

    fn follow(&mut self, group: &dyn Group) -> Result<(), GroupError> {
        let mut bytes = Vec::new();
        group.broadcast(0, &mut bytes, Deadline::after(NEVER))?;
        let plan: Vec<u32> = serde_json::from_slice(&bytes).unwrap();
        assert!(!plan.contains(&PANIC), "this panic is part of a test");
        if plan.contains(&DEVICE_FAILURE) {
            self.device_failure = Some("out of patience");
            return Err(GroupError::Aborted("out of patience".to_owned()));
        }
        if plan.is_empty() {
            self.heartbeats.fetch_add(1, Ordering::SeqCst);
        } else {
            Self::sum(group, &plan, Deadline::after(NEVER))?;
        }
        Ok(())
    }

    fn device_failure(&self) -> Option<&str> {
        self.device_failure
    }

    fn reset(&mut self) {
        *self = Self::with_heartbeats(Arc::clone(&self.heartbeats));
    }
}

/// Options of a rank that no deadline ends.
pub(super) fn patient_rank() -> RankOptions {
    RankOptions {
        front_timeout: NEVER,
        front_silence: NEVER,
        form_timeout: NEVER,
        // The longest that any step is given.
        step_timeout: Duration::from_mins(15),
        ..RankOptions::default()
    }
}

/// Options of a supervisor for whom no rank is too slow.
pub(super) fn patient() -> SupervisorOptions {
    SupervisorOptions {
        connect_timeout: NEVER,
        load_timeout: NEVER,
        form_timeout: NEVER,
        stop_timeout: NEVER,
        ..SupervisorOptions::default()
    }
}

/// Loads at once.
#[expect(clippy::unnecessary_wraps, reason = "the signature of any load")]
pub(super) fn load(report: &mut dyn FnMut(Progress)) -> Result<Box<dyn RankEngine>, LoadError> {
    report(Progress { doing: "reading weights".to_owned(), done_bytes: 1, total_bytes: 1 });
    Ok(Box::new(FakeEngine::default()))
}

pub(super) fn identity(rank: u32, ranks: u32) -> Identity {
    Identity {
        model_id: "m".repeat(64),
        layout_id: format!("{ranks:064}"),
        rank,
        ranks,
        engine_version: "test".to_owned(),
        protocol: PROTOCOL,
    }
}

pub(super) fn request(first: u32, max_tokens: u32) -> GenerateRequest {
    GenerateRequest::greedy(vec![TokenId(first)], max_tokens)
}

/// A request's events as they come.
pub(super) struct Answer {
    pub(super) id: RequestId,
    events: Receiver<Event>,
    /// Events that have come, and how many of them were read.
    came: Arc<AtomicU32>,
    read: Cell<u32>,
}

/// How a request ended.
#[derive(Debug, PartialEq)]
pub(super) enum End {
    Finished(FinishReason),
    Failed { message: String, retryable: bool },
}

impl Answer {
    pub(super) fn submit(handle: &EngineHandle, request: GenerateRequest) -> Self {
        let (sink, events) = mpsc::channel();
        let came = Arc::<AtomicU32>::default();
        let counted = Arc::clone(&came);
        let sink: EventSink = Box::new(move |event| {
            counted.fetch_add(1, Ordering::SeqCst);
            drop(sink.send(event));
        });
        Self { id: handle.submit(request, sink).unwrap(), events, came, read: Cell::new(0) }
    }

    /// Events that have come and were not read.
    pub(super) fn pending(&self) -> u32 {
        self.came.load(Ordering::SeqCst) - self.read.get()
    }

    pub(super) fn next_token(&self) -> u32 {
        let event = self.events.recv_timeout(LONG).unwrap();
        self.read.set(self.read.get() + 1);
        match event {
            Event::Token { token, .. } => token.0,
            other => panic!("a token, not {other:?}"),
        }
    }

    /// The tokens still to come, and the end, after which the sink must be gone.
    pub(super) fn finish(self) -> (Vec<u32>, End) {
        let mut tokens = Vec::new();
        loop {
            let event = self.events.recv_timeout(LONG).unwrap();
            assert_eq!(event.request(), self.id);
            let end = match event {
                Event::Token { token, .. } => {
                    tokens.push(token.0);
                    continue;
                }
                Event::Finished { reason, .. } => End::Finished(reason),
                Event::Failed { message, retryable, .. } => End::Failed { message, retryable },
                other => panic!("{other:?}"),
            };
            let after = self.events.recv_timeout(LONG);
            assert_eq!(after, Err(mpsc::RecvTimeoutError::Disconnected));
            return (tokens, end);
        }
    }
}

/// Waits for something that another thread brings about.
pub(super) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < LONG, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A handle and its other end, as `Supervisor::start` wants them.
pub(super) fn handle(ranks: u32) -> (EngineHandle, Receiver<Command>) {
    EngineHandle::new(ranks)
}
