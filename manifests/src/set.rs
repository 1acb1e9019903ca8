//! `set.json`: what one conversion wrote.

use serde::{Deserialize, Serialize};

use crate::{
    digest::Digest,
    ids::Ids,
    manifest::{Quantization, Source},
};

/// The document beside the packages of one conversion.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackageSet {
    /// Format version, [`crate::manifest::FORMAT`].
    pub format: u32,
    /// Features a reader must know.
    #[serde(default)]
    pub requires: Vec<String>,
    /// Name to serve the model under, if one was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// What the packages hold.
    pub ids: Ids,
    /// Where the weights came from.
    pub source: Source,
    /// How they were quantized.
    pub quantization: Quantization,
    /// One entry per rank, in rank order.
    pub packages: Vec<PackageEntry>,
}

/// One package of a set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackageEntry {
    /// Directory beside `set.json`.
    pub directory: String,
    /// BLAKE3 of the package's `manifest.json`, which vouches for every other file.
    pub manifest: Digest,
    /// Bytes of all files but the manifest.
    pub size_bytes: u64,
}
