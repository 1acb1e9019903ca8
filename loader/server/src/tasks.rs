//! What the server gives its runtime: futures and blocking work in one form each. The runtime's code is
//! generic, and would be compiled again for every future: a tenth of this crate, before.

use std::{any::Any, pin::Pin};

use tokio::task::{JoinError, spawn_blocking};

/// A future for the runtime.
pub(super) type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A future, in the form in which it is spawned.
pub(super) fn task(future: impl Future<Output = ()> + Send + 'static) -> Task {
    Box::pin(future)
}

/// Runs a future to its end, whoever waits for it.
pub(super) fn spawn(future: impl Future<Output = ()> + Send + 'static) {
    drop(tokio::spawn(task(future)));
}

/// Runs blocking work away from the threads that serve connections. An error where it panicked.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, JoinError> {
    let work: Box<dyn FnOnce() -> Box<dyn Any + Send> + Send> = Box::new(|| Box::new(work()));
    let result = spawn_blocking(work).await?.downcast();
    Ok(*result.expect("the work's own result"))
}
