//! The file of usage: lines of JSON that are added up. It is opened by one server at a time, which writes it
//! anew with one line for each hour, key and model.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Write as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use super::book::{Book, Entry};

/// Lines beyond those of the sums after which the file is written anew.
const SPARE_LINES: usize = 200_000;

/// The file of usage cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum UsageError {
    /// It cannot be read or written.
    #[error("{}: cannot be used as a file of usage", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Another server writes it.
    #[error("{}: another server writes this file of usage: give each its own", file.display())]
    InUse {
        /// The file.
        file: PathBuf,
    },
    /// A line that is none of such a file.
    #[error("{}: line {line} is no line of a file of usage: expected JSON with hour and sums", file.display())]
    Foreign {
        /// The file.
        file: PathBuf,
        /// From 1.
        line: usize,
    },
}

/// An open file of usage.
pub(super) struct Journal {
    path: PathBuf,
    file: Arc<File>,
    size_bytes: u64,
    lines: usize,
    is_dirty: bool,
    /// Locked as long as the file is written, which is replaced meanwhile.
    _lock: File,
}

impl Journal {
    /// Reads a file of usage into `book`, where there is one, and writes it anew. A torn last line is left out.
    pub(super) fn open(path: &Path, book: &mut Book) -> Result<Self, UsageError> {
        let failed = |source| UsageError::Io { file: path.to_owned(), source };
        let mut name = path.as_os_str().to_owned();
        name.push(".lock");
        let lock = OpenOptions::new().create(true).append(true).open(name).map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(UsageError::InUse { file: path.to_owned() });
            }
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        let bytes = match fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(failed(error)),
        };
        let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        for (index, line) in bytes[..whole].split(|byte| *byte == b'\n').enumerate() {
            if line.is_empty() {
                continue;
            }
            let entry: Entry = serde_json::from_slice(line)
                .map_err(|_| UsageError::Foreign { file: path.to_owned(), line: index + 1 })?;
            book.add(entry);
        }
        let (file, size_bytes) = write(path, book).map_err(failed)?;
        let (path, lines) = (path.to_owned(), book.len());
        Ok(Self { path, file, size_bytes, lines, is_dirty: false, _lock: lock })
    }

    /// Appends a line.
    pub(super) fn append(&mut self, entry: &Entry) -> io::Result<()> {
        let mut line = serde_json::to_vec(entry)?;
        line.push(b'\n');
        if let Err(error) = (&*self.file).write_all(&line) {
            // Half a line would spoil the next.
            let _ = self.file.set_len(self.size_bytes);
            return Err(error);
        }
        self.size_bytes += line.len() as u64;
        self.lines += 1;
        self.is_dirty = true;
        Ok(())
    }

    /// Writes the file anew when it has become long.
    pub(super) fn compact_if_long(&mut self, book: &Book) -> io::Result<()> {
        if self.lines > book.len() + SPARE_LINES {
            (self.file, self.size_bytes) = write(&self.path, book)?;
            self.lines = book.len();
        }
        Ok(())
    }

    /// What is to be synced to disk, if anything was written since.
    pub(super) fn dirty(&mut self) -> Option<Arc<File>> {
        std::mem::take(&mut self.is_dirty).then(|| Arc::clone(&self.file))
    }
}

/// Writes a sibling and renames it: a crash leaves the one or the other.
fn write(path: &Path, book: &Book) -> io::Result<(Arc<File>, u64)> {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    let sibling = PathBuf::from(name);
    let mut bytes = Vec::new();
    for entry in book.entries() {
        serde_json::to_writer(&mut bytes, &entry)?;
        bytes.push(b'\n');
    }
    // What a crash has left.
    let _ = fs::remove_file(&sibling);
    let mut options = OpenOptions::new();
    options.create_new(true).append(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let file = options.open(&sibling)?;
    (&file).write_all(&bytes)?;
    file.sync_all()?;
    fs::rename(&sibling, path)?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or_else(|| Path::new(".")))?.sync_all()?;
    Ok((Arc::new(file), bytes.len() as u64))
}
