//! `shardpack node`.

mod display;
mod fronts;
mod restart;
mod running;
mod scrub;
mod service;
mod starter;
mod upgrade;

use std::{
    net::TcpListener,
    path::Path,
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::anyhow;
use serde_json::json;
use shardpack_identity::{Guard, HostAddress, is_local};
use shardpack_transfer::protocol::Timeouts;
use shardpack_transfer::receive::{
    Node, NodeOptions, ServeError, Shutdown, Store, bind, bind_guarded,
};

use display::NodeDisplay;
use fronts::Fronts;
use restart::{End, Ending};
use running::Running;
use starter::RankStarter;
use upgrade::{FailedUpgrade, OfNode, Upgrades};

use super::{
    Outcome, draft,
    events::{EventKind, EventLog},
    node_operations::{self, Handler, Observed},
    ranks::RankEndpoint,
    refusals::Refusals,
    serve::listen_hint,
};
use crate::{
    args::{self, NodeAction, NodeArgs},
    failure::Failure,
    kill_points, sd_notify,
};

/// What a node keeps its key and membership in, below its store.
const IDENTITY: &str = "identity";

/// Runs the command.
pub(crate) fn run(args: &NodeArgs) -> Outcome {
    match (&args.action, &args.store) {
        (Some(NodeAction::Install { service, arguments }), _) => {
            // What would not start is refused now.
            let line = ["shardpack", "node"].into_iter().map(str::to_owned);
            args::parse_or_exit(line.chain(arguments.iter().cloned()));
            service::install(service, arguments)
        }
        (Some(NodeAction::Uninstall { service }), _) => service::uninstall(service),
        (None, Some(store)) => serve(args, store),
        (None, None) => Err(anyhow!("--store names no folder").into()),
    }
}

/// Serves until Ctrl-C or SIGTERM, whatever becomes of programs that are tried meanwhile.
fn serve(args: &NodeArgs, store_folder: &Path) -> Outcome {
    check_engine(args)?;
    let ip = reachable(args)?;
    // Before it says that it listens: whoever reads that may ask it to end.
    let ending = Ending::by_signals()?;
    let listener = args.socket_on_stdin.then(restart::inherited_socket).transpose()?;
    let mut life = Life { listener, failed: None, is_first: true };
    loop {
        let (end, listener) = live(args, (store_folder, ip), life, &ending)?;
        let trial = match end {
            End::Asked => return Ok(ExitCode::SUCCESS),
            End::Confirmed => return Ok(ExitCode::from(restart::CONFIRMED)),
            End::Upgrade(trial) => *trial,
        };
        let digest = trial.digest;
        let error = restart::replace(trial, &listener, &ending);
        if ending.is_asked() {
            return Ok(ExitCode::SUCCESS);
        }
        let failed = FailedUpgrade { digest, reason: format!("{error:#}") };
        life = Life { listener: Some(listener), failed: Some(failed), is_first: false };
    }
}

/// What a node that goes on serving has from before.
struct Life {
    /// Its socket.
    listener: Option<TcpListener>,
    /// The program that it did not go over to.
    failed: Option<FailedUpgrade>,
    /// Whether this process has not served yet.
    is_first: bool,
}

/// Serves once: until the node is to end, or to go over to another program.
fn live(
    args: &NodeArgs,
    (store_folder, host): (&Path, HostAddress),
    life: Life,
    ending: &Ending,
) -> Result<(End, TcpListener), Failure> {
    let shutdown = Shutdown::new();
    ending.serving(&shutdown);
    let identity = store_folder.join(IDENTITY);
    let store = Arc::new(Store::open(store_folder)?);
    if args.reset && life.is_first {
        Guard::reset(&identity)?;
    }
    // The second one is the address of the ranks.
    let stays_here = [args.listen.ip(), host.ip()].into_iter().all(is_local);
    let guarded = !stays_here || args.tls || Guard::has_joined(&identity);
    let guard = guarded
        .then(|| Guard::open(&identity, Duration::from_secs(args.token_ttl)).map(Arc::new))
        .transpose()?;
    let listener = life.listener.map_or_else(|| bound(args, guarded), Ok)?;
    let address = listener.local_addr()?;
    if args.trial {
        kill_points::at(|| "node:trial".to_owned());
    }
    let running = Running::default();
    let seen = Observed::start(store_folder, &args.engine)?;
    let log = Arc::clone(&seen.log);
    let display = Arc::new(NodeDisplay {
        guard: guard.clone(),
        running: Arc::clone(&running),
        address: host.at(address.port()),
        refusals: Mutex::new(Refusals::new(Instant::now())),
        announces: args.announce,
        announcer: Mutex::default(),
        log: Arc::clone(&log),
    });
    log.started("node", json!({ "listening": address }));
    log_program(&log, args, life.is_first, life.failed.as_ref());
    display.announce(args, address);
    running::reap(&running)?;
    let endpoint = RankEndpoint { host, identity: guarded.then_some(identity.clone()) };
    let fronts = Fronts::open(&store, store_folder, guarded.then_some(identity))?;
    if !args.trial {
        fronts.run()?;
    }
    let upgrades = Upgrades::new(OfNode {
        guard: guard.clone(),
        ranks: Arc::clone(&seen.ranks),
        fronts: Arc::clone(&fronts),
        ending: ending.clone(),
        is_trial: args.trial,
        failed: life.failed,
    });
    let book = Arc::clone(&seen.ranks);
    let starter = RankStarter::new(args, Arc::clone(&store), Arc::clone(&running), book, endpoint);
    let scrubbing = scrub::start(args, &store, &shutdown, &display)?;
    let node = answering(args, store, (Arc::new(starter), seen), display, (&fronts, upgrades));
    let node = match guard {
        Some(guard) => node.with_guard(guard),
        None => node,
    };
    sd_notify::notify("READY=1");
    let served = node.serve(&listener, &shutdown).map_err(Failure::from);
    // Before the ranks, so that they end in order.
    fronts.end();
    served?;
    running.lock().unwrap_or_else(PoisonError::into_inner).clear();
    // Another program may be about to open the store.
    scrub::join(scrubbing);
    log.stopped("node");
    Ok((ending.reason(), listener))
}

/// What a program on trial says to those who want it to serve: weights would be loaded for nothing.
const ON_TRIAL: &str = "this node tries another program and serves in a moment: try again";

/// The node over `store`, with all that it answers.
fn answering(
    args: &NodeArgs,
    store: Arc<Store>,
    (starter, seen): (Arc<RankStarter>, Observed),
    display: Arc<NodeDisplay>,
    (fronts, upgrades): (&Arc<Fronts>, Upgrades),
) -> Node {
    let is_trial = args.trial;
    let of_ranks = starter.handler();
    let options = NodeOptions {
        timeouts: Timeouts::default(),
        observer: Box::new(move |event| display.show(event)),
        start_rank: Box::new(move |package, parameters| {
            if is_trial {
                return Err(ON_TRIAL.to_owned());
            }
            starter.start(package, &parameters)
        }),
    };
    let fronts = Arc::clone(fronts);
    let of_trial: Handler = Box::new(move |name, _| {
        let would_serve = is_trial && (name.starts_with("front.") || name.starts_with("rank."));
        would_serve.then(|| Err(ON_TRIAL.to_owned()))
    });
    let of_fronts: Handler = Box::new(move |name, parameters| fronts.operate(name, parameters));
    let of_program: Handler = Box::new(move |name, parameters| upgrades.operate(name, parameters));
    let handlers = vec![of_trial, seen.handler(), of_ranks, of_fronts, of_program];
    Node::new(store, options).with_operations(node_operations::hook(handlers))
}

/// Logs that another program runs, or that one does not.
fn log_program(log: &EventLog, args: &NodeArgs, is_first: bool, failed: Option<&FailedUpgrade>) {
    let (version, build) = (env!("CARGO_PKG_VERSION"), env!("BUILD_HASH"));
    if args.socket_on_stdin && !args.trial && is_first {
        let fields = json!({ "version": version, "build": build });
        log.add(
            EventKind::Upgraded,
            format!("runs shardpack {version} (build {build}) now"),
            fields,
        );
    }
    if let Some(FailedUpgrade { digest, reason }) = failed {
        let text = format!("went back to shardpack {version} (build {build}): {reason}");
        log.add(EventKind::UpgradeFailed, text, json!({ "digest": digest }));
    }
}

/// Whether ranks can run with the engine that was chosen.
fn check_engine(args: &NodeArgs) -> Result<(), Failure> {
    if !args.engine.has_deadlines() {
        let error = anyhow!("ring and jaccl need every rank of the set");
        return Err(Failure::from(error).hint("give --collectives to `shardpack serve` instead"));
    }
    args.engine.check()?;
    draft::check(&args.engine)
}

/// The node's socket.
fn bound(args: &NodeArgs, is_guarded: bool) -> Result<TcpListener, Failure> {
    let address = args.listen.to_string();
    let bound = if is_guarded { bind_guarded(&address) } else { bind(&address) };
    bound.map_err(unbound)
}

/// Why there is no listener, with what to do.
fn unbound(error: ServeError) -> Failure {
    let hint = match &error {
        ServeError::Listen { source, .. } => listen_hint(source.kind()),
        _ => None,
    };
    let failure = Failure::from(error);
    if let Some(hint) = hint { failure.hint(hint) } else { failure }
}

/// The address at which this machine's ranks are reached.
fn reachable(args: &NodeArgs) -> Result<HostAddress, Failure> {
    let host = advertised(args)?;
    if args.announce && is_local(host.ip()) {
        let error =
            anyhow!("--announce: {host} is a loopback address, which other machines cannot reach");
        return Err(Failure::from(error).hint("give an address of the network with --listen"));
    }
    Ok(host)
}

fn advertised(args: &NodeArgs) -> Result<HostAddress, Failure> {
    match args.advertise {
        Some(host) if host.ip().is_unspecified() => {
            Err(anyhow!("--advertise {host} is not an address that other machines can reach")
                .into())
        }
        Some(host) => Ok(host),
        None if args.listen.ip().is_unspecified() => {
            let error = anyhow!("{} stands for every address of this machine", args.listen.ip());
            Err(Failure::from(error)
                .hint("give the address that other machines can reach with --advertise"))
        }
        None => Ok(HostAddress::of(args.listen)),
    }
}
