//! Linear attention, token by token: a prompt gives the same bits as its tokens one by one.

use std::ops::Range;

use rayon::prelude::*;
use shardpack_formats::spec::{self, LinearAttentionKind};
use shardpack_kernels::{
    exp::{exp, softplus},
    lanes::{dot, sum},
};

use super::{Cache, Cpu, Tensor, route::sigmoid};
use crate::backend::{LinearAttention, LinearAttentionInputs, LinearAttentionParams, StateUpdate};

mod mamba2;
mod short_convolution;

/// What the rows of a step are told.
type Params<'a> = LinearAttentionParams<'a, Tensor, Vec<f32>>;

impl LinearAttention for Cpu {
    fn linear_attention(
        &self,
        inputs: &LinearAttentionInputs<'_, Tensor>,
        caches: &mut [&mut Cache],
        params: &Params<'_>,
    ) -> Tensor {
        assert_eq!(caches.len(), params.lengths.len(), "one cache per sequence");
        assert_eq!(params.lengths.iter().sum::<usize>(), inputs.v.rows(), "rows of all sequences");
        let mut out = Tensor::zeros(inputs.v.rows(), inputs.v.width);
        let mut row = 0;
        let drafts = params.drafts.iter().copied().chain(std::iter::repeat(0));
        for ((cache, length), drafts) in caches.iter_mut().zip(params.lengths).zip(drafts) {
            let rows = SequenceRows { rows: row..row + length, drafts };
            let place = row * inputs.v.width..(row + length) * inputs.v.width;
            let state = cache.state(params.layer);
            run(inputs, rows, state, params, &mut out.values[place]);
            row += length;
        }
        out
    }
}

/// Rows of one sequence in a step.
struct SequenceRows {
    /// Among the rows of the step.
    rows: Range<usize>,
    /// The last of them that may be rolled back.
    drafts: usize,
}

/// Under the root of a key's or query's length, as the reference has it.
const LENGTH_EPS: f32 = 1e-6;

/// What a sequence carries from token to token in one layer.
#[derive(Clone, Debug, Default)]
pub(super) struct State {
    /// Inputs of the last `kernel − 1` tokens: queries, keys and values of each.
    window: Vec<Vec<f32>>,
    /// For each value head `[value_dim, key_dim]`: rows are what one value column sums over.
    memory: Vec<f32>,
    /// How the latest step can be rolled back, if it has drafts.
    undo: Option<UndoLog>,
}

/// A state before a step, and what each row of the step has done to it. A sum cannot be undone
/// to the bit, so it is made anew.
#[derive(Clone, Debug)]
struct UndoLog {
    window: Vec<Vec<f32>>,
    memory: Vec<f32>,
    rows: Vec<Change>,
    heads: Heads,
}

/// What one token does to a state.
#[derive(Clone, Debug)]
struct Change {
    /// Enters the window.
    inputs: Vec<f32>,
    /// Of each key head.
    k: Vec<f32>,
    /// Of each value head.
    v: Vec<f32>,
    /// Of each value head: decay of the memory, and how strongly it changes, which in
    /// Mamba-2 is the time step.
    factors: Vec<[f32; 2]>,
    /// In KDA, decay of each channel of each key head.
    decays: Vec<f32>,
}

/// A layer's heads.
#[derive(Clone, Debug)]
struct Heads {
    rule: LinearAttentionKind,
    /// For each value head the key head that it reads.
    v_to_k: Vec<usize>,
    key_dim: usize,
    value_dim: usize,
}

impl Heads {
    /// Those of a state without memory.
    const fn none() -> Self {
        Self {
            rule: LinearAttentionKind::GatedDeltaNet,
            v_to_k: Vec::new(),
            key_dim: 1,
            value_dim: 1,
        }
    }
}

impl Change {
    /// Of a state without memory.
    const fn of_window(inputs: Vec<f32>) -> Self {
        Self { inputs, k: Vec::new(), v: Vec::new(), factors: Vec::new(), decays: Vec::new() }
    }

