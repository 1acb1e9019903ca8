//! Whole chunks read, verified and scattered by several threads.
//!
//! Bytes are read straight to their places, in pieces that are hashed while the cache still has
//! them: a chunk passes through memory once.

use std::{
    collections::VecDeque,
    fs::File,
    io,
    ops::Range,
    os::unix::fs::FileExt,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use shardpack_kernels::Repack;
use shardpack_manifests::{
    digest::{ChunkInPieces, chunk_range},
    manifest::FileEntry,
};

use super::{DamagedChunk, OpenError, OpenProgress, memory::LARGE_PAGE_BYTES, repack::Rearranging};

/// Bytes that are read at once: they stay in the second cache until they are hashed, and are
/// whole subtrees of BLAKE3. Reads past the cache, as on macOS, go to the disk one by one and are
/// worth it only when they are large.
const PIECE_BYTES: u64 = if cfg!(target_vendor = "apple") { 4 << 20 } else { 256 << 10 };

/// Where one thread reads chunks from. Files are named by their position in the manifest.
pub(super) trait ChunkReader {
    /// Chunks that are asked for before the first of them is read.
    const AHEAD: usize;

    /// Asks for a chunk. What is wrong with that is told when the chunk is read.
    fn ask(&mut self, file: usize, chunk: u64);

    /// Reads the bytes at `at`, which follow those that were read before in this chunk; chunks are read
    /// in the order in which they were asked for.
    fn read_exact_at(&mut self, file: usize, into: &mut [u8], at: u64) -> io::Result<()>;

    /// Whether the chunks that were asked for and not read to their end can be asked for again.
    fn recover(&mut self, failed: &io::Error) -> bool;
}

/// Files on a disk.
#[derive(Clone, Copy)]
pub(super) struct Files<'a>(pub(super) &'a [File]);

impl ChunkReader for Files<'_> {
    const AHEAD: usize = 1;

    fn ask(&mut self, _: usize, _: u64) {}

    fn read_exact_at(&mut self, file: usize, into: &mut [u8], at: u64) -> io::Result<()> {
        self.0[file].read_exact_at(into, at)
    }

    fn recover(&mut self, _: &io::Error) -> bool {
        false
    }
}

/// A file and where its bytes go.
pub(super) struct SourceFile<'a> {
    pub(super) entry: &'a FileEntry,
    /// In file order, disjoint.
    pub(super) destinations: Vec<Destination<'a>>,
    /// Whether chunks that have no destination are left out; else they are read to be verified.
    pub(super) partly: bool,
}

/// Where a run of a file's bytes goes.
pub(super) struct Destination<'a> {
    /// The tensor that it is part of, if any.
    pub(super) tensor: Option<&'a str>,
    /// First byte within the file.
    pub(super) offset: u64,
    /// Memory for the run, as long as it.
    pub(super) bytes: &'a mut [u8],
    /// How the tensor's integers shall be interleaved, if at all.
    pub(super) repack: Option<Repack>,
    /// First byte of the tensor within the file.
    pub(super) first: u64,
}

/// One chunk and the memory for its parts, which no other chunk shares.
struct Job<'a> {
    entry: &'a FileEntry,
    file: usize,
    chunk: u64,
    bytes: Range<u64>,
    parts: Vec<Destination<'a>>,
}

/// Reads all files, on as many threads as there are `readers`, and returns their bytes' number. Every
/// damaged chunk is reported; reading stops at the first input/output error.
pub(super) fn read<R: ChunkReader + Send>(
    sources: Vec<SourceFile<'_>>,
    readers: Vec<R>,
    progress: &(dyn Fn(OpenProgress) + Sync),
) -> Result<u64, OpenError> {
    let total_bytes = sources.iter().map(|source| source.entry.size).sum();
    let jobs: Vec<_> = sources
        .into_iter()
        .enumerate()
        .flat_map(|(file, source)| {
            let jobs = jobs_of(file, source.entry, source.destinations).into_iter();
            jobs.filter(move |job| !source.partly || !job.parts.is_empty())
        })
        .collect();
    let count = jobs.len();
    let queue = Mutex::new(jobs.into_iter());
    let done_bytes = AtomicU64::new(0);
    let done = |size| {
        let done_bytes = done_bytes.fetch_add(size, Ordering::Relaxed) + size;
        progress(OpenProgress { done_bytes, total_bytes });
    };
    let results: Vec<_> = thread::scope(|scope| {
        let readers = readers.into_iter().take(count.max(1));
        let work = |reader: R| {
            let (queue, done) = (&queue, &done);
            scope.spawn(move || work(queue, reader, done))
        };
        let workers: Vec<_> = readers.map(work).collect();
        let join = |worker: thread::ScopedJoinHandle<'_, _>| {
            worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        workers.into_iter().map(join).collect()
    });
    let mut chunks: Vec<DamagedChunk> = Vec::new();
    for result in results {
        chunks.extend(result?);
    }
    if chunks.is_empty() {
        return Ok(total_bytes);
    }
    chunks.sort_by(|a, b| (&a.file, a.chunk).cmp(&(&b.file, b.chunk)));
    Err(OpenError::Damaged { chunks })
}

