//! The ranks of a set: started on this machine or by their nodes, now and whenever one is lost.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context, anyhow, ensure};
use serde_json::Value;
use shardpack_cluster::{
    Announcement, Node, RecoveryOptions, Restart, SupervisorOptions, Survivors,
};
use shardpack_identity::Endpoint;
use shardpack_manifests::Manifest;
use shardpack_transfer::protocol::{PackageKey, Timeouts};
use shardpack_transfer::receive::{ClientError, NodeClient};
use tempfile::TempDir;

use super::mlx_group::MlxGroup;
use crate::{
    args::EngineChoice,
    commands::{
        ranks::{self, Membership, RankEndpoint, RankParameters, StartedRank},
        threads,
    },
    failure::Failure,
};

/// How the ranks are supervised.
pub(super) fn options(engine: &EngineChoice) -> SupervisorOptions {
    // MLX's collectives have no timeout for a lost rank.
    let survivors = if engine.has_deadlines() { Survivors::Stay } else { Survivors::Restart };
    let recovery = RecoveryOptions { survivors, ..RecoveryOptions::default() };
    SupervisorOptions { recovery, ..SupervisorOptions::default() }
}

/// What the ranks of this machine have in common.
struct Local {
    threads: usize,
    engine: EngineChoice,
    mlx_group: Option<MlxGroup>,
    /// For the files that MLX reads when a rank joins.
    files: TempDir,
}

impl Local {
    fn start(&self, rank: u32, folder: &Path, recovery: u32) -> anyhow::Result<StartedRank> {
        let group =
            self.mlx_group.as_ref().map(|mlx_group| mlx_group.group(recovery)).transpose()?;
        let folder_of_rank = self.files.path().join(rank.to_string());
        let member = group.as_ref().map(|distributed| Membership {
            distributed,
            rank,
            folder: folder_of_rank,
        });
        let name = format!("rank {rank}");
        ranks::start(&name, folder, self.threads, &self.engine, &RankEndpoint::LOOPBACK, member)
    }
}

/// Starts one rank process per package on this machine.
pub(super) fn local(
    folders: &[PathBuf],
    asked: Option<usize>,
    engine: &EngineChoice,
    mlx_group: Option<MlxGroup>,
) -> Result<Vec<Node>, Failure> {
    let threads = asked.unwrap_or_else(|| (threads::count(None) / folders.len()).max(1));
    let files = tempfile::Builder::new().prefix("shardpack-ranks-").tempdir()?;
    let local = Arc::new(Local { threads, engine: engine.clone(), mlx_group, files });
    let start = |(rank, folder): (u32, &PathBuf)| {
        let StartedRank { process, announcement } = local.start(rank, folder, 0)?;
        let (again, folder) = (Arc::clone(&local), folder.clone());
        let restart: Restart = Arc::new(move |recovery| {
            let started = again.start(rank, &folder, recovery);
            let StartedRank { process, announcement } =
                started.map_err(|error| format!("{error:#}"))?;
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
    mlx_group: Option<MlxGroup>,
) -> Result<Vec<Node>, Failure> {
    if nodes.len() != manifests.len() {
        let error = anyhow!(
            "the set has {} packages and {} nodes were given",
            manifests.len(),
            nodes.len()
        );
        return Err(Failure::from(error).hint("give one node per package, in rank order"));
    }
    let mlx_group = Arc::new(mlx_group);
    let start = |(node, manifest): (&Endpoint, &Manifest)| {
        let package = PackageKey { layout: manifest.ids.layout, rank: manifest.rank };
        let (own, mlx_group) = (node.clone(), Arc::clone(&mlx_group));
        let invite = move |recovery| invite(&own, package, mlx_group.as_ref().as_ref(), recovery);
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

/// A node that refuses to start a rank usually lacks the package.
fn uninvited(error: anyhow::Error) -> Failure {
    let refused = matches!(error.downcast_ref(), Some(ClientError::Refused { .. }));
    let failure = Failure::from(error);
    if refused {
        failure.hint("push the set to its nodes first: shardpack push SET --to NODE,…")
    } else {
        failure
    }
}

/// Makes a node start the rank of a package; an older process of it ends.
fn invite(
    node: &Endpoint,
    package: PackageKey,
    mlx_group: Option<&MlxGroup>,
    recovery: u32,
) -> anyhow::Result<Announcement> {
    let parameters = match mlx_group {
        None => Value::Null,
        Some(mlx_group) => {
            serde_json::to_value(RankParameters::Distributed(mlx_group.group(recovery)?))?
        }
    };
    let mut client = NodeClient::connect(node, Timeouts::default())?;
    let answer = client.start_rank(package, &parameters)?;
    let announcement: Announcement = serde_json::from_value(answer)
        .with_context(|| format!("node {node} did not start a rank"))?;
    // Its ranks have its key and no other.
    ensure!(
        announcement.key == node.tls().map(|tls| tls.key),
        "node {node} started a rank with another key than the node's"
    );
    Ok(announcement)
}
