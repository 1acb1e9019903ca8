//! Reads packages' files in whole chunks, each verified against its value before a byte of it is
//! used.

use std::{
    collections::VecDeque,
    fs::File,
    io,
    os::unix::fs::FileExt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use shardpack_manifests::{
    CHUNK_BYTES, Digest,
    digest::{chunk_range, chunk_value},
    manifest::{FileEntry, TensorEntry},
    verify::Problem,
};

use super::{Member, UnshardError};

/// A chunk: package, file, index.
type Key = (usize, usize, u64);

/// Checked chunks, the latest used last: small tensors share one, and a block of rows begins
/// where the last one ended.
pub(super) struct Chunks {
    kept: Mutex<VecDeque<(Key, Arc<Vec<u8>>)>>,
    most: AtomicUsize,
}

impl Default for Chunks {
    fn default() -> Self {
        Self { kept: Mutex::default(), most: AtomicUsize::new(1) }
    }
}

impl Chunks {
    /// Keeps so many bytes of chunks, but one chunk at least.
    pub(super) fn keep_bytes(&self, bytes: u64) {
        let most = usize::try_from(bytes / CHUNK_BYTES).unwrap_or(usize::MAX);
        self.most.store(most.max(1), Ordering::Relaxed);
    }

    /// Fills `out` from `offset` of a file of package `member` on.
    ///
    /// # Panics
    /// When the file ends before: manifests are checked when they are parsed.
    pub(super) fn read(
        &self,
        member: &Member,
        (package, file): (usize, usize),
        offset: u64,
        out: &mut [u8],
    ) -> Result<(), UnshardError> {
        let mut filled = 0;
        while filled < out.len() {
            let at = offset + filled as u64;
            let index = at / CHUNK_BYTES;
            let chunk = self.chunk(member, (package, file, index))?;
            let from = (at % CHUNK_BYTES) as usize;
            let count = (chunk.len() - from).min(out.len() - filled);
            assert!(count > 0, "the file is as long as its manifest says");
            out[filled..filled + count].copy_from_slice(&chunk[from..from + count]);
            filled += count;
        }
        Ok(())
    }

    fn chunk(&self, member: &Member, key: Key) -> Result<Arc<Vec<u8>>, UnshardError> {
        {
            let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(at) = kept.iter().position(|(kept, _)| *kept == key) {
                let entry = kept.remove(at).expect("found above");
                let chunk = Arc::clone(&entry.1);
                kept.push_back(entry);
                return Ok(chunk);
            }
        }
        // Read without the lock: another thread may read the same, which costs time and no more.
        let chunk = Arc::new(read_checked(member, &member.manifest.files[key.1], key.2)?);
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        while kept.len() >= self.most.load(Ordering::Relaxed) {
            kept.pop_front();
        }
        kept.push_back((key, Arc::clone(&chunk)));
        Ok(chunk)
    }
}

/// A chunk as it was packaged, or an error that names the tensors it has damaged.
fn read_checked(member: &Member, entry: &FileEntry, index: u64) -> Result<Vec<u8>, UnshardError> {
    let wrong = |source| UnshardError::Package { package: member.directory.clone(), source };
    let name = || entry.name.clone();
    let opened = open(member, entry).map_err(wrong)?;
    let range = chunk_range(entry.size, index);
    let mut bytes = vec![0; (range.end - range.start) as usize];
    opened
        .read_exact_at(&mut bytes, range.start)
        .map_err(|source| wrong(Problem::Unreadable { file: name(), source }))?;
    if chunk_value(&bytes, entry.size, index) == entry.chunks[index as usize] {
        return Ok(bytes);
    }
    let touched = member.manifest.tensors.iter().filter(|tensor| {
        tensor.file == entry.name
            && tensor.offset < range.end
            && tensor.offset + tensor.size > range.start
    });
    let changed = touched.filter(|tensor| digest(&opened, tensor).ok() != Some(tensor.blake3));
    let tensors = changed.map(|tensor| tensor.name.clone()).collect();
    let (start, end) = (range.start, range.end);
    Err(wrong(Problem::ChunkChanged { file: name(), chunk: index, start, end, tensors }))
}

/// Opens a regular file of the listed length.
fn open(member: &Member, entry: &FileEntry) -> Result<File, Problem> {
    let path = member.directory.join(&entry.name);
    let file = entry.name.clone();
    let metadata = match path.symlink_metadata() {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(Problem::Missing { file });
        }
        Err(source) => return Err(Problem::Unreadable { file, source }),
    };
    if !metadata.is_file() {
        return Err(Problem::NotRegular { file, kind: "something else" });
    }
    if metadata.len() != entry.size {
        return Err(Problem::Length { file, expected: entry.size, found: metadata.len() });
    }
    File::open(path).map_err(|source| Problem::Unreadable { file, source })
}

fn digest(file: &File, tensor: &TensorEntry) -> io::Result<Digest> {
    let mut hasher = blake3::Hasher::new();
    let mut buffer = Vec::new();
    let mut done = 0;
    while done < tensor.size {
        buffer.resize((tensor.size - done).min(CHUNK_BYTES) as usize, 0);
        file.read_exact_at(&mut buffer, tensor.offset + done)?;
        hasher.update(&buffer);
        done += buffer.len() as u64;
    }
    Ok(Digest(*hasher.finalize().as_bytes()))
}
