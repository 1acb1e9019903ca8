//! Removes what no release needs: packages of old releases, pushes that nobody resumes.
//!
//! A package stays while a release names it (current, pending, or one of the last before), while
//! somebody holds it, while a push fills it, and, if it was never activated, until it has lain for
//! some time: the push that brought it may still be waiting for other nodes. What goes is first moved
//! out of `packages/` by a rename, so no listed package is ever half there.

use std::{
    collections::{BTreeSet, HashMap},
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use serde::{Deserialize, Serialize};
use shardpack_manifests::manifest::MANIFEST_FILE;

use super::{
    active::ActiveModel,
    files,
    releases::RECORD_FILE,
    stage::Meter,
    store::{Store, StoreError, locked},
};
use crate::protocol::PackageKey;

/// Ends the name of a package in `staging/` that is being removed.
pub(super) const REMOVED: &str = ".removed";

/// What is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GcOptions {
    /// Releases before the current one of each model.
    pub keep: usize,
    /// How long a push that nobody resumes, or a package that was never activated, stays.
    pub older_than_seconds: u64,
    /// Whether anything is removed.
    pub dry_run: bool,
}

impl Default for GcOptions {
    /// One release to go back to, and a day for a push to be resumed.
    fn default() -> Self {
        Self { keep: 1, older_than_seconds: 24 * 60 * 60, dry_run: false }
    }
}

/// Why something goes or stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GcReason {
    /// A release names it.
    Release,
    /// A rank runs it, or it is being read.
    InUse,
    /// A push fills it.
    Push,
    /// It is not old enough.
    Young,
    /// Its release is older than the ones that are kept.
    OldRelease,
    /// It was never activated.
    NeverActivated,
    /// A push that nobody resumed.
    LeftoverPush,
    /// A removal that was interrupted.
    LeftoverRemoval,
}

/// A package, or what is left of a push.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GcEntry {
    /// The package.
    pub package: PackageKey,
    /// Why it goes or stays.
    pub reason: GcReason,
    /// Bytes of its files.
    pub size_bytes: u64,
}

/// What became of a store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GcReport {
    /// Removed, or in a dry run what would be.
    pub removed: Vec<GcEntry>,
    /// Kept.
    pub kept: Vec<GcEntry>,
    /// Bytes that this frees: files that a kept package has too free none.
    pub freed_bytes: u64,
}

/// Where something that is removed stands.
struct Candidate {
    entry: GcEntry,
    path: PathBuf,
}

impl Store {
    /// Removes what is not needed.
    pub(super) fn collect(
        self: &Arc<Self>,
        options: GcOptions,
        meter: &Meter,
    ) -> Result<GcReport, StoreError> {
        let _removal = locked(&self.removal);
        let mut report = GcReport::default();
        let before = self.forget_releases(options)?;
        let mut candidates = Vec::new();
        for package in self.packages()? {
            let size_bytes = Links::of([package.path.as_path()])?.size_bytes;
            let reason = self.judge_package(package.key, &before, options);
            let entry = GcEntry { package: package.key, reason, size_bytes };
            if matches!(reason, GcReason::OldRelease | GcReason::NeverActivated) {
                candidates.push(Candidate { entry, path: package.path });
            } else {
                report.kept.push(entry);
            }
        }
        for (package, path, is_removed) in self.staged()? {
            let size_bytes = Links::of([path.as_path()])?.size_bytes;
            let reason = if is_removed {
                GcReason::LeftoverRemoval
            } else {
                self.judge_staging(package, &path, options)
            };
            let entry = GcEntry { package, reason, size_bytes };
            if matches!(reason, GcReason::LeftoverRemoval | GcReason::LeftoverPush) {
                candidates.push(Candidate { entry, path });
            } else {
                report.kept.push(entry);
            }
        }
        let links = Links::of(candidates.iter().map(|candidate| candidate.path.as_path()))?;
        report.freed_bytes = links.freed_bytes();
        if options.dry_run {
            report.removed = candidates.into_iter().map(|candidate| candidate.entry).collect();
            return Ok(report);
        }
        for candidate in candidates {
            match self.remove(&candidate, options)? {
                None => {
                    meter.add(candidate.entry.size_bytes);
                    report.removed.push(candidate.entry);
                }
                Some(reason) => {
                    // Taken up since it was looked at; what it shares may have been counted as freed.
                    let size_bytes = candidate.entry.size_bytes;
                    report.freed_bytes = report.freed_bytes.saturating_sub(size_bytes);
                    report.kept.push(GcEntry { reason, ..candidate.entry });
                }
            }
        }
        Ok(report)
    }

    /// Drops releases beyond those that are kept from the record, before their packages go. Returns
    /// the packages of all releases before that.
    fn forget_releases(&self, options: GcOptions) -> Result<BTreeSet<PackageKey>, StoreError> {
        let _guard = locked(&self.record);
        let mut active = self.active()?;
        let releases = active.models.values().flat_map(ActiveModel::releases);
        let before = releases.map(|release| release.package).collect();
        if active.trim(options.keep) && !options.dry_run {
            active.write(&self.root().join(RECORD_FILE))?;
        }
        Ok(before)
    }

    /// Packages that a kept release names.
    fn needed(&self, keep: usize) -> Result<BTreeSet<PackageKey>, StoreError> {
        let mut active = self.active()?;
        active.trim(keep);
        let releases = active.models.values().flat_map(ActiveModel::releases);
        Ok(releases.map(|release| release.package).collect())
    }

