//! SHA-256 of bytes and of files.

use std::{
    fs::File,
    io::{self, Read},
    path::Path,
};

use sha2::{Digest as _, Sha256};

use super::ReadObserver;
use crate::digest::{ChunkHasher, Digest};

/// Bytes of one read.
const STEP_BYTES: usize = 1 << 20;

/// The SHA-256 of a file in the making, for whoever writes files that are to be signed.
#[derive(Default)]
pub struct FileHasher(Sha256);

impl FileHasher {
    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The digest of what was added.
    #[must_use]
    pub fn finish(self) -> [u8; 32] {
        self.0.finalize().into()
    }
}

/// The SHA-256 of `bytes`.
pub(super) fn sha256(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

/// The SHA-256 of digests, one after the other.
pub(super) fn root<'a>(digests: impl Iterator<Item = &'a [u8; 32]>) -> [u8; 32] {
    let mut hasher = Sha256::new();
    digests.for_each(|digest| hasher.update(digest));
    hasher.finalize().into()
}

/// The SHA-256 of a file.
pub(super) fn hash_file(path: &Path, observe: ReadObserver) -> io::Result<[u8; 32]> {
    let mut hasher = Sha256::new();
    read_in_steps(path, observe, |bytes| hasher.update(bytes))?;
    Ok(hasher.finalize().into())
}

/// The SHA-256 and the BLAKE3 of a file, in one read.
pub(super) fn hash_file_twice(
    path: &Path,
    observe: ReadObserver,
) -> io::Result<([u8; 32], Digest)> {
    let (mut hasher, mut chunks) = (Sha256::new(), ChunkHasher::new());
    read_in_steps(path, observe, |bytes| {
        hasher.update(bytes);
        chunks.update(bytes);
    })?;
    Ok((hasher.finalize().into(), chunks.finish().digest))
}

fn read_in_steps(
    path: &Path,
    observe: ReadObserver,
    mut take: impl FnMut(&[u8]),
) -> io::Result<()> {
    let mut file = File::open(path)?;
    let mut buffer = vec![0; STEP_BYTES];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(count) => {
                take(&buffer[..count]);
                observe(count as u64);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
