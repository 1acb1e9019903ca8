//! Checks a store: every chunk of every package, the record of releases, and what was left behind.
//! Names the chunks that are damaged, for whoever can replace them; does not know how that is done.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    path::{Path, PathBuf},
    sync::Arc,
};

use serde::{Deserialize, Serialize};
use shardpack_identity::Credentials;
use shardpack_manifests::{
    Digest, Manifest,
    digest::chunk_range,
    manifest::FileEntry,
    verify::{Problem, verify_package},
};

use super::{
    active::{Active, ActiveModel, StoredRelease, model_name},
    files,
    releases::RECORD_FILE,
    reuse::read_checked,
    scrub::SCRUB_FILE,
    stage::{Meter, VERIFY},
    store::{PackageDir, Store, StoreError, locked},
};
use crate::protocol::PackageKey;

/// Most findings of a package that are told: a disk that fails may have as many as chunks.
const MAX_FINDINGS: usize = 20;

/// Most damaged chunks that one answer lists, at about 250 bytes each: 8 GB of them. Who repairs these
/// and asks again is told the next.
const MAX_DAMAGED: usize = 2000;

/// Names in a store's directory; `identity` is the node's own.
const KNOWN_NAMES: [&str; 6] = ["lock", RECORD_FILE, "packages", "staging", "identity", SCRUB_FILE];

/// Starts the name of a record that was set aside.
const SET_ASIDE: &str = "active.json.damaged";

/// How a check goes about it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FsckOptions {
    /// Whether a damaged record of releases is made anew from the packages.
    #[serde(default)]
    pub rebuild: bool,
    /// Checks this package alone, and not the record of releases.
    #[serde(default)]
    pub package: Option<PackageKey>,
}

/// A chunk of a stored package that is not as its manifest says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DamagedChunk {
    /// Name of its file.
    pub name: String,
    /// Index of the file in the manifest.
    pub file: u32,
    /// Index of the chunk.
    pub chunk: u32,
    /// Bytes of the file, which with the index fix the chunk's range and kind.
    pub file_bytes: u64,
    /// Value that the chunk should have.
    pub value: Digest,
}

impl DamagedChunk {
    /// Bytes of the chunk.
    #[must_use]
    pub const fn size_bytes(&self) -> u64 {
        let range = chunk_range(self.file_bytes, self.chunk as u64);
        range.end - range.start
    }
}

/// A package that was read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckedPackage {
    /// The package.
    pub package: PackageKey,
    /// The model, if the manifest can be read.
    pub model: Option<String>,
    /// Bytes that were read and hashed.
    pub read_bytes: u64,
    /// What is wrong, at most twenty.
    pub findings: Vec<String>,
    /// Chunks that are damaged or missing. Absent from nodes of earlier versions, as all below.
    #[serde(default)]
    pub damaged: Vec<DamagedChunk>,
    /// How many more of them there are.
    #[serde(default)]
    pub more_damaged: u64,
    /// How many findings concern no chunk that could be replaced.
    #[serde(default)]
    pub other_findings: u64,
}

/// What a check found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FsckReport {
    /// All packages.
    pub packages: Vec<CheckedPackage>,
    /// What is wrong with the record of releases.
    pub record: Vec<String>,
    /// What was left behind by something that was interrupted, or put there by somebody else. No
    /// damage: `gc` removes the former.
    pub leftovers: Vec<String>,
    /// What became of a damaged record.
    pub rebuilt: Option<String>,
}

impl FsckReport {
    /// Whether nothing is damaged.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.record.is_empty() && self.packages.iter().all(|package| package.findings.is_empty())
    }
}

impl Store {
    /// Checks everything. Signatures are verified as a member of the cluster with `credentials`.
    pub(super) fn check(
        self: &Arc<Self>,
        options: FsckOptions,
        credentials: Option<&Credentials>,
        meter: &Meter,
    ) -> Result<FsckReport, StoreError> {
        let mut report = FsckReport::default();
        if let Some(key) = options.package {
            let package = self.package(key)?;
            report.packages.extend(self.check_package(&package, MAX_DAMAGED, meter));
            return Ok(report);
        }
        match self.active() {
            Ok(active) => self.check_record(&active, credentials, &mut report.record),
            Err(StoreError::Record { path, problem }) if options.rebuild => {
                report.rebuilt = Some(self.rebuild_record(&path, &problem)?);
            }
            Err(error) => report.record.push(error.to_string()),
        }
        let mut room = MAX_DAMAGED;
        for package in self.packages()? {
            if let Some(checked) = self.check_package(&package, room, meter) {
                room -= checked.damaged.len();
                report.packages.push(checked);
            }
        }
        report.leftovers = self.leftovers()?;
        Ok(report)
    }

