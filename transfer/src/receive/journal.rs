//! The journal of a package that is being received: which chunks are on disk.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    path::Path,
};

use shardpack_manifests::Digest;

use super::files;
use crate::protocol::ChunkMap;

/// First bytes of a journal; the last one is its version.
const MAGIC: [u8; 8] = *b"SPTJRNL1";
const HEADER_BYTES: usize = MAGIC.len() + 32;
const RECORD_BYTES: usize = 16;

/// An append-only list of chunks. A chunk is listed after its bytes were synced, so what the list
/// says survives a loss of power.
///
/// | offset | bytes | field |
/// |---|---|---|
/// | 0 | 8 | magic `SPTJRNL1` |
/// | 8 | 32 | BLAKE3 of the package's manifest |
/// | 40 + 16·i | 4 | u32 index of the file |
/// | 44 + 16·i | 4 | u32 index of the chunk |
/// | 48 + 16·i | 8 | first bytes of the BLAKE3 of the digest and the two indices |
///
/// Assumed of the disk: bytes that were synced stay. Not assumed: that an append is whole. Reading
/// stops at the first record whose check differs, as a torn append or a tail of zeros would.
#[derive(Debug)]
pub(super) struct Journal {
    file: File,
    manifest: Digest,
}

impl Journal {
    /// Chunks listed in the journal of the package with this manifest; `None` when there is no
    /// such journal.
    pub(super) fn read(path: &Path, manifest: Digest) -> io::Result<Option<Vec<(u32, u32)>>> {
        let bytes = match fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let Some((header, records)) = bytes.split_at_checked(HEADER_BYTES) else { return Ok(None) };
        if header != Self::header(manifest) {
            return Ok(None);
        }
        let mut chunks = Vec::new();
        for bytes in records.chunks_exact(RECORD_BYTES) {
            let number = |at: usize| {
                u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes of a record"))
            };
            let (file, chunk) = (number(0), number(4));
            if bytes != record(manifest, file, chunk) {
                break;
            }
            chunks.push((file, chunk));
        }
        Ok(Some(chunks))
    }

    /// Begins a journal that lists what is held. Replaces one that was there.
    pub(super) fn create(path: &Path, manifest: Digest, held: &ChunkMap) -> io::Result<Self> {
        let mut bytes = Self::header(manifest);
        for (file, chunk, ..) in held.chunks().filter(|(.., held)| *held) {
            bytes.extend(record(manifest, file, chunk));
        }
        files::write_durably(path, &bytes)?;
        Ok(Self { file: OpenOptions::new().append(true).open(path)?, manifest })
    }

    /// Lists chunks whose bytes have been synced.
    pub(super) fn append(&mut self, chunks: &[(u32, u32)]) -> io::Result<()> {
        let records: Vec<u8> =
            chunks.iter().flat_map(|(file, chunk)| record(self.manifest, *file, *chunk)).collect();
        self.file.write_all(&records)?;
        self.file.sync_data()
    }

    fn header(manifest: Digest) -> Vec<u8> {
        [MAGIC.as_slice(), &manifest.0].concat()
    }
}

fn record(manifest: Digest, file: u32, chunk: u32) -> [u8; RECORD_BYTES] {
    let mut record = [0; RECORD_BYTES];
    record[..4].copy_from_slice(&file.to_le_bytes());
    record[4..8].copy_from_slice(&chunk.to_le_bytes());
    let check = Digest::of(&[manifest.0.as_slice(), &record[..8]].concat());
    record[8..].copy_from_slice(&check.0[..8]);
    record
}
