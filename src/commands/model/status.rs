//! `shardpack model status`.

use std::{fmt::Write as _, process::ExitCode};

use serde_json::{Value, json};

use super::{Outcome, ServerClient, chosen, failed, text};
use crate::{
    args::ModelArgs,
    commands::cluster::rank_table,
    progress::{result, size},
};

/// A model, with what the server's statistics say of it.
struct Shown {
    model: Value,
    stats: Value,
}

/// Runs the command.
pub(super) fn run(
    args: &ModelArgs,
    server: &ServerClient,
    named: &[String],
    detail: bool,
) -> Outcome {
    let stats = server.stats().map_err(failed)?;
    let all = stats["models"].as_array().map_or(&[][..], Vec::as_slice);
    let mut shown = Vec::new();
    for name in chosen(server, named)? {
        let model = server.model(&name).map_err(failed)?;
        // One may be named by an alias.
        let first = &model["names"][0];
        let stats = all.iter().find(|stats| stats["model"] == *first).cloned().unwrap_or_default();
        shown.push(Shown { model, stats });
    }
    let is_well = shown.iter().all(|it| match text(&it.model["state"]) {
        "failed" | "recovering" => false,
        "loaded" => true,
        _ => named.is_empty(),
    });
    if args.json {
        let models: Vec<Value> = shown
            .iter()
            .map(|Shown { model, stats }| {
                let mut model = model.clone();
                if detail {
                    for key in ["tokens_per_second", "context", "nodes", "links", "drafts"] {
                        model[if key == "nodes" { "ranks" } else { key }] = stats[key].clone();
                    }
                }
                model
            })
            .collect();
        result(&json!({ "ok": is_well, "server": server.url(), "models": models }).to_string());
    } else {
        let texts: Vec<String> = shown.iter().map(|it| it.text(detail)).collect();
        result(texts.concat().trim_end());
    }
    Ok(if is_well { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

impl Shown {
    fn text(&self, detail: bool) -> String {
        let Self { model, stats } = self;
        let requests = &model["requests"];
        let mut shown = format!("{}: {}", text(&model["id"]), text(&model["state"]));
        // Writing to a string cannot fail.
        for key in ["state_detail", "swap"] {
            if let Some(what) = model[key].as_str() {
                let _ = write!(shown, ", {what}");
            }
        }
        let _ = writeln!(
            shown,
            ", {} running, {} waiting, {:.1} tokens/s",
            requests["running"],
            requests["waiting"],
            stats["tokens_per_second"].as_f64().unwrap_or_default()
        );
        if detail {
            for share in model["memory"].as_array().into_iter().flatten() {
                shown += &memory(share);
            }
            shown += &rank_table(stats);
        }
        shown
    }
}

/// What a model takes of a machine, as planned.
fn memory(share: &Value) -> String {
    let bytes = |key: &str| share[key].as_u64().map_or_else(|| "?".to_owned(), size);
    let mut shown = format!(
        "memory on {}: {} (weights {}, KV cache {}, working memory {})",
        text(&share["machine"]),
        bytes("total_bytes"),
        bytes("weights_bytes"),
        bytes("cache_bytes"),
        bytes("working_bytes"),
    );
    if share["machine_limit_bytes"].is_u64() {
        let (taken, limit) = (bytes("machine_taken_bytes"), bytes("machine_limit_bytes"));
        // Writing to a string cannot fail.
        let _ = write!(shown, "; all models take {taken} of {limit}");
    }
    shown + "\n"
}
