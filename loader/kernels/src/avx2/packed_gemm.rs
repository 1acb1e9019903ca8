//! GEMM with packed, interleaved weights ([`crate::repack`]): as on AVX-512, with half as wide vectors.
//! Bytes are multiplied in pairs whose sums have 16 bits; as many of these are added as cannot
//! overflow before they are widened.
//!
//! Several rows of activations share what is unpacked: eight elements' sums stay in registers.

use std::{arch::x86_64::*, hint::black_box};

use super::{
    factors::{Factors, HALF, OfSpans, Row},
    four_trees,
    gemv::gemv,
    load_some,
    unpack::{Bytes, Nibbles, SixBits, Unpack},
};
use crate::{
    quantized::{ActivationLayout, Packed, Quantized, SPANS},
    repack::{Packing, QUAD},
    team::Columns,
};

/// Fours of weight rows that are multiplied with a run of several rows of activations, which stay
/// in the L1 cache meanwhile.
const MOST_QUADS: usize = 8;

/// Lines of a span's activations, at most.
const MOST_LINES: usize = 16;

/// All rows of `x`, in [`ActivationLayout::Interleaved`], with the weight rows of `out`.
pub(crate) fn packed_gemm(weights: &Packed<'_>, x: &Quantized, out: &mut Columns<'_>) {
    assert!(
        super::is_available() && x.fits(weights, ActivationLayout::Interleaved),
        "activations for these weights"
    );
    assert_eq!(weights.packing, Packing::Planes, "weights for these products");
    assert!(out.range().end <= weights.rows() && out.rows() == x.rows(), "rows of the weights");
    let range = out.range();
    assert!(range.start.is_multiple_of(QUAD) && range.end.is_multiple_of(QUAD), "rows by fours");
    // SAFETY: the processor has been asked.
    unsafe {
        match weights.bits {
            4 => all::<Nibbles>(weights, x, out, few::<Nibbles>, 8),
            6 => all::<SixBits>(weights, x, out, few::<SixBits>, 8),
            8 => all::<Bytes>(weights, x, out, fewer, 4),
            other => unreachable!("the constructor admits no {other} bits"),
        }
    }
}

/// Products of weight rows with `count` rows of activations from `first` on, to `place` on.
type Group = unsafe fn(&Packed<'_>, &Quantized, Block<'_>, [usize; 3], &mut Columns<'_>);

/// Weight rows and the rows of activations that they are multiplied with.
#[derive(Clone, Copy)]
pub(super) struct Block<'a> {
    pub(super) first: usize,
    pub(super) count: usize,
    pub(super) packed: &'a [u8],
}

/// All rows, by groups of at most so many.
#[target_feature(enable = "avx2,fma,f16c")]
fn all<F: Unpack>(
    weights: &Packed<'_>,
    x: &Quantized,
    out: &mut Columns<'_>,
    group_of: Group,
    most: usize,
) {
    let range = out.range();
    let groups = x.rows().div_ceil(most);
    for first in range.clone().step_by(MOST_QUADS * QUAD) {
        let count = (range.end - first).min(MOST_QUADS * QUAD);
        let block = Block { first, count, packed: weights.bytes_of(first..first + count) };
        for group in 0..groups {
            // As equal as can be: four rows cost little more than two.
            let of_x = x.rows() * group / groups..x.rows() * (group + 1) / groups;
            let at = [of_x.start, of_x.len(), first - range.start];
            if of_x.len() == 1 {
                gemv::<F>(weights, x, block, (at[0], at[2]), out);
            } else {
                // SAFETY: the features are enabled here.
                unsafe { group_of(weights, x, block, at, out) };
            }
        }
    }
}

/// One weight row with up to eight rows of activations.
#[target_feature(enable = "avx2,fma,f16c")]
fn few<F: Unpack>(
    weights: &Packed<'_>,
    x: &Quantized,
    block: Block<'_>,
    at: [usize; 3],
    out: &mut Columns<'_>,
) {
    match at[1] {
        2 => some_rows::<F, 1, 2>(weights, x, block, at, out),
        3 => some_rows::<F, 1, 3>(weights, x, block, at, out),
        4 => some_rows::<F, 1, 4>(weights, x, block, at, out),
        5 | 6 => some_rows::<F, 1, 6>(weights, x, block, at, out),
        _ => some_rows::<F, 1, 8>(weights, x, block, at, out),
    }
}

/// Two rows of bytes with up to four rows of activations: these need steps of their own for each
/// weight row.
#[target_feature(enable = "avx2,fma,f16c")]
fn fewer(
    weights: &Packed<'_>,
    x: &Quantized,
    block: Block<'_>,
    at: [usize; 3],
    out: &mut Columns<'_>,
) {
    match at[1] {
        2 => some_rows::<Bytes, 2, 2>(weights, x, block, at, out),
        3 => some_rows::<Bytes, 2, 3>(weights, x, block, at, out),
        _ => some_rows::<Bytes, 2, 4>(weights, x, block, at, out),
    }
}

