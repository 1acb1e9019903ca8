//! One rank's engine over a backend: leads or follows, one step per call.

use std::time::{Duration, Instant};

use shardpack_collectives::{Deadline, Group, GroupError};
use shardpack_engine_api::{ConstraintFactory, Event, GenerateRequest, RequestId};
use shardpack_formats::memory::{
    MIN_KV_BYTES, PREFILL_TOKENS, PREFILL_TOKENS_BESIDE_DECODE, TOKENS_PER_PAGE,
};

use super::{
    draft::{DraftModel, DraftModelError, DraftProposer, draft_token_cost},
    hello::Hello,
    plan::{MAX_PREFILL_TOKENS, MAX_SEQUENCES, Plan},
    rank::{HEARTBEAT_TIMEOUT, RankEngine, StepOutcome},
    runner::Runner,
    schedule::{Drafting, Limits, Schedule},
};
use crate::{
    backend::{Backend, Ranks, StepError},
    model::Model,
};

/// How long a leader without a step waits for a constraint before it looks for commands again.
const THREADS_PATIENCE: Duration = Duration::from_millis(2);

/// Whether speculative decoding is on; it does not change the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Speculate {
    /// Where every backend of the group computes a row the same whatever else is computed: as
    /// far as it pays.
    Auto,
    /// Never.
    Off,
}

/// Sizes and times of an engine; the same on all ranks of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// Sequences that are run together; further requests wait.
    pub max_sequences: usize,
    /// Requests that may wait; more are refused as retryable.
    pub max_waiting: usize,
    /// Prefill token budget of one step, which bounds its activations.
    pub prefill_tokens: usize,
    /// Chunked-prefill token budget: prompt tokens of a step in which other sequences decode, so
    /// that these never wait long for their next token.
    pub chunked_prefill_tokens: usize,
    /// Percent of its speed that a tenant with few streams keeps beside the work of others: the rest of
    /// the time is for their prompts and further streams.
    pub kept_percent: u32,
    /// KV cache memory of each rank. By default one sequence of the model's longest
    /// context, or [`MIN_KV_BYTES`] where that is more.
    pub kv_bytes: Option<u64>,
    /// Whether speculative decoding is on.
    pub speculate: Speculate,
    /// Longest silence of the leader.
    pub heartbeat_timeout: Duration,
    /// Longest wait of one call on the group within a step: more than the ranks' work between
    /// two all-reduces can differ on the slowest machines, a layer's part of `prefill_tokens`.
    pub collective_timeout: Duration,
}

impl EngineOptions {
    /// Sizes that suit any model and times for machines of one kind.
    pub const STANDARD: Self = Self {
        max_sequences: 32,
        max_waiting: 1024,
        prefill_tokens: PREFILL_TOKENS,
        chunked_prefill_tokens: PREFILL_TOKENS_BESIDE_DECODE,
        kept_percent: 88,
        kv_bytes: None,
        speculate: Speculate::Auto,
        heartbeat_timeout: HEARTBEAT_TIMEOUT,
        collective_timeout: Duration::from_secs(20),
    };

    /// KV cache memory of one rank, and of one page.
    pub fn kv_bytes_of<B: Backend>(&self, model: &Model<B>, backend: &B) -> [u64; 2] {
        match backend.page_bytes(&model.cache_shape()) {
            0 => [0, 0],
            page => {
                let taken = page * backend.page_copies();
                [self.pages(model, backend).saturating_mul(taken), taken]
            }
        }
    }

    /// KV pages of one rank.
    fn pages<B: Backend>(&self, model: &Model<B>, backend: &B) -> u64 {
        let page_bytes = backend.page_bytes(&model.cache_shape());
        if page_bytes == 0 {
            // Other ranks hold them.
            return u64::MAX;
        }
        let longest = u64::from(model.spec().max_positions).div_ceil(TOKENS_PER_PAGE as u64);
        match self.kv_bytes {
            Some(bytes) => bytes / (page_bytes * backend.page_copies()),
            None => longest.max(MIN_KV_BYTES / page_bytes),
        }
    }
}

/// One rank's engine over a backend.
///
/// With a group of another epoch it recomputes all its sequences from their tokens, and they
/// continue with the same output; [`RankEngine::reset`] drops them
/// instead.
pub struct Engine<B: Backend> {
    options: EngineOptions,
    schedule: Schedule,
    runner: Runner<B>,
    /// The draft model, on rank 0.
    draft: Option<DraftModel<B>>,
    epoch: Option<u64>,
    /// What the device said when it failed.
    device_failure: Option<String>,
}

