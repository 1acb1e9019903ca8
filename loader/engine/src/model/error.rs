//! Why a package's weights cannot be run.

/// A package holds no model that can be run.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The architecture or the layout contradicts itself.
    #[error("{what}: expected {expected}, found {found}")]
    Layout {
        /// The field or axis.
        what: String,
        /// What it should be.
        expected: String,
        /// What it is.
        found: String,
    },
    /// A tensor that the architecture needs is absent.
    #[error("tensor {tensor:?} is missing on rank {rank}")]
    Missing {
        /// Its name.
        tensor: String,
        /// The rank.
        rank: usize,
    },
    /// A tensor is not what architecture and layout say.
    #[error("tensor {tensor:?} on rank {rank}: expected {expected}, found {found}")]
    Tensor {
        /// Its name.
        tensor: String,
        /// The rank.
        rank: usize,
        /// Element type, shape or cut that is needed.
        expected: String,
        /// What the package has.
        found: String,
    },
    /// A tensor has no place in the architecture: running without it would be another model.
    #[error("tensor {tensor:?} on rank {rank} has no place in the architecture")]
    Unused {
        /// Its name.
        tensor: String,
        /// The rank.
        rank: usize,
    },
}
