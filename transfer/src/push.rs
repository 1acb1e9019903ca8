//! Sends each node its own package, and makes all of them current at once.
//!
//! Every node takes its package and verifies all of it; one failing node does not stop the others.
//! Then, and by default only if every rank of the set is prepared, the release is activated on all
//! nodes or on none: see [`rollback()`] for the way back. A connection that breaks is
//! made again some times; what a node has stored is not sent again, then and by the next push, which also
//! finishes an activation that was interrupted.
//!
//! Knows files, sockets and the transfer protocol; does not know what a tensor means.

mod activate;
mod connect;
mod error;
mod event;
mod finish;
mod open;
mod relay;
mod retry;
mod rollback;
mod send;
mod session;
mod stream;
mod watch;

use std::{num::NonZero, thread};

use shardpack_identity::Endpoint;

use crate::{
    limit::Limit,
    protocol::{PackageKey, Timeouts},
    receive::ReleaseOrder,
};

pub use error::{NodeError, PushError};
pub use event::{PushEvent, PushObserver};
pub use finish::{FinishedRelease, finish_activations};
pub use open::OpenSet;
pub use relay::SharedFiles;
pub use retry::Retries;
pub use rollback::{RollbackError, RollbackNode, RollbackOptions, RollbackReport, rollback};

use open::Package;
use relay::Relays;
use retry::NodeJob;

/// Chunks that are sent ahead of their answers: 64 MiB, more than any local network holds in
/// flight, and little enough that a cut connection wastes less than a second of a fast one.
pub const WINDOW_CHUNKS: usize = 16;

/// Most streams to one node: more than fill any network that one machine has, and half of the
/// connections that a node takes.
pub const MAX_STREAMS: usize = 8;

/// Streams to one node unless told otherwise: one for every two cores of this machine, since each
/// keeps a core here busy with encryption and one there with that and hashing. A single one cannot
/// fill a network of several GB/s.
#[must_use]
pub fn default_streams() -> usize {
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    (cores / 2).clamp(1, MAX_STREAMS)
}

/// A node and the rank whose package it gets.
#[derive(Clone, Debug)]
pub struct Target {
    /// The rank.
    pub rank: u32,
    /// Where the node is.
    pub node: Endpoint,
}

impl Target {
    /// One target per node: rank 0 goes to the first.
    #[must_use]
    pub fn in_rank_order<N: Clone + Into<Endpoint>>(nodes: &[N]) -> Vec<Self> {
        let target =
            |(rank, node): (usize, &N)| Self { rank: rank as u32, node: node.clone().into() };
        nodes.iter().enumerate().map(target).collect()
    }
}

/// When pushed packages become current.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// When all ranks of the set were pushed and are prepared.
    WhenAllPrepared,
    /// Every package that is prepared, whatever became of the others.
    WhatIsPrepared,
    /// Not now.
    Never,
}

/// Whether anything is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PushMode {
    /// Packages are sent and, as told, activated.
    Send(Activation),
    /// Nodes are asked what they hold; nothing changes.
    DryRun,
}

/// How a push goes about it.
#[derive(Clone, Copy, Debug)]
pub struct PushOptions {
    /// Whether anything is sent.
    pub mode: PushMode,
    /// How long a node may keep this side waiting.
    pub timeouts: Timeouts,
    /// Chunks of a node sent ahead of their answers, usually [`WINDOW_CHUNKS`]; its streams share
    /// them, two or more each.
    pub window_chunks: usize,
    /// Most streams to one node, usually [`default_streams`]; fewer where there are few chunks, the
    /// network is slow or the node takes no more.
    pub streams: usize,
    /// How it goes on after a connection broke.
    pub retries: Retries,
    /// Most bytes of chunks in a second, over all nodes.
    pub bytes_per_second: Option<NonZero<u64>>,
    /// How files come to nodes that several of them lack.
    pub shared_files: SharedFiles,
}

/// The release that a push makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReleaseOptions {
    /// Its number; one above those that the nodes know if none is given.
    pub number: Option<u64>,
    /// Whether it may be older than the current one.
    pub order: ReleaseOrder,
}

impl Default for ReleaseOptions {
    fn default() -> Self {
        Self { number: None, order: ReleaseOrder::Newer }
    }
}

/// What became of a push.
#[derive(Debug)]
pub struct PushReport {
    /// One per target, in the order given.
    pub nodes: Vec<NodeReport>,
}

impl PushReport {
    /// Whether every node did all that was asked of it.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.nodes.iter().all(|node| node.error.is_none())
    }
}

