//! Loading: from a package's directory to verified bytes in memory.
//!
//! Weight files are read in whole chunks by several threads with positional reads (page faults
//! through a mapping are much slower on macOS). The thread that read a chunk hashes it, compares
//! it with the manifest and scatters it, so that each tensor lands on a page boundary whatever
//! its offset in the file. What the weights mean is not known here.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

use shardpack_kernels::{Activations, Repack};
use shardpack_manifests::{
    Manifest,
    manifest::{FileEntry, MANIFEST_FILE, MAX_MANIFEST_BYTES, TensorEntry},
};
use shardpack_quantize::Platform;

use chunks::{ChunkReader, Destination, Files, SourceFile};
use pages::{PageBytes, Region};
use repack::repack_of;

mod chunks;
mod documents;
mod error;
mod memory;
mod pages;
mod repack;
mod streamed;
mod tensor;

pub use documents::verify_documents;
pub use error::{DamagedChunk, FileProblem, OpenError, tells_of_damage};
pub(crate) use memory::Memory;
pub use pages::PAGE_BYTES;
pub use shardpack_kernels::Packing;
pub use streamed::{WeightStream, WeightStreams, send_package};
pub use tensor::PackageTensor;

/// Largest file without tensors that is kept in memory; tokenizers of published models stay
/// below 40 MB. Larger ones are verified only.
const MAX_KEPT_FILE_BYTES: u64 = 256 << 20;

/// Which tensors are read, of a part of a package.
type Wanted<'a> = &'a dyn Fn(&TensorEntry) -> bool;

/// How a package is read.
#[derive(Clone, Copy, Debug)]
pub struct OpenOptions {
    /// Threads that read and hash; each has one chunk in flight.
    pub threads: usize,
    /// Weight layout in memory, where the format supports it.
    pub packing: Packing,
}

impl OpenOptions {
    /// Every tensor in its stored layout.
    #[must_use]
    pub const fn stored(threads: usize) -> Self {
        Self { threads, packing: Packing::Stored }
    }

    /// The interleaved layout of this machine's best kernels with 8-bit activations.
    #[must_use]
    pub fn fast(threads: usize) -> Self {
        let packing = Packing::best(Platform::detect(), Activations::Int8);
        Self { threads, packing }
    }
}

/// Progress of loading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenProgress {
    /// Bytes read and verified.
    pub done_bytes: u64,
    /// Bytes of all files.
    pub total_bytes: u64,
}

/// Statistics of loading.
#[derive(Clone, Debug)]
pub struct OpenReport {
    /// Bytes read and verified.
    pub bytes: u64,
    /// Time that reading and verifying took.
    pub seconds: f64,
    /// Files in the directory that the manifest does not list, names with a leading dot aside.
    pub extra_files: Vec<String>,
}

impl OpenReport {
    /// 10⁹ bytes per second.
    #[must_use]
    pub fn gigabytes_per_second(&self) -> f64 {
        self.bytes as f64 / 1e9 / self.seconds.max(1e-9)
    }
}

/// A package in memory; every byte has been compared with the manifest.
#[derive(Debug)]
pub struct Package {
    manifest: Manifest,
    tensors: BTreeMap<String, PackageTensor>,
    files: BTreeMap<String, PageBytes>,
    report: OpenReport,
}

impl Package {
    /// Reads and verifies the package in `directory`. `progress` is called by the reading
    /// threads after every chunk.
    pub fn open(
        directory: &Path,
        options: &OpenOptions,
        progress: &(dyn Fn(OpenProgress) + Sync),
    ) -> Result<Self, OpenError> {
        Self::open_part(directory, options, None, progress)
    }

    /// The same of the tensors that are `wanted` alone: the others, and files without tensors, are
    /// neither read nor verified. The manifest is whole.
    pub fn open_some(
        directory: &Path,
        options: &OpenOptions,
        wanted: &dyn Fn(&TensorEntry) -> bool,
    ) -> Result<Self, OpenError> {
        Self::open_part(directory, options, Some(wanted), &|_| {})
    }

    fn open_part(
        directory: &Path,
        options: &OpenOptions,
        wanted: Option<Wanted<'_>>,
        progress: &(dyn Fn(OpenProgress) + Sync),
    ) -> Result<Self, OpenError> {
        let begun = Instant::now();
        let manifest = read_manifest(&directory.join(MANIFEST_FILE))?;
        let extra_files = check_files(directory, &manifest)?;
        let mut handles = Vec::with_capacity(manifest.files.len());
        for entry in &manifest.files {
            let path = directory.join(&entry.name);
            let handle = File::open(&path).map_err(|source| OpenError::Read { path, source })?;
            read_past_the_cache(&handle);
            handles.push(handle);
        }
        let readers = vec![Files(&handles); options.threads.max(1)];
        Self::read(manifest, (options.packing, wanted), readers, progress, begun)
            .map(|package| package.with_extra_files(extra_files))
    }