/// Rows of activations side by side, as a run of weights needs them.
pub(super) struct Panel<const M: usize> {
    /// `[line][half][row]`.
    values: [[[__m256i; M]; 2]; MOST_LINES],
    /// Lines that there are.
    lines: usize,
    /// `[half][row]`.
    scales: [[[f32; HALF]; M]; 2],
    sums: [[[f32; HALF]; M]; 2],
    totals: [[[i32; HALF]; M]; 2],
}

impl<const M: usize> Panel<M> {
    /// Room for rows with so many lines to a run.
    #[inline]
    #[target_feature(enable = "avx2")]
    pub(super) fn new(lines: usize) -> Self {
        Self {
            values: [[[_mm256_setzero_si256(); M]; 2]; MOST_LINES],
            lines,
            scales: [[[0.0; HALF]; M]; 2],
            sums: [[[0.0; HALF]; M]; 2],
            totals: [[[0; HALF]; M]; 2],
        }
    }

    /// Takes what a run meets of `count` rows from `first` on, of the last one as often as there
    /// are places for more.
    #[inline]
    #[target_feature(enable = "avx2")]
    pub(super) fn take(&mut self, x: &Quantized, [first, count]: [usize; 2], run: usize) {
        for m in 0..M {
            let row = Row::new(x, first + m.min(count - 1), self.lines);
            for (to, line) in self.values.iter_mut().zip(row.of_run(run)) {
                for (half, to) in to.iter_mut().enumerate() {
                    let half: &[i8; 32] = &line.0.as_chunks().0[half];
                    // SAFETY: the array is as long as the vector.
                    to[m] = unsafe { _mm256_loadu_si256(half.as_ptr().cast()) };
                }
            }
            for half in 0..2 {
                let of_half = row.of_half(run, half);
                self.scales[half][m] = *of_half.scales;
                self.sums[half][m] = *of_half.sums;
                self.totals[half][m] = *of_half.totals;
            }
        }
    }

    /// Factors of a half of the run.
    #[inline]
    pub(super) fn of_half(&self, half: usize, m: usize) -> OfSpans<'_> {
        OfSpans {
            scales: &self.scales[half][m],
            sums: &self.sums[half][m],
            totals: &self.totals[half][m],
        }
    }
}

/// Weight rows, `W` at a time, with up to `M` rows of activations.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
fn some_rows<F: Unpack, const W: usize, const M: usize>(
    weights: &Packed<'_>,
    x: &Quantized,
    block: Block<'_>,
    [first, count, place]: [usize; 3],
    out: &mut Columns<'_>,
) {
    let factors = Factors::new(weights);
    let lines = weights.span / 4;
    let words = lines / F::LINES * F::WORDS;
    let quad_bytes = QUAD * weights.spans * words * 4;
    let whole = QUAD * SPANS * words * 4;
    let runs = weights.spans.div_ceil(SPANS);
    let mut lanes = [[[[_mm256_setzero_ps(); 2]; QUAD]; M]; MOST_QUADS];
    let quads = block.count / QUAD;
    let lanes = &mut lanes[..quads];
    let mut panel = Panel::<M>::new(lines);
    for run in 0..runs {
        let held = (weights.spans - run * SPANS).min(SPANS);
        // The same place of the next run, or of the next rows' first.
        let last = run + 1 == runs;
        let ahead = if last { quads * quad_bytes - run * whole } else { whole };
        panel.take(x, [first, count], run);
        for (quad, lanes) in lanes.iter_mut().enumerate() {
            let packed = &block.packed[quad * quad_bytes + run * whole..];
            for w in (0..QUAD).step_by(W) {
                for half in 0..held.div_ceil(HALF) {
                    let packed = &packed[(w * held + half * HALF) * 4..];
                    let place = Place { packed, size: held * 4, ahead };
                    let dots = dots::<F, W, M>(place, &panel, half);
                    for (w, dots) in (w..w + W).zip(dots) {
                        let row = block.first + quad * QUAD + w;
                        let factors = factors.eight(row, run * SPANS + half * HALF);
                        for m in 0..M {
                            let lanes = &mut lanes[m][w][half];
                            *lanes = panel.of_half(half, m).add::<F>(*lanes, factors, dots[m]);
                        }
                    }
                }
            }
        }
    }
    for (quad, lanes) in lanes.iter().enumerate() {
        for (m, lanes) in lanes.iter().enumerate().take(count) {
            let out = &mut out.row(first + m)[place + quad * QUAD..][..QUAD];
            // SAFETY: the slice above is as long as the vector.
            unsafe { _mm_storeu_ps(out.as_mut_ptr(), four_trees(*lanes)) };
        }
    }
}

