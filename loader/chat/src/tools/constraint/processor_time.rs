//! Processor time of a thread, read by another one. Where the system does not tell, time on the clock.

use std::{
    fs,
    path::PathBuf,
    time::{Duration, Instant},
};

/// Measures a thread from when it was made on it.
#[derive(Clone, Debug)]
pub(super) struct ThreadClock {
    begun: Instant,
    /// Linux's account of the thread: its first number is nanoseconds on a processor.
    account: Option<PathBuf>,
}

impl ThreadClock {
    /// For this thread, which has just begun.
    pub(super) fn start() -> Self {
        // A link to PID/task/TID.
        let thread = fs::read_link("/proc/thread-self").ok();
        let account = thread.map(|thread| PathBuf::from("/proc").join(thread).join("schedstat"));
        Self { begun: Instant::now(), account }
    }

    /// Processor time of the thread.
    pub(super) fn elapsed(&self) -> Duration {
        let text = self.account.as_ref().and_then(|account| fs::read_to_string(account).ok());
        let on_processor = text.and_then(|text| text.split_whitespace().next()?.parse().ok());
        on_processor.map_or_else(|| self.begun.elapsed(), Duration::from_nanos)
    }
}
