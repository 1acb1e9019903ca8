//! Events of a reshard or an export, for progress displays.

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

/// Called with every event, from any thread.
pub type ReshardObserver<'a> = &'a (dyn Fn(ReshardEvent) + Sync);
