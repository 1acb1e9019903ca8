//! What a run tells while it moves tensors, for progress displays.

/// What is happening.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReshardEvent {
    /// So many bytes of unsharded tensors will be moved.
    Planned {
        /// Bytes of all tensors.
        size_bytes: u64,
    },
    /// So many more bytes are in the output's files.
    Moved {
        /// Bytes since the last such event.
        size_bytes: u64,
    },
    /// All tensors are written; the files are being hashed and made durable.
    Hashing,
    /// Everything but the final name is written.
    Publishing,
}

/// Told of every event, from any thread.
pub type ReshardObserver<'a> = &'a (dyn Fn(ReshardEvent) + Sync);
