//! Sparse-attention indexer: scores by which a query selects its top-k keys.

#![expect(clippy::inline_always, reason = "compiled within the function of each platform")]

use std::{borrow::Cow, marker::PhantomData, ops::Range};

use shardpack_quantize::Platform;

use super::{
    KEYS_PER_BLOCK, KvBlock,
    keys::Line,
    prefetch::Prefetch,
    softmax::products,
    vectors::{Plain, Vectors},
};
use crate::{
    Floats,
    lanes::LANES,
    platform::Task,
    team::{self, Columns},
};

/// Rows of queries in one task.
const ROWS_PER_TASK: usize = 4;

/// Blocks of keys in one task.
const BLOCKS_PER_TASK: usize = 2;

/// The indexer of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct Index<'a> {
    /// Indexer query heads of a row.
    pub heads: usize,
    /// Their width, and that of the keys.
    pub width: usize,
    /// Compression ratio: tokens of a key; a query sees the keys whose last token is not after its
    /// own. A divisor of [`KEYS_PER_BLOCK`].
    pub every: usize,
    /// Keys `[keys, width]`, those of [`KEYS_PER_BLOCK`] tokens in each block, up to the last that a
    /// query sees.
    pub keys: &'a [Floats<'a>],
    /// Position of the first query.
    pub first_position: usize,
}

impl Index<'_> {
    /// Columns of a row of scores: those of whole blocks.
    #[must_use]
    pub const fn columns(&self) -> usize {
        self.keys.len() * KEYS_PER_BLOCK
    }

    /// The scores of the keys that a query at `position` sees, in order, from its row.
    #[must_use]
    pub fn seen<'b>(&self, row: &'b [f32], position: usize) -> Cow<'b, [f32]> {
        let count = (position + 1) / self.every;
        if self.every == 1 {
            return Cow::Borrowed(&row[..count]);
        }
        let blocks = row.as_chunks::<KEYS_PER_BLOCK>().0;
        let keys = blocks.iter().flat_map(|block| &block[..KEYS_PER_BLOCK / self.every]);
        keys.take(count).copied().collect()
    }

    /// `Σ weight · max(q · key, 0)` over the indexer heads of each of some rows at consecutive
    /// positions, in their order, for every key up to the row's own; without weights `q · key` of
    /// each row's one query. `q` is `[rows, heads, width]`, `weights` `[rows, heads]`, `out`
    /// `[rows, columns]`, where the keys of a block stand at its beginning ([`Self::seen`]); further
    /// columns hold any values.
    pub fn scores(&self, q: &[f32], weights: Option<&[f32]>, out: &mut [f32]) {
        let (heads, width) = (self.heads, self.width);
        let rows = q.len() / (heads * width);
        assert_eq!(q.len(), rows * heads * width, "queries of {heads} heads of {width}");
        match weights {
            Some(weights) => assert_eq!(weights.len(), rows * heads, "weights of {heads} heads"),
            None => assert_eq!(heads, 1, "queries of a row without weights"),
        }
        assert_eq!(out.len(), rows * self.columns(), "scores of {rows} rows");
        assert!(KEYS_PER_BLOCK.is_multiple_of(self.every), "tokens of a key");
        let keys = (self.first_position + rows) / self.every;
        let per_block = KEYS_PER_BLOCK / self.every;
        assert_eq!(self.keys.len(), keys.div_ceil(per_block), "blocks of keys");
        if rows == 0 || keys == 0 {
            return;
        }
        let on = team::current();
        let cost = 2 * KEYS_PER_BLOCK * heads * width;
        let (length, blocks) = if on.units_per_task(rows * self.keys.len(), cost) > rows {
            // Not worth the handing over.
            (rows, self.keys.len())
        } else {
            (ROWS_PER_TASK, BLOCKS_PER_TASK)
        };
        let all = 0..self.columns();
        let starts = all.clone().step_by(blocks * KEYS_PER_BLOCK);
        let ranges: Vec<Range<usize>> =
            starts.map(|at| at..all.end.min(at + blocks * KEYS_PER_BLOCK)).collect();
        team::parts(&on, out, self.columns(), (length, &ranges), |first_row, out| {
            let input = ScoresInput { q, weights, index: self, first_row };
            // As in `attend`, vectors run with their own platform's instructions only.
            match on.platform {
                #[cfg(target_arch = "x86_64")]
                Platform::Avx512 => {
                    crate::avx512::run(Scores::<crate::avx512::Sixteen>::new(input, out));
                }
                #[cfg(target_arch = "x86_64")]
                Platform::Avx2 => {
                    crate::avx2::run(Scores::<crate::avx2::Sixteen>::new(input, out));
                }
                #[cfg(target_arch = "aarch64")]
                Platform::Neon => {
                    crate::neon::run(Scores::<crate::neon::Sixteen>::new(input, out));
                }
                _ => Plain::run(Scores::<Plain>::new(input, out)),
            }
        });
    }
}

