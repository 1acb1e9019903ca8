//! The managed store: package sets by name, one folder each below one folder. A model is converted
//! into it when it is needed ([`Store::pull`]), complete or not at all, and is then found by its
//! name.
//!
//! Whoever serves models needs five things of it: [`Store::list`], [`Store::find`], [`Store::pull`]
//! with its events and its [`Cancel`](crate::Cancel), [`Store::remove`], and of each model its size and digest
//! ([`Stored`]). Where the folder is, and what the environment says of the hub, is the caller's to
//! know.
//!
//! ```no_run
//! use shardpack_converter::{Cancel, store::{PullEvent, PullObserver, PullRequest, PullSource, Store}};
//!
//! let store = Store::new("/var/lib/models".into());
//! let cancel = Cancel::default(); // a clone of it ends the pull from another thread
//! let source = PullSource::Local("Qwen3-8B".into());
//! let request = PullRequest { source, bits: Some(4), nodes: 2, served_as: None, cancel };
//! let observe: PullObserver = std::sync::Arc::new(|event: &PullEvent| eprintln!("{event:?}"));
//! let stored = store.pull(&request, &observe)?;
//! println!("{} {} {}", stored.name, stored.size_bytes, stored.digest());
//! store.remove(&stored.name)?;
//! # Ok::<(), shardpack_converter::store::StoreError>(())
//! ```

mod name;
mod pull;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeSet,
    fs, io,
    os::unix::fs::{MetadataExt, symlink},
    path::{Path, PathBuf},
    time::SystemTime,
};

use shardpack_manifests::{
    Digest, PackageSet,
    manifest::ManifestError,
    set::{MAX_SET_BYTES, SET_FILE},
};

use crate::{
    convert::{ConvertError, ConvertEvent},
    plan::PlanError,
    source::SourceError,
};
pub use pull::{BITS, PullEvent, PullObserver, PullRequest, PullSource};

/// A folder of package sets.
#[derive(Clone, Debug)]
pub struct Store {
    folder: PathBuf,
}

/// A model of the store.
#[derive(Clone, Debug)]
pub struct Stored {
    /// Its name in the store.
    pub name: String,
    /// The folder of its set.
    pub folder: PathBuf,
    /// What `set.json` says.
    pub set: PackageSet,
    /// Bytes of its files; those that packages share count once.
    pub size_bytes: u64,
    /// When it was stored.
    pub modified: SystemTime,
}

impl Stored {
    /// What tells the model from any other: its weights, architecture and texts, for any number of
    /// nodes.
    #[must_use]
    pub const fn digest(&self) -> Digest {
        self.set.ids.model
    }
}

