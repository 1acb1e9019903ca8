//! `shardpack node`.

use std::{
    collections::HashMap,
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError},
    thread,
};

use anyhow::anyhow;
use serde_json::{Value, json};
use shardpack_loader::{
    cluster::RankProcess,
    receive::{Node, NodeOptions, PackageDir, ReceiveEvent, Shutdown, Store, bind},
    server,
};
use shardpack_manifests::transfer::Timeouts;
use tempfile::TempDir;

use super::{
    Outcome, doctor,
    ranks::{self, Membership, RankParameters},
    threads,
};
use crate::{
    args::{EngineChoice, NodeArgs},
    failure::Failure,
    pause,
    progress::{result, say, size},
};

/// The ranks that run here, by package, each with the folder of the files that MLX reads when it
/// joins a group of its own. A new start of the same package ends the old process.
type Running = Arc<Mutex<HashMap<String, (RankProcess, Option<TempDir>)>>>;

/// Carries the command out: serves until Ctrl-C or SIGTERM.
pub(crate) fn run(args: &NodeArgs) -> Outcome {
    if !args.engine.has_deadlines() {
        let error = anyhow!("ring and jaccl must know every rank of the set");
        return Err(Failure::from(error).hint("say --collectives to `shardpack serve` instead"));
    }
    args.engine.check()?;
    let listener = bind(&args.listen.to_string())?;
    let store = Arc::new(Store::open(&args.store)?);
    let address = listener.local_addr()?;
    let running = Running::default();
    let options = NodeOptions {
        timeouts: Timeouts::default(),
        observer: Box::new(show),
        start_rank: start_rank(
            Arc::clone(&running),
            threads::count(args.threads),
            args.engine.clone(),
        ),
    };
    if args.json {
        result(&json!({ "listening": address, "store": args.store }).to_string());
    } else {
        say(&format!("node: listening on {address}, packages in {}", args.store.display()));
    }
    let shutdown = Shutdown::new();
    let stopping = shutdown.clone();
    thread::Builder::new().name("signals".to_owned()).spawn(move || {
        // Without signals the node still ends with its process.
        let _ = server::wait_for_termination();
        stopping.stop();
    })?;
    Node::new(store, options).serve(&listener, &shutdown).map_err(Failure::from)?;
    running.lock().unwrap_or_else(PoisonError::into_inner).clear();
    Ok(ExitCode::SUCCESS)
}

fn start_rank(
    running: Running,
    threads: usize,
    engine: EngineChoice,
) -> shardpack_loader::receive::StartRankHook {
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
            None => (ranks::start(&name, &package.path, threads, &engine, None), None),
            Some(distributed) => {
                let engine = engine.over(&distributed)?;
                let files = tempfile::tempdir().map_err(|error| error.to_string())?;
                let folder = files.path().to_owned();
                let member = Membership { distributed: &distributed, rank, folder };
                let started = ranks::start(&name, &package.path, threads, &engine, Some(member));
                (started, Some(files))
            }
        };
        let (process, announcement) = started.map_err(|error| format!("{error:#}"))?;
        running.insert(key, (process, files));
        serde_json::to_value(&announcement).map_err(|error| error.to_string())
    })
}

/// What the front wants besides the rank itself.
fn parse_parameters(parameters: &Value) -> Result<Option<RankParameters>, String> {
    let parsed: Option<RankParameters> = serde_json::from_value(parameters.clone())
        .map_err(|error| format!("the front's parameters are not understood: {error}"))?;
    if let Some(RankParameters::Distributed(distributed)) = &parsed {
        // As many as it says itself; MLX compares the number with the package's.
        distributed.check(distributed.ranks()).map_err(|error| error.to_string())?;
    }
    Ok(parsed)
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
            pause::at(|| format!("node:stored:{file}:{chunk}"));
        }
        ReceiveEvent::Verifying { .. } => pause::at(|| "node:verifying".to_owned()),
        ReceiveEvent::Prepared { .. } => pause::at(|| "node:prepared".to_owned()),
        ReceiveEvent::Activating { .. } => pause::at(|| "node:activating".to_owned()),
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
        ReceiveEvent::Connected { .. } | ReceiveEvent::Disconnected { .. } => {}
    }
}
