//! Bitmaps of the chunks that are held of a package.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use shardpack_manifests::{
    digest::{chunk_count, chunk_range},
    manifest::Manifest,
};

/// One bit per chunk of a package's files. As bytes: per file, in the manifest's order, one bit
/// per chunk from the lowest bit of the first byte on, padded with zeros to whole bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkMap {
    files: Vec<FileMap>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct FileMap {
    size_bytes: u64,
    bits: Vec<u8>,
}

/// The chunks of a package that comes over several streams, one for all of them: clones are the
/// same.
#[derive(Clone, Debug)]
pub struct SharedMap(Arc<Mutex<ChunkMap>>);

impl SharedMap {
    /// With these to begin with.
    #[must_use]
    pub fn new(held: ChunkMap) -> Self {
        Self(Arc::new(Mutex::new(held)))
    }

    /// The chunks, for as long as nobody else may look.
    pub fn lock(&self) -> MutexGuard<'_, ChunkMap> {
        // Nothing that panics leaves a bit half set.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FileMap {
    fn get(&self, chunk: u64) -> bool {
        self.bits.get((chunk / 8) as usize).is_some_and(|byte| byte >> (chunk % 8) & 1 == 1)
    }
}

impl ChunkMap {
    /// Nothing is held.
    #[must_use]
    pub fn empty(manifest: &Manifest) -> Self {
        let map = |size_bytes| FileMap {
            size_bytes,
            bits: vec![0; chunk_count(size_bytes).div_ceil(8) as usize],
        };
        Self { files: manifest.files.iter().map(|file| map(file.size)).collect() }
    }

    /// Reads the map of a package; says what is wrong with `bytes` when they are not one.
    pub fn parse(manifest: &Manifest, mut bytes: &[u8]) -> Result<Self, &'static str> {
        let mut map = Self::empty(manifest);
        for file in &mut map.files {
            let (bits, rest) =
                bytes.split_at_checked(file.bits.len()).ok_or("the bitmap is too short")?;
            file.bits.copy_from_slice(bits);
            bytes = rest;
            let used = chunk_count(file.size_bytes) % 8;
            if used > 0 && file.bits.last().is_some_and(|last| last >> used != 0) {
                return Err("the bitmap claims chunks that do not exist");
            }
        }
        if bytes.is_empty() { Ok(map) } else { Err("the bitmap is too long") }
    }

    /// The map as bytes.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        self.files.iter().flat_map(|file| file.bits.iter().copied()).collect()
    }

    /// Whether a chunk exists.
    #[must_use]
    pub fn exists(&self, file: u32, chunk: u32) -> bool {
        let map = self.files.get(file as usize);
        map.is_some_and(|map| u64::from(chunk) < chunk_count(map.size_bytes))
    }

    /// Whether a chunk is held.
    #[must_use]
    pub fn holds(&self, file: u32, chunk: u32) -> bool {
        self.files.get(file as usize).is_some_and(|map| map.get(u64::from(chunk)))
    }

    /// Notes that a chunk is held.
    ///
    /// # Panics
    /// When there is no such chunk.
    pub fn insert(&mut self, file: u32, chunk: u32) {
        assert!(self.exists(file, chunk), "chunk {chunk} of file {file} exists");
        self.files[file as usize].bits[chunk as usize / 8] |= 1 << (chunk % 8);
    }

    /// Notes that a chunk is not held.
    ///
    /// # Panics
    /// When there is no such chunk.
    pub fn remove(&mut self, file: u32, chunk: u32) {
        assert!(self.exists(file, chunk), "chunk {chunk} of file {file} exists");
        self.files[file as usize].bits[chunk as usize / 8] &= !(1 << (chunk % 8));
    }

    /// Notes that no chunk of a file is held.
    ///
    /// # Panics
    /// When there is no such file.
    pub fn remove_file(&mut self, file: u32) {
        self.files[file as usize].bits.fill(0);
    }

    /// Every chunk, in order: file, chunk, bytes of it, and whether it is held.
    pub fn chunks(&self) -> impl Iterator<Item = (u32, u32, u64, bool)> {
        self.files.iter().enumerate().flat_map(|(index, file)| {
            (0..chunk_count(file.size_bytes)).map(move |chunk| {
                let range = chunk_range(file.size_bytes, chunk);
                (index as u32, chunk as u32, range.end - range.start, file.get(chunk))
            })
        })
    }

    /// Every chunk that is not held, in order: file, chunk, bytes of it.
    pub fn missing(&self) -> impl Iterator<Item = (u32, u32, u64)> {
        self.chunks().filter(|(.., held)| !held).map(|(file, chunk, size, _)| (file, chunk, size))
    }

    /// Bytes of the chunks that are not held.
    #[must_use]
    pub fn missing_bytes(&self) -> u64 {
        self.missing().map(|(.., size_bytes)| size_bytes).sum()
    }

    /// Bytes of the chunks that are held.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.chunks().filter(|(.., held)| *held).map(|(_, _, size_bytes, _)| size_bytes).sum()
    }

    /// Whether every chunk is held.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.missing().next().is_none()
    }
}
