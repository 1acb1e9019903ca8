//! Block-sparse attention within the graph.

use shardpack_mlx::{Array, Binary, Element, Library, Reduce, Unary};

use super::{
    Cache, Mlx, Tensor, Vector,
    attention::{self, Keys, fused, in_runs, of_query_heads},
    cache::{Appended, Held},
    sparse_indexer::{in_pieces, seen},
};
use crate::backend::{
    AttentionParams, BlockIndexerInputs, BlockIndexerParams, BlockSparseAttention, Qkv,
};

/// The blocks that the rows of each sequence attend to.
#[derive(Debug)]
pub struct TopKBlocks {
    /// Tokens of a block.
    pub(super) block_tokens: usize,
    /// For each sequence the blocks of each key-value head, `[rows, heads, top_k]`; a row with fewer
    /// has some that it does not see. None where all are attended to.
    pub(super) indices: Vec<Option<Array>>,
}

/// The blocks of one sequence.
#[derive(Clone, Copy)]
pub(super) struct Blocks<'a> {
    /// Tokens of a block.
    pub(super) tokens: usize,
    /// `[rows, kv_heads, top_k]`.
    pub(super) indices: &'a Array,
}

impl BlockSparseAttention for Mlx {
    type TopKBlocks = TopKBlocks;

    fn top_k_blocks(
        &self,
        inputs: BlockIndexerInputs<'_, Tensor>,
        caches: &mut [&mut Cache],
        params: &BlockIndexerParams<'_>,
    ) -> TopKBlocks {
        top_k_blocks(self.library, inputs, caches, params)
    }

    fn block_sparse_attention(
        &self,
        top_k: &TopKBlocks,
        qkv: Qkv<'_, Tensor>,
        caches: &mut [&mut Cache],
        params: &AttentionParams<'_, Vector>,
    ) -> Tensor {
        attention::attend(self, &qkv, Keys::TopKBlocks(top_k), caches, params)
    }
}

/// Appends keys to the caches and selects blocks of them. Equal scores are decided as MLX sorts them.
fn top_k_blocks(
    library: Library,
    BlockIndexerInputs { q, k }: BlockIndexerInputs<'_, Tensor>,
    caches: &mut [&mut Cache],
    params: &BlockIndexerParams<'_>,
) -> TopKBlocks {
    assert_eq!(caches.len(), params.lengths.len(), "one cache per sequence");
    let mut indices = Vec::with_capacity(caches.len());
    let mut row = 0;
    for (cache, &rows) in caches.iter_mut().zip(params.lengths) {
        let begin = row;
        row += rows;
        let part = |x: &Tensor| x.exact().slice(0, begin, begin + rows);
        let new = part(k).reshape(&[1, 1, rows, params.width]);
        let Appended { all: keys, first } = cache.append_index(params.layer, new);
        let total = first + rows;
        if total.div_ceil(params.block_tokens) <= params.top_k {
            indices.push(None);
            continue;
        }
        let q = part(q);
        let keys = keys.reshape(&[total, params.width]).transpose(&[1, 0]);
        let all = in_pieces(library, rows, params.heads * total, |some| {
            let q = q.slice(0, some.start, some.end);
            best(library, [&q, &keys], first + some.start, params)
        });
        indices.push(Some(all));
    }
    TopKBlocks { block_tokens: params.block_tokens, indices }
}

