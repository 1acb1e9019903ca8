//! Causal attention over cached keys and values.
//!
//! Keys are taken in fixed blocks of 256 counted from position 0, with a running maximum and
//! sum (online softmax), so the order of summation depends on a query's position and window
//! alone. The cache is stored in the same blocks.

use std::{iter, ops::Range};

#[cfg(target_arch = "x86_64")]
use crate::avx512::rows_of_floats;
use crate::{
    Floats, Platform,
    exp::{exp, tanh},
    lanes::{dot, sum},
    platform::Task,
    team::{self, Columns},
};

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
    /// As they lie in memory, where they are read without being converted; nothing otherwise.
    fn stored(self, keys: usize, head_dim: usize) -> &'a [f32] {
        match self {
            Self::Floats(Floats::F32(values)) => &values[..values.len().min(keys * head_dim)],
            _ => &[],
        }
    }
}

impl KvBlock<'_> {
    /// The given keys as floats; `scratch` takes those that are stored otherwise.
    fn rows<'b>(
        &'b self,
        keys: Range<usize>,
        head_dim: usize,
        scratch: &'b mut Vec<f32>,
    ) -> &'b [f32] {
        let span = keys.start * head_dim..keys.end * head_dim;
        match self {
            Self::Floats(Floats::F32(values)) => &values[span],
            Self::Floats(floats) => {
                scratch.resize(span.len(), 0.0);
                floats.read(span.start, scratch);
                scratch
            }
            Self::Q8 { values, scales } => {
                scratch.clear();
                for (row, scale) in values[span].chunks_exact(head_dim).zip(&scales[keys]) {
                    scratch.extend(row.iter().map(|value| f32::from(*value) * scale));
                }
                scratch
            }
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
        let platform = on.platform;
        platform.run(Heads { q, attention, first_row, out, platform });
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
struct Heads<'a, 'b> {
    q: &'a [f32],
    attention: &'a Attention<'a>,
    first_row: usize,
    out: Columns<'b>,
    platform: Platform,
}

impl Task for Heads<'_, '_> {
    type Output = ();

    #[expect(clippy::inline_always, reason = "compiled within the function of each platform")]
    #[inline(always)]
    fn run(self) {
        let Self { q, attention, first_row, mut out, platform } = self;
        let head_dim = attention.head_dim;
        let range = out.range();
        let heads = range.start / head_dim..range.end / head_dim;
        let mut scratch = Scratch::new(platform);
        for first in (0..out.rows()).step_by(ROWS_AT_ONCE) {
            let rows = first..out.rows().min(first + ROWS_AT_ONCE);
            for group in groups(attention.q_to_kv, heads.clone()) {
                let at = (first_row, rows.clone(), group);
                several_heads(q, attention, at, &mut out, &mut scratch);
            }
        }
    }
}

/// Room for keys and values as floats, and for what is summed.
struct Scratch {
    platform: Platform,
    keys: Vec<f32>,
    values: Vec<f32>,
    scores: Vec<f32>,
    partial: Vec<f32>,
    softmax: Vec<Softmax>,
}

impl Scratch {
    fn new(platform: Platform) -> Self {
        Self {
            platform,
            keys: Vec::new(),
            values: Vec::new(),
            scores: vec![0.0; HEADS_AT_ONCE * KEYS_PER_BLOCK],
            partial: Vec::new(),
            softmax: Vec::new(),
        }
    }
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
fn several_heads(
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
    let Scratch { platform, keys, values, scores, partial, softmax } = scratch;
    partial.resize(group.len() * head_dim, 0.0);
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
        let next = next_keys(attention, group.start, (block, &all));
        let keys = kv.keys[block].rows(held.clone(), head_dim, keys);
        let values = kv.values[block].rows(held.clone(), head_dim, values);
        for (row, softmax) in rows.clone().zip(softmax.chunks_exact_mut(group.len())) {
            let visible = within(&seen(row));
            if visible.is_empty() {
                continue;
            }
            let part =
                (visible.start - held.start) * head_dim..(visible.end - held.start) * head_dim;
            let first = ((first_row + row) * heads + group.start) * head_dim;
            let q = &q[first..first + group.len() * head_dim];
            let columns = place(group.start).start..place(group.end).start;
            let out = &mut out.row(row)[columns];
            let both = (&keys[part.clone()], &values[part]);
            let next = if row == rows.start { next } else { &[] };
            one_block(q, (both, next), (attention, *platform), softmax, (scores, partial), out);
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
fn next_keys<'a>(
    attention: &Attention<'a>,
    head: usize,
    (block, all): (usize, &Range<usize>),
) -> &'a [f32] {
    let of = |head: usize, block: usize| {
        let keys = all.end.saturating_sub(block * KEYS_PER_BLOCK);
        let block = attention.heads.get(head)?.keys.get(block)?;
        Some(block.stored(keys, attention.head_dim)).filter(|stored| !stored.is_empty())
    };
    let head = attention.q_to_kv[head];
    of(head, block + 1).or_else(|| of(head + 1, all.start / KEYS_PER_BLOCK)).unwrap_or_default()
}

/// Query heads of one row with keys and values of a block. While the keys are read the values are
/// fetched, and while these are read the `next` keys.
#[expect(clippy::inline_always, reason = "compiled within the function of each platform")]
#[inline(always)]
fn one_block(
    q: &[f32],
    ((keys, values), next): ((&[f32], &[f32]), &[f32]),
    (attention, platform): (&Attention<'_>, Platform),
    softmax: &mut [Softmax],
    (scores, partial): (&mut [f32], &mut [f32]),
    out: &mut [f32],
) {
    let head_dim = attention.head_dim;
    let visible = keys.len() / head_dim;
    let scores = &mut scores[..softmax.len() * visible];
    match platform {
        #[cfg(target_arch = "x86_64")]
        Platform::Avx512 if rows_of_floats::admits(head_dim) => {
            let ahead = if next.is_empty() { &[] } else { values };
            rows_of_floats::dots(q, (keys, ahead), head_dim, scores);
        }
        _ => {
            for (q, scores) in q.chunks_exact(head_dim).zip(scores.chunks_exact_mut(visible)) {
                for (score, key) in scores.iter_mut().zip(keys.chunks_exact(head_dim)) {
                    *score = dot(q, key);
                }
            }
        }
    }
    for ((scores, softmax), out) in
        scores.chunks_exact_mut(visible).zip(softmax).zip(out.chunks_exact_mut(head_dim))
    {
        for score in scores.iter_mut() {
            *score *= attention.scale;
        }
        if let Some(cap) = attention.softcap {
            for score in scores.iter_mut() {
                *score = cap * tanh(*score / cap);
            }
        }
        let raised = scores.iter().copied().fold(softmax.maximum, f32::max);
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
    match platform {
        #[cfg(target_arch = "x86_64")]
        Platform::Avx512 if rows_of_floats::admits(head_dim) => {
            rows_of_floats::weighted_sums(scores, (values, next), head_dim, partial);
        }
        _ => {
            for (scores, partial) in
                scores.chunks_exact(visible).zip(partial.chunks_exact_mut(head_dim))
            {
                weighted_sum(scores, values, partial);
            }
        }
    }
    for (out, partial) in out.iter_mut().zip(&*partial) {
        *out += partial;
    }
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
