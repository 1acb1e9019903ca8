//! Files mapped into memory: the only place that maps.

use std::{fs::File, io, path::Path};

use memmap2::Mmap;

/// A read-only mapping of a whole file.
///
/// The file must not be truncated while it is mapped: reading past its new end stops the
/// process. Sources are the user's own files, and packages are never truncated in place.
pub struct MappedFile(Option<Mmap>);

impl MappedFile {
    /// Maps the file at `path`. An empty file maps to no bytes.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        if file.metadata()?.len() == 0 {
            return Ok(Self(None));
        }
        // SAFETY: the mapping is private to this process and read-only; that nobody truncates
        // the file meanwhile is asked of the user in the type's documentation.
        #[expect(unsafe_code, reason = "the only mmap in the workspace")]
        let map = unsafe { Mmap::map(&file) }?;
        Ok(Self(Some(map)))
    }

    /// The file's bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        self.0.as_deref().unwrap_or_default()
    }
}
