//! Scales and biases of weights, and how exact sums of spans are added to an element's lanes.

use std::arch::x86_64::*;

use super::{
    floats_at,
    forms::Form,
    rows::{load, load_words},
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
    /// Upper halves of f32 or IEEE half-precision floats.
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
        let held = (self.spans - first).min(HALF) >> u32::from(self.shared);
        let (scale, bias) = (floats_at(self.scales, at, held), floats_at(self.biases, at, held));
        if !self.shared {
            return (scale, bias);
        }
        let twice = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
        (_mm256_permutevar8x32_ps(scale, twice), _mm256_permutevar8x32_ps(bias, twice))
    }
}

/// Of the spans of a run, from a row's floats in 16 bits; if `SHARED` there is one for two spans
/// each.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) fn of_run<const BF16: bool, const SHARED: bool>(row: &[u16], run: usize) -> [__m256; 2] {
    let floats = |bits: &[u16; HALF]| {
        // SAFETY: the array is as long as the vector.
        let bits = unsafe { _mm_loadu_si128(bits.as_ptr().cast()) };
        if BF16 {
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(bits)))
        } else {
            _mm256_cvtph_ps(bits)
        }
    };
    if SHARED {
        let all = floats(row[run * HALF..].first_chunk().expect("of a whole run"));
        let first = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
        let last = _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7);
        return [_mm256_permutevar8x32_ps(all, first), _mm256_permutevar8x32_ps(all, last)];
    }
    let all: &[_; SPANS] = row[run * SPANS..].first_chunk().expect("of a whole run");
    let [first, last] = all.as_chunks().0 else { unreachable!("two halves") };
    [floats(first), floats(last)]
}

/// `M` rows of activations.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a, const M: usize> {
    /// Lines that meet a run of weights.
    pub(super) lines: usize,
    values: [&'a [Line]; M],
    scales: [&'a [Lane]; M],
    sums: [&'a [Lane]; M],
    totals: [&'a [[i32; SPANS]]; M],
}

impl<'a, const M: usize> Rows<'a, M> {
    pub(super) fn new(span: usize, x: &'a Quantized, first: usize) -> Self {
        let lines = span / 4;
        let (values, scales) = ([&[] as &[_]; M], [&[] as &[_]; M]);
        let mut rows = Self { lines, values, scales, sums: scales, totals: [&[]; M] };
        for m in 0..M {
            rows.values[m] = x.values(first + m);
            rows.scales[m] = x.scales(first + m);
            rows.sums[m] = x.sums(first + m);
            rows.totals[m] = x.totals(first + m).as_chunks().0;
        }
        rows
    }

    /// What a run of weights meets.
    pub(super) fn of_run(&self, run: usize) -> Run<'a, M> {
        let lines = &self.values[0][..self.lines];
        let (scales, sums) = ([&self.scales[0][run]; M], [&self.sums[0][run]; M]);
        let totals = [&self.totals[0][run]; M];
        let mut of_run = Run { values: [lines; M], scales, sums, totals };
        for m in 0..M {
            of_run.values[m] = &self.values[m][run * self.lines..][..self.lines];
            of_run.scales[m] = &self.scales[m][run];
            of_run.sums[m] = &self.sums[m][run];
            of_run.totals[m] = &self.totals[m][run];
        }
        of_run
    }
}

/// What a run of weights meets of `M` rows of activations.
#[derive(Clone, Copy)]
pub(super) struct Run<'a, const M: usize> {
    pub(super) values: [&'a [Line]; M],
    scales: [&'a Lane; M],
    sums: [&'a Lane; M],
    totals: [&'a [i32; SPANS]; M],
}

impl<const M: usize> Run<'_, M> {
    /// Adds the exact sums of the eight spans of a half to the lanes of a weight row with this
    /// scale and bias.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(super) fn add<F: Form>(
        &self,
        (scale, bias): (__m256, __m256),
        dots: [__m256i; M],
        half: usize,
        lanes: &mut [[__m256; 2]; M],
    ) {
        for m in 0..M {
            let mut dots = dots[m];
            if F::LESS_128 {
                let totals = load_words(&self.totals[m].as_chunks::<HALF>().0[half]);
                dots = _mm256_add_epi32(dots, _mm256_slli_epi32::<7>(totals));
            }
            let (x_scale, x_sum) = (self.scales[m].half(half), self.sums[m].half(half));
            let sum = _mm256_fmadd_ps(bias, load(x_sum), lanes[m][half]);
            let scale = _mm256_mul_ps(scale, load(x_scale));
            lanes[m][half] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots), scale, sum);
        }
    }
}
