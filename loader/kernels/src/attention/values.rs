//! Weighted sums of values. Each vector of a value is read once for several query heads.

#![expect(clippy::inline_always, reason = "compiled within the function of each platform")]

use std::{marker::PhantomData, ops::Range};

use super::{
    KEYS_PER_BLOCK,
    kv_types::{Rows, Stored, load},
    prefetch::{Fetch, Prefetch},
    vectors::Vectors,
};
use crate::{lanes::LANES, platform::Task};

/// Marks a number of vectors in a row that is known only at run time.
const ANY: usize = 0;

/// Values that are summed for some heads before others: they stay in the L1 cache.
const VALUES_AT_ONCE: usize = 64;

/// `Σ weight · value`, value after value, products fused with the sums: `weights` is
/// `[heads, KEYS_PER_BLOCK]`, `out` `[heads, width]`.
pub(super) fn weighted_sums<V: Vectors, S: Stored>(
    weights: &[f32],
    values: Rows<'_, S>,
    prefetch: Prefetch,
    out: &mut [f32],
) {
    V::run(WeightedSums::<V, S> { weights, values, prefetch, out, vectors: PhantomData });
}

struct WeightedSums<'a, V, S: Stored> {
    weights: &'a [f32],
    values: Rows<'a, S>,
    prefetch: Prefetch,
    out: &'a mut [f32],
    vectors: PhantomData<V>,
}

impl<V: Vectors, S: Stored> Task for WeightedSums<'_, V, S> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        // As in the products: distances that are constants take no registers.
        match self.values.width / LANES {
            4 if const { V::USUAL_WIDTHS } => self.with_lines::<4>(),
            8 if const { V::USUAL_WIDTHS } => self.with_lines::<8>(),
            _ => self.with_lines::<ANY>(),
        }
    }
}

impl<V: Vectors, S: Stored> WeightedSums<'_, V, S> {
    #[inline(always)]
    fn with_lines<const LINES: usize>(self) {
        let Self { weights, values, mut prefetch, out, .. } = self;
        let lines = if LINES == ANY { values.width / LANES } else { LINES };
        let (count, heads) = (values.count(), weights.len() / KEYS_PER_BLOCK);
        assert!(out.len() == heads * lines * LANES, "sums");
        out.fill(0.0);
        let (weights, out) = (weights.as_chunks().0, out.as_chunks_mut().0);
        for first in (0..count).step_by(VALUES_AT_ONCE) {
            let some = first..count.min(first + VALUES_AT_ONCE);
            let mut head = 0;
            while head < heads {
                let prefetch = (head == 0).then_some(&mut prefetch);
                let (weights, out) = (&weights[head..], &mut out[head * lines..]);
                let values = (values, &some);
                head += match heads - head {
                    4.. if const { V::HEADS >= 4 } => {
                        some_heads::<V, S, 4>(weights, values, lines, prefetch, out)
                    }
                    2.. if const { V::HEADS >= 2 } => {
                        some_heads::<V, S, 2>(weights, values, lines, prefetch, out)
                    }
                    _ => some_heads::<V, S, 1>(weights, values, lines, prefetch, out),
                };
            }
        }
    }
}

/// Adds `some` values to the sums of the first `HEADS` heads; returns `HEADS`.
#[inline(always)]
fn some_heads<V: Vectors, S: Stored, const HEADS: usize>(
    weights: &[[f32; KEYS_PER_BLOCK]],
    values: (Rows<'_, S>, &Range<usize>),
    lines: usize,
    mut prefetch: Option<&mut Prefetch>,
    out: &mut [[f32; LANES]],
) -> usize {
    let weights = weights.first_chunk::<HEADS>().expect("as many heads");
    let mut line = 0;
    while line < lines {
        let (at, prefetch) = ((lines, line), &mut prefetch);
        line += match lines - line {
            4.. if const { V::VALUE_VECTORS >= 4 } => {
                columns::<V, S, HEADS, 4>(weights, values, at, prefetch, out)
            }
            2.. if const { V::VALUE_VECTORS >= 2 } => {
                columns::<V, S, HEADS, 2>(weights, values, at, prefetch, out)
            }
            _ => columns::<V, S, HEADS, 1>(weights, values, at, prefetch, out),
        };
    }
    HEADS
}

/// The same for `VECTORS` of the `lines` vectors of a row, from `line` on; returns `VECTORS`.
#[inline(always)]
fn columns<V: Vectors, S: Stored, const HEADS: usize, const VECTORS: usize>(
    weights: &[[f32; KEYS_PER_BLOCK]; HEADS],
    (values, some): (Rows<'_, S>, &Range<usize>),
    (lines, line): (usize, usize),
    prefetch: &mut Option<&mut Prefetch>,
    out: &mut [[f32; LANES]],
) -> usize {
    let mut sums = [[V::splat(0.0); VECTORS]; HEADS];
    for (head, sums) in sums.iter_mut().enumerate() {
        let out = &out[head * lines + line..][..VECTORS];
        for (sum, out) in sums.iter_mut().zip(out) {
            *sum = V::load(out);
        }
    }
    let bytes = VECTORS * LANES * size_of::<S::Element>();
    let rows = values.rows(some.clone());
    for (key, row) in some.clone().zip(rows.chunks_exact(lines)) {
        let row: &[_; VECTORS] = row[line..].first_chunk().expect("some vectors");
        let fetch = prefetch
            .as_mut()
            .map_or(Fetch::NONE, |prefetch| prefetch.stretch(row.as_ptr().addr(), bytes));
        fetch.lines(0..bytes);
        let mut parts = [values.scale::<V>(key); VECTORS];
        for (part, row) in parts.iter_mut().zip(row) {
            *part = load::<V, S>(row, *part);
        }
        for (sums, weights) in sums.iter_mut().zip(weights) {
            let weight = V::splat(weights[key]);
            for (sum, part) in sums.iter_mut().zip(parts) {
                *sum = V::fma(weight, part, *sum);
            }
        }
    }
    for (head, sums) in sums.into_iter().enumerate() {
        let out = &mut out[head * lines + line..][..VECTORS];
        for (sum, out) in sums.into_iter().zip(out) {
            V::store(sum, out);
        }
    }
    VECTORS
}
