//! Sparse attention by an indexer within the graph.

use std::ops::Range;

use shardpack_mlx::{Array, Binary, Element, Library, Reduce, Unary};

use super::{
    Cache, Mlx, Tensor, Vector,
    attention::{self, Keys, fused},
    cache::{Appended, Held},
};
use crate::backend::{AttentionParams, IndexerInputs, IndexerParams, Qkv, SparseIndexer};

/// Products of short queries and keys that are held at the same time; rows beyond follow one after
/// the other.
const MAX_PRODUCTS: usize = 64 << 20;

/// For each sequence the keys, or the compressed KV entries, that its rows attend to, `[rows, top_k]`;
/// none where they attend to all.
#[derive(Debug)]
pub struct TopK(pub(super) Vec<Option<Array>>);

impl SparseIndexer for Mlx {
    type TopK = TopK;

    fn top_k_keys(
        &self,
        inputs: IndexerInputs<'_, Tensor>,
        caches: &mut [&mut Cache],
        params: &IndexerParams<'_>,
    ) -> TopK {
        top_k_keys(self.library, &inputs, caches, params)
    }

    fn sparse_attention(
        &self,
        top_k: &TopK,
        qkv: Qkv<'_, Tensor>,
        caches: &mut [&mut Cache],
        params: &AttentionParams<'_, Vector>,
    ) -> Tensor {
        attention::attend(self, &qkv, Keys::TopK(top_k), caches, params)
    }
}

/// Appends keys to the caches and selects among them. Equal scores are decided as MLX sorts them.
fn top_k_keys(
    library: Library,
    inputs: &IndexerInputs<'_, Tensor>,
    caches: &mut [&mut Cache],
    params: &IndexerParams<'_>,
) -> TopK {
    assert_eq!(caches.len(), params.lengths.len(), "one cache per sequence");
    let mut top_k = Vec::with_capacity(caches.len());
    let mut row = 0;
    for (cache, &rows) in caches.iter_mut().zip(params.lengths) {
        let begin = row;
        row += rows;
        let part = |x: &Tensor| x.exact().slice(0, begin, begin + rows);
        let new = part(inputs.k).reshape(&[1, 1, rows, params.width]);
        let Appended { all: keys, first } = cache.append_index(params.layer, new);
        let total = first + rows;
        if total <= params.top_k {
            top_k.push(None);
            continue;
        }
        let (q, weights) = (part(inputs.q), part(inputs.weights));
        let keys = keys.reshape(&[total, params.width]).transpose(&[1, 0]);
        let all = in_pieces(library, rows, params.heads * total, |some| {
            let [q, weights] = [&q, &weights].map(|x| x.slice(0, some.start, some.end));
            best(library, [&q, &weights, &keys], first + some.start, params)
        });
        top_k.push(Some(all));
    }
    TopK(top_k)
}

/// The result of `work` for all rows, as many at a time as may hold so many products each.
pub(super) fn in_pieces(
    library: Library,
    rows: usize,
    products: usize,
    work: impl Fn(Range<usize>) -> Array,
) -> Array {
    let at_once = (MAX_PRODUCTS / products).max(1);
    let parts = (0..rows).step_by(at_once).map(|from| work(from..rows.min(from + at_once)));
    library.concat(&parts.collect::<Vec<_>>().iter().collect::<Vec<_>>(), 0)
}

/// The keys of the largest scores for some rows, of which the first stands at `first`. A row with
/// fewer keys than are selected has some that it does not see.
fn best(
    library: Library,
    [q, weights, keys]: [&Array; 3],
    first: usize,
    params: &IndexerParams<'_>,
) -> Array {
    let (rows, total) = (q.shape()[0], keys.shape()[1]);
    let scores = scores([q, weights, keys], params);
    let hidden = library.full(f32::NEG_INFINITY, Element::F32, &[]);
    let scores = seen(library, first, rows, total).choose(&scores, &hidden);
    let order = scores.unary(Unary::Negative).argsort(-1);
    order.slice(1, 0, params.top_k).cast(Element::U32)
}

/// Scores `[rows, total]` of keys `[width, total]`.
pub(super) fn scores([q, weights, keys]: [&Array; 3], params: &IndexerParams<'_>) -> Array {
    let (rows, total) = (q.shape()[0], keys.shape()[1]);
    let products = q.reshape(&[rows * params.heads, params.width]).matmul(keys);
    let products = products.with_constant(Binary::Maximum, 0.0);
    let products = products.reshape(&[rows, params.heads, total]);
    let weights = weights.reshape(&[rows, params.heads, 1]);
    let scores = products.binary(Binary::Multiply, &weights).reduce(Reduce::Sum, 1);
    scores.reshape(&[rows, total])
}

/// Whether each row sees each key, `[rows, total]`.
pub(super) fn seen(library: Library, first: usize, rows: usize, total: usize) -> Array {
    let positions = |count: usize, from: usize| -> Vec<f32> {
        (from..from + count).map(|position| position as f32).collect()
    };
    // Positions are whole numbers below 2^24, which floats hold.
    let keys = library.floats(&positions(total, 0), &[1, total]);
    let rows = library.floats(&positions(rows, first), &[rows, 1]);
    rows.binary(Binary::GreaterEqual, &keys)
}

/// Attention of queries `[1, heads, rows, head_dim]` to the top-k keys `[rows, top_k]`.
pub(super) fn attend(
    q: &Array,
    held: &Held,
    first: usize,
    top_k: &Array,
    params: &AttentionParams<'_, Vector>,
) -> Array {
    let library = q.library();
    let (rows, total, count) = (q.shape()[2], held.keys.shape()[2], top_k.shape()[1]);
    if rows == 1 {
        let top_k = top_k.reshape(&[count]);
        return fused(q, &held.map(|all| all.take(&top_k, 2)), None, params);
    }
    let zeros = library.full(0.0, Element::F32, &[rows, total]);
    let ones = library.full(1.0, Element::F32, &[rows, count]);
    let taken = zeros.put_along(top_k, &ones, 1).with_constant(Binary::GreaterEqual, 0.5);
    let visible = taken.binary(Binary::And, &seen(library, first, rows, total));
    fused(q, held, Some(&visible), params)
}