/// Why the store could not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// No model has this name.
    #[error("{name}: no model of this name in {}", folder.display())]
    NotStored {
        /// The name.
        name: String,
        /// The store's folder.
        folder: PathBuf,
    },
    /// Bits were asked for of what is a package set already.
    #[error("{0} is converted already, so that its bits cannot be chosen")]
    Converted(String),
    /// The document of a set.
    #[error("{}", path.display())]
    Document {
        /// The document.
        path: PathBuf,
        /// What is wrong with it.
        source: ManifestError,
    },
    /// A file or folder.
    #[error("{}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The model cannot be had from the hub.
    #[cfg(feature = "hub")]
    #[error(transparent)]
    Hub(#[from] crate::hub::HubError),
    /// The source.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The conversion.
    #[error(transparent)]
    Convert(#[from] ConvertError),
}

impl From<PlanError> for StoreError {
    fn from(error: PlanError) -> Self {
        Self::Convert(ConvertError::Plan(error))
    }
}

impl StoreError {
    /// Whether what was given was looked at and is wrong (else the store could not do it).
    #[must_use]
    pub const fn is_wrong(&self) -> bool {
        match self {
            Self::NotStored { .. } | Self::Converted(_) | Self::Io { .. } => false,
            Self::Document { .. } => true,
            #[cfg(feature = "hub")]
            Self::Hub(error) => error.is_wrong(),
            Self::Source(error) => error.is_wrong(),
            Self::Convert(error) => error.is_wrong(),
        }
    }

    /// Whether it ended because the caller's [`crate::Cancel`] asked for it.
    #[must_use]
    pub const fn is_cancelled(&self) -> bool {
        match self {
            Self::Convert(ConvertError::Cancelled) => true,
            #[cfg(feature = "hub")]
            Self::Hub(error) => error.is_cancelled(),
            _ => false,
        }
    }
}

impl Store {
    /// The store below `folder`, which need not be there yet.
    #[must_use]
    pub const fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// Its folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Its models, by name.
    pub fn list(&self) -> Result<Vec<Stored>, StoreError> {
        let entries = match fs::read_dir(&self.folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => at(&self.folder, entries)?,
        };
        let mut models = Vec::new();
        for entry in entries {
            let name = at(&self.folder, entry)?.file_name();
            models.extend(name.to_str().map(|name| self.find(name)).transpose()?.flatten());
        }
        models.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(models)
    }

    /// The model of this name, if there is one.
    pub fn find(&self, name: &str) -> Result<Option<Stored>, StoreError> {
        let folder = self.folder.join(name);
        if !name::is_name(name) || !is_set(&folder) {
            return Ok(None);
        }
        let path = folder.join(SET_FILE);
        let metadata = at(&path, fs::metadata(&path))?;
        if metadata.len() > MAX_SET_BYTES {
            let problem = format!("{} bytes, at most {MAX_SET_BYTES} are read", metadata.len());
            return Err(StoreError::Io { path, source: io::Error::other(problem) });
        }
        let set = PackageSet::parse(&at(&path, fs::read(&path))?);
        let set = set.map_err(|source| StoreError::Document { path: path.clone(), source })?;
        let modified = at(&path, metadata.modified())?;
        let size_bytes = bytes_below(&folder)?;
        Ok(Some(Stored { name: name.to_owned(), folder, set, size_bytes, modified }))
    }

    /// Removes a model; returns the bytes that it had. What came from the hub stays in its cache.
    pub fn remove(&self, name: &str) -> Result<u64, StoreError> {
        let stored = self.find(name)?.ok_or_else(|| StoreError::NotStored {
            name: name.to_owned(),
            folder: self.folder.clone(),
        })?;
        // A set of the hub is a link to its folder in the cache.
        let is_link = at(&stored.folder, fs::symlink_metadata(&stored.folder))?.is_symlink();
        let removed = if is_link {
            fs::remove_file(&stored.folder)
        } else {
            fs::remove_dir_all(&stored.folder)
        };
        at(&stored.folder, removed)?;
        Ok(if is_link { 0 } else { stored.size_bytes })
    }

    /// Gives the name of `old` to `new` too, so that whoever asks for it finds the new one. The old one is
    /// then called as `request` would call it, which is returned, unless it has that name, or another set
    /// does. A run that is killed in between leaves the old name free at most.
    pub fn supersede(
        &self,
        old: &Stored,
        new: &Stored,
        request: &PullRequest,
    ) -> Result<Option<String>, StoreError> {
        let aside = request.name()?;
        let (name, kept) = (self.folder.join(&old.name), self.folder.join(&aside));
        let is_link = at(&name, fs::symlink_metadata(&name))?.is_symlink();
        let link = self.folder.join(format!(".{}.{}", old.name, std::process::id()));
        // A link that a killed run has left is of no use.
        let _ = fs::remove_file(&link);
        at(&link, symlink(&new.name, &link))?;
        if !is_link {
            if is_set(&kept) {
                at(&link, fs::remove_file(&link))?;
                return Ok(None);
            }
            at(&name, fs::rename(&name, &kept))?;
        }
        at(&link, fs::rename(&link, &name))?;
        at(&self.folder, fs::File::open(&self.folder).and_then(|folder| folder.sync_all()))?;
        Ok(Some(aside))
    }

    /// Bytes of all files, those of unfinished conversions included.
    pub fn size_bytes(&self) -> Result<u64, StoreError> {
        bytes_below(&self.folder)
    }
}

/// Whether a folder is a package set.
fn is_set(folder: &Path) -> bool {
    folder.join(SET_FILE).is_file()
}

fn at<T>(path: &Path, result: io::Result<T>) -> Result<T, StoreError> {
    result.map_err(|source| StoreError::Io { path: path.to_owned(), source })
}

/// Bytes of the files below a folder, each counted once.
fn bytes_below(folder: &Path) -> Result<u64, StoreError> {
    let (mut seen, mut bytes, mut waiting) = (BTreeSet::new(), 0, vec![folder.to_owned()]);
    while let Some(folder) = waiting.pop() {
        let entries = match fs::read_dir(&folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            entries => at(&folder, entries)?,
        };
        for entry in entries {
            let path = at(&folder, entry)?.path();
            // Files of the hub's cache are links.
            let metadata = match fs::metadata(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                metadata => at(&path, metadata)?,
            };
            if seen.insert((metadata.dev(), metadata.ino())) {
                if metadata.is_dir() {
                    waiting.push(path);
                } else {
                    bytes += metadata.len();
                }
            }
        }
    }
    Ok(bytes)
}
