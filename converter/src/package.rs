//! The weight files of packages: laid out by the plan, written in any order, hashed at the end.

use std::{
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use rayon::prelude::*;
use shardpack_containers::container::{self, TensorInfo};
use shardpack_formats::StoredAs;
use shardpack_manifests::{
    ChunkHasher, Digest, TensorShard,
    digest::{chunk_count, merge_chunks, read_chunk_value},
    manifest::FileEntry,
    signature::FileHasher,
};

/// A file or directory of the output could not be written.
#[derive(Debug, thiserror::Error)]
#[error("{}: cannot be written", .path.display())]
pub struct WriteError {
    /// The file.
    pub path: PathBuf,
    /// Why.
    pub source: io::Error,
}

/// Adds the path to an I/O error.
pub(crate) fn at<T>(path: &Path, result: io::Result<T>) -> Result<T, WriteError> {
    result.map_err(|source| WriteError { path: path.to_owned(), source })
}

/// One weight file to be written: its tensors in order.
#[derive(Clone, Debug)]
pub(crate) struct FilePlan {
    /// Name within the package.
    pub(crate) name: String,
    /// What it holds, in file order, with offsets counted from the start of the file.
    pub(crate) tensors: Vec<PlannedTensor>,
}

/// One tensor of a planned file.
#[derive(Clone, Debug)]
pub(crate) struct PlannedTensor {
    /// Name, dtype, shape, size and place.
    pub(crate) info: TensorInfo,
    /// Which part of the unsharded tensor it is.
    pub(crate) shard: TensorShard,
    /// How the file's header lists it, if not so; tensors of the same name that follow each other
    /// are one there.
    pub(crate) stored_as: Option<StoredAs>,
}

impl FilePlan {
    /// A file of these tensors; their offsets are set here.
    pub(crate) fn new(name: String, mut tensors: Vec<PlannedTensor>) -> Self {
        let mut offset = header(&tensors).len() as u64;
        for tensor in &mut tensors {
            tensor.info.offset = offset;
            offset += tensor.info.size;
        }
        Self { name, tensors }
    }

    /// Its tensors as the header lists them for other programs.
    pub(crate) fn listed(&self) -> Vec<TensorInfo> {
        listed(&self.tensors)
    }

    /// Bytes of the whole file.
    pub(crate) fn size(&self) -> u64 {
        self.tensors.last().map_or(0, |last| last.info.offset + last.info.size)
    }
}

fn header(tensors: &[PlannedTensor]) -> Vec<u8> {
    container::header(&listed(tensors))
}

fn listed(tensors: &[PlannedTensor]) -> Vec<TensorInfo> {
    merged(tensors.iter().map(|tensor| (&tensor.info, tensor.stored_as.as_ref())))
}

/// Tensors with the names that they are stored as: those of one name become one, of all rows.
pub(crate) fn merged<'a>(
    tensors: impl Iterator<Item = (&'a TensorInfo, Option<&'a StoredAs>)>,
) -> Vec<TensorInfo> {
    let mut merged: Vec<TensorInfo> = Vec::new();
    for (info, stored_as) in tensors {
        match (stored_as, merged.last_mut()) {
            (Some(stored_as), Some(last)) if last.name == stored_as.name => {
                last.shape[0] += info.shape[0];
                last.size += info.size;
            }
            (stored_as, _) => {
                let name = stored_as.map_or(&info.name, |stored_as| &stored_as.name).clone();
                let mut shape = info.shape.clone();
                if let Some(inner) = stored_as.and_then(|stored_as| stored_as.inner.as_ref()) {
                    shape.truncate(1);
                    shape.extend(inner);
                }
                merged.push(TensorInfo { name, shape, ..info.clone() });
            }
        }
    }
    merged
}

/// What is computed of a finished file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hashes {
    /// What a manifest lists.
    Listed,
    /// And what a signature vouches for.
    Signed,
}

/// A weight file of the output.
#[derive(Debug)]
pub(crate) struct OutputFile {
    path: PathBuf,
    file: File,
    size: u64,
}

impl OutputFile {
    /// Creates the file with its header, or takes up one that an earlier run has begun.
    pub(crate) fn open(directory: &Path, plan: &FilePlan) -> Result<Self, WriteError> {
        let path = directory.join(&plan.name);
        let options =
            || File::options().read(true).write(true).create(true).truncate(false).open(&path);
        let file = at(&path, options())?;
        let size = plan.size();
        // Reserves nothing on most file systems, but fails at once where a size is limited.
        at(&path, file.set_len(size).and_then(|()| file.write_all_at(&header(&plan.tensors), 0)))?;
        Ok(Self { path, file, size })
    }

