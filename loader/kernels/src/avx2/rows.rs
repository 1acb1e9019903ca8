//! Few rows of activations: as on AVX-512, with half as wide vectors and products of bytes in
//! two steps.
//!
//! Bytes are multiplied unsigned with signed and added in pairs as 16-bit numbers, which 8-bit
//! weights would overflow: those are taken less 128 and the sum of activations is put back.

use std::arch::x86_64::*;

use super::{floats_at, tree};
use crate::{
    quantized::{ActivationLayout, Line, Packed, Quantized, SPANS, lines_of_run},
    team::Columns,
};

/// Bytes ahead that are fetched into the L2 cache.
const FAR: usize = 4096;
/// Bytes ahead that are fetched into the L1 cache.
const NEAR: usize = 768;

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

#[target_feature(enable = "avx2,fma,f16c")]
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
#[target_feature(enable = "avx2,fma,f16c")]
fn element<const BITS: usize, const SPAN: usize>(
    weights: &Packed<'_>,
    x: &Quantized,
    row: usize,
    m: usize,
) -> f32 {
    let row_bytes = weights.row_bytes();
    let bytes = &weights.bytes[row * row_bytes..][..row_bytes];
    let (values, scales, sums) = (x.values(m), x.scales(m), x.sums(m));
    let mut lanes = [_mm256_setzero_ps(); 2];
    for run in 0..scales.len() {
        let values = &values[lines_of_run(run, SPAN)];
        for (half, lane) in lanes.iter_mut().enumerate() {
            let first = run * SPANS + half * 8;
            let held = weights.spans.saturating_sub(first).min(8);
            if held == 0 {
                continue;
            }
            let mut dots = [_mm256_setzero_si256(); 8];
            for (index, dot) in dots[..held].iter_mut().enumerate() {
                let span = first + index;
                let packed = &bytes[span * SPAN / 8 * BITS..][..SPAN / 8 * BITS];
                let far = packed.as_ptr().wrapping_add(FAR);
                let near = packed.as_ptr().wrapping_add(NEAR);
                _mm_prefetch::<_MM_HINT_T1>(far.cast());
                _mm_prefetch::<_MM_HINT_T0>(near.cast());
                *dot = span_dots::<BITS, SPAN>(packed, values, half * 8 + index);
            }
            let mut dots = fold_eight(dots);
            if BITS == 8 {
                let totals = load_words(&x.totals(m)[first..first + 8]);
                dots = _mm256_add_epi32(dots, _mm256_slli_epi32::<7>(totals));
            }
            let (scale, bias) = factors(weights, row, first, held);
            let x_scale = load(&scales[run].0[half * 8..]);
            let x_sum = load(&sums[run].0[half * 8..]);
            *lane = _mm256_fmadd_ps(bias, x_sum, *lane);
            let scale = _mm256_mul_ps(scale, x_scale);
            *lane = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots), scale, *lane);
        }
    }
    tree(lanes)
}

