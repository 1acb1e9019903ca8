//! A weight file that is read from the hub by range requests. Each piece (a fixed range of the
//! file) is downloaded into a small file of the spool folder and deleted when nothing needs it any
//! more, so a conversion stores a few pieces at a time and never a whole file.
//!
//! The hub states one checksum for a whole file. Pieces are hashed in the file's order, as they
//! arrive or, with several threads, when those before them have arrived; none is deleted before
//! that. So every byte is downloaded once, and the bytes that were used are the bytes that were
//! hashed. Results count when [`RemoteFile::verify`] has compared the checksum: until then the
//! caller journals nothing that came from the file. The alternatives were worse: a second pass over
//! the file for its checksum fetches everything twice, and a strict stream in the file's order
//! cannot put experts together whose gates, ups and downs take turns.

use std::{
    fs::{self, File},
    io,
    ops::Range,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use shardpack_http::{Checksum, Hasher, HttpError, read_range};
use shardpack_manifests::{
    Digest,
    digest::{CHUNK_BYTES, chunk_count, chunk_value},
};

use super::{Hub, HubError, RepoFile, Snapshot};

/// Bytes from the start of the file that are fetched at first: enough for most headers.
const FIRST_BYTES: u64 = 1 << 20;

/// Bytes of a piece: long enough that a request's latency counts little, short enough that few
/// bytes are downloaded in vain. Whole chunks, so that their digests follow from pieces.
pub(super) const PIECE_BYTES: u64 = 4 * CHUNK_BYTES;

/// Memory of a thread while it downloads or hashes a piece.
pub(crate) const WORKING_BYTES: u64 = 2 * PIECE_BYTES;

/// How long to wait for another thread's request before looking again; the requests themselves
/// have deadlines.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// A weight file at the hub.
pub(crate) struct RemoteFile {
    hub: Arc<Hub>,
    url: String,
    file: RepoFile,
    checksum: Checksum,
    spool: Option<PathBuf>,
    /// The first bytes of the file.
    start: Mutex<Vec<u8>>,
    pieces: Mutex<Vec<Piece>>,
    /// Notified when the download of a piece has ended.
    arrived: Condvar,
    /// Whether it is known what will be made of the file: before, nothing is hashed and dropped.
    is_expected: AtomicBool,
    order: Mutex<Order>,
    piece_bytes: u64,
}

/// State of a piece. It has a file in the spool folder while it is held.
#[derive(Clone, Copy, Default)]
struct Piece {
    /// Tensors that have still to be made of it.
    uses: u32,
    is_downloading: bool,
    is_held: bool,
    is_hashed: bool,
}

/// The checksum so far.
struct Order {
    hasher: Option<Hasher>,
    /// The first piece that is not in it.
    next: usize,
    /// Values of the chunks that are.
    chunks: Vec<Digest>,
}

/// Ignores poisoning: what a lock guards is valid whenever it is released.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl RemoteFile {
    pub(super) fn new(
        hub: Arc<Hub>,
        snapshot: &Snapshot,
        file: &RepoFile,
        spool: Option<&Path>,
        piece_bytes: u64,
    ) -> Self {
        let url = hub.api.file_url(&snapshot.name, &snapshot.commit, &file.path);
        // Files without one are of the cache, and read there.
        let checksum = file.checksum().unwrap_or(Checksum::Git([0; 20]));
        let order = Order { hasher: Some(checksum.hasher(file.size)), next: 0, chunks: Vec::new() };
        let count = file.size.div_ceil(piece_bytes) as usize;
        Self {
            hub,
            url,
            file: file.clone(),
            checksum,
            spool: spool.map(Path::to_owned),
            start: Mutex::default(),
            pieces: Mutex::new(vec![Piece::default(); count]),
            arrived: Condvar::new(),
            is_expected: AtomicBool::new(false),
            order: Mutex::new(order),
            piece_bytes,
        }
    }

    /// Its name.
    pub(crate) fn name(&self) -> &str {
        self.file.name()
    }

    /// Its bytes.
    pub(crate) const fn size(&self) -> u64 {
        self.file.size
    }

    /// What tells its content from any other.
    pub(crate) fn identity(&self) -> String {
        self.checksum.text()
    }

    /// Fills `buffer` with the header's bytes. They are compared with those of the checksum when
    /// these have come.
    pub(crate) fn read_header(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset + buffer.len() as u64;
        let mut start = lock(&self.start);
        if start.is_empty() {
            *start = self.range(0..FIRST_BYTES.min(self.file.size))?;
        }
        if end > start.len() as u64 {
            let more = self.range(start.len() as u64..end.min(self.file.size))?;
            start.extend(more);
        }
        let held = start.get(offset as usize..end as usize);
        buffer.copy_from_slice(held.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    /// Fills `buffer` from `offset` on.
    pub(crate) fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let Some(spool) = &self.spool else {
            // A plan compares a tied head with its embedding and looks at small index tensors.
            let end = offset + buffer.len() as u64;
            buffer.copy_from_slice(&self.range(offset..end)?);
            return Ok(());
        };
        let mut at = 0;
        while at < buffer.len() {
            let place = offset + at as u64;
            let index = (place / self.piece_bytes) as usize;
            let piece = self.range_of(index);
            let count = (piece.end.saturating_sub(place)).min((buffer.len() - at) as u64) as usize;
            if count == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let wanted = &mut buffer[at..at + count];
            self.read_piece(spool, index, wanted, place - piece.start)?;
            at += count;
        }
        Ok(())
    }

    /// Says that something will be made of these bytes; [`Self::done`] takes it back.
    pub(crate) fn expect(&self, bytes: Range<u64>) {
        self.is_expected.store(true, Ordering::Release);
        let mut pieces = lock(&self.pieces);
        for piece in covered(&mut pieces, bytes, self.piece_bytes) {
            piece.uses += 1;
        }
    }

    /// Says that something has been made of these bytes.
    pub(crate) fn done(&self, bytes: Range<u64>) {
        let first = (bytes.start / self.piece_bytes) as usize;
        let mut pieces = lock(&self.pieces);
        for (index, piece) in covered(&mut pieces, bytes, self.piece_bytes).iter_mut().enumerate() {
            piece.uses = piece.uses.saturating_sub(1);
            self.drop_unneeded(first + index, piece);
        }
    }

    /// Fetches what has not come yet and compares the checksum of the whole file, byte for byte as
    /// it was read. Returns the values of its chunks.
    pub(crate) fn verify(&self) -> io::Result<Vec<Digest>> {
        let mut order = lock(&self.order);
        let count = lock(&self.pieces).len();
        while order.next < count {
            let next = order.next;
            let bytes = self.hold(next)?;
            self.hash(&mut order, next, bytes)?;
        }
        if let Some(hasher) = order.hasher.take() {
            let found = hasher.finish();
            if found != self.checksum {
                return Err(self.wrong_content(found.text()));
            }
        }
        Ok(order.chunks.clone())
    }

    fn wrong_content(&self, found: String) -> io::Error {
        io::Error::other(HttpError::Content {
            file: self.file.path.clone(),
            size: self.file.size,
            algorithm: self.checksum.algorithm(),
            expected: self.checksum.text(),
            found,
        })
    }

    fn range_of(&self, index: usize) -> Range<u64> {
        let start = index as u64 * self.piece_bytes;
        start..(start + self.piece_bytes).min(self.file.size)
    }

    pub(crate) fn range(&self, bytes: Range<u64>) -> io::Result<Vec<u8>> {
        let mut buffer = vec![0; (bytes.end - bytes.start) as usize];
        let api = &self.hub.api;
        let retrying = |problem: &str| api.retrying(problem);
        read_range(&api.client, &self.url, self.file.size, bytes.start, &mut buffer, &retrying)
            .map_err(|error| io::Error::other(HubError::from(error)))?;
        Ok(buffer)
    }

    /// The file of a piece.
    fn path_of(&self, spool: &Path, index: usize) -> PathBuf {
        spool.join(format!("{}.{index:06}", self.name()))
    }

    fn read_piece(
        &self,
        spool: &Path,
        index: usize,
        buffer: &mut [u8],
        offset: u64,
    ) -> io::Result<()> {
        if let Some(bytes) = self.hold(index)? {
            self.hash_held(index, bytes)?;
        }
        let file = match File::open(self.path_of(spool, index)) {
            // Nobody had said that it is needed, so it went when it was hashed.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.hold(index)?;
                File::open(self.path_of(spool, index))?
            }
            file => file?,
        };
        file.read_exact_at(buffer, offset)
    }

    /// Downloads a piece unless it is held; its bytes if it was downloaded now.
    fn hold(&self, index: usize) -> io::Result<Option<Vec<u8>>> {
        let mut pieces = lock(&self.pieces);
        loop {
            let piece = &mut pieces[index];
            if piece.is_held {
                return Ok(None);
            }
            if !piece.is_downloading {
                piece.is_downloading = true;
                break;
            }
            let waited = self.arrived.wait_timeout(pieces, LOOK_AGAIN);
            pieces = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let is_again = pieces[index].is_hashed;
        drop(pieces);
        let result = self.fetch(index, is_again);
        let mut pieces = lock(&self.pieces);
        pieces[index].is_downloading = false;
        pieces[index].is_held = result.is_ok();
        self.arrived.notify_all();
        result.map(Some)
    }

    /// Downloads a piece into its file. A second download must give the same bytes.
    fn fetch(&self, index: usize, is_again: bool) -> io::Result<Vec<u8>> {
        let spool = self.spool.as_deref().ok_or(io::ErrorKind::NotFound)?;
        let bytes = self.range(self.range_of(index))?;
        if is_again {
            let first = index * (self.piece_bytes / CHUNK_BYTES) as usize;
            let chunks = self.chunks_of(index, &bytes);
            // The checksum's maker holds the lock only while it hashes or waits for a piece that
            // has not been hashed, which this one has.
            let order = lock(&self.order);
            if order.chunks.get(first..first + chunks.len()) != Some(&chunks) {
                return Err(self.wrong_content("other bytes than before".to_owned()));
            }
        }
        fs::create_dir_all(spool)?;
        fs::write(self.path_of(spool, index), &bytes)?;
        Ok(bytes)
    }

    fn chunks_of(&self, index: usize, bytes: &[u8]) -> Vec<Digest> {
        let first = index as u64 * (self.piece_bytes / CHUNK_BYTES);
        let chunks = bytes.chunks(CHUNK_BYTES as usize).zip(first..chunk_count(self.file.size));
        chunks.map(|(bytes, chunk)| chunk_value(bytes, self.file.size, chunk)).collect()
    }

    /// Hashes the held pieces that are next in order, unless another thread does. One of them has
    /// just come.
    fn hash_held(&self, index: usize, bytes: Vec<u8>) -> io::Result<()> {
        if !self.is_expected.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut come = Some(bytes);
        while let Ok(mut order) = self.order.try_lock() {
            let next = order.next;
            if !lock(&self.pieces).get(next).is_some_and(|piece| piece.is_held) {
                return Ok(());
            }
            let bytes = come.take_if(|_| next == index);
            self.hash(&mut order, next, bytes)?;
        }
        Ok(())
    }

    /// Puts the next piece, which is here, into the checksum: from memory if it has just come.
    fn hash(&self, order: &mut Order, index: usize, bytes: Option<Vec<u8>>) -> io::Result<()> {
        let bytes = if let Some(bytes) = bytes {
            bytes
        } else {
            let spool = self.spool.as_deref().ok_or(io::ErrorKind::NotFound)?;
            fs::read(self.path_of(spool, index))?
        };
        let range = self.range_of(index);
        let start = lock(&self.start);
        let known = start.get(range.start as usize..).unwrap_or_default();
        let known = &known[..known.len().min(bytes.len())];
        if bytes.len() as u64 != range.end - range.start || known != &bytes[..known.len()] {
            return Err(self.wrong_content("another header than was read first".to_owned()));
        }
        drop(start);
        if let Some(hasher) = &mut order.hasher {
            hasher.update(&bytes);
        }
        order.chunks.extend(self.chunks_of(index, &bytes));
        order.next = index + 1;
        let mut pieces = lock(&self.pieces);
        let piece = &mut pieces[index];
        piece.is_hashed = true;
        self.drop_unneeded(index, piece);
        Ok(())
    }

    /// Removes a piece that was hashed and of which nothing will be made.
    fn drop_unneeded(&self, index: usize, piece: &mut Piece) {
        if piece.uses == 0 && piece.is_hashed && piece.is_held {
            piece.is_held = false;
            if let Some(spool) = &self.spool {
                // What cannot be removed now goes with the folder.
                let _ = fs::remove_file(self.path_of(spool, index));
            }
        }
    }
}

/// The pieces that these bytes lie in.
fn covered(pieces: &mut [Piece], bytes: Range<u64>, piece_bytes: u64) -> &mut [Piece] {
    if bytes.is_empty() {
        return &mut [];
    }
    let first = (bytes.start / piece_bytes) as usize;
    let last = bytes.end.div_ceil(piece_bytes) as usize;
    pieces.get_mut(first..last).unwrap_or_default()
}

impl Drop for RemoteFile {
    fn drop(&mut self) {
        let Some(spool) = &self.spool else { return };
        let held: Vec<usize> = {
            let pieces = lock(&self.pieces);
            (0..pieces.len()).filter(|index| pieces[*index].is_held).collect()
        };
        for index in held {
            let _ = fs::remove_file(self.path_of(spool, index));
        }
    }
}
