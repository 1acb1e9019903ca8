//! The threads that a command computes on.

use anyhow::Context;

/// Runs `work` on a pool of `threads` threads, all cores when not given. A width of its own
/// rather than the global pool's, so that one process may hold several ranks.
pub(crate) fn with<T: Send>(
    threads: Option<usize>,
    work: impl FnOnce() -> T + Send,
) -> anyhow::Result<T> {
    let threads = threads.unwrap_or(0);
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build()
        .context("cannot start threads")?;
    Ok(pool.install(work))
}
