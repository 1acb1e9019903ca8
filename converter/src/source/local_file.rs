//! Weight files of this machine: open as long as the process may have many files open, else opened for
//! each read. Checkpoints of hundreds of files meet limits of 256.
//!
//! Knows files; not what is in them.

use std::{
    fs::{File, Metadata},
    io,
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::SystemTime,
};

use rustix::process::{Resource, getrlimit};

/// Of the files that the process may have open, one in so many stays open to be read: the others are
/// for what is written, for connections and for threads that open a file for a read.
const SHARE: u64 = 4;
/// Files that stay open, in the whole process.
static KEPT: AtomicU64 = AtomicU64::new(0);

/// A file to be read by position, from any thread.
pub(super) struct LocalFile {
    path: PathBuf,
    /// What it was when it was first opened.
    stamp: Stamp,
    /// Open, if there was room.
    kept: Option<File>,
}

/// Tells a file from another one at its path, and from itself when it was written to.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    size: u64,
    modified: Option<SystemTime>,
}

impl Stamp {
    fn of(metadata: &Metadata) -> Self {
        let (device, inode, size) = (metadata.dev(), metadata.ino(), metadata.len());
        Self { device, inode, size, modified: metadata.modified().ok() }
    }
}

impl LocalFile {
    /// Opens a file, and keeps it open if the process has room for it.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let most = getrlimit(Resource::Nofile).current.map_or(u64::MAX, |most| most / SHARE);
        Self::open_within(path, most)
    }

    /// The same with at most so many files that stay open.
    fn open_within(path: &Path, most: u64) -> io::Result<Self> {
        let file = File::open(path)?;
        let stamp = Stamp::of(&file.metadata()?);
        let is_kept = KEPT.fetch_add(1, Ordering::Relaxed) < most;
        if !is_kept {
            KEPT.fetch_sub(1, Ordering::Relaxed);
        }
        Ok(Self { path: path.to_owned(), stamp, kept: is_kept.then_some(file) })
    }

    pub(super) const fn size(&self) -> u64 {
        self.stamp.size
    }

    pub(super) const fn modified(&self) -> Option<SystemTime> {
        self.stamp.modified
    }

    /// Fills `buffer` from `offset` on.
    pub(super) fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        if let Some(file) = &self.kept {
            return file.read_exact_at(buffer, offset);
        }
        let file = File::open(&self.path)?;
        if Stamp::of(&file.metadata()?) != self.stamp {
            let path = self.path.display();
            return Err(io::Error::other(format!("{path} was changed while it was read")));
        }
        file.read_exact_at(buffer, offset)
    }
}

impl Drop for LocalFile {
    fn drop(&mut self) {
        if self.kept.is_some() {
            KEPT.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_file_that_is_not_kept_open_is_read_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        fs::write(&path, "In the beginning").unwrap();
        for most in [u64::MAX, 0] {
            let file = LocalFile::open_within(&path, most).unwrap();
            assert_eq!((file.kept.is_some(), file.size()), (most > 0, 16));
            let mut buffer = [0; 3];
            file.read(&mut buffer, 3).unwrap();
            assert_eq!(&buffer, b"the");
            let past = file.read(&mut buffer, 15).unwrap_err();
            assert_eq!(past.kind(), io::ErrorKind::UnexpectedEof);
        }
        let file = LocalFile::open_within(&path, 0).unwrap();
        fs::write(folder.path().join("b"), "another one here").unwrap();
        fs::rename(folder.path().join("b"), &path).unwrap();
        let error = file.read(&mut [0; 3], 0).unwrap_err().to_string();
        assert!(error.contains("was changed while it was read"), "{error}");
    }
}