/// Queries of some rows and their indexer.
#[derive(Clone, Copy)]
struct ScoresInput<'a> {
    /// `[rows, heads, width]`.
    q: &'a [f32],
    /// `[rows, heads]`.
    weights: Option<&'a [f32]>,
    index: &'a Index<'a>,
    /// The row of `q` that the output begins with.
    first_row: usize,
}

/// Scores of some rows with some blocks of keys.
struct Scores<'a, 'b, V> {
    input: ScoresInput<'a>,
    out: Columns<'b>,
    vectors: PhantomData<V>,
}

impl<'a, 'b, V> Scores<'a, 'b, V> {
    const fn new(input: ScoresInput<'a>, out: Columns<'b>) -> Self {
        Self { input, out, vectors: PhantomData }
    }
}

impl<V: Vectors> Task for Scores<'_, '_, V> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { input: ScoresInput { q, weights, index, first_row }, mut out, .. } = self;
        let Index { heads, width, every, keys, first_position } = *index;
        let per_block = KEYS_PER_BLOCK / every;
        let range = out.range();
        let padded = width.next_multiple_of(LANES);
        let (mut lines, mut dots) = (Vec::new(), vec![0.0; heads * KEYS_PER_BLOCK]);
        let mut widened = Vec::new();
        for row in 0..out.rows() {
            let at = first_row + row;
            let seen = (first_position + at + 1) / every;
            lines.clear();
            Line::append(&q[at * heads * width..][..heads * width], width, 1.0, &mut lines);
            let weights = weights.map(|weights| &weights[at * heads..][..heads]);
            let scores = out.row(row).as_chunks_mut::<KEYS_PER_BLOCK>().0;
            for (block, scores) in (range.start / KEYS_PER_BLOCK..).zip(scores) {
                let count = seen.saturating_sub(block * per_block).min(per_block);
                if count == 0 {
                    break;
                }
                let mut part = KvBlock::Floats(keys[block].slice(0..count * width));
                if padded > width {
                    part = part.widened([width, padded], &mut widened);
                }
                products::<V>(&lines, part, padded, Prefetch::default(), &mut dots);
                match weights {
                    Some(weights) => weighted::<V>(&dots, weights, scores),
                    None => scores.copy_from_slice(&dots),
                }
            }
        }
    }
}

/// The weighted sum of what is positive, in the order of the heads; `dots` is
/// `[heads, KEYS_PER_BLOCK]`.
#[inline(always)]
fn weighted<V: Vectors>(dots: &[f32], weights: &[f32], scores: &mut [f32; KEYS_PER_BLOCK]) {
    let zero = V::splat(0.0);
    for (index, scores) in scores.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
        let mut sum = zero;
        for (dots, weight) in dots.as_chunks::<KEYS_PER_BLOCK>().0.iter().zip(weights) {
            let dots = V::load(&dots.as_chunks::<LANES>().0[index]);
            sum = V::fma(V::max(dots, zero), V::splat(*weight), sum);
        }
        V::store(sum, scores);
    }
}

