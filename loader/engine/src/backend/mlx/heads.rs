//! Heads taken apart and put together, each with a matrix of its own, and linear attention.

use std::ops::Range;

use shardpack_formats::spec::{Delta, StateRule};
use shardpack_mlx::{Array, Binary, Element, Library, Reduce, Unary};

use super::{Cache, Matrix, Tensor, silu};
use crate::backend::{DeltaInputs, DeltaStep};

/// Under the root of a key's or query's length, as the reference has it.
const LENGTH_EPS: f32 = 1e-6;

/// Columns `part` of every head of `width` columns.
pub(super) fn slice(x: &Tensor, width: usize, part: Range<usize>) -> Tensor {
    let (heads, kept) = (x.width / width, part.len());
    let array = x.runs(width).slice(2, part.start, part.end).reshape(&[x.rows, heads * kept]);
    Tensor::new(x.rows, heads * kept, array)
}

/// Each head of `a` with the same head of `b` behind it.
pub(super) fn join(a: &Tensor, b: &Tensor, heads: usize) -> Tensor {
    let both = [a.runs(a.width / heads), b.runs(b.width / heads)];
    let array = both[0].library().concat(&[&both[0], &both[1]], 2);
    let width = a.width + b.width;
    Tensor::new(a.rows, width, array.reshape(&[a.rows, width]))
}

/// Every head times its own matrix of a stack.
pub(super) fn linear(x: &Tensor, stack: &Matrix, heads: usize) -> Tensor {
    let each: Vec<u32> = (0..heads as u32).collect();
    let each = x.array.library().indices(&each, &[1, heads]);
    let input = x.array.reshape(&[x.rows, heads, 1, x.width / heads]);
    let width = stack.outputs();
    Tensor::new(x.rows, width, stack.gathered(&input, &each, heads).reshape(&[x.rows, width]))
}

/// Linear attention of all sequences; each cache's state moves on by its rows.
pub(super) fn gated_delta(
    inputs: &DeltaInputs<'_, Tensor>,
    caches: &mut [&mut Cache],
    step: &DeltaStep<'_, Array>,
) -> Tensor {
    assert_eq!(caches.len(), step.lengths.len(), "one cache per sequence");
    let library = inputs.v.array.library();
    let mut outputs = Vec::new();
    let mut row = 0;
    for (cache, &rows) in caches.iter_mut().zip(step.lengths) {
        outputs.push(sequence(inputs, row..row + rows, cache.state(step.layer), step));
        row += rows;
    }
    let array = library.concat(&outputs.iter().collect::<Vec<_>>(), 0);
    Tensor::new(inputs.v.rows, inputs.v.width, array)
}

/// Widths of one layer's part that is held here.
struct Sizes {
    keys: usize,
    values: usize,
    value_heads: usize,
    key_dim: usize,
    value_dim: usize,
    kernel: usize,
}

/// The key head of every value head.
fn key_heads(library: Library, step: &DeltaStep<'_, Array>) -> Array {
    let each: Vec<u32> = step.v_to_k.iter().map(|head| *head as u32).collect();
    library.indices(&each, &[each.len()])
}

fn sizes(step: &DeltaStep<'_, Array>) -> Sizes {
    let Delta { key_dim, value_dim, kernel, .. } = *step.delta;
    let [key_dim, value_dim, kernel] = [key_dim, value_dim, kernel].map(|size| size as usize);
    let value_heads = step.v_to_k.len();
    let (keys, values) = (step.key_heads * key_dim, value_heads * value_dim);
    Sizes { keys, values, value_heads, key_dim, value_dim, kernel }
}

