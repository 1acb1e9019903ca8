//! `shardpack node`.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::anyhow;
use serde_json::{Value, json};
use shardpack_cluster::RankProcess;
use shardpack_identity::{EnrollmentState, Guard, Joined, date, is_local};
use shardpack_transfer::protocol::Timeouts;
use shardpack_transfer::receive::{
    Node, NodeOptions, PackageDir, ReceiveEvent, ServeError, Shutdown, Store, bind, bind_guarded,
};
use tempfile::TempDir;

use super::{
    Outcome, doctor, draft,
    ranks::{self, Membership, RankEndpoint, RankParameters, StartedRank},
    refusals::Refusals,
    serve::listen_hint,
    threads,
};
use crate::{
    args::{EngineChoice, NodeArgs},
    discovery::Announcer,
    failure::Failure,
    kill_points,
    progress::{result, say, size},
};

/// The ranks that run here, by package. Starting a package again ends its old process.
type Running = Arc<Mutex<HashMap<String, RunningRank>>>;

/// A rank process of this node.
struct RunningRank {
    /// Ends when it is dropped.
    _process: RankProcess,
    /// The files that MLX reads when the rank joins one of MLX's own groups.
    _files: Option<TempDir>,
}

/// What a node keeps its key and membership in, below its store.
const IDENTITY: &str = "identity";

/// Runs the command: serves until Ctrl-C or SIGTERM.
pub(crate) fn run(args: &NodeArgs) -> Outcome {
    if !args.engine.has_deadlines() {
        let error = anyhow!("ring and jaccl need every rank of the set");
        return Err(Failure::from(error).hint("give --collectives to `shardpack serve` instead"));
    }
    args.engine.check()?;
    draft::check(&args.engine)?;
    let ip = reachable(args)?;
    let identity = args.store.join(IDENTITY);
    // The second one is the address of the ranks.
    let stays_here = [args.listen.ip(), ip].into_iter().all(is_local);
    if args.announce && is_local(ip) {
        let error =
            anyhow!("--announce: {ip} is a loopback address, which other machines cannot reach");
        return Err(Failure::from(error).hint("give an address of the network with --listen"));
    }
    let store = Arc::new(Store::open(&args.store)?);
    if args.reset {
        Guard::reset(&identity)?;
    }
    let guarded = !stays_here || args.tls || Guard::has_joined(&identity);
    let guard = guarded
        .then(|| Guard::open(&identity, Duration::from_secs(args.token_ttl)).map(Arc::new))
        .transpose()?;
    let address = args.listen.to_string();
    let bound = if guarded { bind_guarded(&address) } else { bind(&address) };
    let listener = bound.map_err(|error| {
        let hint = match &error {
            ServeError::Listen { source, .. } => listen_hint(source.kind()),
            _ => None,
        };
        let failure = Failure::from(error);
        if let Some(hint) = hint { failure.hint(hint) } else { failure }
    })?;
    let address = listener.local_addr()?;
    let running = Running::default();
    let display = NodeDisplay {
        guard: guard.clone(),
        running: Arc::clone(&running),
        address: SocketAddr::new(ip, address.port()),
        refusals: Mutex::new(Refusals::new(Instant::now())),
        announces: args.announce,
        announcer: Mutex::default(),
    };
    display.announce(args, address);
    let endpoint = RankEndpoint { ip, identity: guarded.then_some(identity) };
    let options = NodeOptions {
        timeouts: Timeouts::default(),
        observer: Box::new(move |event| display.show(event)),
        start_rank: start_rank(
            Arc::clone(&running),
            threads::count(args.threads),
            args.engine.clone(),
            endpoint,
        ),
    };
    let shutdown = Shutdown::new();
    let stopping = shutdown.clone();
    thread::Builder::new().name("signals".to_owned()).spawn(move || {
        // Without signals the node still ends with its process.
        let _ = shardpack_server::wait_for_termination();
        stopping.stop();
    })?;
    let node = Node::new(store, options);
    let node = match guard {
        Some(guard) => node.with_guard(guard),
        None => node,
    };
    node.serve(&listener, &shutdown).map_err(Failure::from)?;
    running.lock().unwrap_or_else(PoisonError::into_inner).clear();
    Ok(ExitCode::SUCCESS)
}

