//! Causal attention over cached keys and values.
//!
//! Keys are taken in fixed blocks of 256 counted from position 0, with a running maximum and
//! sum (online softmax), so the order of summation depends on a query's position and window
//! alone. The cache is stored in the same blocks.

use std::{iter, marker::PhantomData, ops::Range};

use crate::{
    Floats, Platform,
    exp::{exp, tanh},
    floats::addresses,
    lanes::{LANES, dot, sum},
    platform::Task,
    team::{self, Columns},
};

mod rows;
mod vectors;

use rows::{Ahead, Bf16, F16, F32, Line, Q8, Rows, Stored};
use vectors::Plain;
pub(crate) use vectors::Vectors;

/// Keys of one block.
pub const KEYS_PER_BLOCK: usize = 256;

/// Keys and values of one key-value head of one sequence. Every block but the last has
/// [`KEYS_PER_BLOCK`] keys; what a block holds beyond the sequence's end is not read.
#[derive(Clone, Copy, Debug)]
pub struct KvHead<'a> {
    /// Blocks of keys.
    pub keys: &'a [KvBlock<'a>],
    /// Blocks of values.
    pub values: &'a [KvBlock<'a>],
}

/// Keys or values `[keys, head_dim]` as they are cached.
#[derive(Clone, Copy, Debug)]
pub enum KvBlock<'a> {
    /// Floats.
    Floats(Floats<'a>),
    /// Each row as integers times the row's scale.
    Q8 {
        /// Integers, `[keys, head_dim]`.
        values: &'a [i8],
        /// One for each key.
        scales: &'a [f32],
    },
}

impl<'a> KvBlock<'a> {
    /// The given keys.
    fn part(self, keys: Range<usize>, head_dim: usize) -> Self {
        let span = keys.start * head_dim..keys.end * head_dim;
        match self {
            Self::Floats(floats) => Self::Floats(floats.slice(span)),
            Self::Q8 { values, scales } => {
                Self::Q8 { values: &values[span], scales: &scales[keys] }
            }
        }
    }

    /// The same as floats; `scratch` takes those that are stored otherwise.
    #[expect(clippy::inline_always, reason = "compiled within the function of each platform")]
    #[inline(always)]
    fn widened<'b>(self, head_dim: usize, scratch: &'b mut Vec<f32>) -> KvBlock<'b>
    where
        'a: 'b,
    {
        match self {
            Self::Floats(Floats::F32(_)) => return self,
            Self::Floats(floats) => {
                scratch.resize(floats.len(), 0.0);
                floats.read(0, scratch);
            }
            Self::Q8 { values, scales } => {
                scratch.resize(values.len(), 0.0);
                let rows = scratch.chunks_exact_mut(head_dim);
                for (out, (row, scale)) in rows.zip(values.chunks_exact(head_dim).zip(scales)) {
                    for (out, value) in out.iter_mut().zip(row) {
                        *out = f32::from(*value) * scale;
                    }
                }
            }
        }
        KvBlock::Floats(Floats::F32(scratch))
    }

    /// Where the numbers of the first keys lie.
    fn addresses(self, keys: usize, head_dim: usize) -> Range<usize> {
        match self {
            Self::Floats(floats) => floats.addresses(0..floats.len().min(keys * head_dim)),
            Self::Q8 { values, .. } => addresses(&values[..values.len().min(keys * head_dim)]),
        }
    }
}

/// What is computed for one sequence in one layer.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// Width of a head.
    pub head_dim: usize,
    /// Factor on `q · k`.
    pub scale: f32,
    /// Scores become `cap · tanh(score / cap)`.
    pub softcap: Option<f32>,
    /// For each query head one more score, which only enlarges the softmax's denominator.
    pub sinks: Option<&'a [f32]>,
    /// A query sees keys with `query − key < window`; all up to its own if absent.
    pub window: Option<u32>,
    /// The entry of `heads` that each query head reads.
    pub q_to_kv: &'a [usize],
    /// Cached keys and values, those of the queries' own positions included.
    pub heads: &'a [KvHead<'a>],
    /// Position of the first query.
    pub first_position: usize,
}

