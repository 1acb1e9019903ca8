//! Models from the hub: found by name, pinned to one commit, downloaded into the standard cache,
//! every byte checked against what the hub states before it counts. `shardpack-http` makes the
//! requests, hf-hub names the cache's folders.
//!
//! Knows the cache's layout; not what weights mean.

mod api;
mod cache;
mod error;
mod listing;
mod options;
mod remote;
mod select;
mod sets;
#[cfg(test)]
mod tests;
mod upload;

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use api::Api;
use cache::Cache;
pub use error::HubError;
pub use listing::{ListingError, RepoFile, parse_tree};
pub use options::{HubOptions, ModelName, Visibility};
pub(crate) use remote::{RemoteFile, WORKING_BYTES};
pub use select::Selection;
use shardpack_http::{Checksum, DownloadEvent, Expected, download};

use crate::checkpoint::{INDEX, Origin, Subfolder};

/// Files that are downloaded at a time.
const PARALLEL_FILES: usize = 4;

/// What is happening, for progress displays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HubEvent<'a> {
    /// What is needed is known.
    Found {
        /// The commit that everything comes from.
        commit: &'a str,
        /// Files that are needed.
        files: usize,
        /// Their bytes.
        bytes: u64,
    },
    /// A file begins.
    FileStarted(&'a str),
    /// Bytes of a file have arrived, or were there already and have been checked.
    Arrived(u64),
    /// A file starts over: so many bytes of it count no longer.
    Lost(u64),
    /// A request failed and is made again.
    Retrying(&'a str),
}

/// Called with every event, from any thread.
pub type HubObserver = Arc<dyn Fn(&HubEvent) + Send + Sync>;

/// A model of the hub at one commit.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Its name.
    pub name: ModelName,
    /// The commit.
    pub commit: String,
    /// What of the repository it is.
    pub selection: Selection,
    /// The files that a conversion needs.
    pub(crate) files: Vec<RepoFile>,
}

/// A connection to the hub and its cache on this machine.
pub struct Hub {
    api: Api,
    cache: Cache,
    offline: bool,
    observe: HubObserver,
}

impl Hub {
    /// Makes a connection when one is needed; nothing is sent yet.
    pub fn new(options: HubOptions, observe: HubObserver) -> Result<Self, HubError> {
        let cache = Cache::new(options.cache.clone());
        let offline = options.offline;
        let api = Api::new(options, Arc::clone(&observe))?;
        Ok(Self { api, cache, offline, observe })
    }

    /// The commit of a model's revision; without a network the one that an earlier run has found.
    pub fn commit(&self, name: &ModelName) -> Result<String, HubError> {
        if self.offline {
            return self.cached_commit(name);
        }
        self.api.commit(name)
    }

    fn cached_commit(&self, name: &ModelName) -> Result<String, HubError> {
        self.cache.reference(name).ok_or_else(|| HubError::Offline {
            name: name.to_string(),
            cache: self.cache.folder(name),
        })
    }

    /// Finds the commit of a model's revision and the files that a conversion needs: of the whole
    /// repository, or of a part of it.
    pub fn find(&self, name: &ModelName, selection: &Selection) -> Result<Snapshot, HubError> {
        if self.offline {
            return self.find_offline(name, selection);
        }
        let commit = self.api.commit(name)?;
        let files = self.api.tree(name, &commit)?;
        let index = Subfolder::path_of(selection.subfolder.as_ref(), INDEX);
        let index = files.iter().find(|file| file.path == index);
        let index = index.map(|index| self.small(name, &commit, index)).transpose()?;
        let files = select::needed(&files, selection, index.as_deref())
            .map_err(|problem| HubError::Repository { name: name.to_string(), problem })?;
        self.cache.set_reference(name, &commit)?;
        let (name, selection) = (name.clone(), selection.clone());
        let snapshot = Snapshot { name, commit, selection, files };
        (self.observe)(&HubEvent::Found {
            commit: &snapshot.commit,
            files: snapshot.files.len(),
            bytes: snapshot.files.iter().map(|file| file.size).sum(),
        });
        Ok(snapshot)
    }

    /// The snapshot that an earlier run has left in the cache.
    fn find_offline(&self, name: &ModelName, selection: &Selection) -> Result<Snapshot, HubError> {
        let commit = self.cached_commit(name)?;
        let cached = |folder: &str| self.cache.files(name, &commit, folder);
        let files = match selection {
            Selection { gguf: Some(path), .. } => {
                let files = cached(path.rsplit_once('/').map_or("", |(folder, _)| folder))?;
                select::needed(&files, selection, None)
                    .map_err(|problem| HubError::Repository { name: name.to_string(), problem })?
            }
            Selection { subfolder: Some(part), .. } => {
                let whole = cached("").unwrap_or_default();
                select::with_tokenizer(cached(part.as_str())?, whole.iter())
            }
            _ => cached("")?,
        };
        let bytes = files.iter().map(|file| file.size).sum();
        (self.observe)(&HubEvent::Found { commit: &commit, files: files.len(), bytes });
        Ok(Snapshot { name: name.clone(), commit, selection: selection.clone(), files })
    }

    /// Brings every file into the cache and returns the folder in which they stand under their
    /// own names.
    pub fn fetch(&self, snapshot: &Snapshot) -> Result<PathBuf, HubError> {
        self.fetch_files(snapshot, &snapshot.files.iter().collect::<Vec<_>>())
    }

