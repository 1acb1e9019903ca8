//! The scheduler on rank 0: continuous batching with chunked prefill, and the effect of each sampled
//! token on its request.
//!
//! Requests of one tenant are admitted in order of arrival, as far as there is KV memory; between
//! tenants the engine is shared ([`admission`], [`shares`]). When a running sequence needs more memory
//! than there is, another one is preempted: it waits before others of its tenant, is recomputed later
//! and gets the same tokens.
//!
//! A request with a constraint waits until that is compiled, and a sequence whose mask takes long sits
//! out steps, while the others go on ([`waits`]).

mod admission;
mod allowance;
mod constrained;
mod drafting;
mod limits;
mod record;
mod sequence;
mod shares;
mod tenants;
mod waits;

use std::{
    collections::{BTreeSet, VecDeque},
    time::{Duration, Instant},
};

use shardpack_engine_api::{
    ConstraintFactory, Event, FinishReason, GenerateRequest, RequestId, Usage,
};
use shardpack_formats::memory::TOKENS_PER_PAGE;

use super::{
    constraints::{Constraints, Ticket},
    draft::{DraftProposer, Drafter},
    hello::Agreed,
    pages::Pages,
    plan::{NewSequence, PageId, Plan, Publish, ScheduledSequence},
    sample::SamplingParams,
};
use crate::backend::StepError;
use allowance::Allowance;
pub(super) use drafting::Drafting;
#[cfg(test)]
pub(super) use drafting::Forced;
pub(super) use limits::Limits;
use sequence::Sequence;
use tenants::Tenants;

/// Requests between submission and end.
pub(super) struct Schedule {
    limits: Limits,
    /// Prefill tokens of a step that all ranks have memory for.
    prefill_tokens: usize,
    /// Threads for constraints, where they are supported.
    constraints: Option<Constraints>,
    /// Requests whose constraints are not compiled yet, in order of arrival.
    compiling: VecDeque<Sequence>,
    /// The one whose constraint is being compiled.
    compiles: Option<(Ticket, RequestId)>,
    tenants: Tenants,
    allowance: Allowance,
    pages: Pages,
    /// Whether every rank's KV cache can be rolled back.
    can_roll_back: bool,
    /// In order of arrival.
    waiting: VecDeque<Sequence>,
    /// In the order of their admission.
    running: Vec<RunningSequence>,
    /// Pages that enter the ranks' prefix caches, of sequences that may have ended.
    publish: Vec<Publish>,
    /// Sequences that the ranks still hold but no request needs.
    ended: Vec<RequestId>,
    events: Vec<Event>,
    /// Draft tokens that were run, and those that were accepted.
    drafted: [u64; 2],
}

/// A sequence that was admitted: it has KV memory.
struct RunningSequence {
    sequence: Sequence,
    /// Tokens that are in the ranks' KV caches.
    computed: usize,
    /// Pages that it shares, from its beginning on.
    shared: Vec<PageId>,
    /// Pages of its own after them.
    own: u64,
    /// Whether other sequences may still find its next pages.
    publishes: bool,
    /// Whether the ranks know the sequence.
    begun: bool,
    /// The latest step that it was in.
    latest_step: u64,
}

impl RunningSequence {
    fn left(&self) -> usize {
        self.sequence.tokens.len() - self.computed
    }

    /// Whether only the token that was sampled last is left.
    fn is_decoding(&self) -> bool {
        self.computed > 0 && self.left() == 1 && self.sequence.generated() > 0
    }

    /// Tokens of its prompt that can be run: the last one's successor is sampled, for which its mask has
    /// to be there.
    fn readable(&self) -> usize {
        let left = self.left();
        if self.sequence.is_ready() { left } else { left.saturating_sub(1) }
    }

    fn room(&self) -> usize {
        (self.shared.len() + self.own as usize) * TOKENS_PER_PAGE
    }
}