/// The address at which this machine's ranks are reached.
fn reachable(args: &NodeArgs) -> Result<IpAddr, Failure> {
    match args.advertise {
        Some(ip) if ip.is_unspecified() => {
            Err(anyhow!("--advertise {ip} is not an address that other machines can reach").into())
        }
        Some(ip) => Ok(ip),
        None if args.listen.ip().is_unspecified() => {
            let error = anyhow!("{} stands for every address of this machine", args.listen.ip());
            Err(Failure::from(error)
                .hint("give the address that other machines can reach with --advertise"))
        }
        None => Ok(args.listen.ip()),
    }
}

fn start_rank(
    running: Running,
    threads: usize,
    engine: EngineChoice,
    endpoint: RankEndpoint,
) -> shardpack_transfer::receive::StartRankHook {
    Box::new(move |package: &PackageDir, parameters| {
        let name = format!("rank {}", package.key.rank);
        let key = format!("{}-{}", package.key.layout, package.key.rank);
        let rank = package.key.rank;
        let member = match parse_parameters(&parameters)? {
            Some(RankParameters::Doctor { self_test }) => {
                return doctor::in_a_process(self_test).map_err(|error| format!("{error:#}"));
            }
            Some(RankParameters::Distributed(distributed)) => Some(distributed),
            None => None,
        };
        let mut running = running.lock().unwrap_or_else(PoisonError::into_inner);
        running.remove(&key);
        let (started, files) = match member {
            None => (ranks::start(&name, &package.path, threads, &engine, &endpoint, None), None),
            Some(distributed) => {
                let engine = engine.over(&distributed)?;
                let files = tempfile::tempdir().map_err(|error| error.to_string())?;
                let folder = files.path().to_owned();
                let member = Membership { distributed: &distributed, rank, folder };
                let started =
                    ranks::start(&name, &package.path, threads, &engine, &endpoint, Some(member));
                (started, Some(files))
            }
        };
        let StartedRank { process, announcement } =
            started.map_err(|error| format!("{error:#}"))?;
        running.insert(key, RunningRank { _process: process, _files: files });
        serde_json::to_value(&announcement).map_err(|error| error.to_string())
    })
}

/// The front's parameters for a rank.
fn parse_parameters(parameters: &Value) -> Result<Option<RankParameters>, String> {
    let parsed: Option<RankParameters> = serde_json::from_value(parameters.clone())
        .map_err(|error| format!("the front sent invalid parameters: {error}"))?;
    if let Some(RankParameters::Distributed(distributed)) = &parsed {
        // Checked against its own number of ranks; MLX compares that with the package's.
        distributed.check(distributed.ranks()).map_err(|error| error.to_string())?;
    }
    Ok(parsed)
}

/// Messages on the node's terminal.
struct NodeDisplay {
    guard: Option<Arc<Guard>>,
    running: Running,
    /// The node's address for other machines.
    address: SocketAddr,
    refusals: Mutex<Refusals>,
    /// Whether it is announced on the local network until it has joined a cluster.
    announces: bool,
    announcer: Mutex<Option<Announcer>>,
}

impl NodeDisplay {
    /// Starts or stops the announcement on the local network.
    fn update_announcement(&self) {
        let waiting = match &self.guard {
            Some(guard) if self.announces => {
                matches!(guard.enrollment(), EnrollmentState::Inviting { .. }).then(|| guard.key())
            }
            _ => None,
        };
        let mut announcer = self.announcer.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(key) = waiting else {
            *announcer = None;
            return;
        };
        if announcer.is_none() {
            match Announcer::start(self.address, key) {
                Ok(started) => *announcer = Some(started),
                Err(error) => say(&format!("node: {error:#}; the node is not announced")),
            }
        }
    }

