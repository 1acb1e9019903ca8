//! What can be wrong with a package, one variant each.

use std::{fmt, io};

use crate::{digest::Digest, manifest::ManifestError};

/// One thing wrong, and where.
#[derive(Debug)]
pub struct Finding {
    /// Directory of the package; absent for what concerns the whole set.
    pub package: Option<String>,
    /// What is wrong.
    pub problem: Problem,
}

impl fmt::Display for Finding {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.package {
            Some(package) => write!(formatter, "{package}: {}", self.problem),
            None => write!(formatter, "{}", self.problem),
        }
    }
}

/// One thing wrong with a package or a set.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// The package's directory is not there.
    #[error("directory missing")]
    DirectoryMissing,
    /// A file or a directory that is there cannot be read.
    #[error("{file}: cannot be read")]
    Unreadable {
        /// Its name; empty for the package's directory.
        file: String,
        /// What the system said.
        source: io::Error,
    },
    /// A manifest or a `set.json` that is longer than this program reads.
    #[error("{file}: {found} bytes, at most {limit} are read")]
    TooLarge {
        /// Its name.
        file: String,
        /// Most bytes that are read.
        limit: u64,
        /// Its length.
        found: u64,
    },
    /// A manifest or a `set.json` that cannot be used.
    #[error("{file}: cannot be used")]
    Document {
        /// Its name.
        file: String,
        /// Why.
        source: ManifestError,
    },
    /// The manifest is not the one that the set lists.
    #[error("manifest.json: digest {found}, the set lists {expected}")]
    ManifestDiffers {
        /// The set's.
        expected: Digest,
        /// The file's.
        found: Digest,
    },
    /// The package is not what the set says of this rank.
    #[error("{what}: expected {expected}, found {found}")]
    NotOfThisSet {
        /// The property that differs.
        what: &'static str,
        /// What the set, or its other packages, say.
        expected: String,
        /// What this package says.
        found: String,
    },
    /// An id is not the digest of what it names.
    #[error("{what} id: {found} does not follow from the manifest, which gives {expected}")]
    WrongId {
        /// Which id.
        what: &'static str,
        /// Computed from the manifest.
        expected: Digest,
        /// Stated by the manifest.
        found: Digest,
    },
    /// A listed file is not there.
    #[error("{file}: missing")]
    Missing {
        /// Its name.
        file: String,
    },
    /// A file that the manifest does not list.
    #[error("{file}: not listed in the manifest")]
    Extra {
        /// Its name.
        file: String,
    },
    /// A link, directory, socket or device where a file belongs.
    #[error("{file}: {kind}, expected a regular file")]
    NotRegular {
        /// Its name.
        file: String,
        /// What it is.
        kind: &'static str,
    },
    /// A file is shorter or longer than listed.
    #[error("{file}: {found} bytes, expected {expected}")]
    Length {
        /// Its name.
        file: String,
        /// The manifest's.
        expected: u64,
        /// The file's.
        found: u64,
    },
    /// A chunk's bytes are not those that were packaged.
    #[error("{file}: chunk {chunk} (bytes {start}..{end}) changed{}", touching(tensors))]
    ChunkChanged {
        /// Its file.
        file: String,
        /// Index of the chunk.
        chunk: u64,
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
        /// Tensors with bytes in the chunk whose own digest does not fit any more.
        tensors: Vec<String>,
    },
    /// A tensor's bytes do not have its digest.
    #[error("{file}: tensor {tensor:?} (bytes {start}..{end}) does not have its digest")]
    TensorChanged {
        /// Its file.
        file: String,
        /// Its name.
        tensor: String,
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
    },
}

/// Most tensors that one line names; a chunk of norms touches hundreds.
const TENSORS_SHOWN: usize = 4;

fn touching(tensors: &[String]) -> String {
    if tensors.is_empty() {
        return String::new();
    }
    let shown = tensors.iter().take(TENSORS_SHOWN).map(String::as_str).collect::<Vec<_>>();
    let more = match tensors.len().saturating_sub(TENSORS_SHOWN) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!(", part of {}{more}", shown.join(", "))
}