    /// Writes bytes at their place.
    pub(crate) fn write(&self, bytes: &[u8], offset: u64) -> Result<(), WriteError> {
        at(&self.path, self.file.write_all_at(bytes, offset))
    }

    /// The digest of a range, read back.
    pub(crate) fn digest(&self, offset: u64, size: u64) -> io::Result<Digest> {
        const STEP: u64 = 4 << 20;
        let mut hasher = blake3::Hasher::new();
        let mut buffer = Vec::new();
        let mut done = 0;
        while done < size {
            buffer.resize(STEP.min(size - done) as usize, 0);
            self.file.read_exact_at(&mut buffer, offset + done)?;
            hasher.update(&buffer);
            done += buffer.len() as u64;
        }
        Ok(Digest(*hasher.finalize().as_bytes()))
    }

    /// Makes the file durable and hashes its chunks, on all threads of the current pool; one of them
    /// computes the SHA-256 too, where the package is to be signed.
    pub(crate) fn finish(
        &self,
        name: &str,
        hashes: Hashes,
    ) -> Result<(FileEntry, Option<[u8; 32]>), WriteError> {
        let chunks: Vec<u64> = (0..chunk_count(self.size)).collect();
        let hash = |buffer: &mut Vec<u8>, index: &u64| {
            let read = |bytes: &mut [u8], at| self.file.read_exact_at(bytes, at);
            read_chunk_value(read, (self.size, *index), buffer)
        };
        // Synced by one thread while the others hash what is still in memory.
        let (synced, chunks) = rayon::join(
            || self.file.sync_all(),
            || {
                rayon::join(
                    || (hashes == Hashes::Signed).then(|| self.sha256()).transpose(),
                    || {
                        let chunks = chunks.par_iter().map_init(Vec::new, hash);
                        chunks.collect::<io::Result<Vec<Digest>>>()
                    },
                )
            },
        );
        at(&self.path, synced)?;
        let (sha256, chunks) = chunks;
        let (sha256, chunks) = (at(&self.path, sha256)?, at(&self.path, chunks)?);
        let blake3 = merge_chunks(&chunks, self.size);
        Ok((FileEntry { name: name.to_owned(), size: self.size, blake3, chunks }, sha256))
    }

    /// Read while the chunks are hashed, from what the system still holds of the file.
    fn sha256(&self) -> io::Result<[u8; 32]> {
        const STEP: u64 = 4 << 20;
        let mut hasher = FileHasher::default();
        let mut buffer = Vec::new();
        let mut done = 0;
        while done < self.size {
            buffer.resize(STEP.min(self.size - done) as usize, 0);
            self.file.read_exact_at(&mut buffer, done)?;
            hasher.update(&buffer);
            done += buffer.len() as u64;
        }
        Ok(hasher.finish())
    }
}

/// Writes a small file, makes it durable and says what a manifest lists for it.
pub(crate) fn write_small(
    directory: &Path,
    name: &str,
    bytes: &[u8],
) -> Result<FileEntry, WriteError> {
    let path = directory.join(name);
    let mut file = at(&path, File::create(&path))?;
    at(&path, file.write_all(bytes).and_then(|()| file.sync_all()))?;
    let mut hasher = ChunkHasher::new();
    hasher.update(bytes);
    let digests = hasher.finish();
    Ok(FileEntry {
        name: name.to_owned(),
        size: digests.size_bytes,
        blake3: digests.digest,
        chunks: digests.chunks,
    })
}

/// Puts a finished file of one package into another one: as a hard link where the file system
/// has them (finished files are never changed in place), else as a copy.
pub(crate) fn share(from: &Path, to: &Path) -> Result<(), WriteError> {
    match fs::remove_file(to) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => at(to, Err(error))?,
        _ => {}
    }
    if fs::hard_link(from, to).is_ok() {
        return Ok(());
    }
    at(to, fs::copy(from, to).and_then(|_| File::open(to)?.sync_all()))
}

/// Makes a directory's entries durable.
pub(crate) fn sync_directory(path: &Path) -> Result<(), WriteError> {
    at(path, File::open(path).and_then(|directory| directory.sync_all()))
}
