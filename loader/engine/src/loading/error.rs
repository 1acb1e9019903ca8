//! Errors of loading a package.

use std::{fmt, io, ops::Range, path::PathBuf};

use shardpack_manifests::{Digest, ManifestError};

/// Entries of a list that a message spells out.
const SHOWN: usize = 4;

/// A package could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A file or the directory could not be read.
    #[error("cannot read {}", .path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The manifest is larger than any real one.
    #[error("{} is too large for a manifest", .path.display())]
    ManifestTooLarge {
        /// The manifest.
        path: PathBuf,
    },
    /// The manifest cannot be used.
    #[error("cannot use {}", .path.display())]
    Manifest {
        /// The manifest.
        path: PathBuf,
        /// Why.
        source: ManifestError,
    },
    /// The manifest did not come, or is none.
    #[error("the package's manifest did not come")]
    ManifestStream {
        /// Why.
        source: io::Error,
    },
    /// Files are not as listed.
    #[error("the package does not match its manifest: {}", shown(.problems, |(name, problem)| format!("{name} {problem}")))]
    Files {
        /// Each file and its problem.
        problems: Vec<(String, FileProblem)>,
    },
    /// Two tensors claim the same bytes.
    #[error("tensors {first:?} and {second:?} overlap in file {file:?}")]
    Overlap {
        /// The file.
        file: String,
        /// The tensor that begins first.
        first: String,
        /// The tensor that begins inside it.
        second: String,
    },
    /// The bytes of some chunks are not those of the manifest.
    #[error("the package is damaged: {}", shown(.chunks, ToString::to_string))]
    Damaged {
        /// Every such chunk, in file order.
        chunks: Vec<DamagedChunk>,
    },
    /// A chunk could not be read.
    #[error("cannot read file {file:?}, chunk {chunk} (bytes {} to {})", .bytes.start, .bytes.end)]
    Chunk {
        /// The file.
        file: String,
        /// The chunk's index.
        chunk: u64,
        /// Its bytes within the file.
        bytes: Range<u64>,
        /// Why.
        source: io::Error,
    },
}

/// Whether the text of an error, which may have come from another machine, tells of files that are not
/// as their manifest says.
#[must_use]
pub fn tells_of_damage(text: &str) -> bool {
    let told = [
        "the package is damaged: ",
        "the package does not match its manifest: ",
        "cannot read file ",
    ];
    told.iter().any(|told| text.contains(told))
}

/// The problem of a listed file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileProblem {
    /// It does not exist.
    Missing,
    /// It is a directory, a pipe or the like.
    NotAFile,
    /// It has another length.
    Size {
        /// Bytes by the manifest.
        expected: u64,
        /// Bytes on disk.
        found: u64,
    },
    /// It has other bytes.
    Changed,
}

impl fmt::Display for FileProblem {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => formatter.write_str("is missing"),
            Self::NotAFile => formatter.write_str("is not a regular file"),
            Self::Changed => formatter.write_str("was changed after the conversion"),
            Self::Size { expected, found } => {
                write!(formatter, "has {found} bytes instead of {expected}")
            }
        }
    }
}

/// A chunk whose bytes are not those of the manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DamagedChunk {
    /// The file.
    pub file: String,
    /// The chunk's index.
    pub chunk: u64,
    /// Its bytes within the file.
    pub bytes: Range<u64>,
    /// Value by the manifest.
    pub expected: Digest,
    /// Value of the bytes read.
    pub found: Digest,
    /// Tensors with bytes in it.
    pub tensors: Vec<String>,
}

impl fmt::Display for DamagedChunk {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, chunk, bytes, expected, found, tensors } = self;
        write!(
            formatter,
            "file {file:?}, chunk {chunk} (bytes {} to {}): expected {}, found {}",
            bytes.start,
            bytes.end,
            expected.short(),
            found.short()
        )?;
        if !tensors.is_empty() {
            write!(formatter, ", part of {}", shown(tensors, Clone::clone))?;
        }
        Ok(())
    }
}

fn shown<T>(items: &[T], name: impl Fn(&T) -> String) -> String {
    let text = items.iter().take(SHOWN).map(name).collect::<Vec<_>>().join(", ");
    match items.len().checked_sub(SHOWN) {
        Some(more @ 1..) => format!("{text} and {more} more"),
        _ => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damage_is_told_by_the_text_of_the_errors_that_are_of_it() {
        let source = || io::Error::other("no medium");
        let chunk =
            OpenError::Chunk { file: "m".to_owned(), chunk: 1, bytes: 0..9, source: source() };
        let files = OpenError::Files { problems: vec![("m".to_owned(), FileProblem::Missing)] };
        let damaged = OpenError::Damaged { chunks: Vec::new() };
        for error in [chunk, files, damaged] {
            assert!(tells_of_damage(&format!("rank 1: {error}")), "{error}");
        }
        let unreadable = OpenError::Read { path: PathBuf::from("/packages"), source: source() };
        assert!(!tells_of_damage(&unreadable.to_string()));
    }
}