/// Attention of `q` `[queries, heads, head_dim]` at consecutive positions, to `out` of the same
/// shape.
pub fn attend(q: &[f32], attention: &Attention<'_>, out: &mut [f32]) {
    let head_dim = attention.head_dim;
    let width = attention.q_to_kv.len() * head_dim;
    assert_eq!(q.len(), out.len(), "queries and results");
    if q.is_empty() {
        return;
    }
    assert!(q.len().is_multiple_of(width), "queries of {width} elements");
    let sinks = attention.sinks.map_or(attention.q_to_kv.len(), <[f32]>::len);
    assert_eq!(sinks, attention.q_to_kv.len(), "one sink per query head");
    let keys = attention.first_position + q.len() / width;
    for head in attention.heads {
        assert_eq!(head.keys.len(), keys.div_ceil(KEYS_PER_BLOCK), "blocks of keys");
        assert_eq!(head.values.len(), head.keys.len(), "blocks of values");
    }
    let on = team::current();
    let units = q.len() / head_dim;
    let heads = attention.q_to_kv.len();
    let (length, ranges) = if on.units_per_task(units, 4 * keys * head_dim) >= units {
        // Not worth the handing over.
        (units, iter::once(0..width).collect::<Vec<_>>())
    } else {
        let groups = groups(attention.q_to_kv, 0..heads);
        let columns = |heads: Range<usize>| heads.start * head_dim..heads.end * head_dim;
        (ROWS_AT_ONCE, groups.map(columns).collect())
    };
    team::parts(&on, out, width, (length, &ranges), |first_row, out| {
        let (at, platform) = ((q, attention, first_row), on.platform);
        match platform {
            #[cfg(target_arch = "x86_64")]
            Platform::Avx512 => platform.run(Heads::<crate::avx512::Sixteen>::new(at, out)),
            #[cfg(target_arch = "x86_64")]
            Platform::Avx2 => platform.run(Heads::<crate::avx2::Sixteen>::new(at, out)),
            _ => platform.run(Heads::<Plain>::new(at, out)),
        }
    });
}

/// Rows of queries that meet a block of keys together.
const ROWS_AT_ONCE: usize = 8;

/// Query heads that meet a block of keys together; several groups for the threads remain where
/// all heads read the same keys.
const HEADS_AT_ONCE: usize = 8;

/// Runs of `heads` that read the same keys and values.
fn groups(q_to_kv: &[usize], heads: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let mut next = heads.start;
    iter::from_fn(move || {
        let first = next;
        while next < heads.end.min(first + HEADS_AT_ONCE) && q_to_kv[next] == q_to_kv[first] {
            next += 1;
        }
        (first < next).then_some(first..next)
    })
}

/// Some query heads of some rows.
struct Heads<'a, 'b, V> {
    q: &'a [f32],
    attention: &'a Attention<'a>,
    first_row: usize,
    out: Columns<'b>,
    vectors: PhantomData<V>,
}

impl<'a, 'b, V> Heads<'a, 'b, V> {
    const fn new(
        (q, attention, first_row): (&'a [f32], &'a Attention<'a>, usize),
        out: Columns<'b>,
    ) -> Self {
        Self { q, attention, first_row, out, vectors: PhantomData }
    }
}

impl<V: Vectors> Task for Heads<'_, '_, V> {
    type Output = ();

