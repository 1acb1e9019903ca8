//! Scores and weighted sums of values in [`super::Order::Lanes`]: one loop for every element type.

#![expect(clippy::inline_always, reason = "compiled within the function of each platform")]

use std::{array, marker::PhantomData, ops::Range};

use super::{
    KEYS_PER_BLOCK,
    kv_layout::{LINES_AT_ONCE, panels},
    lane_types::LaneType,
    prefetch::Prefetch,
    vectors::Vectors,
};
use crate::{lanes::LANES, platform::Task};

/// `q · key` of each query with the keys of a whole block of which some are `seen`, element after
/// element, products fused with the sums: `q` is `[heads, width / together]`, `out`
/// `[heads, KEYS_PER_BLOCK]`. Products with neighbours of those keys are computed too.
pub(super) fn products<V: Vectors, S: LaneType>(
    q: &[S::Factors],
    keys: &[S::Element],
    (width, seen): (usize, Range<usize>),
    prefetch: Prefetch,
    out: &mut [f32],
) {
    V::run(Products::<V, S> { q, keys, width, seen, prefetch, out, vectors: PhantomData });
}

struct Products<'a, V, S: LaneType> {
    q: &'a [S::Factors],
    keys: &'a [S::Element],
    width: usize,
    seen: Range<usize>,
    prefetch: Prefetch,
    out: &'a mut [f32],
    vectors: PhantomData<V>,
}

impl<V: Vectors, S: LaneType> Task for Products<'_, V, S> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { q, keys, width, seen, mut prefetch, out, .. } = self;
        let steps = width / S::TOGETHER;
        let out = out.as_chunks_mut::<KEYS_PER_BLOCK>().0;
        let (lines, heads) = (S::lines(keys), out.len());
        assert_eq!(q.len(), heads * steps, "queries and scores");
        assert_eq!(keys.len(), KEYS_PER_BLOCK * width, "a whole block");
        let at_once = LINES_AT_ONCE * LANES;
        for group in seen.start / at_once..seen.end.div_ceil(at_once) {
            let lines = &lines[group * steps * LINES_AT_ONCE..][..steps * LINES_AT_ONCE];
            let mut head = 0;
            while head < heads {
                let prefetch = if head == 0 { &mut prefetch } else { &mut Prefetch::default() };
                let (of, out) = ((&q[head * steps..], lines), &mut out[head..]);
                head += match heads - head {
                    4.. if const { V::KEY_HEADS >= 4 } => {
                        some_heads::<V, S, 4>(of, group, prefetch, out)
                    }
                    2.. if const { V::KEY_HEADS >= 2 } => {
                        some_heads::<V, S, 2>(of, group, prefetch, out)
                    }
                    _ => some_heads::<V, S, 1>(of, group, prefetch, out),
                };
            }
        }
    }
}

/// The first `HEADS` of the queries with a group of keys; returns `HEADS`.
#[inline(always)]
fn some_heads<V: Vectors, S: LaneType, const HEADS: usize>(
    of: (&[S::Factors], &[S::Line]),
    group: usize,
    prefetch: &mut Prefetch,
    out: &mut [[f32; KEYS_PER_BLOCK]],
) -> usize {
    let mut line = 0;
    while line < LINES_AT_ONCE {
        let at = (group * LINES_AT_ONCE, line);
        line += if const { V::KEYS >= 4 } {
            some_keys::<V, S, HEADS, 4>(of, at, prefetch, out)
        } else {
            some_keys::<V, S, HEADS, 2>(of, at, prefetch, out)
        };
    }
    HEADS
}

/// The same for `LINES` times sixteen of the keys, from `line` on; returns `LINES`.
#[inline(always)]
fn some_keys<V: Vectors, S: LaneType, const HEADS: usize, const LINES: usize>(
    (q, lines): (&[S::Factors], &[S::Line]),
    (first, line): (usize, usize),
    prefetch: &mut Prefetch,
    out: &mut [[f32; KEYS_PER_BLOCK]],
) -> usize {
    let rows = lines.as_chunks::<LINES_AT_ONCE>().0;
    let q: [_; HEADS] = array::from_fn(|head| &q[head * rows.len()..][..rows.len()]);
    let mut sums = [[S::nothing::<V>(); LINES]; HEADS];
    for (step, row) in rows.iter().enumerate() {
        prefetch.far(LINES * size_of::<S::Line>()).lines(LINES * size_of::<S::Line>());
        let row: &[_; LINES] = row[line..].first_chunk().expect("some lines");
        add::<V, S, HEADS, LINES>(&mut sums, (q, step), row, 0..S::PARTS);
    }
    for (out, sums) in out.iter_mut().zip(sums) {
        let out = out.as_chunks_mut::<LANES>().0[first + line..].iter_mut();
        for (out, sum) in out.zip(sums) {
            V::store(S::floats::<V>(sum), out);
        }
    }
    LINES
}

/// Adds the products of some lines with every head's factors for them.
#[inline(always)]
fn add<V: Vectors, S: LaneType, const HEADS: usize, const LINES: usize>(
    sums: &mut [[S::Sums<V>; LINES]; HEADS],
    (factors, at): ([&[S::Factors]; HEADS], usize),
    lines: &[S::Line; LINES],
    some: Range<usize>,
) {
    let mut parts = [S::parts::<V>(&lines[0]); LINES];
    for (parts, line) in parts.iter_mut().zip(lines) {
        *parts = S::parts::<V>(line);
    }
    for (sums, factors) in sums.iter_mut().zip(factors) {
        let factors = S::splat::<V>(factors[at]);
        for part in some.clone() {
            for (sum, parts) in sums.iter_mut().zip(&parts) {
                *sum = S::add::<V>(*sum, factors[part], parts[part]);
            }
        }
    }
}

