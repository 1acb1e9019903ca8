//! Linear attention within the graph.

use std::ops::Range;

use shardpack_formats::spec;
use shardpack_mlx::{Array, Binary, Element, Library, Reduce, Unary};

use super::{Cache, Mlx, Tensor, Vector, fused::silu};
use crate::backend::{LinearAttention, LinearAttentionInputs, LinearAttentionParams, StateUpdate};

/// Under the root of a key's or query's length, as the reference has it.
const LENGTH_EPS: f32 = 1e-6;

/// What the rows of a step are told.
type Params<'a> = LinearAttentionParams<'a, Tensor, Vector>;

impl LinearAttention for Mlx {
    fn linear_attention(
        &self,
        inputs: &LinearAttentionInputs<'_, Tensor>,
        caches: &mut [&mut Cache],
        params: &Params<'_>,
    ) -> Tensor {
        assert_eq!(caches.len(), params.lengths.len(), "one cache per sequence");
        let library = inputs.v.array.library();
        let mut outputs = Vec::new();
        let mut row = 0;
        for (cache, &rows) in caches.iter_mut().zip(params.lengths) {
            outputs.push(sequence(inputs, row..row + rows, cache.state(params.layer), params));
            row += rows;
        }
        let array = library.concat(&outputs.iter().collect::<Vec<_>>(), 0);
        Tensor::new(inputs.v.rows, inputs.v.width, array.cast(inputs.v.array.element()))
    }
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
fn key_heads(library: Library, params: &Params<'_>) -> Array {
    let each: Vec<u32> = params.v_to_k.iter().map(|head| *head as u32).collect();
    library.indices(&each, &[each.len()])
}

fn sizes(params: &Params<'_>) -> Sizes {
    let spec::LinearAttention { key_dim, value_dim, kernel, .. } = *params.spec;
    let [key_dim, value_dim, kernel] = [key_dim, value_dim, kernel].map(|size| size as usize);
    let value_heads = params.v_to_k.len();
    let (keys, values) = (params.key_heads * key_dim, value_heads * value_dim);
    Sizes { keys, values, value_heads, key_dim, value_dim, kernel }
}

/// `[rows, value_heads · value_dim]` of one sequence. The state is the inputs of the last tokens
/// `[kernel − 1, channels]` and the memory `[value_heads, value_dim, key_dim]`.
fn sequence(
    inputs: &LinearAttentionInputs<'_, Tensor>,
    rows: Range<usize>,
    state: &mut Vec<Array>,
    params: &Params<'_>,
) -> Array {
    let library = inputs.v.array.library();
    let size = sizes(params);
    let part = |x: &Tensor| x.exact().slice(0, rows.start, rows.end);
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
    let mixed = convolve(&all, rows.len(), params, &size);
    let total = rows.len() + size.kernel - 1;
    let gates = RowInputs { mixed: &mixed, a: part(inputs.a), z: part(inputs.z) };
    let out = match params.update {
        StateUpdate::GatedDeltaNet { beta, norm } => {
            let rule = DeltaRule { beta: part(beta), norm, is_kda: false };
            delta_rule(&gates, &mut memory, &rule, params, &size)
        }
        StateUpdate::Kda { beta, norm } => {
            let rule = DeltaRule { beta: part(beta), norm, is_kda: true };
            delta_rule(&gates, &mut memory, &rule, params, &size)
        }
        StateUpdate::Mamba2 { skip, norm } => mamba(
            &gates,
            &mut memory,
            &MambaWeights { skip, norm: norm.map(|norm| &**norm) },
            params,
            &size,
        ),
    };
    *state = vec![all.slice(0, rows.len(), total), memory];
    out
}

/// What a state update reads of some rows.
struct RowInputs<'a> {
    /// Queries, keys and values after their convolutions.
    mixed: &'a Array,
    /// Decay.
    a: Array,
    /// Output gate.
    z: Array,
}

/// What the delta rule has of its own.
struct DeltaRule<'a> {
    beta: Array,
    norm: &'a Array,
    /// Kimi Delta Attention, else Gated `DeltaNet`.
    is_kda: bool,
}

