//! The server's life: from a bound socket to the last answer after it was asked to stop.

use std::{
    future::{Future, IntoFuture, pending},
    io,
    net::TcpListener,
    time::Duration,
};

use axum::serve::ListenerExt;
use std::sync::Arc;

use tokio::{
    sync::{Notify, oneshot},
    task::JoinSet,
    time::timeout,
};

use super::{app::Server, tls::TlsListener};

/// Time for the last bytes to leave once every answer is made or given up.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Connections that wait to be accepted; the system's own limit is lower where it likes.
const BACKLOG: i32 = 4096;
/// Threads that serve connections: they only move text, the cores are the engine's.
const WORKER_THREADS: usize = 2;
/// Threads that turn tokens into events.
const WRITER_THREADS: usize = 2;
/// Threads that render and tokenize; also how many parsed bodies are in memory at once.
const BLOCKING_THREADS: usize = 4;

/// Serves until `shutdown` is ready. Then new requests are turned away with 503, running ones get
/// [`ServerLimits::drain_timeout`](super::ServerLimits::drain_timeout), the rest end with an error,
/// and the port closes.
pub async fn serve(
    listener: TcpListener,
    server: Server,
    shutdown: impl Future<Output = ()> + Send,
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    // The standard library's 128 make a crowd wait a second for its packets to be sent again.
    rustix::net::listen(&listener, BACKLOG)?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let (stop, stopped) = oneshot::channel::<()>();
    let stopped = async {
        let _ = stopped.await;
    };
    let mut watching = JoinSet::new();
    let mut serving = if let Some(tls) = &server.app.tls {
        // Ends with this function.
        watching.spawn(Arc::clone(tls).watch());
        let listener = TlsListener::new(listener, Arc::clone(tls))?;
        let serving = axum::serve(listener, server.router()).with_graceful_shutdown(stopped);
        tokio::spawn(serving.into_future())
    } else {
        let listener = listener.tap_io(|connection| {
            // Tokens are small and must not wait for each other; without it they are only slower.
            let _ = connection.set_nodelay(true);
        });
        let serving = axum::serve(listener, server.router()).with_graceful_shutdown(stopped);
        tokio::spawn(serving.into_future())
    };
    tokio::select! {
        () = shutdown => {}
        result = &mut serving => return result.map_err(io::Error::other)?,
    }

    let app = &server.app;
    app.draining.send_replace(true);
    // Every slot back means that no answer is running; the port stays open to say so until then.
    let all = app.slots.acquire_many(app.limits.active_requests);
    if timeout(app.limits.drain_timeout, all).await.is_err() {
        app.closing.send_replace(true);
    }
    let _ = stop.send(());
    if timeout(CLOSE_TIMEOUT, &mut serving).await.is_err() {
        serving.abort();
    }
    Ok(())
}

/// [`serve`] on a runtime of its own, for callers without one; returns when it does.
pub fn run(
    listener: TcpListener,
    server: Server,
    shutdown: impl Future<Output = ()> + Send,
) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKER_THREADS)
        .max_blocking_threads(BLOCKING_THREADS)
        .thread_name("server")
        .enable_all()
        .build()?;
    // Answers are written on threads of their own, so that a crowd of streams does not stand
    // between a new connection and its first answer.
    let writers = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WRITER_THREADS)
        .thread_name("writer")
        .enable_time()
        .build()?;
    let server = server.with_writers(writers.handle().clone());
    let result = runtime.block_on(serve(listener, server, shutdown));
    writers.shutdown_timeout(CLOSE_TIMEOUT);
    runtime.shutdown_timeout(CLOSE_TIMEOUT);
    result
}

/// Asks a server to stop, from any thread; clones ask the same one.
#[derive(Clone, Default)]
pub struct Stop(Arc<Notify>);

impl Stop {
    /// Asks now, or as soon as the server listens.
    pub fn stop(&self) {
        self.0.notify_one();
    }
}

/// Blocks until the process is asked to end, for callers without a runtime.
pub fn wait_for_termination() -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(termination());
    Ok(())
}

/// Ready when the process is asked to end, or `stop` says so.
pub async fn termination_or(stop: Stop) {
    tokio::select! {
        () = termination() => {}
        () = stop.0.notified() => {}
    }
}

/// Ready when the process is asked to end: Ctrl-C, or SIGTERM where there is one.
pub async fn termination() {
    let interrupt = async {
        if tokio::signal::ctrl_c().await.is_err() {
            pending::<()>().await;
        }
    };
    #[cfg(unix)]
    let terminate = async {
        use tokio::signal::unix::{SignalKind, signal};
        match signal(SignalKind::terminate()) {
            Ok(mut signals) => signals.recv().await,
            Err(_) => pending().await,
        }
    };
    #[cfg(not(unix))]
    let terminate = pending::<Option<()>>();
    tokio::select! {
        () = interrupt => {}
        _ = terminate => {}
    }
}
