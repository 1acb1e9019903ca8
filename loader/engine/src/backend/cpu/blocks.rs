//! Attention to chosen blocks of keys: the choice, by the best key of each block.

use shardpack_formats::memory::MAX_INDEX_SCORES;
use shardpack_kernels::attention::{Index, KEYS_PER_BLOCK, largest};

use super::{
    Cache, Tensor,
    index::{Choice, Chosen},
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
    let at_once = (MAX_INDEX_SCORES / (blocks.len() * KEYS_PER_BLOCK).max(1)).max(1);
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

#[cfg(test)]
mod tests {
    use shardpack_formats::memory::KvType;

    use super::*;
    use crate::backend::{CacheShape, LayerShape};

    const WIDTH: usize = 16;

    fn tensor(rows: usize, width: usize, seed: f32) -> Tensor {
        let values: Vec<f32> = (0..rows * width).map(|i| (i as f32 * 0.71 + seed).sin()).collect();
        Tensor { width, values: values.into() }
    }

    fn cache() -> Cache {
        let layers = vec![LayerShape { kv_heads: 2, head_dim: WIDTH }];
        let shape = CacheShape {
            layers,
            states: 0,
            keys_are_values: false,
            indexes: 1,
            index_width: WIDTH,
            entries: Vec::new(),
        };
        Cache::new(&shape, KvType::F32, &[])
    }

    /// Runs of so many rows one after the other.
    fn chosen(
        [q, k]: [&Tensor; 2],
        lengths: &[usize],
        (tokens, top_k, local): (usize, usize, usize),
    ) -> Vec<Choice> {
        let (mut cache, mut row, mut all) = (cache(), 0, Vec::new());
        for length in lengths {
            let of = |x: &Tensor| {
                let values = x.values[row * x.width..(row + length) * x.width].to_vec();
                Tensor { width: x.width, values: values.into() }
            };
            let step = BlockStep {
                layer: 0,
                lengths: &[*length],
                heads: 2,
                width: WIDTH,
                tokens,
                top_k,
                local,
            };
            let Chosen::Blocks(found, blocks) = choose([&of(q), &of(k)], &mut [&mut cache], &step)
            else {
                unreachable!("blocks are chosen")
            };
            assert_eq!(found, tokens);
            all.extend(blocks);
            row += length;
        }
        all
    }

    #[test]
    fn blocks_of_the_best_keys_are_chosen_and_the_own_ones_in_any_case() {
        let rows = 300;
        let (q, k) = (tensor(rows, 2 * WIDTH, 0.3), tensor(rows, WIDTH, 1.9));
        for (tokens, top_k, local) in [(8, 3, 1), (8, 4, 2), (128, 2, 1), (64, 1, 1)] {
            let found = chosen([&q, &k], &[rows], (tokens, top_k, local));
            for (row, both) in found.chunks_exact(2).enumerate() {
                let own = row / tokens;
                if own < top_k {
                    assert_eq!(both, [None, None], "row {row}");
                    continue;
                }
                for (head, found) in both.iter().enumerate() {
                    let q = &q.values[row * 2 * WIDTH + head * WIDTH..][..WIDTH];
                    let product = |key: usize| -> f32 {
                        k.values[key * WIDTH..][..WIDTH].iter().zip(q).map(|(k, q)| k * q).sum()
                    };
                    let score = |block: usize| {
                        let keys = block * tokens..((block + 1) * tokens).min(row + 1);
                        let best = keys.map(product).fold(f32::NEG_INFINITY, f32::max);
                        if block + local > own { f32::INFINITY } else { best }
                    };
                    let found = found.as_ref().unwrap();
                    assert_eq!(found.len(), top_k);
                    assert!(found.is_sorted() && found.contains(&(own as u32)), "{found:?}");
                    let taken = |block: &usize| found.contains(&(*block as u32));
                    let least = (0..=own).filter(taken).map(score).fold(f32::INFINITY, f32::min);
                    let left = (0..=own).filter(|block| !taken(block)).map(score);
                    assert!(left.fold(f32::NEG_INFINITY, f32::max) <= least + 1e-5, "row {row}");
                }
            }
            for lengths in [vec![1; rows], vec![7, 250, 43]] {
                assert_eq!(chosen([&q, &k], &lengths, (tokens, top_k, local)), found);
            }
        }
    }
}
