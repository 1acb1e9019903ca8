//! The ranks of a set: started on this machine or by their nodes, now and whenever one is lost.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context, anyhow, ensure};
use serde_json::Value;
use shardpack_loader::{
    cluster::{
        Announcement, Node, RankProcess, RecoveryOptions, Restart, SupervisorOptions, Survivors,
    },
    receive::{ClientError, NodeClient},
};
use shardpack_manifests::{
    Manifest,
    transfer::{PackageKey, Timeouts},
};
use shardpack_trust::Endpoint;
use tempfile::TempDir;

use super::layer::Layer;
use crate::{
    args::EngineChoice,
    commands::{
        ranks::{self, Membership, Place, RankParameters},
        threads,
    },
    failure::Failure,
};

/// How the ranks are watched over.
pub(super) fn options(engine: &EngineChoice) -> SupervisorOptions {
    // MLX's own collectives wait for ever for a lost rank.
    let survivors = if engine.has_deadlines() { Survivors::Stay } else { Survivors::Restart };
    let recovery = RecoveryOptions { survivors, ..RecoveryOptions::default() };
    SupervisorOptions { recovery, ..SupervisorOptions::default() }
}

/// What the ranks of this machine have in common.
struct Local {
    threads: usize,
    engine: EngineChoice,
    layer: Option<Layer>,
    /// For the files that MLX reads when a rank joins.
    files: TempDir,
}

impl Local {
    fn start(
        &self,
        rank: u32,
        folder: &Path,
        recovery: u32,
    ) -> anyhow::Result<(RankProcess, Announcement)> {
        let group = self.layer.as_ref().map(|layer| layer.group(recovery)).transpose()?;
        let folder_of_rank = self.files.path().join(rank.to_string());
        let member = group.as_ref().map(|distributed| Membership {
            distributed,
            rank,
            folder: folder_of_rank,
        });
        let name = format!("rank {rank}");
        ranks::start(&name, folder, self.threads, &self.engine, &Place::LOOPBACK, member)
    }
}

/// Starts one rank process per package on this machine.
pub(super) fn local(
    folders: &[PathBuf],
    asked: Option<usize>,
    engine: &EngineChoice,
    layer: Option<Layer>,
) -> Result<Vec<Node>, Failure> {
    let threads = asked.unwrap_or_else(|| (threads::count(None) / folders.len()).max(1));
    let files = tempfile::Builder::new().prefix("shardpack-ranks-").tempdir()?;
    let local = Arc::new(Local { threads, engine: engine.clone(), layer, files });
    let start = |(rank, folder): (u32, &PathBuf)| {
        let (process, announcement) = local.start(rank, folder, 0)?;
        let (again, folder) = (Arc::clone(&local), folder.clone());
        let restart: Restart = Arc::new(move |recovery| {
            let started = again.start(rank, &folder, recovery);
            let (process, announcement) = started.map_err(|error| format!("{error:#}"))?;
            Ok((announcement, Some(process)))
        });
        let (name, restart) = (format!("rank {rank}"), Some(restart));
        Ok(Node { name, announcement, credentials: None, process: Some(process), restart })
    };
    (0..).zip(folders).map(start).collect::<anyhow::Result<_>>().map_err(Failure::from)
}

/// Asks one running node per package to start its rank.
pub(super) fn remote(
    nodes: &[Endpoint],
    manifests: &[Manifest],
    layer: Option<Layer>,
) -> Result<Vec<Node>, Failure> {
    if nodes.len() != manifests.len() {
        let error = anyhow!(
            "the set has {} packages and {} nodes were given",
            manifests.len(),
            nodes.len()
        );
        return Err(Failure::from(error).hint("give one node per package, in rank order"));
    }
    let layer = Arc::new(layer);
    let start = |(node, manifest): (&Endpoint, &Manifest)| {
        let package = PackageKey { layout: manifest.ids.layout, rank: manifest.rank };
        let (own, layer) = (node.clone(), Arc::clone(&layer));
        let invite = move |recovery| invite(&own, package, layer.as_ref().as_ref(), recovery);
        let announcement = invite(0).map_err(uninvited)?;
        let restart: Restart = Arc::new(move |recovery| {
            let announcement = invite(recovery).map_err(|error| format!("{error:#}"))?;
            Ok((announcement, None))
        });
        let (name, restart) = (format!("node {node}"), Some(restart));
        let credentials = node.tls().map(|tls| tls.credentials.clone());
        Ok(Node { name, announcement, credentials, process: None, restart })
    };
    nodes.iter().zip(manifests).map(start).collect()
}

/// A node that was reached and does not start the rank lacks the package, mostly.
fn uninvited(error: anyhow::Error) -> Failure {
    let refused = matches!(error.downcast_ref(), Some(ClientError::Refused { .. }));
    let failure = Failure::from(error);
    if refused {
        failure.hint("push the set to its nodes first: shardpack push SET --to NODE,…")
    } else {
        failure
    }
}

/// Has a node start the rank of a package; an older process of it ends.
fn invite(
    node: &Endpoint,
    package: PackageKey,
    layer: Option<&Layer>,
    recovery: u32,
) -> anyhow::Result<Announcement> {
    let parameters = match layer {
        None => Value::Null,
        Some(layer) => serde_json::to_value(RankParameters::Distributed(layer.group(recovery)?))?,
    };
    let mut client = NodeClient::connect(node, Timeouts::default())?;
    let answer = client.start_rank(package, &parameters)?;
    let announcement: Announcement = serde_json::from_value(answer)
        .with_context(|| format!("node {node} did not start a rank"))?;
    // Its ranks have its key and no other.
    ensure!(
        announcement.key == node.tls().map(|tls| tls.key),
        "node {node} answers with a rank that does not prove itself as the node does"
    );
    Ok(announcement)
}
