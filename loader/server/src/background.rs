//! Work for which nobody but its own request may wait: on a thread of its own, of low priority.

use std::thread;

use tokio::sync::oneshot;

/// How much lower than that of the other threads its priority is (Unix's `nice`).
const NICE: i32 = 15;

/// Schemas nest, and so does what reads them.
const STACK_BYTES: usize = 8 << 20;

/// Runs work and returns what came of it; none where it panicked, or where there is no thread.
pub(super) async fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (sender, receiver) = oneshot::channel();
    let body: Box<dyn FnOnce() + Send> = Box::new(move || {
        lower_priority();
        // Its request may have ended.
        let _ = sender.send(work());
    });
    let builder = thread::Builder::new().name("background".to_owned()).stack_size(STACK_BYTES);
    builder.spawn(body).ok()?;
    receiver.await.ok()
}

/// Lowers the priority of this thread, and of those that it starts, where that is possible for one
/// thread alone.
fn lower_priority() {
    // Elsewhere the call is about the whole process.
    #[cfg(target_os = "linux")]
    {
        // Without it the work is done all the same.
        let _ = rustix::process::setpriority_process(None, NICE);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = NICE;
}
