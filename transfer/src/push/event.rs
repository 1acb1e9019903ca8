//! Events of a push.

use std::time::Duration;

use super::NodeError;

/// Called with every event of a push, from the threads of the push, which wait for its return.
pub type PushObserver<'a> = &'a (dyn Fn(&PushEvent) + Sync);

/// An event at one rank's node; names in -ing mean that it is about to happen.
#[derive(Debug)]
pub enum PushEvent<'a> {
    /// The node answered.
    Connected {
        /// The rank.
        rank: u32,
        /// The node's program.
        program: &'a str,
    },
    /// The node said what it holds.
    Offered {
        /// The rank.
        rank: u32,
        /// Bytes that it holds.
        held_bytes: u64,
        /// Bytes to be sent.
        missing_bytes: u64,
    },
    /// The node looks for what it holds, or verifies.
    Working {
        /// The rank.
        rank: u32,
        /// Bytes done.
        done_bytes: u64,
        /// Bytes in all.
        total_bytes: u64,
    },
    /// Chunks are sent over another stream too.
    StreamJoined {
        /// The rank.
        rank: u32,
        /// The stream's number, from 1.
        stream: usize,
    },
    /// A stream ended early; its chunks go over the others.
    StreamLost {
        /// The rank.
        rank: u32,
        /// The stream's number, from 0.
        stream: usize,
        /// Why.
        error: &'a NodeError,
    },
    /// The connection broke; after a pause it is made again.
    Retrying {
        /// The rank.
        rank: u32,
        /// Why it broke.
        error: &'a NodeError,
        /// The pause.
        pause: Duration,
    },
    /// A chunk was written to the connection.
    ChunkSent {
        /// The rank.
        rank: u32,
        /// Name of the file.
        file: &'a str,
        /// Index of the chunk.
        chunk: u32,
        /// Its bytes.
        size_bytes: u64,
    },
    /// The node has verified and written a chunk.
    ChunkAcknowledged {
        /// The rank.
        rank: u32,
        /// Name of the file.
        file: &'a str,
        /// Index of the chunk.
        chunk: u32,
        /// Its bytes.
        size_bytes: u64,
    },
    /// The node has fetched bytes from another node that this machine need not send.
    Relayed {
        /// The rank.
        rank: u32,
        /// Bytes since the last such event.
        size_bytes: u64,
    },
    /// The node could not fetch everything from another node; this machine sends the rest.
    RelayFailed {
        /// The rank.
        rank: u32,
        /// The other node.
        from: &'a str,
        /// Why.
        reason: &'a str,
    },
    /// All chunks are sent; the node is about to be asked to verify and keep them.
    Committing {
        /// The rank.
        rank: u32,
    },
    /// The node holds the verified package.
    Prepared {
        /// The rank.
        rank: u32,
    },
    /// The node is about to be asked to keep the release as pending.
    PreparingRelease {
        /// The rank.
        rank: u32,
        /// Number of the release.
        release: u64,
    },
    /// The node holds the release as pending.
    ReleasePending {
        /// The rank.
        rank: u32,
        /// Number of the release.
        release: u64,
    },
    /// Every node holds the release as pending; this one is about to be asked to activate the package.
    Activating {
        /// The rank.
        rank: u32,
    },
    /// The package is current.
    Activated {
        /// The rank.
        rank: u32,
    },
    /// The push to the node failed.
    Failed {
        /// The rank.
        rank: u32,
        /// Why.
        error: &'a NodeError,
    },
}
