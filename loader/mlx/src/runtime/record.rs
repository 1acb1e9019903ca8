//! `runtime.json`: what a runtime folder holds.

use std::path::Path;

use serde::{Deserialize, Serialize};

/// Name of the record within a runtime folder.
pub(crate) const NAME: &str = "runtime.json";

/// Version of the record; 2 has where the C layer comes from.
pub(crate) const FORMAT: u32 = 2;

/// Largest record: a runtime has a dozen files of a hundred bytes each.
pub(crate) const MAX_BYTES: u64 = 1 << 20;

/// What a runtime folder holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// Version of this record, 2.
    pub format: u32,
    /// Version of MLX.
    pub mlx: String,
    /// Number of the C layer's set of functions.
    pub abi: i32,
    /// The kind of machine, as [`super::Platform::name`] says.
    pub platform: String,
    /// SHA-256 of the wheel that the libraries come from, in hex.
    pub wheel_sha256: String,
    /// SHA-256 of the C layer's source, in hex.
    pub source_sha256: String,
    /// Where the C layer comes from.
    pub layer: LayerOrigin,
    /// Every other file.
    pub files: Vec<FileRecord>,
}

/// Where the C layer of a runtime comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LayerOrigin {
    /// The program held it.
    Embedded,
    /// The machine's compiler made it.
    Compiled,
}

/// One file of a runtime.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileRecord {
    /// Path within the folder, with `/`.
    pub path: String,
    /// Bytes.
    pub size: u64,
    /// BLAKE3, in hex.
    pub blake3: String,
}

impl FileRecord {
    /// Whether the path stays within the folder.
    pub(crate) fn is_inside(&self) -> bool {
        !self.path.is_empty()
            && Path::new(&self.path)
                .components()
                .all(|part| matches!(part, std::path::Component::Normal(_)))
    }
}