    #[expect(clippy::inline_always, reason = "compiled within the function of each platform")]
    #[inline(always)]
    fn run(self) {
        let Self { q, attention, first_row, mut out, .. } = self;
        let head_dim = attention.head_dim;
        let range = out.range();
        let heads = range.start / head_dim..range.end / head_dim;
        let mut scratch = Scratch::default();
        for first in (0..out.rows()).step_by(ROWS_AT_ONCE) {
            let rows = first..out.rows().min(first + ROWS_AT_ONCE);
            for group in groups(attention.q_to_kv, heads.clone()) {
                let at = (first_row, rows.clone(), group);
                several_heads::<V>(q, attention, at, &mut out, &mut scratch);
            }
        }
    }
}

/// Room for keys and values as floats, and for what is summed.
#[derive(Default)]
struct Scratch {
    keys: Vec<f32>,
    values: Vec<f32>,
    softmax: Vec<Softmax>,
    sums: Sums,
}

/// Room for the sums of one block.
#[derive(Default)]
struct Sums {
    q: Vec<Line>,
    scores: Vec<f32>,
    partial: Vec<f32>,
}

/// The softmax of one query head, as far as keys have been seen.
#[derive(Clone, Copy)]
struct Softmax {
    maximum: f32,
    total: f32,
}

/// The query heads `group` of some `rows` of `out`, of which the first is row `first_row` of `q`.
/// Every block of keys and values is read once for all of them.
#[expect(clippy::inline_always, reason = "compiled within the function of each platform")]
#[inline(always)]
fn several_heads<V: Vectors>(
    q: &[f32],
    attention: &Attention<'_>,
    (first_row, rows, group): (usize, Range<usize>, Range<usize>),
    out: &mut Columns<'_>,
    scratch: &mut Scratch,
) {
    let (head_dim, heads) = (attention.head_dim, attention.q_to_kv.len());
    let first_head = out.range().start / head_dim;
    let kv = &attention.heads[attention.q_to_kv[group.start]];
    let seen = |row: usize| {
        let position = attention.first_position + first_row + row;
        let first =
            attention.window.map_or(0, |window| (position + 1).saturating_sub(window as usize));
        first..position + 1
    };
    let all = seen(rows.start).start..seen(rows.end - 1).end;
    let Scratch { keys, values, softmax, sums } = scratch;
    sums.partial.resize(group.len() * head_dim, 0.0);
    softmax.clear();
    let none = Softmax { maximum: f32::NEG_INFINITY, total: 0.0 };
    softmax.resize(rows.len() * group.len(), none);
    let place = |head: usize| (head - first_head) * head_dim..(head + 1 - first_head) * head_dim;
    for row in rows.clone() {
        out.row(row)[place(group.start).start..place(group.end).start].fill(0.0);
    }
    for block in all.start / KEYS_PER_BLOCK..all.end.div_ceil(KEYS_PER_BLOCK) {
        let base = block * KEYS_PER_BLOCK;
        let within = |range: &Range<usize>| {
            range.start.max(base) - base..range.end.min(base + KEYS_PER_BLOCK).max(base) - base
        };
        let held = within(&all);
        let [mut keys_held, mut values_held] =
            [kv.keys[block], kv.values[block]].map(|block| block.part(held.clone(), head_dim));
        let [of_keys, of_values] =
            [keys_held, values_held].map(|part| part.addresses(held.len(), head_dim));
        let next = next_keys(attention, group.start, (block, &all));
        let mut ahead = [Ahead::new(&of_keys, &of_values), Ahead::new(&of_values, &next)];
        // What several rows read, or what does not come in whole vectors, is widened once.
        if rows.len() > 1 || !head_dim.is_multiple_of(LANES) {
            keys_held = keys_held.widened(head_dim, keys);
            values_held = values_held.widened(head_dim, values);
        }
        for (row, softmax) in rows.clone().zip(softmax.chunks_exact_mut(group.len())) {
            let visible = within(&seen(row));
            if visible.is_empty() {
                continue;
            }
            let part = visible.start - held.start..visible.end - held.start;
            let [keys, values] =
                [keys_held, values_held].map(|held| held.part(part.clone(), head_dim));
            let block = Block { keys, values, count: part.len(), ahead };
            ahead = Default::default();
            let first = ((first_row + row) * heads + group.start) * head_dim;
            let q = &q[first..first + group.len() * head_dim];
            let out = &mut out.row(row)[place(group.start).start..place(group.end).start];
            one_block::<V>(q, block, attention, softmax, sums, out);
        }
    }
    let mut softmax = softmax.iter();
    for row in rows {
        for (head, softmax) in group.clone().zip(softmax.by_ref()) {
            let sink = attention.sinks.map(|sinks| sinks[head]);
            finish(*softmax, sink, &mut out.row(row)[place(head)]);
        }
    }
}

/// The keys that are read after those of a block: of the next block, or of the next head's first.
fn next_keys(
    attention: &Attention<'_>,
    head: usize,
    (block, all): (usize, &Range<usize>),
) -> Range<usize> {
    let of = |head: usize, block: usize| {
        let keys = all.end.saturating_sub(block * KEYS_PER_BLOCK);
        let block = attention.heads.get(head)?.keys.get(block)?;
        Some(block.addresses(keys, attention.head_dim)).filter(|addresses| !addresses.is_empty())
    };
    let head = attention.q_to_kv[head];
    of(head, block + 1).or_else(|| of(head + 1, all.start / KEYS_PER_BLOCK)).unwrap_or_default()
}

/// Keys and values that one row sees, and what is fetched while either are read.
struct Block<'a> {
    keys: KvBlock<'a>,
    values: KvBlock<'a>,
    count: usize,
    ahead: [Ahead; 2],
}