/// `[rows, value_heads · value_dim]` of one sequence. The state is the inputs of the last tokens
/// `[kernel − 1, channels]` and the memory `[value_heads, value_dim, key_dim]`.
fn sequence(
    inputs: &DeltaInputs<'_, Tensor>,
    rows: Range<usize>,
    state: &mut Vec<Array>,
    step: &DeltaStep<'_, Array>,
) -> Array {
    let library = inputs.v.array.library();
    let size = sizes(step);
    let part = |x: &Tensor| x.array.slice(0, rows.start, rows.end);
    let parts = [part(inputs.q), part(inputs.k), part(inputs.v)];
    let new = library.concat(&parts.iter().collect::<Vec<_>>(), 1);
    let zeros = |shape: &[usize]| library.full(0.0, Element::F32, shape);
    let [window, mut memory] = std::mem::take(state).try_into().unwrap_or_else(|_| {
        let channels = 2 * size.keys + size.values;
        [
            zeros(&[size.kernel - 1, channels]),
            zeros(&[size.value_heads, size.value_dim, size.key_dim]),
        ]
    });
    let all = library.concat(&[&window, &new], 0);
    let mixed = convolve(&all, rows.len(), step, &size);
    if step.delta.rule == StateRule::Mamba2 {
        let gates = [part(inputs.a), part(inputs.z)];
        let (out, memory) = mamba(&mixed, gates, memory, step, &size);
        let total = rows.len() + size.kernel - 1;
        *state = vec![all.slice(0, rows.len(), total), memory];
        return out;
    }
    // As many keys as values: value heads share a key head.
    let key_heads = key_heads(library, step);
    let heads = |from: usize| {
        let x = mixed.slice(1, from, from + size.keys);
        let x = x.reshape(&[rows.len(), step.key_heads, 1, size.key_dim]);
        let squares = x.unary(Unary::Square).reduce(Reduce::Sum, 3);
        let length = squares.with_constant(Binary::Add, LENGTH_EPS).unary(Unary::Rsqrt);
        let x = x.binary(Binary::Multiply, &length);
        x.take(&key_heads, 1)
    };
    let q = heads(0).with_constant(Binary::Multiply, 1.0 / (size.key_dim as f32).sqrt());
    let k = heads(size.keys);
    let v = mixed.slice(1, 2 * size.keys, 2 * size.keys + size.values);
    let v = v.reshape(&[rows.len(), size.value_heads, size.value_dim, 1]);
    let each = |x: Array| x.reshape(&[rows.len(), size.value_heads, 1, 1]);
    let is_kimi = step.delta.rule == StateRule::KimiDelta;
    let time = part(inputs.a).binary(Binary::Add, step.dt_bias);
    let rate = step.a_log.unary(Unary::Exp);
    let fade = if is_kimi {
        let wide = time.reshape(&[rows.len(), step.key_heads, 1, size.key_dim]);
        let rate = rate.reshape(&[1, size.value_heads, 1, 1]);
        kimi_fade(&rate, &wide.take(&key_heads, 1), step.delta)
    } else {
        let zero = library.full(0.0, Element::F32, &[]);
        each(rate.binary(Binary::Multiply, &time.binary(Binary::LogAddExp, &zero)))
    };
    let decay = fade.unary(Unary::Negative).unary(Unary::Exp);
    let beta = each(part(inputs.b).unary(Unary::Sigmoid));
    let mut outputs = Vec::with_capacity(rows.len());
    for row in 0..rows.len() {
        let at = |x: &Array| {
            let shape = x.shape();
            x.slice(0, row, row + 1).reshape(&shape[1..])
        };
        memory = memory.binary(Binary::Multiply, &at(&decay));
        let (q, k) = (at(&q), at(&k));
        let held = memory.binary(Binary::Multiply, &k).reduce(Reduce::Sum, 2);
        let change = at(&v).binary(Binary::Subtract, &held).binary(Binary::Multiply, &at(&beta));
        memory = memory.binary(Binary::Add, &change.binary(Binary::Multiply, &k));
        let out = memory.binary(Binary::Multiply, &q).reduce(Reduce::Sum, 2);
        outputs.push(out.reshape(&[1, size.value_heads, size.value_dim]));
    }
    let total = rows.len() + size.kernel - 1;
    *state = vec![all.slice(0, rows.len(), total), memory];
    let out = library.concat(&outputs.iter().collect::<Vec<_>>(), 0);
    let out = out.rms_norm(step.gain, step.delta.eps.0).reshape(&[rows.len(), size.values]);
    let z = part(inputs.z);
    out.binary(Binary::Multiply, &if is_kimi { z.unary(Unary::Sigmoid) } else { silu(&z) })
}

