//! The work list of a conversion, in the order in which threads take items.

use std::{collections::BTreeSet, ops::Range};

use shardpack_manifests::digest::PIECE_BYTES;

use crate::{
    plan::Plan,
    source::{Source, WeightFile, piece_count, pieces_within},
};

/// Pieces of one hashing item: long enough to be worth taking, short enough that threads end
/// together.
const PIECES_PER_ITEM: u64 = 64;

/// A unit of work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Item {
    /// Read these pieces of a weight file only to hash them.
    Hash {
        /// Index of the file.
        file: usize,
        /// Its pieces.
        pieces: Range<u64>,
    },
    /// Convert the tensor of this step.
    Convert(usize),
    /// Compare the checksum of a weight file that is elsewhere.
    Verify(usize),
}

/// The work list. What is read in order for a tensor is hashed on the way; before each tensor
/// stand the parts of its file up to the tensor's end that no tensor hashes, so that what is read
/// twice comes from memory the second time. Files from elsewhere that are known are left out.
pub(super) fn list(
    source: &Source,
    plan: &Plan,
    is_done: impl Fn(usize) -> bool,
    is_known: impl Fn(usize) -> bool,
) -> Vec<Item> {
    if source.weights.files.iter().any(WeightFile::is_remote) {
        return list_remote(source, plan, is_done, is_known);
    }
    let mut gaps = Gaps::new(source, plan, &is_done);
    let mut items = Vec::new();
    for index in 0..plan.steps.len() {
        for (file, bytes) in places(source, plan, index) {
            let end = bytes.end.div_ceil(PIECE_BYTES).min(piece_count(gaps.size(file)));
            gaps.up_to(end, file, &mut items);
        }
        if !is_done(index) {
            items.push(Item::Convert(index));
        }
    }
    for (file, weights) in source.weights.files.iter().enumerate() {
        gaps.up_to(piece_count(weights.size), file, &mut items);
    }
    items
}

/// Whether the sources of a step are hashed while they are read for it.
pub(super) fn is_followed(source: &Source, plan: &Plan, step: usize) -> bool {
    let tensor = &plan.steps[step].tensor;
    tensor.view.is_whole()
        && tensor.sources.iter().all(|name| source.is_read_in_order(name))
        && places(source, plan, step)
            .iter()
            .all(|(file, _)| !source.weights.files[*file].is_remote())
}

/// The pieces of every file that no tensor hashes on its way.
struct Gaps<'a> {
    source: &'a Source,
    /// By file, in order: the pieces that tensors hash.
    followed: Vec<Vec<Range<u64>>>,
    /// By file: up to where there are items.
    listed: Vec<u64>,
}

impl<'a> Gaps<'a> {
    fn new(source: &'a Source, plan: &Plan, is_done: &impl Fn(usize) -> bool) -> Self {
        let files = source.weights.files.len();
        let mut gaps = Self { source, followed: vec![Vec::new(); files], listed: vec![0; files] };
        let pending = (0..plan.steps.len()).filter(|step| !is_done(*step));
        for step in pending.filter(|step| is_followed(source, plan, *step)) {
            for (file, bytes) in places(source, plan, step) {
                let pieces = pieces_within(gaps.size(file), &bytes);
                gaps.followed[file].extend((!pieces.is_empty()).then_some(pieces));
            }
        }
        for followed in &mut gaps.followed {
            followed.sort_unstable_by_key(|pieces| pieces.start);
        }
        gaps
    }

    fn size(&self, file: usize) -> u64 {
        self.source.weights.files[file].size
    }

    /// Lists what is not listed yet before piece `end` of a file.
    fn up_to(&mut self, end: u64, file: usize, items: &mut Vec<Item>) {
        while self.listed[file] < end {
            let at = self.listed[file];
            let next = self.followed[file].partition_point(|pieces| pieces.end <= at);
            let gap_end = match self.followed[file].get(next) {
                Some(pieces) if pieces.start <= at => {
                    self.listed[file] = pieces.end;
                    continue;
                }
                Some(pieces) => pieces.start.min(end),
                None => end,
            };
            let stop = gap_end.min(at + PIECES_PER_ITEM);
            items.push(Item::Hash { file, pieces: at..stop });
            self.listed[file] = stop;
        }
    }
}

/// The same for files that are elsewhere: in the order in which their bytes come, and each file is
/// verified when the last tensor of it is made.
fn list_remote(
    source: &Source,
    plan: &Plan,
    is_done: impl Fn(usize) -> bool,
    is_known: impl Fn(usize) -> bool,
) -> Vec<Item> {
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
        if !is_known(file) {
            items.push(Item::Verify(file));
        }
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
