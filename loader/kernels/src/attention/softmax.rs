//! The softmax of query heads, carried on from block to block of keys.

#![expect(clippy::inline_always, reason = "compiled within the function of each platform")]

use super::{
    KEYS_PER_BLOCK, KvBlock,
    ahead::Ahead,
    integers::{self, STEP, Scaled},
    keys::{self, Line},
    stored::{Bf16, F16, F32, Q8, Rows, Stored},
    values,
    vectors::Vectors,
};
use crate::{
    exp::{exp, exp_of_negative, tanh},
    floats::Floats,
    lanes::{LANES, tree},
};

/// Room for the sums of one block.
#[derive(Default)]
pub(super) struct Sums {
    scores: Vec<f32>,
    partial: Vec<f32>,
}

/// The softmax of one query head, as far as keys have been seen.
#[derive(Clone, Copy)]
pub(super) struct Softmax {
    pub(super) maximum: f32,
    pub(super) total: f32,
}

/// Keys and values `[count, width]` that one row sees, and what is fetched while either are read.
pub(super) struct Block<'a> {
    pub(super) keys: KvBlock<'a>,
    pub(super) values: KvBlock<'a>,
    pub(super) count: usize,
    pub(super) width: usize,
    pub(super) ahead: [Ahead; 2],
}

/// Query heads of one row, times the scale of scores, with keys and values of a block.
#[inline(always)]
pub(super) fn one_block<V: Vectors>(
    q: &[Line],
    block: Block<'_>,
    softcap: Option<f32>,
    softmax: &mut [Softmax],
    sums: &mut Sums,
    out: &mut [f32],
) {
    let Block { keys, values, count, width, ahead: [ahead_of_keys, ahead_of_values] } = block;
    let heads = softmax.len();
    let head_dim = out.len() / heads;
    sums.scores.resize(heads * KEYS_PER_BLOCK, 0.0);
    sums.partial.resize(heads * width, 0.0);
    let scores = &mut sums.scores[..heads * KEYS_PER_BLOCK];
    let partial = &mut sums.partial[..heads * width];
    products::<V>(q, keys, width, ahead_of_keys, scores);
    for ((scores, softmax), out) in
        scores.chunks_exact_mut(KEYS_PER_BLOCK).zip(softmax).zip(out.chunks_exact_mut(head_dim))
    {
        let scores = &mut scores[..count];
        if let Some(cap) = softcap {
            for score in scores.iter_mut() {
                *score = cap * tanh(*score / cap);
            }
        }
        let raised = largest::<V>(scores, softmax.maximum);
        // Nothing has been summed before the first block, so the factor's value is irrelevant.
        let factor = exp_of_negative(softmax.maximum - raised);
        for score in scores.iter_mut() {
            *score = exp_of_negative(*score - raised);
        }
        softmax.total = softmax.total.mul_add(factor, sum::<V>(scores));
        for out in out.iter_mut() {
            *out *= factor;
        }
        softmax.maximum = raised;
    }
    weighted_sums::<V>(scores, values, width, ahead_of_values, partial);
    for (out, partial) in out.chunks_exact_mut(head_dim).zip(partial.chunks_exact(width)) {
        for (out, partial) in out.iter_mut().zip(partial) {
            *out += partial;
        }
    }
}

/// `q · key` of each query head with each key.
#[inline(always)]
pub(super) fn products<V: Vectors>(
    q: &[Line],
    keys: KvBlock<'_>,
    width: usize,
    ahead: Ahead,
    scores: &mut [f32],
) {
    match keys {
        KvBlock::Floats(Floats::F32(keys)) => {
            keys::products::<V, F32>(q, plain(keys, width), ahead, scores);
        }
        KvBlock::Floats(Floats::F16(keys)) => {
            keys::products::<V, F16>(q, plain(keys, width), ahead, scores);
        }
        KvBlock::Floats(Floats::BF16(keys)) => {
            keys::products::<V, Bf16>(q, plain(keys, width), ahead, scores);
        }
        KvBlock::Q8 { values: numbers, scales } if width.is_multiple_of(STEP) => {
            integers::products::<V>(q, Scaled { numbers, scales, width }, ahead, scores);
        }
        KvBlock::Q8 { values: numbers, scales } => {
            keys::products::<V, Q8>(q, Rows { numbers, scales, width }, ahead, scores);
        }
    }
}

/// `Σ weight · value` of each query head.
#[inline(always)]
fn weighted_sums<V: Vectors>(
    weights: &[f32],
    values: KvBlock<'_>,
    width: usize,
    ahead: Ahead,
    sums: &mut [f32],
) {
    match values {
        KvBlock::Floats(Floats::F32(values)) => {
            values::weighted_sums::<V, F32>(weights, plain(values, width), ahead, sums);
        }
        KvBlock::Floats(Floats::F16(values)) => {
            values::weighted_sums::<V, F16>(weights, plain(values, width), ahead, sums);
        }
        KvBlock::Floats(Floats::BF16(values)) => {
            values::weighted_sums::<V, Bf16>(weights, plain(values, width), ahead, sums);
        }
        KvBlock::Q8 { values: numbers, scales } if width.is_multiple_of(STEP) => {
            integers::weighted_sums::<V>(weights, Scaled { numbers, scales, width }, ahead, sums);
        }
        KvBlock::Q8 { values: numbers, scales } => {
            values::weighted_sums::<V, Q8>(weights, Rows { numbers, scales, width }, ahead, sums);
        }
    }
}

/// The largest of `scores` and `least`, sixteen at a time: the order makes no difference.
#[inline(always)]
fn largest<V: Vectors>(scores: &[f32], least: f32) -> f32 {
    let mut lanes = [least; LANES];
    let mut vector = V::load(&lanes);
    let (blocks, rest) = scores.as_chunks();
    for block in blocks {
        vector = V::max(V::load(block), vector);
    }
    V::store(vector, &mut lanes);
    for (lane, score) in lanes.iter_mut().zip(rest) {
        *lane = if *score > *lane { *score } else { *lane };
    }
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] = lanes[lane].max(lanes[lane + width]);
        }
        width /= 2;
    }
    lanes[0]
}

/// As [`crate::lanes::sum`].
#[inline(always)]
fn sum<V: Vectors>(weights: &[f32]) -> f32 {
    let mut vector = V::splat(0.0);
    let (blocks, rest) = weights.as_chunks();
    for block in blocks {
        vector = V::add(vector, V::load(block));
    }
    let mut lanes = [0.0; LANES];
    V::store(vector, &mut lanes);
    for (lane, weight) in lanes.iter_mut().zip(rest) {
        *lane += weight;
    }
    tree(lanes)
}

/// Rows without scales.
const fn plain<S: Stored>(numbers: &[S::Number], width: usize) -> Rows<'_, S> {
    Rows { numbers, scales: &[], width }
}

/// Divides by the softmax's sum.
#[inline(always)]
pub(super) fn finish(softmax: Softmax, sink: Option<f32>, out: &mut [f32]) {
    let Softmax { maximum, mut total } = softmax;
    if let Some(sink) = sink {
        // A sink far above all scores leaves nothing of them; the sum is taken at its height.
        let raised = maximum.max(sink);
        let factor = exp(maximum - raised);
        total = total * factor + exp(sink - raised);
        for out in out.iter_mut() {
            *out *= factor;
        }
    }
    for out in out.iter_mut() {
        *out /= total;
    }
}
