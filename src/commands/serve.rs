//! `shardpack serve`: the front process. It starts or finds one rank per package, and speaks HTTP.

mod checks;
mod detach;
mod events;
mod host;
mod hosted_set;
mod info;
mod links;
mod mlx_group;
mod models;
mod nodes;
mod on_node;
mod placement;
mod scripted;
mod several;

use std::{
    io,
    net::TcpListener,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    thread,
    time::Duration,
};

use anyhow::{Context, anyhow};
use serde_json::json;
use shardpack_chat::{ChatModel, PromptHome};
use shardpack_cluster::{ServeError, Supervisor};
use shardpack_engine::loading::verify_documents;
use shardpack_engine_api::{EngineHandle, EngineState};
use shardpack_identity::{Endpoint, is_local};
use shardpack_manifests::Manifest;
use shardpack_server::{
    Ended, Ledger, MemoryShare, ModelInfo, Server, ServerEvents, ServerLimits, ServiceEvent, Stop,
    Tls,
};
use shardpack_transfer::{
    protocol::PackageKey,
    push::{Activation, PushMode, default_streams},
};

use self::{
    checks::Packages,
    events::ServerLog,
    hosted_set::{KvChoice, THIS_MACHINE, shares},
    links::ShownLinks,
    mlx_group::MlxGroup,
    models::Models,
    nodes::RankPackages,
    placement::NodeState,
    scripted::Scripted,
};
use super::{Outcome, draft, keys, package, push, store, text_worker};
use crate::{
    args::ServeArgs,
    cluster,
    failure::Failure,
    progress::{result, say},
    sd_notify,
};

/// Interval between two checks of the ranks and the server.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Runs the command: serves until Ctrl-C or SIGTERM.
pub(crate) fn run(args: &ServeArgs) -> Outcome {
    if args.detach {
        return detach::start(args);
    }
    if several::is_asked(args) {
        return several::run(args);
    }
    let scripted = Scripted::of(args)?;
    let remote = cluster::nodes(&args.nodes.names, &args.nodes.cluster)?;
    let set = match &scripted {
        None => Some(set_of(args, &remote)?),
        Some(scripted) => scripted.set.clone(),
    };
    let served = match set {
        Some(set) => Served::open(&set)?,
        None => Served::of_bytes()?,
    };
    if let Some(on) = &args.on {
        return on_node::start(args, &served, &remote, on);
    }
    let mlx_group = match &scripted {
        None => served.mlx_group(args, &remote)?,
        Some(_) => None,
    };
    let places = nodes::places(remote, &served.manifests)?;
    let log = events::folder(args);
    launch(args, scripted.as_ref(), served, (places, log), mlx_group, Stop::default())
}

/// Serves the ranks on these nodes as a front of a node, which has the package in `args.set` for the text
/// side, until `stop`.
pub(crate) fn run_assigned(
    args: &ServeArgs,
    places: Vec<(Endpoint, PackageKey)>,
    stop: Stop,
) -> Outcome {
    let served = Served::open_package(&args.set)?;
    launch(args, None, served, (places, events::folder_of_node(args)), None, stop)
}