    /// Changes the memory of a value head; `each` sees its rows as they then are.
    fn apply(
        &self,
        heads: &Heads,
        head: usize,
        memory: &mut [f32],
        mut each: impl FnMut(usize, &[f32]),
    ) {
        let &Heads { rule, ref v_to_k, key_dim, value_dim } = heads;
        let k = &self.k[v_to_k[head] * key_dim..][..key_dim];
        let v = &self.v[head * value_dim..][..value_dim];
        let [decay, strength] = self.factors[head];
        let decays = self.decays.get(v_to_k[head] * key_dim..).unwrap_or_default();
        for (row, (memory, v)) in memory.chunks_exact_mut(key_dim).zip(v).enumerate() {
            if rule == LinearAttentionKind::KimiDeltaAttention {
                memory.iter_mut().zip(decays).for_each(|(x, decay)| *x *= decay);
            } else {
                for x in memory.iter_mut() {
                    *x *= decay;
                }
            }
            let change = match rule {
                LinearAttentionKind::GatedDeltaNet | LinearAttentionKind::KimiDeltaAttention => {
                    strength * (v - dot(memory, k))
                }
                LinearAttentionKind::Mamba2 => strength * v,
            };
            memory.iter_mut().zip(k).for_each(|(x, k)| *x += k * change);
            each(row, memory);
        }
    }
}

impl State {
    /// Rolls back the last `rows` of the latest step, and forgets how.
    pub(super) fn roll_back(&mut self, rows: usize) {
        let Some(undo) = self.undo.take() else {
            // Nothing of such layers is held here.
            assert!(self.memory.is_empty(), "a step with drafts keeps an undo log");
            return;
        };
        if rows == 0 {
            return;
        }
        let kept = undo.rows.len().checked_sub(rows).expect("rows of the latest step");
        (self.window, self.memory) = (undo.window, undo.memory);
        let Heads { key_dim, value_dim, .. } = undo.heads;
        for change in undo.rows.into_iter().take(kept) {
            let memories = self.memory.par_chunks_exact_mut(value_dim * key_dim).enumerate();
            memories.for_each(|(head, memory)| change.apply(&undo.heads, head, memory, |_, _| ()));
            self.window.push(change.inputs);
            self.window.remove(0);
        }
    }
}

/// Runs the rows of one sequence, `[rows, value_heads · value_dim]` to `out`.
fn run(
    inputs: &LinearAttentionInputs<'_, Tensor>,
    SequenceRows { rows, drafts }: SequenceRows,
    state: &mut State,
    params: &Params<'_>,
    out: &mut [f32],
) {
    let spec::LinearAttention { key_dim, value_dim, kernel, .. } = *params.spec;
    let [key_dim, value_dim, kernel] = [key_dim, value_dim, kernel].map(|size| size as usize);
    let keys = params.key_heads * key_dim;
    let value_heads = params.v_to_k.len();
    let values = value_heads * value_dim;
    if state.memory.is_empty() {
        state.memory = vec![0.0; values * key_dim];
        state.window = vec![vec![0.0; 2 * keys + values]; kernel - 1];
    }
    let rule = params.spec.kind;
    let heads = Heads { rule, v_to_k: params.v_to_k.to_vec(), key_dim, value_dim };
    state.undo = (drafts > 0).then(|| UndoLog {
        window: state.window.clone(),
        memory: state.memory.clone(),
        rows: Vec::with_capacity(rows.len()),
        heads: heads.clone(),
    });
    for (row, out) in rows.zip(out.chunks_exact_mut(values)) {
        let of = |x: &'_ Tensor| row * x.width..(row + 1) * x.width;
        let mut inputs_of_row = Vec::with_capacity(2 * keys + values);
        for part in [inputs.q, inputs.k, inputs.v] {
            inputs_of_row.extend_from_slice(&part.values[of(part)]);
        }
        let kept = state.undo.is_some().then(|| inputs_of_row.clone());
        let mut mixed = convolve(&mut state.window, inputs_of_row, params, [keys, keys, values]);
        let (q_and_k, v) = mixed.split_at_mut(2 * keys);
        if rule != LinearAttentionKind::Mamba2 {
            q_and_k.chunks_exact_mut(key_dim).for_each(to_unit_length);
        }
        let (q, k) = q_and_k.split_at(keys);
        let a = &inputs.a.values[of(inputs.a)];
        let beta = beta(params, row);
        let change = Change {
            inputs: kept.unwrap_or_default(),
            k: k.to_vec(),
            v: v.to_vec(),
            factors: (0..value_heads).map(|head| factors(head, a, beta, params)).collect(),
            decays: if rule == LinearAttentionKind::KimiDeltaAttention {
                channel_decays(a, params)
            } else {
                Vec::new()
            },
        };
        state
            .memory
            .par_chunks_exact_mut(value_dim * key_dim)
            .zip(out.par_chunks_exact_mut(value_dim))
            .enumerate()
            .for_each(|(head, (memory, out))| {
                let q = &q[params.v_to_k[head] * key_dim..][..key_dim];
                let v = &v[head * value_dim..][..value_dim];
                change.apply(&heads, head, memory, |row, memory| {
                    out[row] = result(params, head, dot(memory, q), v[row]);
                });
            });
        if let Some(undo) = &mut state.undo {
            undo.rows.push(change);
        }
        let z = &inputs.z.values[of(inputs.z)];
        let eps = params.spec.eps.0;
        match params.update {
            StateUpdate::GatedDeltaNet { norm, .. } => gate(out, z, norm, eps, |z| z * sigmoid(z)),
            StateUpdate::Kda { norm, .. } => gate(out, z, norm, eps, sigmoid),
            StateUpdate::Mamba2 { norm, .. } => mamba2::gate(out, z, norm, params),
        }
    }
}

