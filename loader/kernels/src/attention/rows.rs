//! Keys and values as rows of numbers: products of queries with keys, and weighted sums of values.
//!
//! Rows are read as they are stored, and each vector of them once for several query heads. While
//! they are read, what comes next is fetched, line for line: more at once would fill what the
//! processor keeps of reads under way.

#![expect(clippy::inline_always, reason = "compiled within the function of each platform")]

use std::{array, marker::PhantomData, ops::Range};

use super::vectors::Vectors;
use crate::{lanes::LANES, memory, platform::Task};

/// Keys that meet all query heads before the next ones are read.
const KEYS_AT_ONCE: usize = 16;

/// Values that are summed for some heads before others: what is read again is in the first cache.
const VALUES_AT_ONCE: usize = 64;

/// Bytes of a line of the cache.
const LINE: usize = size_of::<Line>();

/// A form in which numbers are stored.
pub(super) trait Stored: Copy {
    type Number: Copy;
    /// Whether each row has a scale.
    const SCALED: bool;

    fn load<V: Vectors>(from: &[Self::Number; LANES]) -> V::Floats;
}

/// 32-bit floats.
#[derive(Clone, Copy)]
pub(super) struct F32;

/// IEEE half-precision floats.
#[derive(Clone, Copy)]
pub(super) struct F16;

/// Upper halves of f32.
#[derive(Clone, Copy)]
pub(super) struct Bf16;

/// Integers times the row's scale.
#[derive(Clone, Copy)]
pub(super) struct Q8;

impl Stored for F32 {
    type Number = f32;
    const SCALED: bool = false;

    #[inline(always)]
    fn load<V: Vectors>(from: &[f32; LANES]) -> V::Floats {
        V::load(from)
    }
}

impl Stored for F16 {
    type Number = u16;
    const SCALED: bool = false;

    #[inline(always)]
    fn load<V: Vectors>(from: &[u16; LANES]) -> V::Floats {
        V::load_f16(from)
    }
}

impl Stored for Bf16 {
    type Number = u16;
    const SCALED: bool = false;

    #[inline(always)]
    fn load<V: Vectors>(from: &[u16; LANES]) -> V::Floats {
        V::load_bf16(from)
    }
}

impl Stored for Q8 {
    type Number = i8;
    const SCALED: bool = true;

    #[inline(always)]
    fn load<V: Vectors>(from: &[i8; LANES]) -> V::Floats {
        V::load_i8(from)
    }
}

/// Rows `[count, width]`; `width` is a multiple of [`LANES`].
#[derive(Clone, Copy)]
pub(super) struct Rows<'a, S: Stored> {
    pub(super) numbers: &'a [S::Number],
    /// One for each row, if they are scaled.
    pub(super) scales: &'a [f32],
    pub(super) width: usize,
}

impl<'a, S: Stored> Rows<'a, S> {
    fn count(self) -> usize {
        self.numbers.len() / self.width
    }

    #[inline(always)]
    fn row(self, index: usize) -> Row<'a, S> {
        self.numbers[index * self.width..][..self.width].as_chunks::<LANES>().0
    }

    #[inline(always)]
    fn scale<V: Vectors>(self, index: usize) -> V::Floats {
        V::splat(if S::SCALED { self.scales[index] } else { 1.0 })
    }
}

/// A row's vectors.
type Row<'a, S> = &'a [[<S as Stored>::Number; LANES]];

#[inline(always)]
fn load<V: Vectors, S: Stored>(from: &[S::Number; LANES], scale: V::Floats) -> V::Floats {
    let floats = S::load::<V>(from);
    if S::SCALED { V::mul(floats, scale) } else { floats }
}

/// How far ahead of what is read is fetched.
const DISTANCE: usize = 16 << 10;

/// Addresses that are fetched while rows are read: the first run, then the other.
#[derive(Default)]
pub(super) struct Ahead {
    next: usize,
    end: usize,
    other: Range<usize>,
}

impl Ahead {
    /// What follows in the rows themselves, then the beginning of what is read after them.
    pub(super) fn new(rows: &Range<usize>, after: &Range<usize>) -> Self {
        let next = rows.end.min(rows.start + DISTANCE);
        let other = after.start..after.end.min(after.start + DISTANCE);
        Self { next, end: rows.end, other }
    }

    /// Fetches as many bytes as are read now.
    #[inline(always)]
    fn fetch(&mut self, bytes: usize) {
        if self.next >= self.end {
            let Range { start, end } = std::mem::take(&mut self.other);
            (self.next, self.end) = (start, end);
        }
        if self.next < self.end {
            for line in 0..bytes.div_ceil(LINE) {
                memory::fetch(self.next + line * LINE);
            }
            self.next += bytes;
        }
    }
}

