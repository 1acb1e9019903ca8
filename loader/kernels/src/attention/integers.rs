//! Keys and values of 8 bits: queries and weights are rounded to 16, so that the products are
//! integers, whose sums are exact in any order. What is rounded there is a small part of what
//! rounding to 8 bits has cost.

#![expect(clippy::inline_always, reason = "compiled within the function of each platform")]

use std::{array, marker::PhantomData};

use super::{
    KEYS_PER_BLOCK,
    keys::Line,
    prefetch::{Fetch, Prefetch},
    vectors::Vectors,
};
use crate::{
    lanes::{LANES, tree},
    platform::Task,
};

/// Integers of one step: rows are whole numbers of them.
pub(super) const STEP: usize = 2 * LANES;

/// Query heads at a time, as many as a group has.
const HEADS: usize = super::HEADS_AT_ONCE;

/// Marks a number of steps in a row that is known only at run time.
const ANY: usize = 0;

/// Rows `[count, width]` of integers times the row's scale; `width` is a multiple of [`STEP`].
#[derive(Clone, Copy)]
pub(super) struct Scaled<'a> {
    pub(super) elements: &'a [i8],
    pub(super) scales: &'a [f32],
    pub(super) width: usize,
}

/// Floats as 16-bit integers of at most `limit`, which stands for the largest magnitude; returns
/// what one is worth. Where a float is NaN the worth is NaN too.
#[inline(always)]
pub(super) fn rounded<'a, V: Vectors>(
    floats: impl Iterator<Item = &'a [f32; LANES]> + Clone,
    limit: f32,
    to: &mut [[i16; LANES]],
) -> f32 {
    /// 1.5 · 2²³: adding it rounds a float of modest size to an integer in its low bits.
    const ROUNDER: f32 = 12_582_912.0;
    let (mut highest, mut least) = (V::splat(0.0), V::splat(0.0));
    let mut nothing = V::splat(0.0);
    for floats in floats.clone() {
        let floats = V::load(floats);
        highest = V::max(floats, highest);
        least = V::max(V::mul(floats, V::splat(-1.0)), least);
        nothing = V::fma(floats, V::splat(0.0), nothing);
    }
    let (mut lanes, mut nothings) = ([0.0; LANES], [0.0; LANES]);
    V::store(V::max(highest, least), &mut lanes);
    V::store(nothing, &mut nothings);
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] = lanes[lane].max(lanes[lane + width]);
        }
        width /= 2;
    }
    let largest = lanes[0];
    let factor = V::splat(if largest > 0.0 { limit / largest } else { 0.0 });
    for (to, floats) in to.iter_mut().zip(floats) {
        let mut bits = [0.0; LANES];
        V::store(V::fma(V::load(floats), factor, V::splat(ROUNDER)), &mut bits);
        *to = V::low_halves(&bits);
    }
    largest / limit + tree(nothings)
}

/// The largest factor in products with keys of this width: sums of so many are 32-bit integers.
#[inline(always)]
pub(super) fn limit(width: usize) -> f32 {
    (i32::MAX / (128 * width as i32)).min(i32::from(i16::MAX)) as f32
}

/// `q · key` of each query with each key: `q` is `[heads, width]`, `out` `[heads, KEYS_PER_BLOCK]`.
pub(super) fn products<V: Vectors>(
    q: &[Line],
    keys: Scaled<'_>,
    prefetch: Prefetch,
    out: &mut [f32],
) {
    V::run(Products::<V> { q, keys, prefetch, out, vectors: PhantomData });
}

struct Products<'a, V> {
    q: &'a [Line],
    keys: Scaled<'a>,
    prefetch: Prefetch,
    out: &'a mut [f32],
    vectors: PhantomData<V>,
}

impl<V: Vectors> Task for Products<'_, V> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        match self.keys.width / STEP {
            2 if const { V::USUAL_WIDTHS } => self.in_steps::<2>(),
            4 if const { V::USUAL_WIDTHS } => self.in_steps::<4>(),
            _ => self.in_steps::<ANY>(),
        }
    }
}

impl<V: Vectors> Products<'_, V> {
    #[inline(always)]
    fn in_steps<const STEPS: usize>(self) {
        let Self { q, keys, mut prefetch, out, .. } = self;
        let steps = if STEPS == ANY { keys.width / STEP } else { STEPS };
        let out = out.as_chunks_mut::<KEYS_PER_BLOCK>().0;
        let rows = keys.elements.as_chunks::<STEP>().0;
        let heads = out.len();
        assert!(q.len() == heads * 2 * steps && heads <= HEADS, "queries and scores");
        assert!(rows.len() == keys.scales.len() * steps, "keys and scales");
        let limit = limit(keys.width);
        let mut integers = vec![[0; STEP]; heads * steps];
        let mut worth = [0.0; HEADS];
        let each = q.chunks_exact(2 * steps).zip(integers.chunks_exact_mut(steps));
        for (worth, (q, to)) in worth.iter_mut().zip(each) {
            *worth = rounded::<V>(
                q.iter().map(Line::floats),
                limit,
                to.as_flattened_mut().as_chunks_mut().0,
            );
        }
        let mut head = 0;
        while head < heads {
            let prefetch = if head == 0 { &mut prefetch } else { &mut Prefetch::default() };
            let (q, worth) = (&integers[head * steps..], &worth[head..]);
            let rows = KeyRows { rows, steps, scales: keys.scales };
            let out = &mut out[head..];
            head += match heads - head {
                4.. if const { V::KEY_HEADS >= 4 } => {
                    some_heads::<V, 4>((q, worth), rows, prefetch, out)
                }
                2.. if const { V::KEY_HEADS >= 4 } => {
                    some_heads::<V, 2>((q, worth), rows, prefetch, out)
                }
                _ => some_heads::<V, 1>((q, worth), rows, prefetch, out),
            };
        }
    }
}

