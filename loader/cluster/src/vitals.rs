//! What a rank reports periodically: its process's memory, its machine's power and temperature, the
//! length of its steps and the share of all-reduces in them.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use shardpack_engine::engine::Counts;
use shardpack_engine_api::RankVitals;
use shardpack_sensors::Reading;

/// Steps since the last report; one thread adds, another reports.
#[derive(Default)]
pub(super) struct StepStats {
    steps: AtomicU64,
    nanos: AtomicU64,
    sum_nanos: AtomicU64,
    sums: AtomicU64,
    /// Draft tokens that were run and accepted, since the engine began.
    drafted: AtomicU64,
    accepted: AtomicU64,
    /// All since the process began.
    total: Totals,
}

#[derive(Default)]
struct Totals {
    steps: AtomicU64,
    collectives: AtomicU64,
    bytes: AtomicU64,
    tokens: AtomicU64,
}

impl StepStats {
    /// Adds a step that took so long, and what the group was asked for meanwhile. Waiting for the
    /// leader's plan is no part of a step.
    pub(super) fn add(&self, took: Duration, counts: &Counts) {
        let sums = counts.all_reduces.time + counts.all_gathers.time;
        let step = took.saturating_sub(counts.broadcasts.time);
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.steps.fetch_add(1, Ordering::Relaxed);
        self.nanos.fetch_add(nanos(step), Ordering::Relaxed);
        self.sum_nanos.fetch_add(nanos(sums), Ordering::Relaxed);
        self.sums.fetch_add(counts.all_reduces.count + counts.all_gathers.count, Ordering::Relaxed);
        let kinds = [counts.all_reduces, counts.all_gathers, counts.broadcasts, counts.transfers];
        let total = &self.total;
        total.steps.fetch_add(1, Ordering::Relaxed);
        total.collectives.fetch_add(kinds.iter().map(|it| it.count).sum(), Ordering::Relaxed);
        total.bytes.fetch_add(kinds.iter().map(|it| it.bytes).sum(), Ordering::Relaxed);
    }

    /// Counts a generated token.
    pub(super) fn token(&self) {
        self.total.tokens.fetch_add(1, Ordering::Relaxed);
    }

    /// The drafts so far.
    pub(super) fn drafts(&self, [drafted, accepted]: [u64; 2]) {
        self.drafted.store(drafted, Ordering::Relaxed);
        self.accepted.store(accepted, Ordering::Relaxed);
    }

    /// The machine's sensors, and the averages since the last report. A step that is added
    /// meanwhile may count in the next.
    pub(super) fn report(&self, machine: Reading) -> RankVitals {
        let steps = self.steps.swap(0, Ordering::Relaxed);
        let nanos = self.nanos.swap(0, Ordering::Relaxed);
        let sum_nanos = self.sum_nanos.swap(0, Ordering::Relaxed);
        let sums = self.sums.swap(0, Ordering::Relaxed);
        let drafted = Some(self.drafted.load(Ordering::Relaxed)).filter(|drafted| *drafted > 0);
        let of_step = |nanos: u64| nanos.checked_div(steps).map(|each| each / 1000);
        let thousandths = |value: f64| (value * 1000.0).round() as u64;
        let positive =
            |total: &AtomicU64| Some(total.load(Ordering::Relaxed)).filter(|total| *total > 0);
        RankVitals {
            steps: positive(&self.total.steps),
            collectives: positive(&self.total.collectives),
            collective_bytes: positive(&self.total.bytes),
            tokens: positive(&self.total.tokens),
            memory_bytes: machine.memory_bytes,
            power_mw: machine.power_watts.map(thousandths),
            temperature_mc: machine.temperature_celsius.map(thousandths),
            step_us: of_step(nanos),
            sums_us: of_step(sum_nanos).filter(|_| sums > 0),
            // Ranks that follow have none.
            drafted_tokens: drafted,
            accepted_tokens: drafted.map(|_| self.accepted.load(Ordering::Relaxed)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardpack_engine::engine::Calls;

    #[test]
    fn averages_are_those_since_the_last_report() {
        let stats = StepStats::default();
        let calls = |count, millis| Calls { count, time: Duration::from_millis(millis), bytes: 0 };
        let counts =
            Counts { all_reduces: calls(8, 2), broadcasts: calls(1, 5), ..Counts::default() };
        stats.add(Duration::from_millis(15), &counts);
        stats.add(Duration::from_millis(25), &counts);
        let machine = Reading {
            memory_bytes: Some(7),
            power_watts: Some(38.5),
            temperature_celsius: Some(61.25),
        };
        let found = stats.report(machine);
        assert_eq!((found.step_us, found.sums_us), (Some(15_000), Some(2_000)));
        let of_machine = (found.memory_bytes, found.power_mw, found.temperature_mc);
        assert_eq!(of_machine, (Some(7), Some(38_500), Some(61_250)));
        assert_eq!(
            (stats.report(Reading::default()).step_us, stats.report(Reading::default()).sums_us),
            (None, None)
        );
        assert_eq!(found.drafted_tokens, None);
        stats.drafts([9, 4]);
        let drafts = stats.report(Reading::default());
        assert_eq!((drafts.drafted_tokens, drafts.accepted_tokens), (Some(9), Some(4)));
        stats.add(Duration::from_millis(3), &Counts::default());
        stats.token();
        let alone = stats.report(Reading::default());
        assert_eq!((alone.steps, alone.collectives, alone.tokens), (Some(3), Some(18), Some(1)));
        assert_eq!((alone.step_us, alone.sums_us), (Some(3_000), None));
    }
}
