//! Attention over the sequences of a step.

use std::ops::Range;

use shardpack_formats::spec::Mask;
use shardpack_mlx::{Array, Binary, Element, Library};

use super::{
    Cache, Mlx, Tensor, TopK, TopKBlocks, Vector, block_sparse,
    cache::{Appended, Held, HeldTogether},
    calls::{Call, covering},
    fused::softcap,
    sparse_indexer,
};
use crate::backend::{Attention, AttentionParams, Qkv};

impl Attention for Mlx {
    fn attention(
        &self,
        qkv: Qkv<'_, Tensor>,
        caches: &mut [&mut Cache],
        params: &AttentionParams<'_, Vector>,
    ) -> Tensor {
        attend(self, &qkv, Keys::All, caches, params)
    }
}

/// Which keys the rows of a step attend to.
#[derive(Clone, Copy)]
pub(super) enum Keys<'a> {
    /// All that the mask shows.
    All,
    /// Those that an indexer has selected.
    TopK(&'a TopK),
    /// The blocks that an indexer has selected.
    TopKBlocks(&'a TopKBlocks),
}

/// Widths of heads for which MLX's attention has kernels, be it for one row or for many
/// (`ScaledDotProductAttention::use_fallback`).
const HEADS_WITH_KERNELS: [usize; 5] = [64, 80, 96, 128, 256];

/// Appends keys and values to the caches and attends: one call for the sequences of one shape.
pub(super) fn attend(
    backend: &Mlx,
    qkv: &Qkv<'_, Tensor>,
    keys: Keys<'_>,
    caches: &mut [&mut Cache],
    params: &AttentionParams<'_, Vector>,
) -> Tensor {
    assert_eq!(caches.len(), params.lengths.len(), "one cache per sequence");
    let calls = match (keys, params.softcap) {
        (Keys::All, None) => Call::all(caches, params.layer, params.lengths),
        _ => Call::each(params.lengths),
    };
    let outputs: Vec<Array> = calls
        .iter()
        .map(|call| match call.sequences[..] {
            [one] => alone(backend.library, qkv, keys, call, &mut *caches[one], params),
            _ => together(backend, qkv, call, caches, params),
        })
        .collect();
    qkv.q.with(Call::in_order(&calls, &outputs))
}

/// Attention of one sequence, `[rows, heads · head_dim]`.
fn alone(
    library: Library,
    qkv: &Qkv<'_, Tensor>,
    keys: Keys<'_>,
    call: &Call,
    cache: &mut Cache,
    params: &AttentionParams<'_, Vector>,
) -> Array {
    let (rows, index) = (call.rows.len(), call.sequences[0]);
    let heads = |x: &Tensor| {
        let part = call.of(&x.array);
        let heads = x.width / params.head_dim;
        if rows == 1 {
            return part.reshape(&[1, heads, 1, params.head_dim]);
        }
        part.reshape(&[1, rows, heads, params.head_dim]).transpose(&[0, 2, 1, 3])
    };
    let Appended { all, first } = cache.append(params.layer, &[heads(qkv.k), heads(qkv.v)]);
    let q = heads(qkv.q);
    let out = match keys {
        Keys::TopK(TopK(top_k)) => match &top_k[index] {
            Some(top_k) => sparse_indexer::attend(&q, &all, first, top_k, params),
            None => sequence(library, &q, all, first, params),
        },
        Keys::TopKBlocks(top_k) => match &top_k.indices[index] {
            Some(blocks) => {
                let blocks = block_sparse::Blocks { tokens: top_k.block_tokens, indices: blocks };
                block_sparse::attend(&q, all, first, blocks, params)
            }
            None => sequence(library, &q, all, first, params),
        },
        Keys::All => sequence(library, &q, all, first, params),
    };
    let out = if rows == 1 { out } else { out.transpose(&[0, 2, 1, 3]) };
    out.reshape(&[rows, qkv.q.width])
}

/// Attention of several sequences with one row each, `[rows, heads · head_dim]`.
fn together(
    backend: &Mlx,
    qkv: &Qkv<'_, Tensor>,
    call: &Call,
    caches: &mut [&mut Cache],
    params: &AttentionParams<'_, Vector>,
) -> Array {
    let rows = call.rows.len();
    let heads = |x: &Tensor| {
        let heads = x.width / params.head_dim;
        call.of(&x.array).reshape(&[rows, heads, 1, params.head_dim])
    };
    let new = [heads(qkv.k), heads(qkv.v)];
    let HeldTogether { all, firsts } =
        Cache::append_together(caches, &call.sequences, params.layer, &new);
    let seen: Vec<Range<usize>> =
        firsts.iter().map(|first| first_key(*first, params.mask)..first + 1).collect();
    let keys = covering(&seen);
    let held = in_runs(all.map(|all| all.slice(2, keys.start, keys.end)), params);
    let visible = backend.call_masks.get(backend.library, &seen);
    fused(&heads(qkv.q), &held, visible.as_ref(), params).reshape(&[rows, qkv.q.width])
}

/// The first key that a row at some position sees.
const fn first_key(at: usize, mask: Mask) -> usize {
    match mask {
        Mask::Full | Mask::Bidirectional => 0,
        Mask::Sliding(window) | Mask::BidirectionalSliding(window) => {
            (at + 1).saturating_sub(window as usize)
        }
        Mask::Chunked(0) => at,
        Mask::Chunked(chunk) => at - at % chunk as usize,
    }
}

/// Queries `[1, heads, rows, head_dim]`, the first of them at `first`, over all keys and values
/// `[1, kv_heads, keys, head_dim]`.
fn sequence(
    library: Library,
    q: &Array,
    all: Held,
    first: usize,
    params: &AttentionParams<'_, Vector>,
) -> Array {
    let (rows, total) = (q.shape()[2], all.keys.shape()[2]);
    // What no row sees is not read.
    let from = first_key(first, params.mask);
    let seen = if from == 0 { all } else { all.map(|all| all.slice(2, from, total)) };
    let seen = in_runs(seen, params);
    let visible = mask(library, first, rows, from..total, params.mask);
    match params.softcap {
        None => fused(q, &seen, visible.as_ref(), params),
        Some(cap) => capped(q, &seen, visible.as_ref(), params, cap),
    }
}

/// MLX's attention, the result in the queries' type. Queries of 16 bits are taken as they are. With
/// f32 queries and keys of 16 bits, MLX computes in the keys' type and sums in f32 where it has a
/// kernel for the width of heads; where it has none, it would round scores to that type, so keys and
/// values are taken as f32 there (MLX promotes them to the queries' type).
pub(super) fn fused(
    q: &Array,
    held: &Held,
    visible: Option<&Array>,
    params: &AttentionParams<'_, Vector>,
) -> Array {
    let Held { keys, values, element } = held;
    let own = q.element();
    let rounds_scores = own == Element::F32 && !HEADS_WITH_KERNELS.contains(&params.head_dim);
    let element = if *element == Element::F32 || rounds_scores { Element::F32 } else { *element };
    let sinks = params.sinks.map(|sinks| sinks.cast(element));
    let q = q.cast(element);
    q.attention(keys, values, params.scale, visible, sinks.as_ref()).cast(own)
}

/// Keys and values `[1, kv_heads, keys, head_dim]` as MLX's kernels take them: heads in runs of
/// equal length. Other maps get a key-value head for each query head.
pub(super) fn in_runs(held: Held, params: &AttentionParams<'_, Vector>) -> Held {
    let (heads, kv_heads) = (params.q_to_kv.len(), held.keys.shape()[1]);
    let run = heads / kv_heads;
    let even = heads == run * kv_heads
        && params.q_to_kv.iter().enumerate().all(|(head, kv)| head / run == *kv);
    if even {
        return held;
    }
    let map = of_query_heads(held.keys.library(), params);
    held.map(|all| all.take(&map, 1))
}

/// The key-value head of each query head, `[heads]`.
pub(super) fn of_query_heads(library: Library, params: &AttentionParams<'_, Vector>) -> Array {
    let map: Vec<u32> = params.q_to_kv.iter().map(|kv| *kv as u32).collect();
    library.indices(&map, &[map.len()])
}

/// Which of some keys each row sees, `[rows, keys]`, the first row being at `first`; none where the
/// causal order says it.
fn mask(
    library: Library,
    first: usize,
    rows: usize,
    keys: Range<usize>,
    mask: Mask,
) -> Option<Array> {
    let last = first + rows - 1;
    if mask.is_bidirectional() {
        let side = match mask {
            Mask::BidirectionalSliding(side) => side as usize,
            _ => usize::MAX,
        };
        let row = |at: usize| keys.clone().map(move |key| u8::from(at.abs_diff(key) < side));
        let bytes: Vec<u8> = (first..first + rows).flat_map(row).collect();
        return Some(library.copy_in(&bytes, Element::Bool, &[rows, keys.len()]));
    }
    let (window, chunk, all_see) = match mask {
        Mask::Full | Mask::Bidirectional | Mask::BidirectionalSliding(_) => return None,
        Mask::Sliding(window) => (window as usize, usize::MAX, last - keys.start < window as usize),
        Mask::Chunked(chunk) => {
            let chunk = chunk.max(1) as usize;
            (usize::MAX, chunk, last / chunk == keys.start / chunk)
        }
    };
    if all_see {
        return None;
    }
    let sees = |at: usize, key: usize| key <= at && at - key < window && key / chunk == at / chunk;
    let row = |at: usize| keys.clone().map(move |key| u8::from(sees(at, key)));
    let bytes: Vec<u8> = (first..first + rows).flat_map(row).collect();
    Some(library.copy_in(&bytes, Element::Bool, &[rows, keys.len()]))
}

/// Attention with bounded scores, which MLX's kernel does not have.
fn capped(
    q: &Array,
    Held { keys, values, .. }: &Held,
    visible: Option<&Array>,
    params: &AttentionParams<'_, Vector>,
    cap: f32,
) -> Array {
    let library = q.library();
    let shape = q.shape();
    let [_, heads, rows, dim] = shape[..] else { unreachable!("queries have four axes") };
    let [kv_heads, total] = [keys.shape()[1], keys.shape()[2]];
    let run = heads / kv_heads;
    // [1, kv heads, run, rows, …] against [1, kv heads, 1, keys, …]
    let q = q.reshape(&[1, kv_heads, run, rows, dim]);
    let wide = |x: &Array| x.reshape(&[1, kv_heads, 1, total, x.shape()[3]]);
    let (keys, values) = (wide(keys), wide(values));
    // f32 from here on: the cap bends large scores, of which 16 bits keep little.
    let element = q.element();
    let scores = q.matmul(&keys.transpose(&[0, 1, 2, 4, 3])).cast(Element::F32);
    let scores = softcap(&scores.with_constant(Binary::Multiply, params.scale), cap);
    let causal = || {
        let first = total - rows;
        let sees = |row: usize| (0..total).map(move |key| u8::from(key <= first + row));
        let bytes: Vec<u8> = (0..rows).flat_map(sees).collect();
        library.copy_in(&bytes, Element::Bool, &[rows, total])
    };
    let visible = visible.cloned().unwrap_or_else(causal);
    let hidden = library.full(f32::NEG_INFINITY, Element::F32, &[]);
    let scores = visible.choose(&scores, &hidden);
    let weights = match params.sinks {
        None => scores.softmax(-1),
        Some(sinks) => {
            let sinks = sinks.reshape(&[1, kv_heads, run, 1, 1]);
            let sinks = sinks.broadcast(&[1, kv_heads, run, rows, 1]);
            library.concat(&[&scores, &sinks], 4).softmax(-1).slice(4, 0, total)
        }
    };
    let width = values.shape()[4];
    let out = weights.cast(element).matmul(&values).cast(element);
    out.reshape(&[1, heads, rows, width])
}
