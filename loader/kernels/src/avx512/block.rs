//! What products with one row and with several have in common: blocks of 64 bytes as they come
//! from memory, and how exact sums of a run of spans are added to an element's lanes.

use std::arch::x86_64::*;

use crate::{
    floats::Floats,
    quantized::{Lane, Line, Packed, SPANS},
};

/// Bytes ahead that are fetched into the second cache. Without fetches Zen 4 reads 8-bit weights
/// at half the speed; where memory is fast 16 and 32 KiB ahead are a tenth better than 8, and 4
/// lose a quarter.
pub(super) const FAR: usize = 16384;
/// Bytes ahead that are fetched into the first cache.
pub(super) const NEAR: usize = 2048;
/// Spans ahead whose scales and biases are fetched.
const SCALES_AHEAD: usize = 2048;

/// Bytes of a block.
pub(super) const fn bytes_of(bits: usize) -> usize {
    if bits == 6 { 48 } else { 64 }
}

/// Fetches what comes some distance behind a run of so many bytes.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn fetch_behind<const BYTES: usize>(run: &[u8]) {
    for line in 0..BYTES / 64 {
        let line = run.as_ptr().wrapping_add(line * 64);
        _mm_prefetch::<_MM_HINT_T1>(line.wrapping_add(FAR).cast());
        _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(NEAR).cast());
    }
}

/// The block at `at` of a run; zeros beyond the end of a run that `ENDS` early.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn load<const BITS: usize, const ENDS: bool>(run: &[u8], at: usize) -> __m512i {
    let size = bytes_of(BITS);
    let start = run.as_ptr().wrapping_add(at);
    let held = if ENDS { run.len().saturating_sub(at).min(size) } else { size };
    assert!(ENDS || at + size <= run.len(), "whole runs have whole blocks");
    if held == 64 {
        // SAFETY: the run has so many bytes from there on.
        return unsafe { _mm512_loadu_si512(start.cast()) };
    }
    // SAFETY: the mask admits what the run has.
    unsafe { _mm512_maskz_loadu_epi8((1 << held) - 1, start.cast()) }
}

/// 48 bytes to 64 weights: six bytes go to each 8-byte word, whose fields are then picked.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
pub(super) fn six_bits(block: __m512i) -> __m512i {
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
    let spread = _mm512_permutexvar_epi8(line(&SPREAD), block);
    let fields = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(FIELDS), spread);
    _mm512_and_si512(fields, _mm512_set1_epi8(63))
}

/// Weights with even numbers, and those with odd ones, of a block of 4-bit weights.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn nibbles(block: __m512i) -> [__m512i; 2] {
    let low = _mm512_set1_epi8(15);
    let odd = _mm512_and_si512(_mm512_srli_epi16::<4>(block), low);
    [_mm512_and_si512(block, low), odd]
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn line(from: &Line) -> __m512i {
    // SAFETY: a line is as long as the vector.
    unsafe { _mm512_loadu_si512(from.0.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn lane(from: &Lane) -> __m512 {
    // SAFETY: the array is as long as the vector.
    unsafe { _mm512_loadu_ps(from.0.as_ptr()) }
}

/// Types of scales, as parameters of functions.
pub(super) const F32: u8 = 0;
pub(super) const F16: u8 = 1;
pub(super) const BF16: u8 = 2;

/// The type of both scales and biases.
pub(super) const fn kind_of(weights: &Packed<'_>) -> u8 {
    match weights.scales {
        Floats::F32(_) => F32,
        Floats::F16(_) => F16,
        Floats::BF16(_) => BF16,
    }
}

/// Scales and biases of the spans of a run, zero beyond the row's end.
#[derive(Clone, Copy)]
pub(super) struct Factors {
    scale: __m512,
    bias: __m512,
}

impl Factors {
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn none() -> Self {
        Self { scale: _mm512_setzero_ps(), bias: _mm512_setzero_ps() }
    }

    /// Those of run `run` of row `row`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
    pub(super) fn load<const KIND: u8>(weights: &Packed<'_>, row: usize, run: usize) -> Self {
        let doubled = weights.spans_per_scale == 2;
        let per_run = if doubled { SPANS / 2 } else { SPANS };
        let (row_scales, first) = (weights.row_scales(), run * per_run);
        let (at, held) = (row * row_scales + first, (row_scales - first).min(per_run));
        let scale = floats::<KIND>(weights.scales, at, held);
        let bias = floats::<KIND>(weights.biases, at, held);
        if doubled {
            let twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
            let scale = _mm512_permutexvar_ps(twice, scale);
            return Self { scale, bias: _mm512_permutexvar_ps(twice, bias) };
        }
        Self { scale, bias }
    }

    /// Adds exact sums to the lanes of an element; `scale` and `sum` are the activations'.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn add(&self, lanes: __m512, dots: __m512i, scale: &Lane, sum: &Lane) -> __m512 {
        let lanes = _mm512_fmadd_ps(self.bias, lane(sum), lanes);
        let scale = _mm512_mul_ps(self.scale, lane(scale));
        _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots), scale, lanes)
    }
}

/// `held` floats from `at` on, and zeros.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
fn floats<const KIND: u8>(from: Floats<'_>, at: usize, held: usize) -> __m512 {
    let mask = ((1_u32 << held) - 1) as __mmask16;
    match (KIND, from) {
        (F32, Floats::F32(values)) => {
            let values = &values[at..at + held];
            // SAFETY: the mask admits what the slice holds.
            unsafe { _mm512_maskz_loadu_ps(mask, values.as_ptr()) }
        }
        (F16, Floats::F16(bits)) => _mm512_cvtph_ps(halves(&bits[at..at + held], mask)),
        (BF16, Floats::BF16(bits)) => {
            let half = halves(&bits[at..at + held], mask);
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half)))
        }
        _ => unreachable!("scales and biases have the type that was asked for"),
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn halves(bits: &[u16], mask: __mmask16) -> __m256i {
    _mm_prefetch::<_MM_HINT_T0>(bits.as_ptr().wrapping_add(SCALES_AHEAD).cast());
    // SAFETY: the mask admits what the slice holds.
    unsafe { _mm256_maskz_loadu_epi16(mask, bits.as_ptr().cast()) }
}