/// What became of one node.
#[derive(Debug)]
pub struct NodeReport {
    /// The node and its rank.
    pub target: Target,
    /// The package.
    pub package: PackageKey,
    /// Its progress.
    pub progress: NodeProgress,
    /// Bytes moved.
    pub traffic: Traffic,
    /// Why it failed.
    pub error: Option<NodeError>,
}

/// Progress of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NodeProgress {
    /// It was not reached, or holds a part.
    NotPrepared,
    /// It was asked, as a dry run does.
    Asked,
    /// The package is verified and on its disk.
    Prepared,
    /// The package is the current one.
    Activated,
}

/// Bytes of a push to one node.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Traffic {
    /// Bytes of the package.
    pub package_bytes: u64,
    /// Bytes that the node held before the first chunk, reused ones among them.
    pub held_bytes: u64,
    /// Bytes that the node took from its other packages.
    pub reused_bytes: u64,
    /// Bytes that the node lacked: what a dry run would send.
    pub missing_bytes: u64,
    /// Chunks that the node lacked.
    pub missing_chunks: u64,
    /// Bytes of chunks that left this machine.
    pub sent_bytes: u64,
    /// Chunks that left it.
    pub sent_chunks: u64,
    /// Bytes of chunks that the node fetched from another node of the push.
    pub relayed_bytes: u64,
    /// Chunks that it fetched there.
    pub relayed_chunks: u64,
    /// Streams on which they went.
    pub streams: usize,
    /// Free bytes of the node's disk.
    pub free_bytes: u64,
    /// Wall time until it was prepared.
    pub seconds: f64,
}

/// Pushes packages of a set as the next release. Fails as [`push_release`].
pub fn push(
    set: &OpenSet,
    targets: &[Target],
    options: &PushOptions,
    observer: PushObserver,
) -> Result<PushReport, PushError> {
    push_release(set, targets, options, &ReleaseOptions::default(), observer)
}

/// Pushes packages of a set as a release. Fails as a whole only before the first byte is sent; what becomes of
/// each node stands in the report.
pub fn push_release(
    set: &OpenSet,
    targets: &[Target],
    options: &PushOptions,
    release: &ReleaseOptions,
    observer: PushObserver,
) -> Result<PushReport, PushError> {
    let ranks = set.ranks();
    check_targets(targets, ranks)?;
    let packages = targets
        .iter()
        .map(|target| open::open_package(set, target.rank))
        .collect::<Result<Vec<Package>, PushError>>()?;
    let mut report = PushReport { nodes: Vec::with_capacity(targets.len()) };
    let limit = options.bytes_per_second.map(Limit::new);
    let limit = limit.as_ref();
    let relays = &Relays::new(targets, &packages, options.shared_files);
    thread::scope(|scope| {
        let running: Vec<_> = targets
            .iter()
            .zip(&packages)
            .enumerate()
            .map(|(number, (target, package))| {
                let job =
                    NodeJob { set, package, target, number, options, limit, relays, observer };
                scope.spawn(move || retry::send_with_retries(&job))
            })
            .collect();
        for thread in running {
            // A panic here is ours, and goes on in the caller's thread.
            let node = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            report.nodes.push(node);
        }
    });
    let prepared = |node: &NodeReport| node.progress == NodeProgress::Prepared;
    let every_rank = targets.len() == ranks as usize && report.nodes.iter().all(prepared);
    let activates = match options.mode {
        PushMode::Send(Activation::WhenAllPrepared) => every_rank,
        PushMode::Send(Activation::WhatIsPrepared) => report.nodes.iter().any(prepared),
        PushMode::Send(Activation::Never) | PushMode::DryRun => false,
    };
    if let Some(package) = packages.first().filter(|_| activates) {
        let how = (release, options.timeouts);
        activate::activate(set, package, &mut report.nodes, how, observer);
    }
    Ok(report)
}

fn check_targets(targets: &[Target], ranks: u32) -> Result<(), PushError> {
    if targets.is_empty() {
        return Err(PushError::NoTarget { ranks });
    }
    for (index, target) in targets.iter().enumerate() {
        if target.rank >= ranks {
            return Err(PushError::Rank {
                address: target.node.address().to_owned(),
                rank: target.rank,
                ranks,
            });
        }
        for other in &targets[..index] {
            if other.rank == target.rank {
                return Err(PushError::RankTwice { rank: target.rank });
            }
            if other.node.address() == target.node.address() {
                let address = target.node.address().to_owned();
                return Err(PushError::AddressTwice { address });
            }
        }
    }
    Ok(())
}