/// The positions of the `count` largest scores, in ascending order; of equal ones those of the
/// earlier keys. NaN is less than everything.
#[must_use]
pub fn largest(scores: &[f32], count: usize) -> Vec<u32> {
    /// In the order of the floats, with both zeros the same.
    fn rank(score: f32) -> u32 {
        if score.is_nan() {
            return 0;
        }
        let bits = (score + 0.0).to_bits();
        if bits >> 31 == 0 { bits | 1 << 31 } else { !bits }
    }
    let count = count.min(scores.len());
    if count == 0 {
        return Vec::new();
    }
    let mut ranks: Vec<u32> = scores.iter().map(|score| rank(*score)).collect();
    // Descending: the least that is taken stands at its place, all larger ones before it.
    let (larger, least, _) = ranks.select_nth_unstable_by(count - 1, |a, b| b.cmp(a));
    let least = *least;
    let mut equal = count - larger.iter().filter(|rank| **rank > least).count();
    let mut selected = Vec::with_capacity(count);
    for (position, score) in (0..).zip(scores) {
        let rank = rank(*score);
        if rank < least {
            continue;
        }
        if rank == least {
            if equal == 0 {
                continue;
            }
            equal -= 1;
        }
        selected.push(position);
    }
    selected
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Activations, Team, TeamOptions, lanes::dot};

    fn elements(len: usize, seed: u32) -> Vec<f32> {
        (0..len).map(|i| ((i as f32 + seed as f32 * 11.7) * 0.613).sin()).collect()
    }

    fn scores(
        (heads, width, every, keys): (usize, usize, usize, &[f32]),
        (q, weights): (&[f32], &[f32]),
        first_position: usize,
        (platform, threads): (Platform, usize),
    ) -> Vec<Vec<f32>> {
        let per_block = KEYS_PER_BLOCK / every;
        let blocks: Vec<_> = keys.chunks(per_block * width).map(Floats::F32).collect();
        let index = Index { heads, width, every, keys: &blocks, first_position };
        let rows = weights.len() / heads;
        let mut out = vec![f32::NAN; rows * index.columns()];
        let activations = Activations::F32;
        let team = Team::new(&TeamOptions { threads, platform, activations }).unwrap();
        team.run(|| index.scores(q, Some(weights), &mut out));
        let rows = out.chunks_exact(index.columns()).enumerate();
        rows.map(|(row, scores)| index.seen(scores, first_position + row).into_owned()).collect()
    }

    #[test]
    fn scores_are_those_of_the_formula_on_every_platform() {
        for (heads, width, every, first, rows) in [
            (3, 16, 1, 0, 5),
            (4, 24, 1, 254, 4),
            (8, 128, 1, 511, 1),
            (2, 32, 1, 700, 9),
            (3, 16, 4, 5, 19),
            (4, 32, 4, 1020, 9),
            (2, 16, 128, 500, 30),
        ] {
            let keys = elements((first + rows) / every * width, 1);
            let (q, weights) = (elements(rows * heads * width, 2), elements(rows * heads, 3));
            let what = (heads, width, every, keys.as_slice());
            let expected: Vec<Vec<f32>> = (0..rows)
                .map(|row| {
                    let score = |key: usize| {
                        let term = |head: usize| {
                            let at = row * heads + head;
                            let (q, key) = (&q[at * width..][..width], &keys[key * width..]);
                            weights[at] * dot(q, &key[..width]).max(0.0)
                        };
                        (0..heads).map(term).sum()
                    };
                    (0..(first + row + 1) / every).map(score).collect()
                })
                .collect();
            let found = scores(what, (&q, &weights), first, (Platform::Portable, 1));
            for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
                assert!((found - expected).abs() < 1e-4, "{found} instead of {expected}");
            }
            for platform in Platform::available() {
                let other = scores(what, (&q, &weights), first, (platform, 3));
                assert_eq!(found, other, "{platform}");
            }
            for row in 0..rows {
                let q = &q[row * heads * width..][..heads * width];
                let weights = &weights[row * heads..][..heads];
                let what = (heads, width, every, &keys[..(first + row + 1) / every * width]);
                let alone = scores(what, (q, weights), first + row, (Platform::Portable, 1));
                assert_eq!(alone[0], found[row], "row {row} by itself");
            }
        }
    }

    #[test]
    fn without_weights_scores_are_products() {
        let (width, first, rows) = (24, 250, 9);
        let keys = elements((first + rows) * width, 1);
        let q = elements(rows * width, 2);
        let blocks: Vec<_> = keys.chunks(KEYS_PER_BLOCK * width).map(Floats::F32).collect();
        let index = Index { heads: 1, width, every: 1, keys: &blocks, first_position: first };
        let mut out = vec![f32::NAN; rows * index.columns()];
        index.scores(&q, None, &mut out);
        let mut negative = 0;
        for (row, scores) in out.chunks_exact(index.columns()).enumerate() {
            let found = index.seen(scores, first + row);
            assert_eq!(found.len(), first + row + 1);
            for (key, found) in keys.chunks_exact(width).zip(found.iter()) {
                let expected = dot(&q[row * width..][..width], key);
                assert!((found - expected).abs() < 1e-4, "{found} instead of {expected}");
                negative += usize::from(*found < 0.0);
            }
        }
        assert!(negative > 0);
    }

    #[test]
    fn ties_select_the_earlier_key() {
        let scores = [1.0, 0.0, 2.0, 1.0, -0.0, 1.0, f32::NAN, -3.0, f32::NEG_INFINITY];
        for (count, expected) in [
            (0, vec![]),
            (1, vec![2]),
            (2, vec![0, 2]),
            (3, vec![0, 2, 3]),
            (5, vec![0, 1, 2, 3, 5]),
            (6, vec![0, 1, 2, 3, 4, 5]),
            (8, vec![0, 1, 2, 3, 4, 5, 7, 8]),
            (9, vec![0, 1, 2, 3, 4, 5, 6, 7, 8]),
            (12, vec![0, 1, 2, 3, 4, 5, 6, 7, 8]),
        ] {
            assert_eq!(largest(&scores, count), expected, "{count}");
        }
    }
}
