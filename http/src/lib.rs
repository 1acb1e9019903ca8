//! HTTP client for other people's servers: the Hugging Face hub and Python package indexes. Deadlines
//! on everything, retries, redirects that never take a token to another host, proxies, certificate
//! authorities, and downloads that resume and are checked before they count.
//!
//! Knows HTTP and checksums; not what a server is for, nor what files mean. The environment is read
//! by the callers.
#![forbid(unsafe_code)]

mod address;
mod checksum;
mod client;
mod download;
mod error;
mod follow;
mod options;

pub use address::{is_loopback, join, percent_encode, without_password};
pub use checksum::{Checksum, Hasher};
pub use client::{Answer, Client, Method, Payload, Request};
pub use download::{DownloadEvent, Expected, download, read_range};
pub use error::{Failed, HttpError};
pub use options::{Bearer, Cleartext, HttpOptions, Retries};
