//! Why a request gave no usable answer.

use std::{io, path::PathBuf};

/// Why something could not be had from a server.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// An option cannot be used.
    #[error("{0}")]
    Option(String),
    /// Another thread has asked to stop.
    #[error("cancelled; what has arrived is kept")]
    Cancelled,
    /// The server answered with an error.
    #[error("{url}: the server answered {status}{}", if .message.is_empty() { String::new() } else { format!(": {:.200}", .message) })]
    Status {
        /// Requested URL.
        url: String,
        /// Status code.
        status: u16,
        /// The hub's `X-Error-Code` header, if any.
        code: String,
        /// The hub's `X-Error-Message` header, if any.
        message: String,
    },
    /// The server asks to wait for longer than is sensible.
    #[error("{url}: rate limited: the server asks to retry after {seconds} s")]
    Busy {
        /// Requested URL.
        url: String,
        /// What the server asks for.
        seconds: u64,
    },
    /// The connection failed, again and again.
    #[error("{url}: {problem} (tried {attempts} times); what has arrived is kept, run it again")]
    Network {
        /// Requested URL.
        url: String,
        /// What went wrong last.
        problem: String,
        /// Number of requests that failed.
        attempts: u32,
    },
    /// No TLS connection comes about.
    #[error(
        "{url}: TLS: {problem}; behind a proxy with its own certificate authority, set SSL_CERT_FILE to the authority's certificates"
    )]
    Tls {
        /// Requested URL.
        url: String,
        /// Why.
        problem: String,
    },
    /// The server's answer is not one to the request.
    #[error("{url}: {problem}")]
    Answer {
        /// Requested URL.
        url: String,
        /// What is wrong.
        problem: String,
    },
    /// The server's file has another length than it should have. What arrived of it is removed.
    #[error("{url}: {problem}")]
    Length {
        /// Requested URL.
        url: String,
        /// What is wrong.
        problem: String,
    },
    /// The server sends whole files only.
    #[error("{url}: the server does not support range requests")]
    NoRanges {
        /// Requested URL.
        url: String,
    },
    /// The bytes are not the expected ones. They are removed.
    #[error(
        "{file}: {size} bytes arrived, but their {algorithm} is {found}, expected {expected}; they were thrown away, run it again"
    )]
    Content {
        /// The file's name.
        file: String,
        /// Its bytes.
        size: u64,
        /// `"SHA-256"`, or `"git SHA-1"`.
        algorithm: &'static str,
        /// The digest it should have.
        expected: String,
        /// The digest it has.
        found: String,
    },
    /// A file cannot be written or read.
    #[error("{}: cannot be written or read", .path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Why one attempt of a request failed.
pub enum Failed {
    /// It may be repeated.
    Again {
        /// What went wrong.
        problem: String,
        /// `Retry-After`, in seconds.
        after: Option<u64>,
        /// Whether it seldom passes: it is tried half as often.
        is_lasting: bool,
    },
    /// It may not.
    Final(HttpError),
}

impl Failed {
    /// A failure that may pass.
    pub fn again(problem: impl Into<String>) -> Self {
        Self::Again { problem: problem.into(), after: None, is_lasting: false }
    }

    /// An answer that is none to the request.
    #[must_use]
    pub fn answer(url: &str, problem: String) -> Self {
        Self::Final(HttpError::Answer { url: url.to_owned(), problem })
    }
}
