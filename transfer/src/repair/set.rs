//! Chunks of a set on this machine.

use std::{
    collections::HashMap,
    fs::File,
    io,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
};

use shardpack_manifests::{
    Digest, Manifest,
    digest::{chunk_range, chunk_value},
    manifest::{MANIFEST_FILE, MAX_MANIFEST_BYTES},
    verify::{read_document, read_set},
};

use crate::receive::DamagedChunk;

/// The chunks that the manifests of a set list, or why there are none.
pub(super) struct SetChunks {
    path: PathBuf,
    /// Files by value and index of a chunk.
    files: Result<HashMap<(Digest, u32), PathBuf>, String>,
}

impl SetChunks {
    pub(super) fn of(path: &Path) -> Self {
        Self { path: path.to_owned(), files: list(path) }
    }

    /// Reads a chunk and verifies it.
    pub(super) fn read(&self, chunk: &DamagedChunk) -> Result<Vec<u8>, String> {
        let files = self.files.as_ref().map_err(Clone::clone)?;
        let path = files
            .get(&(chunk.value, chunk.chunk))
            .ok_or_else(|| format!("{} does not have it", self.path.display()))?;
        let range = chunk_range(chunk.file_bytes, u64::from(chunk.chunk));
        let read = || -> io::Result<Vec<u8>> {
            let mut bytes = vec![0; (range.end - range.start) as usize];
            File::open(path)?.read_exact_at(&mut bytes, range.start)?;
            Ok(bytes)
        };
        let bytes = read().map_err(|error| format!("{}: {error}", path.display()))?;
        if chunk_value(&bytes, chunk.file_bytes, u64::from(chunk.chunk)) == chunk.value {
            Ok(bytes)
        } else {
            Err(format!("it is damaged in {} too", path.display()))
        }
    }
}

/// A package that cannot be used gives nothing.
fn list(directory: &Path) -> Result<HashMap<(Digest, u32), PathBuf>, String> {
    let (set, _) =
        read_set(directory).map_err(|problem| format!("{}: {problem}", directory.display()))?;
    let mut files = HashMap::new();
    for package in &set.packages {
        let package = directory.join(&package.directory);
        let Ok(bytes) = read_document(&package.join(MANIFEST_FILE), MAX_MANIFEST_BYTES) else {
            continue;
        };
        let Ok(manifest) = Manifest::parse(&bytes) else { continue };
        for entry in &manifest.files {
            let path = package.join(&entry.name);
            for (index, value) in (0..).zip(&entry.chunks) {
                files.insert((*value, index), path.clone());
            }
        }
    }
    Ok(files)
}