/// Query heads of one row with keys and values of a block.
#[expect(clippy::inline_always, reason = "compiled within the function of each platform")]
#[inline(always)]
fn one_block<V: Vectors>(
    q: &[f32],
    block: Block<'_>,
    attention: &Attention<'_>,
    softmax: &mut [Softmax],
    sums: &mut Sums,
    out: &mut [f32],
) {
    let head_dim = attention.head_dim;
    let [ahead_of_keys, ahead_of_values] = block.ahead;
    let Sums { q: lines, scores, partial } = sums;
    scores.resize(softmax.len() * KEYS_PER_BLOCK, 0.0);
    let scores = &mut scores[..softmax.len() * block.count];
    Line::copy(q, lines);
    products::<V>((q, lines), block.keys, head_dim, ahead_of_keys, scores);
    for ((scores, softmax), out) in
        scores.chunks_exact_mut(block.count).zip(softmax).zip(out.chunks_exact_mut(head_dim))
    {
        for score in scores.iter_mut() {
            *score *= attention.scale;
        }
        if let Some(cap) = attention.softcap {
            for score in scores.iter_mut() {
                *score = cap * tanh(*score / cap);
            }
        }
        let raised = largest(scores, softmax.maximum);
        // Nothing has been summed before the first block, so the factor's value is irrelevant.
        let factor = exp(softmax.maximum - raised);
        for score in scores.iter_mut() {
            *score = exp(*score - raised);
        }
        softmax.total = softmax.total * factor + sum(scores);
        for out in out.iter_mut() {
            *out *= factor;
        }
        softmax.maximum = raised;
    }
    weighted_sums::<V>(scores, block.values, head_dim, ahead_of_values, partial);
    for (out, partial) in out.iter_mut().zip(&*partial) {
        *out += partial;
    }
}

/// `q · key` of each query head, which is given in lines too, with each key.
#[expect(clippy::inline_always, reason = "compiled within the function of each platform")]
#[inline(always)]
fn products<V: Vectors>(
    (q, lines): (&[f32], &[Line]),
    keys: KvBlock<'_>,
    width: usize,
    ahead: Ahead,
    scores: &mut [f32],
) {
    match keys {
        KvBlock::Floats(Floats::F32(keys)) if !width.is_multiple_of(LANES) => {
            let count = keys.len() / width;
            for (q, scores) in q.chunks_exact(width).zip(scores.chunks_exact_mut(count)) {
                for (score, key) in scores.iter_mut().zip(keys.chunks_exact(width)) {
                    *score = dot(q, key);
                }
            }
        }
        KvBlock::Floats(Floats::F32(keys)) => {
            rows::dots::<V, F32>(lines, plain(keys, width), ahead, scores);
        }
        KvBlock::Floats(Floats::F16(keys)) => {
            rows::dots::<V, F16>(lines, plain(keys, width), ahead, scores);
        }
        KvBlock::Floats(Floats::BF16(keys)) => {
            rows::dots::<V, Bf16>(lines, plain(keys, width), ahead, scores);
        }
        KvBlock::Q8 { values: numbers, scales } => {
            rows::dots::<V, Q8>(lines, Rows { numbers, scales, width }, ahead, scores);
        }
    }
}