/// Starts the ranks and serves; what happens is logged in the folder `log`.
fn launch(
    args: &ServeArgs,
    scripted: Option<&Scripted>,
    served: Served,
    (places, log): (Vec<(Endpoint, PackageKey)>, Option<PathBuf>),
    mlx_group: Option<MlxGroup>,
    stop: Stop,
) -> Outcome {
    let keys = args.keys.as_deref().map(keys::open).transpose()?;
    let (tls, ledger) = (tls(args)?, ledger(args)?);
    let listener = listen(args, keys.is_some(), tls.is_some())?;
    let address = listener.local_addr()?;
    let url = format!("{}://{address}/v1", if tls.is_some() { "https" } else { "http" });
    let name = args.name.clone().unwrap_or_else(|| served.name.clone());
    let ranks = served.folders.len().max(places.len()).max(1);
    let (handle, commands) = EngineHandle::new(ranks as u32);
    let log = log.and_then(|folder| ServerLog::open(&folder, &name));
    if let Some(log) = &log {
        log.started(&url);
    }
    let happened = ServerEvents::default();
    let mut options = nodes::options(args)?;
    options.events = events::sink(&happened, &name, log.as_ref());
    let check = Packages { folders: served.folders.clone(), remote: places.clone() };
    // Scripts take next to none.
    let memory = if scripted.is_none() { served.memory(args, &places) } else { Vec::new() };
    let nodes_of_ranks = places.iter().map(|(node, _)| node.name().to_owned()).collect();
    let engine = if let Some(scripted) = scripted {
        let script = scripted.parse(&served.model)?;
        Engine::Scripted(scripted::play(script, served.model_again()?, &handle, commands)?)
    } else {
        let nodes = if places.is_empty() {
            nodes::local(&served.folders, args.threads, &args.engine, mlx_group)?
        } else {
            nodes::remote(places, &served.rank_packages(args), mlx_group, args.take_over)?
        };
        let names = nodes.iter().map(|node| node.name.clone()).collect();
        Engine::Ranks(Supervisor::start(nodes, handle.clone(), commands, options)?, names)
    };
    let names = [vec![name.clone()], args.alias.clone()].concat();
    let info = ModelInfo { nodes: nodes_of_ranks, ..info::of(&served.manifests) };
    let mut server = Server::new(served.model, handle.clone(), names, limits(args))
        .with_events(happened)
        .with_info(info)
        .with_memory(memory)
        .with_origins(args.cors.clone())
        .with_hosts(hosts(args))
        .with_nodes(engine.node_names());
    if !check.folders.is_empty() {
        server = server.with_check(Arc::new(check));
    }
    // Without a home folder there is none.
    if let Ok(store) = store::store() {
        server = server.with_store(Arc::new(Models { store, nodes: ranks as u32 }));
    }
    server = watched(server).with_ledger(ledger);
    if let Some(keys) = keys {
        server = server.with_keys(keys);
    }
    if let Some(tls) = tls {
        server = server.with_tls(tls);
    }
    if args.log {
        server = server.with_log(Box::new(say));
    }
    let ready = || ready(args, &name, &url, ranks);
    serve(args, listener, server, engine, (&handle, stop), ready)
}

/// The set to serve: what was named, or what it was converted to, which nodes are sent too.
fn set_of(args: &ServeArgs, remote: &[Endpoint]) -> Result<PathBuf, Failure> {
    let (set, is_stored) = store::set_of(&args.set, args.bits, remote.len().max(1))?;
    if is_stored && !remote.is_empty() && !args.stream {
        let mode = PushMode::Send(Activation::WhenAllPrepared);
        let report = push::push_set(&set, remote, mode, default_streams())?;
        if !report.is_done() {
            return Err(anyhow!("not every node has received its package").into());
        }
    }
    Ok(set)
}

/// Runs the server until it or the ranks end.
fn serve(
    args: &ServeArgs,
    listener: TcpListener,
    server: Server,
    engine: Engine,
    (handle, stop): (&EngineHandle, Stop),
    ready: impl FnOnce(),
) -> Outcome {
    let stopped = stop.clone();
    let serving = thread::Builder::new()
        .name("http".to_owned())
        .spawn(move || shardpack_server::run(listener, server, stopped))?;
    let outcome = watch(&engine, handle, || serving.is_finished(), ready);
    stop.stop();
    let served = serving.join().map_err(|_| anyhow!("the server's thread panicked"))?;
    if let Engine::Ranks(supervisor, _) = engine {
        supervisor.stop();
    }
    outcome?;
    Ok(ended(args, served.context("the server ended")?))
}

