//! Few rows of activations: the weights come once from memory, at the speed of memory.
//!
//! One weight row after the other is read in order. Sixteen spans at a time become sixteen exact
//! sums, one in each lane of a vector: pairs of vectors are folded into one, which costs less
//! than to convert and scale every block. What is ahead is fetched in two steps, since arithmetic
//! between the loads keeps the processor from looking far enough itself.

use std::arch::x86_64::*;

use super::tree;
use crate::{
    floats::Floats,
    quantized::{Line, Packed, Quantized, SPANS, lines_of_run},
    team::Columns,
};

/// Bytes ahead that are fetched into the second cache.
pub(super) const FAR: usize = 4096;
/// Bytes ahead that are fetched into the first cache.
pub(super) const NEAR: usize = 768;
/// Spans ahead whose scales and biases are fetched.
const SCALES_AHEAD: usize = 2048;

/// Rows of activations that share an unpacked block.
const MOST_ROWS: usize = 4;

/// As [`crate::portable::rows`].
pub(crate) fn rows(weights: &Packed<'_>, x: &Quantized, out: &mut Columns<'_>) {
    assert!(super::is_available() && x.fits(weights), "activations for these weights");
    assert!(out.range().end <= weights.rows() && out.rows() == x.rows(), "rows of the weights");
    macro_rules! by_form {
        ($(($bits:literal, $span:literal, $blocks:literal)),*) => {
            match (weights.bits, weights.span) {
                // SAFETY: the processor has been asked; shapes have been compared above.
                $(($bits, $span) => unsafe { all_rows::<$bits, $blocks>(weights, x, out) },)*
                other => unreachable!("the constructor admits no {other:?}"),
            }
        };
    }
    // Bits, inputs of a span, 64-byte blocks of 16 spans.
    by_form!((4, 32, 4), (4, 64, 8), (6, 32, 8), (6, 64, 16), (8, 32, 8), (8, 64, 16));
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
fn all_rows<const BITS: usize, const BLOCKS: usize>(
    weights: &Packed<'_>,
    x: &Quantized,
    out: &mut Columns<'_>,
) {
    for (place, row) in out.range().enumerate() {
        let mut first = 0;
        while first < x.rows() {
            let held = (x.rows() - first).min(MOST_ROWS);
            let results = match held {
                1 => one_row::<BITS, BLOCKS, 1>(weights, row, x, first),
                2 => one_row::<BITS, BLOCKS, 2>(weights, row, x, first),
                3 => one_row::<BITS, BLOCKS, 3>(weights, row, x, first),
                _ => one_row::<BITS, BLOCKS, MOST_ROWS>(weights, row, x, first),
            };
            for (index, result) in results[..held].iter().enumerate() {
                out.row(first + index)[place] = *result;
            }
            first += held;
        }
    }
}

/// One weight row with `M` rows of activations.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
fn one_row<const BITS: usize, const BLOCKS: usize, const M: usize>(
    weights: &Packed<'_>,
    row: usize,
    x: &Quantized,
    first: usize,
) -> [f32; MOST_ROWS] {
    let row_bytes = weights.row_bytes();
    let bytes = &weights.bytes[row * row_bytes..][..row_bytes];
    let values: [&[Line]; M] = std::array::from_fn(|m| x.values(first + m));
    let scales: [_; M] = std::array::from_fn(|m| x.scales(first + m));
    let sums: [_; M] = std::array::from_fn(|m| x.sums(first + m));
    let mut lanes = [_mm512_setzero_ps(); M];
    let run_bytes = SPANS * weights.span_bytes();
    for run in 0..scales[0].len() {
        let (scale, bias) = factors(weights, row, run);
        let at = lines_of_run(run, weights.span);
        let values: [&[Line]; M] = std::array::from_fn(|m| &values[m][at.clone()]);
        let packed = &bytes[run * run_bytes..];
        let dots = if packed.len() >= run_bytes {
            run_dots::<BITS, BLOCKS, M, false>(&packed[..run_bytes], &values)
        } else {
            run_dots::<BITS, BLOCKS, M, true>(packed, &values)
        };
        for m in 0..M {
            let (x_scale, x_sum) = (load_lane(&scales[m][run].0), load_lane(&sums[m][run].0));
            lanes[m] = _mm512_fmadd_ps(bias, x_sum, lanes[m]);
            let scale = _mm512_mul_ps(scale, x_scale);
            lanes[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[m]), scale, lanes[m]);
        }
    }
    let mut results = [0.0; MOST_ROWS];
    for m in 0..M {
        results[m] = tree(lanes[m]);
    }
    results
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_lane(from: &[f32; SPANS]) -> __m512 {
    // SAFETY: the array is as long as the vector.
    unsafe { _mm512_loadu_ps(from.as_ptr()) }
}

/// Scales and biases of the spans of a run, zero beyond the row's end.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn factors(weights: &Packed<'_>, row: usize, run: usize) -> (__m512, __m512) {
    let per_scale = weights.spans_per_scale;
    let at = row * weights.row_scales() + run * SPANS / per_scale;
    let held = (weights.row_scales() - run * SPANS / per_scale).min(SPANS / per_scale);
    let scale = floats(weights.scales, at, held);
    let bias = floats(weights.biases, at, held);
    if per_scale == 1 {
        return (scale, bias);
    }
    let twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    (_mm512_permutexvar_ps(twice, scale), _mm512_permutexvar_ps(twice, bias))
}

