//! `set.json`: what one conversion wrote.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::{
    digest::Digest,
    format1::{self, FORMAT_1},
    ids::Ids,
    manifest::{
        ManifestError, Quantization, Source, check_features, check_file_name, check_version,
    },
};

/// Name of the document within the directory of a set.
pub const SET_FILE: &str = "set.json";

/// Largest `set.json` that is read: its source may list some thousand files at 150 bytes each.
pub const MAX_SET_BYTES: u64 = 16 << 20;

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

/// Version and features alone, so that a set of a later version is refused as such.
#[derive(Deserialize)]
struct Preamble {
    format: u32,
    #[serde(default)]
    requires: Vec<String>,
}

impl PackageSet {
    /// Parses and checks the bytes of a `set.json`: it has packages, and their directories are
    /// plain names that differ.
    pub fn parse(bytes: &[u8]) -> Result<Self, ManifestError> {
        let preamble: Preamble = serde_json::from_slice(bytes)?;
        check_version(preamble.format, &preamble.requires)?;
        serde_json::from_slice::<Self>(bytes)?.check()
    }

    /// [`PackageSet::parse`], for what rewrites packages: a set of format 1 is read too. Its `format`
    /// and its `requires` stay as they are.
    pub fn parse_any_format(bytes: &[u8]) -> Result<Self, ManifestError> {
        let preamble: Preamble = serde_json::from_slice(bytes)?;
        if preamble.format != FORMAT_1 {
            return Self::parse(bytes);
        }
        check_features(&preamble.requires, format1::is_feature)?;
        serde_json::from_slice::<Self>(bytes)?.check()
    }

    fn check(self) -> Result<Self, ManifestError> {
        let invalid = |what: String, problem: &str| {
            Err(ManifestError::Invalid { what, problem: problem.to_owned() })
        };
        if self.packages.is_empty() {
            return invalid("packages".to_owned(), "a set has at least one package");
        }
        let mut seen = BTreeSet::new();
        for package in &self.packages {
            let what = || format!("directory {:?}", package.directory);
            if let Err(problem) = check_file_name(&package.directory) {
                return invalid(what(), problem);
            }
            if !seen.insert(package.directory.to_lowercase()) {
                return invalid(what(), "listed twice");
            }
        }
        Ok(self)
    }
}
