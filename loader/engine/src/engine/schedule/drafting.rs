//! Which drafts go into a step.

use shardpack_formats::Spec;

use super::{
    super::{
        draft::{Costs, Guess, Guesser, MAX_DRAFTS, Text},
        plan::Work,
        runner::Sampled,
        step::Speculate,
    },
    Active, Limits, Schedule,
};
use crate::backend::StepError;

/// Where drafts come from.
#[derive(Clone, Debug)]
pub(in crate::engine) enum Drafting {
    /// There are none.
    Off,
    /// Guessed from each request's own text or by a draft model, and run where that pays.
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
    pub(super) fn drafts(
        &mut self,
        counts: &[usize],
        guesser: Option<&mut dyn Guesser>,
    ) -> Result<Vec<Vec<u32>>, StepError> {
        let mut drafts = vec![Vec::new(); self.active.len()];
        if !self.rewinds {
            return Ok(drafts);
        }
        let positions = self.positions();
        let most = |active: &Active| most_drafts(active, positions);
        match &self.limits.drafting {
            Drafting::Off => {}
            Drafting::Guessed(costs) => {
                let costs = *costs;
                let is_sampled = |index: &usize| counts[*index] == self.active[*index].left();
                let sampled: Vec<usize> = (0..self.active.len()).filter(is_sampled).collect();
                for index in &sampled {
                    self.active[*index].job.propose();
                }
                let rows = counts.iter().sum();
                if let Some(guesser) = guesser
                    && costs.has_room(rows, sampled.len())
                {
                    self.ask(guesser, costs, positions)?;
                }
                let chances = sampled.iter().map(|index| {
                    let active = &self.active[*index];
                    active.job.chances(most(active))
                });
                let shares = costs.share(rows, &chances.collect::<Vec<_>>());
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
        Ok(drafts)
    }

    /// Asks a draft model about all sequences of which the text itself says little.
    fn ask(
        &mut self,
        guesser: &mut dyn Guesser,
        costs: Costs,
        positions: usize,
    ) -> Result<(), StepError> {
        let texts = self.active.iter().map(|active| Text {
            id: active.job.id,
            tokens: &active.job.tokens,
            total: self.limits.total(&active.job),
            most: if active.job.asks_model() { most_drafts(active, positions) } else { 0 },
            stop: &active.job.request.stop_tokens,
        });
        let texts: Vec<_> = texts.collect();
        let cost = guesser.cost();
        let pays = |guesses: &[Guess]| {
            let mut chance = 1.0;
            let together = |guess: &Guess| {
                chance *= guess.chance;
                chance
            };
            costs.guesses_on(cost, &guesses.iter().map(together).collect::<Vec<_>>())
        };
        if !pays(&[]) {
            guesser.pass();
            return Ok(());
        }
        let guesses = guesser.guess(&texts, &pays)?;
        for (active, guesses) in self.active.iter_mut().zip(guesses) {
            active.job.take_guesses(guesses);
        }
        Ok(())
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