/// The best blocks `[rows, heads, top_k]` of keys `[width, total]` for some rows, of which the first
/// stands at `first`.
fn best(
    library: Library,
    [q, keys]: [&Array; 2],
    first: usize,
    params: &BlockIndexerParams<'_>,
) -> Array {
    let (rows, total) = (q.shape()[0], keys.shape()[1]);
    let (heads, count) = (params.heads, total.div_ceil(params.block_tokens));
    let scores = q.reshape(&[rows * heads, params.width]).matmul(keys);
    let least = library.full(f32::NEG_INFINITY, Element::F32, &[]);
    let visible = seen(library, first, rows, total).reshape(&[rows, 1, total]);
    let scores = visible.choose(&scores.reshape(&[rows, heads, total]), &least);
    let rest = count * params.block_tokens - total;
    let scores = if rest == 0 {
        scores
    } else {
        let rest = library.full(f32::NEG_INFINITY, Element::F32, &[rows, heads, rest]);
        library.concat(&[&scores, &rest], 2)
    };
    let scores = scores.reshape(&[rows, heads, count, params.block_tokens]).reduce(Reduce::Max, 3);
    let scores = scores.reshape(&[rows, heads, count]);
    // A row's own block and those before it that come first.
    let local: Vec<u8> = (first..first + rows)
        .flat_map(|position| {
            let own = position / params.block_tokens;
            (0..count).map(move |block| u8::from(block <= own && block + params.local > own))
        })
        .collect();
    let local = library.copy_in(&local, Element::Bool, &[rows, 1, count]);
    let scores = local.choose(&library.full(f32::INFINITY, Element::F32, &[]), &scores);
    let order = scores.unary(Unary::Negative).argsort(-1);
    order.slice(2, 0, params.top_k).cast(Element::U32)
}

/// Attention of queries `[1, heads, rows, head_dim]`, of which the first stands at `first`, to blocks
/// of keys.
pub(super) fn attend(
    q: &Array,
    held: Held,
    first: usize,
    Blocks { tokens, indices }: Blocks<'_>,
    params: &AttentionParams<'_, Vector>,
) -> Array {
    let library = q.library();
    let (heads, rows) = (q.shape()[1], q.shape()[2]);
    let [kv_heads, total] = [held.keys.shape()[1], held.keys.shape()[2]];
    let top_k = indices.shape()[2];
    let map = of_query_heads(library, params);
    if rows == 1 {
        let within: Vec<f32> = (0..tokens).map(|token| token as f32).collect();
        let within = library.floats(&within, &[1, 1, tokens]);
        // Positions are whole numbers below 2^24, which floats hold.
        let places = indices.reshape(&[kv_heads, top_k, 1]).cast(Element::F32);
        let places = places.with_constant(Binary::Multiply, tokens as f32);
        let places = places.binary(Binary::Add, &within).reshape(&[kv_heads, top_k * tokens]);
        let visible = places.with_constant(Binary::LessEqual, first as f32);
        let places = places.with_constant(Binary::Minimum, (total - 1) as f32);
        let places = places.cast(Element::U32).reshape(&[1, kv_heads, top_k * tokens, 1]);
        let width = held.keys.shape()[3];
        let places = places.broadcast(&[1, kv_heads, top_k * tokens, width]);
        let held = in_runs(held.map(|all| all.take_along(&places, 2)), params);
        let visible = visible.take(&map, 0).reshape(&[1, heads, 1, top_k * tokens]);
        return fused(q, &held, Some(&visible), params);
    }
    let count = total.div_ceil(tokens);
    let zeros = library.full(0.0, Element::F32, &[rows, kv_heads, count]);
    let ones = library.full(1.0, Element::F32, &[rows, kv_heads, top_k]);
    let taken = zeros.put_along(indices, &ones, 2).reshape(&[rows, kv_heads, count, 1]);
    let taken = taken.broadcast(&[rows, kv_heads, count, tokens]);
    let taken = taken.reshape(&[rows, kv_heads, count * tokens]).slice(2, 0, total);
    let taken = taken.with_constant(Binary::GreaterEqual, 0.5);
    let causal = seen(library, first, rows, total).reshape(&[rows, 1, total]);
    let visible = taken.binary(Binary::And, &causal).transpose(&[1, 0, 2]).take(&map, 0);
    let visible = visible.reshape(&[1, heads, rows, total]);
    fused(q, &in_runs(held, params), Some(&visible), params)
}
