//! The scheduler on rank 0: continuous batching with chunked prefill, and the effect of each sampled
//! token on its request.
//!
//! Requests are admitted in order of arrival, as far as there is KV memory. When a running sequence
//! needs more than there is, the one that was admitted last is preempted: it waits at the head of
//! the queue, is recomputed later and gets the same tokens.

mod drafting;
mod limits;
mod record;
mod sequence;

use std::{collections::VecDeque, time::Instant};

use shardpack_engine_api::{
    ConstraintFactory, Event, FinishReason, GenerateRequest, RequestId, TokenMask, Usage,
};
use shardpack_formats::memory::TOKENS_PER_PAGE;

use super::{
    draft::{DraftProposer, Drafter},
    hello::Agreed,
    pages::Pages,
    plan::{NewSequence, PageId, Plan, Publish, ScheduledSequence},
    sample::SamplingParams,
};
use crate::backend::StepError;
pub(super) use drafting::Drafting;
#[cfg(test)]
pub(super) use drafting::Forced;
pub(super) use limits::Limits;
use sequence::Sequence;

/// Requests between submission and end.
pub(super) struct Schedule {
    limits: Limits,
    /// Prefill tokens of a step that all ranks have memory for.
    prefill_tokens: usize,
    factory: Option<Box<dyn ConstraintFactory>>,
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
}

impl RunningSequence {
    fn left(&self) -> usize {
        self.sequence.tokens.len() - self.computed
    }

    /// Whether only the token that was sampled last is left.
    fn is_decoding(&self) -> bool {
        self.computed > 0 && self.left() == 1 && self.sequence.generated() > 0
    }

    fn room(&self) -> usize {
        (self.shared.len() + self.own as usize) * TOKENS_PER_PAGE
    }
}

impl Schedule {
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            prefill_tokens: limits.prefill_tokens,
            limits,
            factory: None,
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
        self.factory = Some(factory);
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
        if self.waiting.len() >= self.limits.max_waiting {
            let message = format!("{} requests are already waiting", self.waiting.len());
            return self.events.push(fail(message, true));
        }
        let constraint = match (&request.constraint, &self.factory) {
            (None, _) => None,
            (Some(_), None) => {
                let message = "this engine supports no constrained decoding".to_owned();
                return self.events.push(fail(message, false));
            }
            (Some(source), Some(factory)) => match factory.build(source) {
                Ok(constraint) => Some(constraint),
                Err(error) => return self.events.push(fail(error.to_string(), false)),
            },
        };
        let drafter = self.limits.drafts_tokens().then(|| Drafter::new(&request.prediction));
        let mut sequence = Sequence::new(id, request, constraint, drafter, now);
        let stops = match sequence.resume() {
            Ok(stops) => stops,
            Err(message) => return self.events.push(fail(message, false)),
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

    pub(super) fn cancel(&mut self, id: RequestId, now: Instant) {
        self.finish(id, FinishReason::Cancelled, now);
    }

    /// Drops all requests without an event.
    pub(super) fn forget(&mut self) {
        let (factory, drafted) = (self.factory.take(), self.drafted);
        *self = Self { factory, drafted, ..Self::new(self.limits.clone()) };
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
        self.expire(now);
        self.refuse_too_long();
        self.extend();
        self.admit(now);
        let counts = self.counts();
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

    /// Ends requests whose time is over.
    fn expire(&mut self, now: Instant) {
        let sequences =
            self.waiting.iter().chain(self.running.iter().map(|running| &running.sequence));
        let late: Vec<_> = sequences
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

    /// Allocates a page for the next token of every sequence that needs one; those admitted last
    /// are preempted.
    fn extend(&mut self) {
        let mut index = 0;
        while index < self.running.len() {
            let running = &mut self.running[index];
            if running.sequence.tokens.len() <= running.room() {
                index += 1;
            } else if self.pages.take(1) {
                running.own += 1;
                index += 1;
            } else {
                let running = self.running.pop().expect("there is one at the index");
                self.preempt(running);
            }
        }
    }

    fn preempt(&mut self, running: RunningSequence) {
        self.pages.release(&running.shared);
        self.pages.give(running.own);
        if running.begun {
            self.ended.push(running.sequence.id);
        }
        self.waiting.push_front(running.sequence);
    }

    fn admit(&mut self, now: Instant) {
        while self.running.len() < self.limits.max_sequences
            && let Some(sequence) = self.waiting.front_mut()
        {
            let kind = self.limits.kind(sequence);
            // Every row of a prompt of which something is wanted is computed.
            let found = if self.limits.prefix_reuse && sequence.request.prompt_output.is_nothing() {
                self.pages.find(kind, &sequence.tokens)
            } else {
                Vec::new()
            };
            // Room for the next token too, so that it is not preempted at once.
            let needed = (sequence.tokens.len() + 1).div_ceil(TOKENS_PER_PAGE);
            let own = (needed.min(self.pages.capacity() as usize) - found.len()) as u64;
            if !self.pages.take(own) {
                self.pages.release(&found);
                return;
            }
            let computed = found.len() * TOKENS_PER_PAGE;
            sequence.admit(computed as u32, now);
            let sequence = self.waiting.pop_front().expect("looked at above");
            let publishes = self.limits.prefix_reuse;
            self.running.push(RunningSequence {
                sequence,
                computed,
                shared: found,
                own,
                publishes,
                begun: false,
            });
        }
    }

    /// How many tokens of each running sequence are run.
    fn counts(&self) -> Vec<usize> {
        if self.limits.whole_prompts {
            return self.whole_counts();
        }
        let decoding = self.running.iter().any(RunningSequence::is_decoding);
        let budget = if decoding { self.limits.chunked_prefill_tokens } else { usize::MAX };
        let mut budget = budget.min(self.prefill_tokens);
        let mut counts: Vec<usize> =
            self.running.iter().map(|running| usize::from(running.is_decoding())).collect();
        let reading = counts.iter().filter(|count| **count == 0).count();
        // First each its share, so that a short prompt does not wait for the end of a long one,
        // then the oldest what is left.
        for share in [(budget / reading.max(1)).max(1), usize::MAX] {
            for (running, count) in self.running.iter().zip(&mut counts) {
                if !running.is_decoding() {
                    let more = (running.left() - *count).min(share).min(budget);
                    *count += more;
                    budget -= more;
                }
            }
        }
        counts
    }

    /// Whole prompts within the budget; the first one even beyond it.
    fn whole_counts(&self) -> Vec<usize> {
        let mut budget = self.prefill_tokens;
        let count = |(index, running): (usize, &RunningSequence)| {
            let left = running.left();
            let runs = index == 0 || left <= budget;
            budget = budget.saturating_sub(if runs { left } else { 0 });
            if runs { left } else { 0 }
        };
        self.running.iter().enumerate().map(count).collect()
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
        if let Some(index) = self.waiting.iter().position(|sequence| sequence.id == id) {
            return self.waiting.remove(index);
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

/// A mask that forbids nothing need not travel.
fn needed(mask: TokenMask) -> Option<TokenMask> {
    (!mask.is_all()).then_some(mask)
}
