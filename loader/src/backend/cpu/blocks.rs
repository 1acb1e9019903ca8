//! Attention to chosen blocks of keys: the choice, by the best key of each block.

use shardpack_kernels::attention::{Index, KEYS_PER_BLOCK, largest};

use super::{
    Cache, Tensor,
    index::{Choice, Chosen, MAX_SCORES},
};
use crate::backend::BlockStep;

/// Appends keys to the caches and chooses blocks of them.
pub(super) fn choose(
    [q, k]: [&Tensor; 2],
    caches: &mut [&mut Cache],
    step: &BlockStep<'_>,
) -> Chosen {
    assert_eq!(caches.len(), step.lengths.len(), "one cache per sequence");
    assert_eq!(step.lengths.iter().sum::<usize>(), k.rows(), "rows of all sequences");
    assert_eq!((q.rows(), q.width), (k.rows(), step.heads * step.width), "short queries");
    let mut chosen = vec![None; q.rows() * step.heads];
    let mut row = 0;
    for (cache, length) in caches.iter_mut().zip(step.lengths) {
        let span = row * k.width..(row + length) * k.width;
        let first = cache.append_index(step.layer, &k.values[span]);
        for head in 0..step.heads {
            best((q, row, *length), head, (cache, first), step, &mut chosen);
        }
        row += length;
    }
    Chosen::Blocks(step.tokens, chosen)
}

/// The best blocks for one head of `length` rows from `row` on, of which the first stands at
/// `first`.
fn best(
    (q, row, length): (&Tensor, usize, usize),
    head: usize,
    (cache, first): (&Cache, usize),
    step: &BlockStep<'_>,
    chosen: &mut [Choice],
) {
    let width = step.width;
    let blocks = cache.index(step.layer);
    // Rows that see no more blocks than are chosen.
    let all = (step.top_k * step.tokens).saturating_sub(first).min(length);
    let at_once = (MAX_SCORES / (blocks.len() * KEYS_PER_BLOCK).max(1)).max(1);
    let mut from = all;
    while from < length {
        let until = length.min(from + at_once);
        let short = (row + from..row + until)
            .flat_map(|row| &q.values[row * q.width + head * width..][..width])
            .copied()
            .collect::<Vec<_>>();
        let keys = &blocks[..(first + until).div_ceil(KEYS_PER_BLOCK)];
        let index = Index { heads: 1, width, every: 1, keys, first_position: first + from };
        let mut scores = Tensor::unset(until - from, index.columns());
        index.scores(&short, None, &mut scores.values);
        let rows = scores.values.chunks_exact(index.columns());
        for (at, scores) in (from..until).zip(rows) {
            let position = first + at;
            let best = index.seen(scores, position);
            let best =
                best.chunks(step.tokens).map(|keys| keys.iter().copied().fold(LEAST, f32::max));
            let mut best: Vec<f32> = best.collect();
            let local = best.len().saturating_sub(step.local);
            best[local..].fill(f32::INFINITY);
            chosen[(row + at) * step.heads + head] = Some(largest(&best, step.top_k));
        }
        from = until;
    }
}

/// Less than every score.
const LEAST: f32 = f32::NEG_INFINITY;
