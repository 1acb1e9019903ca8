//! Files that are written, moved and removed atomically.

use std::{
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::FileExt as _,
    path::Path,
};

/// Writes a file through a temporary sibling, to the disk and not only to memory.
pub(crate) fn write_durably(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let sibling = path.with_file_name(format!(".{name}.new"));
    let mut file = File::create(&sibling)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    rename(&sibling, path)?;
    path.parent().map_or(Ok(()), sync_directory)
}

/// Gives a file or directory another name.
pub(super) fn rename(from: &Path, to: &Path) -> io::Result<()> {
    #[cfg(test)]
    crash::here();
    fs::rename(from, to)?;
    #[cfg(test)]
    crash::here();
    Ok(())
}

/// Puts `bytes`, which `from` holds at `offset`, into `to` at the same offset. File systems that can
/// (Btrfs, XFS, and others on Linux) share the blocks, which then take no space and no time.
pub(super) fn copy_range(from: &File, to: &File, offset: u64, bytes: &[u8]) -> io::Result<()> {
    let copied = share_range(from, to, offset, bytes.len());
    // What the system did not copy is written, wherever it stopped and why.
    to.write_all_at(&bytes[copied..], offset + copied as u64)
}

/// Returns how many bytes the system has copied by itself.
#[cfg(target_os = "linux")]
fn share_range(from: &File, to: &File, offset: u64, size_bytes: usize) -> usize {
    let (mut at_from, mut at_to, mut copied) = (offset, offset, 0);
    while copied < size_bytes {
        let left = size_bytes - copied;
        match rustix::fs::copy_file_range(from, Some(&mut at_from), to, Some(&mut at_to), left) {
            Ok(more @ 1..) => copied += more,
            _ => break,
        }
    }
    copied
}

/// No other system shares parts of files.
#[cfg(not(target_os = "linux"))]
const fn share_range(_from: &File, _to: &File, _offset: u64, _size_bytes: usize) -> usize {
    0
}

/// Makes the names in a directory durable.
pub(super) fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Removes a directory and all in it; it need not be there.
pub(super) fn remove_directory(path: &Path) -> io::Result<()> {
    #[cfg(test)]
    crash::within(path);
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Ends what the current thread does in the middle, as the death of the process would.
#[cfg(test)]
pub(super) mod crash {
    use std::{cell::Cell, fs, panic, path::Path};

    thread_local! {
        static LEFT: Cell<Option<u32>> = const { Cell::new(None) };
    }

    /// What the unwinding thread carries.
    pub(crate) struct Crash;

    /// Runs `action`, which is cut off at the step of this number; `None` if it was.
    pub(crate) fn after<T>(steps: u32, action: impl FnOnce() -> T) -> Option<T> {
        LEFT.set(Some(steps));
        let result = panic::catch_unwind(panic::AssertUnwindSafe(action));
        LEFT.set(None);
        match result {
            Ok(value) => Some(value),
            Err(payload) if payload.is::<Crash>() => None,
            Err(payload) => panic::resume_unwind(payload),
        }
    }

    fn is_now() -> bool {
        let left = LEFT.get();
        LEFT.set(left.and_then(|left| left.checked_sub(1)));
        left == Some(0)
    }

    pub(super) fn here() {
        if is_now() {
            panic::resume_unwind(Box::new(Crash));
        }
    }

    /// Removes one file of the directory before the end.
    pub(super) fn within(directory: &Path) {
        if is_now() {
            let first = fs::read_dir(directory).ok().and_then(|mut entries| entries.next()?.ok());
            if let Some(first) = first {
                let _ = fs::remove_file(first.path());
            }
            panic::resume_unwind(Box::new(Crash));
        }
    }
}
