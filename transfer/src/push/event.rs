//! Events of a push.

use super::NodeError;

/// Hears what a push does, from the threads that do it: the push waits for its return.
pub type PushObserver<'a> = &'a (dyn Fn(&PushEvent) + Sync);

/// Something that has happened with one rank's node, or is about to where its name says so.
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
    /// Chunks go over a further stream too.
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
    /// All chunks are there; the node is about to be told to verify and keep them.
    Committing {
        /// The rank.
        rank: u32,
    },
    /// The node holds the verified package.
    Prepared {
        /// The rank.
        rank: u32,
    },
    /// The node is about to be told to make the package current.
    Activating {
        /// The rank.
        rank: u32,
    },
    /// The package is current.
    Activated {
        /// The rank.
        rank: u32,
    },
    /// The node came no further.
    Failed {
        /// The rank.
        rank: u32,
        /// Why.
        error: &'a NodeError,
    },
}
