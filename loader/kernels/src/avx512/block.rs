//! Shared by GEMV and GEMM: blocks of 64 bytes as they come
//! from memory, and how exact sums of a run of spans are added to an element's lanes.

use std::arch::x86_64::*;

use crate::{
    floats::Floats,
    quantized::{Lane, Line, Packed, SPANS},
    repack::QUAD,
};

/// Bytes ahead that are fetched into the L2 cache. Without fetches Zen 4 reads 8-bit weights
/// at half the speed; where memory is fast 16 and 32 KiB ahead are a tenth better than 8, and 4
/// lose a quarter.
pub(super) const FAR: usize = 16384;
/// Bytes ahead that are fetched into the L1 cache.
pub(super) const NEAR: usize = 2048;
/// Scales of a run whose spans share them.
const HALF: usize = SPANS / 2;

/// Fetches `LINES` cache lines some distance behind some bytes.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn fetch_behind<const LINES: usize>(bytes: &[u8]) {
    for line in 0..LINES {
        let line = bytes.as_ptr().wrapping_add(line * 64);
        _mm_prefetch::<_MM_HINT_T1>(line.wrapping_add(FAR).cast());
        _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(NEAR).cast());
    }
}

/// Fetches `LINES` cache lines a short distance behind some bytes into the L2 cache.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn fetch_far<const LINES: usize>(bytes: &[u8]) {
    for line in 0..LINES {
        let line = bytes.as_ptr().wrapping_add(line * 64 + NEAR);
        _mm_prefetch::<_MM_HINT_T1>(line.cast());
    }
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

    /// Those of one run of four weight rows from `first` on.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
    pub(super) fn read(weights: &Packed<'_>, first: usize, run: usize, out: &mut [Self; QUAD]) {
        let (per_row, shared) = (weights.row_scales(), weights.spans_per_scale == 2);
        let per_run = if shared { HALF } else { SPANS };
        let at = first * per_row + run * per_run;
        // Reads of a known length need no mask.
        match (shared, per_row - run * per_run) {
            (false, SPANS..) => Self::some::<false, true>(weights, at, SPANS, out),
            (false, count) => Self::some::<false, false>(weights, at, count, out),
            (true, HALF..) => Self::some::<true, true>(weights, at, HALF, out),
            (true, count) => Self::some::<true, false>(weights, at, count, out),
        }
    }

    /// Of each of four rows `count` from `at` on.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
    fn some<const SHARED: bool, const WHOLE: bool>(
        weights: &Packed<'_>,
        at: usize,
        count: usize,
        out: &mut [Self; QUAD],
    ) {
        let whole = if SHARED { HALF } else { SPANS };
        let count = if WHOLE { whole } else { count };
        let per_row = weights.row_scales();
        macro_rules! read {
            ($scales:expr, $biases:expr, $float:ident) => {{
                let scales = &$scales[at..][..(QUAD - 1) * per_row + count];
                let biases = &$biases[at..][..(QUAD - 1) * per_row + count];
                for (w, out) in out.iter_mut().enumerate() {
                    let of_row = w * per_row..w * per_row + count;
                    let (scale, bias) = ($float(&scales[of_row.clone()]), $float(&biases[of_row]));
                    *out = if SHARED {
                        Self { scale: twice(scale), bias: twice(bias) }
                    } else {
                        Self { scale, bias }
                    };
                }
            }};
        }
        match (weights.scales, weights.biases) {
            (Floats::F32(scales), Floats::F32(biases)) => read!(scales, biases, floats),
            (Floats::F16(scales), Floats::F16(biases)) => read!(scales, biases, of_f16),
            (Floats::BF16(scales), Floats::BF16(biases)) => read!(scales, biases, of_bf16),
            _ => unreachable!("scales and biases are of one type"),
        }
    }

    /// Those of a whole run, whose halves begin at `row` of the scales and of the biases.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
    pub(super) fn halves<const BF16: bool, const SHARED: bool>(
        factors: [&[u16]; 2],
        row: usize,
        run: usize,
    ) -> Self {
        let count = if SHARED { HALF } else { SPANS };
        let of_run = row + run * count..row + (run + 1) * count;
        let scale = run_floats::<BF16, SHARED>(&factors[0][of_run.clone()]);
        let bias = run_floats::<BF16, SHARED>(&factors[1][of_run]);
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

/// Those of the 16 spans of a run; `SHARED` are eight, for two spans each.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
fn run_floats<const BF16: bool, const SHARED: bool>(bits: &[u16]) -> __m512 {
    assert_eq!(bits.len(), if SHARED { HALF } else { SPANS }, "a whole run");
    // SAFETY: as many as there are.
    let halves = unsafe {
        if SHARED {
            _mm256_zextsi128_si256(_mm_loadu_si128(bits.as_ptr().cast()))
        } else {
            _mm256_loadu_si256(bits.as_ptr().cast())
        }
    };
    let floats = if BF16 { of_bf16_bits(halves) } else { _mm512_cvtph_ps(halves) };
    if SHARED { twice(floats) } else { floats }
}

/// Each of the first eight lanes twice.
#[inline]
#[target_feature(enable = "avx512f")]
fn twice(lanes: __m512) -> __m512 {
    let order = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    _mm512_permutexvar_ps(order, lanes)
}

/// At most 16 floats, and zeros.
#[inline]
#[target_feature(enable = "avx512f")]
fn floats(values: &[f32]) -> __m512 {
    // SAFETY: the mask admits what the slice holds.
    unsafe { _mm512_maskz_loadu_ps(first(values.len()), values.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
fn of_f16(bits: &[u16]) -> __m512 {
    _mm512_cvtph_ps(halves(bits))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn of_bf16(bits: &[u16]) -> __m512 {
    of_bf16_bits(halves(bits))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn of_bf16_bits(halves: __m256i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn halves(bits: &[u16]) -> __m256i {
    // SAFETY: the mask admits what the slice holds.
    unsafe { _mm256_maskz_loadu_epi16(first(bits.len()), bits.as_ptr().cast()) }
}

/// The mask of the first lanes of 16.
const fn first(count: usize) -> __mmask16 {
    ((1_u32 << count) - 1) as __mmask16
}