/// Keys in steps of [`STEP`] integers, with their scales.
#[derive(Clone, Copy)]
struct KeyRows<'a> {
    rows: &'a [[i8; STEP]],
    /// Steps of a key.
    steps: usize,
    /// One for each key.
    scales: &'a [f32],
}

/// The first `HEADS` of the queries with all keys; returns `HEADS`.
#[inline(always)]
fn some_heads<V: Vectors, const HEADS: usize>(
    (q, worth): (&[[i16; STEP]], &[f32]),
    KeyRows { rows, steps, scales }: KeyRows<'_>,
    prefetch: &mut Prefetch,
    out: &mut [[f32; KEYS_PER_BLOCK]],
) -> usize {
    let (q, worth) = (&q[..HEADS * steps], worth.first_chunk::<HEADS>().expect("as many heads"));
    let out = out.first_chunk_mut::<HEADS>().expect("as many heads");
    let (fours, rest) = scales.as_chunks::<4>();
    // Until all keys have been met these are the bits of integers.
    for (index, rows) in rows.chunks_exact(4 * steps).enumerate() {
        let fetch = prefetch.stretch(rows.as_ptr().addr(), 4 * steps * STEP);
        let sums = four_keys::<V, HEADS>(q, (rows, [0, 1, 2, 3]), steps, fetch);
        for (out, sums) in out.iter_mut().zip(sums) {
            out.as_chunks_mut::<4>().0[index] = sums.map(|sum| f32::from_bits(sum.cast_unsigned()));
        }
    }
    if !rest.is_empty() {
        // The last key is taken again.
        let (first, last) = (4 * fours.len(), rest.len() - 1);
        let rows = &rows[first * steps..];
        let fetch = prefetch.stretch(rows.as_ptr().addr(), rest.len() * steps * STEP);
        let places = [0, last.min(1), last, last];
        let sums = four_keys::<V, HEADS>(q, (rows, places), steps, fetch);
        for (out, sums) in out.iter_mut().zip(sums) {
            for (out, sum) in out[first..first + rest.len()].iter_mut().zip(sums) {
                *out = f32::from_bits(sum.cast_unsigned());
            }
        }
    }
    for (out, worth) in out.iter_mut().zip(worth) {
        for (out, scale) in out.iter_mut().zip(scales) {
            *out = out.to_bits().cast_signed() as f32 * (worth * scale);
        }
    }
    HEADS
}

/// The sums for each query and four keys.
#[inline(always)]
fn four_keys<V: Vectors, const HEADS: usize>(
    q: &[[i16; STEP]],
    (rows, places): (&[[i8; STEP]], [usize; 4]),
    steps: usize,
    fetch: Fetch,
) -> [[i32; 4]; HEADS] {
    let mut sums = [[V::no_integers(); 4]; HEADS];
    for step in 0..steps {
        fetch.lines(4 * step * STEP..4 * (step + 1) * STEP);
        let mut keys = [V::bytes(&rows[step]); 4];
        for (key, place) in keys.iter_mut().zip(places) {
            *key = V::bytes(&rows[place * steps + step]);
        }
        for (head, sums) in sums.iter_mut().enumerate() {
            let q = V::shorts(&q[head * steps + step]);
            for (sum, key) in sums.iter_mut().zip(keys) {
                *sum = V::add_products(*sum, q, key);
            }
        }
    }
    let mut all = [[0; 4]; HEADS];
    for (all, sums) in all.iter_mut().zip(sums) {
        *all = V::integer_sums(sums);
    }
    all
}

/// `Σ weight · value`: `weights` is `[heads, KEYS_PER_BLOCK]`, `out` `[heads, width]`.
pub(super) fn weighted_sums<V: Vectors>(
    weights: &[f32],
    values: Scaled<'_>,
    prefetch: Prefetch,
    out: &mut [f32],
) {
    V::run(WeightedSums::<V> { weights, values, prefetch, out, vectors: PhantomData });
}

struct WeightedSums<'a, V> {
    weights: &'a [f32],
    values: Scaled<'a>,
    prefetch: Prefetch,
    out: &'a mut [f32],
    vectors: PhantomData<V>,
}

// The weights of a block are at most 256, so sums of their products are 32-bit integers.
const _: () = assert!(KEYS_PER_BLOCK as i64 * 128 * i16::MAX as i64 <= i32::MAX as i64);

