//! What the hub states of a file's bytes: SHA-256 for large files, git's SHA-1 for the others.

use std::{
    fs::File,
    io::{self, Read},
    path::Path,
};

use sha1::Sha1;
use sha2::{Digest, Sha256};
use shardpack_formats::hex;

use super::{HubError, RepoFile};

/// Bytes of one read.
const STEP_BYTES: usize = 1 << 20;

/// The stated checksum of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Checksum {
    Sha256([u8; 32]),
    /// Of the file as git stores it: behind a header with its size.
    Git([u8; 20]),
}

/// A checksum in the making.
pub(super) enum Hasher {
    Sha256(Sha256),
    Git(Sha1),
}

impl Checksum {
    /// What the hub states of `file`.
    pub(super) fn of(file: &RepoFile) -> Self {
        match file.sha256 {
            Some(digest) => Self::Sha256(digest),
            None => Self::Git(file.oid),
        }
    }

    /// Hex digits: the name of the file's bytes in the cache.
    pub(super) fn text(&self) -> String {
        match self {
            Self::Sha256(bytes) => hex::encode(bytes),
            Self::Git(bytes) => hex::encode(bytes),
        }
    }

    /// What it is called.
    pub(super) const fn algorithm(&self) -> &'static str {
        match self {
            Self::Sha256(_) => "SHA-256",
            Self::Git(_) => "git SHA-1",
        }
    }

    /// Begins to hash a file of `size` bytes.
    pub(super) fn hasher(&self, size: u64) -> Hasher {
        match self {
            Self::Sha256(_) => Hasher::Sha256(Sha256::new()),
            Self::Git(_) => Hasher::Git(Sha1::new_with_prefix(format!("blob {size}\0"))),
        }
    }

    /// Whether the file at `path` has this size and checksum.
    pub(super) fn matches(&self, path: &Path, size: u64) -> Result<bool, HubError> {
        let read = |source| HubError::Write { path: path.to_owned(), source };
        let mut file = File::open(path).map_err(read)?;
        if file.metadata().map_err(read)?.len() != size {
            return Ok(false);
        }
        let mut hasher = self.hasher(size);
        hasher.read_from(&mut file).map_err(read)?;
        Ok(hasher.finish() == *self)
    }
}

impl Hasher {
    /// Adds bytes.
    pub(super) fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(hasher) => hasher.update(bytes),
            Self::Git(hasher) => hasher.update(bytes),
        }
    }

    /// Adds what a reader has left; returns how much it was.
    pub(super) fn read_from(&mut self, reader: &mut impl Read) -> io::Result<u64> {
        let mut buffer = vec![0; STEP_BYTES];
        let mut total = 0;
        loop {
            match reader.read(&mut buffer) {
                Ok(0) => return Ok(total),
                Ok(count) => {
                    self.update(&buffer[..count]);
                    total += count as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// The checksum of what was added.
    pub(super) fn finish(self) -> Checksum {
        match self {
            Self::Sha256(hasher) => Checksum::Sha256(hasher.finalize().into()),
            Self::Git(hasher) => Checksum::Git(hasher.finalize().into()),
        }
    }
}
