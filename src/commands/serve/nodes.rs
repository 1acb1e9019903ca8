//! The ranks of a set: started on this machine or by their nodes, now and whenever one is lost.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, anyhow, ensure};
use serde_json::Value;
use shardpack_cluster::{
    Announcement, LinkChoice, Node, RecoveryOptions, Repair, Restart, RestartError,
    SupervisorOptions, Survivors, WeightsSource,
};
use shardpack_engine::loading::send_package;
use shardpack_identity::{Endpoint, on_link_of};
use shardpack_manifests::Manifest;
use shardpack_transfer::protocol::{PackageKey, Timeouts};
use shardpack_transfer::push::finish_activations;
use shardpack_transfer::receive::{ClientError, NodeClient};
use shardpack_transfer::repair::{RepairOptions, RepairReport, repair as repair_node};
use tempfile::TempDir;

use super::mlx_group::{MlxGroup, unencrypted};
use crate::{
    args::{CollectivesName, EngineChoice, ServeArgs},
    commands::{
        cluster,
        ranks::{
            self, FrontName, Membership, PackageSource, RankEndpoint, RankParameters, STREAM_RANK,
            StartedRank, StreamRank, StreamedPackage,
        },
        threads,
    },
    failure::Failure,
    progress::{say, size},
};

/// How the ranks are supervised and linked.
pub(super) fn options(args: &ServeArgs) -> Result<SupervisorOptions, Failure> {
    // MLX's collectives have no timeout for a lost rank.
    let survivors = if args.engine.has_deadlines() { Survivors::Stay } else { Survivors::Restart };
    let resume_timeout = Duration::from_secs(args.resume_timeout);
    let recovery = RecoveryOptions { survivors, resume_timeout, ..RecoveryOptions::default() };
    let links = match args.engine.collectives {
        CollectivesName::Rdma if args.require_encryption => {
            return Err(unencrypted("RDMA is"));
        }
        CollectivesName::Rdma => LinkChoice::Rdma,
        CollectivesName::Auto if !args.require_encryption => LinkChoice::Auto,
        _ => LinkChoice::Tcp,
    };
    Ok(SupervisorOptions { recovery, links, ..SupervisorOptions::default() })
}

/// What the ranks of this machine have in common.
struct Local {
    threads: usize,
    engine: EngineChoice,
    /// With the folder for the files that MLX reads when a rank joins. Without MLX there is none, which a server
    /// that is killed would leave.
    mlx_group: Option<(MlxGroup, TempDir)>,
}

