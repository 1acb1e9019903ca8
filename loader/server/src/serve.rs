//! Runs the server: from a bound socket to a graceful shutdown.

use std::{
    convert::Infallible,
    future::{Future, pending},
    io,
    net::TcpListener,
    pin::pin,
    sync::Arc,
    time::Duration,
};

use axum::{Router, http::Request, response::Response};
use hyper::{
    body::Incoming,
    server::conn::http1,
    service::{Service as _, service_fn},
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulConnection,
    service::TowerToHyperService,
};
use tokio::{
    net::TcpStream,
    sync::{Notify, oneshot, watch},
    task::JoinSet,
    time::{sleep, timeout},
};

use super::{
    app::{AppState, READING_MOST, Remote, Server, ServiceEvent},
    connections::{Connections, Entered, ReceivingBody, RunningBody, Said},
    door::{Admitted, Door},
    http2::{self, HttpVersion},
    keys::Reload,
    routes,
    tasks::{blocking, task},
    tls::ClientStream,
};

/// Time to flush the last bytes once every response is complete or aborted.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause after a failed accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(1);
/// Listen backlog; the system may lower it.
const BACKLOG: i32 = 4096;
/// Threads that serve connections: they only move text, the cores belong to the engine.
const WORKER_THREADS: usize = 2;
/// Threads that write responses.
const WRITER_THREADS: usize = 2;
/// Threads that parse, render and tokenize, and one for whatever else blocks.
const BLOCKING_THREADS: usize = READING_MOST + 1;

/// Serves until `shutdown` is ready. Then new requests are turned away with 503, running ones get
/// [`ServerLimits::drain_timeout`](super::ServerLimits::drain_timeout), the rest end with an error,
/// and the port closes. A signal to end that comes meanwhile ends all at once.
pub(crate) async fn serve(
    listener: TcpListener,
    server: Server,
    shutdown: impl Future<Output = ()> + Send,
) -> io::Result<Ended> {
    listener.set_nonblocking(true)?;
    // With the standard library's 128, bursts of connections wait a second for a retransmission.
    rustix::net::listen(&listener, BACKLOG)?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let (stop, stopped) = oneshot::channel::<()>();
    let stopped = async {
        let _ = stopped.await;
    };
    // Ends with this function.
    let mut watching = JoinSet::new();
    watching.spawn(task(Arc::clone(&server.app.models).tend()));
    if let Some(tls) = &server.app.tls {
        watching.spawn(task(Arc::clone(tls).watch()));
    }
    if let Some(keys) = &server.app.keys {
        watching.spawn(task(Arc::clone(keys).watch()));
    }
    let app = Arc::clone(&server.app);
    watching.spawn(task(Arc::clone(&server.app.ledger).keep(move || app.powers())));
    watching.spawn(task(reload_on_hangup(Arc::clone(&server.app))));
    watching.spawn(task(tell_that_it_lives(Arc::clone(&server.app))));
    let mut again = Signals::listen();
    let serving = accept(listener, server.router(), Arc::clone(&server.app), stopped);
    let mut serving = tokio::spawn(task(serving));
    tokio::select! {
        () = shutdown => {}
        result = &mut serving => {
            return result.map(|()| Ended::Drained).map_err(io::Error::other);
        }
    }

    // Whoever hears that the server stops may send the second one at once.
    again.forget_first().await;
    let app = &server.app;
    app.draining.send_replace(true);
    // All slots are free when no request is running; until then the port stays open for 503s.
    app.tell(ServiceEvent::Stopping);
    let drain = async {
        if timeout(app.limits.drain_timeout, app.slots.all_free()).await.is_err() {
            app.models.close();
        }
        let _ = stop.send(());
        if timeout(CLOSE_TIMEOUT, &mut serving).await.is_err() {
            serving.abort();
        }
    };
    let ended = tokio::select! {
        () = drain => Ended::Drained,
        code = again.second() => {
            app.models.close();
            Ended::AtOnce(code)
        }
    };
    app.ledger.close();
    Ok(ended)
}

/// How a server ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Running requests had the time that they get.
    Drained,
    /// A second signal ended it at once; the exit code says which.
    AtOnce(u8),
}

