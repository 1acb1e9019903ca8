//! `shardpack push`.

use std::{num::NonZero, process::ExitCode, sync::OnceLock};

use anyhow::anyhow;
use serde_json::json;
use shardpack_identity::Endpoint;
use shardpack_transfer::protocol::{SendError, Timeouts};
use shardpack_transfer::push::{
    Activation, NodeError, NodeProgress, NodeReport, OpenSet, PushEvent, PushMode, PushOptions,
    PushReport, ReleaseOptions, Retries, SharedFiles, Traffic, WINDOW_CHUNKS, default_streams,
    push_release,
};
use shardpack_transfer::receive::ReleaseOrder;

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
    let mut sending = Sending {
        streams: args.streams.map_or_else(default_streams, usize::from),
        retries: Retries { attempts: args.retries, ..Retries::USUAL },
        bytes_per_second: args.bwlimit,
        shared_files: if args.no_relay { SharedFiles::Sent } else { SharedFiles::Relayed },
    };
    if let Some(rate) = args.bwlimit {
        sending.streams = limited_streams(rate, nodes.len(), sending.streams)?;
    }
    let set = store::packed(&args.set)?;
    let order = if args.allow_rollback { ReleaseOrder::Any } else { ReleaseOrder::Newer };
    let release = ReleaseOptions { number: args.release, order };
    let report = push_set_as(&set, &nodes, mode, sending, &release)?;
    if args.form.json {
        result(&json(&report).to_string());
    } else {
        result(text(&report, args.dry_run).trim_end());
    }
    Ok(if report.is_done() { ExitCode::SUCCESS } else { ExitCode::from(2) })
}

/// Pushes a set as its next release, one package to each node in rank order, and shows how far it is.
pub(crate) fn push_set(
    set: &std::path::Path,
    nodes: &[Endpoint],
    mode: PushMode,
    streams: usize,
) -> Result<PushReport, Failure> {
    let (retries, shared_files) = (Retries::USUAL, SharedFiles::Relayed);
    let sending = Sending { streams, retries, bytes_per_second: None, shared_files };
    push_set_as(set, nodes, mode, sending, &ReleaseOptions::default())
}

/// How chunks are sent.
#[derive(Clone, Copy)]
struct Sending {
    streams: usize,
    retries: Retries,
    bytes_per_second: Option<NonZero<u64>>,
    shared_files: SharedFiles,
}

/// Least bytes per second for each node: a chunk of 4 MiB then comes long before a node that waits for
/// it hangs up.
const LEAST_RATE: u64 = 1_000_000;

/// Streams to each node under a limit: each of them has at least the least rate.
fn limited_streams(rate: NonZero<u64>, nodes: usize, streams: usize) -> Result<usize, Failure> {
    let each = rate.get() / (nodes.max(1) as u64 * LEAST_RATE);
    if each == 0 {
        let least = nodes as u64 * LEAST_RATE / 1_000_000;
        let error = anyhow!("{rate} bytes per second are too few for {nodes} nodes");
        return Err(Failure::from(error).hint(format!("at least --bwlimit {least}M")));
    }
    Ok(streams.min(usize::try_from(each).unwrap_or(usize::MAX)))
}

fn push_set_as(
    set: &std::path::Path,
    nodes: &[Endpoint],
    mode: PushMode,
    sending: Sending,
    release: &ReleaseOptions,
) -> Result<PushReport, Failure> {
    let set = OpenSet::open(set).map_err(Failure::wrong)?;
    let targets = set.targets(nodes).map_err(Failure::from)?;
    let (timeouts, window_chunks) = (Timeouts::default(), WINDOW_CHUNKS);
    let Sending { streams, retries, bytes_per_second, shared_files } = sending;
    let options = PushOptions {
        mode,
        timeouts,
        window_chunks,
        streams,
        retries,
        bytes_per_second,
        shared_files,
    };
    let progress: Vec<OnceLock<Progress>> = targets.iter().map(|_| OnceLock::new()).collect();
    let report = push_release(&set, &targets, &options, release, &|event| show(event, &progress))
        .map_err(Failure::wrong)?;
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
        PushEvent::Relayed { rank, size_bytes } => {
            if let Some(progress) = progress[*rank as usize].get() {
                progress.add(*size_bytes);
            }
        }
        PushEvent::RelayFailed { rank, from, reason } => {
            say(&format!(
                "rank {rank}: {from} did not relay everything ({reason}), this machine sends the rest"
            ));
        }
        PushEvent::Retrying { rank, error, pause } => {
            let chain: Vec<String> = anyhow::Chain::new(*error).map(ToString::to_string).collect();
            let (why, seconds) = (chain.join(": "), pause.as_secs_f32());
            say(&format!("rank {rank}: the push goes on in {seconds} s ({why})"));
        }
        PushEvent::Committing { rank } => kill_points::at(|| format!("push:committing:{rank}")),
        PushEvent::Prepared { rank } => kill_points::at(|| format!("push:prepared:{rank}")),
        PushEvent::ReleasePending { rank, .. } => {
            kill_points::at(|| format!("push:release-pending:{rank}"));
        }
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
    let header = ["rank", "node", "package", "held", moved, "relayed", "state"];
    let mut rows = vec![header.map(str::to_owned).to_vec()];
    for node in &report.nodes {
        let traffic = &node.traffic;
        let sent = if dry_run { traffic.missing_bytes } else { traffic.sent_bytes };
        rows.push(vec![
            node.target.rank.to_string(),
            node.target.node.to_string(),
            size(traffic.package_bytes),
            size(traffic.held_bytes),
            size(sent),
            size(traffic.relayed_bytes),
            progress_word(node.progress).to_owned(),
        ]);
    }
    let total = |bytes: fn(&Traffic) -> u64| -> u64 {
        report.nodes.iter().map(|node| bytes(&node.traffic)).sum()
    };
    let relayed_bytes = total(|traffic| traffic.relayed_bytes);
    let mut text = table(&rows);
    if relayed_bytes > 0 {
        let sent = size(total(|traffic| traffic.sent_bytes));
        let relayed = size(relayed_bytes);
        let line = format!("{sent} left this machine, {relayed} went from node to node\n");
        text.push_str(&line);
    }
    text
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
            "relayed_bytes": node.traffic.relayed_bytes,
            "relayed_chunks": node.traffic.relayed_chunks,
            "streams": node.traffic.streams,
            "free_bytes": node.traffic.free_bytes,
            "seconds": node.traffic.seconds,
            "error": node.error.as_ref().map(|error| anyhow::Chain::new(error).map(ToString::to_string).collect::<Vec<_>>().join(": ")),
        })
    };
    let total = |bytes: fn(&Traffic) -> u64| -> u64 {
        report.nodes.iter().map(|node| bytes(&node.traffic)).sum()
    };
    json!({
        "ok": report.is_done(),
        "sent_bytes": total(|traffic| traffic.sent_bytes),
        "relayed_bytes": total(|traffic| traffic.relayed_bytes),
        "nodes": report.nodes.iter().map(node).collect::<Vec<_>>(),
    })
}
