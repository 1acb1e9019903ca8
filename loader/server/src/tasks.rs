//! Tasks for the runtime, boxed. Tokio compiles its generic task code again for every type of future;
//! boxed futures have one type. That code was a tenth of this crate.

use std::{any::Any, pin::Pin};

use tokio::task::{JoinError, spawn_blocking};

/// A boxed future.
pub(super) type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Boxes a future, to be spawned.
pub(super) fn task(future: impl Future<Output = ()> + Send + 'static) -> Task {
    Box::pin(future)
}

/// Spawns a future, which runs to its end even if no caller waits.
pub(super) fn spawn(future: impl Future<Output = ()> + Send + 'static) {
    drop(tokio::spawn(task(future)));
}

/// Runs blocking work on threads that serve no connections. A panic of the work is an error.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, JoinError> {
    let work: Box<dyn FnOnce() -> Box<dyn Any + Send> + Send> = Box::new(|| Box::new(work()));
    let result = spawn_blocking(work).await?.downcast();
    Ok(*result.expect("the work's own result"))
}
