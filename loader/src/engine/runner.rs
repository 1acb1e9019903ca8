//! What every rank does with a plan: the same step on its part of the model.

use std::{collections::BTreeMap, fmt::Display};

use shardpack_collectives::GroupError;

use super::{
    plan::{Plan, Work},
    request::{RequestId, Sampling},
    sample::sample,
};
use crate::{
    backend::{Backend, Ranks, StepError},
    model::{Batch, Model},
};

/// The sequences of one rank and the model that they run on.
pub(super) struct Runner<B: Backend> {
    model: Model<B>,
    backend: B,
    sequences: BTreeMap<RequestId, Sequence<B::Cache>>,
    /// Steps run in this epoch.
    steps: u64,
}

struct Sequence<C> {
    cache: C,
    sampling: Sampling,
    /// Tokens in the cache.
    len: u32,
    /// The token that was sampled after them, which must come next.
    next: Option<u32>,
}

/// The token after a sequence's work; none where the model computed no numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sampled {
    pub(super) id: RequestId,
    pub(super) token: Option<u32>,
}

impl<B: Backend> Runner<B> {
    pub(super) fn new(model: Model<B>, backend: B) -> Self {
        Self { model, backend, sequences: BTreeMap::new(), steps: 0 }
    }

    /// Drops all sequences; steps are counted anew.
    pub(super) fn forget(&mut self) {
        self.sequences.clear();
        self.steps = 0;
    }

    /// Number of the step that comes next.
    pub(super) const fn next_step(&self) -> u64 {
        self.steps + 1
    }

    /// Carries out a plan. A plan that does not fit the sequences here means that the ranks no
    /// longer agree.
    pub(super) fn run(
        &mut self,
        plan: &Plan,
        ranks: &Ranks<'_>,
    ) -> Result<Vec<Sampled>, StepError> {
        if plan.step != self.next_step() {
            return Err(out_of_step(&format!("step {}", self.next_step()), &plan.step));
        }
        self.steps = plan.step;
        for id in &plan.end {
            if self.sequences.remove(id).is_none() {
                return Err(out_of_step(&"the end of a known sequence", &id.0));
            }
        }
        for begin in &plan.begin {
            let cache = self.backend.cache(&self.model.cache_shape());
            let sequence = Sequence { cache, sampling: begin.sampling.clone(), len: 0, next: None };
            if self.sequences.insert(begin.id, sequence).is_some() {
                return Err(out_of_step(&"a new sequence", &begin.id.0));
            }
        }
        if plan.work.is_empty() {
            return Ok(Vec::new());
        }
        // Sequences leave the map while they are worked on; after an error all are forgotten.
        let mut sequences = Vec::with_capacity(plan.work.len());
        for work in &plan.work {
            let Some(sequence) = self.sequences.remove(&work.id) else {
                return Err(out_of_step(&"work on a known sequence", &work.id.0));
            };
            self.check(work, &sequence)?;
            sequences.push(sequence);
        }
        let logits = self.forward(plan, &mut sequences, ranks)?;
        let mut rows = logits.chunks_exact(self.model.spec().vocab_size as usize);
        let mut sampled = Vec::new();
        for (work, mut sequence) in plan.work.iter().zip(sequences) {
            sequence.len += work.tokens.len() as u32;
            sequence.next = None;
            if work.sample {
                let row = rows.next().expect("one row of logits per sampled sequence");
                let token = sample(row, &sequence.sampling, sequence.len);
                sequence.next = token;
                sampled.push(Sampled { id: work.id, token });
            }
            self.sequences.insert(work.id, sequence);
        }
        Ok(sampled)
    }

    fn check(&self, work: &Work, sequence: &Sequence<B::Cache>) -> Result<(), StepError> {
        let spec = self.model.spec();
        let end = work.position as usize + work.tokens.len();
        if work.position != sequence.len || end > spec.max_positions as usize {
            let expected = format!("position {} of sequence {}", sequence.len, work.id.0);
            return Err(out_of_step(&expected, &work.position));
        }
        if let Some(next) = sequence.next.filter(|next| work.tokens != [*next]) {
            return Err(out_of_step(&format!("token {next}"), &format!("{:?}", work.tokens)));
        }
        match work.tokens.iter().find(|token| **token >= spec.vocab_size) {
            Some(token) => Err(out_of_step(&format!("a token below {}", spec.vocab_size), token)),
            None => Ok(()),
        }
    }

    /// Logits of the sequences that are sampled, one row each.
    fn forward(
        &self,
        plan: &Plan,
        sequences: &mut [Sequence<B::Cache>],
        ranks: &Ranks<'_>,
    ) -> Result<Vec<f32>, StepError> {
        let mut batch = Batch::default();
        for work in &plan.work {
            batch.tokens.extend(&work.tokens);
            batch.positions.extend(work.position..work.position + work.tokens.len() as u32);
            batch.lengths.push(work.tokens.len());
            if work.sample {
                batch.logit_rows.push(batch.tokens.len() - 1);
            }
        }
        let mut caches: Vec<_> = sequences.iter_mut().map(|sequence| &mut sequence.cache).collect();
        let (model, backend) = (&self.model, &self.backend);
        backend.run(|| {
            let logits = model.forward(backend, &batch, &mut caches, ranks)?;
            let logits = logits.map_or(Ok(Vec::new()), |logits| backend.read(logits, ranks))?;
            backend.settle(&mut caches, ranks)?;
            Ok(logits)
        })
    }
}

fn out_of_step(expected: &dyn Display, found: &dyn Display) -> StepError {
    let (expected, found) = (expected.to_string(), found.to_string());
    StepError::Group(GroupError::OutOfStep { rank: 0, expected, found })
}