/// Eight spans of a half of a run, of some weight rows.
#[derive(Clone, Copy)]
pub(super) struct Place<'a> {
    /// Begins with those of the first row.
    pub(super) packed: &'a [u8],
    /// Bytes of a word of all spans of a row.
    pub(super) size: usize,
    /// Bytes ahead that are fetched.
    pub(super) ahead: usize,
}

/// The exact dot products of eight spans, `[weight row][row of activations]`, a lane for each
/// span.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn dots<F: Unpack, const W: usize, const M: usize>(
    place: Place<'_>,
    x: &Panel<M>,
    half: usize,
) -> [[__m256i; M]; W] {
    let words = x.lines / F::LINES * F::WORDS;
    // What is read beyond the eighth span belongs to others and meets zeros.
    if place.packed.len() >= ((words - 1) * QUAD + W - 1) * place.size + 32 {
        dots_at::<F, W, M, false>(place, x, half)
    } else {
        dots_at_end::<F, W, M>(place, x, half)
    }
}

/// [`dots`] where `packed` ends before the last vector does.
#[cold]
#[inline(never)]
#[target_feature(enable = "avx2")]
fn dots_at_end<F: Unpack, const W: usize, const M: usize>(
    place: Place<'_>,
    x: &Panel<M>,
    half: usize,
) -> [[__m256i; M]; W] {
    dots_at::<F, W, M, true>(place, x, half)
}

/// [`dots`]; at the `END` of `packed` it is read with care.
#[expect(clippy::needless_range_loop, reason = "sums of a weight row and a row of activations")]
#[inline]
#[target_feature(enable = "avx2")]
fn dots_at<F: Unpack, const W: usize, const M: usize, const END: bool>(
    Place { packed, size, ahead }: Place<'_>,
    x: &Panel<M>,
    half: usize,
) -> [[__m256i; M]; W] {
    let steps = x.lines / F::LINES;
    let last = ((steps * F::WORDS - 1) * QUAD + W - 1) * size;
    assert!(packed.len() > last && (END || packed.len() >= last + 32), "weights");
    assert!(half < 2 && x.lines <= MOST_LINES, "halves of a run");
    // SAFETY: there are as many lines, as has just been asserted.
    let x_of =
        |m: usize, line: usize| unsafe { x.values.get_unchecked(line).get_unchecked(half)[m] };
    let words_of = |step: usize, w: usize| {
        let mut words = [_mm256_setzero_si256(); 3];
        for (word, words) in words.iter_mut().enumerate().take(F::WORDS) {
            let at = ((step * F::WORDS + word) * QUAD + w) * size;
            let from = packed.as_ptr().wrapping_add(at);
            _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(ahead).cast());
            *words = if END {
                load_some(&packed[at..])
            } else {
                // SAFETY: the last of them is there, as has just been asserted.
                unsafe { _mm256_loadu_si256(from.cast()) }
            };
        }
        words
    };
    let ones = _mm256_set1_epi16(1);
    // Were it known to the compiler, it would load all before it meets any.
    let together = if F::TOGETHER > 2 { black_box(F::TOGETHER / F::LINES) } else { 1 };
    let mut dots = [[_mm256_setzero_si256(); M]; W];
    let mut step = 0;
    while step < steps {
        let mut pairs = [[_mm256_setzero_si256(); M]; W];
        let end = steps.min(step + together);
        while step < end {
            let mut words = [[_mm256_setzero_si256(); 3]; W];
            for (w, words) in words.iter_mut().enumerate() {
                *words = words_of(step, w);
            }
            let at = step * F::LINES;
            if F::TOGETHER == 2 {
                for line in (0..F::LINES).step_by(2) {
                    let lines = words.map(|it| [F::line(it, line), F::line(it, line + 1)]);
                    for m in 0..M {
                        let x = [x_of(m, at + line), x_of(m, at + line + 1)];
                        for (w, [a, b]) in lines.into_iter().enumerate() {
                            let sum = _mm256_add_epi16(F::product(a, x[0]), F::product(b, x[1]));
                            dots[w][m] = _mm256_add_epi32(dots[w][m], _mm256_madd_epi16(sum, ones));
                        }
                    }
                }
            } else {
                for line in 0..F::LINES {
                    let lines = words.map(|words| F::line(words, line));
                    for m in 0..M {
                        let x = x_of(m, at + line);
                        for (w, line) in lines.into_iter().enumerate() {
                            let product = F::product(line, x);
                            if F::TOGETHER == 1 {
                                let sum = _mm256_madd_epi16(product, ones);
                                dots[w][m] = _mm256_add_epi32(dots[w][m], sum);
                            } else {
                                pairs[w][m] = _mm256_add_epi16(pairs[w][m], product);
                            }
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
