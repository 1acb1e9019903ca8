//! Attention over the sequences of a step.

use shardpack_formats::spec::Mask;
use shardpack_mlx::{Array, Binary, Element, Library};

use super::{
    Cache, Chosen, Tensor, blocks,
    index::{Choice, to_some},
    softcap,
};
use crate::backend::{AttentionStep, Qkv};

/// Appends keys and values to the caches and attends, to chosen keys if there is a choice, one
/// sequence after the other.
pub(super) fn attend(
    library: Library,
    qkv: &Qkv<'_, Tensor>,
    chosen: Option<&Chosen>,
    caches: &mut [&mut Cache],
    step: &AttentionStep<'_, Array>,
) -> Tensor {
    assert_eq!(caches.len(), step.lengths.len(), "one cache per sequence");
    let mut outputs = Vec::new();
    let mut row = 0;
    for (index, (cache, &rows)) in caches.iter_mut().zip(step.lengths).enumerate() {
        let heads = |x: &Tensor| {
            let part = x.array.slice(0, row, row + rows);
            let heads = x.width / step.head_dim;
            part.reshape(&[1, rows, heads, step.head_dim]).transpose(&[0, 2, 1, 3])
        };
        let (all, first) = cache.append(step.layer, [heads(qkv.k), heads(qkv.v)]);
        let out = match chosen.and_then(|chosen| chosen.0[index].as_ref()) {
            None => sequence(library, &heads(qkv.q), all, first, step),
            Some(Choice::Keys(chosen)) => to_some(&heads(qkv.q), all, first, chosen, step),
            Some(Choice::Blocks(tokens, chosen)) => {
                blocks::attend(&heads(qkv.q), all, (first, *tokens), chosen, step)
            }
        };
        outputs.push(out.transpose(&[0, 2, 1, 3]).reshape(&[rows, qkv.q.width]));
        row += rows;
    }
    let array = match &outputs[..] {
        [one] => one.clone(),
        many => library.concat(&many.iter().collect::<Vec<_>>(), 0),
    };
    qkv.q.with(array)
}

/// Queries `[1, heads, rows, head_dim]` over all keys and values `[1, kv_heads, keys, head_dim]`.
fn sequence(
    library: Library,
    q: &Array,
    [keys, values]: [Array; 2],
    first: usize,
    step: &AttentionStep<'_, Array>,
) -> Array {
    let (rows, total) = (q.shape()[2], keys.shape()[2]);
    let [keys, values] = in_runs([keys, values], step);
    let visible = mask(library, first, rows, total, step.mask);
    match step.softcap {
        None => q.attention(&keys, &values, step.scale, visible.as_ref(), step.sinks),
        Some(cap) => capped(q, [&keys, &values], visible.as_ref(), step, cap),
    }
}

/// Keys and values `[1, kv_heads, keys, head_dim]` as MLX's kernels take them: heads in runs of
/// equal length. Other maps get a key-value head for each query head.
pub(super) fn in_runs([keys, values]: [Array; 2], step: &AttentionStep<'_, Array>) -> [Array; 2] {
    let (heads, kv_heads) = (step.q_to_kv.len(), keys.shape()[1]);
    let run = heads / kv_heads;
    let even = heads == run * kv_heads
        && step.q_to_kv.iter().enumerate().all(|(head, kv)| head / run == *kv);
    if even {
        return [keys, values];
    }
    let map = of_query_heads(keys.library(), step);
    [keys, values].map(|all| all.take(&map, 1))
}

/// The key-value head of each query head, `[heads]`.
pub(super) fn of_query_heads(library: Library, step: &AttentionStep<'_, Array>) -> Array {
    let map: Vec<u32> = step.q_to_kv.iter().map(|kv| *kv as u32).collect();
    library.indices(&map, &[map.len()])
}

/// Which keys each row sees, `[rows, keys]`; none where the causal order says it.
fn mask(library: Library, first: usize, rows: usize, total: usize, mask: Mask) -> Option<Array> {
    let (window, chunk) = match mask {
        Mask::Full => return None,
        Mask::Sliding(window) => (window as usize, usize::MAX),
        Mask::Chunked(chunk) => (usize::MAX, chunk.max(1) as usize),
    };
    if total <= window.min(chunk) {
        return None;
    }
    let sees = |row: usize, key: usize| {
        let at = first + row;
        key <= at && at - key < window && key / chunk == at / chunk
    };
    let bytes: Vec<u8> =
        (0..rows).flat_map(|row| (0..total).map(move |key| u8::from(sees(row, key)))).collect();
    Some(library.copy_in(&bytes, Element::Bool, &[rows, total]))
}

/// Attention with bounded scores, which MLX's kernel does not have.
fn capped(
    q: &Array,
    [keys, values]: [&Array; 2],
    visible: Option<&Array>,
    step: &AttentionStep<'_, Array>,
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
    let scores = q.matmul(&keys.transpose(&[0, 1, 2, 4, 3]));
    let scores = softcap(&scores.with_constant(Binary::Multiply, step.scale), cap);
    let causal = || {
        let first = total - rows;
        let sees = |row: usize| (0..total).map(move |key| u8::from(key <= first + row));
        let bytes: Vec<u8> = (0..rows).flat_map(sees).collect();
        library.copy_in(&bytes, Element::Bool, &[rows, total])
    };
    let visible = visible.cloned().unwrap_or_else(causal);
    let hidden = library.full(f32::NEG_INFINITY, Element::F32, &[]);
    let scores = visible.choose(&scores, &hidden);
    let weights = match step.sinks {
        None => scores.softmax(-1),
        Some(sinks) => {
            let sinks = sinks.reshape(&[1, kv_heads, run, 1, 1]);
            let sinks = sinks.broadcast(&[1, kv_heads, run, rows, 1]);
            library.concat(&[&scores, &sinks], 4).softmax(-1).slice(4, 0, total)
        }
    };
    let width = values.shape()[4];
    weights.matmul(&values).reshape(&[1, heads, rows, width])
}