impl Schedule {
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            prefill_tokens: limits.prefill_tokens,
            allowance: Allowance::new(limits.kept_percent),
            limits,
            constraints: None,
            compiling: VecDeque::new(),
            compiles: None,
            tenants: Tenants::default(),
            pages: Pages::new(0),
            can_roll_back: false,
            waiting: VecDeque::new(),
            running: Vec::new(),
            publish: Vec::new(),
            ended: Vec::new(),
            events: Vec::new(),
            drafted: [0; 2],
        }
    }

    pub(super) fn set_factory(&mut self, factory: Box<dyn ConstraintFactory>) {
        self.constraints = Some(Constraints::new(factory));
    }

    /// Events since the last call, in order.
    pub(super) fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    pub(super) fn submit(&mut self, id: RequestId, request: GenerateRequest, now: Instant) {
        let fail = |message, retryable| Event::Failed { request: id, message, retryable };
        if let Err(message) = self.limits.check(&request) {
            return self.events.push(fail(message, false));
        }
        let waiting = self.waiting.len() + self.compiling.len();
        if waiting >= self.limits.max_waiting {
            let message = format!("{waiting} requests are already waiting");
            return self.events.push(fail(message, true));
        }
        let has_constraint = request.constraint.is_some();
        if has_constraint && self.constraints.is_none() {
            let message = "this engine supports no constrained decoding".to_owned();
            return self.events.push(fail(message, false));
        }
        self.tenants.enter(request.tenant.id, &self.active(), now);
        let drafter = self.limits.drafts_tokens().then(|| Drafter::new(&request.prediction));
        let sequence = Sequence::new(id, request, drafter, now);
        if has_constraint {
            self.compiling.push_back(sequence);
            self.compile_next();
        } else {
            self.enqueue(sequence, now);
        }
    }

    /// A request whose constraint is there waits to be admitted.
    fn enqueue(&mut self, mut sequence: Sequence, now: Instant) {
        let id = sequence.id;
        let stops = match sequence.resume() {
            Ok(stops) => stops,
            Err(message) => {
                let failed = Event::Failed { request: id, message, retryable: false };
                return self.events.push(failed);
            }
        };
        let is_full = sequence.tokens.len() >= self.limits.max_positions as usize;
        let is_over = sequence.is_complete() || is_full || stops;
        if sequence.request.prompt_output.is_nothing() && is_over {
            let reason = if stops { FinishReason::Stop } else { FinishReason::Length };
            let usage = sequence.usage(now);
            return self.events.push(Event::Finished { request: id, reason, usage });
        }
        self.waiting.push_back(sequence);
    }

    /// Tenants that have requests.
    fn active(&self) -> BTreeSet<u64> {
        self.sequences().map(|sequence| sequence.request.tenant.id).collect()
    }

    fn sequences(&self) -> impl Iterator<Item = &Sequence> {
        let running = self.running.iter().map(|running| &running.sequence);
        self.compiling.iter().chain(&self.waiting).chain(running)
    }

    pub(super) fn cancel(&mut self, id: RequestId, now: Instant) {
        self.finish(id, FinishReason::Cancelled, now);
    }

    /// Drops all requests without an event.
    pub(super) fn forget(&mut self) {
        let (constraints, drafted) = (self.constraints.take(), self.drafted);
        *self = Self { constraints, drafted, ..Self::new(self.limits.clone()) };
    }

    /// Other ranks took over, which hold none of the sequences.
    pub(super) fn begin_anew(&mut self, agreed: Agreed) {
        self.ended.clear();
        self.publish.clear();
        self.pages.forget(agreed.pages);
        self.can_roll_back = agreed.can_roll_back;
        self.prefill_tokens = agreed.prefill_tokens as usize;
        for running in self.running.drain(..).rev() {
            self.waiting.push_front(running.sequence);
        }
    }

    /// The next step: one token for every sequence that is decoding, and the next chunk of each
    /// prompt that is being prefilled, within the token budget. Fails when the draft model does.
    pub(super) fn plan(
        &mut self,
        step: u64,
        now: Instant,
        proposer: Option<&mut dyn DraftProposer>,
    ) -> Result<Plan, StepError> {
        self.allowance.fill(now);
        self.take_done(now);
        self.expire(now);
        self.refuse_too_long();
        self.extend();
        self.admit(now);
        self.await_masks(now);
        let counts = self.counts(now);
        let drafts = self.drafts(&counts, proposer)?;
        let mut begin = Vec::new();
        let mut scheduled = Vec::new();
        let mut faults = Vec::new();
        for ((running, count), mut drafts) in self.running.iter_mut().zip(counts).zip(drafts) {
            if count == 0 {
                continue;
            }
            let sample = count == running.left() && running.sequence.generates();
            let vocab_size = self.limits.vocab_size;
            let masks = sample.then(|| running.sequence.masks(vocab_size, &mut drafts));
            let masks = match masks.transpose() {
                Ok(masks) => masks.unwrap_or_default(),
                Err(fault) => {
                    faults.push((running.sequence.id, fault));
                    continue;
                }
            };
            running.latest_step = step;
            if !running.begun {
                running.begun = true;
                begin.push(self.limits.begin(running));
            }
            let end = running.computed + count;
            let known = &running.sequence.tokens[running.computed..end];
            scheduled.push(ScheduledSequence {
                id: running.sequence.id,
                position: running.computed as u32,
                tokens: [known, &drafts].concat(),
                drafts: drafts.len() as u32,
                sample,
                next: running.sequence.next_of_prompt(end),
                masks,
            });
        }
        for (id, message) in faults {
            self.fail(id, message);
        }
        Ok(Plan { begin, scheduled, ..self.endings(step) })
    }

    /// A step that only ends sequences.
    pub(super) fn endings(&mut self, step: u64) -> Plan {
        Plan {
            step,
            publish: std::mem::take(&mut self.publish),
            end: std::mem::take(&mut self.ended),
            drop: self.pages.take_dropped(),
            ..Plan::default()
        }
    }

    /// The step that was planned last took so long on all ranks.
    pub(super) fn step_took(&mut self, took: Duration) {
        self.allowance.end(took);
    }

    /// Ends requests whose time is over.
    fn expire(&mut self, now: Instant) {
        let late: Vec<_> = self
            .sequences()
            .filter(|sequence| sequence.is_late(now))
            .map(|sequence| sequence.id)
            .collect();
        for id in late {
            self.finish(id, FinishReason::Deadline, now);
        }
    }

    /// Fails prompts that do not fit the KV memory even alone.
    fn refuse_too_long(&mut self) {
        let room = self.room();
        let long = |sequence: &&Sequence| sequence.tokens.len() >= room;
        while let Some(sequence) = self.waiting.iter().find(long) {
            let (id, message) = (
                sequence.id,
                format!(
                    "the sequence has {} tokens, and the KV cache holds {room}: \
                     raise --kv-memory, or use a smaller --kv-type",
                    sequence.tokens.len()
                ),
            );
            self.fail(id, message);
        }
    }

    /// Tokens of a sequence that has all memory.
    fn room(&self) -> usize {
        usize::try_from(self.pages.capacity()).unwrap_or(usize::MAX).saturating_mul(TOKENS_PER_PAGE)
    }

    /// Ends a request; unknown ones are ignored.
    fn finish(&mut self, id: RequestId, reason: FinishReason, now: Instant) {
        if let Some(sequence) = self.remove(id) {
            let usage: Usage = sequence.usage(now);
            self.events.push(Event::Finished { request: id, reason, usage });
        }
    }

    fn fail(&mut self, id: RequestId, message: String) {
        if self.remove(id).is_some() {
            self.events.push(Event::Failed { request: id, message, retryable: false });
        }
    }

    fn remove(&mut self, id: RequestId) -> Option<Sequence> {
        for queue in [&mut self.compiling, &mut self.waiting] {
            if let Some(index) = queue.iter().position(|sequence| sequence.id == id) {
                return queue.remove(index);
            }
        }
        let index = self.running.iter().position(|running| running.sequence.id == id)?;
        let running = self.running.remove(index);
        self.pages.release(&running.shared);
        self.pages.give(running.own);
        if running.begun {
            self.ended.push(id);
        }
        Some(running.sequence)
    }
}

impl Limits {
    fn begin(&self, running: &RunningSequence) -> NewSequence {
        let sequence = &running.sequence;
        let params = SamplingParams {
            sampling: sequence.request.sampling.clone(),
            logprobs: sequence.request.logprobs,
            prompt_output: sequence.request.prompt_output,
            prompt_len: sequence.request.prompt.len() as u32,
            forbidden: sequence.forbidden(),
            forbidden_before: (sequence.request.prompt.len() as u32)
                .saturating_add(sequence.request.min_tokens),
        };
        let history = if params.needs_history() {
            sequence.tokens[..running.computed].to_vec()
        } else {
            Vec::new()
        };
        let total = self.total(sequence);
        NewSequence { id: sequence.id, total, params, pages: running.shared.clone(), history }
    }
}

#[cfg(test)]
mod tests;
