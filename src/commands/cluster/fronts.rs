//! `shardpack cluster fronts|start|stop|restart|logs`: servers that nodes run.

use std::{process::ExitCode, thread};

use anyhow::{Context as _, anyhow};
use serde_json::{Value, json};
use shardpack_identity::Endpoint;

use super::{
    ask::{Answer, carry_out, tell_failures},
    releases::nodes,
};
use crate::{
    args::ClusterArgs,
    commands::Outcome,
    failure::Failure,
    progress::{is_unread, result, say, table},
};

/// A front on a node.
struct Found {
    node: Endpoint,
    state: Value,
}

/// The fronts of nodes, and those nodes that did not answer.
fn find(args: &ClusterArgs, names: &[String]) -> Result<(Vec<Found>, bool), Failure> {
    let answers = carry_out::<Value>(nodes(args, names)?, "front.list", json!({}))?;
    tell_failures(&answers);
    let is_whole = answers.iter().all(|answer| answer.report.is_ok());
    let mut found = Vec::new();
    for Answer { node, report } in answers {
        let fronts = report.ok().and_then(|report| report["fronts"].as_array().cloned());
        let of_node = |state| Found { node: node.clone(), state };
        found.extend(fronts.into_iter().flatten().map(of_node));
    }
    Ok((found, is_whole))
}

/// Lists them.
pub(super) fn list(args: &ClusterArgs, names: &[String]) -> Outcome {
    let (found, is_whole) = find(args, names)?;
    if args.json {
        let front = |Found { node, state }: &Found| {
            let mut json = state.clone();
            json["node"] = node.to_string().into();
            json
        };
        let fronts: Vec<Value> = found.iter().map(front).collect();
        result(&json!({ "ok": is_whole, "fronts": fronts }).to_string());
    } else {
        let mut rows = vec![
            ["model", "node", "state", "url", "ranks", "last fault"].map(str::to_owned).to_vec(),
        ];
        for Found { node, state } in &found {
            let text = |key: &str| state[key].as_str().unwrap_or_default().to_owned();
            rows.push(vec![
                text("name"),
                node.to_string(),
                text("state"),
                text("url"),
                state["ranks"].to_string(),
                text("fault"),
            ]);
        }
        result(table(&rows).trim_end());
    }
    Ok(if is_whole { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

/// Has the nodes that have a front of this name start, stop, restart or remove it.
pub(super) fn change(args: &ClusterArgs, operation: &str, name: &str, names: &[String]) -> Outcome {
    let (found, _) = find(args, names)?;
    let of_name: Vec<Found> = found.into_iter().filter(|it| it.state["name"] == name).collect();
    if of_name.is_empty() {
        let error = anyhow!("no node that answers has a server of {name:?}");
        return Err(Failure::from(error).hint(
            "`shardpack cluster fronts` lists them; `serve SET --nodes … --on NODE` makes one",
        ));
    }
    let places: Vec<Endpoint> = of_name.into_iter().map(|it| it.node).collect();
    let answers = carry_out::<Value>(places, operation, json!({ "name": name }))?;
    tell_failures(&answers);
    let is_done = answers.iter().all(|answer| answer.report.is_ok());
    if args.json {
        let changed: Vec<Value> = answers
            .iter()
            .map(|Answer { node, report }| match report {
                Ok(state) => json!({ "node": node.to_string(), "state": state }),
                Err(problem) => json!({ "node": node.to_string(), "error": problem }),
            })
            .collect();
        result(&json!({ "ok": is_done, "fronts": changed }).to_string());
    } else {
        for Answer { node, report } in &answers {
            if let Ok(state) = report {
                let state = state["state"].as_str().unwrap_or("removed");
                say(&format!("{name} on {node}: {state}"));
            }
        }
    }
    Ok(if is_done { ExitCode::SUCCESS } else { ExitCode::from(2) })
}

/// Between two looks at a log that is followed.
const LOOK_AGAIN: std::time::Duration = std::time::Duration::from_secs(1);

/// Prints the last lines of the servers of this name, and with `follow` those that come.
pub(super) fn logs(
    args: &ClusterArgs,
    name: &str,
    names: &[String],
    (lines, follow): (usize, bool),
) -> Outcome {
    let (found, _) = find(args, names)?;
    let of_name = found.into_iter().find(|it| it.state["name"] == name);
    let node = of_name.with_context(|| format!("no node that answers has a server of {name:?}"))?;
    let read = |count: usize| -> Result<Vec<String>, Failure> {
        let parameters = json!({ "name": name, "lines": count });
        let answer =
            carry_out::<Value>(vec![node.node.clone()], "front.logs", parameters)?.remove(0);
        let report = answer.report.map_err(|problem| anyhow!("{}: {problem}", node.node))?;
        let lines = report["lines"].as_array().cloned().unwrap_or_default();
        Ok(lines.iter().filter_map(|line| line.as_str().map(str::to_owned)).collect())
    };
    let mut shown = read(lines)?;
    if args.json {
        result(&json!({ "node": node.node.to_string(), "lines": shown }).to_string());
        return Ok(ExitCode::SUCCESS);
    }
    for line in &shown {
        result(line);
    }
    if !follow {
        return Ok(ExitCode::SUCCESS);
    }
    loop {
        thread::sleep(LOOK_AGAIN);
        let all = read(1000)?;
        // What was shown last is somewhere in it, unless more has come than is kept.
        let known = shown.iter().rev().take(20).rev().cloned().collect::<Vec<_>>();
        let ends = all.windows(known.len().max(1)).rposition(|window| window == known);
        let new = ends.map_or(0, |at| at + known.len());
        for line in &all[new..] {
            result(line);
        }
        if is_unread() {
            return Ok(ExitCode::SUCCESS);
        }
        shown = all;
    }
}
