//! The energy of machines, shared by the tokens that were computed on them.

use std::{collections::BTreeMap, time::Instant};

use super::Sums;

/// A machine that says what power it draws.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MachinePower {
    pub(crate) milliwatts: u64,
    /// The models that run on it.
    pub(crate) models: Vec<String>,
}

/// Whose tokens: a key and a model.
type Whose = (Option<String>, String);

/// What was computed since energy was shared last.
#[derive(Debug)]
pub(super) struct Energy {
    since: Instant,
    tokens: BTreeMap<Whose, u64>,
    /// Millijoules of each machine that no token has come for, while requests ran.
    pending: BTreeMap<usize, f64>,
}

impl Default for Energy {
    fn default() -> Self {
        Self { since: Instant::now(), tokens: BTreeMap::new(), pending: BTreeMap::new() }
    }
}

impl Energy {
    /// Tokens were computed; cached ones cost next to nothing.
    pub(super) fn computed(&mut self, key: Option<&str>, model: &str, sums: Sums) {
        let prompt = sums.prompt_tokens.saturating_sub(sums.cached_tokens);
        let tokens = prompt + sums.completion_tokens;
        if tokens > 0 {
            let whose = (key.map(str::to_owned), model.to_owned());
            *self.tokens.entry(whose).or_default() += tokens;
        }
    }

    /// Shares the energy since the last time. What a machine takes without requests is nobody's.
    pub(super) fn share(
        &mut self,
        now: Instant,
        machines: &[MachinePower],
        is_running: bool,
    ) -> Vec<(Whose, u64)> {
        let seconds = now.saturating_duration_since(self.since).as_secs_f64();
        self.since = now;
        let tokens = std::mem::take(&mut self.tokens);
        let mut pending = std::mem::take(&mut self.pending);
        let mut shares: BTreeMap<Whose, f64> = BTreeMap::new();
        for (index, machine) in machines.iter().enumerate() {
            let before = pending.remove(&index).unwrap_or_default();
            let energy = before + machine.milliwatts as f64 * seconds;
            let of_it = || tokens.iter().filter(|((_, model), _)| machine.models.contains(model));
            let all: u64 = of_it().map(|(_, count)| count).sum();
            if all == 0 {
                if is_running {
                    self.pending.insert(index, energy);
                }
                continue;
            }
            for (whose, count) in of_it() {
                *shares.entry(whose.clone()).or_default() += energy * *count as f64 / all as f64;
            }
        }
        shares.into_iter().map(|(whose, energy)| (whose, energy.round() as u64)).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn energy_is_shared_by_tokens_and_an_idle_machines_is_nobodys() {
        let mut energy = Energy::default();
        let begun = energy.since;
        let at = |seconds| begun + Duration::from_secs(seconds);
        let models = vec!["m".to_owned()];
        let machines = [MachinePower { milliwatts: 30_000, models }];
        let compute = |energy: &mut Energy, key: &str, prompt_tokens, completion_tokens| {
            let sums = Sums { prompt_tokens, completion_tokens, ..Sums::default() };
            energy.computed(Some(key), "m", sums);
            energy.computed(Some(key), "elsewhere", sums);
        };
        assert_eq!(energy.share(at(1), &machines, false), []);
        compute(&mut energy, "a", 3, 1);
        compute(&mut energy, "b", 0, 2);
        let whose = |key: &str| (Some(key.to_owned()), "m".to_owned());
        let expected = [(whose("a"), 20_000), (whose("b"), 10_000)];
        assert_eq!(energy.share(at(2), &machines, true), expected);
        // A long prompt: its energy waits for its tokens.
        assert_eq!(energy.share(at(4), &machines, true), []);
        compute(&mut energy, "a", 9, 0);
        assert_eq!(energy.share(at(5), &machines, true), [(whose("a"), 90_000)]);
    }
}
