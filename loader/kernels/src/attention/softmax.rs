//! The softmax of query heads, carried on from block to block of keys.

#![expect(clippy::inline_always, reason = "compiled within the function of each platform")]

use std::ops::Range;

use super::{
    HEADS_AT_ONCE, KEYS_PER_BLOCK, KvBlock,
    integers::{self, STEP, Scaled},
    keys::{self, Line},
    kv_types::{Bf16, F16, F32, Q8, Rows, Stored},
    lane_products,
    lane_types::FloatLanes,
    prefetch::Prefetch,
    queries::{InLanes, Queries, shorts},
    values,
    vectors::{self, Vectors},
};
use crate::{
    exp::{ROUNDER, exp, exp_of_negative, tanh},
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

/// Keys and values of `width` of which one row sees some, and what is fetched while either are
/// read.
pub(super) struct Block<'a> {
    pub(super) keys: KvBlock<'a>,
    pub(super) values: KvBlock<'a>,
    pub(super) seen: Range<usize>,
    pub(super) width: usize,
    pub(super) prefetch: [Prefetch; 2],
}

/// Query heads of one row, times the scale of scores, with keys and values of a block.
#[inline(always)]
pub(super) fn one_block<V: Vectors>(
    q: Queries<'_>,
    block: Block<'_>,
    softcap: Option<f32>,
    softmax: &mut [Softmax],
    sums: &mut Sums,
    out: &mut [f32],
) {
    let Block { keys, values, seen, width, prefetch: [prefetch_of_keys, prefetch_of_values] } =
        block;
    let heads = softmax.len();
    let head_dim = out.len() / heads;
    sums.scores.resize(heads * KEYS_PER_BLOCK, 0.0);
    sums.partial.resize(heads * width, 0.0);
    let scores = &mut sums.scores[..heads * KEYS_PER_BLOCK];
    let partial = &mut sums.partial[..heads * width];
    let at = (width, seen.clone());
    match q {
        Queries::Rows(q) => products::<V>(q, keys, width, prefetch_of_keys, scores),
        Queries::Lanes(q) => {
            products_in_lanes::<V>(q, keys, at.clone(), prefetch_of_keys, scores);
        }
    }
    for ((scores, softmax), out) in
        scores.chunks_exact_mut(KEYS_PER_BLOCK).zip(softmax).zip(out.chunks_exact_mut(head_dim))
    {
        let scores = &mut scores[seen.clone()];
        if let Some(cap) = softcap {
            for score in scores.iter_mut() {
                *score = cap * tanh(*score / cap);
            }
        }
        let raised = largest::<V>(scores, softmax.maximum);
        // Nothing has been summed before the first block, so the factor's value is irrelevant.
        let factor = exp_of_negative(softmax.maximum - raised);
        softmax.total = softmax.total.mul_add(factor, weights::<V>(scores, raised));
        for out in out.iter_mut() {
            *out *= factor;
        }
        softmax.maximum = raised;
    }
    match q {
        Queries::Rows(_) => weighted_sums::<V>(scores, values, width, prefetch_of_values, partial),
        Queries::Lanes(_) => {
            sums_in_lanes::<V>(scores, values, at, prefetch_of_values, partial);
        }
    }
    for (out, partial) in out.chunks_exact_mut(head_dim).zip(partial.chunks_exact(width)) {
        for (out, partial) in out.iter_mut().zip(partial) {
            *out += partial;
        }
    }
}

/// `q · key` of each query head with the keys that are seen.
#[inline(always)]
fn products_in_lanes<V: Vectors>(
    q: InLanes<'_>,
    keys: KvBlock<'_>,
    at: (usize, Range<usize>),
    prefetch: Prefetch,
    scores: &mut [f32],
) {
    match (keys, q) {
        (KvBlock::Floats(Floats::F32(keys)), InLanes::Floats(q)) => {
            lane_products::products::<V, F32>(q, keys, at, prefetch, scores);
        }
        (KvBlock::Floats(Floats::F16(keys)), InLanes::Floats(q)) => {
            lane_products::products::<V, F16>(q, keys, at, prefetch, scores);
        }
        (KvBlock::Floats(Floats::BF16(keys)), InLanes::Floats(q)) => {
            lane_products::products::<V, Bf16>(Bf16::factors(q), keys, at, prefetch, scores);
        }
        (KvBlock::Q8 { values: keys, scales }, InLanes::Integers { factors, worth }) => {
            let seen = at.1.clone();
            lane_products::products::<V, Q8>(factors.as_chunks().0, keys, at, prefetch, scores);
            for (scores, worth) in scores.chunks_exact_mut(KEYS_PER_BLOCK).zip(worth) {
                for (score, scale) in scores[seen.clone()].iter_mut().zip(&scales[seen.clone()]) {
                    *score *= worth * scale;
                }
            }
        }
        _ => unreachable!("queries of the keys' form"),
    }
}

