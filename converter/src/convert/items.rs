//! The list of what is to be done, in the order in which threads take it.

use std::{collections::BTreeSet, ops::Range};

use shardpack_manifests::{
    CHUNK_BYTES, Digest,
    digest::{chunk_count, read_chunk_value},
};

use crate::{
    plan::Plan,
    source::{Source, SourceError, WeightFile},
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
    /// Compare the checksum of a weight file that is elsewhere.
    Verify(usize),
}

/// Everything to do: before each tensor the parts of its file up to the tensor's end that were
/// not hashed before, so that the second read comes from memory.
pub(super) fn list(source: &Source, plan: &Plan, is_done: impl Fn(usize) -> bool) -> Vec<Item> {
    if source.weights.files.iter().any(WeightFile::is_remote) {
        return list_remote(source, plan, is_done);
    }
    let mut items = Vec::new();
    let mut hashed: Vec<u64> = source.weights.files.iter().map(|_| 0).collect();
    let mut hash_up_to = |items: &mut Vec<Item>, file: usize, end: u64| {
        while hashed[file] < end {
            let next = (hashed[file] + CHUNKS_PER_ITEM).min(end);
            items.push(Item::Hash { file, chunks: hashed[file]..next });
            hashed[file] = next;
        }
    };
    for index in 0..plan.steps.len() {
        for (file, bytes) in places(source, plan, index) {
            hash_up_to(&mut items, file, bytes.end.div_ceil(CHUNK_BYTES));
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

/// The same for files that are elsewhere: in the order in which their bytes come, and each file is
/// verified when the last tensor of it is made.
fn list_remote(source: &Source, plan: &Plan, is_done: impl Fn(usize) -> bool) -> Vec<Item> {
    let last = |index: usize| {
        let places = places(source, plan, index);
        let file = places.iter().map(|(file, _)| *file).max().unwrap_or(0);
        let start = places.iter().filter(|(at, _)| *at == file).map(|(_, bytes)| bytes.start).min();
        (file, start)
    };
    let mut order: Vec<usize> = (0..plan.steps.len()).filter(|index| !is_done(*index)).collect();
    order.sort_by_key(|index| last(*index));
    let mut items = Vec::new();
    let mut steps = order.into_iter().peekable();
    for (file, _) in source.weights.files.iter().enumerate() {
        while let Some(step) = steps.next_if(|step| last(*step).0 == file) {
            items.push(Item::Convert(step));
        }
        items.push(Item::Verify(file));
    }
    for item in &items {
        for (file, bytes) in item.places(source, plan) {
            source.weights.files[file].expect(bytes);
        }
    }
    items
}

/// The bytes that a step's sources are made of, with their files.
fn places(source: &Source, plan: &Plan, step: usize) -> Vec<(usize, Range<u64>)> {
    let names = plan.steps[step].tensor.sources.iter();
    let places = names.flat_map(|name| source.places(name));
    places.map(|(file, info)| (file, info.offset..info.offset + info.size)).collect()
}

impl Item {
    /// The bytes that a tensor is made of, with their files.
    fn places(&self, source: &Source, plan: &Plan) -> Vec<(usize, Range<u64>)> {
        match self {
            Self::Hash { .. } | Self::Verify(_) => Vec::new(),
            Self::Convert(step) => places(source, plan, *step),
        }
    }

    /// It has been carried out: what only it needed may go.
    pub(super) fn done(&self, source: &Source, plan: &Plan) {
        for (file, bytes) in self.places(source, plan) {
            source.weights.files[file].done(bytes);
        }
    }
}

/// The weight files that are elsewhere and hold sources of a step.
pub(super) fn remote_files(source: &Source, plan: &Plan, step: usize) -> BTreeSet<usize> {
    let files = places(source, plan, step).into_iter().map(|(file, _)| file);
    files.filter(|file| source.weights.files[*file].is_remote()).collect()
}

/// Reads and hashes one chunk of a weight file.
pub(super) fn hash(
    source: &Source,
    file: usize,
    chunk: u64,
    buffer: &mut Vec<u8>,
) -> Result<Digest, SourceError> {
    let weights = &source.weights.files[file];
    let read = |bytes: &mut [u8], at| weights.read(bytes, at);
    read_chunk_value(read, (weights.size, chunk), buffer)
        .map_err(|error| SourceError::Read { path: source.path_of(file), source: error })
}