/// Reads keys and certificates again and opens the audit log anew on SIGHUP, forever.
async fn reload_on_hangup(app: Arc<AppState>) {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        if app.keys.is_none() && app.tls.is_none() && !app.ledger.has_audit() {
            // The end of its terminal ends it.
            return;
        }
        let Ok(mut hangups) = signal(SignalKind::hangup()) else { return };
        while hangups.recv().await.is_some() {
            let own = Arc::clone(&app);
            // Files may lie on a slow disk.
            let reload = move || {
                own.tell(ServiceEvent::Reloading);
                if let Some(keys) = &own.keys {
                    keys.reload(Reload::Always);
                }
                if let Some(tls) = &own.tls {
                    tls.reload_now();
                }
                own.ledger.reopen();
                own.tell(ServiceEvent::Reloaded);
            };
            let _ = blocking(reload).await;
        }
    }
    drop(app);
}

/// Tells the service manager that the server answers, where it wants to hear that.
async fn tell_that_it_lives(app: Arc<AppState>) {
    let Some(interval) = app.alive_interval() else { return };
    loop {
        app.tell(ServiceEvent::Alive);
        sleep(interval).await;
    }
}

/// The signals that end a process.
struct Signals {
    #[cfg(unix)]
    listened: Option<[tokio::signal::unix::Signal; 2]>,
}

impl Signals {
    fn listen() -> Self {
        #[cfg(unix)]
        {
            use tokio::signal::unix::{SignalKind, signal};
            let of = |kind| signal(kind).ok();
            let interrupt = of(SignalKind::interrupt());
            let listened = interrupt.zip(of(SignalKind::terminate())).map(Into::into);
            Self { listened }
        }
        #[cfg(not(unix))]
        Self {}
    }

    /// Counts whatever came until now as the first one.
    async fn forget_first(&mut self) {
        #[cfg(unix)]
        for signal in self.listened.iter_mut().flatten() {
            // Ready at once if it came.
            let _ = timeout(Duration::ZERO, signal.recv()).await;
        }
    }

    /// The exit code for the next signal.
    async fn second(self) -> u8 {
        #[cfg(unix)]
        if let Some([mut interrupt, mut terminate]) = self.listened {
            return tokio::select! {
                _ = interrupt.recv() => 128 + 2,
                _ = terminate.recv() => 128 + 15,
            };
        }
        pending().await
    }
}

/// Serves connections until `stopped`, then lets the requests under way end.
async fn accept(
    listener: tokio::net::TcpListener,
    router: Router,
    app: Arc<AppState>,
    stopped: impl Future<Output = ()>,
) {
    let connections = Connections::new(app.limits.connections);
    let door = Arc::new(Door::new(connections, app.tls.is_some()));
    let closing = watch::Sender::new(());
    let mut served = JoinSet::new();
    let mut stopped = pin!(stopped);
    loop {
        // What has ended takes no memory.
        while served.try_join_next().is_some() {}
        let accepted = tokio::select! {
            () = &mut stopped => break,
            accepted = listener.accept() => accepted,
        };
        let Ok((connection, address)) = accepted else {
            // Mostly for lack of descriptors.
            door.make_room();
            sleep(ACCEPT_PAUSE).await;
            continue;
        };
        // Closed at once where there is no place for it.
        let Some(admitted) = door.admit(&connection, address.ip()).await else { continue };
        // Tokens are small and must not wait for each other; without it they are only slower.
        let _ = connection.set_nodelay(true);
        let (router, closed, app) = (router.clone(), closing.subscribe(), Arc::clone(&app));
        let door = Arc::clone(&door);
        served.spawn(task(async move {
            let entered = match admitted {
                Admitted::Entered(entered) => Some(entered),
                Admitted::Waits(permit) => {
                    door.enter_from_beside(&connection, address.ip(), permit).await
                }
            };
            let Some(entered) = entered else { return };
            let told = Arc::clone(&entered);
            tokio::select! {
                () = told.gives_way() => {}
                () = attend((connection, Remote(address)), router, &app, entered, closed) => {}
            }
        }));
    }
    drop((listener, closing));
    while served.join_next().await.is_some() {}
}

