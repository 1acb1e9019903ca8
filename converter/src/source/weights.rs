//! The weight files of a source: headers read at once, data by position and on demand. Nothing
//! is mapped, so the process's memory is what it has allocated, however large the model.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    ops::Range,
    path::Path,
};

use shardpack_containers::container::{self, TensorInfo};
use shardpack_manifests::Digest;

use super::{SourceError, local_file::LocalFile};
#[cfg(feature = "hub")]
use crate::hub::RemoteFile;

/// What the pointers begin with that Git LFS puts in the place of large files.
const LFS_POINTER: &[u8] = b"version https://git-lfs";

/// The ending of what aria2 keeps beside a file of full size while it downloads.
const UNFINISHED: &str = ".aria2";

/// One weight file.
pub(crate) struct WeightFile {
    /// Name within the source.
    pub(crate) name: String,
    /// Bytes.
    pub(crate) size: u64,
    /// When it was last changed, to tell a changed source on this machine.
    pub(crate) modified: String,
    bytes: Bytes,
}

/// Where a weight file's bytes are.
enum Bytes {
    Local(LocalFile),
    #[cfg(feature = "hub")]
    Remote(Box<RemoteFile>),
}

impl WeightFile {
    /// Opens a file of this machine.
    pub(super) fn open(folder: &Path, name: String) -> Result<Self, SourceError> {
        let path = folder.join(&name);
        let read = |source| SourceError::Read { path: path.clone(), source };
        let file = LocalFile::open(&path).map_err(read)?;
        let (size, modified) = (file.size(), format!("{:?}", file.modified()));
        let mut start = vec![0; LFS_POINTER.len().min(size as usize)];
        file.read(&mut start, 0).map_err(read)?;
        let unfinished = folder.join(format!("{name}{UNFINISHED}"));
        let problem = if start == LFS_POINTER {
            "a pointer of Git LFS, not the file itself; fetch it with git lfs pull".to_owned()
        } else if unfinished.is_file() {
            let beside = unfinished.display();
            format!("its download is unfinished: {beside} stands beside it; finish the download")
        } else {
            return Ok(Self { name, size, modified, bytes: Bytes::Local(file) });
        };
        Err(SourceError::Folder { path, problem })
    }

    /// Fills `buffer` from `offset` on.
    pub(crate) fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        match &self.bytes {
            Bytes::Local(file) => file.read(buffer, offset),
            #[cfg(feature = "hub")]
            Bytes::Remote(file) => file.read(buffer, offset),
        }
    }

    /// Whether the file is elsewhere: what is made of it counts when [`Self::verify`] says so.
    pub(crate) const fn is_remote(&self) -> bool {
        !matches!(self.bytes, Bytes::Local(_))
    }

    /// Says that a tensor will be made of these bytes; [`Self::done`] takes it back.
    pub(crate) fn expect(&self, bytes: Range<u64>) {
        match &self.bytes {
            Bytes::Local(_) => _ = bytes,
            #[cfg(feature = "hub")]
            Bytes::Remote(file) => file.expect(bytes),
        }
    }

    /// Says that a tensor was made of these bytes.
    pub(crate) fn done(&self, bytes: Range<u64>) {
        match &self.bytes {
            Bytes::Local(_) => _ = bytes,
            #[cfg(feature = "hub")]
            Bytes::Remote(file) => file.done(bytes),
        }
    }

    /// Compares the checksum of what was read of a file that is elsewhere; the values of its
    /// chunks.
    pub(crate) fn verify(&self) -> io::Result<Vec<Digest>> {
        match &self.bytes {
            Bytes::Local(_) => Ok(Vec::new()),
            #[cfg(feature = "hub")]
            Bytes::Remote(file) => file.verify(),
        }
    }

    /// The tensors of a safetensors file, and the framework that it names.
    fn header(self, folder: &Path) -> Result<(Self, Vec<TensorInfo>, Option<String>), SourceError> {
        let path = folder.join(&self.name);
        let read = |source| SourceError::Read { path: path.clone(), source };
        let mut start = vec![0; self.size.min(8) as usize];
        self.read_header(&mut start, 0).map_err(read)?;
        let mut header = vec![0; container::header_bytes(&start, self.size) as usize];
        self.read_header(&mut header, 0).map_err(read)?;
        let found = container::parse_header(&header, self.size)
            .map_err(|source| SourceError::Container { path: path.clone(), source })?;
        Ok((self, found, container::framework(&header)))
    }

    /// Fills `buffer` with bytes of the header.
    fn read_header(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        match &self.bytes {
            Bytes::Local(file) => file.read(buffer, offset),
            #[cfg(feature = "hub")]
            Bytes::Remote(file) => file.read_header(buffer, offset),
        }
    }
}

/// All weight files and where each tensor lies.
#[derive(Default)]
pub(crate) struct Weights {
    pub(crate) files: Vec<WeightFile>,
    tensors: BTreeMap<String, (usize, TensorInfo)>,
    /// The frameworks that the files name as their writers.
    frameworks: BTreeSet<Option<String>>,
    /// Which files were left aside, and why.
    left_aside: Vec<String>,
}

impl Weights {
    /// Opens the named files of `folder` and reads their headers.
    pub(crate) fn open(
        folder: &Path,
        names: impl IntoIterator<Item = String>,
    ) -> Result<Self, SourceError> {
        let mut weights = Self::default();
        for name in names {
            weights.add(folder, name)?;
        }
        Ok(weights)
    }

