//! BLAKE3 of files and their chunks.
//!
//! A file is hashed in chunks of 4 MiB. Each chunk has a 32-byte *chaining value*: the value of
//! its subtree in the file's BLAKE3 tree. The chaining values of a file merge to the file's
//! ordinary BLAKE3, so one list of values serves verification, transfer and repair, and `b3sum`
//! agrees with the manifest. A file of one chunk (or none) lists its ordinary digest instead,
//! because BLAKE3 has no non-root value for a whole input.

use std::{fmt, str::FromStr};

use blake3::hazmat::{HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use shardpack_formats::hex;

/// Bytes of a chunk: large enough that a request costs little beside its data, small enough that
/// a damaged chunk is cheap to send again; a power of two as BLAKE3's tree demands.
pub const CHUNK_BYTES: u64 = 4 << 20;

/// 32 bytes of BLAKE3: the digest of a file, a document or a tensor, or a chunk's chaining value.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// The ordinary BLAKE3 of `bytes`.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }

    /// The ordinary BLAKE3 of `bytes`, on all threads of the current pool. `progress` is told of
    /// bytes as they are done.
    #[must_use]
    pub fn of_parallel(bytes: &[u8], progress: &dyn Fn(u64)) -> Self {
        /// Long enough to keep all threads busy, short enough that a bar moves.
        const STEP: usize = 64 << 20;
        let mut hasher = blake3::Hasher::new();
        for step in bytes.chunks(STEP) {
            hasher.update_rayon(step);
            progress(step.len() as u64);
        }
        Self(*hasher.finalize().as_bytes())
    }

    /// The first twelve hex digits, for people.
    #[must_use]
    pub fn short(&self) -> String {
        hex::encode(&self.0[..6])
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&hex::encode(&self.0))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Digest({self})")
    }
}

impl FromStr for Digest {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        hex::decode(text)
            .and_then(|bytes| bytes.try_into().ok())
            .map(Self)
            .ok_or_else(|| format!("expected 64 lower-case hex digits, found {text:?}"))
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// Chunks of a file of this size; an empty file has one empty chunk.
#[must_use]
pub const fn chunk_count(size_bytes: u64) -> u64 {
    if size_bytes == 0 { 1 } else { size_bytes.div_ceil(CHUNK_BYTES) }
}

/// Byte range of a chunk within a file of `size_bytes`.
#[must_use]
pub const fn chunk_range(size_bytes: u64, index: u64) -> std::ops::Range<u64> {
    let start = index * CHUNK_BYTES;
    let end = if start + CHUNK_BYTES < size_bytes { start + CHUNK_BYTES } else { size_bytes };
    start..end
}

/// The value that a manifest lists for chunk `index` of a file of `size_bytes`.
///
/// # Panics
/// When `bytes` is not as long as [`chunk_range`] says.
#[must_use]
pub fn chunk_value(bytes: &[u8], size_bytes: u64, index: u64) -> Digest {
    let mut hasher = ChunkInPieces::new(size_bytes, index);
    hasher.update(bytes);
    hasher.finish()
}

/// Bytes of a piece of a chunk, which is hashed by itself: what was just read is still in the
/// core's own cache when it is hashed. A power of two as BLAKE3's tree demands.
pub const PIECE_BYTES: u64 = 256 << 10;

/// Reads chunk `index` of a file of `size_bytes` piece by piece and gives the value that
/// [`chunk_value`] gives. `read` fills a slice from an offset in the file; `buffer` is its space.
pub fn read_chunk_value<E>(
    mut read: impl FnMut(&mut [u8], u64) -> Result<(), E>,
    (size_bytes, index): (u64, u64),
    buffer: &mut Vec<u8>,
) -> Result<Digest, E> {
    let range = chunk_range(size_bytes, index);
    let mut hasher = ChunkInPieces::new(size_bytes, index);
    let mut at = range.start;
    while at < range.end {
        buffer.resize((range.end - at).min(PIECE_BYTES) as usize, 0);
        read(buffer, at)?;
        hasher.update(buffer);
        at += buffer.len() as u64;
    }
    Ok(hasher.finish())
}

/// The value of a chunk whose bytes come piece by piece, as [`chunk_value`] gives it.
pub struct ChunkInPieces {
    hasher: blake3::Hasher,
    /// Bytes that are still to come.
    left: u64,
    /// Whether the file has no other chunk.
    only: bool,
}

impl ChunkInPieces {
    /// For chunk `index` of a file of `size_bytes`.
    #[must_use]
    pub fn new(size_bytes: u64, index: u64) -> Self {
        let range = chunk_range(size_bytes, index);
        let mut hasher = blake3::Hasher::new();
        hasher.set_input_offset(range.start);
        Self { hasher, left: range.end - range.start, only: chunk_count(size_bytes) == 1 }
    }