#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn load(from: &[f32]) -> __m256 {
    let from = &from[..8];
    // SAFETY: the slice above is as long as the vector.
    unsafe { _mm256_loadu_ps(from.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn load_words(from: &[i32]) -> __m256i {
    let from = &from[..8];
    // SAFETY: the slice above is as long as the vector.
    unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_16(from: &[u8]) -> __m128i {
    let from = &from[..16];
    // SAFETY: the slice above is as long as the vector.
    unsafe { _mm_loadu_si128(from.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_32(from: &[u8]) -> __m256i {
    let from = &from[..32];
    // SAFETY: the slice above is as long as the vector.
    unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_values(from: &[i8]) -> __m256i {
    let from = &from[..32];
    // SAFETY: the slice above is as long as the vector.
    unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_values_16(from: &[i8]) -> __m128i {
    let from = &from[..16];
    // SAFETY: the slice above is as long as the vector.
    unsafe { _mm_loadu_si128(from.as_ptr().cast()) }
}

/// Scales and biases of eight spans, zero beyond the row's end.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn factors(weights: &Packed<'_>, row: usize, first: usize, held: usize) -> (__m256, __m256) {
    let per_scale = weights.spans_per_scale;
    let at = row * weights.row_scales() + first / per_scale;
    let held = held / per_scale;
    let scale = floats_at(weights.scales, at, held);
    let bias = floats_at(weights.biases, at, held);
    if per_scale == 1 {
        return (scale, bias);
    }
    let twice = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
    (_mm256_permutevar8x32_ps(scale, twice), _mm256_permutevar8x32_ps(bias, twice))
}

/// Eight words whose sum is the product of a span, which is number `span` of a run with `values`.
#[inline]
#[target_feature(enable = "avx2")]
fn span_dots<const BITS: usize, const SPAN: usize>(
    packed: &[u8],
    values: &[Line],
    span: usize,
) -> __m256i {
    let ones = _mm256_set1_epi16(1);
    let first = span * SPAN;
    if BITS == 4 {
        let (even, odd, at) =
            (&values[first / 128 * 2].0, &values[first / 128 * 2 + 1].0, first % 128 / 2);
        let low = _mm256_set1_epi8(15);
        if SPAN == 32 {
            let block = load_16(packed);
            let high = _mm_srli_epi16::<4>(block);
            let both = _mm256_and_si256(_mm256_set_m128i(high, block), low);
            let x = _mm256_set_m128i(load_values_16(&odd[at..]), load_values_16(&even[at..]));
            return _mm256_madd_epi16(_mm256_maddubs_epi16(both, x), ones);
        }
        let block = load_32(packed);
        let high = _mm256_and_si256(_mm256_srli_epi16::<4>(block), low);
        let even = _mm256_maddubs_epi16(_mm256_and_si256(block, low), load_values(&even[at..]));
        let odd = _mm256_maddubs_epi16(high, load_values(&odd[at..]));
        // 4 · 15 · 127 fits 16 bits.
        return _mm256_madd_epi16(_mm256_add_epi16(even, odd), ones);
    }
    let x = &values[first / 64].0[first % 64..];
    let mut sum = _mm256_setzero_si256();
    for part in 0..SPAN / 32 {
        let packed = &packed[part * 4 * BITS..][..4 * BITS];
        let x = load_values(&x[part * 32..]);
        let products = if BITS == 6 {
            // 2 · 63 · 127 fits 16 bits.
            _mm256_maddubs_epi16(six_bits(packed), x)
        } else {
            let less_128 = _mm256_xor_si256(load_32(packed), _mm256_set1_epi8(-128));
            // 2 · 128 · 127 fits 16 bits.
            _mm256_maddubs_epi16(_mm256_abs_epi8(less_128), _mm256_sign_epi8(x, less_128))
        };
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(products, ones));
    }
    sum
}

/// 24 bytes to 32 weights: three bytes go to each word, whose four fields are then moved to the
/// word's bytes.
#[inline]
#[target_feature(enable = "avx2")]
fn six_bits(packed: &[u8]) -> __m256i {
    let both = _mm256_set_m128i(load_16(&packed[8..]), load_16(packed));
    let spread = _mm256_setr_epi8(
        0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1, // from byte 0
        4, 5, 6, -1, 7, 8, 9, -1, 10, 11, 12, -1, 13, 14, 15, -1, // from byte 12
    );
    let fields = _mm256_shuffle_epi8(both, spread);
    let field = |mask: i32| _mm256_and_si256(fields, _mm256_set1_epi32(mask));
    let low = _mm256_or_si256(field(0x3f), _mm256_slli_epi32::<2>(field(0xfc0)));
    let high = _mm256_or_si256(
        _mm256_slli_epi32::<4>(field(0x3_f000)),
        _mm256_slli_epi32::<6>(field(0xfc_0000)),
    );
    _mm256_or_si256(low, high)
}

/// The sums of eight vectors, in order.
#[inline]
#[target_feature(enable = "avx2")]
fn fold_eight(dots: [__m256i; 8]) -> __m256i {
    let [a, b, c, d, e, f, g, h] = dots;
    let low = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
    let high = _mm256_hadd_epi32(_mm256_hadd_epi32(e, f), _mm256_hadd_epi32(g, h));
    let left = _mm256_permute2x128_si256::<0x20>(low, high);
    let right = _mm256_permute2x128_si256::<0x31>(low, high);
    _mm256_add_epi32(left, right)
}
