//! Writing packages: files front to back, hashed as they are written, one directory for all
//! until everything is complete.

use std::{
    fs::{self, File},
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
};

use shardpack_formats::container::{self, TensorInfo};
use shardpack_manifests::{
    ChunkHasher, Cut, Digest,
    manifest::{FileEntry, TensorEntry},
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

/// One weight file to be written: its tensors in order. Offsets are filled in by the writer.
#[derive(Clone, Debug)]
pub(crate) struct FilePlan {
    /// Name within the package.
    pub(crate) name: String,
    /// What it holds, in file order.
    pub(crate) tensors: Vec<PlannedTensor>,
}

/// One tensor of a planned file.
#[derive(Clone, Debug)]
pub(crate) struct PlannedTensor {
    /// Name, dtype, shape and size as stored here.
    pub(crate) info: TensorInfo,
    /// Which part of the uncut tensor it is.
    pub(crate) cut: Cut,
}

/// A weight file that is being written.
pub(crate) struct FileWriter {
    path: PathBuf,
    plan: FilePlan,
    out: BufWriter<File>,
    hasher: ChunkHasher,
    offset: u64,
    entries: Vec<TensorEntry>,
}

impl FileWriter {
    /// Creates the file in `directory` and writes its header.
    pub(crate) fn create(directory: &Path, plan: FilePlan) -> Result<Self, WriteError> {
        let path = directory.join(&plan.name);
        let infos: Vec<TensorInfo> =
            plan.tensors.iter().map(|tensor| tensor.info.clone()).collect();
        let header = container::header(&infos);
        // Pages of 1 MiB keep system calls rare beside the hashing of the same bytes.
        let out = BufWriter::with_capacity(1 << 20, at(&path, File::create_new(&path))?);
        let mut writer =
            Self { path, plan, out, hasher: ChunkHasher::new(), offset: 0, entries: Vec::new() };
        writer.write(&[&header])?;
        Ok(writer)
    }

    /// Name of the next tensor of the plan, `None` when all are written.
    pub(crate) fn next(&self) -> Option<&PlannedTensor> {
        self.plan.tensors.get(self.entries.len())
    }

    /// Writes the next tensor, given in pieces.
    ///
    /// # Panics
    /// When no tensor is left or the pieces are not as long as planned: the writer asserts what
    /// the reader of the manifest checks.
    pub(crate) fn tensor(&mut self, pieces: &[&[u8]]) -> Result<(), WriteError> {
        let planned = self.plan.tensors[self.entries.len()].clone();
        let offset = self.offset;
        let mut hasher = blake3::Hasher::new();
        for piece in pieces {
            hasher.update(piece);
        }
        self.write(pieces)?;
        assert_eq!(
            self.offset - offset,
            planned.info.size,
            "{} is as long as planned",
            planned.info.name
        );
        self.entries.push(TensorEntry {
            name: planned.info.name,
            dtype: planned.info.dtype,
            shape: planned.info.shape,
            file: self.plan.name.clone(),
            offset,
            size: planned.info.size,
            cut: planned.cut,
            blake3: Digest(*hasher.finalize().as_bytes()),
        });
        Ok(())
    }

    fn write(&mut self, pieces: &[&[u8]]) -> Result<(), WriteError> {
        for piece in pieces {
            at(&self.path, self.out.write_all(piece))?;
            self.hasher.update(piece);
            self.offset += piece.len() as u64;
        }
        Ok(())
    }

    /// Makes the file durable and says what it holds.
    pub(crate) fn finish(self) -> Result<(FileEntry, Vec<TensorEntry>), WriteError> {
        assert!(self.next().is_none(), "every planned tensor is written");
        let file = self.out.into_inner().map_err(io::IntoInnerError::into_error);
        at(&self.path, file.and_then(|file| file.sync_all()))?;
        let digests = self.hasher.finish();
        let entry = FileEntry {
            name: self.plan.name,
            size: digests.size_bytes,
            blake3: digests.digest,
            chunks: digests.chunks,
        };
        Ok((entry, self.entries))
    }
}

/// Writes a small file, makes it durable and says what a manifest lists for it.
pub(crate) fn write_small(
    directory: &Path,
    name: &str,
    bytes: &[u8],
) -> Result<FileEntry, WriteError> {
    let path = directory.join(name);
    let mut file = at(&path, File::create_new(&path))?;
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
    if fs::hard_link(from, to).is_ok() {
        return Ok(());
    }
    at(to, fs::copy(from, to).and_then(|_| File::open(to)?.sync_all()))
}

/// Makes a directory's entries durable.
pub(crate) fn sync_directory(path: &Path) -> Result<(), WriteError> {
    at(path, File::open(path).and_then(|directory| directory.sync_all()))
}
