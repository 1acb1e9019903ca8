//! `serve` with several sets, or with sets that are loaded on demand: what was asked for is checked
//! against the memory of this machine, or of the nodes, before anything starts.

use std::{collections::BTreeSet, path::Path, sync::Arc, thread, time::Duration};

use anyhow::{Context, anyhow};
use serde_json::json;
use shardpack_identity::Endpoint;
use shardpack_server::{
    HostOptions, Machine, MemoryShare, ModelEntry, Server, ServerEvents, Stop, check_room,
};

use super::{
    LOOK_AGAIN, host,
    host::Host,
    hosted_set::{HostedSet, KvChoice, THIS_MACHINE},
    limits, listen,
    models::Models,
    nodes, placement, tls,
};
use crate::{
    args::ServeArgs,
    cluster,
    commands::{Outcome, doctor, draft, keys, package, store},
    failure::Failure,
    progress::{result, say, size},
    sd_notify,
};

/// Whether this is a server of models that come and go.
pub(super) fn is_asked(args: &ServeArgs) -> bool {
    let is_shared = !args.more.is_empty() || !args.place.is_empty() || args.memory.is_some();
    is_shared || args.on_demand || !args.pin.is_empty()
}

/// Serves until Ctrl-C or SIGTERM.
pub(super) fn run(args: &ServeArgs) -> Outcome {
    refuse_single(args)?;
    let remote = cluster::nodes(&args.nodes.names, &args.nodes.cluster)?;
    check_engine(args, &remote)?;
    let (sets, machines) = placed(args, &remote)?;
    let entries: Vec<ModelEntry> = sets.iter().map(|set| set.entry.clone()).collect();
    let at_start: Vec<ModelEntry> =
        entries.iter().filter(|it| it.is_pinned || !args.on_demand).cloned().collect();
    fits(&entries, &at_start, &machines)?;
    let keys = args.keys.as_deref().map(keys::open).transpose()?;
    let (tls, ledger) = (tls(args)?, super::ledger(args)?);
    let listener = listen(args, keys.is_some(), tls.is_some())?;
    let address = listener.local_addr()?;
    let url = format!("{}://{address}/v1", if tls.is_some() { "https" } else { "http" });
    let events = ServerEvents::default();
    let host_options = host::HostOptions {
        engine: args.engine.clone(),
        threads: args.threads,
        supervisor: nodes::options(args)?,
        takes_over: args.take_over,
        checks_memory: args.memory.is_none(),
        events: events.clone(),
    };
    let host = Arc::new(Host::new(sets, machines, host_options));
    let load_timeout = Duration::from_secs(args.load_timeout);
    let options = HostOptions { on_demand: args.on_demand, load_timeout };
    let mut server = Server::of_host(Arc::<Host>::clone(&host), options, limits(args))
        .with_events(events)
        .with_check(Arc::<Host>::clone(&host))
        .with_origins(args.cors.clone())
        .with_hosts(super::hosts(args));
    if let Ok(store) = store::store() {
        let nodes = remote.len().max(1) as u32;
        server = server.with_store(Arc::new(Models { store, nodes }));
    }
    server = super::watched(server).with_ledger(ledger);
    if let Some(keys) = keys {
        server = server.with_keys(keys);
    }
    if let Some(tls) = tls {
        server = server.with_tls(tls);
    }
    if args.log {
        server = server.with_log(Box::new(say));
    }
    let stop = Stop::default();
    let stopped = stop.clone();
    let serving = thread::Builder::new()
        .name("http".to_owned())
        .spawn(move || shardpack_server::run(listener, server, stopped))?;
    let names = |entries: &[ModelEntry]| -> Vec<String> {
        entries.iter().map(|entry| entry.card.name().to_owned()).collect()
    };
    let outcome = watch(
        args,
        &host,
        &names(&at_start),
        || serving.is_finished(),
        || {
            ready(args, &names(&entries), &url);
        },
    );
    stop.stop();
    let served = serving.join().map_err(|_| anyhow!("the server's thread panicked"))?;
    host.stop();
    outcome?;
    Ok(super::ended(args, served.context("the server ended")?))
}