    /// Takes the next bytes.
    ///
    /// # Panics
    /// When they are more than the chunk has.
    pub fn update(&mut self, bytes: &[u8]) {
        let left = self.left.checked_sub(bytes.len() as u64);
        self.left = left.expect("a chunk is hashed up to its end");
        self.hasher.update(bytes);
    }

    /// The value.
    ///
    /// # Panics
    /// When bytes are missing.
    #[must_use]
    pub fn finish(self) -> Digest {
        assert_eq!(self.left, 0, "a chunk is hashed whole");
        if self.only {
            Digest(*self.hasher.finalize().as_bytes())
        } else {
            Digest(self.hasher.finalize_non_root())
        }
    }
}

/// The value of a piece: of the [`PIECE_BYTES`] that begin at a multiple of them, or of the fewer
/// that end the file. Pieces of a file may be hashed in any order.
pub struct PieceHasher(blake3::Hasher);

impl PieceHasher {
    /// For the piece that begins at `offset` in its file.
    ///
    /// # Panics
    /// When no piece begins there.
    #[must_use]
    pub fn new(offset: u64) -> Self {
        assert!(offset.is_multiple_of(PIECE_BYTES), "pieces begin at multiples of their size");
        let mut hasher = blake3::Hasher::new();
        hasher.set_input_offset(offset);
        Self(hasher)
    }

    /// Takes the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The value.
    #[must_use]
    pub fn finish(self) -> Digest {
        Digest(self.0.finalize_non_root())
    }
}

/// What [`chunk_value`] gives, from the values of all pieces of a chunk, in a file of more than
/// one chunk.
///
/// # Panics
/// When there is no piece.
#[must_use]
pub fn merge_pieces(values: &[Digest]) -> Digest {
    Digest(merge(values))
}

/// The file's ordinary BLAKE3 from its chunks' values.
///
/// # Panics
/// When `values` does not have [`chunk_count`] entries.
#[must_use]
pub fn merge_chunks(values: &[Digest], size_bytes: u64) -> Digest {
    assert_eq!(values.len() as u64, chunk_count(size_bytes), "every chunk has one value");
    if let [only] = values {
        return *only;
    }
    let (left, right) = values.split_at(left_len(values.len()));
    Digest(*merge_subtrees_root(&merge(left), &merge(right), Mode::Hash).as_bytes())
}

fn merge(values: &[Digest]) -> [u8; 32] {
    if let [only] = values {
        return only.0;
    }
    let (left, right) = values.split_at(left_len(values.len()));
    merge_subtrees_non_root(&merge(left), &merge(right), Mode::Hash)
}

/// BLAKE3's left subtree is the largest power of two smaller than the whole.
const fn left_len(len: usize) -> usize {
    len.next_power_of_two() / 2
}

/// Digest and chunk values of one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileDigests {
    /// Bytes of the file.
    pub size_bytes: u64,
    /// Ordinary BLAKE3.
    pub digest: Digest,
    /// One value per chunk.
    pub chunks: Vec<Digest>,
}

/// Hashes a file that is written or read front to back, in pieces of any length.
pub struct ChunkHasher {
    chunks: Vec<Digest>,
    /// Hashes the current chunk as a subtree.
    subtree: blake3::Hasher,
    /// Hashes the first chunk as a whole file, in case it stays the only one.
    whole: blake3::Hasher,
    size_bytes: u64,
}

impl Default for ChunkHasher {
    fn default() -> Self {
        Self::new()
    }
}

impl ChunkHasher {
    /// A hasher at byte 0.
    #[must_use]
    pub fn new() -> Self {
        Self {
            chunks: Vec::new(),
            subtree: blake3::Hasher::new(),
            whole: blake3::Hasher::new(),
            size_bytes: 0,
        }
    }