impl<B: Backend> Engine<B> {
    /// An engine without requests.
    ///
    /// # Panics
    /// When the options ask for more than a plan can hold, or for nothing.
    #[must_use]
    pub fn new(model: Model<B>, backend: B, options: EngineOptions) -> Self {
        assert!((1..=MAX_SEQUENCES).contains(&options.max_sequences), "{options:?}");
        assert!((1..=MAX_PREFILL_TOKENS).contains(&options.prefill_tokens), "{options:?}");
        assert!((1..=MAX_PREFILL_TOKENS).contains(&options.chunked_prefill_tokens), "{options:?}");
        let spec = model.spec();
        let long = spec.ropes.iter().filter_map(|rope| rope.long.as_ref());
        let limits = Limits {
            vocab_size: spec.vocab_size,
            max_positions: spec.max_positions,
            shortened: spec.shortened(),
            max_sequences: options.max_sequences,
            max_waiting: options.max_waiting,
            prefill_tokens: options.prefill_tokens,
            chunked_prefill_tokens: options.chunked_prefill_tokens,
            kept_percent: options.kept_percent,
            prefix_reuse: model.reuses_prefixes(),
            whole_prompts: spec.is_bidirectional(),
            long_beyond: long.map(|long| long.beyond).collect(),
            drafting: Drafting::new(options.speculate, spec),
        };
        let runner = Runner::new(model, backend);
        let schedule = Schedule::new(limits);
        Self { options, schedule, runner, draft: None, epoch: None, device_failure: None }
    }

    /// The same, with what turns the constraints of requests into masks; only rank 0 needs it.
    #[must_use]
    pub fn with_constraints(mut self, factory: Box<dyn ConstraintFactory>) -> Self {
        self.schedule.set_factory(factory);
        self
    }

    /// The same, with a draft model; only rank 0 needs it. It has the tokenizer of the target model, is not
    /// sharded, and has as much KV memory as the target model's tokens take in it.
    pub fn with_draft_model(mut self, draft: Model<B>) -> Result<Self, DraftModelError> {
        if self.runner.backend().kv_rollback().is_none() {
            return Err(DraftModelError::Backend);
        }
        let model = self.runner.model();
        let cost = draft_token_cost(draft.spec(), model.spec(), model.shard().logits.len());
        self.draft = Some(DraftModel::new(draft, model.spec().vocab_size, cost)?);
        // Other ranks' sequences and ours begin with its room.
        self.epoch = None;
        Ok(self)
    }

    /// Whether the requests that are submitted from now on have drafts.
    pub fn speculate(&mut self, when: Speculate) {
        let drafting = Drafting::new(when, self.model().spec());
        self.schedule.set_drafting(drafting);
    }

    /// The same, with drafts that a test chooses, all of which are run.
    #[cfg(test)]
    pub(super) fn with_drafts(mut self, source: super::schedule::Forced) -> Self {
        self.schedule.set_drafting(Drafting::Forced(source));
        self
    }

    /// The same with a fixed cost of a draft token.
    #[cfg(test)]
    pub(super) fn with_draft_cost(mut self, cost: f32) -> Self {
        self.draft.as_mut().expect("it has a draft model").set_cost(cost);
        self
    }

    /// The same; whether the next step is prepared while the device computes this one.
    #[cfg(test)]
    pub(super) const fn look_ahead(&mut self, looks_ahead: bool) {
        self.runner.look_ahead(looks_ahead);
    }

    /// Steps that were run as they were prepared.
    #[cfg(test)]
    pub(super) const fn taken_up(&self) -> u64 {
        self.runner.taken_up()
    }

    /// What this engine runs.
    #[must_use]
    pub const fn model(&self) -> &Model<B> {
        self.runner.model()
    }

    /// A group of another epoch has other ranks, which know none of our sequences.
    fn enter(&mut self, group: &dyn Group, timeout: Duration) -> Result<(), GroupError> {
        if self.epoch == Some(group.epoch()) {
            return Ok(());
        }
        let (model, backend) = (self.runner.model(), self.runner.backend());
        let hello = Hello {
            vocab_size: model.spec().vocab_size,
            kv: backend.kv_type(),
            can_roll_back: backend.kv_rollback().is_some(),
            pages: self.options.pages(model, backend),
            prefill_tokens: self.options.prefill_tokens as u32,
        };
        let agreed = hello.exchange(group, Deadline::after(timeout)).inspect_err(|error| {
            if matches!(error, GroupError::OutOfStep { .. }) {
                group.abort(&error.to_string());
            }
        })?;
        self.epoch = Some(group.epoch());
        self.schedule.begin_anew(agreed);
        if let Some(draft) = &mut self.draft {
            let pages = usize::try_from(agreed.pages).unwrap_or(usize::MAX);
            draft.begin_anew(pages.saturating_mul(TOKENS_PER_PAGE));
        }
        self.runner.forget();
        Ok(())
    }