/// Of a row, how strongly each value head's memory changes by the delta rule, before the sigmoid.
fn beta<'a>(params: &Params<'a>, row: usize) -> &'a [f32] {
    match params.update {
        StateUpdate::GatedDeltaNet { beta, .. } | StateUpdate::Kda { beta, .. } => {
            &beta.values[row * beta.width..(row + 1) * beta.width]
        }
        StateUpdate::Mamba2 { .. } => &[],
    }
}

/// The decay of a value head's memory, and how strongly it changes. `a`, and `beta` by the delta rule,
/// have a value for each value head.
fn factors(head: usize, a: &[f32], beta: &[f32], params: &Params<'_>) -> [f32; 2] {
    if params.spec.kind == LinearAttentionKind::KimiDeltaAttention {
        return [1.0, sigmoid(beta[head])];
    }
    let time = softplus(a[head] + params.dt_bias[head]);
    let decay = exp(-exp(params.a_log[head]) * time);
    match params.spec.kind {
        LinearAttentionKind::Mamba2 => [decay, time],
        _ => [decay, sigmoid(beta[head])],
    }
}

/// Decay of each channel of each key head, in KDA.
fn channel_decays(a: &[f32], params: &Params<'_>) -> Vec<f32> {
    let key_dim = params.spec.key_dim as usize;
    let fading = a.iter().zip(params.dt_bias).enumerate();
    let decay = |(at, (a, bias)): (usize, (&f32, &f32))| {
        let rate = exp(params.a_log[at / key_dim]);
        exp(match params.spec.decay_limit {
            None => -rate * softplus(a + bias),
            Some(limit) => -limit.0 * sigmoid(rate * (a + bias)),
        })
    };
    fading.map(decay).collect()
}

/// A value head's result, from what its query finds in the memory.
fn result(params: &Params<'_>, head: usize, found: f32, v: f32) -> f32 {
    match params.update {
        StateUpdate::GatedDeltaNet { .. } | StateUpdate::Kda { .. } => {
            found * (1.0 / (params.spec.key_dim as f32).sqrt())
        }
        StateUpdate::Mamba2 { skip, .. } => found + skip[head] * v,
    }
}

fn to_unit_length(head: &mut [f32]) {
    let length = (sum(&head.iter().map(|x| x * x).collect::<Vec<_>>()) + LENGTH_EPS).sqrt();
    for x in head {
        *x /= length;
    }
}

/// Each channel's sum over the last tokens, through `silu`; the window moves on by one.
fn convolve(
    window: &mut Vec<Vec<f32>>,
    newest: Vec<f32>,
    params: &Params<'_>,
    widths: [usize; 3],
) -> Vec<f32> {
    window.push(newest);
    let kernel = window.len();
    let mut out = Vec::with_capacity(widths.iter().sum());
    for (part, (weights, width)) in params.convolutions.iter().zip(widths).enumerate() {
        let first = out.len();
        let bias = params.conv_biases.map(|biases| biases[part]);
        for channel in 0..width {
            let weights = &weights[channel * kernel..][..kernel];
            let sum = weights
                .iter()
                .zip(window.iter())
                .fold(0.0_f32, |sum, (weight, inputs)| sum + weight * inputs[first + channel]);
            let sum = sum + bias.map_or(0.0, |bias| bias[channel]);
            out.push(sum * sigmoid(sum));
        }
    }
    window.remove(0);
    out
}

/// Normalises each head's result, and lets as much of it through as `z` says.
fn gate(out: &mut [f32], z: &[f32], gain: &[f32], eps: f32, open: impl Fn(f32) -> f32) {
    let width = gain.len();
    for (head, z) in out.chunks_exact_mut(width).zip(z.chunks_exact(width)) {
        let squares: Vec<f32> = head.iter().map(|x| x * x).collect();
        let factor = 1.0 / (sum(&squares) / width as f32 + eps).sqrt();
        for ((x, gain), z) in head.iter_mut().zip(gain).zip(z) {
            *x = *gain * (*x * factor) * open(*z);
        }
    }
}
