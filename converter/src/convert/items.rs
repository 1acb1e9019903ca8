//! The list of what is to be done, in the order in which threads take it.

use std::{
    collections::BTreeSet,
    ops::Range,
    sync::atomic::{AtomicUsize, Ordering},
};

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
    // Files that cost space are gone through one after the other, each whole at once.
    let is_remote = source.weights.files.iter().any(WeightFile::is_remote);
    let mut order: Vec<usize> = (0..plan.steps.len()).collect();
    if is_remote {
        order.sort_by_key(|index| files(source, plan, *index).last().copied());
    }
    for index in order {
        for name in &plan.steps[index].tensor.sources {
            for (file, info) in source.places(name) {
                let end = (info.offset + info.size).div_ceil(CHUNK_BYTES);
                let whole = chunk_count(source.weights.files[file].size);
                hash_up_to(&mut items, file, if is_remote { whole } else { end });
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

/// The weight files that hold a step's sources, in order.
fn files(source: &Source, plan: &Plan, step: usize) -> BTreeSet<usize> {
    let names = plan.steps[step].tensor.sources.iter();
    names.flat_map(|name| source.places(name)).map(|(file, _)| file).collect()
}

/// How many items have still to read each weight file: who is the last gives its space back.
pub(super) struct Uses(Vec<AtomicUsize>);

impl Uses {
    pub(super) fn of(source: &Source, plan: &Plan, items: &[Item]) -> Self {
        let uses: Vec<AtomicUsize> =
            source.weights.files.iter().map(|_| AtomicUsize::new(0)).collect();
        for file in items.iter().flat_map(|item| item.files(source, plan)) {
            uses[file].fetch_add(1, Ordering::Relaxed);
        }
        Self(uses)
    }

    /// An item has been carried out.
    pub(super) fn done(&self, source: &Source, plan: &Plan, item: &Item) {
        for file in item.files(source, plan) {
            if self.0[file].fetch_sub(1, Ordering::AcqRel) == 1 {
                source.weights.files[file].release();
            }
        }
    }
}

impl Item {
    fn files(&self, source: &Source, plan: &Plan) -> BTreeSet<usize> {
        match self {
            Self::Hash { file, .. } => BTreeSet::from([*file]),
            Self::Convert(step) => files(source, plan, *step),
        }
    }
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
