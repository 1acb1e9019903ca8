//! Few rows of activations: as on AVX-512, with vectors of a quarter and signed products, so
//! 8-bit weights are taken less 128 and the sum of activations is put back.

#![allow(clippy::wildcard_imports, reason = "the instructions' names, as their manual has them")]

use std::arch::aarch64::*;

use super::sdot;
use crate::{
    lanes::tree,
    quantized::{ActivationLayout, Line, Packed, Quantized, SPANS, lines_of_run},
    team::Columns,
};

/// As [`crate::portable::rows`].
pub(crate) fn rows(weights: &Packed<'_>, x: &Quantized, out: &mut Columns<'_>) {
    assert!(
        super::is_available() && x.fits(weights, ActivationLayout::Spans),
        "activations for these weights"
    );
    assert!(out.range().end <= weights.rows() && out.rows() == x.rows(), "rows of the weights");
    macro_rules! by_form {
        ($(($bits:literal, $span:literal)),*) => {
            match (weights.bits, weights.span) {
                // SAFETY: the processor has been asked.
                $(($bits, $span) => unsafe { all_rows::<$bits, $span>(weights, x, out) },)*
                other => unreachable!("the constructor admits no {other:?}"),
            }
        };
    }
    by_form!((4, 32), (4, 64), (6, 32), (6, 64), (8, 32), (8, 64));
}

#[target_feature(enable = "neon,dotprod")]
fn all_rows<const BITS: usize, const SPAN: usize>(
    weights: &Packed<'_>,
    x: &Quantized,
    out: &mut Columns<'_>,
) {
    for (place, row) in out.range().enumerate() {
        for m in 0..x.rows() {
            out.row(m)[place] = element::<BITS, SPAN>(weights, x, row, m);
        }
    }
}

#[inline]
#[target_feature(enable = "neon,dotprod")]
fn element<const BITS: usize, const SPAN: usize>(
    weights: &Packed<'_>,
    x: &Quantized,
    row: usize,
    m: usize,
) -> f32 {
    let row_bytes = weights.row_bytes();
    let bytes = &weights.bytes[row * row_bytes..][..row_bytes];
    let (values, scales, sums) = (x.values(m), x.scales(m), x.sums(m));
    let mut lanes = [vdupq_n_f32(0.0); 4];
    for run in 0..scales.len() {
        let values = &values[lines_of_run(run, SPAN)];
        for (quarter, lane) in lanes.iter_mut().enumerate() {
            let first = run * SPANS + quarter * 4;
            let held = weights.spans.saturating_sub(first).min(4);
            let mut dots = [vdupq_n_s32(0); 4];
            for (index, dot) in dots[..held].iter_mut().enumerate() {
                let packed = &bytes[(first + index) * SPAN / 8 * BITS..][..SPAN / 8 * BITS];
                *dot = span_dots::<BITS, SPAN>(packed, values, quarter * 4 + index);
            }
            let [a, b, c, d] = dots;
            let mut dots = vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d));
            if BITS == 8 {
                let totals = load_words(&x.totals(m)[first..]);
                dots = vaddq_s32(dots, vshlq_n_s32::<7>(totals));
            }
            let [scale, bias] = factors(weights, row, first, held);
            let x_scale = load(&scales[run].0[quarter * 4..]);
            let x_sum = load(&sums[run].0[quarter * 4..]);
            *lane = vfmaq_f32(*lane, bias, x_sum);
            *lane = vfmaq_f32(*lane, vcvtq_f32_s32(dots), vmulq_f32(scale, x_scale));
        }
    }
    let mut all = [0.0; SPANS];
    for (all, lane) in all.as_chunks_mut::<4>().0.iter_mut().zip(lanes) {
        // SAFETY: the array is as long as the vector.
        unsafe { vst1q_f32(all.as_mut_ptr(), lane) }
    }
    tree(all)
}

#[inline]
#[target_feature(enable = "neon")]
fn load(from: &[f32]) -> float32x4_t {
    let from = &from[..4];
    // SAFETY: the slice above is as long as the vector.
    unsafe { vld1q_f32(from.as_ptr()) }
}

