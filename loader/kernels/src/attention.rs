//! Causal attention over cached keys and values.
//!
//! Keys are taken in fixed blocks of 256 counted from position 0, with a running maximum and
//! sum (online softmax), so the order of summation depends on a query's position and window
//! alone. The cache is stored in the same blocks.

use std::ops::Range;

use crate::{
    Floats,
    exp::{exp, tanh},
    lanes::{dot, sum},
    platform::Task,
    team,
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
    let heads_per_task = on.units_per_task(units, 4 * keys * head_dim);
    team::chunks(&on, out, heads_per_task * head_dim, |task, out| {
        on.platform.run(Heads { q, attention, first: task * heads_per_task, out });
    });
}

/// Consecutive query heads of one or several rows.
struct Heads<'a> {
    q: &'a [f32],
    attention: &'a Attention<'a>,
    /// Number of the first, counted over all rows.
    first: usize,
    out: &'a mut [f32],
}

impl Task for Heads<'_> {
    type Output = ();

    #[expect(clippy::inline_always, reason = "compiled within the function of each platform")]
    #[inline(always)]
    fn run(self) {
        let Self { q, attention, first, out } = self;
        let (head_dim, heads) = (attention.head_dim, attention.q_to_kv.len());
        for (index, out) in (first..).zip(out.chunks_exact_mut(head_dim)) {
            let (row, head) = (index / heads, index % heads);
            let position = attention.first_position + row;
            let first =
                attention.window.map_or(0, |window| (position + 1).saturating_sub(window as usize));
            let kv = &attention.heads[attention.q_to_kv[head]];
            let q = &q[index * head_dim..][..head_dim];
            let sink = attention.sinks.map(|sinks| sinks[head]);
            one_head(q, kv, first..position + 1, attention, sink, out);
        }
    }
}

/// One query head over the keys `visible`.
#[expect(clippy::inline_always, reason = "compiled within the function of each platform")]
#[inline(always)]
fn one_head(
    q: &[f32],
    kv: &KvHead<'_>,
    visible: Range<usize>,
    attention: &Attention<'_>,
    sink: Option<f32>,
    out: &mut [f32],
) {
    let head_dim = q.len();
    let mut scores = [0.0; KEYS_PER_BLOCK];
    let mut partial = vec![0.0; head_dim];
    let mut scratch = Vec::new();
    let mut maximum = f32::NEG_INFINITY;
    let mut total = 0.0;
    out.fill(0.0);
    for block in visible.start / KEYS_PER_BLOCK..visible.end.div_ceil(KEYS_PER_BLOCK) {
        let base = block * KEYS_PER_BLOCK;
        let start = visible.start.max(base) - base;
        let end = visible.end.min(base + KEYS_PER_BLOCK) - base;
        let scores = &mut scores[..end - start];
        let keys = kv.keys[block].rows(start..end, head_dim, &mut scratch);
        for (score, key) in scores.iter_mut().zip(keys.chunks_exact(head_dim)) {
            *score = dot(q, key) * attention.scale;
        }
        if let Some(cap) = attention.softcap {
            for score in scores.iter_mut() {
                *score = cap * tanh(*score / cap);
            }
        }
        let raised = scores.iter().copied().fold(maximum, f32::max);
        // Nothing has been summed before the first block, so the factor's value is irrelevant.
        let factor = exp(maximum - raised);
        for score in scores.iter_mut() {
            *score = exp(*score - raised);
        }
        partial.fill(0.0);
        let values = kv.values[block].rows(start..end, head_dim, &mut scratch);
        for (weight, value) in scores.iter().zip(values.chunks_exact(head_dim)) {
            for (sum, value) in partial.iter_mut().zip(value) {
                *sum += weight * value;
            }
        }
        total = total * factor + sum(scores);
        for (out, partial) in out.iter_mut().zip(&partial) {
            *out = *out * factor + partial;
        }
        maximum = raised;
    }
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
