//! A conversion's output until it is complete: a hidden sibling directory that takes the final
//! name in one rename. Whoever looks at the final name sees all of it or nothing. What a killed
//! run leaves in it is taken up by the next one.

use std::{
    cell::Cell,
    fs::{self, File, TryLockError},
    path::{Path, PathBuf},
};

use crate::package::{WriteError, at, sync_directory};

/// The output cannot be begun.
#[derive(Debug, thiserror::Error)]
pub enum StagingError {
    /// The final name is taken.
    #[error("{}: exists already; choose another output or remove it first", .0.display())]
    Exists(PathBuf),
    /// The final name has no last component.
    #[error("{}: not a name for a folder", .0.display())]
    Name(PathBuf),
    /// Another process is writing the same output.
    #[error("{}: another conversion is writing this output now", .0.display())]
    Busy(PathBuf),
    /// It could not be created.
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// The hidden sibling. Dropped before [`Staging::publish`] or [`Staging::keep`], it is removed.
pub(crate) struct Staging {
    output: PathBuf,
    directory: PathBuf,
    /// The open directory, locked until drop: keeps a second conversion of the same output away.
    lock: File,
    /// Whether the directory stays when this is dropped.
    stays: Cell<bool>,
}

impl Staging {
    /// Begins an output, or takes up what an earlier run has left of it.
    pub(crate) fn begin(output: &Path) -> Result<Self, StagingError> {
        let name = output.file_name().and_then(|name| name.to_str());
        let name = name.ok_or_else(|| StagingError::Name(output.to_owned()))?;
        let parent = parent_of(output);
        let taken = fs::symlink_metadata(output).is_ok_and(|metadata| !metadata.is_dir())
            || fs::read_dir(output).is_ok_and(|mut entries| entries.next().is_some());
        if taken {
            return Err(StagingError::Exists(output.to_owned()));
        }
        let directory = parent.join(format!(".{name}.partial"));
        at(&directory, fs::create_dir_all(&directory))?;
        let lock = at(&directory, File::open(&directory))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(StagingError::Busy(output.to_owned())),
            Err(TryLockError::Error(error)) => at(&directory, Err(error))?,
        }
        Ok(Self { output: output.to_owned(), directory, lock, stays: Cell::new(false) })
    }

    /// Where to write.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Leaves what there is for a later run.
    pub(crate) fn keep(&self) {
        self.stays.set(true);
    }

    /// Gives the complete output its final name.
    pub(crate) fn publish(self) -> Result<(), WriteError> {
        at(&self.directory, self.lock.sync_all())?;
        at(&self.output, fs::rename(&self.directory, &self.output))?;
        self.stays.set(true);
        sync_directory(&parent_of(&self.output))
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if !self.stays.get() {
            // The error that led here matters more than a leftover, which the next run removes.
            let _ = fs::remove_dir_all(&self.directory);
        }
    }
}

fn parent_of(output: &Path) -> PathBuf {
    match output.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}