/// What is taken from the logarithm of each channel, by Kimi's rule.
fn kimi_fade(rate: &Array, time: &Array, delta: &Delta) -> Array {
    if let Some(limit) = delta.fade_limit {
        let part = rate.binary(Binary::Multiply, time).unary(Unary::Sigmoid);
        return part.with_constant(Binary::Multiply, limit.0);
    }
    let zero = time.library().full(0.0, Element::F32, &[]);
    rate.binary(Binary::Multiply, &time.binary(Binary::LogAddExp, &zero))
}

/// Mamba 2's rule over the rows of one sequence: what they give, gated and normalised, and the
/// memory after them.
fn mamba(
    mixed: &Array,
    [a, z]: [Array; 2],
    mut memory: Array,
    step: &DeltaStep<'_, Array>,
    size: &Sizes,
) -> (Array, Array) {
    let library = mixed.library();
    let rows = mixed.shape()[0];
    let key_heads = key_heads(library, step);
    let heads = |from: usize| {
        let x = mixed.slice(1, from, from + size.keys);
        x.reshape(&[rows, step.key_heads, 1, size.key_dim]).take(&key_heads, 1)
    };
    let (q, k) = (heads(0), heads(size.keys));
    let v = mixed.slice(1, 2 * size.keys, 2 * size.keys + size.values);
    let v = v.reshape(&[rows, size.value_heads, size.value_dim, 1]);
    let zero = library.full(0.0, Element::F32, &[]);
    let time = a.binary(Binary::Add, step.dt_bias).binary(Binary::LogAddExp, &zero);
    let fade = step.a_log.unary(Unary::Exp).binary(Binary::Multiply, &time);
    let each = |x: Array| x.reshape(&[rows, size.value_heads, 1, 1]);
    let decay = each(fade.unary(Unary::Negative).unary(Unary::Exp));
    let change = v.binary(Binary::Multiply, &each(time));
    let mut outputs = Vec::with_capacity(rows);
    for row in 0..rows {
        let at = |x: &Array| {
            let shape = x.shape();
            x.slice(0, row, row + 1).reshape(&shape[1..])
        };
        let new = at(&change).binary(Binary::Multiply, &at(&k));
        memory = memory.binary(Binary::Multiply, &at(&decay)).binary(Binary::Add, &new);
        let out = memory.binary(Binary::Multiply, &at(&q)).reduce(Reduce::Sum, 2);
        outputs.push(out.reshape(&[1, size.value_heads, size.value_dim]));
    }
    let mut out = library.concat(&outputs.iter().collect::<Vec<_>>(), 0);
    if let Some(skip) = step.skip {
        let skip = skip.reshape(&[1, size.value_heads, 1]);
        let v = v.reshape(&[rows, size.value_heads, size.value_dim]);
        out = out.binary(Binary::Add, &v.binary(Binary::Multiply, &skip));
    }
    let out = out.reshape(&[rows, size.values]).binary(Binary::Multiply, &silu(&z));
    let Some(gain) = step.gain else { return (out, memory) };
    let groups = [rows, step.key_heads, size.values / step.key_heads];
    let normed = out.reshape(&groups).rms_norm(None, step.delta.eps.0);
    (normed.reshape(&[rows, size.values]).binary(Binary::Multiply, gain), memory)
}

/// Each channel's sum over the last tokens, through `silu`: `[rows, channels]`.
fn convolve(all: &Array, rows: usize, step: &DeltaStep<'_, Array>, size: &Sizes) -> Array {
    let library = all.library();
    let widths = [size.keys, size.keys, size.values];
    let weights: Vec<Array> = step
        .convolutions
        .iter()
        .zip(widths)
        .map(|(weights, width)| weights.reshape(&[width, size.kernel]))
        .collect();
    let weights = library.concat(&weights.iter().collect::<Vec<_>>(), 0);
    let tap = |index: usize| {
        let weights = weights.slice(1, index, index + 1).transpose(&[1, 0]);
        all.slice(0, index, index + rows).binary(Binary::Multiply, &weights)
    };
    let sum = (1..size.kernel).fold(tap(0), |sum, index| sum.binary(Binary::Add, &tap(index)));
    match &step.conv_biases {
        Some(biases) => silu(&sum.binary(Binary::Add, &library.concat(&biases[..], 0))),
        None => silu(&sum),
    }
}
