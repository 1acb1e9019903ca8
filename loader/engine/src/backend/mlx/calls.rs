//! Which sequences of a step attend with one call of MLX's attention: those with one row each whose
//! caches have equal capacity.

use std::{
    collections::{BTreeMap, VecDeque},
    ops::Range,
    sync::{Mutex, PoisonError},
};

use shardpack_mlx::{Array, Element, Library};

use super::{Cache, joined, some_rows};

/// Sequences that attend together, or one by itself.
pub(super) struct Call {
    /// In the order of the step.
    pub(super) sequences: Vec<usize>,
    /// Their rows.
    pub(super) rows: Vec<usize>,
}

impl Call {
    /// The calls of a step with `lengths` rows of each sequence.
    pub(super) fn all(caches: &[&mut Cache], layer: usize, lengths: &[usize]) -> Vec<Self> {
        let mut calls: Vec<Self> = Vec::new();
        let mut by_capacity = BTreeMap::new();
        for call in Self::each(lengths) {
            if call.rows.len() == 1 {
                let capacity = caches[call.sequences[0]].capacity_with(layer, 1);
                if let Some(earlier) = by_capacity.get(&capacity) {
                    let earlier: &mut Self = &mut calls[*earlier];
                    earlier.sequences.extend(call.sequences);
                    earlier.rows.extend(call.rows);
                    continue;
                }
                by_capacity.insert(capacity, calls.len());
            }
            calls.push(call);
        }
        calls
    }

    /// One for each sequence.
    pub(super) fn each(lengths: &[usize]) -> Vec<Self> {
        let mut row = 0;
        let call = |(sequence, rows): (usize, &usize)| {
            let first = row;
            row += rows;
            Self { sequences: vec![sequence], rows: (first..row).collect() }
        };
        lengths.iter().enumerate().map(call).collect()
    }

    /// Its rows of an array.
    pub(super) fn of(&self, x: &Array) -> Array {
        let (first, count) = (self.rows[0], self.rows.len());
        if self.rows[count - 1] + 1 == first + count {
            return some_rows(x, first..first + count);
        }
        let rows: Vec<u32> = self.rows.iter().map(|row| *row as u32).collect();
        x.take(&x.library().indices(&rows, &[count]), 0)
    }

    /// What the calls gave, `[rows, width]`, in the order of the step.
    pub(super) fn in_order(calls: &[Self], outputs: &[Array]) -> Array {
        let all = joined(outputs);
        let rows = || calls.iter().flat_map(|call| call.rows.iter().copied());
        if rows().is_sorted() {
            return all;
        }
        let mut order = vec![0; rows().count()];
        rows().enumerate().for_each(|(place, row)| order[row] = place as u32);
        all.take(&all.library().indices(&order, &[order.len()]), 0)
    }
}

/// Masks of calls, which the layers of a step have in common.
#[derive(Default)]
pub(super) struct CallMasks(Mutex<VecDeque<(Vec<Range<usize>>, Array)>>);

impl CallMasks {
    /// Masks that are kept: layers of a model see their keys in a few ways.
    const KEPT: usize = 4;

    /// Which keys of the range that covers `seen` each sequence sees, `[sequences, 1, 1, keys]`; none
    /// where each sees all.
    pub(super) fn get(&self, library: Library, seen: &[Range<usize>]) -> Option<Array> {
        if seen.iter().all(|range| *range == seen[0]) {
            return None;
        }
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, mask)) = kept.iter().find(|(of, _)| of == seen) {
            return Some(mask.clone());
        }
        let keys = covering(seen);
        let row = |range: &Range<usize>| {
            let range = range.clone();
            keys.clone().map(move |key| u8::from(range.contains(&key)))
        };
        let bytes: Vec<u8> = seen.iter().flat_map(row).collect();
        let mask = library.copy_in(&bytes, Element::Bool, &[seen.len(), 1, 1, keys.len()]);
        kept.truncate(Self::KEPT - 1);
        kept.push_front((seen.to_vec(), mask.clone()));
        Some(mask)
    }
}

/// The range that covers all of these.
pub(super) fn covering(ranges: &[Range<usize>]) -> Range<usize> {
    let start = ranges.iter().map(|range| range.start).min().unwrap_or(0);
    start..ranges.iter().map(|range| range.end).max().unwrap_or(start)
}