#[inline]
#[target_feature(enable = "neon")]
fn load_words(from: &[i32]) -> int32x4_t {
    let from = &from[..4];
    // SAFETY: the slice above is as long as the vector.
    unsafe { vld1q_s32(from.as_ptr()) }
}

#[inline]
#[target_feature(enable = "neon")]
fn load_bytes(from: &[u8]) -> uint8x16_t {
    let from = &from[..16];
    // SAFETY: the slice above is as long as the vector.
    unsafe { vld1q_u8(from.as_ptr()) }
}

#[inline]
#[target_feature(enable = "neon")]
fn load_values(from: &[i8]) -> int8x16_t {
    let from = &from[..16];
    // SAFETY: the slice above is as long as the vector.
    unsafe { vld1q_s8(from.as_ptr()) }
}

/// Scales and biases of four spans, zero beyond the row's end.
#[inline]
#[target_feature(enable = "neon")]
fn factors(weights: &Packed<'_>, row: usize, first: usize, held: usize) -> [float32x4_t; 2] {
    let (mut scales, mut biases) = ([0.0; 4], [0.0; 4]);
    for (span, (scale, bias)) in scales.iter_mut().zip(&mut biases).enumerate().take(held) {
        let at = row * weights.row_scales() + (first + span) / weights.spans_per_scale;
        *scale = weights.scales.get(at);
        *bias = weights.biases.get(at);
    }
    [load(&scales), load(&biases)]
}

/// Four words whose sum is the product of a span, which is number `span` of a run with `values`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn span_dots<const BITS: usize, const SPAN: usize>(
    packed: &[u8],
    values: &[Line],
    span: usize,
) -> int32x4_t {
    let mut sum = vdupq_n_s32(0);
    let first = span * SPAN;
    if BITS == 4 {
        let (even, odd) = (&values[first / 128 * 2].0, &values[first / 128 * 2 + 1].0);
        for part in 0..SPAN / 32 {
            let block = load_bytes(&packed[part * 16..]);
            let at = first % 128 / 2 + part * 16;
            let low = vreinterpretq_s8_u8(vandq_u8(block, vdupq_n_u8(15)));
            let high = vreinterpretq_s8_u8(vshrq_n_u8::<4>(block));
            sum = sdot(sum, low, load_values(&even[at..]));
            sum = sdot(sum, high, load_values(&odd[at..]));
        }
        return sum;
    }
    let x = &values[first / 64].0[first % 64..];
    for part in 0..SPAN / 16 {
        let weights = if BITS == 6 {
            six_bits(packed, part)
        } else {
            let block = load_bytes(&packed[part * 16..]);
            vreinterpretq_s8_u8(veorq_u8(block, vdupq_n_u8(0x80)))
        };
        sum = sdot(sum, weights, load_values(&x[part * 16..]));
    }
    sum
}

/// Twelve bytes to 16 weights: three bytes go to each word, whose four fields are then moved to
/// the word's bytes.
#[inline]
#[target_feature(enable = "neon")]
fn six_bits(packed: &[u8], part: usize) -> int8x16_t {
    const FROM_0: [u8; 16] = [0, 1, 2, 255, 3, 4, 5, 255, 6, 7, 8, 255, 9, 10, 11, 255];
    const FROM_4: [u8; 16] = [4, 5, 6, 255, 7, 8, 9, 255, 10, 11, 12, 255, 13, 14, 15, 255];
    // The last twelve bytes of a span are read with the four before them.
    let last = (part + 1) * 12 + 4 > packed.len();
    let block = load_bytes(&packed[part * 12 - if last { 4 } else { 0 }..]);
    let order = load_bytes(if last { &FROM_4 } else { &FROM_0 });
    let fields = vreinterpretq_u32_u8(vqtbl1q_u8(block, order));
    let field = |mask| vandq_u32(fields, vdupq_n_u32(mask));
    let low = vorrq_u32(field(0x3f), vshlq_n_u32::<2>(field(0xfc0)));
    let high = vorrq_u32(vshlq_n_u32::<4>(field(0x3_f000)), vshlq_n_u32::<6>(field(0xfc_0000)));
    vreinterpretq_s8_u32(vorrq_u32(low, high))
}
