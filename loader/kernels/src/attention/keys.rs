//! Products of queries with keys. Each vector of a key is read once for several query heads.

#![expect(clippy::inline_always, reason = "compiled within the function of each platform")]

use std::{array, marker::PhantomData, ops::Range};

use super::{
    KEYS_PER_BLOCK,
    kv_types::{Rows, Stored, load},
    prefetch::{Fetch, Prefetch},
    vectors::Vectors,
};
use crate::{lanes::LANES, platform::Task};

/// Keys that are multiplied with some query heads before others: they stay in the L1 cache.
const KEYS_AT_ONCE: usize = 64;

/// Marks a number of vectors in a row that is known only at run time.
const ANY: usize = 0;

/// Sixteen floats in one cache line: vectors that lie in two take two reads each.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct Line([f32; LANES]);

impl Line {
    #[inline(always)]
    pub(super) const fn floats(&self) -> &[f32; LANES] {
        &self.0
    }

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
    prefetch: Prefetch,
    out: &mut [f32],
) {
    V::run(Products::<V, S> { q, keys, prefetch, out, vectors: PhantomData });
}

struct Products<'a, V, S: Stored> {
    q: &'a [Line],
    keys: Rows<'a, S>,
    prefetch: Prefetch,
    out: &'a mut [f32],
    vectors: PhantomData<V>,
}

impl<V: Vectors, S: Stored> Task for Products<'_, V, S> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        // Compiled for the usual widths too: distances that are constants take no registers.
        match self.keys.width / LANES {
            4 if const { V::USUAL_WIDTHS } => self.in_parts::<4, 1>(),
            8 if const { V::USUAL_WIDTHS } => self.in_parts::<8, 1>(),
            lines if lines.is_multiple_of(4) => self.in_parts::<4, ANY>(),
            _ => self.in_parts::<1, ANY>(),
        }
    }
}

impl<V: Vectors, S: Stored> Products<'_, V, S> {
    /// Rows in `PARTS` parts of `LINES` vectors.
    #[inline(always)]
    fn in_parts<const LINES: usize, const PARTS: usize>(self) {
        let Self { q, keys, mut prefetch, out, .. } = self;
        let parts = if PARTS == ANY { keys.width / LANES / LINES } else { PARTS };
        let (count, heads) = (keys.count(), q.len() / LINES / parts);
        assert!(q.len() == heads * parts * LINES && out.len() == heads * KEYS_PER_BLOCK, "scores");
        let (q, out) = (q.as_chunks::<LINES>().0, out.as_chunks_mut::<KEYS_PER_BLOCK>().0);
        for first in (0..count).step_by(KEYS_AT_ONCE) {
            let some = (keys, first..count.min(first + KEYS_AT_ONCE));
            let mut head = 0;
            while head < heads {
                let prefetch = if head == 0 { &mut prefetch } else { &mut Prefetch::default() };
                let (q, out) = ((&q[head * parts..], parts), &mut out[head..]);
                head += match heads - head {
                    4.. if const { V::HEADS >= 4 } => {
                        some_heads::<V, S, 4, LINES>(q, &some, prefetch, out)
                    }
                    2.. if const { V::HEADS >= 2 } => {
                        some_heads::<V, S, 2, LINES>(q, &some, prefetch, out)
                    }
                    _ => some_heads::<V, S, 1, LINES>(q, &some, prefetch, out),
                };
            }
        }
    }
}

/// Rows in as many parts of `LINES` vectors.
type Parts<'a, N, const LINES: usize> = (&'a [[N; LINES]], usize);

/// The first `HEADS` of the queries with some keys; returns `HEADS`.
#[inline(always)]
fn some_heads<V: Vectors, S: Stored, const HEADS: usize, const LINES: usize>(
    (q, parts): Parts<'_, Line, LINES>,
    (keys, some): &(Rows<'_, S>, Range<usize>),
    prefetch: &mut Prefetch,
    out: &mut [[f32; KEYS_PER_BLOCK]],
) -> usize {
    let q = (&q[..HEADS * parts], parts);
    let out = out.first_chunk_mut::<HEADS>().expect("as many heads");
    let rows = keys.rows(some.clone()).as_chunks::<LINES>().0;
    let bytes = keys.width * size_of::<S::Element>();
    let mut scales = [V::splat(1.0); 4];
    let fours = rows.chunks_exact(4 * parts);
    let rest = fours.remainder();
    for (index, rows) in fours.enumerate() {
        let first = some.start + 4 * index;
        for (place, scale) in scales.iter_mut().enumerate() {
            *scale = keys.scale::<V>(first + place);
        }
        let fetch = prefetch.stretch(rows.as_ptr().addr(), 4 * bytes);
        let rows = ((rows, parts), [0, 1, 2, 3], scales);
        let sums = four_keys::<V, S, HEADS, LINES>(q, rows, fetch);
        for (out, sums) in out.iter_mut().zip(sums.as_chunks::<4>().0) {
            out.as_chunks_mut().0[first / 4] = *sums;
        }
    }
    let held = rest.len() / parts;
    if held > 0 {
        let fetch = prefetch.stretch(rest.as_ptr().addr(), held * bytes);
        let (q, some) = (q.0.as_flattened(), some.end - held..some.end);
        V::run(LastKeys::<V, S> { q, keys: *keys, some, fetch, out, vectors: PhantomData });
    }
    HEADS
}

/// Fewer than four keys, of any width and for one query after another: they are met once a block,
/// so they share no loops with the others, which would be compiled twice.
struct LastKeys<'a, V, S: Stored> {
    q: &'a [Line],
    keys: Rows<'a, S>,
    some: Range<usize>,
    fetch: Fetch,
    out: &'a mut [[f32; KEYS_PER_BLOCK]],
    vectors: PhantomData<V>,
}