/// `held` floats from `at` on, and zeros.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn floats(from: Floats<'_>, at: usize, held: usize) -> __m512 {
    let mask = ((1_u32 << held) - 1) as __mmask16;
    match from {
        Floats::F32(values) => {
            let values = &values[at..at + held];
            // SAFETY: the mask admits what the slice holds.
            unsafe { _mm512_maskz_loadu_ps(mask, values.as_ptr()) }
        }
        Floats::BF16(bits) => {
            let half = halves(&bits[at..at + held], mask);
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half)))
        }
        Floats::F16(bits) => _mm512_cvtph_ps(halves(&bits[at..at + held], mask)),
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn halves(bits: &[u16], mask: __mmask16) -> __m256i {
    _mm_prefetch::<_MM_HINT_T0>(bits.as_ptr().wrapping_add(SCALES_AHEAD).cast());
    // SAFETY: the mask admits what the slice holds.
    unsafe { _mm256_maskz_loadu_epi16(mask, bits.as_ptr().cast()) }
}

/// Bytes of a block.
const fn block_bytes(bits: usize) -> usize {
    if bits == 6 { 48 } else { 64 }
}

/// The exact dot products of the 16 spans of a run, in the spans' order; a run that is not
/// `WHOLE` ends early.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
fn run_dots<const BITS: usize, const BLOCKS: usize, const M: usize, const ENDS: bool>(
    packed: &[u8],
    values: &[&[Line]; M],
) -> [__m512i; M] {
    const { assert!(BLOCKS == 4 || BLOCKS == 8 || BLOCKS == 16) };
    let lines_per_block = if BITS == 4 { 2 } else { 1 };
    let mut fours = [[_mm512_setzero_si512(); 4]; M];
    for quad in 0..BLOCKS / 4 {
        let mut unpacked = [[_mm512_setzero_si512(); 2]; 4];
        for (index, unpacked) in unpacked.iter_mut().enumerate() {
            let at = (quad * 4 + index) * block_bytes(BITS);
            *unpacked = unpack::<BITS, ENDS>(packed, at);
        }
        for m in 0..M {
            let lines = &values[m][quad * 4 * lines_per_block..][..4 * lines_per_block];
            let mut dots = [_mm512_setzero_si512(); 4];
            for (index, dot) in dots.iter_mut().enumerate() {
                *dot = _mm512_dpbusd_epi32(
                    *dot,
                    unpacked[index][0],
                    load_line(&lines[index * lines_per_block]),
                );
                if BITS == 4 {
                    let odd = load_line(&lines[index * lines_per_block + 1]);
                    *dot = _mm512_dpbusd_epi32(*dot, unpacked[index][1], odd);
                }
            }
            fours[m][quad] = fold_four(dots);
        }
    }
    let mut sums = [_mm512_setzero_si512(); M];
    for m in 0..M {
        sums[m] = in_order::<BLOCKS>(fours[m]);
    }
    sums
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_line(from: &Line) -> __m512i {
    // SAFETY: a line is as long as the vector.
    unsafe { _mm512_loadu_si512(from.0.as_ptr().cast()) }
}

/// The weights of the block at `at` as bytes: of 4-bit weights those with even numbers, then
/// those with odd ones.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn unpack<const BITS: usize, const ENDS: bool>(packed: &[u8], at: usize) -> [__m512i; 2] {
    let held = packed.len().saturating_sub(at).min(block_bytes(BITS));
    let start = packed.as_ptr().wrapping_add(at);
    _mm_prefetch::<_MM_HINT_T1>(start.wrapping_add(FAR).cast());
    _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(NEAR).cast());
    let mask = if ENDS { low_bits(held) } else { low_bits(block_bytes(BITS)) };
    let block = if ENDS || BITS == 6 {
        // SAFETY: the mask admits the bytes that follow; a run that does not end early has
        // whole blocks.
        unsafe { _mm512_maskz_loadu_epi8(mask, start.cast()) }
    } else {
        // SAFETY: a run that does not end early has whole blocks.
        unsafe { _mm512_loadu_si512(start.cast()) }
    };
    match BITS {
        4 => {
            let low = _mm512_set1_epi8(15);
            let high = _mm512_and_si512(_mm512_srli_epi16::<4>(block), low);
            [_mm512_and_si512(block, low), high]
        }
        6 => [six_bits(block), _mm512_setzero_si512()],
        _ => [block, _mm512_setzero_si512()],
    }
}

const fn low_bits(count: usize) -> __mmask64 {
    if count >= 64 { u64::MAX } else { (1 << count) - 1 }
}

/// 48 bytes to 64 weights: six bytes go to each 8-byte word, whose fields are then picked.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn six_bits(block: __m512i) -> __m512i {
    const SPREAD: Line = {
        let mut spread = Line([0; 64]);
        let mut index = 0;
        while index < 64 {
            let byte = if index % 8 < 6 { index % 8 } else { 5 };
            spread.0[index] = (index / 8 * 6 + byte) as i8;
            index += 1;
        }
        spread
    };
    /// First bit of each field.
    const FIELDS: i64 = i64::from_le_bytes([0, 6, 12, 18, 24, 30, 36, 42]);
    let spread = _mm512_permutexvar_epi8(load_line(&SPREAD), block);
    let fields = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(FIELDS), spread);
    _mm512_and_si512(fields, _mm512_set1_epi8(63))
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
