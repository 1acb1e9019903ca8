//! Heads taken apart and put together, each with a matrix of its own, and linear attention by the
//! gated delta rule.

use std::ops::Range;

use shardpack_formats::spec::Delta;
use shardpack_mlx::{Array, Binary, Element, Reduce, Unary};

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

fn sizes(step: &DeltaStep<'_, Array>) -> Sizes {
    let Delta { key_dim, value_dim, kernel, .. } = *step.delta;
    let [key_dim, value_dim, kernel] = [key_dim, value_dim, kernel].map(|size| size as usize);
    let value_heads = step.key_heads * step.values_per_key;
    let (keys, values) = (step.key_heads * key_dim, value_heads * value_dim);
    Sizes { keys, values, value_heads, key_dim, value_dim, kernel }
}

/// `[rows, value_heads · value_dim]` of one sequence. The state is the inputs of the last tokens
/// `[kernel − 1, channels]` and the memory `[value_heads, value_dim, key_dim]`.
fn sequence(
    inputs: &DeltaInputs<'_, Tensor>,
    rows: Range<usize>,
    state: &mut Option<[Array; 2]>,
    step: &DeltaStep<'_, Array>,
) -> Array {
    let library = inputs.v.array.library();
    let size = sizes(step);
    let part = |x: &Tensor| x.array.slice(0, rows.start, rows.end);
    let parts = [part(inputs.q), part(inputs.k), part(inputs.v)];
    let new = library.concat(&parts.iter().collect::<Vec<_>>(), 1);
    let zeros = |shape: &[usize]| library.full(0.0, Element::F32, shape);
    let [window, mut memory] = state.take().unwrap_or_else(|| {
        let channels = 2 * size.keys + size.values;
        [
            zeros(&[size.kernel - 1, channels]),
            zeros(&[size.value_heads, size.value_dim, size.key_dim]),
        ]
    });
    let all = library.concat(&[&window, &new], 0);
    let mixed = convolve(&all, rows.len(), step, &size);
    // As many keys as values: consecutive value heads share a key head.
    let heads = |from: usize| {
        let x = mixed.slice(1, from, from + size.keys);
        let x = x.reshape(&[rows.len(), step.key_heads, 1, size.key_dim]);
        let squares = x.unary(Unary::Square).reduce(Reduce::Sum, 3);
        let length = squares.with_constant(Binary::Add, LENGTH_EPS).unary(Unary::Rsqrt);
        let x = x.binary(Binary::Multiply, &length);
        let wide = [rows.len(), step.key_heads, step.values_per_key, size.key_dim];
        x.broadcast(&wide).reshape(&[rows.len(), size.value_heads, 1, size.key_dim])
    };
    let q = heads(0).with_constant(Binary::Multiply, 1.0 / (size.key_dim as f32).sqrt());
    let k = heads(size.keys);
    let v = mixed.slice(1, 2 * size.keys, 2 * size.keys + size.values);
    let v = v.reshape(&[rows.len(), size.value_heads, size.value_dim, 1]);
    let zero = library.full(0.0, Element::F32, &[]);
    let softplus =
        part(inputs.a).binary(Binary::Add, step.dt_bias).binary(Binary::LogAddExp, &zero);
    let fade = step.a_log.unary(Unary::Exp).binary(Binary::Multiply, &softplus);
    let each = |x: Array| x.reshape(&[rows.len(), size.value_heads, 1, 1]);
    let decay = each(fade.unary(Unary::Negative).unary(Unary::Exp));
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
    *state = Some([all.slice(0, rows.len(), total), memory]);
    let out = library.concat(&outputs.iter().collect::<Vec<_>>(), 0);
    let out = out.rms_norm(Some(step.gain), step.delta.eps.0).reshape(&[rows.len(), size.values]);
    out.binary(Binary::Multiply, &silu(&part(inputs.z)))
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
    silu(&sum)
}
