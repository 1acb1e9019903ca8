//! Scales and biases of weights, and how exact sums of spans are added to an element's lanes.

use std::arch::x86_64::*;

use super::{
    floats_at,
    rows::{load, load_words},
    unpack::Unpack,
};
use crate::{
    floats::Floats,
    quantized::{Lane, Line, Packed, Quantized, SPANS},
};

/// Spans of a vector.
pub(super) const HALF: usize = SPANS / 2;

/// Scales and biases of weight rows.
pub(super) struct Factors<'a> {
    scales: Floats<'a>,
    biases: Floats<'a>,
    spans: usize,
    per_row: usize,
    /// Whether two spans share each.
    shared: bool,
}

/// Those of some weight rows in 16 bits.
pub(super) struct Halves<'a> {
    pub(super) scales: &'a [u16],
    pub(super) biases: &'a [u16],
    /// bf16 or IEEE f16.
    pub(super) bf16: bool,
    /// Whether two spans share each.
    pub(super) shared: bool,
}

impl<'a> Factors<'a> {
    pub(super) fn new(weights: &Packed<'a>) -> Self {
        Self {
            scales: weights.scales,
            biases: weights.biases,
            spans: weights.spans,
            per_row: weights.row_scales(),
            shared: weights.spans_per_scale == 2,
        }
    }

    /// Those of `count` weight rows from `first` on, if they have 16 bits.
    pub(super) fn halves(&self, first: usize, count: usize) -> Option<Halves<'a>> {
        let rows = first * self.per_row..(first + count) * self.per_row;
        let (bf16, scales, biases) = match (self.scales, self.biases) {
            (Floats::BF16(scales), Floats::BF16(biases)) => (true, scales, biases),
            (Floats::F16(scales), Floats::F16(biases)) => (false, scales, biases),
            _ => return None,
        };
        let (scales, biases) = (&scales[rows.clone()], &biases[rows]);
        Some(Halves { scales, biases, bf16, shared: self.shared })
    }

    /// Scales and biases of eight spans from `first` on, zero beyond the row's end.
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    pub(super) fn eight(&self, row: usize, first: usize) -> (__m256, __m256) {
        let at = row * self.per_row + (first >> u32::from(self.shared));
        if !self.shared
            && self.spans - first >= HALF
            && let (Floats::BF16(scales), Floats::BF16(biases)) = (self.scales, self.biases)
            && let (Some(scales), Some(biases)) =
                (scales[at..].first_chunk(), biases[at..].first_chunk())
        {
            return (floats::<true>(scales), floats::<true>(biases));
        }
        self.other_eight(at, first)
    }

    /// The same for other forms of scales, and beyond the row's end; apart, so that the usual way
    /// is compiled into the loops that need it.
    #[inline(never)]
    #[target_feature(enable = "avx2,f16c")]
    fn other_eight(&self, at: usize, first: usize) -> (__m256, __m256) {
        let held = (self.spans - first).min(HALF) >> u32::from(self.shared);
        let (scale, bias) = (floats_at(self.scales, at, held), floats_at(self.biases, at, held));
        if !self.shared {
            return (scale, bias);
        }
        let twice = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
        (_mm256_permutevar8x32_ps(scale, twice), _mm256_permutevar8x32_ps(bias, twice))
    }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn floats<const BF16: bool>(bits: &[u16; HALF]) -> __m256 {
    // SAFETY: the array is as long as the vector.
    let bits = unsafe { _mm_loadu_si128(bits.as_ptr().cast()) };
    if BF16 {
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(bits)))
    } else {
        _mm256_cvtph_ps(bits)
    }
}

/// Of the spans of a run, from a row's floats in 16 bits; if `SHARED` there is one for two spans
/// each.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) fn of_run<const BF16: bool, const SHARED: bool>(row: &[u16], run: usize) -> [__m256; 2] {
    if SHARED {
        let all = floats::<BF16>(row[run * HALF..].first_chunk().expect("of a whole run"));
        let first = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
        let last = _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7);
        return [_mm256_permutevar8x32_ps(all, first), _mm256_permutevar8x32_ps(all, last)];
    }
    let all: &[_; SPANS] = row[run * SPANS..].first_chunk().expect("of a whole run");
    let [first, last] = all.as_chunks().0 else { unreachable!("two halves") };
    [floats::<BF16>(first), floats::<BF16>(last)]
}

/// Factors of the activations of eight spans.
pub(super) struct OfSpans<'a> {
    pub(super) scales: &'a [f32; HALF],
    pub(super) sums: &'a [f32; HALF],
    pub(super) totals: &'a [i32; HALF],
}

impl OfSpans<'_> {
    /// Lanes of an element and the exact sums of eight spans of weights with this scale and bias.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(super) fn add<F: Unpack>(
        &self,
        lanes: __m256,
        (scale, bias): (__m256, __m256),
        mut dots: __m256i,
    ) -> __m256 {
        if F::LESS_128 {
            dots = _mm256_add_epi32(dots, _mm256_slli_epi32::<7>(load_words(self.totals)));
        }
        let lanes = _mm256_fmadd_ps(bias, load(self.sums), lanes);
        let scale = _mm256_mul_ps(scale, load(self.scales));
        _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots), scale, lanes)
    }
}

/// A row of activations with the `lines` of a span.
#[derive(Clone, Copy)]
pub(super) struct Row<'a> {
    values: &'a [Line],
    scales: &'a [Lane],
    sums: &'a [Lane],
    totals: &'a [[i32; SPANS]],
    pub(super) lines: usize,
}

impl<'a> Row<'a> {
    pub(super) fn new(x: &'a Quantized, row: usize, lines: usize) -> Self {
        let totals = x.totals(row).as_chunks().0;
        Self { values: x.values(row), scales: x.scales(row), sums: x.sums(row), totals, lines }
    }

    /// The lines of a run.
    #[inline]
    pub(super) fn of_run(&self, run: usize) -> &'a [Line] {
        &self.values[run * self.lines..][..self.lines]
    }

    /// Factors of a half of a run.
    #[inline]
    pub(super) fn of_half(&self, run: usize, half: usize) -> OfSpans<'a> {
        OfSpans {
            scales: self.scales[run].half(half),
            sums: self.sums[run].half(half),
            totals: &self.totals[run].as_chunks().0[half],
        }
    }
}
