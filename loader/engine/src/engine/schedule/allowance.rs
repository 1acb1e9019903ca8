//! How much of the time the work of other tenants may take beside a tenant with few streams.

use std::time::{Duration, Instant};

/// Time that may be used at once: short prompts are read at full speed, and only what goes on takes
/// its turn.
const BURST: Duration = Duration::from_millis(250);

/// How long a step with a chunk of a prompt may take, others waiting for their next token meanwhile.
const STEP_TARGET: Duration = Duration::from_millis(120);

/// Prompt tokens of such a step at least, or most of its time would go to reading weights.
const CHUNK_LEAST: usize = 8;

/// How long a step may take in which prompts alone are read, where other tenants come and go: a new
/// request waits for its end.
const PROMPT_STEP_TARGET: Duration = Duration::from_millis(400);
const PROMPT_CHUNK_LEAST: usize = 64;

/// What a stream beside another one takes of its speed, roughly: a part of the allowance, of which a third
/// is left however many there are.
const STREAM: f64 = 0.09;

/// Weight of the newest step in averages.
const NEWEST: f64 = 0.2;

/// What a step consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StepKind {
    /// Nobody is protected.
    Free {
        /// Prompt tokens of it.
        prompt: usize,
    },
    /// The protected streams alone, with as many of each other tenant.
    Protected,
    /// With further work.
    WithOthers {
        /// Prompt tokens of it.
        prompt: usize,
    },
}

/// Time that further work may take beside protected streams: a part of all time, and a little at
/// once. Times are in seconds.
pub(super) struct Allowance {
    /// The part, and what is left of it beside the streams of the present steps.
    part: f64,
    part_now: f64,
    left: f64,
    filled: Option<Instant>,
    /// How long a step of protected streams takes.
    protected: Option<f64>,
    /// How long a token of a prompt takes.
    prompt_token: Option<f64>,
    step: StepKind,
}

impl Allowance {
    /// For streams that keep so many percent of their speed.
    pub(super) fn new(kept_percent: u32) -> Self {
        let part = f64::from(100_u32.saturating_sub(kept_percent)) / 100.0;
        let left = BURST.as_secs_f64();
        let step = StepKind::Free { prompt: 0 };
        let (filled, protected, prompt_token) = (None, None, None);
        Self { part, part_now: part, left, filled, protected, prompt_token, step }
    }

    /// Time has passed.
    pub(super) fn fill(&mut self, now: Instant) {
        let passed = self.filled.map_or(Duration::ZERO, |then| now.saturating_duration_since(then));
        self.filled = Some(now);
        self.left = (self.left + passed.as_secs_f64() * self.part_now).min(BURST.as_secs_f64());
    }

    /// Whether further work may be done in the next step. How long one takes without has to be known
    /// first.
    pub(super) fn allows(&self) -> bool {
        self.protected.is_some() && self.left > 0.0
    }

    /// Further streams of a step beside protected ones, of so many that could run: the fewer, the less
    /// time is left. A few in every step cost less than all of them in some.
    pub(super) fn streams(&self, most: usize) -> usize {
        let part = (self.left / BURST.as_secs_f64()).clamp(0.0, 1.0);
        (most as f64 * part).ceil() as usize
    }

    /// Prompt tokens of a step beside protected streams, of at most `most`.
    pub(super) fn chunk(&self, most: usize) -> usize {
        self.fitting(STEP_TARGET, most).max(CHUNK_LEAST).min(most)
    }

    /// Prompt tokens of a step of prompts alone, of at most `most`, where others may come.
    pub(super) fn prompt_chunk(&self, most: usize) -> usize {
        self.fitting(PROMPT_STEP_TARGET, most).max(PROMPT_CHUNK_LEAST).min(most)
    }

    fn fitting(&self, target: Duration, most: usize) -> usize {
        let fitting = |seconds: f64| (target.as_secs_f64() / seconds.max(1e-9)) as usize;
        self.prompt_token.map_or(most, fitting)
    }

    /// So many streams of others run beside the protected ones in every step.
    pub(super) fn beside(&mut self, streams: usize) {
        let streams = STREAM * streams as f64;
        self.part_now = (self.part - streams).max(self.part / 3.0);
    }

    /// What the next step is.
    pub(super) const fn begin(&mut self, step: StepKind) {
        self.step = step;
    }

    /// The step took so long.
    pub(super) fn end(&mut self, took: Duration) {
        let took = took.as_secs_f64();
        let mean = |known: Option<f64>, newest: f64| {
            known.map_or(newest, |known| known + NEWEST * (newest - known))
        };
        match std::mem::replace(&mut self.step, StepKind::Free { prompt: 0 }) {
            StepKind::Free { prompt } if prompt >= PROMPT_CHUNK_LEAST => {
                self.prompt_token = Some(mean(self.prompt_token, took / prompt as f64));
            }
            StepKind::Free { .. } => {}
            StepKind::Protected => self.protected = Some(mean(self.protected, took)),
            StepKind::WithOthers { prompt } => {
                let further = (took - self.protected.unwrap_or(0.0)).max(0.0);
                self.left -= further;
                if prompt > 0 {
                    self.prompt_token = Some(mean(self.prompt_token, further / prompt as f64));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn further_work_takes_its_part_of_the_time_and_no_more() {
        let mut allowance = Allowance::new(88);
        let mut now = Instant::now();
        let [mut all, mut further, mut longest] = [0.0_f64; 3];
        for _ in 0..20_000 {
            allowance.fill(now);
            let kind = if allowance.allows() {
                StepKind::WithOthers { prompt: allowance.chunk(64) }
            } else {
                StepKind::Protected
            };
            // Four milliseconds, and two for each token of a prompt.
            let more = match kind {
                StepKind::WithOthers { prompt } => 0.002 * prompt as f64,
                _ => 0.0,
            };
            allowance.begin(kind);
            let took = Duration::from_secs_f64(0.004 + more);
            allowance.end(took);
            now += took;
            all += took.as_secs_f64();
            further += more;
            longest = longest.max(took.as_secs_f64());
        }
        let part = further / all;
        assert!((0.11..0.125).contains(&part), "{part}");
        assert!(longest < 0.135, "{longest}");
    }
}