/// `Σ weight · value` of each query head, over the values that are seen.
#[inline(always)]
fn sums_in_lanes<V: Vectors>(
    weights: &mut [f32],
    values: KvBlock<'_>,
    at: (usize, Range<usize>),
    prefetch: Prefetch,
    sums: &mut [f32],
) {
    match values {
        KvBlock::Floats(Floats::F32(values)) => {
            lane_products::weighted_sums::<V, F32>(weights, values, at, prefetch, sums);
        }
        KvBlock::Floats(Floats::F16(values)) => {
            lane_products::weighted_sums::<V, F16>(weights, values, at, prefetch, sums);
        }
        KvBlock::Floats(Floats::BF16(values)) => {
            lane_products::weighted_sums::<V, Bf16>(
                Bf16::factors(weights),
                values,
                at,
                prefetch,
                sums,
            );
        }
        KvBlock::Q8 { values, scales } => {
            let (width, seen) = at.clone();
            let mut integers = [[0; KEYS_PER_BLOCK / 2]; HEADS_AT_ONCE];
            let mut worth = [0.0; HEADS_AT_ONCE];
            let weights = weights.as_chunks_mut::<KEYS_PER_BLOCK>().0;
            let heads = weights.len();
            let mut held = [0.0; KEYS_PER_BLOCK];
            held[seen.clone()].copy_from_slice(&scales[seen.clone()]);
            for ((worth, weights), to) in worth.iter_mut().zip(weights).zip(&mut integers) {
                // Beside what is seen there are scores.
                weights[..seen.start].fill(0.0);
                weights[seen.end..].fill(0.0);
                *worth = rounded::<V>(weights, &held, to);
            }
            let factors = integers[..heads].as_flattened().as_chunks().0;
            lane_products::weighted_sums::<V, Q8>(factors, values, at, prefetch, sums);
            for (sums, worth) in sums.chunks_exact_mut(width).zip(worth) {
                for sum in sums {
                    *sum *= worth;
                }
            }
        }
    }
}

/// `q · key` of each query head with each key.
#[inline(always)]
pub(super) fn products<V: Vectors>(
    q: &[Line],
    keys: KvBlock<'_>,
    width: usize,
    prefetch: Prefetch,
    scores: &mut [f32],
) {
    match keys {
        KvBlock::Floats(Floats::F32(keys)) => {
            keys::products::<V, F32>(q, plain(keys, width), prefetch, scores);
        }
        KvBlock::Floats(Floats::F16(keys)) => {
            keys::products::<V, F16>(q, plain(keys, width), prefetch, scores);
        }
        KvBlock::Floats(Floats::BF16(keys)) => {
            keys::products::<V, Bf16>(q, plain(keys, width), prefetch, scores);
        }
        KvBlock::Q8 { values: elements, scales } if width.is_multiple_of(STEP) => {
            integers::products::<V>(q, Scaled { elements, scales, width }, prefetch, scores);
        }
        KvBlock::Q8 { values: elements, scales } => {
            keys::products::<V, Q8>(q, Rows { elements, scales, width }, prefetch, scores);
        }
    }
}

