//! Errors of the hub, each with what to do.

use std::{io, path::PathBuf};

use super::listing::ListingError;

/// Why a model could not be had from the hub.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// An option is not possible.
    #[error("{0}")]
    Option(String),
    /// Another thread has asked for the end.
    #[error("cancelled; what has arrived is kept")]
    Cancelled,
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
    /// The hub's list of files is not understood.
    #[error("{url}: the answer is not understood")]
    Listing {
        /// What was asked.
        url: String,
        /// Why.
        source: ListingError,
    },
    /// The server answered with an error.
    #[error("{url}: the server answered {status}{after}")]
    Status {
        /// What was asked.
        url: String,
        /// The answer.
        status: u16,
        /// How often it was tried, or what the server says.
        after: String,
    },
    /// The server asks to wait for longer than is sensible.
    #[error("{url}: rate limited: the server asks to retry after {seconds} s")]
    Busy {
        /// What was asked.
        url: String,
        /// How long.
        seconds: u64,
    },
    /// The connection failed, again and again.
    #[error("{url}: {problem} (tried {attempts} times); what has arrived is kept, run it again")]
    Network {
        /// What was asked.
        url: String,
        /// What went wrong last.
        problem: String,
        /// How often it was tried.
        attempts: u32,
    },
    /// No safe connection comes about.
    #[error(
        "{url}: {problem}; behind a proxy with its own certificate authority, set SSL_CERT_FILE to the authority's certificates"
    )]
    Tls {
        /// What was asked.
        url: String,
        /// Why.
        problem: String,
    },
    /// The server sent something else than it said it would.
    #[error("{url}: {problem}")]
    Answer {
        /// What was asked.
        url: String,
        /// What is wrong.
        problem: String,
    },
    /// The bytes are not those that the hub states.
    #[error(
        "{file}: {size} bytes arrived, but their {algorithm} is {found} and the hub states {expected}; they were thrown away, run it again"
    )]
    Content {
        /// The file.
        file: String,
        /// Its bytes.
        size: u64,
        /// `"SHA-256"`, or `"git SHA-1"`.
        algorithm: &'static str,
        /// The hub's.
        expected: String,
        /// That of what arrived.
        found: String,
    },
    /// `HF_HUB_OFFLINE` is set and the model was never downloaded.
    #[error("{name} is not in {}, and HF_HUB_OFFLINE is set, so the hub is not asked", .cache.display())]
    Offline {
        /// The model.
        name: String,
        /// Its folder in the cache.
        cache: PathBuf,
    },
    /// `HF_HUB_OFFLINE` is set and a file is missing or damaged.
    #[error(
        "{file} of {name} is missing from the cache or damaged, and HF_HUB_OFFLINE is set, so the hub is not asked"
    )]
    NotInCache {
        /// The file.
        file: String,
        /// The model.
        name: String,
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
        matches!(self, Self::Repository { .. } | Self::Content { .. })
    }
}
