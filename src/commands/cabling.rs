//! How the machines of a cluster are cabled: what each says of its ports (`facts`), which cables join
//! which (`matrix`), what is wrong with them and what mends it (`causes`), and addresses for them
//! (`wire`). What is looked at is the system's own; nothing is changed.

mod causes;
mod facts;
mod matrix;
mod measured;
mod parse;
mod wire;

#[cfg(test)]
mod tests;

use std::{path::Path, process::ExitCode};

use anyhow::{Context as _, bail};
use serde_json::json;
use shardpack_identity::Endpoint;
use shardpack_transfer::protocol::{PackageKey, Timeouts};
use shardpack_transfer::receive::NodeClient;

use super::{Outcome, ranks::RankParameters};
use crate::{
    args::{ClusterArgs, ClusterChoice},
    cluster,
    progress::{result, say},
};
pub(super) use facts::Facts;
use matrix::Cabling;

/// `cluster doctor`: exit code 1 if something is wrong.
pub(super) fn doctor(
    args: &ClusterArgs,
    nodes: &[String],
    server: Option<&str>,
    key: Option<&Path>,
) -> Outcome {
    let mut cabling = Cabling::of(of_nodes(nodes, &args.cluster)?);
    if let Some(server) = server {
        cabling.measured = measured::of_server(server, key, &cabling.nodes)?;
    }
    let causes = causes::of(&cabling);
    if args.json {
        let json = json!({
            "ok": causes.is_empty(),
            "nodes": cabling.nodes.iter().map(|(name, facts)| json!({ "name": name, "facts": facts })).collect::<Vec<_>>(),
            "cables": cabling.cables,
            "measured": cabling.measured,
            "causes": causes,
        });
        result(&json.to_string());
    } else {
        result(cabling.shown(&causes).trim_end());
    }
    Ok(if causes.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

/// `cluster wire`.
pub(super) fn wire(args: &ClusterArgs, nodes: &[String]) -> Outcome {
    let cabling = Cabling::of(of_nodes(nodes, &args.cluster)?);
    let plan = wire::plan(&cabling);
    if args.json {
        result(&json!({ "ok": true, "nodes": plan }).to_string());
    } else {
        result(wire::shown(&cabling, &plan).trim_end());
    }
    Ok(ExitCode::SUCCESS)
}

/// What each node says of itself, with its name; all members without names.
fn of_nodes(names: &[String], choice: &ClusterChoice) -> anyhow::Result<Vec<(String, Facts)>> {
    let names = if names.is_empty() {
        let home = cluster::open(choice).map_err(crate::failure::Failure::into_error)?;
        home.members().iter().map(|member| member.name.clone()).collect()
    } else {
        names.to_vec()
    };
    let nodes = cluster::nodes(&names, choice).map_err(crate::failure::Failure::into_error)?;
    let mut found = Vec::new();
    for (name, node) in names.into_iter().zip(&nodes) {
        say(&format!("cluster: asking {name} for its ports"));
        found.push((name.clone(), of_node(node).with_context(|| name)?));
    }
    Ok(found)
}

fn of_node(node: &Endpoint) -> anyhow::Result<Facts> {
    let mut client = NodeClient::connect(node, Timeouts::default())?;
    let held = client.list()?;
    let first = &held["packages"][0];
    let layout = serde_json::from_value(first["layout"].clone()).ok();
    let rank = first["rank"].as_u64().and_then(|rank| u32::try_from(rank).ok());
    let (Some(layout), Some(rank)) = (layout, rank) else {
        bail!("the node holds no package yet; push a set to it first");
    };
    let package = PackageKey { layout, rank };
    let parameters = serde_json::to_value(RankParameters::Doctor { self_test: false })?;
    let answer = client.start_rank(package, &parameters)?;
    serde_json::from_value(answer["cabling"].clone())
        .context("the node did not say how it is cabled; it may run an older version")
}
