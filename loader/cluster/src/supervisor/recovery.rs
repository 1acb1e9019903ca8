//! Recovery policy: restarts with exponential backoff, and their limit. No I/O.

use std::time::Duration;

/// Recovery policy of a group that served and lost a rank.
#[derive(Clone, Copy, Debug)]
pub struct RecoveryOptions {
    /// Attempts, for each rank and for the group, that may follow each other without
    /// [`RecoveryOptions::steady`] service between them; then the group is given up.
    pub attempts: u32,
    /// Backoff before the first attempt: ranks that are lost together are seen to be lost within
    /// it. It doubles from attempt to attempt.
    pub first_pause: Duration,
    /// Longest pause.
    pub longest_pause: Duration,
    /// Service without a loss after which attempts are counted anew.
    pub steady: Duration,
    /// Whether the ranks that are not lost are restarted too.
    pub survivors: Survivors,
}

/// Whether the ranks that are not lost are restarted when one is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Survivors {
    /// They keep their weights and form the next group.
    Stay,
    /// They are started again too: collectives without deadlines hang in them.
    Restart,
}

impl Default for RecoveryOptions {
    fn default() -> Self {
        // Ten attempts take two minutes: a machine that was restarted is back by then.
        Self {
            attempts: 10,
            first_pause: Duration::from_millis(250),
            longest_pause: Duration::from_secs(30),
            steady: Duration::from_mins(1),
            survivors: Survivors::Stay,
        }
    }
}

/// Attempts made since all was well.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Attempts(u32);

impl Attempts {
    /// The pause before the next attempt, and its number from 1; none when there were enough.
    pub(super) fn next(&mut self, options: &RecoveryOptions) -> Option<(Duration, u32)> {
        if self.0 >= options.attempts {
            return None;
        }
        let factor = 1_u32.checked_shl(self.0).unwrap_or(u32::MAX);
        let pause = options.first_pause.saturating_mul(factor).min(options.longest_pause);
        self.0 += 1;
        Some((pause, self.0))
    }

    pub(super) fn reset(&mut self) {
        self.0 = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_end() {
        let options = RecoveryOptions {
            attempts: 5,
            first_pause: Duration::from_millis(100),
            longest_pause: Duration::from_millis(500),
            ..RecoveryOptions::default()
        };
        let mut attempts = Attempts::default();
        let mut pauses = Vec::new();
        while let Some((pause, number)) = attempts.next(&options) {
            pauses.push(pause.as_millis());
            assert_eq!(number as usize, pauses.len());
        }
        assert_eq!(pauses, [100, 200, 400, 500, 500]);
        attempts.reset();
        assert_eq!(attempts.next(&options), Some((Duration::from_millis(100), 1)));
        let endless = RecoveryOptions { attempts: u32::MAX, ..options };
        (0..100).for_each(|_| assert!(attempts.next(&endless).is_some()));
        assert_eq!(attempts.next(&endless).unwrap().0.as_millis(), 500);
    }
}
