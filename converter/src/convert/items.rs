//! The list of what is to be done, in the order in which threads take it.

use std::ops::Range;

use shardpack_manifests::{
    CHUNK_BYTES, Digest,
    digest::{chunk_count, chunk_range, chunk_value},
};

use crate::{
    plan::Plan,
    source::{Source, SourceError},
};

/// Chunks of one hashing item: long enough to be one large read, short enough that threads end
/// together.
const CHUNKS_PER_ITEM: u64 = 4;

/// One thing to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Item {
    /// Hash these chunks of a weight file.
    Hash {
        /// Index of the file.
        file: usize,
        /// Its chunks.
        chunks: Range<u64>,
    },
    /// Convert the tensor of this step.
    Convert(usize),
}

/// Everything to do: before each tensor the parts of its file up to the tensor's end that were
/// not hashed before, so that the second read comes from memory.
pub(super) fn list(source: &Source, plan: &Plan, is_done: impl Fn(usize) -> bool) -> Vec<Item> {
    let mut items = Vec::new();
    let mut hashed: Vec<u64> = source.weights.files.iter().map(|_| 0).collect();
    let mut hash_up_to = |items: &mut Vec<Item>, file: usize, end: u64| {
        while hashed[file] < end {
            let next = (hashed[file] + CHUNKS_PER_ITEM).min(end);
            items.push(Item::Hash { file, chunks: hashed[file]..next });
            hashed[file] = next;
        }
    };
    for (index, step) in plan.steps.iter().enumerate() {
        for name in &step.tensor.sources {
            if let Some((file, info)) = source.weights.find(name) {
                hash_up_to(&mut items, file, (info.offset + info.size).div_ceil(CHUNK_BYTES));
            }
        }
        if !is_done(index) {
            items.push(Item::Convert(index));
        }
    }
    for (file, weights) in source.weights.files.iter().enumerate() {
        hash_up_to(&mut items, file, chunk_count(weights.size));
    }
    items
}

/// Reads and hashes one chunk of a weight file.
pub(super) fn hash(
    source: &Source,
    file: usize,
    chunk: u64,
    buffer: &mut Vec<u8>,
) -> Result<Digest, SourceError> {
    let weights = &source.weights.files[file];
    let range = chunk_range(weights.size, chunk);
    buffer.resize((range.end - range.start) as usize, 0);
    let read = weights.read(buffer, range.start);
    read.map_err(|error| SourceError::Read { path: source.path_of(file), source: error })?;
    Ok(chunk_value(buffer, weights.size, chunk))
}