/// `Σ weight · value` of each query head.
#[inline(always)]
fn weighted_sums<V: Vectors>(
    weights: &[f32],
    values: KvBlock<'_>,
    width: usize,
    prefetch: Prefetch,
    sums: &mut [f32],
) {
    match values {
        KvBlock::Floats(Floats::F32(values)) => {
            values::weighted_sums::<V, F32>(weights, plain(values, width), prefetch, sums);
        }
        KvBlock::Floats(Floats::F16(values)) => {
            values::weighted_sums::<V, F16>(weights, plain(values, width), prefetch, sums);
        }
        KvBlock::Floats(Floats::BF16(values)) => {
            values::weighted_sums::<V, Bf16>(weights, plain(values, width), prefetch, sums);
        }
        KvBlock::Q8 { values: elements, scales } if width.is_multiple_of(STEP) => {
            integers::weighted_sums::<V>(
                weights,
                Scaled { elements, scales, width },
                prefetch,
                sums,
            );
        }
        KvBlock::Q8 { values: elements, scales } => {
            values::weighted_sums::<V, Q8>(
                weights,
                Rows { elements, scales, width },
                prefetch,
                sums,
            );
        }
    }
}

/// The largest of `scores` and `least`, sixteen at a time: the order makes no difference.
#[inline(always)]
fn largest<V: Vectors>(scores: &[f32], least: f32) -> f32 {
    /// So many do not wait for each other.
    const CHAINS: usize = 4;
    let mut vectors = [V::splat(least); CHAINS];
    let (blocks, rest) = scores.as_chunks();
    for blocks in blocks.chunks(CHAINS) {
        for (vector, block) in vectors.iter_mut().zip(blocks) {
            *vector = V::max(V::load(block), *vector);
        }
    }
    let [a, b, c, d] = vectors;
    let mut lanes = [least; LANES];
    V::store(V::max(V::max(a, b), V::max(c, d)), &mut lanes);
    for (lane, score) in lanes.iter_mut().zip(rest) {
        *lane = if *score > *lane { *score } else { *lane };
    }
    largest_of(lanes)
}

#[inline(always)]
fn largest_of(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] = lanes[lane].max(lanes[lane + width]);
        }
        width /= 2;
    }
    lanes[0]
}

/// Makes scores to weights, and returns their sum as [`crate::lanes::sum`] adds.
#[inline(always)]
fn weights<V: Vectors>(scores: &mut [f32], highest: f32) -> f32 {
    let (mut total, less) = (V::splat(0.0), V::splat(-highest));
    let (blocks, rest) = scores.as_chunks_mut();
    for block in blocks {
        let weights = vectors::exp_of_negative::<V>(V::add(V::load(block), less));
        V::store(weights, block);
        total = V::add(total, weights);
    }
    let mut lanes = [0.0; LANES];
    V::store(total, &mut lanes);
    for (lane, score) in lanes.iter_mut().zip(rest) {
        *score = exp_of_negative(*score - highest);
        *lane += *score;
    }
    tree(lanes)
}

/// Weights, none of which is below zero, times their `scales` as integers of 16 bits; returns what
/// one is worth. A NaN weight has made the softmax's sum none.
#[inline(always)]
fn rounded<V: Vectors>(
    weights: &[f32; KEYS_PER_BLOCK],
    scales: &[f32; KEYS_PER_BLOCK],
    to: &mut [i32; KEYS_PER_BLOCK / 2],
) -> f32 {
    const LIMIT: f32 = i16::MAX as f32;
    let mut scaled = [0.0; KEYS_PER_BLOCK];
    let each = weights.as_chunks().0.iter().zip(scales.as_chunks().0);
    for (scaled, (weights, scales)) in scaled.as_chunks_mut().0.iter_mut().zip(each) {
        V::store(V::mul(V::load(weights), V::load(scales)), scaled);
    }
    let largest = largest::<V>(&scaled, 0.0);
    let factor = V::splat(if largest > 0.0 { LIMIT / largest } else { 0.0 });
    for (to, scaled) in shorts(to).as_chunks_mut().0.iter_mut().zip(scaled.as_chunks().0) {
        let mut bits = [0.0; LANES];
        V::store(V::fma(V::load(scaled), factor, V::splat(ROUNDER)), &mut bits);
        *to = V::low_halves(&bits);
    }
    largest / LIMIT
}

/// Rows without scales.
const fn plain<S: Stored>(elements: &[S::Element], width: usize) -> Rows<'_, S> {
    Rows { elements, scales: &[], width }
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
