//! Why a push does not start, and why the push to one node fails.

use std::{io, path::PathBuf, time::Duration};

use shardpack_identity::ConnectError;
use shardpack_manifests::verify::Problem;

use crate::{
    protocol::{Failure, SendError, WireError},
    receive::ClientError,
    release::ReleaseError,
};

/// A push that did not start.
#[derive(Debug, thiserror::Error)]
pub enum PushError {
    /// The set, or a package of it, is not as it should be.
    #[error("{} cannot be pushed", path.display())]
    Set {
        /// The set's or the package's directory.
        path: PathBuf,
        /// What is wrong.
        #[source]
        problem: Problem,
    },
    /// More or fewer nodes than ranks.
    #[error(
        "the set has {ranks} packages and {found} nodes were given: give one node per package, in rank order"
    )]
    Count {
        /// Nodes given.
        found: usize,
        /// Packages of the set.
        ranks: u32,
    },
    /// No node at all.
    #[error("no node was given for any of the {ranks} packages")]
    NoTarget {
        /// Packages of the set.
        ranks: u32,
    },
    /// A rank that the set does not have.
    #[error("{address} is to get rank {rank}, but the set has ranks 0 to {}", ranks - 1)]
    Rank {
        /// The node.
        address: String,
        /// The rank.
        rank: u32,
        /// Packages of the set.
        ranks: u32,
    },
    /// Two nodes for one rank.
    #[error("rank {rank} is given to two nodes")]
    RankTwice {
        /// The rank.
        rank: u32,
    },
    /// Two ranks for one node.
    #[error("{address} is given twice")]
    AddressTwice {
        /// The node.
        address: String,
    },
}

/// Why the push to a node failed.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// No connection.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The connection failed.
    #[error("the connection to the node ended")]
    Wire(#[from] WireError),
    /// The node refused, or the protocol failed.
    #[error(transparent)]
    Send(#[from] SendError),
    /// The node sends keep-alives but makes no progress.
    #[error(
        "the node sends keep-alives but made no progress: it stayed at {done_bytes} of {total_bytes} bytes for {} s; check its machine and disk, and push again", waited.as_secs_f32()
    )]
    Stalled {
        /// For how long.
        waited: Duration,
        /// Bytes done, as it said last.
        done_bytes: u64,
        /// Bytes to do.
        total_bytes: u64,
    },
    /// A chunk was refused because this side's copy is damaged.
    #[error(
        "{file}: chunk {chunk} is damaged in the set itself; run `shardpack verify` on the set"
    )]
    SourceDamaged {
        /// The file.
        file: String,
        /// Index of the chunk.
        chunk: u32,
    },
    /// This side's copy cannot be read.
    #[error("could not read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The node did not activate.
    #[error("the node did not activate the package: {0}")]
    NotActivated(Failure),
    /// An answer to another question.
    #[error("the node sent message type {kind} in answer to another")]
    Unexpected {
        /// Its type.
        kind: u8,
    },
    /// A program that knows no releases.
    #[error(
        "the node runs {program}, which does not know activation on all nodes or none; upgrade it and push again"
    )]
    Outdated {
        /// The node's program.
        program: String,
    },
    /// An answer that cannot be read.
    #[error("the node's answer cannot be read: {0}")]
    Answer(String),
    /// The connection for the activation failed.
    #[error(transparent)]
    Client(ClientError),
    /// The activation record could not be made.
    #[error(transparent)]
    Release(#[from] ReleaseError),
    /// Another node did not take the release.
    #[error(
        "not activated, because rank {rank} did not take the release; the release before stays current"
    )]
    OtherFailed {
        /// The rank that did not.
        rank: u32,
    },
    /// Another node did not take the release, and this one could not be told.
    #[error(
        "release {release} stays pending here, because rank {rank} did not take it and this node could \
         not be told; the next push settles it"
    )]
    NotDropped {
        /// The rank that did not.
        rank: u32,
        /// Number of the release.
        release: u64,
        /// Why it could not be told.
        source: Box<NodeError>,
    },
    /// The node was lost in the second phase.
    #[error(
        "release {release} is pending here and current on other nodes; push again to finish it"
    )]
    Unfinished {
        /// Number of the release.
        release: u64,
        /// Why.
        source: Box<NodeError>,
    },
    /// Another node could not be reached when all were to activate.
    #[error("not activated, because rank {rank} could not be reached")]
    OtherUnreachable {
        /// The rank that could not.
        rank: u32,
    },
}