impl<V: Vectors> Task for WeightedSums<'_, V> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        match self.values.width / LANES {
            4 if const { V::USUAL_WIDTHS } => self.in_lines::<4>(),
            8 if const { V::USUAL_WIDTHS } => self.in_lines::<8>(),
            _ => self.in_lines::<ANY>(),
        }
    }
}

impl<V: Vectors> WeightedSums<'_, V> {
    #[inline(always)]
    fn in_lines<const LINES: usize>(self) {
        let Self { weights, values, mut prefetch, out, .. } = self;
        let lines = if LINES == ANY { values.width / LANES } else { LINES };
        let weights = weights.as_chunks::<KEYS_PER_BLOCK>().0;
        let (rows, heads) = (values.elements.as_chunks::<LANES>().0, weights.len());
        assert!(out.len() == heads * lines * LANES && heads <= HEADS, "sums");
        assert!(rows.len() == values.scales.len() * lines, "values and scales");
        let mut integers = [[0; KEYS_PER_BLOCK]; HEADS];
        let mut worth = [0.0; HEADS];
        for ((worth, weights), to) in worth.iter_mut().zip(weights).zip(&mut integers) {
            let mut scaled = [0.0; KEYS_PER_BLOCK];
            for ((scaled, weight), scale) in scaled.iter_mut().zip(weights).zip(values.scales) {
                *scaled = weight * scale;
            }
            let to = to.as_chunks_mut().0;
            *worth = rounded::<V>(scaled.as_chunks().0.iter(), f32::from(i16::MAX), to);
        }
        let out = out.as_chunks_mut::<LANES>().0;
        let mut head = 0;
        while head < heads {
            let mut line = 0;
            while line < lines {
                let prefetch = if head == 0 { &mut prefetch } else { &mut Prefetch::default() };
                let weights = (&integers[head..], &worth[head..]);
                let (at, out) = ((lines, line), &mut out[head * lines..]);
                line += match (heads - head, lines - line) {
                    (4.., 4..) if const { V::VALUE_VECTORS >= 4 } => {
                        columns::<V, 4, 4>(weights, rows, at, prefetch, out)
                    }
                    (4.., _) if const { V::HEADS >= 4 } => {
                        columns::<V, 4, 1>(weights, rows, at, prefetch, out)
                    }
                    (2.., 2..) if const { V::VALUE_VECTORS >= 2 } => {
                        columns::<V, 2, 2>(weights, rows, at, prefetch, out)
                    }
                    (2.., _) if const { V::HEADS >= 2 } => {
                        columns::<V, 2, 1>(weights, rows, at, prefetch, out)
                    }
                    (_, 4..) if const { V::VALUE_VECTORS >= 4 } => {
                        columns::<V, 1, 4>(weights, rows, at, prefetch, out)
                    }
                    _ => columns::<V, 1, 1>(weights, rows, at, prefetch, out),
                };
            }
            head += match heads - head {
                4.. if const { V::HEADS >= 4 } => 4,
                2.. if const { V::HEADS >= 2 } => 2,
                _ => 1,
            };
        }
    }
}

/// The sums of the first `HEADS` heads and `VECTORS` of the `lines` vectors of a row, from `line`
/// on; returns `VECTORS`.
#[inline(always)]
fn columns<V: Vectors, const HEADS: usize, const VECTORS: usize>(
    (weights, worth): (&[[i16; KEYS_PER_BLOCK]], &[f32]),
    rows: &[[i8; LANES]],
    (lines, line): (usize, usize),
    prefetch: &mut Prefetch,
    out: &mut [[f32; LANES]],
) -> usize {
    let weights = weights.first_chunk::<HEADS>().expect("as many heads");
    let pairs: [&[[i16; 2]]; HEADS] = array::from_fn(|head| weights[head].as_chunks().0);
    let mut sums = [[V::no_integers(); VECTORS]; HEADS];
    for (pair, two) in rows.chunks(2 * lines).enumerate() {
        let first: &[_; VECTORS] = two[line..].first_chunk().expect("some vectors");
        // The last one alone is taken with itself, which has no weight then.
        let second = if two.len() > lines { &two[lines + line..] } else { first };
        let second: &[_; VECTORS] = second.first_chunk().expect("some vectors");
        prefetch.stretch(first.as_ptr().addr(), 2 * VECTORS * LANES).lines(0..2 * VECTORS * LANES);
        let mut values = [V::pairs(&first[0], &second[0]); VECTORS];
        for (value, (a, b)) in values.iter_mut().zip(first.iter().zip(second)) {
            *value = V::pairs(a, b);
        }
        for (sums, weights) in sums.iter_mut().zip(pairs) {
            let weight = V::splat_pair(weights[pair]);
            for (sum, value) in sums.iter_mut().zip(values) {
                *sum = V::add_products(*sum, weight, value);
            }
        }
    }
    for ((head, sums), worth) in sums.into_iter().enumerate().zip(worth) {
        let out = &mut out[head * lines + line..][..VECTORS];
        for (sum, out) in sums.into_iter().zip(out) {
            V::store(V::mul(V::from_integers(sum), V::splat(*worth)), out);
        }
    }
    VECTORS
}
