//! Finds tensors and chunks in a node's packages that an offered package has too.

use std::{
    collections::HashMap,
    fs::File,
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use shardpack_manifests::{
    Digest,
    digest::{chunk_range, chunk_value},
    manifest::FileEntry,
};

use super::store::{Store, StoreError};

/// What other packages of the node claim to hold. Claims only: bytes are checked as they are
/// taken.
#[derive(Default)]
pub(super) struct Donors {
    /// By digest and size of a file.
    files: HashMap<(Digest, u64), PathBuf>,
    /// By value and index of a chunk, which fixes its offset: path, and size of its file.
    chunks: HashMap<(Digest, u32), (PathBuf, u64)>,
}

impl Donors {
    pub(super) fn of(store: &Store) -> Result<Self, StoreError> {
        let mut donors = Self::default();
        for package in store.packages()? {
            // A package that cannot be used gives nothing; it is not this push's business.
            let Ok(manifest) = package.read_manifest() else { continue };
            for file in manifest.files {
                let path = package.path.join(&file.name);
                for (index, value) in file.chunks.iter().enumerate() {
                    donors.chunks.insert((*value, index as u32), (path.clone(), file.size));
                }
                donors.files.insert((file.blake3, file.size), path);
            }
        }
        Ok(donors)
    }

    /// A file that claims to be the same as `entry`.
    pub(super) fn file(&self, entry: &FileEntry) -> Option<&Path> {
        self.files.get(&(entry.blake3, entry.size)).map(PathBuf::as_path)
    }

    /// Whether some file claims to hold this chunk.
    pub(super) fn claims_chunk(&self, entry: &FileEntry, chunk: u32) -> bool {
        self.find(entry, chunk).is_some()
    }

    /// The file that holds a chunk, and the chunk's bytes, read and checked; `None` when nobody holds
    /// them.
    pub(super) fn read_chunk(&self, entry: &FileEntry, chunk: u32) -> Option<(File, Vec<u8>)> {
        let (path, _) = self.find(entry, chunk)?;
        let file = File::open(path).ok()?;
        let bytes = read_checked(&file, entry, chunk).ok().flatten()?;
        Some((file, bytes))
    }

    fn find(&self, entry: &FileEntry, chunk: u32) -> Option<&(PathBuf, u64)> {
        let value = *entry.chunks.get(chunk as usize)?;
        let donor = self.chunks.get(&(value, chunk))?;
        // The value fixes the chunk's bytes, but a file of one chunk has another kind of value
        // than the first chunk of several; equal lengths exclude nothing else.
        let (range, theirs) =
            (chunk_range(entry.size, u64::from(chunk)), chunk_range(donor.1, u64::from(chunk)));
        (range == theirs).then_some(donor)
    }
}

/// Whether the file at `path` holds exactly the bytes of `entry`. `progress` is called with bytes
/// read.
pub(super) fn is_intact(path: &Path, entry: &FileEntry, progress: &dyn Fn(u64)) -> bool {
    let check = || -> io::Result<bool> {
        if path.symlink_metadata()?.len() != entry.size {
            return Ok(false);
        }
        let file = File::open(path)?;
        for chunk in 0..entry.chunks.len() as u32 {
            let Some(bytes) = read_checked(&file, entry, chunk)? else { return Ok(false) };
            progress(bytes.len() as u64);
        }
        Ok(true)
    };
    check().unwrap_or(false)
}

/// Reads a chunk of `entry` from `file`; `None` when its value differs.
pub(super) fn read_checked(
    file: &File,
    entry: &FileEntry,
    chunk: u32,
) -> io::Result<Option<Vec<u8>>> {
    let range = chunk_range(entry.size, u64::from(chunk));
    let mut bytes = vec![0; (range.end - range.start) as usize];
    file.read_exact_at(&mut bytes, range.start)?;
    let value = chunk_value(&bytes, entry.size, u64::from(chunk));
    Ok((value == entry.chunks[chunk as usize]).then_some(bytes))
}