/// Sixteen floats in one line of the cache: vectors that lie in two take two reads each.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct Line([f32; LANES]);

impl Line {
    /// The same floats in whole lines; those that fill none are left out.
    pub(super) fn copy(floats: &[f32], to: &mut Vec<Self>) {
        to.clear();
        to.extend(floats.as_chunks().0.iter().map(|line| Self(*line)));
    }
}

/// As [`crate::lanes::dot`] of each query with each key: `q` is `[heads, width]`, `out`
/// `[heads, keys]`.
pub(super) fn dots<V: Vectors, S: Stored>(
    q: &[Line],
    keys: Rows<'_, S>,
    ahead: Ahead,
    out: &mut [f32],
) {
    V::run(Dots::<V, S> { q, keys, ahead, out, vectors: PhantomData });
}

struct Dots<'a, V, S: Stored> {
    q: &'a [Line],
    keys: Rows<'a, S>,
    ahead: Ahead,
    out: &'a mut [f32],
    vectors: PhantomData<V>,
}

impl<V: Vectors, S: Stored> Task for Dots<'_, V, S> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { q, keys, mut ahead, out, .. } = self;
        let (count, lines) = (keys.count(), keys.width / LANES);
        let heads = q.len() / lines;
        assert!(q.len() == heads * lines && out.len() == heads * count, "queries and scores");
        for first in (0..count).step_by(KEYS_AT_ONCE) {
            let some = first..count.min(first + KEYS_AT_ONCE);
            let mut nothing = Ahead::default();
            let mut head = 0;
            while head < heads {
                let ahead = if head == 0 { &mut ahead } else { &mut nothing };
                let (q, out) = (&q[head * lines..], &mut out[head * count..]);
                let keys = (keys, &some);
                head += match heads - head {
                    4.. if V::DOT_HEADS >= 4 => dots_of::<V, S, 4>(q, keys, ahead, out),
                    2.. if V::DOT_HEADS >= 2 => dots_of::<V, S, 2>(q, keys, ahead, out),
                    _ => dots_of::<V, S, 1>(q, keys, ahead, out),
                };
            }
        }
    }
}

/// The first `HEADS` of the queries with at most [`KEYS_AT_ONCE`] keys; returns `HEADS`.
#[inline(always)]
fn dots_of<V: Vectors, S: Stored, const HEADS: usize>(
    q: &[Line],
    (keys, some): (Rows<'_, S>, &Range<usize>),
    ahead: &mut Ahead,
    out: &mut [f32],
) -> usize {
    let (count, lines) = (keys.count(), keys.width / LANES);
    let q: [&[Line]; HEADS] = array::from_fn(|head| &q[head * lines..(head + 1) * lines]);
    let mut quarters = [[V::quarter([V::splat(0.0); 4]); 4]; HEADS];
    for (place, first) in some.clone().step_by(4).enumerate() {
        // Where there are fewer than four keys the last one is taken again.
        let four = [0, 1, 2, 3].map(|index| (first + index).min(some.end - 1));
        let mut scales = [V::splat(1.0); 4];
        for (scale, key) in scales.iter_mut().zip(four) {
            *scale = keys.scale::<V>(key);
        }
        let four = four.map(|key| keys.row(key));
        let sums = if lines.is_multiple_of(4) {
            products::<V, S, HEADS, 4>(q, (four, scales), ahead)
        } else {
            products::<V, S, HEADS, 1>(q, (four, scales), ahead)
        };
        for (quarters, sums) in quarters.iter_mut().zip(sums) {
            quarters[place] = V::quarter(sums);
        }
    }
    for (head, quarters) in quarters.into_iter().enumerate() {
        let sums = V::sums(quarters);
        let out = &mut out[head * count..][some.clone()];
        match out.as_chunks_mut::<LANES>().0.first_mut() {
            Some(all) if some.len() == LANES => *all = sums,
            _ => out.copy_from_slice(&sums[..out.len()]),
        }
    }
    HEADS
}

/// The lanes of the products of each query with four keys, `VECTORS` vectors at a time.
#[inline(always)]
fn products<V: Vectors, S: Stored, const HEADS: usize, const VECTORS: usize>(
    q: [&[Line]; HEADS],
    (keys, scales): ([Row<'_, S>; 4], [V::Floats; 4]),
    ahead: &mut Ahead,
) -> [[V::Floats; 4]; HEADS] {
    let parts = keys[0].len() / VECTORS;
    let q = q.map(|q| &q.as_chunks::<VECTORS>().0[..parts]);
    let keys = keys.map(|row| &row.as_chunks::<VECTORS>().0[..parts]);
    let mut sums = [[V::splat(0.0); 4]; HEADS];
    for part in 0..parts {
        for vector in 0..VECTORS {
            ahead.fetch(4 * LANES * size_of::<S::Number>());
            let mut four = scales;
            for (four, row) in four.iter_mut().zip(keys) {
                *four = load::<V, S>(&row[part][vector], *four);
            }
            for (sums, q) in sums.iter_mut().zip(q) {
                let q = V::load(&q[part][vector].0);
                for (sum, key) in sums.iter_mut().zip(four) {
                    *sum = V::add(*sum, V::mul(q, key));
                }
            }
        }
    }
    sums
}

/// `Σ weight · value`, value after value: `weights` is `[heads, values]`, `out` `[heads, width]`.
pub(super) fn weighted_sums<V: Vectors, S: Stored>(
    weights: &[f32],
    values: Rows<'_, S>,
    ahead: Ahead,
    out: &mut [f32],
) {
    V::run(WeightedSums::<V, S> { weights, values, ahead, out, vectors: PhantomData });
}

struct WeightedSums<'a, V, S: Stored> {
    weights: &'a [f32],
    values: Rows<'a, S>,
    ahead: Ahead,
    out: &'a mut [f32],
    vectors: PhantomData<V>,
}

impl<V: Vectors, S: Stored> Task for WeightedSums<'_, V, S> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { weights, values, mut ahead, out, .. } = self;
        let (count, heads) = (values.count(), out.len() / values.width);
        assert!(out.len() == heads * values.width, "sums");
        assert!(weights.len() == heads * count, "weights");
        out.fill(0.0);
        for first in (0..count).step_by(VALUES_AT_ONCE) {
            let some = first..count.min(first + VALUES_AT_ONCE);
            let mut nothing = Ahead::default();
            let mut head = 0;
            while head < heads {
                let ahead = if head == 0 { &mut ahead } else { &mut nothing };
                let (weights, out) = (&weights[head * count..], &mut out[head * values.width..]);
                head += match heads - head {
                    4.. => columns::<V, S, 4>(weights, (values, &some), ahead, out),
                    2.. => columns::<V, S, 2>(weights, (values, &some), ahead, out),
                    _ => columns::<V, S, 1>(weights, (values, &some), ahead, out),
                };
            }
        }
    }
}

