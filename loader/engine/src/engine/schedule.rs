//! What rank 0 decides: who is run in the next step, and what its tokens mean for each request.
//!
//! Requests are admitted in the order in which they came, as far as there is memory for their
//! keys and values. When a running sequence needs more than there is, the one that was admitted
//! last gives way: it waits at the head of the queue, is computed anew later and gets the tokens
//! that it would have had.

mod drafting;
mod limits;
mod record;
mod sequence;

use std::{collections::VecDeque, time::Instant};

use shardpack_engine_api::{
    ConstraintFactory, Event, FinishReason, GenerateRequest, RequestId, TokenMask, Usage,
};

use super::{
    draft::{Drafter, Guesser},
    hello::Agreed,
    pages::Pages,
    plan::{Begin, PageId, Plan, Publish, Work},
    sample::Wishes,
};
use crate::backend::{StepError, TOKENS_PER_PAGE};
pub(super) use drafting::Drafting;
#[cfg(test)]
pub(super) use drafting::Forced;
pub(super) use limits::Limits;
use sequence::Job;

/// Requests between submission and end.
pub(super) struct Schedule {
    limits: Limits,
    factory: Option<Box<dyn ConstraintFactory>>,
    pages: Pages,
    /// Whether the ranks can take back drafts.
    rewinds: bool,
    /// In the order of their admission to be.
    waiting: VecDeque<Job>,
    /// In the order of their admission.
    active: Vec<Active>,
    /// Pages that the ranks are to name, of sequences that may have ended.
    publish: Vec<Publish>,
    /// Sequences that the ranks still hold but no request needs.
    ended: Vec<RequestId>,
    events: Vec<Event>,
    /// Drafts that were run, and those of them that were kept.
    drafted: [u64; 2],
}

/// A sequence for which there is memory.
struct Active {
    job: Job,
    /// Tokens that the ranks have in their caches.
    fed: usize,
    /// Pages that it shares, from its beginning on.
    shared: Vec<PageId>,
    /// Pages of its own after them.
    own: u64,
    /// Whether other sequences may still find its next pages.
    publishes: bool,
    /// Whether the ranks know the sequence.
    begun: bool,
}

impl Active {
    fn left(&self) -> usize {
        self.job.tokens.len() - self.fed
    }

    /// Whether only the token that was sampled last is left.
    fn is_decoding(&self) -> bool {
        self.fed > 0 && self.left() == 1 && self.job.generated() > 0
    }

    fn room(&self) -> usize {
        (self.shared.len() + self.own as usize) * TOKENS_PER_PAGE
    }
}