    /// Reads all of a package and lists at most `room` damaged chunks; nothing if it was removed
    /// meanwhile.
    pub(super) fn check_package(
        self: &Arc<Self>,
        package: &PackageDir,
        room: usize,
        meter: &Meter,
    ) -> Option<CheckedPackage> {
        let held = self.hold(package.key).ok()?;
        let manifest = held.package().read_manifest().ok();
        let found = verify_package(&package.path, None, VERIFY, &|event| meter.verified(event));
        let mut findings: Vec<String> =
            found.findings.iter().take(MAX_FINDINGS).map(ToString::to_string).collect();
        if let Some(more @ 1..) = found.findings.len().checked_sub(MAX_FINDINGS) {
            findings.push(format!("and {more} more"));
        }
        let (mut damaged, mut other_findings) = (Vec::new(), 0);
        for finding in &found.findings {
            let named = manifest
                .as_ref()
                .and_then(|manifest| damaged_chunks(&package.path, manifest, &finding.problem));
            match named {
                Some(chunks) => damaged.extend(chunks),
                None => other_findings += 1,
            }
        }
        let more_damaged = damaged.len().saturating_sub(room) as u64;
        damaged.truncate(room);
        Some(CheckedPackage {
            package: package.key,
            model: manifest.as_ref().map(model_name),
            read_bytes: found.read_bytes,
            findings,
            damaged,
            more_damaged,
            other_findings,
        })
    }

    /// Every release needs its package, its manifest and its signature.
    fn check_record(
        &self,
        active: &Active,
        credentials: Option<&Credentials>,
        problems: &mut Vec<String>,
    ) {
        for (name, model) in &active.models {
            for stored in model.releases() {
                let release = stored.release;
                if let Err(error) = self.check_release(stored) {
                    problems.push(format!("release {release} of {name}: {error}"));
                }
            }
            for stored in model.current.iter().chain(&model.pending) {
                let (Some(signed), Some(credentials)) = (&stored.record, credentials) else {
                    continue;
                };
                // The certificate may have ended since.
                if let Err(error) = signed.verify(credentials, signed.release().time) {
                    let release = stored.release;
                    problems.push(format!("release {release} of {name}: {error}; push again"));
                }
            }
        }
    }

    fn check_release(&self, stored: &StoredRelease) -> Result<(), StoreError> {
        let package = self.package(stored.package)?;
        let Some(signed) = &stored.record else { return Ok(()) };
        let key = stored.package;
        let expected = signed
            .release()
            .package(key.rank)
            .filter(|listed| listed.package == key)
            .ok_or(StoreError::NoSuchRank {
                rank: key.rank,
                ranks: signed.release().packages.len(),
            })?
            .manifest;
        let found = package.manifest_digest()?;
        if found == expected {
            Ok(())
        } else {
            Err(StoreError::OtherManifest { key, expected, found })
        }
    }

