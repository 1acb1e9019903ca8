//! The step that is likely to come next, built while the device computes this one.

use shardpack_engine_api::RequestId;

use super::plan::{Plan, ScheduledSequence};
use crate::{
    backend::{Backend, Ranks, StepError},
    model::{Batch, Model},
};

/// The step that is likely to come next: one token of each sequence that was sampled.
pub(super) struct ExpectedStep {
    ids: Vec<RequestId>,
    batch: Batch,
}

/// A step whose graph was built without its tokens.
pub(super) struct PreparedStep<B: Backend> {
    expected: ExpectedStep,
    /// With the rows of this step.
    caches: Vec<B::Cache>,
    tokens: B::LateTokens,
    logits: B::Tensor,
}

impl ExpectedStep {
    /// After a step of `plan`, whose sequences may have `totals` tokens in the end. None where some
    /// sequence will do something else: it was not sampled, has drafts or ends.
    pub(super) fn after(plan: &Plan, totals: &[u32], max_positions: u32) -> Option<Self> {
        let mut expected = Self { ids: Vec::new(), batch: Batch::default() };
        for (scheduled, total) in plan.scheduled.iter().zip(totals) {
            let position = scheduled.position + scheduled.tokens.len() as u32;
            // The token that is sampled now is at this position, and the next one behind it.
            let goes_on = scheduled.sample
                && scheduled.drafts == 0
                && position + 1 < *total
                && position < max_positions;
            if !goes_on {
                return None;
            }
            expected.ids.push(scheduled.id);
            let batch = &mut expected.batch;
            batch.tokens.push(0);
            batch.positions.push(position);
            batch.lengths.push(1);
            batch.drafts.push(0);
            batch.totals.push((*total).max(position + 1));
            batch.logit_rows.push(batch.logit_rows.len());
        }
        Some(expected)
    }

    /// Builds it on copies of the caches. An error is left to the step itself.
    pub(super) fn prepare<B: Backend>(
        self,
        model: &Model<B>,
        backend: &B,
        caches: &[&mut B::Cache],
        ranks: &Ranks<'_>,
    ) -> Option<PreparedStep<B>> {
        let mut tokens = model.late_tokens(backend, self.ids.len())?;
        let mut caches: Vec<_> = caches.iter().map(|cache| backend.fork(&tokens, cache)).collect();
        let mut handles: Vec<_> = caches.iter_mut().collect();
        let logits = model.forward_late(backend, &self.batch, &mut tokens, &mut handles, ranks);
        Some(PreparedStep { expected: self, caches, tokens, logits: logits.ok()?? })
    }
}

impl<B: Backend> PreparedStep<B> {
    /// Whether a plan asks for this step, with whatever tokens.
    pub(super) fn is(&self, plan: &Plan) -> bool {
        let ExpectedStep { ids, batch } = &self.expected;
        let same = |(scheduled, (id, position)): (&ScheduledSequence, (&RequestId, &u32))| {
            scheduled.id == *id
                && scheduled.position == *position
                && scheduled.tokens.len() == 1
                && scheduled.drafts == 0
                && scheduled.sample
        };
        plan.scheduled.len() == ids.len()
            && plan.scheduled.iter().zip(ids.iter().zip(&batch.positions)).all(same)
    }

    /// Its logits, not computed yet, once its tokens are known; the caches get its rows.
    pub(super) fn take_up(
        self,
        backend: &B,
        tokens: &[u32],
        caches: &mut [&mut B::Cache],
    ) -> Result<B::Tensor, StepError> {
        // The caches before the step are dropped here, so that the step can write where they are.
        for (cache, with_rows) in caches.iter_mut().zip(self.caches) {
            **cache = with_rows;
        }
        backend.take_up(self.tokens, tokens)?;
        Ok(self.logits)
    }
}