    /// The same without the weights.
    pub fn fetch_texts(&self, snapshot: &Snapshot) -> Result<PathBuf, HubError> {
        let texts = snapshot.files.iter().filter(|file| !file.is_weights());
        self.fetch_files(snapshot, &texts.collect::<Vec<_>>())
    }

    /// The weight files of a snapshot, to be read from the hub when they are needed, by way of pieces
    /// in `spool`; without it only headers and what a plan needs are read.
    pub(crate) fn weights(
        self: &Arc<Self>,
        snapshot: &Snapshot,
        spool: Option<&Path>,
    ) -> Vec<RemoteFile> {
        let weights = snapshot.files.iter().filter(|file| file.is_weights());
        let remote = |file: &RepoFile| {
            RemoteFile::new(Arc::clone(self), snapshot, file, spool, remote::PIECE_BYTES)
        };
        weights.map(remote).collect()
    }

    fn fetch_files(&self, snapshot: &Snapshot, files: &[&RepoFile]) -> Result<PathBuf, HubError> {
        let next = AtomicUsize::new(0);
        let failure: Mutex<Option<HubError>> = Mutex::new(None);
        let failed = || failure.lock().unwrap_or_else(PoisonError::into_inner);
        let work = || {
            while failed().is_none() {
                let Some(file) = files.get(next.fetch_add(1, Ordering::Relaxed)) else { return };
                if let Err(error) = self.fetch_file(snapshot, file) {
                    failed().get_or_insert(error);
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..PARALLEL_FILES.min(files.len()) {
                scope.spawn(work);
            }
        });
        match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None => Ok(self.cache.snapshot(&snapshot.name, &snapshot.commit)),
        }
    }

    /// Brings one file into the cache, unless it is there and is what it should be.
    fn fetch_file(&self, snapshot: &Snapshot, file: &RepoFile) -> Result<(), HubError> {
        (self.observe)(&HubEvent::FileStarted(&file.path));
        let checksum = file.checksum();
        let _lock = self.cache.lock(&snapshot.name, &checksum)?;
        let blob = self.cache.blob(&snapshot.name, &checksum);
        if self.cache.is_verified(&snapshot.name, &checksum, file.size) {
            (self.observe)(&HubEvent::Arrived(file.size));
        } else if blob.is_file() && is_intact(&blob, &checksum, file.size)? {
            // Somebody else's download that was never checked.
            (self.observe)(&HubEvent::Arrived(file.size));
            self.cache.set_verified(&snapshot.name, &checksum)?;
        } else if self.offline {
            return Err(HubError::NotInCache {
                file: file.path.clone(),
                name: snapshot.name.to_string(),
            });
        } else {
            let url = self.api.file_url(&snapshot.name, &snapshot.commit, &file.path);
            let part = self.cache.part(&snapshot.name, &checksum);
            let expected = Expected { name: &file.path, size: file.size, checksum: &checksum };
            let observe = |event: &DownloadEvent| {
                (self.observe)(&match *event {
                    DownloadEvent::Arrived(bytes) => HubEvent::Arrived(bytes),
                    DownloadEvent::Lost(bytes) => HubEvent::Lost(bytes),
                    DownloadEvent::Retrying(problem) => HubEvent::Retrying(problem),
                });
            };
            download(&self.api.client, &url, &expected, &part, &observe)?;
            fs::rename(&part, &blob).map_err(|source| HubError::Write { path: blob, source })?;
            self.cache.set_verified(&snapshot.name, &checksum)?;
        }
        self.cache.link(&snapshot.name, &snapshot.commit, &file.path, &checksum)
    }

    /// A small file, in memory; it is in the cache afterwards.
    fn small(&self, name: &ModelName, commit: &str, file: &RepoFile) -> Result<Vec<u8>, HubError> {
        let (name, commit) = (name.clone(), commit.to_owned());
        let snapshot = Snapshot { name, commit, selection: Selection::WHOLE, files: vec![] };
        self.fetch_file(&snapshot, file)?;
        let path = self.cache.snapshot(&snapshot.name, &snapshot.commit).join(&file.path);
        fs::read(&path).map_err(|source| HubError::Write { path, source })
    }
}

/// Whether a blob has this size and checksum.
fn is_intact(blob: &Path, checksum: &Checksum, size: u64) -> Result<bool, HubError> {
    let intact = checksum.matches(blob, size);
    intact.map_err(|source| HubError::Write { path: blob.to_owned(), source })
}

impl Snapshot {
    /// Whether its weights can be read by ranges: in files that begin with their headers.
    #[must_use]
    pub fn is_readable_from_afar(&self) -> bool {
        self.files.iter().any(RepoFile::is_weights)
    }

    /// What manifests say of the source.
    #[must_use]
    pub fn origin(&self) -> Origin {
        // Weight files are of one folder: their names tell them apart.
        let stated = |file: &RepoFile| file.sha256.map(|digest| (file.name().to_owned(), digest));
        Origin {
            repo: Some(self.name.repo()),
            commit: Some(self.commit.clone()),
            subfolder: self.selection.subfolder.as_ref().map(ToString::to_string),
            sha256: self.files.iter().filter_map(stated).collect(),
        }
    }
}
