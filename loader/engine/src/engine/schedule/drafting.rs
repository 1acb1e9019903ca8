//! Speculative decoding in the schedule: which draft tokens go into a step.

use std::collections::BTreeMap;

use shardpack_formats::Spec;

use super::{
    super::{
        draft::{DraftInput, DraftProposer, DraftToken, MAX_DRAFTS, RowCosts},
        plan::ScheduledSequence,
        runner::SampledSequence,
        step::Speculate,
    },
    Limits, RunningSequence, Schedule,
};
use crate::backend::StepError;

/// Where drafts come from.
#[derive(Clone, Debug)]
pub(in crate::engine) enum Drafting {
    /// There are none.
    Off,
    /// Proposed by prompt lookup or a draft model, and run where that pays.
    Proposed(RowCosts),
    /// Set by a test.
    #[cfg(test)]
    Forced(Forced),
}

/// Drafts after the tokens of a request.
#[cfg(test)]
type Source = dyn Fn(&[u32]) -> Vec<u32> + Send + Sync;

/// Draft tokens that a test supplies.
#[cfg(test)]
#[derive(Clone)]
pub(in crate::engine) struct Forced(pub(in crate::engine) std::sync::Arc<Source>);

#[cfg(test)]
impl std::fmt::Debug for Forced {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Forced")
    }
}

impl Drafting {
    /// As asked for, on a model.
    pub(in crate::engine) fn new(when: Speculate, spec: &Spec) -> Self {
        match when {
            Speculate::Auto => Self::Proposed(RowCosts::of(spec)),
            Speculate::Off => Self::Off,
        }
    }
}

impl Schedule {
    /// For requests that are submitted from now on.
    pub(in crate::engine) fn set_drafting(&mut self, drafting: Drafting) {
        self.limits.drafting = drafting;
    }

    /// Drafts of each running sequence, of which `counts` tokens are run.
    pub(super) fn drafts(
        &mut self,
        counts: &[usize],
        proposer: Option<&mut dyn DraftProposer>,
    ) -> Result<Vec<Vec<u32>>, StepError> {
        let mut drafts = vec![Vec::new(); self.running.len()];
        if !self.can_roll_back {
            return Ok(drafts);
        }
        let positions = self.positions();
        let few = self.fewest_sequences();
        let most = |running: &RunningSequence| few.max_drafts(running, positions);
        match &self.limits.drafting {
            Drafting::Off => {}
            Drafting::Proposed(costs) => {
                let costs = *costs;
                let is_sampled = |index: &usize| counts[*index] == self.running[*index].left();
                let sampled: Vec<usize> = (0..self.running.len()).filter(is_sampled).collect();
                for index in &sampled {
                    self.running[*index].sequence.propose();
                }
                let rows = counts.iter().sum();
                if let Some(proposer) = proposer
                    && costs.has_room(rows, sampled.len())
                {
                    self.ask_draft_model(proposer, costs, positions)?;
                }
                let probabilities = sampled.iter().map(|index| {
                    let running = &self.running[*index];
                    running.sequence.probabilities(most(running))
                });
                let shares = costs.allocate(rows, &probabilities.collect::<Vec<_>>());
                for (index, count) in sampled.into_iter().zip(shares) {
                    drafts[index] = self.running[index].sequence.drafts(count);
                }
            }
            #[cfg(test)]
            Drafting::Forced(Forced(source)) => {
                for (running, drafts) in self.running.iter().zip(&mut drafts) {
                    *drafts = source(&running.sequence.tokens);
                    drafts.truncate(most(running));
                }
            }
        }
        Ok(drafts)
    }

    /// Asks the draft model for tokens of all sequences for which prompt lookup has no likely match.
    fn ask_draft_model(
        &mut self,
        proposer: &mut dyn DraftProposer,
        costs: RowCosts,
        positions: usize,
    ) -> Result<(), StepError> {
        let few = self.fewest_sequences();
        let inputs = self.running.iter().map(|running| DraftInput {
            id: running.sequence.id,
            tokens: &running.sequence.tokens,
            total: self.limits.total(&running.sequence),
            most: if running.sequence.wants_draft_model() {
                few.max_drafts(running, positions)
            } else {
                0
            },
            stop: &running.sequence.request.stop_tokens,
        });
        let inputs: Vec<_> = inputs.collect();
        let cost = proposer.cost();
        let pays = |drafts: &[DraftToken]| {
            let mut probability = 1.0;
            let together = |draft: &DraftToken| {
                probability *= draft.probability;
                probability
            };
            costs.extends_draft(cost, &drafts.iter().map(together).collect::<Vec<_>>())
        };
        if !pays(&[]) {
            proposer.skip();
            return Ok(());
        }
        let drafts = proposer.propose(&inputs, &pays)?;
        for (running, drafts) in self.running.iter_mut().zip(drafts) {
            running.sequence.set_model_drafts(drafts);
        }
        Ok(())
    }

    /// Beside other tenants only those with the fewest sequences have drafts: the rows of one take
    /// time from all.
    fn fewest_sequences(&self) -> Fewest {
        let mut counts: BTreeMap<u64, usize> = BTreeMap::new();
        for running in &self.running {
            *counts.entry(running.sequence.request.tenant.id).or_default() += 1;
        }
        let fewest = counts.values().min().copied().unwrap_or(0);
        counts.retain(|_, count| *count == fewest);
        Fewest(counts)
    }

    /// Tokens that a sequence may have.
    pub(super) fn positions(&self) -> usize {
        self.room().min(self.limits.max_positions as usize)
    }

    /// Draft tokens that were run, and those that were accepted.
    pub(in crate::engine) const fn drafted(&self) -> [u64; 2] {
        self.drafted
    }

    /// Updates acceptance rates with the tokens that were sampled.
    pub(super) fn learn(&mut self, scheduled: &ScheduledSequence, sampled: &SampledSequence) {
        let drafted = [scheduled.drafts, sampled.tokens.len() as u32 - 1];
        self.drafted[0] += u64::from(drafted[0]);
        self.drafted[1] += u64::from(drafted[1]);
        let sampled_tokens: Vec<u32> =
            sampled.tokens.iter().filter_map(|token| token.token).collect();
        let running = self.running.iter_mut().find(|running| running.sequence.id == scheduled.id);
        running
            .expect("tokens are sampled for running requests")
            .sequence
            .learn(drafted, &sampled_tokens);
    }
}

impl Limits {
    /// Whether draft tokens are proposed.
    pub(super) const fn drafts_tokens(&self) -> bool {
        matches!(self.drafting, Drafting::Proposed(_))
    }
}

/// The tenants with the fewest running sequences.
struct Fewest(BTreeMap<u64, usize>);

impl Fewest {
    fn max_drafts(&self, running: &RunningSequence, positions: usize) -> usize {
        let is_few = self.0.contains_key(&running.sequence.request.tenant.id);
        if is_few { max_drafts(running, positions) } else { 0 }
    }
}

/// The most draft tokens of a sequence: they and one more token must fit its maximum length, and
/// its rows its KV pages.
fn max_drafts(running: &RunningSequence, positions: usize) -> usize {
    if !running.is_decoding() || !running.sequence.takes_drafts() {
        return 0;
    }
    let sequence = &running.sequence;
    let tokens = sequence.tokens.len();
    let wanted = (sequence.request.max_tokens as usize).saturating_sub(sequence.generated() + 1);
    let fit = positions.saturating_sub(tokens + 1).min(running.room().saturating_sub(tokens));
    wanted.min(fit).min(MAX_DRAFTS)
}