/// Refuses what is for one model alone.
fn refuse_single(args: &ServeArgs) -> Result<(), Failure> {
    let of_one = [
        ("--on", args.on.is_some()),
        ("--stream", args.stream),
        ("--script", args.script.is_some()),
        ("--name", args.name.is_some()),
        ("--alias", !args.alias.is_empty()),
        ("--draft-model", args.engine.draft_model.is_some()),
        ("--hostfile", args.network.hostfile.is_some()),
        ("--collectives of MLX", !args.engine.collectives.are_own()),
    ];
    match of_one.into_iter().find(|(_, is_given)| *is_given) {
        None => Ok(()),
        Some((option, _)) => {
            let error = anyhow!("{option} is for a server of one model that stays loaded");
            Err(Failure::from(error)
                .hint("leave it away, or serve one set without --on-demand, --pin and --memory"))
        }
    }
}

/// Whether the ranks can run as the options say.
fn check_engine(args: &ServeArgs, nodes: &[Endpoint]) -> Result<(), Failure> {
    if nodes.is_empty() {
        args.engine.check()?;
        return draft::check(&args.engine);
    }
    // Engines of nodes are installed on the nodes.
    args.engine.check_arguments()?;
    draft::check_elsewhere(&args.engine)?;
    let of_nodes = [
        ("--kv-memory", args.engine.kv_memory.is_some()),
        ("--kv-type", args.engine.kv_type.is_some()),
        ("--threads", args.threads.is_some()),
    ];
    match of_nodes.into_iter().find(|(_, is_given)| *is_given) {
        None => Ok(()),
        Some((option, _)) => {
            let error = anyhow!("{option} is for ranks of this machine, and these run on nodes");
            Err(Failure::from(error).hint(format!("give it to `shardpack node`: node {option} …")))
        }
    }
}

/// The sets and the machines that share them.
fn placed(args: &ServeArgs, nodes: &[Endpoint]) -> Result<(Vec<HostedSet>, Vec<Machine>), Failure> {
    let (mut sets, stored) = sets(args, nodes.len().max(1))?;
    if nodes.is_empty() {
        let machine = Machine { name: THIS_MACHINE.to_owned(), limit_bytes: memory_limit(args)? };
        return Ok((sets, vec![machine]));
    }
    let machines = placement::place(args, &mut sets, &stored, nodes)?;
    Ok((sets, machines))
}

/// The sets, opened, with their names and what memory each takes here; the names of those that are of the
/// managed store, where models are converted for so many nodes.
fn sets(args: &ServeArgs, nodes: usize) -> Result<(Vec<HostedSet>, BTreeSet<String>), Failure> {
    let mut sets: Vec<HostedSet> = Vec::new();
    let mut stored = BTreeSet::new();
    let (kv, idle_timeout) =
        (KvChoice::of(&args.engine), args.idle_timeout.map(Duration::from_secs));
    for given in std::iter::once(&args.set).chain(&args.more) {
        let bits = args.bits.filter(|_| !is_packed(given));
        let (path, is_stored) = store::set_of(given, bits, nodes)?;
        let set = HostedSet::open(&path, kv, idle_timeout)?;
        let name = set.entry.card.name();
        if is_stored {
            stored.insert(name.to_owned());
        }
        if sets.iter().any(|other| other.entry.card.name() == name) {
            let error = anyhow!("two sets are named {name}: {} is the second", given.display());
            return Err(Failure::from(error).hint(
                "convert one of them with another --name: clients tell models apart by their names",
            ));
        }
        sets.push(set);
    }
    for name in &args.pin {
        find(&mut sets, name, "--pin")?.entry.is_pinned = true;
    }
    for text in &args.priority {
        let parsed = text.split_once('=').and_then(|(name, weight)| {
            Some((name, weight.parse::<u32>().ok().filter(|weight| *weight > 0)?))
        });
        let (name, weight) = parsed.ok_or_else(|| {
            anyhow!("--priority {text}: expected NAME=N with a whole number from 1")
        })?;
        find(&mut sets, name, "--priority")?.entry.priority = weight;
    }
    Ok((sets, stored))
}