/// Carries out jobs until there are none, and returns the damaged chunks. `done` is told the bytes of
/// every chunk.
fn work<'a, R: ChunkReader>(
    queue: &Mutex<impl Iterator<Item = Job<'a>>>,
    mut reader: R,
    done: &impl Fn(u64),
) -> Result<Vec<DamagedChunk>, OpenError> {
    let mut buffer = Vec::new();
    let mut damaged = Vec::new();
    let mut asked: VecDeque<Job<'a>> = VecDeque::new();
    loop {
        while asked.len() < R::AHEAD {
            // Taken in a statement of its own: the lock is not held while reading.
            let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(job) = next else { break };
            reader.ask(job.file, job.chunk);
            asked.push_back(job);
        }
        let Some(job) = asked.front_mut() else { return Ok(damaged) };
        match carry_out(job, &mut reader, &mut buffer) {
            Ok(damage) => damaged.extend(damage),
            Err(source) if reader.recover(&source) => {
                for job in &asked {
                    reader.ask(job.file, job.chunk);
                }
                continue;
            }
            Err(source) => {
                // The other threads find nothing left to do.
                queue.lock().unwrap_or_else(PoisonError::into_inner).by_ref().for_each(drop);
                let (file, chunk, bytes) = (job.entry.name.clone(), job.chunk, job.bytes.clone());
                return Err(OpenError::Chunk { file, chunk, bytes, source });
            }
        }
        done(job.bytes.end - job.bytes.start);
        asked.pop_front();
    }
}

/// Splits the destinations of a file at its chunks' boundaries.
fn jobs_of<'a>(
    file: usize,
    entry: &'a FileEntry,
    destinations: Vec<Destination<'a>>,
) -> Vec<Job<'a>> {
    let mut rest = VecDeque::from(destinations);
    let mut jobs = Vec::with_capacity(entry.chunks.len());
    for chunk in 0..entry.chunks.len() as u64 {
        let bytes = chunk_range(entry.size, chunk);
        let mut parts = Vec::new();
        while let Some(next) = rest.pop_front_if(|next| next.offset < bytes.end) {
            let Destination { offset, bytes: memory, .. } = next;
            let here = (bytes.end - offset).min(memory.len() as u64);
            let (now, later) = memory.split_at_mut(here as usize);
            parts.push(Destination { bytes: now, ..next });
            if !later.is_empty() {
                let offset = offset + here;
                rest.push_front(Destination { offset, bytes: later, ..next });
                break;
            }
        }
        jobs.push(Job { entry, file, chunk, bytes, parts });
    }
    jobs
}

/// Reads and verifies one chunk; again from its start, where that failed. What it found damaged has
/// reached its place; the caller gives nothing away unless all chunks are right.
fn carry_out(
    job: &mut Job<'_>,
    reader: &mut impl ChunkReader,
    buffer: &mut Vec<u8>,
) -> io::Result<Option<DamagedChunk>> {
    let Job { entry, file, chunk, bytes, parts } = job;
    let (entry, file, chunk) = (*entry, *file, *chunk);
    let mut hasher = ChunkInPieces::new(entry.size, chunk);
    touch_ends(parts);
    let mut at = bytes.start;
    for part in parts.iter_mut() {
        // Invariant: parts are in file order and disjoint, and at least `part.offset` has come.
        let start = part.offset.max(bytes.start);
        skip(reader, file, at..start, buffer, &mut hasher)?;
        at = start;
        let mut rearranging = Rearranging::of(part);
        let mut done = 0;
        while done < part.bytes.len() {
            let length = piece_from(at, part.bytes.len() - done);
            let now = &mut part.bytes[done..done + length];
            reader.read_exact_at(file, now, at)?;
            hasher.update(now);
            (at, done) = (at + length as u64, done + length);
            // While the cache still has them.
            rearranging.interleave_whole(&mut part.bytes[..done]);
        }
    }
    skip(reader, file, at..bytes.end, buffer, &mut hasher)?;
    if bytes.is_empty() {
        // It was asked for, as any other.
        reader.read_exact_at(file, &mut [], bytes.start)?;
    }
    let found = hasher.finish();
    let expected = entry.chunks[chunk as usize];
    if found == expected {
        return Ok(None);
    }
    let tensors = parts.iter().filter_map(|part| part.tensor.map(str::to_owned)).collect();
    let file = entry.name.clone();
    Ok(Some(DamagedChunk { file, chunk, bytes: bytes.clone(), expected, found, tensors }))
}

/// Touches of every large page first the last byte that is in one of the parts.
///
/// The system clears a new page when it is first touched. Linux leaves the touched place for last,
/// so that it is in the cache: a page that is touched at its beginning is cleared backwards, which
/// takes twice as long as forwards. All of a chunk at once, since the next chunk's thread may be
/// about to write to the beginning of a page whose end is here.
fn touch_ends(parts: &mut [Destination<'_>]) {
    for part in parts.iter_mut().rev() {
        let address = part.bytes.as_ptr().addr();
        let mut end = part.bytes.len();
        while let Some(last) = end.checked_sub(1) {
            part.bytes[last] = 0;
            end = last.saturating_sub((address + last) % LARGE_PAGE_BYTES);
        }
    }
}

/// Length of the piece that begins at `at`, of at most `left` bytes; pieces end on their
/// multiples.
fn piece_from(at: u64, left: usize) -> usize {
    ((PIECE_BYTES - at % PIECE_BYTES) as usize).min(left)
}

/// Hashes bytes of the file that go nowhere.
fn skip(
    reader: &mut impl ChunkReader,
    file: usize,
    mut range: Range<u64>,
    buffer: &mut Vec<u8>,
    hasher: &mut ChunkInPieces,
) -> io::Result<()> {
    while range.start < range.end {
        // Invariant: a piece is at most PIECE_BYTES long.
        buffer.resize(piece_from(range.start, (range.end - range.start) as usize), 0);
        reader.read_exact_at(file, buffer, range.start)?;
        hasher.update(buffer);
        range.start += buffer.len() as u64;
    }
    Ok(())
}
