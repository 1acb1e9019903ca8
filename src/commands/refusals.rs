//! Limits the log lines for refused connections, which any machine can cause, so that they do not
//! flood the node's log.

use std::time::{Duration, Instant};

/// Lines in [`PERIOD`]: a mistake is repeated less often.
const MOST: u32 = 20;

/// After this time refusals are logged again.
const PERIOD: Duration = Duration::from_mins(1);

/// Refusals of the current period.
pub(super) struct Refusals {
    since: Instant,
    told: u32,
    untold: u64,
}

impl Refusals {
    pub(super) const fn new(now: Instant) -> Self {
        Self { since: now, told: 0, untold: 0 }
    }

    /// The lines to print for one more refusal.
    pub(super) fn lines(&mut self, line: String, now: Instant) -> Vec<String> {
        let mut lines = Vec::new();
        if now.saturating_duration_since(self.since) >= PERIOD {
            if self.untold > 0 {
                lines.push(format!("node: refused {} more calls meanwhile", self.untold));
            }
            *self = Self::new(now);
        }
        if self.told < MOST {
            lines.push(line);
            self.told += 1;
            if self.told == MOST {
                lines.push(format!(
                    "node: more refused connections are counted but not shown for {} s",
                    PERIOD.as_secs()
                ));
            }
        } else {
            self.untold += 1;
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_refusals_are_counted_and_told_later() {
        let begun = Instant::now();
        let mut refusals = Refusals::new(begun);
        let mut told = Vec::new();
        for number in 0..1000 {
            told.extend(refusals.lines(format!("{number}"), begun));
        }
        assert_eq!(told.len(), MOST as usize + 1);
        assert_eq!(told[0], "0");
        let later = refusals.lines("again".to_owned(), begun + PERIOD);
        assert_eq!(later, ["node: refused 980 more calls meanwhile", "again"]);
        assert_eq!(refusals.lines("b".to_owned(), begun + 3 * PERIOD), ["b"]);
    }
}
