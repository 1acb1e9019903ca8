//! `shardpack cluster gc` and `shardpack cluster fsck`: what nodes store.

use std::process::ExitCode;

use serde::Serialize;
use serde_json::{Value, json};
use shardpack_transfer::receive::{
    FsckOptions, FsckReport, GcEntry, GcOptions, GcReason, GcReport,
};

use super::{
    ask::{Answer, carry_out, tell_failures},
    releases::nodes,
};
use crate::{
    args::ClusterArgs,
    commands::Outcome,
    progress::{result, say, size, table},
};

fn json_of<T: Serialize>(answers: &[Answer<T>]) -> anyhow::Result<Vec<Value>> {
    let one = |Answer { node, report }: &Answer<T>| {
        let mut json = match report {
            Ok(report) => serde_json::to_value(report)?,
            Err(problem) => json!({ "error": problem }),
        };
        json["node"] = node.to_string().into();
        Ok(json)
    };
    answers.iter().map(one).collect()
}

/// Removes what nodes do not need.
pub(super) fn gc(args: &ClusterArgs, names: &[String], options: GcOptions) -> Outcome {
    let answers = carry_out::<GcReport>(nodes(args, names)?, "gc", options)?;
    let is_done = answers.iter().all(|answer| answer.report.is_ok());
    if args.json {
        let nodes = json_of(&answers)?;
        let json = json!({ "ok": is_done, "dry_run": options.dry_run, "nodes": nodes });
        result(&json.to_string());
    } else {
        let done = if options.dry_run { "would go" } else { "removed" };
        let mut rows = vec![["node", "package", "size", "", "why"].map(str::to_owned).to_vec()];
        for Answer { node, report } in &answers {
            let Ok(report) = report else { continue };
            let row = |entry: &GcEntry, what: &str| {
                let package = format!(
                    "rank {} of layout {}",
                    entry.package.rank,
                    entry.package.layout.short()
                );
                let why = reason(entry.reason).to_owned();
                vec![node.to_string(), package, size(entry.size_bytes), what.to_owned(), why]
            };
            rows.extend(report.removed.iter().map(|entry| row(entry, done)));
            rows.extend(report.kept.iter().map(|entry| row(entry, "kept")));
        }
        result(table(&rows).trim_end());
        let reports = answers.iter().filter_map(|answer| answer.report.as_ref().ok());
        let freed_bytes: u64 = reports.map(|report| report.freed_bytes).sum();
        let free = if options.dry_run { "would be freed" } else { "freed" };
        say(&format!("{} {free}", size(freed_bytes)));
    }
    tell_failures(&answers);
    Ok(if is_done { ExitCode::SUCCESS } else { ExitCode::from(2) })
}

const fn reason(reason: GcReason) -> &'static str {
    match reason {
        GcReason::Release => "a release needs it",
        GcReason::InUse => "in use",
        GcReason::Push => "a push fills it",
        GcReason::Young => "not old enough",
        GcReason::OldRelease => "of an old release",
        GcReason::NeverActivated => "never activated",
        GcReason::LeftoverPush => "left by a push",
        GcReason::LeftoverRemoval => "left by a removal",
    }
}

/// Verifies what nodes store.
pub(super) fn fsck(args: &ClusterArgs, names: &[String], options: FsckOptions) -> Outcome {
    let answers = carry_out::<FsckReport>(nodes(args, names)?, "fsck", options)?;
    let is_done = answers.iter().all(|answer| answer.report.is_ok());
    let reports = answers.iter().filter_map(|answer| answer.report.as_ref().ok());
    let is_clean = reports.clone().all(FsckReport::is_clean);
    if args.json {
        let json = json!({ "ok": is_done && is_clean, "nodes": json_of(&answers)? });
        result(&json.to_string());
    } else {
        let header = ["node", "package", "model", "read", "state"];
        let mut rows = vec![header.map(str::to_owned).to_vec()];
        for Answer { node, report } in &answers {
            for package in report.iter().flat_map(|report| &report.packages) {
                let key = package.package;
                let damaged = package.findings.len();
                rows.push(vec![
                    node.to_string(),
                    format!("rank {} of layout {}", key.rank, key.layout.short()),
                    package.model.clone().unwrap_or_else(|| "?".to_owned()),
                    size(package.read_bytes),
                    if damaged == 0 { "ok".to_owned() } else { "damaged".to_owned() },
                ]);
            }
        }
        result(table(&rows).trim_end());
    }
    for Answer { node, report } in &answers {
        let Ok(report) = report else { continue };
        for package in &report.packages {
            for finding in &package.findings {
                say(&format!("{node}: package {}: {finding}", package.package));
            }
        }
        let rest = report.record.iter().chain(&report.rebuilt).chain(&report.leftovers);
        rest.for_each(|line| say(&format!("{node}: {line}")));
        if report.packages.iter().any(|package| !package.findings.is_empty()) {
            say(
                "hint: `shardpack cluster repair` replaces damaged chunks, from other nodes or a set",
            );
        }
        if !report.leftovers.is_empty() {
            say("hint: `shardpack cluster gc` removes what was interrupted long ago");
        }
    }
    tell_failures(&answers);
    Ok(match (is_done, is_clean) {
        (true, true) => ExitCode::SUCCESS,
        (_, false) => ExitCode::from(1),
        (false, true) => ExitCode::from(2),
    })
}
