//! Files of keys and documents: written atomically; private keys are readable by their owner only.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Read as _, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use serde::{Serialize, de::DeserializeOwned};

/// Largest file here: a document of some hundred members has 50 KB.
const MAX_BYTES: u64 = 1 << 20;

/// Timeout for the lock of a document, which is held while the document is read and written.
pub(crate) const LOCK_TIMEOUT: Duration = Duration::from_secs(5);

/// Interval between two tries to take a lock.
const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// A file of a cluster cannot be used. Each names its file.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The file system failed.
    #[error("could not {action} {}", path.display())]
    Io {
        /// The verb.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A private key that other users can read.
    #[error(
        "{}: other users of this machine can read this private key (mode {mode:03o}); run `chmod 600` on it, and make a new key if somebody may have copied it", path.display()
    )]
    Open {
        /// The file.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// Another process holds a lock.
    #[error("{}: another shardpack command has held this lock for {} s; wait for it to end and try again", path.display(), .waited.as_secs())]
    Locked {
        /// The lock.
        path: PathBuf,
        /// How long was waited.
        waited: Duration,
    },
    /// Larger than any file of its kind.
    #[error("{}: over {MAX_BYTES} bytes", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
    /// Not what is written there.
    #[error("{}: not a file of this program", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Why.
        source: serde_json::Error,
    },
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FileError {
    move |source| FileError::Io { action, path: path.to_owned(), source }
}

/// Creates a folder that only its owner can open.
pub(crate) fn create_folder(path: &Path) -> Result<(), FileError> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(io_error("create", path))
}

/// Writes a file that only its owner can read.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<(), FileError> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let partial = PathBuf::from(partial);
    // What is left of an interrupted attempt.
    let _ = fs::remove_file(&partial);
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&partial)
        .map_err(io_error("create", &partial))?;
    file.write_all(bytes)
        .and_then(|()| file.sync_all())
        .and_then(|()| fs::rename(&partial, path))
        .map_err(io_error("write", path))?;
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(io_error("sync", folder))
}

pub(crate) fn write_json(path: &Path, document: &impl Serialize) -> Result<(), FileError> {
    let mut bytes = serde_json::to_vec_pretty(document)
        .map_err(|source| FileError::Malformed { path: path.to_owned(), source })?;
    bytes.push(b'\n');
    write(path, &bytes)
}

/// Reads a private key; one that other users can read is refused.
pub(crate) fn read_private(path: &Path) -> Result<Vec<u8>, FileError> {
    let file = File::open(path).map_err(io_error("read", path))?;
    let mode = file.metadata().map_err(io_error("read", path))?.permissions().mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(FileError::Open { path: path.to_owned(), mode });
    }
    read_all(&file, path)
}

fn read_all(file: &File, path: &Path) -> Result<Vec<u8>, FileError> {
    let mut bytes = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(io_error("read", path))?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(FileError::TooLarge { path: path.to_owned() });
    }
    Ok(bytes)
}

/// Reads a document; none where there is no such file.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, FileError> {
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file.map_err(io_error("read", path))?,
    };
    let bytes = read_all(&file, path)?;
    serde_json::from_slice(&bytes)
        .map(Some)
        .map_err(|source| FileError::Malformed { path: path.to_owned(), source })
}

/// Removes a file, if there is one.
pub(crate) fn remove(path: &Path) -> Result<(), FileError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(io_error("remove", path)(error))
        }
        _ => Ok(()),
    }
}

/// Locks the file for this process until dropped; waits at most `timeout` for other processes.
pub(crate) fn lock(path: &Path, timeout: Duration) -> Result<File, FileError> {
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(path)
        .map_err(io_error("open", path))?;
    let deadline = Instant::now() + timeout;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                thread::sleep(LOCK_RETRY_INTERVAL);
            }
            Err(TryLockError::WouldBlock) => {
                return Err(FileError::Locked { path: path.to_owned(), waited: timeout });
            }
            Err(TryLockError::Error(error)) => return Err(io_error("lock", path)(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_their_owners_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        write(&path, b"old").unwrap();
        write(&path, b"new").unwrap();
        assert_eq!(read_private(&path).unwrap(), b"new");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        let error = read_private(&path).unwrap_err().to_string();
        assert!(error.contains("mode 640") && error.contains("chmod 600"), "{error}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_lock_is_one_holders_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let held = lock(&path, Duration::ZERO).unwrap();
        let error = lock(&path, Duration::ZERO).unwrap_err().to_string();
        assert!(error.contains("another shardpack command"), "{error}");
        drop(held);
        lock(&path, Duration::ZERO).unwrap();
    }
}
