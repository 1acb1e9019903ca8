//! Products of queries with keys. Each vector of a key is read once for several query heads.

#![expect(clippy::inline_always, reason = "compiled within the function of each platform")]

use std::{array, marker::PhantomData, ops::Range};

use super::{
    KEYS_PER_BLOCK,
    ahead::{Ahead, Fetch},
    stored::{Row, Rows, Stored, load},
    vectors::Vectors,
};
use crate::{lanes::LANES, platform::Task};

/// Stands for a number of vectors in a row that is known only when it is asked for.
const ANY: usize = 0;

/// Keys that meet all query heads before the next ones are read.
const KEYS_AT_ONCE: usize = 16;

/// Sixteen floats in one line of the cache: vectors that lie in two take two reads each.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct Line([f32; LANES]);

impl Line {
    /// Rows of `width` floats times `factor`, each in whole lines, of which the last is filled up
    /// with zeros.
    #[inline(always)]
    pub(super) fn append(rows: &[f32], width: usize, factor: f32, to: &mut Vec<Self>) {
        for row in rows.chunks_exact(width) {
            for floats in row.chunks(LANES) {
                let mut line = Self([0.0; LANES]);
                for (place, value) in line.0.iter_mut().zip(floats) {
                    *place = value * factor;
                }
                to.push(line);
            }
        }
    }
}

/// `q · key` of each query with each key: element `i` of a row goes to lane `i mod 16`, products
/// are fused with the sums, and the lanes are added by [`crate::lanes::tree`]. `q` is
/// `[heads, width]`, `out` `[heads, KEYS_PER_BLOCK]`.
pub(super) fn products<V: Vectors, S: Stored>(
    q: &[Line],
    keys: Rows<'_, S>,
    ahead: Ahead,
    out: &mut [f32],
) {
    V::run(Products::<V, S> { q, keys, ahead, out, vectors: PhantomData });
}

struct Products<'a, V, S: Stored> {
    q: &'a [Line],
    keys: Rows<'a, S>,
    ahead: Ahead,
    out: &'a mut [f32],
    vectors: PhantomData<V>,
}

impl<V: Vectors, S: Stored> Task for Products<'_, V, S> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        // Compiled for the usual widths too: distances that are constants take no registers.
        match self.keys.width / LANES {
            4 => self.with_lines::<4>(),
            8 => self.with_lines::<8>(),
            _ => self.with_lines::<ANY>(),
        }
    }
}

impl<V: Vectors, S: Stored> Products<'_, V, S> {
    #[inline(always)]
    fn with_lines<const LINES: usize>(self) {
        let Self { q, keys, mut ahead, out, .. } = self;
        let lines = if LINES == ANY { keys.width / LANES } else { LINES };
        let (count, heads) = (keys.count(), q.len() / lines);
        assert!(q.len() == heads * lines && out.len() == heads * KEYS_PER_BLOCK, "scores");
        for first in (0..count).step_by(KEYS_AT_ONCE) {
            let some = first..count.min(first + KEYS_AT_ONCE);
            let mut head = 0;
            while head < heads {
                let ahead = (head == 0).then_some(&mut ahead);
                let (q, out) = (&q[head * lines..], &mut out[head * KEYS_PER_BLOCK..]);
                let keys = (keys, &some);
                head += match heads - head {
                    4.. if V::KEY_HEADS >= 4 => some_heads::<V, S, 4>(q, lines, keys, ahead, out),
                    2.. if V::KEY_HEADS >= 2 => some_heads::<V, S, 2>(q, lines, keys, ahead, out),
                    _ => some_heads::<V, S, 1>(q, lines, keys, ahead, out),
                };
            }
        }
    }
}

