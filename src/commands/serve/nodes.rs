//! The ranks of a set: started on this machine or by their nodes, now and whenever one is lost.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context, anyhow};
use serde_json::Value;
use shardpack_loader::{
    cluster::{
        Announcement, Node, RecoveryOptions, Restart, Restarted, SupervisorOptions, Survivors,
    },
    receive::NodeClient,
};
use shardpack_manifests::{
    Manifest,
    transfer::{PackageKey, Timeouts},
};

use crate::{
    args::EngineChoice,
    commands::{ranks, threads},
    failure::Failure,
};

/// How the ranks are watched over.
pub(super) fn options(engine: &EngineChoice) -> SupervisorOptions {
    // MLX's own collectives wait for ever for a lost rank.
    let survivors = if engine.has_deadlines() { Survivors::Stay } else { Survivors::Restart };
    let recovery = RecoveryOptions { survivors, ..RecoveryOptions::default() };
    SupervisorOptions { recovery, ..SupervisorOptions::default() }
}

/// Starts one rank process per package on this machine.
pub(super) fn local(
    folders: &[PathBuf],
    asked: Option<usize>,
    engine: &EngineChoice,
) -> Result<Vec<Node>, Failure> {
    let each = asked.unwrap_or_else(|| (threads::count(None) / folders.len()).max(1));
    let start = |(rank, folder): (usize, &PathBuf)| {
        let name = format!("rank {rank}");
        let (process, announcement) = ranks::start(&name, folder, each, engine)?;
        let restart = restart_local(name.clone(), folder, each, engine.clone());
        Ok(Node { name, announcement, process: Some(process), restart: Some(restart) })
    };
    folders.iter().enumerate().map(start).collect::<anyhow::Result<_>>().map_err(Failure::from)
}

fn restart_local(name: String, folder: &Path, threads: usize, engine: EngineChoice) -> Restart {
    let folder = folder.to_owned();
    Arc::new(move |_recovery| {
        let (process, announcement) =
            ranks::start(&name, &folder, threads, &engine).map_err(|error| format!("{error:#}"))?;
        Ok((announcement, Some(process)))
    })
}

/// Asks one running node per package to start its rank.
pub(super) fn remote(
    addresses: &[SocketAddr],
    manifests: &[Manifest],
) -> Result<Vec<Node>, Failure> {
    if addresses.len() != manifests.len() {
        let error = anyhow!(
            "the set has {} packages and {} nodes were given",
            manifests.len(),
            addresses.len()
        );
        return Err(Failure::from(error).hint("give one node per package, in rank order"));
    }
    let start = |(address, manifest): (&SocketAddr, &Manifest)| {
        let (address, key) =
            (*address, PackageKey { layout: manifest.ids.layout, rank: manifest.rank });
        let announcement = invite(address, key).map_err(|error| {
            Failure::from(error)
                .hint("push the set to its nodes first: shardpack push SET --to HOST:PORT,…")
        })?;
        let restart: Restart = Arc::new(move |_recovery| -> Result<Restarted, String> {
            let announcement = invite(address, key).map_err(|error| format!("{error:#}"))?;
            Ok((announcement, None))
        });
        let (name, restart) = (format!("node {address}"), Some(restart));
        Ok(Node { name, announcement, process: None, restart })
    };
    addresses.iter().zip(manifests).map(start).collect()
}

/// Has a node start the rank of a package; an older process of it ends.
fn invite(address: SocketAddr, package: PackageKey) -> anyhow::Result<Announcement> {
    let mut client = NodeClient::connect(address, Timeouts::default())?;
    let answer = client.start_rank(package, &Value::Null)?;
    serde_json::from_value(answer).with_context(|| format!("node {address} did not start a rank"))
}