    /// Takes the next bytes of the file.
    pub fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let in_chunk = self.size_bytes % CHUNK_BYTES;
            if in_chunk == 0 && self.size_bytes > 0 {
                self.close_chunk();
            }
            let room = (CHUNK_BYTES - in_chunk).min(bytes.len() as u64);
            let (now, later) = bytes.split_at(room as usize);
            if self.size_bytes < CHUNK_BYTES {
                self.whole.update(now);
            } else {
                self.subtree.update(now);
            }
            self.size_bytes += room;
            bytes = later;
        }
    }

    /// Ends the current chunk, which a further byte has shown not to be the last.
    fn close_chunk(&mut self) {
        let value = if self.size_bytes == CHUNK_BYTES {
            // The first chunk was hashed as a file; its subtree value has the same state.
            self.whole.finalize_non_root()
        } else {
            self.subtree.finalize_non_root()
        };
        self.chunks.push(Digest(value));
        self.subtree = blake3::Hasher::new();
        self.subtree.set_input_offset(self.size_bytes);
    }

    /// The digests of everything taken.
    #[must_use]
    pub fn finish(mut self) -> FileDigests {
        let size_bytes = self.size_bytes;
        if size_bytes <= CHUNK_BYTES {
            self.chunks.push(Digest(*self.whole.finalize().as_bytes()));
        } else {
            self.chunks.push(Digest(self.subtree.finalize_non_root()));
        }
        FileDigests {
            size_bytes,
            digest: merge_chunks(&self.chunks, size_bytes),
            chunks: self.chunks,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * 31 % 251) as u8).collect()
    }

    fn check(len: usize, piece: usize) {
        let data = bytes(len);
        let mut hasher = ChunkHasher::new();
        data.chunks(piece.max(1)).for_each(|piece| hasher.update(piece));
        let digests = hasher.finish();
        let size = len as u64;
        assert_eq!(digests.size_bytes, size);
        assert_eq!(digests.digest, Digest::of(&data), "{len} bytes in pieces of {piece}");
        assert_eq!(digests.chunks.len() as u64, chunk_count(size));
        for (index, value) in digests.chunks.iter().enumerate() {
            let range = chunk_range(size, index as u64);
            let chunk = &data[range.start as usize..range.end as usize];
            assert_eq!(
                *value,
                chunk_value(chunk, size, index as u64),
                "chunk {index} of {len} bytes"
            );
        }
    }

    #[test]
    fn chunk_values_merge_to_the_ordinary_digest() {
        let chunk = CHUNK_BYTES as usize;
        for len in [
            0,
            1,
            1024,
            chunk - 1,
            chunk,
            chunk + 1,
            2 * chunk,
            2 * chunk + 5,
            3 * chunk,
            5 * chunk + 77,
        ] {
            check(len, 1 << 20);
        }
        check(2 * chunk + 5, 999_983);
        check(3 * chunk, chunk);
    }

    #[test]
    fn pieces_merge_to_their_chunk() {
        let (chunk, piece) = (CHUNK_BYTES as usize, PIECE_BYTES as usize);
        let data = bytes(3 * chunk);
        for len in [
            chunk + 1,
            chunk + 1024,
            chunk + piece,
            chunk + piece + 1,
            chunk + 3 * piece,
            chunk + 5 * piece + 77,
            2 * chunk - 1,
            2 * chunk,
            2 * chunk + 1,
            3 * chunk,
        ] {
            let data = &data[..len];
            for index in 0..chunk_count(len as u64) {
                let range = chunk_range(len as u64, index);
                let bytes = &data[range.start as usize..range.end as usize];
                let values: Vec<Digest> = (range.start..)
                    .step_by(piece)
                    .zip(bytes.chunks(piece))
                    .map(|(offset, bytes)| {
                        let mut hasher = PieceHasher::new(offset);
                        bytes.chunks(100_003).for_each(|bytes| hasher.update(bytes));
                        hasher.finish()
                    })
                    .collect();
                let want = chunk_value(bytes, len as u64, index);
                assert_eq!(merge_pieces(&values), want, "chunk {index} of {len} bytes");
            }
        }
    }

    #[test]
    fn digest_text_round_trips() {
        let digest = Digest::of(b"x");
        assert_eq!(digest.to_string().parse::<Digest>(), Ok(digest));
        assert!("00".parse::<Digest>().is_err());
    }
}
