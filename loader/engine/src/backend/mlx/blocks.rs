//! Attention to chosen blocks of keys within the graph.

use shardpack_mlx::{Array, Binary, Element, Library, Reduce, Unary};

use super::{
    Cache, Tensor,
    attention::{fused, in_runs, of_query_heads},
    cache::Held,
    index::{Choice, Chosen, seen, some_at_once},
};
use crate::backend::{AttentionStep, BlockStep};

/// Appends keys to the caches and chooses blocks of them. Equal scores are decided as MLX sorts
/// them.
pub(super) fn choose(
    library: Library,
    [q, k]: [&Tensor; 2],
    caches: &mut [&mut Cache],
    step: &BlockStep<'_>,
) -> Chosen {
    assert_eq!(caches.len(), step.lengths.len(), "one cache per sequence");
    let mut chosen = Vec::with_capacity(caches.len());
    let mut row = 0;
    for (cache, &rows) in caches.iter_mut().zip(step.lengths) {
        let begin = row;
        row += rows;
        let part = |x: &Tensor| x.array.slice(0, begin, begin + rows);
        let new = part(k).reshape(&[1, 1, rows, step.width]);
        let (keys, first) = cache.append_index(step.layer, new);
        let total = first + rows;
        if total.div_ceil(step.tokens) <= step.top_k {
            chosen.push(None);
            continue;
        }
        let q = part(q);
        let keys = keys.reshape(&[total, step.width]).transpose(&[1, 0]);
        let all = some_at_once(library, (rows, step.heads * total), |some| {
            let q = q.slice(0, some.start, some.end);
            best(library, [&q, &keys], first + some.start, step)
        });
        chosen.push(Some(Choice::Blocks(step.tokens, all)));
    }
    Chosen(chosen)
}

/// The best blocks `[rows, heads, top_k]` of keys `[width, total]` for some rows, of which the first
/// stands at `first`.
fn best(library: Library, [q, keys]: [&Array; 2], first: usize, step: &BlockStep<'_>) -> Array {
    let (rows, total) = (q.shape()[0], keys.shape()[1]);
    let (heads, count) = (step.heads, total.div_ceil(step.tokens));
    let scores = q.reshape(&[rows * heads, step.width]).matmul(keys);
    let least = library.full(f32::NEG_INFINITY, Element::F32, &[]);
    let visible = seen(library, first, rows, total).reshape(&[rows, 1, total]);
    let scores = visible.choose(&scores.reshape(&[rows, heads, total]), &least);
    let rest = count * step.tokens - total;
    let scores = if rest == 0 {
        scores
    } else {
        let rest = library.full(f32::NEG_INFINITY, Element::F32, &[rows, heads, rest]);
        library.concat(&[&scores, &rest], 2)
    };
    let scores = scores.reshape(&[rows, heads, count, step.tokens]).reduce(Reduce::Max, 3);
    let scores = scores.reshape(&[rows, heads, count]);
    // A row's own block and those before it that come first.
    let local: Vec<u8> = (first..first + rows)
        .flat_map(|position| {
            let own = position / step.tokens;
            (0..count).map(move |block| u8::from(block <= own && block + step.local > own))
        })
        .collect();
    let local = library.copy_in(&local, Element::Bool, &[rows, 1, count]);
    let scores = local.choose(&library.full(f32::INFINITY, Element::F32, &[]), &scores);
    let order = scores.unary(Unary::Negative).argsort(-1);
    order.slice(2, 0, step.top_k).cast(Element::U32)
}

/// Attention of queries `[1, heads, rows, head_dim]`, of which the first stands at `first`, to blocks
/// of `tokens` keys `[rows, kv_heads, top_k]`.
pub(super) fn attend(
    q: &Array,
    held: Held,
    (first, tokens): (usize, usize),
    chosen: &Array,
    step: &AttentionStep<'_, Array>,
) -> Array {
    let library = q.library();
    let (heads, rows) = (q.shape()[1], q.shape()[2]);
    let [kv_heads, total] = [held.keys.shape()[1], held.keys.shape()[2]];
    let top_k = chosen.shape()[2];
    let map = of_query_heads(library, step);
    if rows == 1 {
        let within: Vec<f32> = (0..tokens).map(|token| token as f32).collect();
        let within = library.floats(&within, &[1, 1, tokens]);
        // Positions are whole numbers below 2^24, which floats hold.
        let places = chosen.reshape(&[kv_heads, top_k, 1]).cast(Element::F32);
        let places = places.with_constant(Binary::Multiply, tokens as f32);
        let places = places.binary(Binary::Add, &within).reshape(&[kv_heads, top_k * tokens]);
        let visible = places.with_constant(Binary::LessEqual, first as f32);
        let places = places.with_constant(Binary::Minimum, (total - 1) as f32);
        let places = places.cast(Element::U32).reshape(&[1, kv_heads, top_k * tokens, 1]);
        let width = held.keys.shape()[3];
        let places = places.broadcast(&[1, kv_heads, top_k * tokens, width]);
        let held = in_runs(held.map(|all| all.take_along(&places, 2)), step);
        let visible = visible.take(&map, 0).reshape(&[1, heads, 1, top_k * tokens]);
        return fused(q, &held, Some(&visible), step);
    }
    let count = total.div_ceil(tokens);
    let zeros = library.full(0.0, Element::F32, &[rows, kv_heads, count]);
    let ones = library.full(1.0, Element::F32, &[rows, kv_heads, top_k]);
    let taken = zeros.put_along(chosen, &ones, 2).reshape(&[rows, kv_heads, count, 1]);
    let taken = taken.broadcast(&[rows, kv_heads, count, tokens]);
    let taken = taken.reshape(&[rows, kv_heads, count * tokens]).slice(2, 0, total);
    let taken = taken.with_constant(Binary::GreaterEqual, 0.5);
    let causal = seen(library, first, rows, total).reshape(&[rows, 1, total]);
    let visible = taken.binary(Binary::And, &causal).transpose(&[1, 0, 2]).take(&map, 0);
    let visible = visible.reshape(&[1, heads, rows, total]);
    fused(q, &in_runs(held, step), Some(&visible), step)
}