impl Local {
    fn start(&self, rank: u32, folder: &Path, recovery: u32) -> anyhow::Result<StartedRank> {
        let group = match &self.mlx_group {
            Some((group, files)) => {
                Some((group.group(recovery)?, files.path().join(rank.to_string())))
            }
            None => None,
        };
        let member = group.as_ref().map(|(distributed, folder)| Membership {
            distributed,
            rank,
            folder: folder.clone(),
        });
        let name = format!("rank {rank}");
        let (endpoint, keep) = (&RankEndpoint::LOOPBACK, Duration::ZERO);
        let source = PackageSource::Folder(folder);
        ranks::start(&name, source, self.threads, &self.engine, endpoint, member, keep)
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
    let with_files = |group| -> io::Result<_> {
        Ok((group, tempfile::Builder::new().prefix("shardpack-ranks-").tempdir()?))
    };
    let mlx_group = mlx_group.map(with_files).transpose()?;
    let local = Arc::new(Local { threads, engine: engine.clone(), mlx_group });
    let start = |(rank, folder): (u32, &PathBuf)| {
        let StartedRank { process, announcement } = local.start(rank, folder, 0)?;
        let (again, folder) = (Arc::clone(&local), folder.clone());
        let restart: Restart = Arc::new(move |recovery| {
            let started = again.start(rank, &folder, recovery);
            let StartedRank { process, announcement } =
                started.map_err(|error| RestartError::Failed(format!("{error:#}")))?;
            Ok((announcement, Some(process)))
        });
        let (name, restart) = (format!("rank {rank}"), Some(restart));
        Ok(Node {
            name,
            announcement,
            credentials: None,
            process: Some(process),
            restart,
            weights: None,
            repair: None,
        })
    };
    (0..).zip(folders).map(start).collect::<anyhow::Result<_>>().map_err(Failure::from)
}

/// The node of each package, which have to be as many; none where ranks run on this machine.
pub(super) fn places(
    nodes: Vec<Endpoint>,
    manifests: &[Manifest],
) -> Result<Vec<(Endpoint, PackageKey)>, Failure> {
    if nodes.is_empty() {
        return Ok(Vec::new());
    }
    if nodes.len() != manifests.len() {
        let error = anyhow!(
            "the set has {} packages and {} nodes were given",
            manifests.len(),
            nodes.len()
        );
        return Err(Failure::from(error).hint("give one node per package, in rank order"));
    }
    // An activation that was interrupted is over once some node has the release as current.
    cluster::tell_finished(&finish_activations(&nodes, Timeouts::default()));
    let key = |manifest: &Manifest| PackageKey { layout: manifest.ids.layout, rank: manifest.rank };
    Ok(nodes.into_iter().zip(manifests.iter().map(key)).collect())
}

/// Where the ranks of nodes have their packages.
pub(super) enum RankPackages<'a> {
    /// On the nodes, which are repaired where a `set` is served; a front on a node serves none, and may
    /// not write to the others.
    Stored { set: Option<&'a Path> },
    /// In these folders of this machine, in rank order, with their manifests.
    Streamed(&'a [PathBuf], &'a [Manifest]),
}

/// Asks the nodes to start the ranks of these packages.
pub(super) fn remote(
    places: Vec<(Endpoint, PackageKey)>,
    packages: &RankPackages<'_>,
    mlx_group: Option<MlxGroup>,
    takes_over: bool,
) -> Result<Vec<Node>, Failure> {
    let mlx_group = Arc::new(mlx_group);
    let nodes: Vec<Endpoint> = places.iter().map(|(node, _)| node.clone()).collect();
    let front = FrontName::generate(takes_over)?;
    // Once it has a rank, it is started again for this front, and not taken from another.
    let again = FrontName { takes_over: false, ..front.clone() };
    let start = |(index, (node, package)): (usize, (Endpoint, PackageKey))| {
        let streamed = match packages {
            RankPackages::Stored { .. } => None,
            RankPackages::Streamed(folders, manifests) => {
                Some((folders[index].clone(), StreamedPackage::of(&manifests[index])))
            }
        };
        let (own, mlx_group) = (node.clone(), Arc::clone(&mlx_group));
        let described = streamed.as_ref().map(|(_, package)| package.clone());
        let invite = move |front: &FrontName, recovery| match &described {
            Some(package) => invite_streamed(&own, package, front),
            None => invite(&own, package, mlx_group.as_ref().as_ref(), front, recovery),
        };
        let is_streamed = streamed.is_some();
        let announcement = invite(&front, 0).map_err(|error| uninvited(error, is_streamed))?;
        let again = again.clone();
        let restart: Restart = Arc::new(move |recovery| {
            let announcement = invite(&again, recovery).map_err(|error| not_restarted(&error))?;
            Ok((announcement, None))
        });
        let (name, restart) = (format!("node {node}"), Some(restart));
        let credentials = node.tls().map(|tls| tls.credentials.clone());
        let weights = streamed.map(|(folder, _)| {
            let source: WeightsSource =
                Arc::new(move |mut channel| send_package(&folder, &mut channel));
            source
        });
        let repair = match packages {
            RankPackages::Stored { set: Some(set) } => {
                let (own, peers, set) = (node.clone(), nodes.clone(), (*set).to_owned());
                let repair: Repair = Arc::new(move || repair(&own, &peers, &set, package));
                Some(repair)
            }
            RankPackages::Stored { set: None } | RankPackages::Streamed(..) => None,
        };
        Ok(Node { name, announcement, credentials, process: None, restart, weights, repair })
    };
    places.into_iter().enumerate().map(start).collect()
}

/// Replaces the damaged chunks of a package that a rank cannot load: from the other nodes, else from the
/// set that is served.
fn repair(
    node: &Endpoint,
    peers: &[Endpoint],
    set: &Path,
    package: PackageKey,
) -> Result<(), String> {
    let timeouts = Timeouts::default();
    let options = RepairOptions { peers, set: Some(set), package: Some(package), timeouts };
    let report = repair_node(node, &options)
        .map_err(|error| format!("it was not repaired: {:#}", anyhow!(error)))?;
    let RepairReport { repaired, sources, remaining, .. } = &report;
    let sources: Vec<&str> = sources.keys().map(String::as_str).collect();
    if repaired.chunks > 0 {
        let (chunks, bytes, from) = (repaired.chunks, size(repaired.bytes), sources.join(", "));
        say(&format!("node {node}: {chunks} damaged chunks ({bytes}) were replaced, from {from}"));
    }
    if report.is_clean() {
        Ok(())
    } else {
        Err(format!("it was not repaired: {}", remaining.join("; ")))
    }
}

/// Why a node did not start a rank again.
fn not_restarted(error: &anyhow::Error) -> RestartError {
    let text = format!("{error:#}");
    match error.downcast_ref() {
        Some(ClientError::Connect(_) | ClientError::Wire { .. }) => RestartError::Unreachable(text),
        Some(ClientError::Refused { .. }) if is_held(&text) => RestartError::Taken(text),
        _ => RestartError::Failed(text),
    }
}

/// Whether a node refuses because another server has the rank.
fn is_held(refusal: &str) -> bool {
    refusal.contains("--take-over")
}

/// A node that refuses to start a rank of a package of its own usually lacks it.
fn uninvited(error: anyhow::Error, is_streamed: bool) -> Failure {
    let refused = matches!(error.downcast_ref(), Some(ClientError::Refused { .. }));
    let is_held = is_held(&format!("{error:#}"));
    let failure = Failure::from(error);
    if refused && !is_held && !is_streamed {
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
    front: &FrontName,
    recovery: u32,
) -> anyhow::Result<Announcement> {
    let distributed = mlx_group.map(|mlx_group| mlx_group.group(recovery)).transpose()?;
    let start = RankParameters::Start { front: front.clone(), distributed };
    let parameters = serde_json::to_value(start)?;
    let mut client = NodeClient::connect(node, Timeouts::default())?;
    announced(node, client.start_rank(package, &parameters)?)
}

/// Makes a node start the rank of a package that is sent to it then; an older process of it ends.
fn invite_streamed(
    node: &Endpoint,
    package: &StreamedPackage,
    front: &FrontName,
) -> anyhow::Result<Announcement> {
    let start = StreamRank { package: package.clone(), front: front.clone() };
    let mut client = NodeClient::connect(node, Timeouts::default())?;
    announced(node, client.operate(STREAM_RANK, &serde_json::to_value(start)?)?)
}

/// Where a node says that its rank is.
fn announced(node: &Endpoint, answer: Value) -> anyhow::Result<Announcement> {
    let mut announcement: Announcement = serde_json::from_value(answer)
        .with_context(|| format!("node {node} did not start a rank"))?;
    // Its ranks have its key and no other.
    ensure!(
        announcement.key == node.tls().map(|tls| tls.key),
        "node {node} started a rank with another key than the node's"
    );
    if let Some(own) = node.resolve()?.first() {
        announcement.address = on_link_of(announcement.address, *own);
    }
    Ok(announcement)
}
