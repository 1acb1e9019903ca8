//! Recovery policy: restarts with exponential backoff, and their limit. No I/O.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// Recovery policy of a group that served and lost a rank.
#[derive(Clone, Copy, Debug)]
pub struct RecoveryOptions {
    /// Attempts within [`RecoveryOptions::window`], for each rank and for the group, after which the
    /// group is given up. Only those count that did not lead to [`RecoveryOptions::steady`] service;
    /// a node that cannot be reached is waited for.
    pub attempts: u32,
    /// How long an attempt counts.
    pub window: Duration,
    /// Backoff before the first attempt: ranks that are lost together are seen to be lost within
    /// it. It doubles from attempt to attempt.
    pub first_pause: Duration,
    /// Longest pause.
    pub longest_pause: Duration,
    /// Longest pause before a node that could not be reached is tried again.
    pub longest_absence_pause: Duration,
    /// Service after which attempts are counted anew.
    pub steady: Duration,
    /// How long requests wait for the group to form again; then they fail, and further ones are
    /// refused until it has.
    pub resume_timeout: Duration,
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
        // Ten attempts take a minute.
        Self {
            attempts: 10,
            window: Duration::from_mins(10),
            first_pause: Duration::from_millis(250),
            longest_pause: Duration::from_secs(10),
            longest_absence_pause: Duration::from_secs(2),
            steady: Duration::from_secs(1),
            resume_timeout: Duration::from_mins(5),
            survivors: Survivors::Stay,
        }
    }
}

/// Attempts made since all was well.
#[derive(Clone, Debug, Default)]
pub(super) struct Attempts {
    made: VecDeque<Instant>,
    /// Attempts in a row that did not reach the node.
    unreached: u32,
}

impl Attempts {
    /// The pause before the next attempt, and its number from 1; none when there were enough.
    pub(super) fn next(
        &mut self,
        options: &RecoveryOptions,
        now: Instant,
    ) -> Option<(Duration, u32)> {
        self.unreached = 0;
        self.made.retain(|made| now.saturating_duration_since(*made) < options.window);
        let before = self.made.len() as u32;
        if before >= options.attempts {
            return None;
        }
        self.made.push_back(now);
        Some((pause(options.first_pause, before, options.longest_pause), before + 1))
    }

    /// The pause before a node is tried again that could not be reached.
    pub(super) fn unreached(&mut self, options: &RecoveryOptions) -> Duration {
        let before = self.unreached;
        self.unreached += 1;
        pause(options.first_pause, before, options.longest_absence_pause)
    }

    pub(super) fn reset(&mut self) {
        *self = Self::default();
    }
}

fn pause(first: Duration, before: u32, longest: Duration) -> Duration {
    let factor = 1_u32.checked_shl(before).unwrap_or(u32::MAX);
    first.saturating_mul(factor).min(longest)
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
            longest_absence_pause: Duration::from_millis(300),
            ..RecoveryOptions::default()
        };
        let now = Instant::now();
        let mut attempts = Attempts::default();
        let mut pauses = Vec::new();
        while let Some((pause, number)) = attempts.next(&options, now) {
            pauses.push(pause.as_millis());
            assert_eq!(number as usize, pauses.len());
        }
        assert_eq!(pauses, [100, 200, 400, 500, 500]);
        // They count for a while.
        assert_eq!(attempts.next(&options, now + options.window / 2), None);
        let first = Some((Duration::from_millis(100), 1));
        assert_eq!(attempts.clone().next(&options, now + options.window), first);
        attempts.reset();
        assert_eq!(attempts.next(&options, now), first);
        // A node that is not there is waited for.
        let absent: Vec<_> = (0..100).map(|_| attempts.unreached(&options).as_millis()).collect();
        assert_eq!(absent[..4], [100, 200, 300, 300]);
        assert!(attempts.next(&options, now).is_some_and(|(_, number)| number == 2));
        let endless = RecoveryOptions { attempts: u32::MAX, ..options };
        (0..100).for_each(|_| assert!(attempts.next(&endless, now).is_some()));
        assert_eq!(attempts.next(&endless, now).unwrap().0.as_millis(), 500);
    }
}
