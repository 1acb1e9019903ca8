//! GEMV: one row of activations times interleaved weights, bound by memory bandwidth.

use std::{arch::x86_64::*, hint::black_box};

use super::{
    factors::{Factors, HALF, Halves, Row, of_run},
    four_trees,
    packed_gemm::{Block, Panel, Place, dots},
    unpack::Unpack,
};
use crate::{
    quantized::{Line, Packed, Quantized, SPANS},
    repack::QUAD,
    team::Columns,
};

/// Bytes ahead that are fetched into the L1 cache: without it Zen 3 reads a fifth more slowly,
/// with twice or half as much somewhat.
const NEAR: usize = 2048;

/// Lanes of the elements of four weight rows.
type Lanes = [[__m256; 2]; QUAD];

/// Weight rows with the row of activations of number `m`; results go to `place` on.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn gemv<F: Unpack>(
    weights: &Packed<'_>,
    x: &Quantized,
    Block { first, packed, .. }: Block<'_>,
    (m, place): (usize, usize),
    out: &mut Columns<'_>,
) {
    let factors = Factors::new(weights);
    let lines = weights.span / 4;
    let words = lines / F::LINES * F::WORDS;
    let (row_of_x, mut panel) = (Row::new(x, m, lines), Panel::<1>::new(lines));
    let quads = packed.chunks(QUAD * weights.spans * words * 4);
    // The run that the panel has: mostly the last one, for all weight rows.
    let mut taken = None;
    for (quad, row) in quads.zip((first..).step_by(QUAD)) {
        let mut lanes: Lanes = [[_mm256_setzero_ps(); 2]; QUAD];
        let met = match factors.halves(row, QUAD) {
            Some(halves) => whole_runs::<F>(quad, &halves, &row_of_x, &mut lanes),
            None => 0,
        };
        // Others, and the last run, which may have fewer spans.
        for (run, packed) in quad.chunks(QUAD * SPANS * words * 4).enumerate().skip(met) {
            let size = packed.len() / words / QUAD;
            if taken.replace(run) != Some(run) {
                panel.take(x, [m, 1], run);
            }
            for half in 0..(size / 4).div_ceil(HALF) {
                let packed = &packed[half * HALF * 4..];
                let place = Place { packed, size, ahead: NEAR };
                let dots = dots::<F, QUAD, 1>(place, &panel, half);
                for (w, (lanes, [dots])) in lanes.iter_mut().zip(dots).enumerate() {
                    let factors = factors.eight(row + w, run * SPANS + half * HALF);
                    lanes[half] = panel.of_half(half, 0).add::<F>(lanes[half], factors, dots);
                }
            }
        }
        let out = &mut out.row(m)[place + row - first..][..QUAD];
        // SAFETY: the slice above is as long as the vector.
        unsafe { _mm_storeu_ps(out.as_mut_ptr(), four_trees(lanes)) };
    }
}

/// Adds the sums of all whole runs of four weight rows to the lanes; how many runs these are.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn whole_runs<F: Unpack>(
    quad: &[u8],
    factors: &Halves<'_>,
    x: &Row<'_>,
    lanes: &mut Lanes,
) -> usize {
    let of = [factors.scales, factors.biases];
    match (factors.bf16, factors.shared) {
        (true, false) => with_halves::<F, true, false>(quad, of, x, lanes),
        (true, true) => with_halves::<F, true, true>(quad, of, x, lanes),
        (false, false) => with_halves::<F, false, false>(quad, of, x, lanes),
        (false, true) => with_halves::<F, false, true>(quad, of, x, lanes),
    }
}

/// The same with such scales and biases.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
fn with_halves<F: Unpack, const BF16: bool, const SHARED: bool>(
    quad: &[u8],
    [scales, biases]: [&[u16]; 2],
    x: &Row<'_>,
    lanes: &mut Lanes,
) -> usize {
    let steps = x.lines / F::LINES;
    let runs = quad.chunks_exact(QUAD * SPANS * steps * F::WORDS * 4);
    let (count, per_row) = (runs.len(), scales.len() / QUAD);
    // Were it known to the compiler, it would load all before it meets any.
    let together = black_box(F::TOGETHER.div_ceil(F::LINES));
    for (run, packed) in runs.enumerate() {
        let dots = whole_dots::<F>(packed, [steps, together], x.of_run(run));
        for (w, (lanes, dots)) in lanes.iter_mut().zip(dots).enumerate() {
            let scales = of_run::<BF16, SHARED>(&scales[w * per_row..], run);
            let biases = of_run::<BF16, SHARED>(&biases[w * per_row..], run);
            for half in 0..2 {
                let factors = (scales[half], biases[half]);
                lanes[half] = x.of_half(run, half).add::<F>(lanes[half], factors, dots[half]);
            }
        }
    }
    count
}

/// The exact dot products of a whole run of four weight rows, in both halves. Every cache
/// line is read once, in sequence.
#[inline]
#[target_feature(enable = "avx2")]
fn whole_dots<F: Unpack>(
    packed: &[u8],
    [steps, together]: [usize; 2],
    values: &[Line],
) -> [[__m256i; 2]; QUAD] {
    const SIZE: usize = SPANS * 4;
    assert_eq!(packed.len(), steps * F::WORDS * QUAD * SIZE, "a whole run");
    assert_eq!(values.len(), steps * F::LINES, "activations");
    // SAFETY: a line is as long as two vectors, and there are as many lines.
    let x_of = |line: usize, half: usize| unsafe {
        _mm256_load_si256(values.as_ptr().add(line).cast::<__m256i>().add(half))
    };
    let words_of = |step: usize, w: usize, half: usize| {
        let mut words = [_mm256_setzero_si256(); 3];
        for (word, words) in words.iter_mut().enumerate().take(F::WORDS) {
            let place = (step * F::WORDS + word) * QUAD + w;
            let from = packed.as_ptr().wrapping_add(place * SIZE + half * SIZE / 2);
            if half == 0 {
                _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(NEAR).cast());
            }
            // SAFETY: there are as many bytes, as has just been asserted.
            *words = unsafe { _mm256_loadu_si256(from.cast()) };
        }
        words
    };
    let ones = _mm256_set1_epi16(1);
    let mut dots = [[_mm256_setzero_si256(); 2]; QUAD];
    let mut step = 0;
    while step < steps {
        let mut pairs = [[_mm256_setzero_si256(); 2]; QUAD];
        let end = if F::TOGETHER > 2 { steps.min(step + together) } else { step + 1 };
        while step < end {
            for w in 0..QUAD {
                for half in 0..2 {
                    let words = words_of(step, w, half);
                    let product = |line: usize| {
                        F::product(F::line(words, line), x_of(step * F::LINES + line, half))
                    };
                    let (pairs, dots) = (&mut pairs[w][half], &mut dots[w][half]);
                    for first in (0..F::LINES).step_by(F::TOGETHER.min(2)) {
                        let mut few = product(first);
                        if F::TOGETHER > 1 {
                            few = _mm256_add_epi16(few, product(first + 1));
                        }
                        if F::TOGETHER > 2 {
                            *pairs = _mm256_add_epi16(*pairs, few);
                        } else {
                            *dots = _mm256_add_epi32(*dots, _mm256_madd_epi16(few, ones));
                        }
                    }
                }
            }
            step += 1;
        }
        if F::TOGETHER > 2 {
            for (dots, pairs) in dots.as_flattened_mut().iter_mut().zip(pairs.as_flattened()) {
                *dots = _mm256_add_epi32(*dots, _mm256_madd_epi16(*pairs, ones));
            }
        }
    }
    dots
}
