//! `shardpack serve`: the front process. It starts or finds one rank per package, and speaks HTTP.

mod layer;
mod nodes;

use std::{
    net::{SocketAddr, TcpListener},
    path::Path,
    process::ExitCode,
    thread,
    time::Duration,
};

use anyhow::{Context, anyhow};
use serde_json::json;
use shardpack_loader::{
    cluster::{ServeError, Supervisor},
    engine::{EngineHandle, EngineState},
    open::verify_documents,
    server::{self, ChatModel, Script, Server, ServerLimits, Stop},
};
use shardpack_manifests::Manifest;

use self::layer::Layer;
use super::{Outcome, keys, package};
use crate::{
    args::ServeArgs,
    failure::Failure,
    progress::{result, say},
};

/// Between two looks at what has become of the ranks and the server.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Carries the command out: serves until Ctrl-C or SIGTERM.
pub(crate) fn run(args: &ServeArgs) -> Outcome {
    let set = package::read_set(&args.set)?;
    let folders = package::folders(&args.set, &set);
    let layer = Layer::of(args, folders.len())?;
    // What runs elsewhere is installed elsewhere.
    if args.nodes.is_empty() {
        args.engine.check()?
    } else {
        args.engine.check_arguments()?
    };
    let manifests = folders
        .iter()
        .map(|folder| package::read_manifest(folder))
        .collect::<Result<Vec<_>, _>>()?;
    let model = open_text(&folders[0], &manifests[0])?;
    let keys = args.keys.as_deref().map(keys::open).transpose()?;
    let listener = listen(args, keys.is_some())?;
    let address = listener.local_addr()?;
    let name = model_name(args, set.name.as_deref());
    let (handle, commands) = EngineHandle::new(manifests.len() as u32);
    let engine = if let Some(script) = script(args, &model)? {
        Engine::Scripted(play(script, &args.set, &folders[0], &handle, commands)?)
    } else {
        let nodes = if args.nodes.is_empty() {
            nodes::local(&folders, args.threads, &args.engine, layer)?
        } else {
            nodes::remote(&args.nodes, &manifests, layer)?
        };
        let options = nodes::options(&args.engine);
        let names = nodes.iter().map(|node| node.name.clone()).collect();
        Engine::Ranks(Supervisor::start(nodes, handle.clone(), commands, options)?, names)
    };
    let names = [vec![name.clone()], args.alias.clone()].concat();
    let mut server = Server::new(model, handle.clone(), names, limits(args))
        .with_origins(args.cors.clone())
        .with_nodes(engine.node_names());
    if let Some(keys) = keys {
        server = server.with_keys(keys);
    }
    if args.log {
        server = server.with_log(Box::new(say));
    }
    let stop = Stop::default();
    let stopped = server::termination_or(stop.clone());
    let serving = thread::Builder::new()
        .name("http".to_owned())
        .spawn(move || server::run(listener, server, stopped))?;
    let outcome = watch(
        &engine,
        &handle,
        || serving.is_finished(),
        || ready(args, &name, address, manifests.len()),
    );
    stop.stop();
    let served = serving.join().map_err(|_| anyhow!("the server's thread panicked"))?;
    if let Engine::Ranks(supervisor, _) = engine {
        supervisor.stop();
    }
    outcome?;
    served.context("the server ended")?;
    if !args.json {
        say("serve: stopped");
    }
    Ok(ExitCode::SUCCESS)
}

/// What answers.
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

    /// Ready, not yet, or never.
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

/// The script to play instead of a model, if one is asked for.
fn script(args: &ServeArgs, model: &ChatModel) -> Result<Option<Script>, Failure> {
    let Some(file) = &args.script else { return Ok(None) };
    let bytes = std::fs::read(file).with_context(|| file.display().to_string())?;
    let script = Script::parse(&bytes, model).map_err(|error| {
        Failure::wrong(anyhow::Error::from(error).context(file.display().to_string()))
    })?;
    Ok(Some(script))
}

/// Plays on a thread of its own, with a tokenizer of its own.
fn play(
    script: Script,
    set: &Path,
    folder: &Path,
    handle: &EngineHandle,
    commands: std::sync::mpsc::Receiver<shardpack_loader::engine::Command>,
) -> anyhow::Result<thread::JoinHandle<()>> {
    let model = ChatModel::open(folder).with_context(|| set.display().to_string())?;
    let handle = handle.clone();
    let play = move || script.play(&model, handle, &commands);
    Ok(thread::Builder::new().name("script".to_owned()).spawn(play)?)
}

/// Tokenizer and template, after their bytes were compared with the manifest.
fn open_text(folder: &Path, manifest: &Manifest) -> Result<ChatModel, Failure> {
    let shown = || folder.display().to_string();
    verify_documents(folder, manifest).map_err(|error| {
        let error = Failure::wrong(anyhow::Error::from(error).context(shown()));
        error.hint("restore the package's files, or convert the model again")
    })?;
    ChatModel::open(folder)
        .map_err(|error| Failure::wrong(anyhow::Error::from(error).context(shown())))
}

fn listen(args: &ServeArgs, has_keys: bool) -> Result<TcpListener, Failure> {
    let address = args.listen;
    if !address.ip().to_canonical().is_loopback() && !has_keys && !args.insecure {
        let error =
            anyhow!("{address} can be reached from other machines, and there are no API keys");
        return Err(Failure::from(error).hint(
            "make keys (shardpack keys FILE add NAME) and serve with --keys FILE, or say --insecure",
        ));
    }
    TcpListener::bind(address).with_context(|| format!("cannot listen on {address}")).map_err(|error| {
        Failure::from(error).hint("another program uses this port; choose another one with --listen, or port 0 for a free one")
    })
}

fn model_name(args: &ServeArgs, of_set: Option<&str>) -> String {
    let folder = || {
        let path = args.set.canonicalize().unwrap_or_else(|_| args.set.clone());
        path.file_name().map(|name| name.to_string_lossy().into_owned())
    };
    args.name
        .clone()
        .or_else(|| of_set.map(str::to_owned))
        .or_else(folder)
        .unwrap_or_else(|| "model".to_owned())
}

/// Shows how far the ranks are and what becomes of them, says once that they are ready, and
/// returns when the server has ended (on purpose) or the ranks have (an error).
fn watch(
    engine: &Engine,
    handle: &EngineHandle,
    server_ended: impl Fn() -> bool,
    ready: impl FnOnce(),
) -> Result<(), Failure> {
    let mut ready = Some(ready);
    let mut shown = None;
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
        show(&handle.status().state, &mut shown, ready.is_none());
    }
    Ok(())
}

/// Packages that do not belong together are wrong; a rank that dies is not the input's fault.
fn failed(error: ServeError) -> Failure {
    match error {
        ServeError::Identity(_) | ServeError::Package { .. } => Failure::wrong(error),
        other => other.into(),
    }
}

/// Says what has changed; `again` once requests have been served.
fn show(state: &EngineState, shown: &mut Option<String>, again: bool) {
    match state {
        EngineState::Starting(text) if shown.as_ref() != Some(text) => {
            say(&format!("serve: {text}"));
            *shown = Some(text.clone());
        }
        EngineState::Ready if shown.take().is_some() && again => say("serve: ready"),
        _ => {}
    }
}

fn ready(args: &ServeArgs, name: &str, address: SocketAddr, ranks: usize) {
    if args.json {
        result(
            &json!({ "serving": name, "url": format!("http://{address}/v1"), "ranks": ranks })
                .to_string(),
        );
    } else {
        say(&format!("serve: {name} on {ranks} ranks at http://{address}/v1 (Ctrl-C ends it)"));
    }
}