/// `Σ weight · value` of each query head.
#[expect(clippy::inline_always, reason = "compiled within the function of each platform")]
#[inline(always)]
fn weighted_sums<V: Vectors>(
    weights: &[f32],
    values: KvBlock<'_>,
    width: usize,
    ahead: Ahead,
    sums: &mut [f32],
) {
    match values {
        KvBlock::Floats(Floats::F32(values)) if !width.is_multiple_of(LANES) => {
            let count = values.len() / width;
            for (weights, sums) in weights.chunks_exact(count).zip(sums.chunks_exact_mut(width)) {
                weighted_sum(weights, values, sums);
            }
        }
        KvBlock::Floats(Floats::F32(values)) => {
            rows::weighted_sums::<V, F32>(weights, plain(values, width), ahead, sums);
        }
        KvBlock::Floats(Floats::F16(values)) => {
            rows::weighted_sums::<V, F16>(weights, plain(values, width), ahead, sums);
        }
        KvBlock::Floats(Floats::BF16(values)) => {
            rows::weighted_sums::<V, Bf16>(weights, plain(values, width), ahead, sums);
        }
        KvBlock::Q8 { values: numbers, scales } => {
            rows::weighted_sums::<V, Q8>(weights, Rows { numbers, scales, width }, ahead, sums);
        }
    }
}

/// The largest of `scores` and `least`, sixteen at a time: the order makes no difference.
#[expect(clippy::inline_always, reason = "compiled within the function of each platform")]
#[inline(always)]
fn largest(scores: &[f32], least: f32) -> f32 {
    let mut lanes = [least; LANES];
    let (blocks, rest) = scores.as_chunks::<LANES>();
    for block in blocks {
        for (lane, score) in lanes.iter_mut().zip(block) {
            *lane = if *score > *lane { *score } else { *lane };
        }
    }
    lanes.iter().chain(rest).copied().fold(least, f32::max)
}

/// Rows without scales.
const fn plain<S: Stored>(numbers: &[S::Number], width: usize) -> Rows<'_, S> {
    Rows { numbers, scales: &[], width }
}

/// `Σ weight · value`, key after key. Four keys at a time, so that the sums stay in registers for
/// as long.
#[expect(clippy::inline_always, reason = "compiled within the function of each platform")]
#[inline(always)]
fn weighted_sum(weights: &[f32], values: &[f32], sums: &mut [f32]) {
    let width = sums.len();
    sums.fill(0.0);
    let (fours, rest) = weights.as_chunks::<4>();
    let (values, rest_values) = values.split_at(fours.len() * 4 * width);
    for ([a, b, c, d], values) in fours.iter().zip(values.chunks_exact(4 * width)) {
        let (first, second) = values.split_at(2 * width);
        let ((va, vb), (vc, vd)) = (first.split_at(width), second.split_at(width));
        for ((((sum, va), vb), vc), vd) in sums.iter_mut().zip(va).zip(vb).zip(vc).zip(vd) {
            let mut all = *sum;
            all += a * va;
            all += b * vb;
            all += c * vc;
            all += d * vd;
            *sum = all;
        }
    }
    for (weight, value) in rest.iter().zip(rest_values.chunks_exact(width)) {
        for (sum, value) in sums.iter_mut().zip(value) {
            *sum += weight * value;
        }
    }
}

/// Divides by the softmax's sum.
#[expect(clippy::inline_always, reason = "compiled within the function of each platform")]
#[inline(always)]
fn finish(softmax: Softmax, sink: Option<f32>, out: &mut [f32]) {
    let Softmax { maximum, mut total } = softmax;
    if let Some(sink) = sink {
        // A sink far above all scores leaves nothing of them; the sum is taken at its height.
        let raised = maximum.max(sink);
        let factor = exp(maximum - raised);
        total = total * factor + exp(sink - raised);
        for out in out.iter_mut() {
            *out *= factor;
        }
    }
    for out in out.iter_mut() {
        *out /= total;
    }
}

#[cfg(test)]
mod tests;
