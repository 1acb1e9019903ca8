//! The server's end of an engine: commands go in, events come back through each request's sink.
//! What is on the other side (ranks in other processes, threads, a script) is not known here.

use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicU64, Ordering},
    mpsc,
};

use serde::{Deserialize, Serialize};

use crate::{Event, GenerateRequest, LinkReport, RequestId};

/// Takes a request's events, in order, on the engine's side; must not block.
pub type EventSink = Box<dyn Fn(Event) + Send>;

/// A command to the engine.
pub enum Command {
    /// Submit a request; `events` is dropped after its last event.
    Submit {
        /// Its id.
        id: RequestId,
        /// The request.
        request: Box<GenerateRequest>,
        /// Where its events go.
        events: EventSink,
    },
    /// Cancel a request within one step; unknown ids are ignored.
    Cancel(RequestId),
}

/// State of the engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineState {
    /// Weights are loading, or ranks are joining.
    Starting(String),
    /// Requests are served.
    Ready,
    /// A rank was lost. Requests are taken and wait, as those that were running do; what happens is for
    /// people.
    Recovering(String),
    /// The engine has failed; the reason is for people.
    Failed(String),
}

/// What `/health` reports.
#[derive(Clone, Debug)]
pub struct EngineStatus {
    /// State of the engine.
    pub state: EngineState,
    /// Ranks of the group.
    pub ranks: u32,
    /// Requests between submission and end.
    pub active_requests: u32,
    /// The latest report of each rank, in rank order; missing ranks have not reported yet.
    pub vitals: Vec<RankVitals>,
    /// The links of the present group, in the order of their ranks.
    pub links: Vec<LinkReport>,
}

/// What a rank reports of itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankVitals {
    /// Memory of its process; absent where the system does not tell.
    pub memory_bytes: Option<u64>,
    /// Microseconds of a step, on average over the last second with steps.
    pub step_us: Option<u64>,
    /// Of these, in all-reduce, waiting included.
    pub sums_us: Option<u64>,
    /// Milliwatts that its machine draws, as far as the machine says so without root.
    pub power_mw: Option<u64>,
    /// Thousandths of a degree Celsius of its machine's hottest processor.
    pub temperature_mc: Option<u64>,
    /// Draft tokens verified since the engine started; rank 0 counts them.
    #[serde(default)]
    pub drafted_tokens: Option<u64>,
    /// Of these, the accepted ones.
    #[serde(default)]
    pub accepted_tokens: Option<u64>,
    /// Steps since the rank's process began.
    #[serde(default)]
    pub steps: Option<u64>,
    /// Collective calls in them: all-reduces, all-gathers, broadcasts and what goes between stages.
    #[serde(default)]
    pub collectives: Option<u64>,
    /// Bytes of the rank's own data in these calls.
    #[serde(default)]
    pub collective_bytes: Option<u64>,
    /// Tokens generated in these steps; rank 0 counts them.
    #[serde(default)]
    pub tokens: Option<u64>,
}

impl EngineStatus {
    /// Draft tokens that rank 0 has verified and accepted since the engine started.
    #[must_use]
    pub fn drafts(&self) -> [u64; 2] {
        let rank0 = self.vitals.first();
        [
            rank0.and_then(|vitals| vitals.drafted_tokens),
            rank0.and_then(|vitals| vitals.accepted_tokens),
        ]
        .map(Option::unwrap_or_default)
    }

    /// Updates a rank's report; absent values keep the earlier ones.
    pub fn hear(&mut self, rank: u32, vitals: RankVitals) {
        let rank = rank as usize;
        if rank >= self.ranks as usize {
            return;
        }
        if self.vitals.len() <= rank {
            self.vitals.resize(rank + 1, RankVitals::default());
        }
        let known = &mut self.vitals[rank];
        known.memory_bytes = vitals.memory_bytes.or(known.memory_bytes);
        known.power_mw = vitals.power_mw.or(known.power_mw);
        known.temperature_mc = vitals.temperature_mc.or(known.temperature_mc);
        known.drafted_tokens = vitals.drafted_tokens.or(known.drafted_tokens);
        known.accepted_tokens = vitals.accepted_tokens.or(known.accepted_tokens);
        known.steps = vitals.steps.or(known.steps);
        known.collectives = vitals.collectives.or(known.collectives);
        known.collective_bytes = vitals.collective_bytes.or(known.collective_bytes);
        known.tokens = vitals.tokens.or(known.tokens);
        if vitals.step_us.is_some() {
            (known.step_us, known.sums_us) = (vitals.step_us, vitals.sums_us);
        }
    }
}

/// The engine has stopped, so the request was not accepted.
#[derive(Debug, thiserror::Error)]
#[error("the engine has stopped")]
pub struct SubmitError;

/// A clonable handle to an engine.
#[derive(Clone)]
pub struct EngineHandle {
    commands: mpsc::Sender<Command>,
    next_id: Arc<AtomicU64>,
    status: Arc<Mutex<EngineStatus>>,
}

impl EngineHandle {
    /// A handle and the end at which the engine's side takes its commands.
    #[must_use]
    pub fn new(ranks: u32) -> (Self, mpsc::Receiver<Command>) {
        let (commands, receiver) = mpsc::channel();
        let state = EngineState::Starting("starting".to_owned());
        let status = Arc::new(Mutex::new(EngineStatus {
            state,
            ranks,
            active_requests: 0,
            vitals: Vec::new(),
            links: Vec::new(),
        }));
        (Self { commands, next_id: Arc::new(AtomicU64::new(1)), status }, receiver)
    }

    /// Submits a request and returns its id.
    pub fn submit(
        &self,
        request: GenerateRequest,
        events: EventSink,
    ) -> Result<RequestId, SubmitError> {
        let request = Box::new(request);
        let id = RequestId(self.next_id.fetch_add(1, Ordering::Relaxed));
        self.commands.send(Command::Submit { id, request, events }).map_err(|_| SubmitError)?;
        Ok(id)
    }

    /// Cancels a request; a finished or unknown one is ignored.
    pub fn cancel(&self, id: RequestId) {
        // A stopped engine has no requests left to cancel.
        let _ = self.commands.send(Command::Cancel(id));
    }

    /// The latest status.
    #[must_use]
    pub fn status(&self) -> EngineStatus {
        self.status.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What changes the status without keeping the commands' end open.
    #[must_use]
    pub fn status_writer(&self) -> StatusWriter {
        StatusWriter(self.status.clone())
    }

    /// Changes the status; for the engine's side.
    pub fn update_status(&self, change: impl FnOnce(&mut EngineStatus)) {
        change(&mut self.status.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// Changes an engine's status.
#[derive(Clone)]
pub struct StatusWriter(Arc<Mutex<EngineStatus>>);

impl StatusWriter {
    /// Changes it.
    pub fn update(&self, change: impl FnOnce(&mut EngineStatus)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }
}
