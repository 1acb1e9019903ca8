//! One row of activations: the weights come once from memory, at the speed of memory.
//!
//! One weight row after the other is read in order. Sixteen spans at a time become sixteen exact
//! sums, one in each lane of a vector: pairs of vectors are folded into one, which costs less
//! than to convert and scale every block.

use std::arch::x86_64::*;

use super::{
    block::{BF16, F16, F32, Factors, fetch_behind, kind_of, line, load, nibbles, six_bits},
    trees,
};
use crate::{
    quantized::{Line, Order, Packed, Quantized},
    team::Columns,
};

/// The one row of `x`, in [`crate::quantized::Order::Spans`], with the weight rows of `out`.
pub(crate) fn row(weights: &Packed<'_>, x: &Quantized, out: &mut Columns<'_>) {
    assert!(
        super::is_available() && x.fits(weights, Order::Spans),
        "activations for these weights"
    );
    assert!(x.rows() == 1 && out.rows() == 1, "one row");
    let range = out.range();
    let out = out.row(0);
    macro_rules! by_form {
        ($(($bits:literal, $span:literal, $blocks:literal)),*) => {
            match (weights.bits, weights.span, kind_of(weights)) {
                // SAFETY: the processor has been asked.
                $(($bits, $span, F32) => unsafe {
                    all::<$bits, $blocks, { $span * 2 * $bits }, { $span / 4 }, F32>(
                        weights, x, range.start, out)
                },
                // SAFETY: as above.
                ($bits, $span, F16) => unsafe {
                    all::<$bits, $blocks, { $span * 2 * $bits }, { $span / 4 }, F16>(
                        weights, x, range.start, out)
                },
                // SAFETY: as above.
                ($bits, $span, BF16) => unsafe {
                    all::<$bits, $blocks, { $span * 2 * $bits }, { $span / 4 }, BF16>(
                        weights, x, range.start, out)
                },)*
                other => unreachable!("the constructor admits no {other:?}"),
            }
        };
    }
    // Bits, inputs of a span, blocks of 16 spans.
    by_form!((4, 32, 4), (4, 64, 8), (6, 32, 8), (6, 64, 16), (8, 32, 8), (8, 64, 16));
}

/// Products with the weight rows from `first` on. A whole run has `BYTES` bytes in `BLOCKS`
/// blocks and meets `LINES` lines of activations; scales are of type `KIND`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,f16c")]
fn all<
    const BITS: usize,
    const BLOCKS: usize,
    const BYTES: usize,
    const LINES: usize,
    const KIND: u8,
>(
    weights: &Packed<'_>,
    x: &Quantized,
    first: usize,
    out: &mut [f32],
) {
    let (values, scales, sums) = (x.values(0).as_chunks::<LINES>().0, x.scales(0), x.sums(0));
    let row_bytes = weights.row_bytes();
    for (first, out) in (first..).step_by(16).zip(out.chunks_mut(16)) {
        // The lanes of 16 elements are added together, which takes a third of the steps.
        let mut elements = [_mm512_setzero_ps(); 16];
        for (lanes, row) in elements[..out.len()].iter_mut().zip(first..) {
            let (runs, rest) = weights.bytes[row * row_bytes..][..row_bytes].as_chunks::<BYTES>();
            let mut sum = _mm512_setzero_ps();
            let of_x = values.iter().zip(scales).zip(sums);
            for ((run, packed), ((values, x_scale), x_sum)) in runs.iter().enumerate().zip(of_x) {
                fetch_behind::<BYTES>(packed);
                let dots = dots::<BITS, BLOCKS, LINES, false>(packed, values);
                let factors = Factors::load::<KIND>(weights, row, run);
                sum = factors.add(sum, dots, x_scale, x_sum);
            }
            if !rest.is_empty() {
                let run = runs.len();
                let dots = dots::<BITS, BLOCKS, LINES, true>(rest, &values[run]);
                let factors = Factors::load::<KIND>(weights, row, run);
                sum = factors.add(sum, dots, &scales[run], &sums[run]);
            }
            *lanes = sum;
        }
        out.copy_from_slice(&trees(&elements)[..out.len()]);
    }
}

/// The exact dot products of the spans of a run, in the spans' order.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
fn dots<const BITS: usize, const BLOCKS: usize, const LINES: usize, const ENDS: bool>(
    run: &[u8],
    values: &[Line; LINES],
) -> __m512i {
    const { assert!(BLOCKS == 4 || BLOCKS == 8 || BLOCKS == 16) };
    let mut fours = [_mm512_setzero_si512(); 4];
    for (quad, fours) in fours[..BLOCKS / 4].iter_mut().enumerate() {
        let mut dots = [_mm512_setzero_si512(); 4];
        for (index, dot) in dots.iter_mut().enumerate() {
            let number = quad * 4 + index;
            let block = load::<BITS, ENDS>(run, number * super::block::bytes_of(BITS));
            *dot = match BITS {
                4 => {
                    let [even, odd] = nibbles(block);
                    let dot = _mm512_dpbusd_epi32(*dot, even, line(&values[2 * number]));
                    _mm512_dpbusd_epi32(dot, odd, line(&values[2 * number + 1]))
                }
                6 => _mm512_dpbusd_epi32(*dot, six_bits(block), line(&values[number])),
                _ => _mm512_dpbusd_epi32(*dot, block, line(&values[number])),
            };
        }
        *fours = fold_four(dots);
    }
    in_order::<BLOCKS>(fours)
}

/// Adds the four words of each quarter: word `i` of a quarter of the result is the sum of that
/// quarter of vector `i`.
#[inline]
#[target_feature(enable = "avx512f")]
fn fold_four(dots: [__m512i; 4]) -> __m512i {
    let [a, b, c, d] = dots;
    let ab = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    let cd = _mm512_add_epi32(_mm512_unpacklo_epi64(c, d), _mm512_unpackhi_epi64(c, d));
    let (ab, cd) = (_mm512_castsi512_ps(ab), _mm512_castsi512_ps(cd));
    let even = _mm512_castps_si512(_mm512_shuffle_ps::<0b10_00_10_00>(ab, cd));
    let odd = _mm512_castps_si512(_mm512_shuffle_ps::<0b11_01_11_01>(ab, cd));
    _mm512_add_epi32(even, odd)
}

/// Adds quarters 0 and 1, and 2 and 3, of two vectors.
#[inline]
#[target_feature(enable = "avx512f")]
fn fold_quarters(a: __m512i, b: __m512i) -> __m512i {
    let even = _mm512_shuffle_i32x4::<0b10_00_10_00>(a, b);
    let odd = _mm512_shuffle_i32x4::<0b11_01_11_01>(a, b);
    _mm512_add_epi32(even, odd)
}

/// From folded fours to one sum per span, in the order of spans. A span has as many words of a
/// block as there are blocks in a run.
#[inline]
#[target_feature(enable = "avx512f")]
fn in_order<const BLOCKS: usize>(fours: [__m512i; 4]) -> __m512i {
    match BLOCKS {
        // Quarter t, word i: block i, span 4i + t.
        4 => {
            let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            _mm512_permutexvar_epi32(order, fours[0])
        }
        // Quarter 2 · quad + half, word i: block i of the quad, span 8 · quad + 2i + half.
        8 => {
            let order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
            _mm512_permutexvar_epi32(order, fold_quarters(fours[0], fours[1]))
        }
        _ => fold_quarters(fold_quarters(fours[0], fours[1]), fold_quarters(fours[2], fours[3])),
    }
}
