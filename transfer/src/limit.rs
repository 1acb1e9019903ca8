//! Limits how many bytes are sent or read in a second, over all threads.
//!
//! Each chunk takes the time that it may use, in the order in which threads ask; nothing is saved up
//! while nobody asks, so that a network or a disk that is shared is never flooded.

use std::{
    num::NonZero,
    sync::{Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// A limit that threads share.
#[derive(Debug)]
pub(crate) struct Limit {
    bytes_per_second: NonZero<u64>,
    /// When the next chunk's turn is.
    free_at: Mutex<Instant>,
}

impl Limit {
    pub(crate) fn new(bytes_per_second: NonZero<u64>) -> Self {
        Self { bytes_per_second, free_at: Mutex::new(Instant::now()) }
    }

    /// Waits for the turn of so many bytes.
    pub(crate) fn wait_for(&self, size_bytes: u64) {
        let pause = self.take(size_bytes, Instant::now());
        if !pause.is_zero() {
            thread::sleep(pause);
        }
    }

    /// How long whoever wants so many bytes has to wait.
    pub(crate) fn take(&self, size_bytes: u64, now: Instant) -> Duration {
        let seconds = size_bytes as f64 / self.bytes_per_second.get() as f64;
        let mut free_at = self.free_at.lock().unwrap_or_else(PoisonError::into_inner);
        let begin = (*free_at).max(now);
        *free_at = begin + Duration::from_secs_f64(seconds);
        begin - now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_spread_over_the_time_that_they_may_use_and_nothing_is_saved_up() {
        let limit = Limit::new(NonZero::new(1_000).unwrap());
        let start = Instant::now();
        *limit.free_at.lock().unwrap() = start;
        let wait = |bytes, after_ms| {
            limit.take(bytes, start + Duration::from_millis(after_ms)).as_millis()
        };
        assert_eq!([wait(500, 0), wait(500, 0), wait(1_000, 0)], [0, 500, 1_000]);
        assert_eq!(wait(100, 1_900), 100);
        // After a pause.
        assert_eq!([wait(500, 9_000), wait(500, 9_000)], [0, 500]);
    }
}
