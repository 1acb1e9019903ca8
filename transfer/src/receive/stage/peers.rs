//! Chunks of a package that is being received, between this node and others: given to those that have a
//! ticket, taken from those that the controller named.

use std::{
    fs::File,
    io,
    sync::atomic::{AtomicUsize, Ordering},
};

use shardpack_manifests::{
    Digest,
    digest::{chunk_range, chunk_value},
};

use super::{Stage, read_checked};
use crate::receive::store::StoreError;

/// A chunk of a package that is being received, for another node.
pub(crate) enum Staged {
    /// Its bytes, verified.
    Here(Vec<u8>),
    /// It is yet to come.
    Awaited,
    /// The package is in the store, or is being moved there.
    Elsewhere,
}

/// A fetch from another node; dropped when it ends.
pub(crate) struct Relay<'a>(&'a AtomicUsize);

impl Drop for Relay<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Stage {
    /// Notes that chunks come from another node, for as long as what is returned lives.
    pub(crate) fn relay(&self) -> Relay<'_> {
        self.relays.fetch_add(1, Ordering::SeqCst);
        Relay(&self.relays)
    }

    /// Whether chunks come from another node, so that the controller may have nothing to say.
    pub(crate) fn is_relaying(&self) -> bool {
        self.relays.load(Ordering::SeqCst) > 0
    }

    /// Reads and verifies a chunk for another node, also while the package is verified as a whole.
    pub(crate) fn read(&self, file: u32, chunk: u32) -> Result<Staged, StoreError> {
        if self.was_stored {
            return Ok(Staged::Elsewhere);
        }
        let key = self.incoming.key;
        if !self.held.lock().exists(file, chunk) {
            return Err(StoreError::NoSuchChunk { key, file, chunk });
        }
        if !self.held.lock().holds(file, chunk) {
            return Ok(Staged::Awaited);
        }
        let (path, entry) = (self.file_path(file), &self.incoming.manifest.files[file as usize]);
        match File::open(&path).and_then(|opened| read_checked(&opened, entry, chunk)) {
            Ok(Some(bytes)) => Ok(Staged::Here(bytes)),
            Ok(None) => Err(StoreError::DamagedChunk { key, file: entry.name.clone(), chunk }),
            // The package was moved into the store, or is being moved.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Staged::Elsewhere),
            Err(error) => Err(StoreError::io("read", &path)(error)),
        }
    }

    /// Verifies a chunk that exists and writes it; returns its bytes.
    pub(crate) fn write_checked(
        &self,
        file: u32,
        chunk: u32,
        bytes: &[u8],
    ) -> Result<u64, StoreError> {
        let entry = &self.incoming.manifest.files[file as usize];
        let range = chunk_range(entry.size, chunk.into());
        let expected = entry.chunks[chunk as usize];
        let is_whole = bytes.len() as u64 == range.end - range.start;
        let found =
            if is_whole { chunk_value(bytes, entry.size, chunk.into()) } else { Digest::of(bytes) };
        if !is_whole || found != expected {
            let file = entry.name.clone();
            return Err(StoreError::OtherBytes { file, chunk, expected, found });
        }
        self.write(file, chunk, range.start, bytes)?;
        Ok(range.end - range.start)
    }
}