/// The exit code of a server that was asked to end.
fn ended(args: &ServeArgs, ended: Ended) -> ExitCode {
    if let Ended::AtOnce(code) = ended {
        say("serve: stopped at once: running requests were cut off");
        return ExitCode::from(code);
    }
    if !args.json {
        say("serve: stopped");
    }
    ExitCode::SUCCESS
}

/// What requests take, in the files that were named.
fn ledger(args: &ServeArgs) -> Result<Ledger, Failure> {
    let ledger = Ledger::open(args.usage.as_deref(), args.audit.as_deref(), Box::new(say));
    ledger.map_err(|error| {
        Failure::wrong(error)
            .hint("name another file with --usage or --audit, or move this one away")
    })
}

/// Tells the service manager, if one started the server.
fn watched(server: Server) -> Server {
    server.with_service(sd_notify::watchdog_interval(), |event| match event {
        ServiceEvent::Reloading => sd_notify::notify("RELOADING=1"),
        ServiceEvent::Reloaded => sd_notify::notify("READY=1"),
        ServiceEvent::Stopping => sd_notify::notify("STOPPING=1"),
        ServiceEvent::Alive => sd_notify::notify("WATCHDOG=1"),
    })
}

/// The text side of a served model: tokenizer, template, packages.
struct Served {
    model: ChatModel,
    /// The packages' folders and manifests, in rank order; none of a model of bytes.
    folders: Vec<PathBuf>,
    manifests: Vec<Manifest>,
    name: String,
    /// The set, where all of it was opened: damaged packages of nodes are repaired from it.
    set: Option<PathBuf>,
}

impl Served {
    fn open(path: &Path) -> Result<Self, Failure> {
        let (name, folders) = package::members(path)?;
        let manifests = folders
            .iter()
            .map(|folder| package::read_manifest(folder))
            .collect::<Result<Vec<_>, _>>()?;
        let model = open_text(&folders[0], &manifests[0])?;
        let name = name.unwrap_or_else(|| folder_name(path));
        Ok(Self { model, folders, manifests, name, set: Some(path.to_owned()) })
    }

    /// One package of a set, whatever rank it is of.
    fn open_package(folder: &Path) -> Result<Self, Failure> {
        let manifest = package::read_manifest(folder)?;
        let model = open_text(folder, &manifest)?;
        let name = manifest.name.clone().unwrap_or_else(|| folder_name(folder));
        let (folders, manifests) = (vec![folder.to_owned()], vec![manifest]);
        Ok(Self { model, folders, manifests, name, set: None })
    }

    fn of_bytes() -> anyhow::Result<Self> {
        let (folders, manifests) = (Vec::new(), Vec::new());
        let model = scripted::model_of_bytes()?;
        Ok(Self { model, folders, manifests, name: "scripted".to_owned(), set: None })
    }

