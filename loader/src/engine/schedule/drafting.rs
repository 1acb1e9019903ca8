//! Which drafts go into a step.

use shardpack_formats::Spec;

use super::{
    super::{
        draft::{Costs, MAX_DRAFTS},
        plan::Work,
        runner::Sampled,
        step::Speculate,
    },
    Active, Limits, Schedule,
};

/// Where drafts come from.
#[derive(Clone, Debug)]
pub(in crate::engine) enum Drafting {
    /// There are none.
    Off,
    /// Guessed from each request's own text, and run where that pays.
    Guessed(Costs),
    /// Chosen by a test.
    #[cfg(test)]
    Forced(Forced),
}

/// Drafts after the tokens of a request.
#[cfg(test)]
type Source = dyn Fn(&[u32]) -> Vec<u32> + Send + Sync;

/// What a test has for drafts.
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
            Speculate::Auto => Self::Guessed(Costs::of(spec)),
            Speculate::Off => Self::Off,
        }
    }
}

impl Schedule {
    /// For requests that are submitted from now on.
    pub(in crate::engine) fn set_drafting(&mut self, drafting: Drafting) {
        self.limits.drafting = drafting;
    }

    /// Drafts of each active sequence, of which `counts` tokens are run.
    pub(super) fn drafts(&mut self, counts: &[usize]) -> Vec<Vec<u32>> {
        let mut drafts = vec![Vec::new(); self.active.len()];
        if !self.rewinds {
            return drafts;
        }
        let positions = self.positions();
        let most = |active: &Active| most_drafts(active, positions);
        match &self.limits.drafting {
            Drafting::Off => {}
            Drafting::Guessed(costs) => {
                let mut sampled = Vec::new();
                let mut chances = Vec::new();
                for (index, active) in self.active.iter_mut().enumerate() {
                    if counts[index] == active.left() {
                        let most = most(active);
                        sampled.push(index);
                        chances.push(active.job.propose(most));
                    }
                }
                let shares = costs.share(counts.iter().sum(), &chances);
                for (index, count) in sampled.into_iter().zip(shares) {
                    drafts[index] = self.active[index].job.drafts(count);
                }
            }
            #[cfg(test)]
            Drafting::Forced(Forced(source)) => {
                for (active, drafts) in self.active.iter().zip(&mut drafts) {
                    *drafts = source(&active.job.tokens);
                    drafts.truncate(most(active));
                }
            }
        }
        drafts
    }

    /// Tokens that a sequence may have.
    pub(super) fn positions(&self) -> usize {
        self.room().min(self.limits.max_positions as usize)
    }

    /// Drafts that were run, and those of them that were kept.
    pub(in crate::engine) const fn drafted(&self) -> [u64; 2] {
        self.drafted
    }

    /// What the guesses came to.
    pub(super) fn learn(&mut self, work: &Work, sampled: &Sampled) {
        let drafted = [work.drafts, sampled.chosen.len() as u32 - 1];
        self.drafted[0] += u64::from(drafted[0]);
        self.drafted[1] += u64::from(drafted[1]);
        let came: Vec<u32> = sampled.chosen.iter().filter_map(|chosen| chosen.token).collect();
        let active = self.active.iter_mut().find(|active| active.job.id == work.id);
        active.expect("tokens are sampled for active requests").job.learn(drafted, &came);
    }
}

impl Limits {
    /// Whether guesses are made.
    pub(super) const fn guesses(&self) -> bool {
        matches!(self.drafting, Drafting::Guessed(_))
    }
}

/// How many drafts a sequence can have: all of them and one token more must fit its end, and its
/// rows the memory that it has.
fn most_drafts(active: &Active, positions: usize) -> usize {
    if !active.is_decoding() {
        return 0;
    }
    let job = &active.job;
    let tokens = job.tokens.len();
    let wanted = (job.request.max_tokens as usize).saturating_sub(job.generated() + 1);
    let fit = positions.saturating_sub(tokens + 1).min(active.room().saturating_sub(tokens));
    wanted.min(fit).min(MAX_DRAFTS)
}
