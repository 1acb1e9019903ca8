//! `shardpack cluster repair`: damaged chunks of nodes, replaced from one another or from a set.

use std::{path::Path, process::ExitCode, thread};

use serde_json::{Value, json};
use shardpack_identity::Endpoint;
use shardpack_transfer::protocol::Timeouts;
use shardpack_transfer::repair::{RepairOptions, RepairReport, Taken, repair as repair_node};

use super::releases::nodes;
use crate::{
    args::ClusterArgs,
    cluster,
    commands::{Outcome, store},
    progress::{result, say, size, table},
};

/// Repairs nodes, all at the same time.
pub(super) fn repair(args: &ClusterArgs, names: &[String], set: Option<&Path>) -> Outcome {
    let nodes = nodes(args, names)?;
    let set = set.map(store::packed).transpose()?;
    let peers = peers(args, &nodes);
    let (set, timeouts) = (set.as_deref(), Timeouts::default());
    let options = &RepairOptions { peers: &peers, set, package: None, timeouts };
    let reports: Vec<Result<RepairReport, String>> = thread::scope(|scope| {
        let repair = |node| {
            let repaired = repair_node(node, options);
            repaired.map_err(|error| format!("{:#}", anyhow::Error::from(error)))
        };
        let running: Vec<_> = nodes.iter().map(|node| scope.spawn(move || repair(node))).collect();
        let join = |thread: thread::ScopedJoinHandle<'_, _>| {
            // A panic here is ours, and goes on in the caller's thread.
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        running.into_iter().map(join).collect()
    });
    let is_done = reports.iter().all(Result::is_ok);
    let is_clean = reports.iter().flatten().all(RepairReport::is_clean);
    if args.json {
        let nodes: Vec<Value> =
            nodes.iter().zip(&reports).map(|(node, report)| json_of(node, report)).collect();
        result(&json!({ "ok": is_done && is_clean, "nodes": nodes }).to_string());
    } else {
        show(&nodes, &reports);
    }
    for (node, report) in nodes.iter().zip(&reports) {
        match report {
            Ok(report) => {
                report.remaining.iter().for_each(|what| say(&format!("{node}: {what}")));
            }
            Err(problem) => say(&format!("error: {node}: {problem}")),
        }
    }
    if !is_clean && set.is_none() {
        say("hint: --set SET reads chunks that no node has from a set on this machine");
    }
    Ok(match (is_done, is_clean) {
        (true, true) => ExitCode::SUCCESS,
        (_, false) => ExitCode::from(1),
        (false, true) => ExitCode::from(2),
    })
}

/// Who may have the chunks: the nodes themselves, and all members of the cluster, if there is one.
fn peers(args: &ClusterArgs, nodes: &[Endpoint]) -> Vec<Endpoint> {
    let mut peers = nodes.to_vec();
    if let Ok(home) = cluster::open(&args.cluster) {
        let members = home.members().iter().map(|member| home.endpoint(member));
        let others = members.filter(|it| !nodes.iter().any(|node| node.address() == it.address()));
        peers.extend(others);
    }
    peers
}

fn json_of(node: &Endpoint, report: &Result<RepairReport, String>) -> Value {
    let mut json = match report {
        // Reports hold numbers and texts, which JSON can hold.
        Ok(report) => serde_json::to_value(report).unwrap_or_default(),
        Err(problem) => json!({ "error": problem }),
    };
    json["node"] = node.to_string().into();
    json
}

fn show(nodes: &[Endpoint], reports: &[Result<RepairReport, String>]) {
    let header = ["node", "damaged", "repaired", "bytes", "from"];
    let mut rows = vec![header.map(str::to_owned).to_vec()];
    for (node, report) in nodes.iter().zip(reports) {
        let Ok(RepairReport { damaged_chunks, repaired, sources, .. }) = report else { continue };
        let from = |(source, taken): (&String, &Taken)| format!("{source} ({})", taken.chunks);
        let from: Vec<String> = sources.iter().map(from).collect();
        rows.push(vec![
            node.to_string(),
            damaged_chunks.to_string(),
            repaired.chunks.to_string(),
            size(repaired.bytes),
            from.join(", "),
        ]);
    }
    result(table(&rows).trim_end());
}