/// Adds `some` values to the sums of the first `HEADS` heads; returns `HEADS`.
#[inline(always)]
fn columns<V: Vectors, S: Stored, const HEADS: usize>(
    weights: &[f32],
    values: (Rows<'_, S>, &Range<usize>),
    ahead: &mut Ahead,
    out: &mut [f32],
) -> usize {
    let vectors = values.0.width / LANES;
    let mut vector = 0;
    while vector < vectors {
        vector += match vectors - vector {
            4.. if V::SUM_VECTORS >= 4 => {
                add::<V, S, HEADS, 4>(weights, (values, vector), ahead, out)
            }
            2.. if V::SUM_VECTORS >= 2 => {
                add::<V, S, HEADS, 2>(weights, (values, vector), ahead, out)
            }
            _ => add::<V, S, HEADS, 1>(weights, (values, vector), ahead, out),
        };
    }
    HEADS
}

/// The same for `VECTORS` vectors of the rows from `vector` on; returns `VECTORS`.
#[inline(always)]
fn add<V: Vectors, S: Stored, const HEADS: usize, const VECTORS: usize>(
    weights: &[f32],
    ((values, some), vector): ((Rows<'_, S>, &Range<usize>), usize),
    ahead: &mut Ahead,
    out: &mut [f32],
) -> usize {
    let (count, width) = (values.count(), values.width);
    let mut sums = [[V::splat(0.0); VECTORS]; HEADS];
    for (head, sums) in sums.iter_mut().enumerate() {
        let out = out[head * width..][..width].as_chunks().0;
        for (sum, out) in sums.iter_mut().zip(&out[vector..]) {
            *sum = V::load(out);
        }
    }
    for key in some.clone() {
        ahead.fetch(VECTORS * LANES * size_of::<S::Number>());
        let scale = values.scale::<V>(key);
        let row: &[_; VECTORS] = values.row(key)[vector..].first_chunk().expect("some vectors");
        let mut parts = [scale; VECTORS];
        for (part, row) in parts.iter_mut().zip(row) {
            *part = load::<V, S>(row, scale);
        }
        for (head, sums) in sums.iter_mut().enumerate() {
            let weight = V::splat(weights[head * count + key]);
            for (sum, part) in sums.iter_mut().zip(parts) {
                *sum = V::add(*sum, V::mul(weight, part));
            }
        }
    }
    for (head, sums) in sums.into_iter().enumerate() {
        let out = out[head * width..][..width].as_chunks_mut().0;
        for (sum, out) in sums.into_iter().zip(&mut out[vector..]) {
            V::store(sum, out);
        }
    }
    VECTORS
}
