//! Block-sparse attention: the top-k blocks, by the best index key of each block.

use shardpack_formats::memory::MAX_INDEX_SCORES;
use shardpack_kernels::attention::{Index, KEYS_PER_BLOCK, largest};

use super::{Cache, Cpu, Tensor, attention, sparse_indexer::RowIndices};
use crate::backend::{
    AttentionParams, BlockIndexerInputs, BlockIndexerParams, BlockSparseAttention, Qkv,
};

/// The blocks that the rows of a step attend to.
#[derive(Debug, PartialEq)]
pub struct TopKBlocks {
    /// Tokens of a block.
    pub(super) block_tokens: usize,
    /// For each row and, within it, each key-value head.
    pub(super) indices: Vec<RowIndices>,
}

impl BlockSparseAttention for Cpu {
    type TopKBlocks = TopKBlocks;

    fn top_k_blocks(
        &self,
        inputs: BlockIndexerInputs<'_, Tensor>,
        caches: &mut [&mut Cache],
        params: &BlockIndexerParams<'_>,
    ) -> TopKBlocks {
        top_k_blocks(inputs, caches, params)
    }

    fn block_sparse_attention(
        &self,
        top_k: &TopKBlocks,
        qkv: Qkv<'_, Tensor>,
        caches: &mut [&mut Cache],
        params: &AttentionParams<'_, Vec<f32>>,
    ) -> Tensor {
        attention::attend(&qkv, Some(top_k), caches, params)
    }
}

/// Appends keys to the caches and selects blocks of them.
fn top_k_blocks(
    BlockIndexerInputs { q, k }: BlockIndexerInputs<'_, Tensor>,
    caches: &mut [&mut Cache],
    params: &BlockIndexerParams<'_>,
) -> TopKBlocks {
    assert_eq!(caches.len(), params.lengths.len(), "one cache per sequence");
    assert_eq!(params.lengths.iter().sum::<usize>(), k.rows(), "rows of all sequences");
    assert_eq!((q.rows(), q.width), (k.rows(), params.heads * params.width), "index queries");
    let mut indices = vec![None; q.rows() * params.heads];
    let mut row = 0;
    for (cache, length) in caches.iter_mut().zip(params.lengths) {
        let span = row * k.width..(row + length) * k.width;
        let first = cache.append_index(params.layer, &k.values[span]);
        for head in 0..params.heads {
            let rows = SequenceRows { q, row, length: *length, first };
            best(&rows, head, cache, params, &mut indices);
        }
        row += length;
    }
    TopKBlocks { block_tokens: params.block_tokens, indices }
}

/// Rows of one sequence in a step.
struct SequenceRows<'a> {
    /// Index queries of the step.
    q: &'a Tensor,
    /// The first row.
    row: usize,
    /// Number of rows.
    length: usize,
    /// Position of the first.
    first: usize,
}

/// The top-k blocks of one head of some rows.
fn best(
    &SequenceRows { q, row, length, first }: &SequenceRows<'_>,
    head: usize,
    cache: &Cache,
    params: &BlockIndexerParams<'_>,
    indices: &mut [RowIndices],
) {
    let width = params.width;
    let blocks = cache.index(params.layer);
    // Rows that see no more blocks than are selected.
    let all = (params.top_k * params.block_tokens).saturating_sub(first).min(length);
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
            let best = best
                .chunks(params.block_tokens)
                .map(|keys| keys.iter().copied().fold(LEAST, f32::max));
            let mut best: Vec<f32> = best.collect();
            let local = best.len().saturating_sub(params.local);
            best[local..].fill(f32::INFINITY);
            indices[(row + at) * params.heads + head] = Some(largest(&best, params.top_k));
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

    /// Tokens of a block, blocks that are selected, and those that are in any case.
    #[derive(Clone, Copy)]
    struct Form {
        block_tokens: usize,
        top_k: usize,
        local: usize,
    }

    /// Runs of so many rows one after the other.
    fn selected(q: &Tensor, k: &Tensor, lengths: &[usize], form: Form) -> Vec<RowIndices> {
        let Form { block_tokens, top_k, local } = form;
        let (mut cache, mut row, mut all) = (cache(), 0, Vec::new());
        for length in lengths {
            let of = |x: &Tensor| {
                let values = x.values[row * x.width..(row + length) * x.width].to_vec();
                Tensor { width: x.width, values: values.into() }
            };
            let params = BlockIndexerParams {
                layer: 0,
                lengths: &[*length],
                heads: 2,
                width: WIDTH,
                block_tokens,
                top_k,
                local,
            };
            let (q, k) = (of(q), of(k));
            let inputs = BlockIndexerInputs { q: &q, k: &k };
            let found = top_k_blocks(inputs, &mut [&mut cache], &params);
            assert_eq!(found.block_tokens, block_tokens);
            all.extend(found.indices);
            row += length;
        }
        all
    }

    #[test]
    fn blocks_of_the_best_keys_are_selected_and_the_local_ones_in_any_case() {
        let rows = 300;
        let (q, k) = (tensor(rows, 2 * WIDTH, 0.3), tensor(rows, WIDTH, 1.9));
        for (tokens, top_k, local) in [(8, 3, 1), (8, 4, 2), (128, 2, 1), (64, 1, 1)] {
            let form = Form { block_tokens: tokens, top_k, local };
            let found = selected(&q, &k, &[rows], form);
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
                assert_eq!(selected(&q, &k, &lengths, form), found);
            }
        }
    }
}
