//! Errors of the hub, each with what to do.

use std::{io, path::PathBuf};

use shardpack_http::HttpError;

use super::listing::ListingError;

/// Why a model could not be had from the hub.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// An option is not possible.
    #[error("{0}")]
    Option(String),
    /// There is no such model, or it is private.
    #[error(
        "{name}: the hub at {endpoint} has no such model, or it is private; check the name, and set HF_TOKEN if it is private"
    )]
    NotFound {
        /// The model.
        name: String,
        /// The hub.
        endpoint: String,
    },
    /// There is no such branch, tag or commit.
    #[error("{name}: the model has no revision {revision:?}")]
    Revision {
        /// The model.
        name: String,
        /// The revision.
        revision: String,
    },
    /// The author wants to be asked first.
    #[error(
        "{name} is gated: accept its terms at {page} and set HF_TOKEN to a token of that account"
    )]
    Gated {
        /// The model.
        name: String,
        /// Where to ask.
        page: String,
    },
    /// The token is not accepted.
    #[error("{name}: the hub does not accept the token; check HF_TOKEN")]
    Token {
        /// The model.
        name: String,
    },
    /// The repository is not what a conversion can use.
    #[error("{name}: {problem}")]
    Repository {
        /// The model.
        name: String,
        /// What is wrong.
        problem: String,
    },
    /// The hub could not be reached, or its answer is none.
    #[error(transparent)]
    Http(HttpError),
    /// The hub's server sends whole files only.
    #[error("{url}: the server does not support range requests, which --no-keep-source needs")]
    NoRanges {
        /// Requested URL.
        url: String,
    },
    /// The hub's list of files is not understood.
    #[error("{url}: the answer is not understood")]
    Listing {
        /// What was asked.
        url: String,
        /// Why.
        source: ListingError,
    },
    /// `HF_HUB_OFFLINE` is set and the model was never downloaded.
    #[error("{name} is not in {}, and HF_HUB_OFFLINE is set, so the hub is not asked", .cache.display())]
    Offline {
        /// The model.
        name: String,
        /// Its folder in the cache.
        cache: PathBuf,
    },
    /// A file is missing from the cache or damaged, and the hub is not asked.
    #[error("{file} of {name} is missing from the cache or damaged, and {why}")]
    NotInCache {
        /// The file.
        file: String,
        /// The model.
        name: String,
        /// Why the hub is not asked.
        why: &'static str,
    },
    /// The cache has several commits and no reference that says which of them is meant.
    #[error(
        "{name}: {} has no reference for the revision {revision:?}, only the commits {}; name one, as {name}@{}",
        .cache.display(), .commits.join(", "), .commits[0]
    )]
    NoReference {
        /// The model.
        name: String,
        /// The revision.
        revision: String,
        /// Its folder in the cache.
        cache: PathBuf,
        /// The commits: at least one.
        commits: Vec<String>,
    },
    /// A file has to be downloaded into a cache that cannot be written.
    #[error(
        "{file} of {name} is not in the cache, which cannot be written; set HF_HUB_CACHE to a folder that can be"
    )]
    ReadOnly {
        /// The file.
        file: String,
        /// The model.
        name: String,
        /// Why it cannot be written.
        source: io::Error,
    },
    /// Another process has been downloading the same file for too long.
    #[error("{}: another process has held this lock for {seconds} s", .path.display())]
    Locked {
        /// The lock file.
        path: PathBuf,
        /// How long it was waited for.
        seconds: u64,
    },
    /// The cache cannot be written or read.
    #[error("{}: cannot be written or read", .path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl HubError {
    /// Whether the model was looked at and is wrong (else it could not be had).
    #[must_use]
    pub const fn is_wrong(&self) -> bool {
        matches!(self, Self::Repository { .. } | Self::Http(HttpError::Content { .. }))
    }

    /// Whether the hub is away: not reached, or in no state to answer. What it refuses it has answered.
    pub(super) const fn is_away(&self) -> bool {
        match self {
            Self::Http(HttpError::Network { .. } | HttpError::Busy { .. }) => true,
            Self::Http(HttpError::Status { status, .. }) => *status >= 500,
            _ => false,
        }
    }

    /// Whether another thread has asked to stop.
    #[must_use]
    pub const fn is_cancelled(&self) -> bool {
        matches!(self, Self::Http(HttpError::Cancelled))
    }
}

impl From<HttpError> for HubError {
    fn from(error: HttpError) -> Self {
        match error {
            HttpError::Option(problem) => Self::Option(problem),
            HttpError::NoRanges { url } => Self::NoRanges { url },
            HttpError::Write { path, source } => Self::Write { path, source },
            error => Self::Http(error),
        }
    }
}
