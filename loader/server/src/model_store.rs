//! Models that this machine stores, as the server sees them: fetched and deleted for clients that
//! ask for it. It must not know where they come from or how they are converted.

use std::sync::Arc;

/// Models on this machine beside the one that is served.
pub trait ModelStore: Send + Sync {
    /// Brings a model; returns at once if it is there. Ends early where `report` says so.
    fn pull(&self, name: &str, report: PullReport) -> Result<(), ModelStoreError>;

    /// Deletes a model.
    fn remove(&self, name: &str) -> Result<(), ModelStoreError>;
}

/// Takes what happens, from any thread, and says whether somebody still waits for it.
pub type PullReport = Arc<dyn Fn(PullStatus) -> bool + Send + Sync>;

/// What happens to a model that is being fetched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PullStatus {
    /// In a few words.
    pub status: String,
    /// Bytes of this part, and how many of them are done.
    pub bytes: Option<[u64; 2]>,
}

/// Why a model cannot be fetched or deleted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModelStoreError {
    /// There is no such model.
    #[error("{0}")]
    NotFound(String),
    /// What was asked for cannot be.
    #[error("{0}")]
    Invalid(String),
    /// It may work another time.
    #[error("{0}")]
    Failed(String),
}
