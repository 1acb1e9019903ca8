//! Events of a node.

use std::net::SocketAddr;

use shardpack_identity::Joined;

use crate::protocol::PackageKey;

/// Called with every event of a node, on the thread that causes it, which waits for its return.
pub type Observer = Box<dyn Fn(&ReceiveEvent) + Send + Sync>;

/// An event; names in -ing mean that it is about to happen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReceiveEvent {
    /// A connection was accepted.
    Connected {
        /// Who.
        peer: SocketAddr,
    },
    /// The node has joined a cluster.
    JoinedCluster(Joined),
    /// Its certificate was renewed.
    Renewed(Joined),
    /// It has left its cluster, as a controller wished.
    LeftCluster,
    /// A package was offered and can be stored.
    Offered {
        /// The package.
        package: PackageKey,
        /// Bytes held already, reused ones among them.
        held_bytes: u64,
        /// Bytes that were taken from other packages.
        reused_bytes: u64,
        /// Bytes to come.
        missing_bytes: u64,
    },
    /// Another stream of a push carries chunks too.
    StreamJoined {
        /// The package.
        package: PackageKey,
    },
    /// A chunk was verified and written; not yet acknowledged, and not yet in the journal.
    ChunkStored {
        /// The package.
        package: PackageKey,
        /// Name of the file.
        file: String,
        /// Index of the chunk.
        chunk: u32,
        /// Its bytes.
        size_bytes: u64,
    },
    /// A chunk's bytes were not those of the manifest.
    ChunkRefused {
        /// The package.
        package: PackageKey,
        /// Name of the file.
        file: String,
        /// Index of the chunk.
        chunk: u32,
    },
    /// A damaged chunk of a stored package was replaced; not yet acknowledged.
    ChunkRepaired {
        /// The package.
        package: PackageKey,
        /// Name of the file.
        file: String,
        /// Index of the chunk.
        chunk: u32,
        /// Its bytes.
        size_bytes: u64,
    },
    /// All chunks are stored; the whole package is about to be verified.
    Verifying {
        /// The package.
        package: PackageKey,
    },
    /// The package is verified and listed; not yet acknowledged.
    Prepared {
        /// The package.
        package: PackageKey,
    },
    /// A release with this package is about to be kept as pending.
    PreparingRelease {
        /// The package.
        package: PackageKey,
        /// Number of the release.
        release: u64,
    },
    /// It is pending, or was current already; not yet acknowledged.
    ReleasePending {
        /// The package.
        package: PackageKey,
        /// Number of the release.
        release: u64,
    },
    /// The package is about to become the current one.
    Activating {
        /// The package.
        package: PackageKey,
    },
    /// The package is the current one; not yet acknowledged.
    Activated {
        /// The package.
        package: PackageKey,
        /// The one before.
        previous: Option<PackageKey>,
        /// Number of its release; none of a package that was activated by itself.
        release: Option<u64>,
        /// The release that this one restores: it is a rollback.
        restores: Option<u64>,
    },
    /// A package that no release needs was removed.
    Removed {
        /// The package.
        package: PackageKey,
        /// Its bytes.
        size_bytes: u64,
    },
    /// A controller has taken over the cluster.
    ControllerChanged {
        /// Number of its mandate.
        epoch: u64,
        /// The machine that it acts on.
        name: String,
    },
    /// A stored package was read again.
    Scrubbed {
        /// The package.
        package: PackageKey,
        /// Bytes that were read.
        read_bytes: u64,
        /// What is wrong, at most twenty.
        findings: Vec<String>,
    },
    /// A connection ended.
    Disconnected {
        /// Who.
        peer: SocketAddr,
        /// Why, unless the peer was done.
        problem: Option<String>,
    },
}
