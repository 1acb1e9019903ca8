//! `shardpack model`: the models of a running server, over its HTTP API.

mod status;
mod update;

use std::{process::ExitCode, time::Duration};

use serde_json::{Value, json};

use super::{Outcome, server_client::ServerClient};
use crate::{
    args::{ModelAction, ModelArgs},
    failure::Failure,
    progress::{result, say, size, table},
};

/// For what a server says at once.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// Runs the command.
pub(crate) fn run(args: &ModelArgs) -> Outcome {
    let server = ServerClient::at(args.url(), args.key.as_deref(), ANSWER_TIMEOUT)?;
    match &args.action {
        ModelAction::List => list(args, &server),
        ModelAction::Load { models } => change(args, &server, "load", models),
        ModelAction::Unload { models } => change(args, &server, "unload", models),
        ModelAction::Status { models, detail } => status::run(args, &server, models, *detail),
        ModelAction::Update { model, check, revision, cluster } => {
            let asked = update::Asked { model, is_check: *check, revision, cluster };
            update::run(args, &server, &asked)
        }
        ModelAction::Verify { models } => verify(args, &server, models),
    }
}

/// An error of a server, with what to do about it.
fn failed(error: anyhow::Error) -> Failure {
    let text = format!("{error:#}");
    let hint = if text.contains("not found: expected one of") {
        Some("`shardpack model list` shows the server's models")
    } else if text.contains("this server serves one model") {
        Some(
            "start it with --pin MODEL, or with --on-demand: models of such a server come and go; see `shardpack serve --help`",
        )
    } else if text.contains("Connection refused") || text.contains("io: ") {
        Some("give the URL of a running `shardpack serve` with --server")
    } else {
        None
    };
    let failure = Failure::from(error);
    match hint {
        Some(hint) => failure.hint(hint),
        None => failure,
    }
}

/// Has the server do something, however long that takes within --timeout.
fn act(
    args: &ModelArgs,
    server: &ServerClient,
    path: &str,
    body: &Value,
) -> Result<Value, Failure> {
    server.post(path, body, Duration::from_secs(args.timeout)).map_err(failed)
}

/// The first names of a server's models, in their order.
fn names(server: &ServerClient) -> Result<Vec<String>, Failure> {
    let stats = server.stats().map_err(failed)?;
    let models = stats["models"].as_array().map_or(&[][..], Vec::as_slice);
    Ok(models.iter().filter_map(|model| model["model"].as_str()).map(str::to_owned).collect())
}

/// Those that were named, all of a server's without any.
fn chosen(server: &ServerClient, named: &[String]) -> Result<Vec<String>, Failure> {
    if named.is_empty() { names(server) } else { Ok(named.to_vec()) }
}

/// Bytes of all machines together that a model takes, as planned.
fn planned_bytes(model: &Value) -> u64 {
    let shares = model["memory"].as_array().map_or(&[][..], Vec::as_slice);
    shares.iter().filter_map(|share| share["total_bytes"].as_u64()).sum()
}

fn list(args: &ModelArgs, server: &ServerClient) -> Outcome {
    let models = names(server)?;
    let models: Vec<Value> = models
        .iter()
        .map(|name| server.model(name))
        .collect::<anyhow::Result<_>>()
        .map_err(failed)?;
    if args.json {
        result(&json!({ "ok": true, "server": server.url(), "models": models }).to_string());
        return Ok(ExitCode::SUCCESS);
    }
    let header = ["model", "state", "requests", "bits", "ranks", "memory", "pinned"];
    let mut rows = vec![header.map(str::to_owned).to_vec()];
    for model in &models {
        let number = |value: &Value| value.as_u64().map_or("—".to_owned(), |it| it.to_string());
        let requests = &model["requests"];
        rows.push(vec![
            text(&model["id"]).to_owned(),
            text(&model["state"]).to_owned(),
            format!("{} + {} waiting", number(&requests["running"]), number(&requests["waiting"])),
            number(&model["source"]["bits"]),
            number(&model["source"]["ranks"]),
            match planned_bytes(model) {
                0 => "—".to_owned(),
                bytes => size(bytes),
            },
            if model["pinned"] == true { "yes" } else { "" }.to_owned(),
        ]);
    }
    result(table(&rows).trim_end());
    Ok(ExitCode::SUCCESS)
}

/// Loads or unloads models, one after the other: what does not fit makes room by the one before.
fn change(args: &ModelArgs, server: &ServerClient, action: &str, names: &[String]) -> Outcome {
    let mut models = Vec::new();
    for name in names {
        let path = format!("/v1/models/{action}");
        let body = json!({ "model": name });
        let model = act(args, server, &path, &body)?;
        if !args.json {
            result(&format!("{name}: {}", text(&model["state"])));
        }
        models.push(model);
    }
    if args.json {
        result(&json!({ "ok": true, "models": models }).to_string());
    }
    Ok(ExitCode::SUCCESS)
}

fn verify(args: &ModelArgs, server: &ServerClient, named: &[String]) -> Outcome {
    let (mut reports, mut is_clean) = (Vec::new(), true);
    for name in chosen(server, named)? {
        let body = json!({ "model": name });
        let report = act(args, server, "/v1/models/verify", &body)?;
        is_clean &= report["ok"] == true;
        if !args.json {
            show(&name, &report);
        }
        reports.push(report);
    }
    if args.json {
        result(&json!({ "ok": is_clean, "models": reports }).to_string());
    } else if !is_clean {
        say(
            "hint: `shardpack cluster repair` replaces damaged chunks of nodes, from other nodes or a set; a set on this machine has to be converted or copied again",
        );
    }
    Ok(if is_clean { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

fn show(name: &str, report: &Value) {
    let packages = report["packages"].as_array().map_or(&[][..], Vec::as_slice);
    for package in packages {
        let findings = package["findings"].as_array().map_or(&[][..], Vec::as_slice);
        let verdict = if findings.is_empty() { "verified" } else { "damaged" };
        let read = size(package["read_bytes"].as_u64().unwrap_or_default());
        let (rank, place) = (&package["rank"], text(&package["place"]));
        result(&format!("{name}: rank {rank} on {place}: {verdict}, {read}"));
        for finding in findings {
            say(&format!("wrong: {place}: {}", text(finding)));
        }
    }
}

/// A text of a server's answer.
fn text(value: &Value) -> &str {
    value.as_str().unwrap_or("?")
}
