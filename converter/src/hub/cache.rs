//! The standard cache, shared with Python's client: `models--org--name/` with `blobs/` (bytes, by
//! checksum), `snapshots/<commit>/` (links to them, under the files' own names) and `refs/`
//! (revisions to commits). Ours besides: `.verified/<checksum>` says that a blob of this size and
//! time was hashed and is what its name says; `packages/<commit>/` has the files of a package set.
//!
//! hf-hub names the folders. It writes without locks and without checks, so writing is ours.

use std::{
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::{MetadataExt, symlink},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use hf_hub::Cache as Layout;
use shardpack_http::Checksum;

use super::{HubError, ModelName, RepoFile, listing};

/// Between two looks at a lock that another process holds.
const LOCK_STEP: Duration = Duration::from_millis(200);
/// How long a lock is waited for: a large file on a slow line.
const LOCK_STEPS: u64 = 4 * 3600 * 5;

/// A cache folder.
pub(super) struct Cache {
    root: PathBuf,
}

/// A lock on one blob; given back when dropped. None in a cache that cannot be written.
pub(super) struct Lock {
    _file: Option<File>,
}

impl Cache {
    pub(super) const fn new(root: PathBuf) -> Self {
        Self { root }
    }

    /// A model's folder.
    pub(super) fn folder(&self, name: &ModelName) -> PathBuf {
        self.root.join(name.folder())
    }

    /// Where the bytes with a checksum are.
    pub(super) fn blob(&self, name: &ModelName, checksum: &Checksum) -> PathBuf {
        self.folder(name).join("blobs").join(checksum.text())
    }

    /// Where they are before they are complete.
    pub(super) fn part(&self, name: &ModelName, checksum: &Checksum) -> PathBuf {
        self.folder(name).join("blobs").join(format!("{}.part", checksum.text()))
    }

    /// The folder of a commit's files.
    pub(super) fn snapshot(&self, name: &ModelName, commit: &str) -> PathBuf {
        Layout::new(self.root.clone()).repo(name.hub_repo()).pointer_path(commit)
    }

    /// The commit that a revision was when it was last asked for. Where programs have left no reference,
    /// the default revision is the only commit that there is.
    pub(super) fn reference(&self, name: &ModelName) -> Option<String> {
        if listing::is_commit(&name.revision) {
            return Some(name.revision.clone());
        }
        let path = self.folder(name).join("refs").join(&name.revision);
        if let Ok(commit) = fs::read_to_string(path) {
            let commit = commit.trim();
            return listing::is_commit(commit).then(|| commit.to_owned());
        }
        match &self.commits(name)[..] {
            [only] if name.revision == ModelName::MAIN => Some(only.clone()),
            _ => None,
        }
    }

    /// The commits of which there are files.
    pub(super) fn commits(&self, name: &ModelName) -> Vec<String> {
        let entries = fs::read_dir(self.folder(name).join("snapshots")).into_iter().flatten();
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let mut commits: Vec<String> = names.filter(|name| listing::is_commit(name)).collect();
        commits.sort_unstable();
        commits
    }

    /// Notes which commit a revision is.
    pub(super) fn set_reference(&self, name: &ModelName, commit: &str) -> Result<(), HubError> {
        if name.revision == commit {
            return Ok(());
        }
        let path = self.folder(name).join("refs").join(&name.revision);
        unless_read_only(write(&path, commit.as_bytes()))
    }

    /// The files of a commit's folder that are in the cache, by what their blobs are called.
    pub(super) fn files(
        &self,
        name: &ModelName,
        commit: &str,
        folder: &str,
    ) -> Result<Vec<RepoFile>, HubError> {
        let prefix = if folder.is_empty() { String::new() } else { format!("{folder}/") };
        let folder = self.snapshot(name, commit).join(folder);
        let offline = || HubError::Offline { name: name.to_string(), cache: self.folder(name) };
        let mut files = Vec::new();
        for entry in fs::read_dir(&folder).map_err(|_| offline())? {
            let path = entry.map_err(|source| failed(&folder, source))?.path();
            let Some(file) = file_of(&path, &prefix) else { continue };
            files.push(file);
        }
        files.sort_by(|a, b| a.path.cmp(&b.path));
        if files.is_empty() { Err(offline()) } else { Ok(files) }
    }

    /// The path of a snapshot's file, if it is a file of this size itself and no link to a blob: file
    /// systems without links have no other.
    pub(super) fn placed(
        &self,
        name: &ModelName,
        commit: &str,
        file: &RepoFile,
    ) -> Option<PathBuf> {
        let path = self.snapshot(name, commit).join(&file.path);
        let metadata = fs::symlink_metadata(&path).ok()?;
        (metadata.is_file() && metadata.len() == file.size).then_some(path)
    }

    /// Whether the file with these bytes was hashed before and has not been touched since.
    pub(super) fn is_verified(
        &self,
        name: &ModelName,
        file: &Path,
        checksum: &Checksum,
        size: u64,
    ) -> bool {
        let stamp = stamp(file);
        stamp.is_some_and(|(found, text)| {
            found == size
                && fs::read_to_string(self.mark(name, checksum)).is_ok_and(|mark| mark == text)
        })
    }

    /// Notes that the file with these bytes was hashed.
    pub(super) fn set_verified(
        &self,
        name: &ModelName,
        file: &Path,
        checksum: &Checksum,
    ) -> Result<(), HubError> {
        match stamp(file) {
            Some((_, text)) => unless_read_only(write(&self.mark(name, checksum), text.as_bytes())),
            None => Ok(()),
        }
    }

    fn mark(&self, name: &ModelName, checksum: &Checksum) -> PathBuf {
        self.folder(name).join(".verified").join(checksum.text())
    }

    /// Puts a blob under its file's name into a snapshot.
    pub(super) fn link(
        &self,
        name: &ModelName,
        commit: &str,
        path: &str,
        checksum: &Checksum,
    ) -> Result<(), HubError> {
        let link = self.snapshot(name, commit).join(path);
        let blob = self.blob(name, checksum);
        let levels = "../".repeat(2 + path.matches('/').count());
        let target = PathBuf::from(format!("{levels}blobs/{}", checksum.text()));
        if fs::read_link(&link).is_ok_and(|found| found == target) {
            return Ok(());
        }
        let parent = link.parent().expect("a file of a snapshot is in a folder");
        fs::create_dir_all(parent).map_err(|source| failed(parent, source))?;
        match fs::remove_file(&link) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(failed(&link, error));
            }
            _ => {}
        }
        // File systems without links hold the bytes twice.
        symlink(&target, &link)
            .or_else(|_| fs::copy(&blob, &link).map(|_| ()))
            .map_err(|source| failed(&link, source))
    }

    /// A snapshot's files as packages have theirs, which are no links: the blobs under further names.
    pub(super) fn packages(&self, name: &ModelName, commit: &str) -> Result<PathBuf, HubError> {
        let folder = self.folder(name).join("packages").join(commit);
        place_files(&self.snapshot(name, commit), &folder)?;
        Ok(folder)
    }

    /// Keeps other processes, Python's client among them, from downloading the same bytes.
    pub(super) fn lock(&self, name: &ModelName, checksum: &Checksum) -> Result<Lock, HubError> {
        let folder = self.root.join(".locks").join(name.folder());
        let path = folder.join(format!("{}.lock", checksum.text()));
        for folder in [&folder, &self.folder(name).join("blobs")] {
            match fs::create_dir_all(folder) {
                // Nobody else writes there either.
                Err(error) if is_read_only(&error) => return Ok(Lock { _file: None }),
                made => made.map_err(|source| failed(folder, source))?,
            }
        }
        let file = match File::options().create(true).append(true).open(&path) {
            Err(error) if is_read_only(&error) => return Ok(Lock { _file: None }),
            file => file.map_err(|source| failed(&path, source))?,
        };
        for _ in 0..LOCK_STEPS {
            match file.try_lock() {
                Err(fs::TryLockError::WouldBlock) => thread::sleep(LOCK_STEP),
                // Or a file system without locks: the last rename wins, with the same bytes.
                Ok(()) | Err(fs::TryLockError::Error(_)) => return Ok(Lock { _file: Some(file) }),
            }
        }
        let seconds = LOCK_STEPS * LOCK_STEP.as_millis() as u64 / 1000;
        Err(HubError::Locked { path, seconds })
    }
}