    /// Where the ranks of nodes have their packages.
    fn rank_packages(&self, args: &ServeArgs) -> RankPackages<'_> {
        if args.stream {
            RankPackages::Streamed(&self.folders, &self.manifests)
        } else {
            RankPackages::Stored { set: self.set.as_deref() }
        }
    }

    /// The ranks' collectives, after checking the arguments.
    fn mlx_group(&self, args: &ServeArgs, nodes: &[Endpoint]) -> Result<Option<MlxGroup>, Failure> {
        let mlx_group = MlxGroup::of(args, self.folders.len(), nodes)?;
        if args.stream && mlx_group.is_some() {
            let error = anyhow!("--stream is for the built-in collectives, not ring and jaccl");
            return Err(Failure::from(error).hint("push the set, and serve it without --stream"));
        }
        // Engines of nodes are installed on the nodes.
        if nodes.is_empty() {
            args.engine.check()?;
            draft::check(&args.engine)?;
        } else {
            args.engine.check_arguments()?;
            draft::check_elsewhere(&args.engine)?;
        }
        Ok(mlx_group)
    }

    /// What its ranks take of each machine, as planned; nothing where that is not known, as of a front
    /// that has one package of several.
    fn memory(&self, args: &ServeArgs, places: &[(Endpoint, PackageKey)]) -> Vec<MemoryShare> {
        let ranks = self.manifests.first().map_or(0, |first| first.layout.ranks as usize);
        if ranks == 0 || ranks != self.manifests.len() {
            return Vec::new();
        }
        let machines = if places.is_empty() {
            Ok(vec![(THIS_MACHINE.to_owned(), KvChoice::of(&args.engine)); ranks])
        } else {
            let nodes: Vec<Endpoint> = places.iter().map(|(node, _)| node.clone()).collect();
            // One that does not answer starts no rank either, which is then told.
            placement::survey(&nodes).map(|states| {
                let names = nodes.iter().map(|node| node.name().to_owned());
                names.zip(states.iter().map(NodeState::kv)).collect()
            })
        };
        machines.map_or_else(|_| Vec::new(), |machines| shares(&self.manifests, &machines))
    }

    /// Opens the tokenizer and template a second time.
    fn model_again(&self) -> anyhow::Result<ChatModel> {
        match self.folders.first() {
            Some(folder) => {
                let sandbox = text_worker::program();
                ChatModel::open_in(folder, PromptHome::Sandboxed(&sandbox))
                    .with_context(|| folder.display().to_string())
            }
            None => scripted::model_of_bytes(),
        }
    }
}

/// What computes the answers.
enum Engine {
    /// Ranks, and what people call their nodes.
    Ranks(Supervisor, Vec<String>),
    /// A script, played by a thread that ends with its last handle.
    Scripted(thread::JoinHandle<()>),
}

impl Engine {
    fn node_names(&self) -> Vec<String> {
        match self {
            Self::Ranks(_, names) => names.clone(),
            Self::Scripted(_) => vec!["script".to_owned()],
        }
    }

    /// Waits a moment until it is ready.
    fn wait_until_ready(&self) -> Result<(), ServeError> {
        match self {
            Self::Ranks(supervisor, _) => supervisor.wait_until_ready(LOOK_AGAIN),
            Self::Scripted(_) => Ok(()),
        }
    }

    fn failure(&self) -> Option<ServeError> {
        match self {
            Self::Ranks(supervisor, _) => supervisor.failure(),
            Self::Scripted(player) => player.is_finished().then_some(ServeError::Stopped),
        }
    }
}

fn limits(args: &ServeArgs) -> ServerLimits {
    ServerLimits {
        active_requests: args.queue,
        request_timeout: Duration::from_secs(args.request_timeout),
        drain_timeout: Duration::from_secs(args.drain_timeout),
        ..ServerLimits::default()
    }
}

/// Opens tokenizer and template after verifying them against the manifest.
fn open_text(folder: &Path, manifest: &Manifest) -> Result<ChatModel, Failure> {
    let shown = || folder.display().to_string();
    verify_documents(folder, manifest).map_err(|error| {
        let error = Failure::wrong(anyhow::Error::from(error).context(shown()));
        error.hint("restore the package's files, or convert the model again")
    })?;
    let sandbox = text_worker::program();
    let model = ChatModel::open_in(folder, PromptHome::Sandboxed(&sandbox))
        .map_err(|error| Failure::wrong(anyhow::Error::from(error).context(shown())))?;
    let model = model.with_style(manifest.chat.as_ref().map(|chat| chat.output));
    Ok(model.with_embedding(manifest.architecture.embedding.clone()))
}

/// Names under which the server may be asked: those that were given, and the machine's own.
fn hosts(args: &ServeArgs) -> Vec<String> {
    let own = rustix::system::uname().nodename().to_string_lossy().into_owned();
    [args.allow_host.clone(), vec![own]].concat()
}

/// Certificate and key, where they were given.
fn tls(args: &ServeArgs) -> Result<Option<Tls>, Failure> {
    let (Some(certificate), Some(key)) = (&args.tls_cert, &args.tls_key) else { return Ok(None) };
    let tls = Tls::open(certificate, key, Box::new(say));
    tls.map(Some).map_err(|error| {
        Failure::wrong(error).hint("give PEM files: --tls-cert with the certificate and its chain, --tls-key with its private key")
    })
}

