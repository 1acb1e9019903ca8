//! Detects a node that sends keep-alives but makes no progress.

use std::time::{Duration, Instant};

/// Least progress within the timeout: a disk that verifies less is broken.
const STEP_BYTES: u64 = 1 << 20;

/// A node reads what it holds and what its other packages hold, copies, and verifies: a few
/// times the package. Beyond this factor its figures are meaningless.
const MOST_TIMES: u64 = 16;

/// Watches the progress of one node.
pub(super) struct Watch {
    timeout: Duration,
    most_bytes: u64,
    since: Instant,
    best_bytes: u64,
}

/// A node that made no progress within the timeout.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Stalled {
    pub(super) timeout: Duration,
    pub(super) done_bytes: u64,
    pub(super) total_bytes: u64,
}

impl Watch {
    /// Watches a push of `package_bytes`, with a timeout between two steps of progress.
    pub(super) fn new(timeout: Duration, package_bytes: u64, now: Instant) -> Self {
        let most_bytes = package_bytes.saturating_mul(MOST_TIMES).saturating_add(STEP_BYTES);
        Self { timeout, most_bytes, since: now, best_bytes: 0 }
    }

    /// The node answered: what comes is another step.
    pub(super) fn answered(&mut self, now: Instant) {
        (self.since, self.best_bytes) = (now, 0);
    }

    /// The node sent a keep-alive with its progress.
    pub(super) fn working(
        &mut self,
        done_bytes: u64,
        total_bytes: u64,
        now: Instant,
    ) -> Result<(), Stalled> {
        let further = done_bytes.saturating_sub(self.best_bytes);
        let ends = further > 0 && done_bytes == total_bytes;
        if done_bytes <= self.most_bytes && (further >= STEP_BYTES || ends) {
            (self.since, self.best_bytes) = (now, done_bytes);
        }
        if now.saturating_duration_since(self.since) < self.timeout {
            return Ok(());
        }
        Err(Stalled { timeout: self.timeout, done_bytes, total_bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(100);
    const MIB: u64 = 1 << 20;

    /// Reports these amounts, a second apart; returns the number of reports until the node stalled.
    fn stalled_after(done: impl Iterator<Item = u64>, package_bytes: u64) -> Option<usize> {
        let begun = Instant::now();
        let mut watch = Watch::new(TIMEOUT, package_bytes, begun);
        let seconds = |count: usize| begun + Duration::from_secs(count as u64);
        done.enumerate()
            .position(|(count, done)| watch.working(done, u64::MAX, seconds(count)).is_err())
    }

    #[test]
    fn progress_of_any_speed_worth_the_name_is_waited_for() {
        assert_eq!(stalled_after((0..10_000).map(|it| it * MIB), 10_000 * MIB), None);
        // One step in 99 seconds.
        assert_eq!(stalled_after((0..10_000).map(|it| it / 99 * MIB), 200 * MIB), None);
    }

    #[test]
    fn no_progress_and_too_little_of_it_are_not() {
        assert_eq!(stalled_after((0..1000).map(|_| 5 * MIB), 10 * MIB), Some(100));
        assert_eq!(stalled_after((0..1000).map(|it| (it * 7).min(50) * MIB), 50 * MIB), Some(108));
        // Bytes that count up slowly, or for ever.
        assert_eq!(stalled_after(0..1000, MIB), Some(100));
        assert_eq!(stalled_after((0..10_000).map(|it| it * MIB), 10 * MIB), Some(161 + 100));
        assert_eq!(stalled_after((0..1000).rev().map(|it| it * MIB), 2000 * MIB), Some(100));
    }

    #[test]
    fn an_answer_begins_another_step() {
        let begun = Instant::now();
        let mut watch = Watch::new(TIMEOUT, MIB, begun);
        let late = begun + TIMEOUT * 3 / 2;
        watch.working(MIB, MIB, begun + TIMEOUT / 2).unwrap();
        watch.answered(begun + TIMEOUT);
        watch.working(0, 0, late).unwrap();
        let stalled = watch.working(3, 9, begun + TIMEOUT * 2).unwrap_err();
        assert_eq!(stalled, Stalled { timeout: TIMEOUT, done_bytes: 3, total_bytes: 9 });
    }
}
