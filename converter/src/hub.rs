//! Models from the hub: found by name, pinned to one commit, downloaded into the standard cache,
//! every byte checked against what the hub states before it counts. `shardpack-http` makes the
//! requests, hf-hub names the cache's folders.
//!
//! Knows the cache's layout; not what weights mean.

mod address;
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

pub use address::ModelAddress;
use api::{Api, Patience};
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
/// Why the hub is not asked.
const OFFLINE: &str = "HF_HUB_OFFLINE is set, so the hub is not asked";
const AWAY: &str = "the hub cannot be reached";

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
    /// The hub cannot be reached: what the cache has of the model is used.
    Away {
        /// Why not.
        problem: &'a str,
        /// The commit in the cache.
        commit: &'a str,
    },
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
    /// Why the hub is not asked for them, if everything is to come from the cache.
    only_cached: Option<&'static str>,
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
        self.api.commit(name, Patience::Full)
    }

    fn cached_commit(&self, name: &ModelName) -> Result<String, HubError> {
        if let Some(commit) = self.cache.reference(name) {
            return Ok(commit);
        }
        let (cache, commits) = (self.cache.folder(name), self.cache.commits(name));
        let (name, revision) = (name.to_string(), name.revision.clone());
        Err(if commits.is_empty() {
            HubError::Offline { name, cache }
        } else {
            HubError::NoReference { name, revision, cache, commits }
        })
    }

    /// How long the hub is waited for.
    fn patience(&self, name: &ModelName) -> Patience {
        if self.cache.reference(name).is_some() { Patience::Short } else { Patience::Full }
    }

    /// Says that the cache is used, as the hub is away.
    fn tell_away(&self, error: &HubError, commit: &str) {
        let problem = error.to_string();
        (self.observe)(&HubEvent::Away { problem: &problem, commit });
    }

    /// Finds the commit of a model's revision and the files that a conversion needs: of the whole
    /// repository, or of a part of it. Where the hub is away and the cache has all of them, those of the
    /// cache.
    pub fn find(&self, name: &ModelName, selection: &Selection) -> Result<Snapshot, HubError> {
        if self.offline {
            return self.find_cached(name, selection, OFFLINE);
        }
        let error = match self.find_at_hub(name, selection) {
            Err(error) if error.is_away() => error,
            found => return found,
        };
        let Ok(snapshot) = self.find_cached(name, selection, AWAY) else { return Err(error) };
        self.tell_away(&error, &snapshot.commit);
        Ok(snapshot)
    }

    fn find_at_hub(&self, name: &ModelName, selection: &Selection) -> Result<Snapshot, HubError> {
        let patience = self.patience(name);
        let commit = self.api.commit(name, patience)?;
        let files = self.api.tree(name, &commit, patience)?;
        let mut selection = selection.clone();
        if selection.subfolder.is_none() && selection.gguf.is_none() {
            selection.gguf = select::only_gguf(&files);
        }
        let index = Subfolder::path_of(selection.subfolder.as_ref(), INDEX);
        let index = files.iter().find(|file| file.path == index);
        let index = index.map(|index| self.small(name, &commit, index)).transpose()?;
        let files = select::needed(&files, &selection, index.as_deref())
            .map_err(|problem| HubError::Repository { name: name.to_string(), problem })?;
        self.cache.set_reference(name, &commit)?;
        let snapshot = Snapshot { name: name.clone(), commit, selection, files, only_cached: None };
        self.tell_found(&snapshot);
        Ok(snapshot)
    }

    fn tell_found(&self, snapshot: &Snapshot) {
        (self.observe)(&HubEvent::Found {
            commit: &snapshot.commit,
            files: snapshot.files.len(),
            bytes: snapshot.files.iter().map(|file| file.size).sum(),
        });
    }

    /// The GGUF file of a repository whose name has the tag of a quantization, such as `Q4_K_M`.
    pub fn tagged_gguf(&self, name: &ModelName, tag: &str) -> Result<String, HubError> {
        let cached = || self.cache.files(name, &self.cached_commit(name)?, "");
        let files = if self.offline {
            cached()?
        } else {
            let patience = self.patience(name);
            let commit = self.api.commit(name, patience);
            match commit.and_then(|commit| self.api.tree(name, &commit, patience)) {
                Err(error) if error.is_away() => cached().map_err(|_| error)?,
                files => files?,
            }
        };
        select::tagged_gguf(&files, tag)
            .map_err(|problem| HubError::Repository { name: name.to_string(), problem })
    }

    /// The snapshot that an earlier run or another program has left in the cache, all of it.
    fn find_cached(
        &self,
        name: &ModelName,
        selection: &Selection,
        why: &'static str,
    ) -> Result<Snapshot, HubError> {
        let commit = self.cached_commit(name)?;
        let cached = |folder: &str| self.cache.files(name, &commit, folder);
        let mut selection = selection.clone();
        let folder = selection.subfolder.as_ref().map_or("", Subfolder::as_str);
        if folder.is_empty() && selection.gguf.is_none() {
            selection.gguf = select::only_gguf(&cached("")?);
        }
        let wrong = |problem| HubError::Repository { name: name.to_string(), problem };
        let files = match &selection {
            Selection { gguf: Some(path), .. } => {
                let files = cached(path.rsplit_once('/').map_or("", |(folder, _)| folder))?;
                select::needed(&files, &selection, None).map_err(wrong)?
            }
            Selection { subfolder: Some(part), .. } => {
                let whole = cached("").unwrap_or_default();
                select::with_tokenizer(cached(part.as_str())?, whole.iter())
            }
            _ => cached("")?,
        };
        if selection.gguf.is_none() {
            let index = self.cache.snapshot(name, &commit).join(folder).join(INDEX);
            // What programs have fetched in part is not the model.
            if let Some(file) = select::missing_weights(&files, fs::read(index).ok().as_deref()) {
                return Err(HubError::NotInCache { file, name: name.to_string(), why });
            }
        }
        let only_cached = Some(why);
        let snapshot = Snapshot { name: name.clone(), commit, selection, files, only_cached };
        self.tell_found(&snapshot);
        Ok(snapshot)
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
        let arrived = || (self.observe)(&HubEvent::Arrived(file.size));
        let (name, commit) = (&snapshot.name, &snapshot.commit);
        let Some(checksum) = file.checksum() else {
            // Another program has left it there, and nothing says what it should be.
            arrived();
            return Ok(());
        };
        let _lock = self.cache.lock(name, &checksum)?;
        let blob = self.cache.blob(name, &checksum);
        let is_right = |path: &Path| -> Result<bool, HubError> {
            if self.cache.is_verified(name, path, &checksum, file.size) {
                return Ok(true);
            }
            // Somebody else's download that was never checked.
            let right = path.is_file() && is_intact(path, &checksum, file.size)?;
            if right {
                self.cache.set_verified(name, path, &checksum)?;
            }
            Ok(right)
        };
        if is_right(&blob)? {
            arrived();
        } else if let Some(placed) = self.cache.placed(name, commit, file)
            && is_right(&placed)?
        {
            arrived();
            return Ok(());
        } else if let Some(why) = snapshot.only_cached {
            let (file, name) = (file.path.clone(), name.to_string());
            return Err(HubError::NotInCache { file, name, why });
        } else {
            self.download(snapshot, file, &checksum).map_err(|error| match error {
                HubError::Write { source, .. } if cache::is_read_only(&source) => {
                    let (file, name) = (file.path.clone(), name.to_string());
                    HubError::ReadOnly { file, name, source }
                }
                error => error,
            })?;
        }
        self.cache.link(name, commit, &file.path, &checksum)
    }

    /// Downloads a file's blob.
    fn download(
        &self,
        snapshot: &Snapshot,
        file: &RepoFile,
        checksum: &Checksum,
    ) -> Result<(), HubError> {
        let blob = self.cache.blob(&snapshot.name, checksum);
        let url = self.api.file_url(&snapshot.name, &snapshot.commit, &file.path);
        let part = self.cache.part(&snapshot.name, checksum);
        let expected = Expected { name: &file.path, size: file.size, checksum };
        let observe = |event: &DownloadEvent| {
            (self.observe)(&match *event {
                DownloadEvent::Arrived(bytes) => HubEvent::Arrived(bytes),
                DownloadEvent::Lost(bytes) => HubEvent::Lost(bytes),
                DownloadEvent::Retrying(problem) => HubEvent::Retrying(problem),
            });
        };
        download(&self.api.client, &url, &expected, &part, &observe)?;
        fs::rename(&part, &blob)
            .map_err(|source| HubError::Write { path: blob.clone(), source })?;
        self.cache.set_verified(&snapshot.name, &blob, checksum)
    }

    /// A small file, in memory; it is in the cache afterwards.
    fn small(&self, name: &ModelName, commit: &str, file: &RepoFile) -> Result<Vec<u8>, HubError> {
        let (name, commit) = (name.clone(), commit.to_owned());
        let (selection, files) = (Selection::WHOLE, Vec::new());
        let snapshot = Snapshot { name, commit, selection, files, only_cached: None };
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
    /// Whether everything comes from the cache.
    #[must_use]
    pub const fn is_cached(&self) -> bool {
        self.only_cached.is_some()
    }

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
