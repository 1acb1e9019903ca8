//! A weight file that stays at the hub. Its header is read by range; when its data is needed, the
//! whole file is brought to a spool folder, checked, read from there, and dropped when nothing
//! needs it any more. So a conversion holds a few files of the source at a time, not all.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use super::{Hub, HubError, RepoFile, Snapshot, download};

/// Bytes from the start of the file that are fetched at first: enough for most headers.
const FIRST_BYTES: u64 = 1 << 20;

/// A weight file at the hub.
pub(crate) struct RemoteFile {
    hub: Arc<Hub>,
    url: String,
    file: RepoFile,
    spool: Option<PathBuf>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The first bytes of the file.
    start: Vec<u8>,
    /// The whole file, once it was brought here.
    local: Option<Arc<File>>,
}

impl RemoteFile {
    pub(super) fn new(
        hub: Arc<Hub>,
        snapshot: &Snapshot,
        file: &RepoFile,
        spool: Option<&Path>,
    ) -> Self {
        let url = hub.client.file_url(&snapshot.name, &snapshot.commit, &file.path);
        let spool = spool.map(|folder| folder.join(format!("{}.part", file.path)));
        Self { hub, url, file: file.clone(), spool, state: Mutex::default() }
    }

    /// Its name.
    pub(crate) fn name(&self) -> &str {
        &self.file.path
    }

    /// Its bytes.
    pub(crate) const fn size(&self) -> u64 {
        self.file.size
    }

    /// What tells its content from any other.
    pub(crate) fn identity(&self) -> String {
        super::Checksum::of(&self.file).text()
    }

    /// Fills `buffer` with the header's bytes, which no checksum covers yet: what a header says
    /// is checked when it is parsed, and the whole file when its data is read.
    pub(crate) fn read_header(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset + buffer.len() as u64;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.start.is_empty() {
            state.start = self.range(0, FIRST_BYTES.min(self.file.size))?;
        }
        if end > state.start.len() as u64 {
            let more = self.range(state.start.len() as u64, end.min(self.file.size))?;
            state.start.extend(more);
        }
        let held = state.start.get(offset as usize..end as usize);
        buffer.copy_from_slice(held.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    /// Fills `buffer` from `offset` on, from the checked file.
    pub(crate) fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        if let Some(file) = self.local()? {
            return file.read_exact_at(buffer, offset);
        }
        // A plan compares a tied head with its embedding and looks at small index tensors.
        download::range(&self.hub.client, &self.url, &self.file, offset, buffer)
            .map_err(io::Error::other)
    }

    /// Drops the bytes that were brought here; they come again when they are read again.
    pub(crate) fn release(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.local.take().is_some()
            && let Some(path) = &self.spool
        {
            // What cannot be removed now goes with the folder.
            let _ = fs::remove_file(path);
        }
    }

    fn range(&self, start: u64, end: u64) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; (end - start) as usize];
        download::range(&self.hub.client, &self.url, &self.file, start, &mut bytes)
            .map_err(io::Error::other)?;
        Ok(bytes)
    }

    /// The whole file; `None` where nothing is spooled.
    fn local(&self) -> io::Result<Option<Arc<File>>> {
        let Some(path) = &self.spool else { return Ok(None) };
        // Held while the file arrives: whoever needs it too waits for it.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = &state.local {
            return Ok(Some(Arc::clone(file)));
        }
        let failed = |error: HubError| io::Error::other(error);
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        let client = &self.hub.client;
        download::fetch(client, &self.url, &self.file, path, &client.observer()).map_err(failed)?;
        let file = Arc::new(File::open(path)?);
        state.local = Some(Arc::clone(&file));
        Ok(Some(file))
    }
}

impl Drop for RemoteFile {
    fn drop(&mut self) {
        self.release();
    }
}
