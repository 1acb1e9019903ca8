//! Package sets on the hub: uploaded as one commit, fetched whole, or one node's package of them.

use std::path::{Path, PathBuf};

use shardpack_manifests::{PackageSet, set::SET_FILE};

use super::{Hub, HubError, ModelName, RepoFile, Selection, Snapshot, Visibility};

impl Hub {
    /// Uploads a package set as one commit; returns the commit.
    pub fn upload(
        &self,
        name: &ModelName,
        set: &Path,
        visibility: Visibility,
    ) -> Result<String, HubError> {
        if self.offline {
            let problem = "HF_HUB_OFFLINE is set, so nothing is uploaded";
            return Err(HubError::Option(problem.to_owned()));
        }
        self.api.upload(name, set, visibility)
    }

    /// Whether a repository is a package set.
    pub fn is_set(&self, name: &ModelName) -> Result<bool, HubError> {
        if self.offline {
            return Ok(self.cached_set(name).is_some());
        }
        let patience = self.patience(name);
        let commit = self.api.commit(name, patience);
        match commit.and_then(|commit| self.api.tree(name, &commit, patience)) {
            Err(error) if error.is_away() && self.cached_set(name).is_some() => Ok(true),
            files => Ok(files?.iter().any(|file| file.path == SET_FILE)),
        }
    }

    /// Brings a package set into the cache, or the set's documents and one rank's package of it, and
    /// returns its folder; `None` if the repository holds something else. Packages are checked
    /// against their manifests when they are loaded, besides.
    pub fn fetch_set(
        &self,
        name: &ModelName,
        rank: Option<u32>,
    ) -> Result<Option<PathBuf>, HubError> {
        if self.offline {
            return self
                .cached_set(name)
                .map(|commit| self.cache.packages(name, &commit))
                .transpose();
        }
        match self.fetch_set_from_hub(name, rank) {
            Err(error) if error.is_away() => {
                let Some(commit) = self.cached_set(name) else { return Err(error) };
                self.tell_away(&error, &commit);
                self.cache.packages(name, &commit).map(Some)
            }
            fetched => fetched,
        }
    }

    fn fetch_set_from_hub(
        &self,
        name: &ModelName,
        rank: Option<u32>,
    ) -> Result<Option<PathBuf>, HubError> {
        let patience = self.patience(name);
        let commit = self.api.commit(name, patience)?;
        let mut files = self.api.tree(name, &commit, patience)?;
        let Some(set) = files.iter().find(|file| file.path == SET_FILE) else { return Ok(None) };
        if let Some(rank) = rank {
            let document = self.small(name, &commit, set)?;
            let directory = directory(name, &document, rank)?;
            files.retain(|file| {
                file.path.split_once('/').is_none_or(|(folder, _)| folder == directory)
            });
        }
        files.retain(is_of_set);
        self.cache.set_reference(name, &commit)?;
        let (name, selection) = (name.clone(), Selection::WHOLE);
        let snapshot = Snapshot { name, commit, selection, files, only_cached: None };
        self.tell_found(&snapshot);
        self.fetch(&snapshot)?;
        self.cache.packages(&snapshot.name, &snapshot.commit).map(Some)
    }

    /// The commit of a set in the cache.
    fn cached_set(&self, name: &ModelName) -> Option<String> {
        let commit = self.cache.reference(name)?;
        self.cache.snapshot(name, &commit).join(SET_FILE).is_file().then_some(commit)
    }
}

/// Whether a file of the repository belongs to the set; the hub's own files do not.
fn is_of_set(file: &RepoFile) -> bool {
    !file.path.starts_with(".git") && file.path != "README.md"
}

/// The folder of a rank's package.
fn directory(name: &ModelName, document: &[u8], rank: u32) -> Result<String, HubError> {
    let wrong = |problem: String| HubError::Repository { name: name.to_string(), problem };
    let set = PackageSet::parse(document).map_err(|error| wrong(format!("{SET_FILE}: {error}")))?;
    let count = set.packages.len();
    let package = set.packages.into_iter().nth(rank as usize);
    package.map(|package| package.directory).ok_or_else(|| {
        wrong(format!("no rank {rank}: the set has {count} packages, counted from 0"))
    })
}