    /// Reads the package of a manifest that has come from the same machine, straight into memory; on as
    /// many threads as there are streams, each of which asks for its chunks.
    pub fn stream(
        manifest: Manifest,
        streams: &WeightStreams,
        packing: Packing,
        progress: &(dyn Fn(OpenProgress) + Sync),
    ) -> Result<Self, OpenError> {
        Self::read(manifest, (packing, None), streams.readers(), progress, Instant::now())
    }

    fn read<R: ChunkReader + Send>(
        manifest: Manifest,
        (packing, wanted): (Packing, Option<Wanted<'_>>),
        readers: Vec<R>,
        progress: &(dyn Fn(OpenProgress) + Sync),
        begun: Instant,
    ) -> Result<Self, OpenError> {
        let mut places = manifest
            .files
            .iter()
            .map(|file| Places::allocate(&manifest, file, packing, wanted))
            .collect::<Result<Vec<_>, _>>()?;
        let sources = manifest.files.iter().zip(&mut places).map(|(entry, places)| {
            let destinations = places.destinations();
            SourceFile { entry, destinations, partly: wanted.is_some() }
        });
        let bytes = chunks::read(sources.collect(), readers, progress)?;
        places.iter_mut().for_each(Places::interleave_divided);
        let mut tensors = BTreeMap::new();
        let mut files = BTreeMap::new();
        for (entry, places) in manifest.files.iter().zip(places) {
            match places {
                Places::Tensors(held, region) => {
                    tensors.extend(held.into_iter().zip(region.share()).map(|(held, pages)| {
                        let packing = held.repack.map_or(Packing::Stored, |_| packing);
                        let tensor = PackageTensor::new(&held.entry, packing, Arc::new(pages));
                        (held.entry.name, tensor)
                    }));
                }
                Places::Whole(region) => {
                    files.extend(region.share().into_iter().map(|it| (entry.name.clone(), it)));
                }
                Places::VerifiedOnly => {}
            }
        }
        let seconds = begun.elapsed().as_secs_f64();
        let report = OpenReport { bytes, seconds, extra_files: Vec::new() };
        Ok(Self { manifest, tensors, files, report })
    }

    fn with_extra_files(mut self, extra_files: Vec<String>) -> Self {
        self.report.extra_files = extra_files;
        self
    }

    /// The package's manifest.
    #[must_use]
    pub const fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The same package with other bytes of a tensor: what it is when that tensor has been changed. The
    /// manifest still says what was read.
    ///
    /// # Panics
    /// When the package does not hold the tensor, or its size is another.
    pub fn replace(&mut self, name: &str, bytes: &[u8]) {
        let held = self.tensors.get_mut(name).expect("a tensor of this package");
        assert_eq!(held.bytes().len(), bytes.len(), "as many elements of {name}");
        let mut region = Region::zeroed(vec![bytes.len()]);
        for run in region.runs_mut() {
            run.copy_from_slice(bytes);
        }
        let pages = region.share().into_iter().next().expect("one run");
        held.replace(Arc::new(pages));
    }

    /// A tensor by its normalised name.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<&PackageTensor> {
        self.tensors.get(name)
    }

    /// The files that hold no tensors, by name.
    pub fn documents(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.files.iter().map(|(name, bytes)| (name.as_str(), bytes.bytes()))
    }

    /// The bytes of a file that holds no tensors (`tokenizer.json`, `chat_template.jinja`, …).
    #[must_use]
    pub fn file(&self, name: &str) -> Option<&[u8]> {
        self.files.get(name).map(PageBytes::bytes)
    }

    /// Statistics of loading.
    #[must_use]
    pub const fn report(&self) -> &OpenReport {
        &self.report
    }
}

/// Where the bytes of one file go.
enum Places {
    /// To its tensors, in file order; the header needs no storage.
    Tensors(Vec<Held>, Region),
    /// To one buffer.
    Whole(Region),
    /// Nowhere.
    VerifiedOnly,
}

/// A tensor of a file.
struct Held {
    entry: TensorEntry,
    /// Its interleaved layout, if it has one.
    repack: Option<Repack>,
}