    /// Sets a damaged record aside and makes a new one: a model of which there is one package has
    /// that as its release; of several, nobody knows which was current.
    fn rebuild_record(&self, path: &PathBuf, problem: &str) -> Result<String, StoreError> {
        let _guard = locked(&self.record);
        let mut by_model: BTreeMap<String, Vec<PackageKey>> = BTreeMap::new();
        for package in self.packages()? {
            let Ok(manifest) = package.read_manifest() else { continue };
            by_model.entry(model_name(&manifest)).or_default().push(package.key);
        }
        let (mut active, mut unknown) = (Active::default(), Vec::new());
        for (name, keys) in by_model {
            if let [package] = keys[..] {
                let current = Some(StoredRelease { release: 1, package, record: None });
                active.models.insert(name, ActiveModel { current, ..ActiveModel::default() });
            } else {
                unknown.push(name);
            }
        }
        let aside = (0..u32::MAX)
            .map(|number| self.root().join(format!("{SET_ASIDE}-{number}")))
            .find(|aside| !aside.exists())
            .expect("some number is free");
        // A link first: the record is never absent, and absent means that nothing is active.
        fs::hard_link(path, &aside).map_err(StoreError::io("link", &aside))?;
        active.write(path)?;
        files::sync_directory(self.root()).map_err(StoreError::io("sync", self.root()))?;
        let models = active.models.len();
        let push = match unknown.as_slice() {
            [] => String::new(),
            unknown => format!(
                "; of {} there are several packages: push the set that is to be current",
                unknown.join(", ")
            ),
        };
        Ok(format!(
            "{} was damaged ({problem}) and is kept as {}; the new one has {models} models{push}",
            path.display(),
            aside.display()
        ))
    }

    fn leftovers(&self) -> Result<Vec<String>, StoreError> {
        let mut leftovers = Vec::new();
        for (key, path, is_removed) in self.staged()? {
            if is_removed {
                leftovers.push(format!("{}: a removal was interrupted", path.display()));
            } else if !self.is_busy(key) {
                leftovers.push(format!("{}: a push was interrupted", path.display()));
            }
        }
        let root = self.root();
        for directory in [root.to_owned(), root.join("packages"), root.join("staging")] {
            let is_root = directory == *root;
            let unreadable = || StoreError::io("read", &directory);
            for entry in fs::read_dir(&directory).map_err(unreadable())? {
                let entry = entry.map_err(unreadable())?;
                let name = entry.file_name().to_string_lossy().into_owned();
                let is_known = if is_root {
                    KNOWN_NAMES.contains(&name.as_str())
                } else {
                    let key = name.strip_suffix(super::gc::REMOVED).unwrap_or(&name);
                    key.parse::<PackageKey>().is_ok()
                };
                if is_unfinished(&name) {
                    let path = entry.path();
                    leftovers.push(format!(
                        "{}: a write was interrupted; the next one replaces it",
                        path.display()
                    ));
                } else if !is_known {
                    leftovers.push(format!("{}: not of this store", entry.path().display()));
                }
            }
        }
        Ok(leftovers)
    }
}

/// The chunks that a finding says are damaged; nothing if it concerns something else.
fn damaged_chunks(
    package: &Path,
    manifest: &Manifest,
    problem: &Problem,
) -> Option<Vec<DamagedChunk>> {
    let (Problem::ChunkChanged { file: name, .. }
    | Problem::Missing { file: name }
    | Problem::Length { file: name, .. }
    | Problem::Unreadable { file: name, .. }) = problem
    else {
        return None;
    };
    let file = manifest.files.iter().position(|entry| entry.name == *name)?;
    let entry: &FileEntry = &manifest.files[file];
    let damaged = |chunk: u32| DamagedChunk {
        name: name.clone(),
        file: file as u32,
        chunk,
        file_bytes: entry.size,
        value: entry.chunks[chunk as usize],
    };
    if let Problem::ChunkChanged { chunk, .. } = problem {
        return Some(vec![damaged(*chunk as u32)]);
    }
    // What of a file of the wrong length is right stays, except that its length is set with the
    // first chunk that is replaced: of a longer one whose chunks are all right, the last one is.
    let opened = File::open(package.join(name)).ok();
    let last = entry.chunks.len().saturating_sub(1) as u32;
    let is_right = |chunk: &u32| {
        let too_long =
            matches!(problem, Problem::Length { expected, found, .. } if found > expected);
        let read = |file: &File| read_checked(file, entry, *chunk).ok().flatten();
        !(too_long && *chunk == last) && opened.as_ref().and_then(read).is_some()
    };
    Some((0..entry.chunks.len() as u32).filter(|chunk| !is_right(chunk)).map(damaged).collect())
}

/// Whether a file of this name was being written when something was cut off.
fn is_unfinished(name: &str) -> bool {
    name.strip_prefix('.').is_some_and(|rest| rest.strip_suffix(".new").is_some())
}