/// `Σ weight · value` over the values of a whole block of which some are `seen`, value after value,
/// products fused with the sums: `weights` is `[heads, KEYS_PER_BLOCK / together]`, `out`
/// `[heads, width]`. Integers beside those seen count too: they have no weight.
pub(super) fn weighted_sums<V: Vectors, S: LaneType>(
    weights: &[S::Factors],
    values: &[S::Element],
    (width, seen): (usize, Range<usize>),
    prefetch: Prefetch,
    out: &mut [f32],
) {
    V::run(WeightedSums::<V, S> {
        weights,
        values,
        width,
        seen,
        prefetch,
        out,
        vectors: PhantomData,
    });
}

struct WeightedSums<'a, V, S: LaneType> {
    weights: &'a [S::Factors],
    values: &'a [S::Element],
    width: usize,
    seen: Range<usize>,
    prefetch: Prefetch,
    out: &'a mut [f32],
    vectors: PhantomData<V>,
}

impl<V: Vectors, S: LaneType> Task for WeightedSums<'_, V, S> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { weights, values, width, seen, mut prefetch, out, .. } = self;
        let steps = KEYS_PER_BLOCK / S::TOGETHER;
        let heads = weights.len() / steps;
        assert_eq!(out.len(), heads * width, "sums");
        assert_eq!(values.len(), KEYS_PER_BLOCK * width, "a whole block");
        for panel in panels(width) {
            let lines = S::lines(&values[panel.start * KEYS_PER_BLOCK..panel.end * KEYS_PER_BLOCK]);
            let mut head = 0;
            while head < heads {
                let weights = &weights[head * steps..];
                let at = (width / LANES, panel.start / LANES..panel.end / LANES);
                let out = &mut out.as_chunks_mut().0[head * at.0..];
                let prefetch = if head == 0 { &mut prefetch } else { &mut Prefetch::default() };
                let (of, on) = ((weights, lines), (&seen, prefetch));
                head += match heads - head {
                    4.. if const { V::HEADS >= 4 } => panel_of_heads::<V, S, 4>(of, at, on, out),
                    2.. if const { V::HEADS >= 2 } => panel_of_heads::<V, S, 2>(of, at, on, out),
                    _ => panel_of_heads::<V, S, 1>(of, at, on, out),
                };
            }
        }
    }
}

/// The sums of the first `HEADS` heads in one panel, which is `at` some of the lines of a row of
/// `out`; returns `HEADS`.
#[inline(always)]
fn panel_of_heads<V: Vectors, S: LaneType, const HEADS: usize>(
    of: (&[S::Factors], &[S::Line]),
    (row, at): (usize, Range<usize>),
    (seen, prefetch): (&Range<usize>, &mut Prefetch),
    out: &mut [[f32; LANES]],
) -> usize {
    let lines = at.len();
    let mut line = 0;
    while line < lines {
        let (place, on) = (((lines, line), (row, at.start + line)), (seen, &mut *prefetch));
        line += match lines - line {
            4.. if const { V::VALUE_VECTORS >= 4 } => columns::<V, S, HEADS, 4>(of, place, on, out),
            2.. if const { V::VALUE_VECTORS >= 2 } => columns::<V, S, HEADS, 2>(of, place, on, out),
            _ => columns::<V, S, HEADS, 1>(of, place, on, out),
        };
    }
    HEADS
}

/// The same for `LINES` of the panel's lines, from `line` on; returns `LINES`.
#[inline(always)]
fn columns<V: Vectors, S: LaneType, const HEADS: usize, const LINES: usize>(
    (weights, values): (&[S::Factors], &[S::Line]),
    ((lines, line), (row, at)): ((usize, usize), (usize, usize)),
    (seen, prefetch): (&Range<usize>, &mut Prefetch),
    out: &mut [[f32; LANES]],
) -> usize {
    let steps = KEYS_PER_BLOCK / S::TOGETHER;
    let weights: [_; HEADS] = array::from_fn(|head| &weights[head * steps..][..steps]);
    let mut sums = [[S::nothing::<V>(); LINES]; HEADS];
    let mut some = seen.start / S::TOGETHER..seen.end.div_ceil(S::TOGETHER);
    // What lies beside a float that is seen may be anything.
    if S::APART && !seen.start.is_multiple_of(S::TOGETHER) {
        let values: &[_; LINES] = values[some.start * lines + line..].first_chunk().expect("lines");
        add::<V, S, HEADS, LINES>(&mut sums, (weights, some.start), values, 1..S::PARTS);
        some.start += 1;
    }
    let half = S::APART && !some.is_empty() && !seen.end.is_multiple_of(S::TOGETHER);
    some.end -= usize::from(half);
    for (step, values) in some.clone().zip(values[some.start * lines..].chunks_exact(lines)) {
        prefetch.far(LINES * size_of::<S::Line>()).lines(LINES * size_of::<S::Line>());
        let values: &[_; LINES] = values[line..].first_chunk().expect("some lines");
        add::<V, S, HEADS, LINES>(&mut sums, (weights, step), values, 0..S::PARTS);
    }
    if half {
        let values: &[_; LINES] = values[some.end * lines + line..].first_chunk().expect("lines");
        add::<V, S, HEADS, LINES>(&mut sums, (weights, some.end), values, 0..1);
    }
    for (head, sums) in sums.into_iter().enumerate() {
        let out = &mut out[head * row + at..][..LINES];
        for (out, sum) in out.iter_mut().zip(sums) {
            V::store(S::floats::<V>(sum), out);
        }
    }
    LINES
}