fn listen(args: &ServeArgs, has_keys: bool, has_tls: bool) -> Result<TcpListener, Failure> {
    let address = args.address();
    if !is_local(address.ip()) {
        if !has_keys && !args.insecure {
            let error =
                anyhow!("{address} can be reached from other machines, and there are no API keys");
            return Err(Failure::from(error).hint(
                "make keys (shardpack keys FILE add NAME) and serve with --keys FILE, and with --tls-cert and --tls-key so that keys are not sent in plain text; or allow it with --insecure",
            ));
        }
        if !has_tls {
            say(
                "serve: no TLS: keys and conversations are sent in plain text; see --tls-cert and --tls-key",
            );
        }
    }
    TcpListener::bind(address).map_err(|error| {
        let kind = error.kind();
        let context = format!("cannot listen on {address}");
        let failure = Failure::from(anyhow::Error::new(error).context(context));
        match listen_hint(kind) {
            Some(hint) => failure.hint(hint),
            None => failure,
        }
    })
}

/// A hint for an address that cannot be listened on.
pub(crate) const fn listen_hint(kind: io::ErrorKind) -> Option<&'static str> {
    match kind {
        io::ErrorKind::AddrInUse => Some(
            "another program uses this port; choose another one with --listen, or port 0 for a free one",
        ),
        io::ErrorKind::AddrNotAvailable => {
            Some("this machine has no such address; give one of its own with --listen")
        }
        io::ErrorKind::PermissionDenied => {
            Some("ports below 1024 need root; choose another one with --listen")
        }
        _ => None,
    }
}

fn folder_name(path: &Path) -> String {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    path.file_name().map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
}

/// Shows the state of the ranks, calls `ready` once they are ready, and returns when the server has
/// stopped (no error) or the ranks have failed (an error).
fn watch(
    engine: &Engine,
    handle: &EngineHandle,
    server_ended: impl Fn() -> bool,
    ready: impl FnOnce(),
) -> Result<(), Failure> {
    let mut ready = Some(ready);
    let mut shown = None;
    let mut links = ShownLinks::default();
    while !server_ended() {
        match engine.wait_until_ready() {
            Ok(()) => {
                if let Some(ready) = ready.take() {
                    ready();
                } else {
                    thread::sleep(LOOK_AGAIN);
                }
            }
            Err(ServeError::Slow { .. }) => {}
            Err(error) => return Err(failed(error)),
        }
        if let Some(error) = engine.failure() {
            return Err(failed(error));
        }
        let status = handle.status();
        show(&status.state, &mut shown, ready.is_none());
        if status.state == EngineState::Ready {
            links.show(&status.links);
        }
    }
    Ok(())
}

/// Packages that do not match are wrong input; a rank that dies is not.
fn failed(error: ServeError) -> Failure {
    match error {
        ServeError::Identity(_) | ServeError::Package { .. } => Failure::wrong(error),
        other => other.into(),
    }
}

/// Prints a change of state; `again` if it was ready before.
fn show(state: &EngineState, shown: &mut Option<String>, again: bool) {
    match state {
        EngineState::Starting(text) | EngineState::Recovering(text)
            if shown.as_ref() != Some(text) =>
        {
            say(&format!("serve: {text}"));
            *shown = Some(text.clone());
        }
        EngineState::Ready if shown.take().is_some() && again => say("serve: ready"),
        _ => {}
    }
}

fn ready(args: &ServeArgs, name: &str, url: &str, ranks: usize) {
    sd_notify::notify("READY=1");
    if args.json {
        result(&json!({ "serving": name, "url": url, "ranks": ranks }).to_string());
    } else {
        say(&format!("serve: {name} on {ranks} ranks at {url} (Ctrl-C stops it)"));
    }
}
