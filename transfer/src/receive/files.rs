//! Files that are written atomically.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::Path,
};

/// Writes a file through a temporary sibling, to the disk and not only to memory.
pub(super) fn write_durably(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let sibling = path.with_file_name(format!(".{name}.new"));
    let mut file = File::create(&sibling)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&sibling, path)?;
    path.parent().map_or(Ok(()), sync_directory)
}

/// Makes the names in a directory durable.
pub(super) fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Removes a directory and all in it; it need not be there.
pub(super) fn remove_directory(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