/// The set of the model that `option` names.
fn find<'a>(
    sets: &'a mut [HostedSet],
    name: &str,
    option: &str,
) -> Result<&'a mut HostedSet, Failure> {
    let known: Vec<&str> = sets.iter().map(|set| set.entry.card.name()).collect();
    let unknown = anyhow!("{option} {name}: no such model, expected one of {}", known.join(", "));
    let mut sets = sets.iter_mut();
    sets.find(|set| set.entry.card.name() == name).ok_or_else(|| unknown.into())
}

fn is_packed(given: &Path) -> bool {
    package::is_set(given) || package::is_package(given)
}

/// What all models may take together.
fn memory_limit(args: &ServeArgs) -> Result<u64, Failure> {
    if let Some(limit) = &args.memory {
        return Ok(limit.0);
    }
    let memory = doctor::memory_bytes().ok_or_else(|| {
        Failure::from(anyhow!("this machine does not say how much memory it has"))
            .hint("say what models may take with --memory")
    })?;
    Ok(memory / 4 * 3)
}

/// Checks that what is loaded at the start fits together, and everything else on its own beside
/// what is pinned.
fn fits(all: &[ModelEntry], at_start: &[ModelEntry], machines: &[Machine]) -> Result<(), Failure> {
    let wrong = |error: shardpack_server::NoRoom, hint: &str| {
        let plan: Vec<String> = all
            .iter()
            .map(|entry| {
                let bytes = entry.memory.iter().map(MemoryShare::total_bytes).sum();
                format!("{} {}", entry.card.name(), size(bytes))
            })
            .collect();
        Failure::wrong(error).hint(format!("{hint} ({})", plan.join(", ")))
    };
    check_room(at_start, machines)
        .map_err(|error| wrong(error, "with --on-demand models take turns"))?;
    let pinned: Vec<ModelEntry> = all.iter().filter(|entry| entry.is_pinned).cloned().collect();
    for entry in all.iter().filter(|entry| !entry.is_pinned) {
        let together = [pinned.as_slice(), std::slice::from_ref(entry)].concat();
        check_room(&together, machines)
            .map_err(|error| wrong(error, "serve it on a machine with more memory, or pin less"))?;
    }
    Ok(())
}

/// Calls `ready` once what is to be there from the start is loaded, and returns when the server has
/// stopped. It ends at once where nothing could be loaded.
fn watch(
    args: &ServeArgs,
    host: &Host,
    at_start: &[String],
    server_ended: impl Fn() -> bool,
    ready: impl FnOnce(),
) -> Result<(), Failure> {
    let mut ready = Some(ready);
    while !server_ended() {
        if ready.is_some()
            && let Some(failed) = host.first_loads(at_start)
        {
            if !args.on_demand && failed.len() == at_start.len() {
                let (name, error) = failed.into_iter().next().unwrap_or_default();
                return Err(anyhow!("no model could be loaded: {name}: {error}").into());
            }
            if let Some(ready) = ready.take() {
                ready();
            }
        }
        thread::sleep(LOOK_AGAIN);
    }
    Ok(())
}

fn ready(args: &ServeArgs, names: &[String], url: &str) {
    sd_notify::notify("READY=1");
    if args.json {
        result(&json!({ "serving": names[0], "models": names, "url": url }).to_string());
    } else {
        let names = names.join(", ");
        say(&format!("serve: {names} at {url} (Ctrl-C stops it)"));
    }
}
