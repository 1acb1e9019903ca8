//! How long a step may take, by how long steps have taken: a device can hang in one without an error.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// Steps that must have been measured.
pub(crate) const MEASURED: u32 = 8;

/// Times the slowest step so far. Steps grow with the tokens that are computed and attended to, and a
/// busy machine takes its time; nothing grows as much from one step to the next.
const TIMES_THE_SLOWEST: u32 = 20;

/// How long a step may take of which nothing is known: a device may compile its programs in it.
const UNMEASURED: Duration = Duration::from_mins(15);

/// The step that the worker is in, and the slowest before.
pub(super) struct StepWatch {
    state: Mutex<State>,
    least: Duration,
}

#[derive(Default)]
struct State {
    begun: Option<Instant>,
    slowest: Duration,
    measured: u32,
}

/// A step that takes too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Overdue {
    pub(super) taken: Duration,
    pub(super) slowest: Duration,
}

impl StepWatch {
    /// Allows every step `least`.
    pub(super) fn new(least: Duration) -> Self {
        Self { state: Mutex::default(), least }
    }

    pub(super) fn begin(&self) {
        self.begin_at(Instant::now());
    }

    fn begin_at(&self, now: Instant) {
        self.lock().begun = Some(now);
    }

    /// The step is over; one in which nothing was computed does not count.
    pub(super) fn end(&self, has_worked: bool) {
        self.end_at(has_worked, Instant::now());
    }

    fn end_at(&self, has_worked: bool, now: Instant) {
        let mut state = self.lock();
        let Some(begun) = state.begun.take() else { return };
        if has_worked {
            state.slowest = state.slowest.max(now.saturating_duration_since(begun));
            state.measured = state.measured.saturating_add(1);
        }
    }

    /// The present step, if it takes too long.
    pub(super) fn overdue(&self) -> Option<Overdue> {
        self.overdue_at(Instant::now())
    }

    fn overdue_at(&self, now: Instant) -> Option<Overdue> {
        let state = self.lock();
        let taken = now.saturating_duration_since(state.begun?);
        let slowest = state.slowest;
        let most = if state.measured < MEASURED {
            UNMEASURED
        } else {
            (slowest * TIMES_THE_SLOWEST).clamp(self.least, UNMEASURED)
        };
        (taken > most).then_some(Overdue { taken, slowest })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_overdue_by_what_steps_took_before() {
        let least = Duration::from_millis(30);
        let watch = StepWatch::new(least);
        let mut now = Instant::now();
        watch.begin_at(now);
        now += 2 * least;
        assert_eq!(watch.overdue_at(now), None, "nothing is known yet");
        watch.end_at(false, now);
        let slowest = Duration::from_millis(1);
        for _ in 0..MEASURED {
            watch.begin_at(now);
            now += slowest;
            watch.end_at(true, now);
        }
        assert_eq!(watch.overdue_at(now), None, "no step is under way");
        watch.begin_at(now);
        assert_eq!(watch.overdue_at(now + least), None, "any step may take that long");
        now += 2 * least;
        let overdue = watch.overdue_at(now);
        assert_eq!(overdue, Some(Overdue { taken: 2 * least, slowest }));
        watch.end_at(true, now);
        // That one counts from now on.
        watch.begin_at(now);
        let most = 2 * least * TIMES_THE_SLOWEST;
        assert_eq!(watch.overdue_at(now + most), None);
        assert!(watch.overdue_at(now + most + slowest).is_some());
    }
}
