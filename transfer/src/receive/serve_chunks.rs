//! Chunks of stored packages, one at a time: read for somebody who lacks them, and replaced where the
//! stored ones are damaged.
//!
//! A package that is served on a connection is held and its manifest kept, so that many chunks cost
//! one reading of it. Knows a package's files; does not know which chunks are damaged.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{FileExt as _, MetadataExt as _},
    path::PathBuf,
    sync::Arc,
};

use shardpack_manifests::{
    Digest, Manifest,
    digest::{chunk_range, chunk_value},
    manifest::{FileEntry, MANIFEST_FILE},
};

use super::{
    files,
    reuse::read_checked,
    store::{Store, StoreError},
    usage::InUse,
};
use crate::protocol::{ChunkPlace, PackageKey, PutOutcome};

/// A stored package of which chunks are asked for.
pub(super) struct Served {
    held: InUse,
    manifest: Manifest,
    /// Open, so that no other file gets its number.
    manifest_file: File,
}

impl Served {
    /// Holds a prepared package and reads its manifest.
    pub(super) fn open(store: &Arc<Store>, key: PackageKey) -> Result<Self, StoreError> {
        let held = store.hold(key)?;
        let path = held.package().path.join(MANIFEST_FILE);
        let manifest_file = File::open(&path).map_err(StoreError::io("open", &path))?;
        let manifest = held.package().read_manifest()?;
        let served = Self { held, manifest, manifest_file };
        if served.is_current()? { Ok(served) } else { Err(StoreError::Unknown { key }) }
    }

    pub(super) const fn key(&self) -> PackageKey {
        self.held.package().key
    }

    /// Whether the package is still the one whose manifest was read: a push may have put another
    /// in its place.
    pub(super) fn is_current(&self) -> Result<bool, StoreError> {
        let path = self.held.package().path.join(MANIFEST_FILE);
        let ours = self.manifest_file.metadata().map_err(StoreError::io("read", &path))?;
        let there = fs::symlink_metadata(&path);
        Ok(there.is_ok_and(|there| (there.dev(), there.ino()) == (ours.dev(), ours.ino())))
    }

    /// Name of a file.
    pub(super) fn name(&self, file: u32) -> &str {
        self.entry(file).map_or("", |entry| &entry.name)
    }

    /// What the manifest says of a file.
    pub(super) fn entry(&self, file: u32) -> Option<&FileEntry> {
        self.manifest.files.get(file as usize)
    }

    /// Reads and verifies a chunk.
    pub(super) fn read(&self, place: ChunkPlace) -> Result<Vec<u8>, StoreError> {
        let (entry, path) = self.find(place)?;
        let file = File::open(&path).map_err(StoreError::io("open", &path))?;
        let read = read_checked(&file, entry, place.chunk);
        read.map_err(StoreError::io("read", &path))?.ok_or_else(|| StoreError::DamagedChunk {
            key: self.key(),
            file: entry.name.clone(),
            chunk: place.chunk,
        })
    }

    /// Replaces a chunk that is damaged, in place: what is overwritten is known to be wrong, so a
    /// write that is cut off loses nothing, and no room for a whole file is needed. The file may
    /// be mapped by a rank, or be part of other packages, which have the same bytes.
    pub(super) fn replace(
        &self,
        place: ChunkPlace,
        bytes: &[u8],
    ) -> Result<PutOutcome, StoreError> {
        let (entry, path) = self.find(place)?;
        let index = u64::from(place.chunk);
        let (expected, range) =
            (entry.chunks[place.chunk as usize], chunk_range(entry.size, index));
        let is_whole = bytes.len() as u64 == range.end - range.start;
        let found =
            if is_whole { chunk_value(bytes, entry.size, index) } else { Digest::of(bytes) };
        if !is_whole || found != expected {
            let file = entry.name.clone();
            return Err(StoreError::WrongBytes { file, chunk: place.chunk, expected, found });
        }
        let (file, is_new) = open_or_make(&path).map_err(StoreError::io("open", &path))?;
        // Looked at after the file was opened: a package is replaced as a whole, so the file is
        // that of the manifest.
        if !self.is_current()? {
            return Err(StoreError::Unknown { key: self.key() });
        }
        let write = || -> io::Result<PutOutcome> {
            if file.metadata()?.len() == entry.size {
                // A chunk that the disk cannot read is as damaged as one that it reads wrongly.
                if let Ok(Some(_)) = read_checked(&file, entry, place.chunk) {
                    return Ok(PutOutcome::Intact);
                }
            } else {
                file.set_len(entry.size)?;
            }
            file.write_all_at(bytes, range.start)?;
            file.sync_all()?;
            if is_new {
                files::sync_directory(&self.held.package().path)?;
            }
            Ok(PutOutcome::Replaced)
        };
        write().map_err(StoreError::io("write", &path))
    }

    fn find(&self, place: ChunkPlace) -> Result<(&FileEntry, PathBuf), StoreError> {
        let unknown =
            || StoreError::NoSuchChunk { key: self.key(), file: place.file, chunk: place.chunk };
        let entry = self.manifest.files.get(place.file as usize).ok_or_else(unknown)?;
        entry.chunks.get(place.chunk as usize).ok_or_else(unknown)?;
        Ok((entry, self.held.package().path.join(&entry.name)))
    }
}

/// Opens a file of a package for reading and writing; one that is missing is made. Anything else
/// in its place is left alone.
fn open_or_make(path: &std::path::Path) -> io::Result<(File, bool)> {
    let options = || {
        let mut options = OpenOptions::new();
        options.read(true).write(true);
        options
    };
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_file() => Ok((options().open(path)?, false)),
        Ok(_) => {
            let problem = "a link, directory or device is in the place of the file; push again";
            Err(io::Error::other(problem))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Ok((options().create_new(true).open(path)?, true))
        }
        Err(error) => Err(error),
    }
}
