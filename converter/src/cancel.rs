//! Ends a download or a conversion from another thread.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};
#[cfg(feature = "hub")]
use std::{thread, time::Duration};

/// Between two looks at the switch.
#[cfg(feature = "hub")]
pub(crate) const LOOK_AGAIN: Duration = Duration::from_millis(250);

/// A switch that whoever works looks at between two steps. Clones are the same switch.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Asks for the end; it cannot be taken back.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether the end was asked for.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Waits, but not longer than until the end is asked for.
    #[cfg(feature = "hub")]
    pub(crate) fn wait(&self, pause: Duration) {
        let mut left = pause;
        while !left.is_zero() && !self.is_cancelled() {
            let step = left.min(LOOK_AGAIN);
            thread::sleep(step);
            left -= step;
        }
    }
}