impl Places {
    fn allocate(
        manifest: &Manifest,
        FileEntry { name: file, size, .. }: &FileEntry,
        packing: Packing,
        wanted: Option<Wanted<'_>>,
    ) -> Result<Self, OpenError> {
        let mut held: Vec<_> =
            manifest.tensors.iter().filter(|tensor| tensor.file == *file).cloned().collect();
        if held.is_empty() && (*size > MAX_KEPT_FILE_BYTES || wanted.is_some()) {
            return Ok(Self::VerifiedOnly);
        }
        if held.is_empty() {
            return Ok(Self::Whole(Region::zeroed(vec![*size as usize])));
        }
        if let Some(wanted) = wanted {
            held.retain(wanted);
        }
        held.sort_by_key(|tensor| (tensor.offset, tensor.size));
        // Disjoint tensors take no more memory than the file has bytes; a manifest whose tensors
        // overlap could ask for any amount.
        for pair in held.windows(2) {
            if pair[0].offset + pair[0].size > pair[1].offset {
                return Err(OpenError::Overlap {
                    file: file.clone(),
                    first: pair[0].name.clone(),
                    second: pair[1].name.clone(),
                });
            }
        }
        let region = Region::zeroed(held.iter().map(|tensor| tensor.size as usize).collect());
        let held = held.into_iter().map(|entry| {
            let repack = repack_of(manifest, &entry, packing);
            Held { entry, repack }
        });
        Ok(Self::Tensors(held.collect(), region))
    }

    /// Interleaves the rows that two chunks share.
    fn interleave_divided(&mut self) {
        let Self::Tensors(held, region) = self else { return };
        for (held, bytes) in held.iter().zip(region.runs_mut()) {
            if let Some(repack) = held.repack {
                repack::interleave_divided(repack, held.entry.offset, bytes);
            }
        }
    }

    fn destinations(&mut self) -> Vec<Destination<'_>> {
        match self {
            Self::Tensors(held, region) => held
                .iter()
                .zip(region.runs_mut())
                .map(|(held, bytes)| Destination {
                    tensor: Some(&held.entry.name),
                    offset: held.entry.offset,
                    bytes,
                    repack: held.repack,
                    first: held.entry.offset,
                })
                .collect(),
            Self::Whole(region) => region
                .runs_mut()
                .into_iter()
                .map(|bytes| Destination { tensor: None, offset: 0, bytes, repack: None, first: 0 })
                .collect(),
            Self::VerifiedOnly => Vec::new(),
        }
    }
}

/// Tells macOS not to keep what is read: weights are read once, into memory of their own, and a
/// second copy in the file cache would push out what the machine needs. Pages that the cache has
/// already are still taken from it. Linux gives its cache up to whoever needs it.
#[cfg_attr(not(target_vendor = "apple"), expect(unused_variables, reason = "for macOS"))]
fn read_past_the_cache(file: &File) {
    // A file system without it reads all the same.
    #[cfg(target_vendor = "apple")]
    let _ = rustix::fs::fcntl_nocache(file, true);
}

fn read_manifest(path: &Path) -> Result<Manifest, OpenError> {
    let read = |path: &Path| -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        File::open(path)?.take(MAX_MANIFEST_BYTES + 1).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read(path).map_err(|source| OpenError::Read { path: path.to_owned(), source })?;
    if bytes.len() as u64 > MAX_MANIFEST_BYTES {
        return Err(OpenError::ManifestTooLarge { path: path.to_owned() });
    }
    Manifest::parse(&bytes).map_err(|source| OpenError::Manifest { path: path.to_owned(), source })
}

/// Compares names and sizes with the manifest before anything is read, and returns the names of
/// files that it does not list.
fn check_files(directory: &Path, manifest: &Manifest) -> Result<Vec<String>, OpenError> {
    let mut problems = Vec::new();
    for file in &manifest.files {
        let problem = match directory.join(&file.name).metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Some(FileProblem::Missing),
            Err(source) => {
                return Err(OpenError::Read { path: directory.join(&file.name), source });
            }
            Ok(found) if !found.is_file() => Some(FileProblem::NotAFile),
            Ok(found) if found.len() != file.size => {
                Some(FileProblem::Size { expected: file.size, found: found.len() })
            }
            Ok(_) => None,
        };
        problems.extend(problem.map(|problem| (file.name.clone(), problem)));
    }
    if !problems.is_empty() {
        return Err(OpenError::Files { problems });
    }
    extra_files(directory, manifest)
        .map_err(|source| OpenError::Read { path: PathBuf::from(directory), source })
}

fn extra_files(directory: &Path, manifest: &Manifest) -> io::Result<Vec<String>> {
    let mut extra = Vec::new();
    for entry in directory.read_dir()? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let listed = name == MANIFEST_FILE || manifest.file(&name).is_some();
        if !listed && !name.starts_with('.') {
            extra.push(name);
        }
    }
    extra.sort_unstable();
    Ok(extra)
}

#[cfg(test)]
mod tests;