    fn ranks<'a>(&self, group: &'a dyn Group) -> Ranks<'a> {
        Ranks::all(group, self.options.collective_timeout)
    }

    fn send(&self, plan: &Plan, group: &dyn Group) -> Result<(), GroupError> {
        let mut bytes = plan.encode();
        group.broadcast(0, &mut bytes, Deadline::after(self.options.collective_timeout))
    }
}

impl<B: Backend> RankEngine for Engine<B> {
    fn submit(&mut self, id: RequestId, request: GenerateRequest) {
        self.schedule.submit(id, request, Instant::now());
    }

    fn cancel(&mut self, id: RequestId) {
        self.schedule.cancel(id, Instant::now());
    }

    fn lead(
        &mut self,
        group: &dyn Group,
        events: &mut dyn FnMut(Event),
    ) -> Result<StepOutcome, GroupError> {
        self.enter(group, self.options.collective_timeout)?;
        let backend = self.runner.backend();
        let mut bound = self.draft.as_mut().map(|draft| draft.bind(backend));
        let proposer = bound.as_mut().map(|bound| bound as &mut dyn DraftProposer);
        let plan = self.schedule.plan(self.runner.next_step(), Instant::now(), proposer);
        let plan = plan.map_err(|error| group_error(error, &mut self.device_failure))?;
        let mut outcome = StepOutcome::Idle;
        let mut deliver = |schedule: &mut Schedule| {
            for event in schedule.take_events() {
                outcome = StepOutcome::Worked;
                events(event);
            }
        };
        deliver(&mut self.schedule);
        if plan.is_empty() {
            if outcome == StepOutcome::Idle && self.schedule.waits_for_threads() {
                self.schedule.wait_for_threads(Instant::now() + THREADS_PATIENCE);
                return Ok(StepOutcome::Waiting);
            }
            return Ok(outcome);
        }
        self.send(&plan, group)?;
        let ranks = self.ranks(group);
        let started = Instant::now();
        let results = self.runner.run(&plan, &ranks);
        let results = results.map_err(|error| group_error(error, &mut self.device_failure))?;
        self.schedule.step_took(started.elapsed());
        if let Some(draft) = &mut self.draft
            && !plan.scheduled.is_empty()
        {
            let rows = plan.scheduled.iter().map(|scheduled| scheduled.tokens.len()).sum();
            draft.record_step_time(rows, started.elapsed());
        }
        self.schedule.record(&plan, results, Instant::now());
        deliver(&mut self.schedule);
        Ok(StepOutcome::Worked)
    }

    fn heartbeat(&mut self, group: &dyn Group) -> Result<(), GroupError> {
        self.enter(group, self.options.collective_timeout)?;
        let plan = self.schedule.endings(self.runner.next_step());
        self.send(&plan, group)?;
        let ranks = self.ranks(group);
        let result = self.runner.run(&plan, &ranks).map(drop);
        result.map_err(|error| group_error(error, &mut self.device_failure))
    }

    fn follow(&mut self, group: &dyn Group) -> Result<(), GroupError> {
        self.enter(group, self.options.heartbeat_timeout)?;
        let mut bytes = Vec::new();
        group.broadcast(0, &mut bytes, Deadline::after(self.options.heartbeat_timeout))?;
        let result = Plan::parse(&bytes)
            .map_err(|problem| GroupError::OutOfStep {
                rank: 0,
                expected: "a plan".to_owned(),
                found: problem.to_string(),
            })
            .and_then(|plan| {
                let result = self.runner.run(&plan, &self.ranks(group));
                result.map_err(|error| group_error(error, &mut self.device_failure))
            });
        if let Err(error @ GroupError::OutOfStep { .. }) = &result {
            // The others cannot see what is wrong here; they would wait for their deadlines.
            group.abort(&error.to_string());
        }
        result.map(drop)
    }

    fn drafts(&self) -> [u64; 2] {
        self.schedule.drafted()
    }

    fn device_failure(&self) -> Option<&str> {
        self.device_failure.as_deref()
    }

    fn reset(&mut self) {
        self.schedule.forget();
        self.runner.forget();
        self.epoch = None;
    }
}

/// What the group hears of an error; `device_failure` keeps it where the device failed.
fn group_error(error: StepError, device_failure: &mut Option<String>) -> GroupError {
    match error {
        StepError::Group(error) => error,
        // The ranks no longer hold the same sequences: the group ends and is formed again.
        StepError::Backend(message) => GroupError::Aborted(message),
        StepError::Device(message) => {
            *device_failure = Some(message.clone());
            GroupError::Aborted(message)
        }
    }
}