    fn judge_package(
        &self,
        key: PackageKey,
        before: &BTreeSet<PackageKey>,
        options: GcOptions,
    ) -> GcReason {
        // What cannot be read is needed.
        if self.needed(options.keep).map_or(true, |needed| needed.contains(&key)) {
            GcReason::Release
        } else if self.is_in_use(key) {
            GcReason::InUse
        } else if self.is_busy(key) {
            GcReason::Push
        } else if before.contains(&key) {
            GcReason::OldRelease
        } else if is_younger(&self.package_path(key).join(MANIFEST_FILE), options) {
            GcReason::Young
        } else {
            GcReason::NeverActivated
        }
    }

    fn judge_staging(&self, key: PackageKey, path: &Path, options: GcOptions) -> GcReason {
        if self.is_busy(key) {
            GcReason::Push
        } else if is_younger(&path.join("journal"), options) {
            GcReason::Young
        } else {
            GcReason::LeftoverPush
        }
    }

    /// Removes something unless it has come into use meanwhile; then returns the reason.
    fn remove(
        self: &Arc<Self>,
        candidate: &Candidate,
        options: GcOptions,
    ) -> Result<Option<GcReason>, StoreError> {
        let Candidate { entry, path } = candidate;
        let key = entry.package;
        // A push of the same package waits until it is gone.
        let Ok(_claim) = self.claim(key, Duration::ZERO) else { return Ok(Some(GcReason::Push)) };
        let target = match entry.reason {
            GcReason::LeftoverPush if is_younger(&path.join("journal"), options) => {
                return Ok(Some(GcReason::Young));
            }
            GcReason::LeftoverPush | GcReason::LeftoverRemoval => path.clone(),
            _ => {
                let _record = locked(&self.record);
                let uses = locked(&self.in_use);
                if uses.contains_key(&key) {
                    return Ok(Some(GcReason::InUse));
                }
                if self.needed(options.keep)?.contains(&key) {
                    return Ok(Some(GcReason::Release));
                }
                let mut name = self.staging_path(key).into_os_string();
                name.push(REMOVED);
                let target = PathBuf::from(name);
                files::remove_directory(&target).map_err(StoreError::io("remove", &target))?;
                files::rename(path, &target).map_err(StoreError::io("move", path))?;
                let parent = path.parent().unwrap_or(path);
                files::sync_directory(parent).map_err(StoreError::io("sync", parent))?;
                target
            }
        };
        files::remove_directory(&target).map_err(StoreError::io("remove", &target))?;
        Ok(None)
    }

    /// What lies in `staging/`: its package, its path, and whether it is being removed.
    pub(super) fn staged(&self) -> Result<Vec<(PackageKey, PathBuf, bool)>, StoreError> {
        let directory = self.root().join("staging");
        let unreadable = || StoreError::io("read", &directory);
        let mut staged = Vec::new();
        for entry in fs::read_dir(&directory).map_err(unreadable())? {
            let entry = entry.map_err(unreadable())?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let (key, is_removed) = match name.strip_suffix(REMOVED) {
                Some(key) => (key, true),
                None => (name.as_str(), false),
            };
            // Whatever else lies here is not ours.
            if let Ok(key) = key.parse() {
                staged.push((key, entry.path(), is_removed));
            }
        }
        staged.sort_unstable_by_key(|(key, ..)| *key);
        Ok(staged)
    }
}

/// Whether a file was written within the time that is left to it. One that is not there was not.
fn is_younger(path: &Path, options: GcOptions) -> bool {
    let Ok(written) = fs::metadata(path).and_then(|metadata| metadata.modified()) else {
        return false;
    };
    // A clock that was set back makes a file of the future: young.
    let age = SystemTime::now().duration_since(written).unwrap_or_default();
    age < Duration::from_secs(options.older_than_seconds)
}

/// The files of some directories, by the number of names that each has.
#[derive(Default)]
pub(super) struct Links {
    /// By device and inode: size, links in the file system, links found.
    files: HashMap<(u64, u64), (u64, u64, u64)>,
    /// Bytes of all files found.
    pub(super) size_bytes: u64,
}

impl Links {
    pub(super) fn of<'a>(
        directories: impl IntoIterator<Item = &'a Path>,
    ) -> Result<Self, StoreError> {
        let mut links = Self::default();
        for directory in directories {
            links.add(directory).map_err(StoreError::io("read", directory))?;
        }
        Ok(links)
    }

    fn add(&mut self, directory: &Path) -> io::Result<()> {
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            let metadata = entry.metadata()?;
            if metadata.is_dir() {
                self.add(&entry.path())?;
                continue;
            }
            let key = (metadata.dev(), metadata.ino());
            self.files.entry(key).or_insert((metadata.len(), metadata.nlink(), 0)).2 += 1;
            self.size_bytes += metadata.len();
        }
        Ok(())
    }

    /// Bytes of files that have no name elsewhere.
    pub(super) fn freed_bytes(&self) -> u64 {
        let whole = self.files.values().filter(|(_, names, found)| names <= found);
        whole.map(|(size_bytes, ..)| size_bytes).sum()
    }

    /// Bytes of the files, each counted once however many names it has.
    pub(super) fn distinct_bytes(&self) -> u64 {
        self.files.values().map(|(size_bytes, ..)| size_bytes).sum()
    }

    /// Bytes of files that have a name elsewhere.
    pub(super) fn shared_bytes(&self) -> u64 {
        let shared = self.files.values().filter(|(_, names, found)| names > found);
        shared.map(|(size_bytes, ..)| size_bytes).sum()
    }
}
