//! What a rank says of itself once in a while: how much memory its process takes, how long its
//! steps are and how much of them goes to sums between ranks.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use crate::engine::{Counts, RankVitals};

/// Steps since the last report; one thread adds, another reports.
#[derive(Default)]
pub(super) struct Pace {
    steps: AtomicU64,
    nanos: AtomicU64,
    sum_nanos: AtomicU64,
    sums: AtomicU64,
}

impl Pace {
    /// Adds a step that took so long, and what the group was asked for meanwhile. Waiting for the
    /// leader's plan is no part of a step.
    pub(super) fn add(&self, took: Duration, counts: &Counts) {
        let sums = counts.sums.time + counts.gathers.time;
        let step = took.saturating_sub(counts.broadcasts.time);
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.steps.fetch_add(1, Ordering::Relaxed);
        self.nanos.fetch_add(nanos(step), Ordering::Relaxed);
        self.sum_nanos.fetch_add(nanos(sums), Ordering::Relaxed);
        self.sums.fetch_add(counts.sums.count + counts.gathers.count, Ordering::Relaxed);
    }

    /// The averages since the last report. A step that is added meanwhile may count in the next.
    pub(super) fn report(&self) -> RankVitals {
        let steps = self.steps.swap(0, Ordering::Relaxed);
        let nanos = self.nanos.swap(0, Ordering::Relaxed);
        let sum_nanos = self.sum_nanos.swap(0, Ordering::Relaxed);
        let sums = self.sums.swap(0, Ordering::Relaxed);
        let of_step = |nanos: u64| nanos.checked_div(steps).map(|each| each / 1000);
        RankVitals {
            memory_bytes: resident_bytes(),
            step_us: of_step(nanos),
            sums_us: of_step(sum_nanos).filter(|_| sums > 0),
        }
    }
}

/// Memory of this process that is not swapped out; nothing where the system does not say.
fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Calls;

    #[test]
    fn averages_are_those_since_the_last_report() {
        let pace = Pace::default();
        let calls = |count, millis| Calls { count, time: Duration::from_millis(millis), bytes: 0 };
        let counts = Counts { sums: calls(8, 2), broadcasts: calls(1, 5), ..Counts::default() };
        pace.add(Duration::from_millis(15), &counts);
        pace.add(Duration::from_millis(25), &counts);
        let found = pace.report();
        assert_eq!((found.step_us, found.sums_us), (Some(15_000), Some(2_000)));
        assert!(!cfg!(target_os = "linux") || found.memory_bytes > Some(1 << 20));
        assert_eq!((pace.report().step_us, pace.report().sums_us), (None, None));
        pace.add(Duration::from_millis(3), &Counts::default());
        let alone = pace.report();
        assert_eq!((alone.step_us, alone.sums_us), (Some(3_000), None));
    }
}