impl<V: Vectors, S: Stored> Task for LastKeys<'_, V, S> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { q, keys, some, mut fetch, out, .. } = self;
        let (held, lines) = (some.len(), keys.width / LANES);
        // The last key is taken again.
        let places = [0, 1.min(held - 1), held - 1, held - 1];
        let mut scales = [V::splat(1.0); 4];
        for (scale, place) in scales.iter_mut().zip(places) {
            *scale = keys.scale::<V>(some.start + place);
        }
        let rows = keys.rows(some.clone()).as_chunks::<1>().0;
        for (q, out) in q.chunks_exact(lines).zip(out) {
            let q = (q.as_chunks::<1>().0, lines);
            let sums = four_keys::<V, S, 1, 1>(q, ((rows, lines), places, scales), fetch);
            out[some.clone()].copy_from_slice(&sums[..held]);
            fetch = Fetch::NONE;
        }
    }
}

/// The sums for each query and four keys, of at most four queries.
#[inline(always)]
fn four_keys<V: Vectors, S: Stored, const HEADS: usize, const LINES: usize>(
    (q, parts): Parts<'_, Line, LINES>,
    rows: FourKeys<'_, V, S, LINES>,
    mut fetch: Fetch,
) -> [f32; LANES] {
    let mut quarters = [V::quarter([V::pair([V::splat(0.0); 2]); 2]); 4];
    if const { HEADS <= V::KEY_HEADS } {
        quarter::<V, S, HEADS, LINES>((q, parts), rows, fetch, &mut quarters);
    } else {
        const { assert!(V::HEADS <= V::KEY_HEADS || V::KEY_HEADS == 2, "registers for two") };
        for head in (0..HEADS).step_by(2) {
            let q = (&q[head * parts..], parts);
            quarter::<V, S, 2, LINES>(q, rows, fetch, &mut quarters[head..]);
            fetch = Fetch::NONE;
        }
    }
    V::sums(quarters)
}

/// Rows, the places of four, and their scales.
type FourKeys<'a, V, S, const LINES: usize> =
    (Parts<'a, [<S as Stored>::Element; LANES], LINES>, [usize; 4], [<V as Vectors>::Floats; 4]);

/// The first `HEADS` of the queries with four keys.
#[inline(always)]
fn quarter<V: Vectors, S: Stored, const HEADS: usize, const LINES: usize>(
    q: Parts<'_, Line, LINES>,
    (rows, places, scales): FourKeys<'_, V, S, LINES>,
    fetch: Fetch,
    quarters: &mut [V::Quarter],
) {
    let quarters = quarters.first_chunk_mut::<HEADS>().expect("as many heads");
    if const { V::KEYS >= 4 } {
        let sums = lanes::<V, S, HEADS, 4, LINES>(q, rows, (places, scales), (fetch, 0));
        for (quarter, [a, b, c, d]) in quarters.iter_mut().zip(sums) {
            *quarter = V::quarter([V::pair([a, b]), V::pair([c, d])]);
        }
        return;
    }
    let ([a, b, c, d], [e, f, g, h]) = (places, scales);
    let half = 2 * rows.1 * LINES * LANES * size_of::<S::Element>();
    let first = lanes::<V, S, HEADS, 2, LINES>(q, rows, ([a, b], [e, f]), (fetch, 0));
    let mut pairs = [V::pair([V::splat(0.0); 2]); HEADS];
    for (pair, sums) in pairs.iter_mut().zip(first) {
        *pair = V::pair(sums);
    }
    let last = lanes::<V, S, HEADS, 2, LINES>(q, rows, ([c, d], [g, h]), (fetch, half));
    for ((quarter, pair), sums) in quarters.iter_mut().zip(pairs).zip(last) {
        *quarter = V::quarter([pair, V::pair(sums)]);
    }
}

/// The lanes of the products of each query with some keys.
#[inline(always)]
fn lanes<V: Vectors, S: Stored, const HEADS: usize, const KEYS: usize, const LINES: usize>(
    (q, parts): Parts<'_, Line, LINES>,
    (rows, _): Parts<'_, [S::Element; LANES], LINES>,
    (places, scales): ([usize; KEYS], [V::Floats; KEYS]),
    (fetch, mut at): (Fetch, usize),
) -> [[V::Floats; KEYS]; HEADS] {
    let mut sums = [[V::splat(0.0); KEYS]; HEADS];
    for part in 0..parts {
        let q: [_; HEADS] = array::from_fn(|head| &q[head * parts + part]);
        let rows = places.map(|place| &rows[place * parts + part]);
        for line in 0..LINES {
            let bytes = KEYS * LANES * size_of::<S::Element>();
            fetch.lines(at..at + bytes);
            at += bytes;
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
    }
    sums
}
