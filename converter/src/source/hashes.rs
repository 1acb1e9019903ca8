//! The digests of a source's weight files. Every byte is hashed once, by the thread that reads it:
//! a tensor that is read from its first byte to its last is hashed piece by piece ([`Follower`]);
//! the bytes that no tensor covers are read only to be hashed. Knows nothing of tensors.

use std::{
    collections::BTreeMap,
    io,
    ops::Range,
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

use shardpack_manifests::{
    CHUNK_BYTES, Digest,
    digest::{
        PIECE_BYTES, PieceHasher, chunk_count, chunk_range, merge_chunks, merge_pieces,
        read_chunk_value,
    },
};

/// Ranges of files from which a thread reads in turns: the parts that a decoded tensor is stored
/// as. What is read beyond them is read again for its hash.
const MAX_RUNS: usize = 8;

/// Pieces (the units of hashing) of a whole chunk.
const PIECES_PER_CHUNK: u64 = CHUNK_BYTES / PIECE_BYTES;

/// What is known of the digests of all weight files.
pub(crate) struct FileHashes {
    files: Vec<Chunks>,
    /// Chunks of which some pieces are known, by file and chunk.
    open: Mutex<BTreeMap<(usize, u64), Pieces>>,
}

/// The pieces of one chunk.
type Pieces = Vec<Option<Digest>>;

/// One file's chunks.
struct Chunks {
    size: u64,
    values: Vec<OnceLock<Digest>>,
}

/// Pieces of a file of `size` bytes. A file of one chunk is one piece, because BLAKE3 has no
/// value for the parts of what may be a whole input.
pub(crate) const fn piece_count(size: u64) -> u64 {
    if chunk_count(size) == 1 { 1 } else { size.div_ceil(PIECE_BYTES) }
}

/// The pieces that lie within a range of a file of `size` bytes.
pub(crate) fn pieces_within(size: u64, bytes: &Range<u64>) -> Range<u64> {
    if chunk_count(size) == 1 {
        return 0..0;
    }
    let end = if bytes.end == size { size.div_ceil(PIECE_BYTES) } else { bytes.end / PIECE_BYTES };
    let start = bytes.start.div_ceil(PIECE_BYTES);
    start..end.max(start)
}

impl FileHashes {
    /// Nothing is known yet of files of these sizes.
    pub(crate) fn new(sizes: impl IntoIterator<Item = u64>) -> Self {
        let chunks = |size| Chunks {
            size,
            values: (0..chunk_count(size)).map(|_| OnceLock::new()).collect(),
        };
        Self { files: sizes.into_iter().map(chunks).collect(), open: Mutex::default() }
    }

    /// Takes the value of a whole chunk.
    pub(crate) fn set_chunk(&self, file: usize, chunk: u64, value: Digest) {
        self.files[file].values[chunk as usize].get_or_init(|| value);
    }

    /// Whether a piece is hashed.
    fn has(&self, file: usize, piece: u64) -> bool {
        let (chunk, index) = (piece / PIECES_PER_CHUNK, piece % PIECES_PER_CHUNK);
        if self.files[file].values[chunk as usize].get().is_some() {
            return true;
        }
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.get(&(file, chunk)).is_some_and(|pieces| pieces[index as usize].is_some())
    }

    /// Takes the value of a piece of a file of several chunks.
    fn set_piece(&self, file: usize, piece: u64, value: Digest) {
        let (chunk, index) = (piece / PIECES_PER_CHUNK, piece % PIECES_PER_CHUNK);
        let Chunks { size, values } = &self.files[file];
        let cell = &values[chunk as usize];
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if cell.get().is_some() {
            return;
        }
        let range = chunk_range(*size, chunk);
        let count = (range.end - range.start).div_ceil(PIECE_BYTES) as usize;
        let pieces = open.entry((file, chunk)).or_insert_with(|| vec![None; count]);
        pieces[index as usize] = Some(value);
        if let Some(all) = pieces.iter().copied().collect::<Option<Vec<Digest>>>() {
            cell.get_or_init(|| merge_pieces(&all));
            open.remove(&(file, chunk));
        }
    }

    /// Hashes those of a file's pieces that are not hashed yet. `read` fills a slice from an
    /// offset; `buffer` is its space.
    pub(crate) fn hash(
        &self,
        file: usize,
        pieces: Range<u64>,
        read: impl Fn(&mut [u8], u64) -> io::Result<()>,
        buffer: &mut Vec<u8>,
    ) -> io::Result<()> {
        let size = self.files[file].size;
        if chunk_count(size) == 1 {
            let value = read_chunk_value(read, (size, 0), buffer)?;
            self.set_chunk(file, 0, value);
            return Ok(());
        }
        for piece in pieces {
            if self.has(file, piece) {
                continue;
            }
            let at = piece * PIECE_BYTES;
            buffer.resize((size - at).min(PIECE_BYTES) as usize, 0);
            read(buffer, at)?;
            let mut hasher = PieceHasher::new(at);
            hasher.update(buffer);
            self.set_piece(file, piece, hasher.finish());
        }
        Ok(())
    }

    /// Pieces of files that are not hashed, in order.
    pub(crate) fn missing(&self) -> Vec<(usize, u64)> {
        let of_file = |(file, chunks): (usize, &Chunks)| {
            let pieces = 0..piece_count(chunks.size);
            pieces.filter(move |piece| !self.has(file, *piece)).map(move |piece| (file, piece))
        };
        self.files.iter().enumerate().flat_map(of_file).collect()
    }

    /// The digest of every file.
    ///
    /// # Panics
    /// When a piece is missing.
    pub(crate) fn digests(&self) -> Vec<Digest> {
        let digest = |Chunks { size, values }: &Chunks| {
            let value = |cell: &OnceLock<Digest>| *cell.get().expect("every piece was hashed");
            merge_chunks(&values.iter().map(value).collect::<Vec<_>>(), *size)
        };
        self.files.iter().map(digest).collect()
    }
}

/// Hashes what one thread reads, as far as it reads in order.
pub(crate) struct Follower {
    hashes: Arc<FileHashes>,
    /// The one that was begun first is the first.
    runs: Vec<Run>,
}

/// Bytes of a file that were read one after the other.
struct Run {
    file: usize,
    bytes: Range<u64>,
    /// The piece in which they end, if all of it was read and nobody else has hashed it.
    hasher: Option<PieceHasher>,
}

impl Follower {
    pub(crate) const fn new(hashes: Arc<FileHashes>) -> Self {
        Self { hashes, runs: Vec::new() }
    }

    /// Where a read should stop, so that what it brings is hashed while it is in the core's
    /// cache: the next end of a piece.
    pub(crate) const fn stop(offset: u64, end: u64) -> u64 {
        let piece = (offset / PIECE_BYTES + 1) * PIECE_BYTES;
        if piece < end { piece } else { end }
    }

    /// Takes bytes that were read from `offset` on.
    pub(crate) fn follow(&mut self, file: usize, offset: u64, bytes: &[u8]) {
        let size = self.hashes.files[file].size;
        if chunk_count(size) == 1 {
            return;
        }
        let goes_on =
            |run: &Run| run.file == file && (run.bytes.start..=run.bytes.end).contains(&offset);
        let index = self.runs.iter().position(goes_on).unwrap_or_else(|| {
            if self.runs.len() == MAX_RUNS {
                self.runs.remove(0);
            }
            self.runs.push(Run { file, bytes: offset..offset, hasher: None });
            self.runs.len() - 1
        });
        let run = &mut self.runs[index];
        // Rows that share a scale read it again.
        let known = (run.bytes.end - offset).min(bytes.len() as u64);
        run.take(&bytes[known as usize..], size, &self.hashes);
    }
}

impl Run {
    fn take(&mut self, mut bytes: &[u8], size: u64, hashes: &FileHashes) {
        while !bytes.is_empty() {
            let at = self.bytes.end;
            let piece = at / PIECE_BYTES;
            if at.is_multiple_of(PIECE_BYTES) && !hashes.has(self.file, piece) {
                self.hasher = Some(PieceHasher::new(at));
            }
            let end = ((piece + 1) * PIECE_BYTES).min(size);
            let (now, later) = bytes.split_at(bytes.len().min((end - at) as usize));
            if let Some(hasher) = &mut self.hasher {
                hasher.update(now);
            }
            self.bytes.end += now.len() as u64;
            if self.bytes.end == end
                && let Some(hasher) = self.hasher.take()
            {
                hashes.set_piece(self.file, piece, hasher.finish());
            }
            bytes = later;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIECE: usize = PIECE_BYTES as usize;

    fn bytes(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * 31 % 251) as u8).collect()
    }

    fn read_from(data: &[u8]) -> impl Fn(&mut [u8], u64) -> io::Result<()> {
        |out, at| {
            out.copy_from_slice(&data[at as usize..][..out.len()]);
            Ok(())
        }
    }

    /// Reads these ranges of a file, each in blocks of so many bytes, expects so many pieces to be
    /// missing then, reads them too, and compares the digest.
    #[track_caller]
    fn check(len: usize, ranges: &[Range<usize>], block: usize, missing: usize) {
        let data = bytes(len);
        let hashes = Arc::new(FileHashes::new([7, len as u64]));
        hashes.hash(0, 0..1, read_from(&data[..7]), &mut Vec::new()).unwrap();
        let mut follower = Follower::new(Arc::clone(&hashes));
        for range in ranges {
            for (index, bytes) in data[range.clone()].chunks(block).enumerate() {
                follower.follow(1, (range.start + index * block) as u64, bytes);
            }
        }
        let left = hashes.missing();
        assert_eq!(left.len(), missing, "{ranges:?} of {len} by {block}");
        for (file, piece) in left {
            assert_eq!(file, 1);
            hashes.hash(1, piece..piece + 1, read_from(&data), &mut Vec::new()).unwrap();
        }
        assert!(hashes.open.lock().unwrap().is_empty(), "what is merged is kept no longer");
        assert_eq!(hashes.digests(), [Digest::of(&data[..7]), Digest::of(&data)]);
    }

    #[test]
    fn what_is_read_in_order_is_not_read_again() {
        let chunk = CHUNK_BYTES as usize;
        for len in [chunk + 1, chunk + PIECE, 2 * chunk, 2 * chunk + 5 * PIECE + 3] {
            let pieces = len.div_ceil(PIECE);
            for block in [1000, PIECE, 999_983] {
                check(len, std::slice::from_ref(&(0..len)), block, 0);
                // A header, then two tensors, the second one first: the pieces that no tensor
                // covers are missing, and the one in which they meet.
                let (header, middle) = (1237, 3 * PIECE + 17);
                check(len, &[middle..len, header..middle], block, 2);
                check(len, &[PIECE..2 * PIECE, 3 * PIECE..3 * PIECE + 5], block, pieces - 1);
            }
        }
        // Of a file of one chunk nothing can be hashed by itself.
        check(PIECE, std::slice::from_ref(&(0..PIECE)), 1000, 1);
        check(chunk, std::slice::from_ref(&(0..chunk)), PIECE, 1);
    }

    #[test]
    fn what_is_read_in_turns_or_twice_is_hashed_once() {
        let data = bytes(CHUNK_BYTES as usize + 6 * PIECE);
        let hashes = Arc::new(FileHashes::new([data.len() as u64]));
        let mut follower = Follower::new(Arc::clone(&hashes));
        // Weights, and their scales further back, which blocks of rows share.
        let (weights, scales) = (2 * PIECE, data.len() - 4 * PIECE);
        for block in 0..8 {
            for (start, step, len) in [(weights, PIECE / 2, PIECE / 2), (scales, PIECE / 4, PIECE)]
            {
                let at = start + block * step;
                let end = (at + len).min(data.len());
                follower.follow(0, at as u64, &data[at..end]);
            }
        }
        let missing: Vec<u64> = hashes.missing().into_iter().map(|(_, piece)| piece).collect();
        let pieces = data.len() / PIECE;
        let expected = (0..2).chain(6..pieces as u64 - 4).chain(pieces as u64 - 2..pieces as u64);
        let scales_end = scales + 7 * (PIECE / 4) + PIECE;
        assert_eq!(scales_end / PIECE, pieces - 2, "the last blocks' scales end within a piece");
        assert_eq!(missing, expected.collect::<Vec<_>>());
        hashes.hash(0, 0..pieces as u64, read_from(&data), &mut Vec::new()).unwrap();
        assert_eq!(hashes.digests(), [Digest::of(&data)]);
    }

    #[test]
    fn pieces_within_a_range() {
        let size = 3 * CHUNK_BYTES + 5;
        let last = size.div_ceil(PIECE_BYTES);
        for (bytes, pieces) in [
            (0..size, 0..last),
            (1..size, 1..last),
            (1..size - 1, 1..last - 1),
            (1..PIECE_BYTES, 1..1),
            (1..5, 1..1),
            (PIECE_BYTES..2 * PIECE_BYTES, 1..2),
            (PIECE_BYTES - 1..2 * PIECE_BYTES + 1, 1..2),
        ] {
            assert_eq!(pieces_within(size, &bytes), pieces, "{bytes:?}");
        }
        assert!(pieces_within(CHUNK_BYTES, &(0..CHUNK_BYTES)).is_empty());
        assert_eq!(
            [piece_count(0), piece_count(CHUNK_BYTES), piece_count(CHUNK_BYTES + 1)],
            [1, 1, 17]
        );
    }
}