/// The delta rule over the rows of one sequence: their result, normalised and gated; the memory moves
/// on.
fn delta_rule(
    RowInputs { mixed, a, z }: &RowInputs<'_>,
    memory: &mut Array,
    DeltaRule { beta, norm, is_kda }: &DeltaRule<'_>,
    params: &Params<'_>,
    size: &Sizes,
) -> Array {
    let library = mixed.library();
    let rows = mixed.shape()[0];
    // As many keys as values: value heads share a key head.
    let key_heads = key_heads(library, params);
    let heads = |from: usize| {
        let x = mixed.slice(1, from, from + size.keys);
        let x = x.reshape(&[rows, params.key_heads, 1, size.key_dim]);
        let squares = x.unary(Unary::Square).reduce(Reduce::Sum, 3);
        let length = squares.with_constant(Binary::Add, LENGTH_EPS).unary(Unary::Rsqrt);
        let x = x.binary(Binary::Multiply, &length);
        x.take(&key_heads, 1)
    };
    let q = heads(0).with_constant(Binary::Multiply, 1.0 / (size.key_dim as f32).sqrt());
    let k = heads(size.keys);
    let v = mixed.slice(1, 2 * size.keys, 2 * size.keys + size.values);
    let v = v.reshape(&[rows, size.value_heads, size.value_dim, 1]);
    let each = |x: Array| x.reshape(&[rows, size.value_heads, 1, 1]);
    let time = a.binary(Binary::Add, params.dt_bias);
    let rate = params.a_log.unary(Unary::Exp);
    let fade = if *is_kda {
        let wide = time.reshape(&[rows, params.key_heads, 1, size.key_dim]);
        let rate = rate.reshape(&[1, size.value_heads, 1, 1]);
        kda_decay(&rate, &wide.take(&key_heads, 1), params.spec)
    } else {
        let zero = library.full(0.0, Element::F32, &[]);
        each(rate.binary(Binary::Multiply, &time.binary(Binary::LogAddExp, &zero)))
    };
    let decay = fade.unary(Unary::Negative).unary(Unary::Exp);
    let beta = each(beta.unary(Unary::Sigmoid));
    let mut outputs = Vec::with_capacity(rows);
    for row in 0..rows {
        let at = |x: &Array| {
            let shape = x.shape();
            x.slice(0, row, row + 1).reshape(&shape[1..])
        };
        *memory = memory.binary(Binary::Multiply, &at(&decay));
        let (q, k) = (at(&q), at(&k));
        let held = memory.binary(Binary::Multiply, &k).reduce(Reduce::Sum, 2);
        let change = at(&v).binary(Binary::Subtract, &held).binary(Binary::Multiply, &at(&beta));
        *memory = memory.binary(Binary::Add, &change.binary(Binary::Multiply, &k));
        let out = memory.binary(Binary::Multiply, &q).reduce(Reduce::Sum, 2);
        outputs.push(out.reshape(&[1, size.value_heads, size.value_dim]));
    }
    let out = library.concat(&outputs.iter().collect::<Vec<_>>(), 0);
    let out = out.rms_norm(Some(norm), params.spec.eps.0).reshape(&[rows, size.values]);
    out.binary(Binary::Multiply, &if *is_kda { z.unary(Unary::Sigmoid) } else { silu(z) })
}

/// What is subtracted from the logarithm of each channel in KDA.
fn kda_decay(rate: &Array, time: &Array, delta: &spec::LinearAttention) -> Array {
    if let Some(limit) = delta.decay_limit {
        let part = rate.binary(Binary::Multiply, time).unary(Unary::Sigmoid);
        return part.with_constant(Binary::Multiply, limit.0);
    }
    let zero = time.library().full(0.0, Element::F32, &[]);
    rate.binary(Binary::Multiply, &time.binary(Binary::LogAddExp, &zero))
}

/// What Mamba-2 has of its own.
struct MambaWeights<'a> {
    skip: &'a Array,
    norm: Option<&'a Array>,
}

/// Mamba-2 over the rows of one sequence: their result, gated and normalised; the memory moves on.
fn mamba(
    RowInputs { mixed, a, z }: &RowInputs<'_>,
    memory: &mut Array,
    weights: &MambaWeights<'_>,
    params: &Params<'_>,
    size: &Sizes,
) -> Array {
    let library = mixed.library();
    let rows = mixed.shape()[0];
    let key_heads = key_heads(library, params);
    let heads = |from: usize| {
        let x = mixed.slice(1, from, from + size.keys);
        x.reshape(&[rows, params.key_heads, 1, size.key_dim]).take(&key_heads, 1)
    };
    let (q, k) = (heads(0), heads(size.keys));
    let v = mixed.slice(1, 2 * size.keys, 2 * size.keys + size.values);
    let v = v.reshape(&[rows, size.value_heads, size.value_dim, 1]);
    let zero = library.full(0.0, Element::F32, &[]);
    let time = a.binary(Binary::Add, params.dt_bias).binary(Binary::LogAddExp, &zero);
    let fade = params.a_log.unary(Unary::Exp).binary(Binary::Multiply, &time);
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
        *memory = memory.binary(Binary::Multiply, &at(&decay)).binary(Binary::Add, &new);
        let out = memory.binary(Binary::Multiply, &at(&q)).reduce(Reduce::Sum, 2);
        outputs.push(out.reshape(&[1, size.value_heads, size.value_dim]));
    }
    let out = library.concat(&outputs.iter().collect::<Vec<_>>(), 0);
    let skip = weights.skip.reshape(&[1, size.value_heads, 1]);
    let v = v.reshape(&[rows, size.value_heads, size.value_dim]);
    let out = out.binary(Binary::Add, &v.binary(Binary::Multiply, &skip));
    let out = out.reshape(&[rows, size.values]).binary(Binary::Multiply, &silu(z));
    let Some(gain) = weights.norm else { return out };
    let groups = [rows, params.key_heads, size.values / params.key_heads];
    let normed = out.reshape(&groups).rms_norm(None, params.spec.eps.0);
    normed.reshape(&[rows, size.values]).binary(Binary::Multiply, gain)
}

/// Each channel's sum over the last tokens, through `silu`: `[rows, channels]`.
fn convolve(all: &Array, rows: usize, params: &Params<'_>, size: &Sizes) -> Array {
    let library = all.library();
    let widths = [size.keys, size.keys, size.values];
    let weights: Vec<Array> = params
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
    match &params.conv_biases {
        Some(biases) => {
            silu(&sum.binary(Binary::Add, &library.concat(&biases.map(|bias| &**bias), 0)))
        }
        None => silu(&sum),
    }
}