/// The first `HEADS` of the queries with at most [`KEYS_AT_ONCE`] keys; returns `HEADS`.
#[inline(always)]
fn some_heads<V: Vectors, S: Stored, const HEADS: usize>(
    q: &[Line],
    lines: usize,
    (keys, some): (Rows<'_, S>, &Range<usize>),
    mut ahead: Option<&mut Ahead>,
    out: &mut [f32],
) -> usize {
    let q: [&[Line]; HEADS] = array::from_fn(|head| &q[head * lines..(head + 1) * lines]);
    let mut quarters = [[V::quarter([V::pair([V::splat(0.0); 2]); 2]); 4]; HEADS];
    for (place, first) in some.clone().step_by(4).enumerate() {
        let rows = if some.end - first >= 4 {
            let rows = keys.rows(first..first + 4, lines);
            array::from_fn(|key| &rows[key * lines..(key + 1) * lines])
        } else {
            // The last key is taken again.
            let last = some.end - 1;
            [0, 1, 2, 3].map(|key| keys.rows((first + key).min(last)..last + 1, lines))
        };
        let mut scales = [V::splat(1.0); 4];
        for (key, scale) in scales.iter_mut().enumerate() {
            *scale = keys.scale::<V>((first + key).min(some.end - 1));
        }
        let bytes = 4 * lines * LANES * size_of::<S::Number>();
        let fetch = ahead
            .as_mut()
            .map_or(Fetch::NONE, |ahead| ahead.stretch(rows[0].as_ptr().addr(), bytes));
        let four = four_keys::<V, S, HEADS>(q, (rows, scales), lines, fetch);
        for (quarters, four) in quarters.iter_mut().zip(four) {
            quarters[place] = four;
        }
    }
    for (head, quarters) in quarters.into_iter().enumerate() {
        let sums = V::sums(quarters);
        let out = &mut out[head * KEYS_PER_BLOCK..][some.clone()];
        match out.as_chunks_mut::<LANES>().0.first_mut() {
            Some(all) if some.len() == LANES => *all = sums,
            _ => out.copy_from_slice(&sums[..out.len()]),
        }
    }
    HEADS
}

/// Each query with four keys.
#[inline(always)]
fn four_keys<V: Vectors, S: Stored, const HEADS: usize>(
    q: [&[Line]; HEADS],
    (rows, scales): ([Row<'_, S>; 4], [V::Floats; 4]),
    lines: usize,
    fetch: Fetch,
) -> [V::Quarter; HEADS] {
    let mut quarters = [V::quarter([V::pair([V::splat(0.0); 2]); 2]); HEADS];
    if V::KEYS >= 4 {
        let sums = lanes::<V, S, HEADS, 4>(q, (rows, scales), lines, (fetch, 0));
        for (quarter, [a, b, c, d]) in quarters.iter_mut().zip(sums) {
            *quarter = V::quarter([V::pair([a, b]), V::pair([c, d])]);
        }
        return quarters;
    }
    let ([a, b, c, d], [e, f, g, h]) = (rows, scales);
    let half = lines * 2 * LANES * size_of::<S::Number>();
    let first = lanes::<V, S, HEADS, 2>(q, ([a, b], [e, f]), lines, (fetch, 0));
    let mut pairs = [V::pair([V::splat(0.0); 2]); HEADS];
    for (pair, sums) in pairs.iter_mut().zip(first) {
        *pair = V::pair(sums);
    }
    let last = lanes::<V, S, HEADS, 2>(q, ([c, d], [g, h]), lines, (fetch, half));
    for ((quarter, pair), sums) in quarters.iter_mut().zip(pairs).zip(last) {
        *quarter = V::quarter([pair, V::pair(sums)]);
    }
    quarters
}

/// The lanes of the products of each query with some keys.
#[inline(always)]
fn lanes<V: Vectors, S: Stored, const HEADS: usize, const KEYS: usize>(
    q: [&[Line]; HEADS],
    (rows, scales): ([Row<'_, S>; KEYS], [V::Floats; KEYS]),
    lines: usize,
    (fetch, at): (Fetch, usize),
) -> [[V::Floats; KEYS]; HEADS] {
    let q = q.map(|q| &q[..lines]);
    let rows = rows.map(|row| &row[..lines]);
    let bytes = KEYS * LANES * size_of::<S::Number>();
    let mut sums = [[V::splat(0.0); KEYS]; HEADS];
    for line in 0..lines {
        fetch.lines(at + line * bytes..at + (line + 1) * bytes);
        let mut keys = scales;
        for (key, row) in keys.iter_mut().zip(rows) {
            *key = load::<V, S>(&row[line], *key);
        }
        for (sums, q) in sums.iter_mut().zip(q) {
            let q = V::load(&q[line].0);
            for (sum, key) in sums.iter_mut().zip(keys) {
                *sum = V::fma(q, key, *sum);
            }
        }
    }
    sums
}
