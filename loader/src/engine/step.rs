//! One rank's engine over a backend: leads or follows, one step per call.

use std::time::{Duration, Instant};

use shardpack_collectives::{Deadline, Group, GroupError};

use super::{
    plan::{MAX_PREFILL_TOKENS, MAX_SEQUENCES, Plan},
    rank::{PATIENCE, RankEngine, StepOutcome},
    request::{Event, GenerateRequest, RequestId},
    runner::Runner,
    schedule::{Limits, Schedule},
};
use crate::{
    backend::{Backend, Ranks, StepError},
    model::Model,
};

/// Sizes and times of an engine; the same on all ranks of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// Sequences that are run together; further requests wait.
    pub max_sequences: usize,
    /// Prompt tokens of one step, so that sequences that are decoding never wait long.
    pub prefill_tokens: usize,
    /// Longest silence of the leader.
    pub heartbeat_timeout: Duration,
    /// Longest wait of one call on the group within a step: more than the ranks' work between
    /// two sums can differ on the slowest machines, a layer's part of `prefill_tokens`.
    pub collective_timeout: Duration,
}

impl EngineOptions {
    /// Sizes that suit any model and times for machines of one kind.
    pub const STANDARD: Self = Self {
        max_sequences: 32,
        prefill_tokens: 512,
        heartbeat_timeout: PATIENCE,
        collective_timeout: Duration::from_secs(20),
    };
}

/// One rank's engine over a backend.
///
/// With a group of another epoch it begins all its sequences anew from the tokens that it has,
/// and they go on with the tokens that they would have had; [`RankEngine::reset`] drops them
/// instead.
pub struct Engine<B: Backend> {
    options: EngineOptions,
    schedule: Schedule,
    runner: Runner<B>,
    epoch: Option<u64>,
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
        let limits = Limits {
            vocab_size: model.spec().vocab_size,
            max_positions: model.spec().max_positions,
            max_sequences: options.max_sequences,
            prefill_tokens: options.prefill_tokens,
        };
        let runner = Runner::new(model, backend);
        Self { options, schedule: Schedule::new(limits), runner, epoch: None }
    }

    /// A group of another epoch has other ranks, which know none of our sequences.
    fn enter(&mut self, group: &dyn Group) {
        if self.epoch != Some(group.epoch()) {
            self.epoch = Some(group.epoch());
            self.schedule.begin_anew();
            self.runner.forget();
        }
    }

    fn ranks<'a>(&self, group: &'a dyn Group) -> Ranks<'a> {
        Ranks { group, timeout: self.options.collective_timeout }
    }

    fn send(&self, plan: &Plan, group: &dyn Group) -> Result<(), GroupError> {
        let mut bytes = plan.encode();
        group.broadcast(0, &mut bytes, Deadline::after(self.options.collective_timeout))
    }
}

impl<B: Backend> RankEngine for Engine<B> {
    fn submit(&mut self, id: RequestId, request: GenerateRequest) {
        self.schedule.submit(id, request);
    }

    fn cancel(&mut self, id: RequestId) {
        self.schedule.cancel(id);
    }

    fn lead(
        &mut self,
        group: &dyn Group,
        events: &mut dyn FnMut(Event),
    ) -> Result<StepOutcome, GroupError> {
        self.enter(group);
        let plan = self.schedule.plan(self.runner.next_step(), Instant::now());
        let mut outcome = StepOutcome::Idle;
        let mut deliver = |schedule: &mut Schedule| {
            for event in schedule.take_events() {
                outcome = StepOutcome::Worked;
                events(event);
            }
        };
        deliver(&mut self.schedule);
        if plan.is_empty() {
            return Ok(outcome);
        }
        self.send(&plan, group)?;
        let ranks = self.ranks(group);
        let sampled = self.runner.run(&plan, &ranks).map_err(group_error)?;
        self.schedule.record(&plan, &sampled, Instant::now());
        deliver(&mut self.schedule);
        Ok(StepOutcome::Worked)
    }

    fn heartbeat(&mut self, group: &dyn Group) -> Result<(), GroupError> {
        self.enter(group);
        let plan = self.schedule.endings(self.runner.next_step());
        self.send(&plan, group)?;
        let ranks = self.ranks(group);
        self.runner.run(&plan, &ranks).map(drop).map_err(group_error)
    }

    fn follow(&mut self, group: &dyn Group) -> Result<(), GroupError> {
        self.enter(group);
        let mut bytes = Vec::new();
        group.broadcast(0, &mut bytes, Deadline::after(self.options.heartbeat_timeout))?;
        let result = Plan::parse(&bytes)
            .map_err(|problem| GroupError::OutOfStep {
                rank: 0,
                expected: "a plan".to_owned(),
                found: problem.to_string(),
            })
            .and_then(|plan| self.runner.run(&plan, &self.ranks(group)).map_err(group_error));
        if let Err(error @ GroupError::OutOfStep { .. }) = &result {
            // The others cannot see what is wrong here; they would wait for their deadlines.
            group.abort(&error.to_string());
        }
        result.map(drop)
    }

    fn reset(&mut self) {
        self.schedule.forget();
        self.runner.forget();
        self.epoch = None;
    }
}

fn group_error(error: StepError) -> GroupError {
    match error {
        StepError::Group(error) => error,
        // The ranks no longer hold the same sequences: the group ends, and begins anew.
        StepError::Backend(message) => GroupError::Aborted(message),
    }
}
