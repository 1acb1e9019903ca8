//! The threads that a command computes on.

use std::{num::NonZero, thread};

use anyhow::Context;

/// Threads to use: as asked, else one per core.
pub(crate) fn count(asked: Option<usize>) -> usize {
    let cores = || thread::available_parallelism().map_or(1, NonZero::get);
    asked.filter(|threads| *threads > 0).unwrap_or_else(cores)
}

/// Runs `work` on a pool of as many threads. A pool of its own rather than the global one, so
/// that one process may hold several ranks.
pub(crate) fn with<T: Send>(
    asked: Option<usize>,
    work: impl FnOnce() -> T + Send,
) -> anyhow::Result<T> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(count(asked)).build();
    Ok(pool.context("cannot start threads")?.install(work))
}