/// Places what the links of a folder lead to into another folder.
fn place_files(from: &Path, to: &Path) -> Result<(), HubError> {
    fs::create_dir_all(to).map_err(|source| failed(to, source))?;
    for entry in fs::read_dir(from).map_err(|source| failed(from, source))? {
        let path = entry.map_err(|source| failed(from, source))?.path();
        let place = to.join(path.file_name().unwrap_or_default());
        if path.is_dir() {
            place_files(&path, &place)?;
            continue;
        }
        let blob = path.canonicalize().map_err(|source| failed(&path, source))?;
        if is_same_file(&blob, &place) {
            continue;
        }
        let new = place.with_added_extension(format!("{}.part", std::process::id()));
        // What a killed run has left is of no use.
        let _ = fs::remove_file(&new);
        // File systems without links hold the bytes twice.
        fs::hard_link(&blob, &new)
            .or_else(|_| fs::copy(&blob, &new).map(|_| ()))
            .and_then(|()| fs::rename(&new, &place))
            .map_err(|source| failed(&place, source))?;
        // Renaming onto another link of the same file does nothing.
        let _ = fs::remove_file(&new);
    }
    Ok(())
}

fn is_same_file(a: &Path, b: &Path) -> bool {
    let identity = |path: &Path| {
        let metadata = fs::symlink_metadata(path).ok()?;
        Some((metadata.dev(), metadata.ino()))
    };
    identity(a).is_some_and(|a| Some(a) == identity(b))
}