    /// Prints the address, and how the node joins a cluster if it has none.
    fn announce(&self, args: &NodeArgs, listening: SocketAddr) {
        self.update_announcement();
        let enrollment = self.guard.as_ref().map(|guard| guard.enrollment());
        if args.json {
            let mut json =
                json!({ "listening": listening, "store": args.store, "tls": enrollment.is_some() });
            match &enrollment {
                Some(EnrollmentState::Joined(joined)) => {
                    json["cluster"] = joined.cluster.as_str().into();
                    json["name"] = joined.name.as_str().into();
                }
                Some(EnrollmentState::Inviting { token, left }) => {
                    json["join"] = json!({
                        "token": token.to_string(),
                        "seconds": left.as_secs(),
                        "command": self.command(),
                    });
                }
                None => {}
            }
            result(&json.to_string());
            return;
        }
        say(&format!("node: listening on {listening}, packages in {}", args.store.display()));
        match &enrollment {
            Some(EnrollmentState::Joined(Joined { cluster, name, expires })) => {
                say(&format!("node: {name} of cluster {cluster}, member until {}", date(*expires)));
            }
            Some(EnrollmentState::Inviting { .. }) => self.invite(),
            None => {}
        }
    }

    /// The command that adds this node; the token is not part of it.
    fn command(&self) -> String {
        format!("shardpack cluster add {}", self.address)
    }

    /// Prints what to run on the controlling machine.
    fn invite(&self) {
        let Some(EnrollmentState::Inviting { token, left }) =
            self.guard.as_ref().map(|guard| guard.enrollment())
        else {
            return;
        };
        say("node: in no cluster yet. On the machine that pushes and serves, run:");
        say("");
        say(&format!("  {}", self.command()));
        say("");
        say("node: and enter this token when it asks:");
        say("");
        say(&format!("  {token}"));
        say("");
        say(&format!(
            "node: the token works once, for {} minutes (create a cluster there first with `shardpack cluster init`)",
            left.as_secs().div_ceil(60)
        ));
    }

    fn show(&self, event: &ReceiveEvent) {
        match event {
            ReceiveEvent::JoinedCluster(Joined { cluster, name, expires }) => {
                say(&format!(
                    "node: joined cluster {cluster} as {name}, member until {}",
                    date(*expires)
                ));
                self.update_announcement();
            }
            ReceiveEvent::Renewed(joined) => {
                say(&format!("node: renewed, member until {}", date(joined.expires)));
            }
            ReceiveEvent::LeftCluster => {
                // Ranks end when the node leaves its cluster.
                self.running.lock().unwrap_or_else(PoisonError::into_inner).clear();
                say("node: left its cluster");
                self.update_announcement();
                self.invite();
            }
            ReceiveEvent::Disconnected { peer, problem: Some(problem) } if self.guard.is_some() => {
                let mut refusals = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
                let line = format!("node: {peer}: {problem}");
                refusals.lines(line, Instant::now()).iter().for_each(|line| say(line));
            }
            other => show(other),
        }
    }
}

fn show(event: &ReceiveEvent) {
    match event {
        ReceiveEvent::Offered { package, held_bytes, missing_bytes, .. } => say(&format!(
            "node: rank {} of layout {}: {} held, {} to come",
            package.rank,
            package.layout.short(),
            size(*held_bytes),
            size(*missing_bytes)
        )),
        ReceiveEvent::ChunkStored { file, chunk, .. } => {
            kill_points::at(|| format!("node:stored:{file}:{chunk}"));
        }
        ReceiveEvent::Verifying { .. } => kill_points::at(|| "node:verifying".to_owned()),
        ReceiveEvent::Prepared { .. } => kill_points::at(|| "node:prepared".to_owned()),
        ReceiveEvent::Activating { .. } => kill_points::at(|| "node:activating".to_owned()),
        ReceiveEvent::Activated { package, .. } => {
            say(&format!(
                "node: rank {} of layout {} is active",
                package.rank,
                package.layout.short()
            ));
        }
        ReceiveEvent::ChunkRefused { file, chunk, .. } => {
            say(&format!("node: chunk {chunk} of {file} arrived damaged and was refused"));
        }
        ReceiveEvent::Disconnected { problem: Some(problem), .. } => {
            say(&format!("node: {problem}"));
        }
        ReceiveEvent::Connected { .. }
        | ReceiveEvent::StreamJoined { .. }
        | ReceiveEvent::Disconnected { .. }
        | ReceiveEvent::JoinedCluster(_)
        | ReceiveEvent::Renewed(_)
        | ReceiveEvent::LeftCluster => {}
    }
}