impl Schedule {
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            limits,
            factory: None,
            pages: Pages::new(0),
            rewinds: false,
            waiting: VecDeque::new(),
            active: Vec::new(),
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
            let message = format!("{} requests are waiting already", self.waiting.len());
            return self.events.push(fail(message, true));
        }
        let constraint = match (&request.constraint, &self.factory) {
            (None, _) => None,
            (Some(_), None) => {
                let message = "this engine takes no constraints".to_owned();
                return self.events.push(fail(message, false));
            }
            (Some(source), Some(factory)) => match factory.build(source) {
                Ok(constraint) => Some(constraint),
                Err(error) => return self.events.push(fail(error.to_string(), false)),
            },
        };
        let drafter = self.limits.guesses().then(|| Drafter::new(&request.prediction));
        let job = Job::new(id, request, constraint, drafter, now);
        if job.request.max_tokens == 0 || job.tokens.len() >= self.limits.max_positions as usize {
            let (reason, usage) = (FinishReason::Length, job.usage(now));
            return self.events.push(Event::Finished { request: id, reason, usage });
        }
        self.waiting.push_back(job);
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
        self.rewinds = agreed.rewinds;
        for active in self.active.drain(..).rev() {
            self.waiting.push_front(active.job);
        }
    }

    /// The next step: one token for every sequence that is decoding, and the next tokens of
    /// prompts, of which each that is being read gets its share. A draft model that was asked may
    /// fail.
    pub(super) fn plan(
        &mut self,
        step: u64,
        now: Instant,
        guesser: Option<&mut dyn Guesser>,
    ) -> Result<Plan, StepError> {
        self.expire(now);
        self.refuse_too_long();
        self.extend();
        self.admit(now);
        let counts = self.counts();
        let drafts = self.drafts(&counts, guesser)?;
        let mut begin = Vec::new();
        let mut work = Vec::new();
        let mut faults = Vec::new();
        for ((active, count), mut drafts) in self.active.iter_mut().zip(counts).zip(drafts) {
            if count == 0 {
                continue;
            }
            let sample = count == active.left();
            let vocab_size = self.limits.vocab_size;
            let masks = sample.then(|| active.job.masks(vocab_size, &mut drafts));
            let masks = match masks.transpose() {
                Ok(masks) => masks.unwrap_or_default(),
                Err(fault) => {
                    faults.push((active.job.id, fault));
                    continue;
                }
            };
            if !active.begun {
                active.begun = true;
                begin.push(self.limits.begin(active));
            }
            let known = &active.job.tokens[active.fed..active.fed + count];
            work.push(Work {
                id: active.job.id,
                position: active.fed as u32,
                tokens: [known, &drafts].concat(),
                drafts: drafts.len() as u32,
                sample,
                masks,
            });
        }
        for (id, message) in faults {
            self.fail(id, message);
        }
        Ok(Plan { begin, work, ..self.endings(step) })
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
        let jobs = self.waiting.iter().chain(self.active.iter().map(|active| &active.job));
        let late: Vec<_> = jobs.filter(|job| job.is_late(now)).map(|job| job.id).collect();
        for id in late {
            self.finish(id, FinishReason::Deadline, now);
        }
    }

    /// Fails prompts that no memory of these ranks could hold.
    fn refuse_too_long(&mut self) {
        let room = self.room();
        let long = |job: &&Job| job.tokens.len() >= room;
        while let Some(job) = self.waiting.iter().find(long) {
            let (id, message) = (
                job.id,
                format!(
                    "the sequence has {} tokens, and the memory for keys and values holds {room}: \
                     give the ranks more of it (--kv-memory), or a smaller type (--kv-type)",
                    job.tokens.len()
                ),
            );
            self.fail(id, message);
        }
    }

    /// Tokens of a sequence that has all memory.
    fn room(&self) -> usize {
        usize::try_from(self.pages.capacity()).unwrap_or(usize::MAX).saturating_mul(TOKENS_PER_PAGE)
    }

    /// Makes room for the next token of every sequence that is decoding; those admitted last
    /// give way.
    fn extend(&mut self) {
        let mut index = 0;
        while index < self.active.len() {
            let active = &mut self.active[index];
            if active.job.tokens.len() <= active.room() {
                index += 1;
            } else if self.pages.take(1) {
                active.own += 1;
                index += 1;
            } else {
                let active = self.active.pop().expect("there is one at the index");
                self.preempt(active);
            }
        }
    }

    fn preempt(&mut self, active: Active) {
        self.pages.release(&active.shared);
        self.pages.give(active.own);
        if active.begun {
            self.ended.push(active.job.id);
        }
        self.waiting.push_front(active.job);
    }

    fn admit(&mut self, now: Instant) {
        while self.active.len() < self.limits.max_sequences
            && let Some(job) = self.waiting.front_mut()
        {
            let kind = self.limits.kind(job);
            let found = if self.limits.prefix_reuse {
                self.pages.find(kind, &job.tokens)
            } else {
                Vec::new()
            };
            // Room for the next token too, so that it need not give way at once.
            let needed = (job.tokens.len() + 1).div_ceil(TOKENS_PER_PAGE);
            let own = (needed.min(self.pages.capacity() as usize) - found.len()) as u64;
            if !self.pages.take(own) {
                self.pages.release(&found);
                return;
            }
            let fed = found.len() * TOKENS_PER_PAGE;
            job.admit(fed as u32, now);
            let job = self.waiting.pop_front().expect("looked at above");
            let publishes = self.limits.prefix_reuse;
            self.active.push(Active { job, fed, shared: found, own, publishes, begun: false });
        }
    }

    /// How many tokens of each active sequence are run.
    fn counts(&self) -> Vec<usize> {
        let decoding = self.active.iter().any(Active::is_decoding);
        let budget = if decoding { self.limits.mixed_tokens } else { usize::MAX };
        let mut budget = budget.min(self.limits.prefill_tokens);
        let mut counts: Vec<usize> =
            self.active.iter().map(|active| usize::from(active.is_decoding())).collect();
        let reading = counts.iter().filter(|count| **count == 0).count();
        // First each its share, so that a short prompt does not wait for the end of a long one,
        // then the oldest what is left.
        for share in [(budget / reading.max(1)).max(1), usize::MAX] {
            for (active, count) in self.active.iter().zip(&mut counts) {
                if !active.is_decoding() {
                    let more = (active.left() - *count).min(share).min(budget);
                    *count += more;
                    budget -= more;
                }
            }
        }
        counts
    }

    /// Ends a request; unknown ones are ignored.
    fn finish(&mut self, id: RequestId, reason: FinishReason, now: Instant) {
        if let Some(job) = self.remove(id) {
            let usage: Usage = job.usage(now);
            self.events.push(Event::Finished { request: id, reason, usage });
        }
    }

    fn fail(&mut self, id: RequestId, message: String) {
        if self.remove(id).is_some() {
            self.events.push(Event::Failed { request: id, message, retryable: false });
        }
    }

    fn remove(&mut self, id: RequestId) -> Option<Job> {
        if let Some(index) = self.waiting.iter().position(|job| job.id == id) {
            return self.waiting.remove(index);
        }
        let index = self.active.iter().position(|active| active.job.id == id)?;
        let active = self.active.remove(index);
        self.pages.release(&active.shared);
        self.pages.give(active.own);
        if active.begun {
            self.ended.push(id);
        }
        Some(active.job)
    }
}

impl Limits {
    fn begin(&self, active: &Active) -> Begin {
        let job = &active.job;
        let wishes = Wishes {
            sampling: job.request.sampling.clone(),
            logprobs: job.request.logprobs,
            prompt_len: job.request.prompt.len() as u32,
            forbidden: job.forbidden(),
            forbidden_before: (job.request.prompt.len() as u32)
                .saturating_add(job.request.min_tokens),
        };
        let history =
            if wishes.needs_history() { job.tokens[..active.fed].to_vec() } else { Vec::new() };
        let total = self.total(job);
        Begin { id: job.id, total, wishes, pages: active.shared.clone(), history }
    }
}

/// A mask that forbids nothing need not travel.
fn needed(mask: TokenMask) -> Option<TokenMask> {
    (!mask.is_all()).then_some(mask)
}