/// A file of a snapshot's folder. Its link tells its checksum; other programs leave files there, or links to
/// where it is not in the name.
fn file_of(path: &Path, folder: &str) -> Option<RepoFile> {
    let path_in_repo = format!("{folder}{}", path.file_name()?.to_str()?);
    let metadata = fs::metadata(path).ok().filter(fs::Metadata::is_file)?;
    let linked = fs::read_link(path).ok();
    let linked = linked.as_deref().and_then(|target| target.file_name()?.to_str());
    let checksum = linked.and_then(shardpack_formats::hex::decode).unwrap_or_default();
    let (oid, sha256) = (checksum.as_slice().try_into().ok(), checksum.as_slice().try_into().ok());
    Some(RepoFile { path: path_in_repo, size: metadata.len(), oid, sha256 })
}

/// Size of a file, and what changes when it is written to.
fn stamp(path: &Path) -> Option<(u64, String)> {
    let metadata = fs::metadata(path).ok()?;
    let modified = metadata.modified().ok()?;
    Some((metadata.len(), format!("{} {modified:?}\n", metadata.len())))
}

/// Writes a small file, complete or not at all.
fn write(path: &Path, bytes: &[u8]) -> Result<(), HubError> {
    let parent = path.parent().expect("a file of a cache is in a folder");
    fs::create_dir_all(parent).map_err(|source| failed(parent, source))?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = parent.join(format!(".{name}.{}.part", std::process::id()));
    let written = File::create(&temporary)
        .and_then(|mut file| file.write_all(bytes))
        .and_then(|()| fs::rename(&temporary, path));
    written.map_err(|source| failed(path, source))
}

/// Whether nothing can be written there, whatever is tried.
pub(super) fn is_read_only(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem)
}

/// What a cache notes for later may be missing from one that cannot be written.
fn unless_read_only(written: Result<(), HubError>) -> Result<(), HubError> {
    match written {
        Err(HubError::Write { source, .. }) if is_read_only(&source) => Ok(()),
        written => written,
    }
}

fn failed(path: &Path, source: io::Error) -> HubError {
    HubError::Write { path: path.to_owned(), source }
}