/// Serves one connection to its end.
async fn attend(
    (connection, remote): (TcpStream, Remote),
    router: Router,
    app: &AppState,
    entered: Arc<Entered>,
    closed: watch::Receiver<()>,
) {
    let head_timeout = app.limits.head_timeout;
    // An error is found by whoever reads next.
    if timeout(head_timeout, connection.readable()).await.is_err() {
        return;
    }
    entered.has_said(http2::said(&connection, app.tls.is_some()).max(Said::Part));
    match &app.tls {
        None => {
            if let Some(version) = HttpVersion::peek(&connection, head_timeout).await {
                let spoken = (ClientStream::Plain(connection), version, remote);
                converse(spoken, router, head_timeout, entered, closed).await;
            }
        }
        Some(tls) => {
            // One that fails is its caller's affair.
            if let Ok(connection) = tls.accept(connection).await {
                entered.has_said(Said::Message);
                let version = HttpVersion::negotiated(connection.get_ref().1.alpn_protocol());
                let spoken = (ClientStream::Encrypted(Box::new(connection)), version, remote);
                converse(spoken, router, head_timeout, entered, closed).await;
            }
        }
    }
}

async fn converse(
    (connection, version, remote): (ClientStream, HttpVersion, Remote),
    router: Router,
    head_timeout: Duration,
    entered: Arc<Entered>,
    closed: watch::Receiver<()>,
) {
    let (router, own) = (TowerToHyperService::new(router), Arc::clone(&entered));
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(remote);
        if let Some(uri) = routes::canonical(request.uri()) {
            *request.uri_mut() = uri;
        }
        let running = own.begin();
        let response = router.call(request.map(|body| ReceivingBody::new(body, &own)));
        async move {
            let response: Result<Response, Infallible> = response.await;
            response.map(|response| response.map(|body| RunningBody { body, _running: running }))
        }
    });
    let connection = TokioIo::new(connection);
    match version {
        HttpVersion::One => {
            let mut builder = http1::Builder::new();
            let builder = builder.timer(TokioTimer::new()).header_read_timeout(head_timeout);
            let connection = builder.serve_connection(connection, service);
            drive(connection, head_timeout, &entered, closed).await;
        }
        HttpVersion::Two => {
            let connection = http2::builder().serve_connection(connection, service);
            drive(connection, head_timeout, &entered, closed).await;
        }
    }
}

/// Runs a connection until it ends, or has been idle for so long, or the server closes.
async fn drive(
    connection: impl GracefulConnection,
    idle_timeout: Duration,
    entered: &Entered,
    mut closed: watch::Receiver<()>,
) {
    let mut connection = pin!(connection);
    loop {
        let idle = entered.idle().unwrap_or_default();
        tokio::select! {
            // A request that is there is read before anybody is called idle, however busy the machine is.
            biased;
            // What a client does wrong is its own affair.
            _ = connection.as_mut() => return,
            // An error: the sender is gone.
            _ = closed.changed() => break,
            () = sleep(idle_timeout.saturating_sub(idle)) => {}
        }
        if entered.idle().is_some_and(|idle| idle >= idle_timeout) {
            break;
        }
    }
    connection.as_mut().graceful_shutdown();
    while timeout(CLOSE_TIMEOUT, connection.as_mut()).await.is_err() {
        // One that says nothing does not confirm that it is closed either.
        if entered.idle().is_some() {
            return;
        }
    }
}

/// Serves on a runtime of its own until the process is asked to end, or `stop` says so. Then new requests
/// are turned away with 503, running ones get
/// [`ServerLimits::drain_timeout`](super::ServerLimits::drain_timeout), the rest end with an error, and the
/// port closes.
///
/// Neither generic nor `async`: so all of HTTP is compiled in this crate, and not once more, with less
/// optimisation, in the program.
pub fn run(listener: TcpListener, server: Server, stop: Stop) -> io::Result<Ended> {
    run_until(listener, server, termination_or(stop))
}

/// [`serve`] on a runtime of its own; returns when it does.
pub(crate) fn run_until(
    listener: TcpListener,
    server: Server,
    shutdown: impl Future<Output = ()> + Send,
) -> io::Result<Ended> {
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
async fn termination_or(stop: Stop) {
    tokio::select! {
        () = termination() => {}
        () = stop.0.notified() => {}
    }
}

/// Ready when the process is asked to end: Ctrl-C, or SIGTERM where there is one.
async fn termination() {
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
