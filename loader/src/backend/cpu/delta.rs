//! Linear attention by the gated delta rule, token by token: a prompt gives the same bits as its
//! tokens one by one.

use rayon::prelude::*;
use shardpack_formats::spec::Delta;
use shardpack_kernels::{
    exp::{exp, softplus},
    lanes::{dot, sum},
};

use super::{Tensor, route::sigmoid};
use crate::backend::{DeltaInputs, DeltaStep};

/// Under the root of a key's or query's length, as the reference has it.
const LENGTH_EPS: f32 = 1e-6;

/// What a sequence carries from token to token in one layer.
#[derive(Clone, Debug, Default)]
pub(super) struct State {
    /// Inputs of the last `kernel − 1` tokens: queries, keys and values of each.
    window: Vec<Vec<f32>>,
    /// For each value head `[value_dim, key_dim]`: rows are what one value column sums over.
    memory: Vec<f32>,
}

/// Runs the rows of one sequence, `[rows, value_heads · value_dim]` to `out`.
pub(super) fn run(
    inputs: &DeltaInputs<'_, Tensor>,
    rows: std::ops::Range<usize>,
    state: &mut State,
    step: &DeltaStep<'_, Vec<f32>>,
    out: &mut [f32],
) {
    let Delta { key_dim, value_dim, kernel, .. } = *step.delta;
    let [key_dim, value_dim, kernel] = [key_dim, value_dim, kernel].map(|size| size as usize);
    let keys = step.key_heads * key_dim;
    let value_heads = step.key_heads * step.values_per_key;
    let values = value_heads * value_dim;
    if state.memory.is_empty() {
        state.memory = vec![0.0; values * key_dim];
        state.window = vec![vec![0.0; 2 * keys + values]; kernel - 1];
    }
    for (row, out) in rows.zip(out.chunks_exact_mut(values)) {
        let of = |x: &'_ Tensor| row * x.width..(row + 1) * x.width;
        let mut mixed = Vec::with_capacity(2 * keys + values);
        for part in [inputs.q, inputs.k, inputs.v] {
            mixed.extend_from_slice(&part.values[of(part)]);
        }
        let mut mixed = convolve(&mut state.window, mixed, step, [keys, keys, values]);
        let (q_and_k, v) = mixed.split_at_mut(2 * keys);
        for head in q_and_k.chunks_exact_mut(key_dim) {
            let length = (sum(&head.iter().map(|x| x * x).collect::<Vec<_>>()) + LENGTH_EPS).sqrt();
            for x in head.iter_mut() {
                *x /= length;
            }
        }
        let (q, k) = q_and_k.split_at(keys);
        let query_scale = 1.0 / (key_dim as f32).sqrt();
        let [a, b] = [inputs.a, inputs.b].map(|x| &x.values[of(x)]);
        state
            .memory
            .par_chunks_exact_mut(value_dim * key_dim)
            .zip(out.par_chunks_exact_mut(value_dim))
            .enumerate()
            .for_each(|(head, (memory, out))| {
                let key = head / step.values_per_key * key_dim..;
                let (q, k) = (&q[key.clone()][..key_dim], &k[key][..key_dim]);
                let v = &v[head * value_dim..][..value_dim];
                let decay = exp(-exp(step.a_log[head]) * softplus(a[head] + step.dt_bias[head]));
                let beta = sigmoid(b[head]);
                for ((memory, out), v) in memory.chunks_exact_mut(key_dim).zip(out).zip(v) {
                    for x in memory.iter_mut() {
                        *x *= decay;
                    }
                    let change = beta * (v - dot(memory, k));
                    memory.iter_mut().zip(k).for_each(|(x, k)| *x += k * change);
                    *out = dot(memory, q) * query_scale;
                }
            });
        let z = &inputs.z.values[of(inputs.z)];
        gate(out, z, step.gain, step.delta.eps.0);
    }
}

/// Each channel's sum over the last tokens, through `silu`; the window moves on by one.
fn convolve(
    window: &mut Vec<Vec<f32>>,
    newest: Vec<f32>,
    step: &DeltaStep<'_, Vec<f32>>,
    widths: [usize; 3],
) -> Vec<f32> {
    window.push(newest);
    let kernel = window.len();
    let mut out = Vec::with_capacity(widths.iter().sum());
    for (weights, width) in step.convolutions.iter().zip(widths) {
        let first = out.len();
        for channel in 0..width {
            let weights = &weights[channel * kernel..][..kernel];
            let sum = weights
                .iter()
                .zip(window.iter())
                .fold(0.0_f32, |sum, (weight, inputs)| sum + weight * inputs[first + channel]);
            out.push(sum * sigmoid(sum));
        }
    }
    window.remove(0);
    out
}

/// Normalises each head's result, and lets as much of it through as `z` says.
fn gate(out: &mut [f32], z: &[f32], gain: &[f32], eps: f32) {
    let width = gain.len();
    for (head, z) in out.chunks_exact_mut(width).zip(z.chunks_exact(width)) {
        let squares: Vec<f32> = head.iter().map(|x| x * x).collect();
        let factor = 1.0 / (sum(&squares) / width as f32 + eps).sqrt();
        for ((x, gain), z) in head.iter_mut().zip(gain).zip(z) {
            *x = *gain * (*x * factor) * (z * sigmoid(*z));
        }
    }
}