    /// Opens the named files of `folder` but those whose tensors are all in the ones before.
    pub(super) fn open_first(
        folder: &Path,
        names: impl IntoIterator<Item = String>,
    ) -> Result<Self, SourceError> {
        let mut weights = Self::default();
        for name in names {
            let (file, found, framework) = WeightFile::open(folder, name)?.header(folder)?;
            if weights.is_copy(&file.name, &found) {
                continue;
            }
            weights.frameworks.insert(framework);
            weights.add_tensors(file, found)?;
        }
        Ok(weights)
    }

    /// Whether all tensors of a file are there already: then it is left aside.
    pub(super) fn is_copy(&mut self, name: &str, tensors: &[TensorInfo]) -> bool {
        let first = tensors.first().and_then(|info| self.tensors.get(&info.name));
        let Some((file, _)) = first else { return false };
        let is_copy = tensors.iter().all(|info| self.tensors.contains_key(&info.name));
        if is_copy {
            let first = &self.files[*file].name;
            self.left_aside.push(format!(
                "{name} is left aside: its tensors are all in {first} and the files that belong to it"
            ));
        }
        is_copy
    }

    /// Which files were left aside, and why.
    pub(super) fn left_aside(&self) -> &[String] {
        &self.left_aside
    }

    /// Says which file was left aside, and why.
    pub(super) fn leave_aside(&mut self, note: String) {
        self.left_aside.push(note);
    }

    /// Opens one file, with other names for its tensors.
    pub(super) fn open_renamed(
        folder: &Path,
        name: String,
        rename: impl Fn(&str) -> String,
    ) -> Result<Self, SourceError> {
        let mut weights = Self::open(folder, [name])?;
        let tensors = std::mem::take(&mut weights.tensors).into_iter();
        let renamed = tensors.map(|(name, (file, info))| {
            let name = rename(&name);
            (name.clone(), (file, TensorInfo { name, ..info }))
        });
        weights.tensors = renamed.collect();
        Ok(weights)
    }

    /// Adds the files of others, whose tensors have names of their own.
    pub(super) fn append(&mut self, others: Self) {
        let first = self.files.len();
        let tensors = others.tensors.into_iter();
        self.tensors.extend(tensors.map(|(name, (file, info))| (name, (first + file, info))));
        self.files.extend(others.files);
    }

    fn add(&mut self, folder: &Path, name: String) -> Result<(), SourceError> {
        self.add_file(folder, WeightFile::open(folder, name)?)
    }

    /// Reads the headers of files that stay at the hub.
    #[cfg(feature = "hub")]
    pub(crate) fn remote(folder: &Path, files: Vec<RemoteFile>) -> Result<Self, SourceError> {
        let mut weights = Self::default();
        for file in files {
            let (name, size, modified) = (file.name().to_owned(), file.size(), file.identity());
            let bytes = Bytes::Remote(Box::new(file));
            weights.add_file(folder, WeightFile { name, size, modified, bytes })?;
        }
        Ok(weights)
    }

    fn add_file(&mut self, folder: &Path, file: WeightFile) -> Result<(), SourceError> {
        let (file, found, framework) = file.header(folder)?;
        self.frameworks.insert(framework);
        self.add_tensors(file, found)
    }

    /// Adds a file and its tensors.
    pub(super) fn add_tensors(
        &mut self,
        file: WeightFile,
        tensors: Vec<TensorInfo>,
    ) -> Result<(), SourceError> {
        let index = self.files.len();
        for info in tensors {
            if let Some((first, _)) = self.tensors.get(&info.name) {
                let first = self.files.get(*first).map_or(&file.name, |first| &first.name).clone();
                return Err(SourceError::DuplicateTensor {
                    tensor: info.name,
                    first,
                    second: file.name,
                });
            }
            self.tensors.insert(info.name.clone(), (index, info));
        }
        self.files.push(file);
        Ok(())
    }

    /// Every tensor by name.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        self.tensors.values().map(|(_, info)| info)
    }

    /// Whether every file says that tools of MLX wrote it.
    pub(super) fn are_of_mlx(&self) -> bool {
        self.frameworks.iter().eq([&Some("mlx".to_owned())])
    }

    /// The file that holds a tensor.
    pub(super) fn file_of(&self, tensor: &TensorInfo) -> &WeightFile {
        let (file, _) = self.tensors[&tensor.name];
        &self.files[file]
    }

    /// Reads a small tensor before all others. Of a file that is elsewhere its bytes come once
    /// more, and are verified, with the rest.
    pub(super) fn read_small(&self, tensor: &TensorInfo) -> io::Result<Vec<u8>> {
        let (start, mut bytes) = (tensor.offset, vec![0; tensor.size as usize]);
        match &self.file_of(tensor).bytes {
            Bytes::Local(file) => file.read(&mut bytes, start)?,
            #[cfg(feature = "hub")]
            Bytes::Remote(file) => bytes = file.range(start..start + tensor.size)?,
        }
        Ok(bytes)
    }

    /// A tensor and the index of its file.
    pub(crate) fn find(&self, name: &str) -> Option<(usize, &TensorInfo)> {
        self.tensors.get(name).map(|(file, info)| (*file, info))
    }
}
