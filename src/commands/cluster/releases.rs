//! `shardpack cluster rollback`, and what is said of releases.

use std::process::ExitCode;

use anyhow::anyhow;
use serde_json::json;
use shardpack_identity::Endpoint;
use shardpack_transfer::protocol::Timeouts;
use shardpack_transfer::push::{
    FinishedRelease, NodeError, PushEvent, RollbackError, RollbackNode, RollbackOptions,
    rollback as roll,
};

use crate::{
    args::ClusterArgs,
    cluster,
    commands::Outcome,
    failure::Failure,
    kill_points,
    progress::{result, say, table},
};

/// The nodes of these names, or all members.
pub(super) fn nodes(args: &ClusterArgs, names: &[String]) -> Result<Vec<Endpoint>, Failure> {
    if !names.is_empty() {
        return cluster::nodes(names, &args.cluster);
    }
    let home = cluster::open(&args.cluster)?;
    let nodes: Vec<Endpoint> = home.members().iter().map(|member| home.endpoint(member)).collect();
    if nodes.is_empty() {
        let error = anyhow!("cluster {} has no members yet", home.cluster());
        return Err(Failure::from(error).hint("name nodes of this machine by their addresses"));
    }
    Ok(nodes)
}

/// Goes back to an earlier release.
pub(super) fn rollback(
    args: &ClusterArgs,
    model: Option<&str>,
    names: &[String],
    to: Option<u64>,
) -> Outcome {
    let nodes = nodes(args, names)?;
    let options = RollbackOptions { model: model.map(str::to_owned), to };
    let report = roll(&nodes, &options, Timeouts::default(), &|event| {
        if let PushEvent::ReleasePending { rank, .. } = event {
            kill_points::at(|| format!("rollback:release-pending:{rank}"));
        }
    });
    let report = report.map_err(|error| match error {
        RollbackError::NoPrevious { .. } => Failure::from(error)
            .hint("push the set again, if it is still on this machine: shardpack push SET --to …"),
        RollbackError::Different { .. } => Failure::from(error).hint(
            "see `shardpack cluster status`; a number with --to, or pushing the set, settles it",
        ),
        error => error.into(),
    })?;
    if args.json {
        let node = |node: &RollbackNode| {
            json!({
                "node": node.node.to_string(),
                "address": node.node.address(),
                "rank": node.rank,
                "error": node.error.as_ref().map(chain),
            })
        };
        let nodes: Vec<_> = report.nodes.iter().map(node).collect();
        let json = json!({
            "ok": report.is_done(),
            "model": report.model,
            "release": report.release,
            "restored": report.restored,
            "nodes": nodes,
        });
        result(&json.to_string());
    } else {
        let mut rows = vec![["rank", "node", "state"].map(str::to_owned).to_vec()];
        for node in &report.nodes {
            let state = if node.error.is_none() { "active" } else { "failed" };
            rows.push(vec![node.rank.to_string(), node.node.to_string(), state.to_owned()]);
        }
        result(table(&rows).trim_end());
        let (model, release) = (&report.model, report.release);
        match report.restored {
            _ if !report.is_done() => {}
            Some(restored) => {
                say(&format!("{model}: release {restored} is current again, as release {release}"));
            }
            None => say(&format!(
                "{model}: release {release} was half activated and is now current on every node; \
                 run the command again to go back from it"
            )),
        }
    }
    for node in &report.nodes {
        if let Some(error) = &node.error {
            say(&format!("error: node {} (rank {}): {}", node.node, node.rank, chain(error)));
        }
    }
    Ok(if report.is_done() { ExitCode::SUCCESS } else { ExitCode::from(2) })
}

fn chain(error: &NodeError) -> String {
    anyhow::Chain::new(error).map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// Says which interrupted activations were finished.
pub(crate) fn tell_finished(finished: &[FinishedRelease]) {
    for FinishedRelease { node, model, release } in finished {
        say(&format!(
            "{node}: release {release} of {model}, current on other nodes, is so here now"
        ));
    }
}
