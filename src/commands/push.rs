//! `shardpack push`.

use std::{process::ExitCode, sync::OnceLock};

use serde_json::json;
use shardpack_identity::Endpoint;
use shardpack_transfer::protocol::{SendError, Timeouts};
use shardpack_transfer::push::{
    Activation, NodeError, NodeProgress, NodeReport, OpenSet, PushEvent, PushMode, PushOptions,
    PushReport, WINDOW_CHUNKS, default_streams, push,
};

use super::{Outcome, store};
use crate::{
    args::PushArgs,
    cluster,
    failure::Failure,
    kill_points,
    progress::{Progress, result, say, size, table},
};

/// Runs the command.
pub(crate) fn run(args: &PushArgs) -> Outcome {
    let nodes = cluster::nodes(&args.to, &args.cluster)?;
    let mode =
        if args.dry_run { PushMode::DryRun } else { PushMode::Send(Activation::WhenAllPrepared) };
    let streams = args.streams.map_or_else(default_streams, usize::from);
    let set = store::packed(&args.set)?;
    let report = push_set(&set, &nodes, mode, streams)?;
    if args.form.json {
        result(&json(&report).to_string());
    } else {
        result(text(&report, args.dry_run).trim_end());
    }
    Ok(if report.is_done() { ExitCode::SUCCESS } else { ExitCode::from(2) })
}

/// Pushes a set, one package to each node in rank order, and shows how far it is.
pub(crate) fn push_set(
    set: &std::path::Path,
    nodes: &[Endpoint],
    mode: PushMode,
    streams: usize,
) -> Result<PushReport, Failure> {
    let set = OpenSet::open(set).map_err(Failure::wrong)?;
    let targets = set.targets(nodes).map_err(Failure::from)?;
    let (timeouts, window_chunks) = (Timeouts::default(), WINDOW_CHUNKS);
    let options = PushOptions { mode, timeouts, window_chunks, streams };
    let progress: Vec<OnceLock<Progress>> = targets.iter().map(|_| OnceLock::new()).collect();
    let report =
        push(&set, &targets, &options, &|event| show(event, &progress)).map_err(Failure::wrong)?;
    progress.iter().filter_map(OnceLock::get).for_each(Progress::finish);
    for node in &report.nodes {
        if let Some(error) = &node.error {
            let chain: Vec<String> = anyhow::Chain::new(error).map(ToString::to_string).collect();
            say(&format!(
                "error: node {} (rank {}): {}",
                node.target.node,
                node.target.rank,
                chain.join(": ")
            ));
        }
    }
    Ok(report)
}

fn show(event: &PushEvent, progress: &[OnceLock<Progress>]) {
    match event {
        PushEvent::Offered { rank, missing_bytes, .. } if *missing_bytes > 0 => {
            progress[*rank as usize]
                .get_or_init(|| Progress::bytes("push", *missing_bytes))
                .message(&format!("rank {rank}"));
        }
        PushEvent::ChunkAcknowledged { rank, size_bytes, chunk, file } => {
            progress[*rank as usize]
                .get()
                .into_iter()
                .for_each(|progress| progress.add(*size_bytes));
            kill_points::at(|| format!("push:chunk:{rank}:{file}:{chunk}"));
        }
        // Without it the node is of an earlier version, or has enough to do; that is no fault.
        PushEvent::StreamLost { error: NodeError::Send(SendError::NotJoined(_)), .. } => {}
        PushEvent::StreamLost { rank, error, .. } => {
            let chain: Vec<String> = anyhow::Chain::new(*error).map(ToString::to_string).collect();
            let why = chain.join(": ");
            say(&format!("rank {rank}: one stream failed ({why}), the others continue"));
        }
        PushEvent::Committing { rank } => kill_points::at(|| format!("push:committing:{rank}")),
        PushEvent::Prepared { rank } => kill_points::at(|| format!("push:prepared:{rank}")),
        PushEvent::Activating { rank } => kill_points::at(|| format!("push:activating:{rank}")),
        _ => {}
    }
}

const fn progress_word(progress: NodeProgress) -> &'static str {
    match progress {
        NodeProgress::NotPrepared => "not prepared",
        NodeProgress::Asked => "asked",
        NodeProgress::Prepared => "prepared",
        NodeProgress::Activated => "active",
    }
}

fn text(report: &PushReport, dry_run: bool) -> String {
    let moved = if dry_run { "would send" } else { "sent" };
    let mut rows =
        vec![["rank", "node", "package", "held", moved, "state"].map(str::to_owned).to_vec()];
    for node in &report.nodes {
        let traffic = &node.traffic;
        let sent = if dry_run { traffic.missing_bytes } else { traffic.sent_bytes };
        rows.push(vec![
            node.target.rank.to_string(),
            node.target.node.to_string(),
            size(traffic.package_bytes),
            size(traffic.held_bytes),
            size(sent),
            progress_word(node.progress).to_owned(),
        ]);
    }
    table(&rows)
}

fn json(report: &PushReport) -> serde_json::Value {
    let node = |node: &NodeReport| {
        json!({
            "rank": node.target.rank,
            "address": node.target.node.address(),
            "state": progress_word(node.progress),
            "package_bytes": node.traffic.package_bytes,
            "held_bytes": node.traffic.held_bytes,
            "missing_bytes": node.traffic.missing_bytes,
            "sent_bytes": node.traffic.sent_bytes,
            "sent_chunks": node.traffic.sent_chunks,
            "streams": node.traffic.streams,
            "free_bytes": node.traffic.free_bytes,
            "seconds": node.traffic.seconds,
            "error": node.error.as_ref().map(|error| anyhow::Chain::new(error).map(ToString::to_string).collect::<Vec<_>>().join(": ")),
        })
    };
    json!({ "ok": report.is_done(), "nodes": report.nodes.iter().map(node).collect::<Vec<_>>() })
}
