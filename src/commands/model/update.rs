//! `shardpack model update`: a newer revision of a model from the hub takes the place of the one that a
//! server has, without a pause.

use std::{path::Path, process::ExitCode};

use anyhow::anyhow;
use serde_json::{Value, json};
use shardpack_converter::{
    Cancel,
    store::{PullRequest, PullSource, Store, Stored},
};
use shardpack_transfer::push::{Activation, PushMode, default_streams};

use super::{Outcome, ServerClient, act, failed, text};
use crate::{
    args::{ClusterChoice, ModelArgs},
    cluster,
    commands::{push, store},
    failure::Failure,
    progress::{result, say},
    source,
};

/// What was asked for.
pub(super) struct Asked<'a> {
    pub model: &'a str,
    /// Whether nothing is to be changed.
    pub is_check: bool,
    pub revision: &'a str,
    pub cluster: &'a ClusterChoice,
}

/// Where a served model came from, and how it was converted.
struct Origin {
    /// The model's first name.
    name: String,
    repository: String,
    commit: String,
    gguf: Option<String>,
    bits: u32,
    ranks: u32,
    /// The nodes that hold its packages, in rank order; none where the server's machine does.
    nodes: Vec<String>,
}

/// Runs the command.
pub(super) fn run(args: &ModelArgs, server: &ServerClient, asked: &Asked) -> Outcome {
    let model = server.model(asked.model).map_err(failed)?;
    let origin = Origin::of(asked.model, &model)?;
    let newest = source::newest_commit(&origin.repository, asked.revision)?;
    let is_newer = newest != origin.commit;
    let Origin { name, repository, commit, .. } = &origin;
    let shown = |what: &str| {
        if args.json {
            let json = json!({
                "ok": true, "model": name, "repository": repository, "commit": commit,
                "newest": newest, "updated": what == "updated",
            });
            result(&json.to_string());
        } else {
            let (old, new) = (short(commit), short(&newest));
            result(&match what {
                "current" => format!("{name}: {old} is the newest revision of {repository}"),
                "newer" => format!("{name}: {repository} is at {new}, served is {old}"),
                _ => format!("{name}: {repository} at {new} is served in place of {old}"),
            });
        }
    };
    match (is_newer, asked.is_check) {
        (false, _) => {
            shown("current");
            return Ok(ExitCode::SUCCESS);
        }
        (true, true) => {
            shown("newer");
            return Ok(ExitCode::from(1));
        }
        (true, false) => {}
    }
    let store = store::store()?;
    let stored = store::pull(&store, &origin.request(&newest)?)?;
    push_to(&origin, &stored, asked.cluster)?;
    let body = json!({ "model": name, "set": stored.name });
    act(args, server, "/v1/models/swap", &body)?;
    take_name(&store, &origin, &stored, asked.revision)?;
    shown("updated");
    Ok(ExitCode::SUCCESS)
}

/// A commit as people name it.
fn short(commit: &str) -> &str {
    commit.get(..12).unwrap_or(commit)
}

impl Origin {
    /// Of a model as its server describes it.
    fn of(asked: &str, model: &Value) -> Result<Self, Failure> {
        let source = &model["source"];
        let (Some(repository), Some(commit)) =
            (source["repository"].as_str(), source["commit"].as_str())
        else {
            let error = anyhow!("{asked}: its packages name no repository of the hub");
            return Err(Failure::from(error).hint(
                "models that were converted by their name on the hub can be updated; convert this one anew",
            ));
        };
        let number = |key: &str| source[key].as_u64().and_then(|it| u32::try_from(it).ok());
        let (Some(bits), Some(ranks)) = (number("bits"), number("ranks")) else {
            return Err(anyhow!("{asked}: the server names no bits and ranks of it").into());
        };
        let texts = |value: &Value| -> Vec<String> {
            let all = value.as_array().into_iter().flatten();
            all.filter_map(Value::as_str).map(str::to_owned).collect()
        };
        let conversion = texts(&source["conversion"]);
        if !conversion.is_empty() {
            let error = anyhow!(
                "{asked}: it was converted with {}, which an update would leave away",
                conversion.join(", ")
            );
            return Err(Failure::from(error).hint(format!(
                "convert the new revision with `shardpack convert {repository}` and the same options, and serve that"
            )));
        }
        Ok(Self {
            name: text(&model["names"][0]).to_owned(),
            repository: repository.to_owned(),
            commit: commit.to_owned(),
            gguf: source["gguf"].as_str().map(str::to_owned),
            bits,
            ranks,
            nodes: texts(&source["nodes"]),
        })
    }

    /// The model at a revision, as it would be pulled.
    fn request(&self, revision: &str) -> Result<PullRequest, Failure> {
        let mut name = format!("{}@{revision}", self.repository);
        if let Some(file) = &self.gguf {
            name = format!("{name}/{file}");
        }
        let source: PullSource = source::of_hub(Path::new(&name))?
            .ok_or_else(|| anyhow!("{name}: not the name of a model of the hub"))?;
        Ok(PullRequest {
            source,
            bits: Some(self.bits),
            nodes: self.ranks,
            served_as: Some(self.name.clone()),
            cancel: Cancel::default(),
        })
    }
}

/// Sends the set to the nodes that hold the old one's packages.
fn push_to(origin: &Origin, stored: &Stored, choice: &ClusterChoice) -> Result<(), Failure> {
    if origin.nodes.is_empty() {
        return Ok(());
    }
    let nodes = cluster::nodes(&origin.nodes, choice)?;
    let mode = PushMode::Send(Activation::WhenAllPrepared);
    let report = push::push_set(&stored.folder, &nodes, mode, default_streams())?;
    if report.is_done() {
        return Ok(());
    }
    let error =
        anyhow!("not every node has received its package, and {} goes on as it was", origin.name);
    Err(Failure::from(error).hint("run the command again: what has arrived is not sent again"))
}

/// Calls the new set what the old one was called in the store, so that it is served by that name from
/// now on.
fn take_name(
    store: &Store,
    origin: &Origin,
    stored: &Stored,
    revision: &str,
) -> Result<(), Failure> {
    let Some(old) = store.pulled(&origin.request(revision)?).map_err(store::failure)? else {
        return Ok(());
    };
    if old.set.source.commit.as_deref() != Some(origin.commit.as_str()) {
        return Ok(());
    }
    let aside = origin.request(&origin.commit)?;
    if let Some(kept) = store.supersede(&old, stored, &aside).map_err(store::failure)? {
        say(&format!("note: {} is the new one now, the old one is {kept}", old.name));
        say(&format!("hint: `shardpack rm {kept}` removes the old one"));
    }
    Ok(())
}
