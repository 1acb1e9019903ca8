//! Runs the server: from a bound socket to a graceful shutdown.

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

/// Time to flush the last bytes once every response is complete or aborted.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Listen backlog; the system may lower it.
const BACKLOG: i32 = 4096;
/// Threads that serve connections: they only move text, the cores belong to the engine.
const WORKER_THREADS: usize = 2;
/// Threads that write responses.
const WRITER_THREADS: usize = 2;
/// Threads that parse, render and tokenize; also how many parsed bodies are in memory at once.
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
    // With the standard library's 128, bursts of connections wait a second for a retransmission.
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
    // All slots are free when no request is running; until then the port stays open for 503s.
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
    // Responses are written on threads of their own, so that many streams do not delay new
    // connections.
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

/// Stops a server, from any thread; clones stop the same one.
#[derive(Clone, Default)]
pub struct Stop(Arc<Notify>);

impl Stop {
    /// Stops the server now, or as soon as it listens.
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
