//! Products with interleaved weights ([`crate::repack`]): as on AVX-512, with half as wide vectors.
//! Bytes are multiplied in pairs whose sums have 16 bits; as many of these are added as cannot
//! overflow before they are widened.
//!
//! Several rows of activations share what is unpacked: two weight rows by four rows of
//! activations, whose sums registers hold.

use std::{arch::x86_64::*, hint::black_box, ops::Range};

use zerocopy::IntoBytes;

use super::{
    alone::alone,
    factors::{Factors, HALF, Rows, Run},
    forms::{Bytes, Form, Nibbles, SixBits, Unpacked},
    four_trees, load_some,
};
use crate::{
    quantized::{Line, Order, Packed, Quantized, SPANS},
    repack::{Packing, QUAD},
    team::Columns,
};

/// Rows of activations that share what is unpacked.
const MOST_ROWS: usize = 4;

/// Fours of weight rows that meet a run of several rows of activations in turn, which stay in the
/// first cache meanwhile.
const MOST_QUADS: usize = 8;

/// Bytes of weight rows that all rows of activations meet in turn: a part of a small second cache.
const BLOCK_BYTES: usize = 128 << 10;

/// Groups of rows of activations up to which no more weight rows meet them in turn than stay in
/// the first cache.
const FEW_GROUPS: usize = 8;

/// Groups above which weights of six bits are unpacked once for all of them.
const FEWEST_GROUPS: usize = 1;

/// All rows of `x`, in [`Order::Words`], with the weight rows of `out`.
pub(crate) fn words(weights: &Packed<'_>, x: &Quantized, out: &mut Columns<'_>) {
    assert!(
        super::is_available() && x.fits(weights, Order::Words),
        "activations for these weights"
    );
    assert_eq!(weights.packing, Packing::Planes, "weights for these products");
    assert!(out.range().end <= weights.rows() && out.rows() == x.rows(), "rows of the weights");
    let range = out.range();
    assert!(range.start.is_multiple_of(QUAD) && range.end.is_multiple_of(QUAD), "rows by fours");
    // SAFETY: the processor has been asked.
    unsafe {
        match weights.bits {
            4 => all::<Nibbles>(weights, x, out),
            6 => all::<SixBits>(weights, x, out),
            8 => all::<Bytes>(weights, x, out),
            other => unreachable!("the constructor admits no {other} bits"),
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn all<F: Form>(weights: &Packed<'_>, x: &Quantized, out: &mut Columns<'_>) {
    let range = out.range();
    let groups = x.rows().div_ceil(MOST_ROWS);
    let at_once = if groups <= FEW_GROUPS {
        MOST_QUADS * QUAD
    } else {
        (BLOCK_BYTES / weights.row_bytes()).next_multiple_of(QUAD).max(QUAD)
    };
    let unpacks = F::WORDS == SixBits::WORDS && groups > FEWEST_GROUPS;
    let mut bytes = vec![Line::default(); if unpacks { at_once * weights.cols() / 64 } else { 0 }];
    for first in range.clone().step_by(at_once) {
        let rows = first..range.end.min(first + at_once);
        let packed = weights.bytes_of(rows.clone());
        if unpacks {
            unpack(packed, weights, &mut bytes);
        }
        for group in 0..groups {
            // As equal as can be: four rows cost little more than two.
            let of_x = x.rows() * group / groups..x.rows() * (group + 1) / groups;
            let at = (of_x.start, first - range.start);
            macro_rules! some {
                ($rows:expr) => {
                    if unpacks {
                        let block = Block { rows: rows.clone(), packed: bytes.as_bytes() };
                        some::<Unpacked, { $rows }>(weights, x, block, at, out)
                    } else {
                        let block = Block { rows: rows.clone(), packed };
                        some::<F, { $rows }>(weights, x, block, at, out)
                    }
                };
            }
            match of_x.len() {
                1 => alone::<F>(weights, x, Block { rows: rows.clone(), packed }, at, out),
                2 => some!(2),
                3 => some!(3),
                _ => some!(MOST_ROWS),
            }
        }
    }
}

/// Weight rows that meet some rows of activations.
pub(super) struct Block<'a> {
    pub(super) rows: Range<usize>,
    pub(super) packed: &'a [u8],
}

/// Weights of six bits to a byte each, in the order in which activations meet them.
#[inline]
#[target_feature(enable = "avx2")]
fn unpack(packed: &[u8], weights: &Packed<'_>, bytes: &mut [Line]) {
    let steps = weights.span / 4 / SixBits::LINES;
    let bytes = bytes.as_mut_bytes();
    let mut to = 0;
    for quad in packed.chunks_exact(QUAD * weights.row_bytes()) {
        for run in quad.chunks(QUAD * SPANS * weights.span_bytes()) {
            let size = run.len() / QUAD / steps / SixBits::WORDS;
            for step in run.chunks_exact(SixBits::WORDS * QUAD * size) {
                for (w, half) in
                    (0..QUAD).flat_map(|w| (0..size).step_by(32).map(move |at| (w, at)))
                {
                    let word = |word: usize| load_some(&step[(word * QUAD + w) * size + half..]);
                    let lines = SixBits::lines([word(0), word(1), word(2)]);
                    for (line, weights) in lines.into_iter().enumerate() {
                        let at = to + (line * QUAD + w) * size + half;
                        let held = (size - half).min(32);
                        store_some(weights, &mut bytes[at..at + held]);
                    }
                }
                to += SixBits::LINES * QUAD * size;
            }
        }
    }
}

/// As many of the first bytes as there are places.
#[inline]
#[target_feature(enable = "avx2")]
fn store_some(bytes: __m256i, to: &mut [u8]) {
    let mut all = [0; 32];
    let place = to.first_chunk_mut::<32>().unwrap_or(&mut all);
    // SAFETY: the array is as long as the vector.
    unsafe { _mm256_storeu_si256(place.as_mut_ptr().cast(), bytes) };
    if to.len() < 32 {
        to.copy_from_slice(&all[..to.len()]);
    }
}

/// Weight rows with `M` rows of activations from `first` on; results go to `place` on.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
fn some<F: Form, const M: usize>(
    weights: &Packed<'_>,
    x: &Quantized,
    Block { rows, packed }: Block<'_>,
    (first, place): (usize, usize),
    out: &mut Columns<'_>,
) {
    /// Weight rows that share what is read of the activations.
    const W: usize = 2;
    let x = Rows::<M>::new(weights.span, x, first);
    let factors = Factors::new(weights);
    let words = x.lines / F::LINES * F::WORDS;
    let quad_bytes = QUAD * weights.spans * words * 4;
    let whole = QUAD * SPANS * words * 4;
    let runs = weights.spans.div_ceil(SPANS);
    let mut lanes = [[[[_mm256_setzero_ps(); 2]; M]; QUAD]; MOST_QUADS];
    for start in rows.clone().step_by(MOST_QUADS * QUAD) {
        let quads = (rows.end - start).div_ceil(QUAD).min(MOST_QUADS);
        let packed = &packed[(start - rows.start) / QUAD * quad_bytes..];
        let lanes = &mut lanes[..quads];
        lanes.fill([[[_mm256_setzero_ps(); 2]; M]; QUAD]);
        for run in 0..runs {
            let held = (weights.spans - run * SPANS).min(SPANS);
            // The same place of the next run, or of the next rows' first.
            let last = run + 1 == runs;
            let ahead = if last { quads * quad_bytes - run * whole } else { whole };
            let of_x = x.of_run(run);
            for (quad, lanes) in lanes.iter_mut().enumerate() {
                let packed = &packed[quad * quad_bytes + run * whole..];
                for (pair, lanes) in lanes.as_chunks_mut::<W>().0.iter_mut().enumerate() {
                    let row = start + quad * QUAD + pair * W;
                    for half in 0..held.div_ceil(HALF) {
                        let packed = &packed[(pair * W * held + half * HALF) * 4..];
                        let place = Place { packed, size: held * 4, ahead };
                        let dots = dots::<F, W, M>(place, &of_x, half);
                        for (w, (lanes, dots)) in lanes.iter_mut().zip(dots).enumerate() {
                            let factors = factors.eight(row + w, run * SPANS + half * HALF);
                            of_x.add::<F>(factors, dots, half, lanes);
                        }
                    }
                }
            }
        }
        for (quad, lanes) in lanes.iter().enumerate() {
            let to = place + start - rows.start + quad * QUAD;
            for m in 0..M {
                let sums = four_trees([lanes[0][m], lanes[1][m], lanes[2][m], lanes[3][m]]);
                let out = &mut out.row(first + m)[to..][..QUAD];
                // SAFETY: the slice above is as long as the vector.
                unsafe { _mm_storeu_ps(out.as_mut_ptr(), sums) };
            }
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
pub(super) fn dots<F: Form, const W: usize, const M: usize>(
    place: Place<'_>,
    x: &Run<'_, M>,
    half: usize,
) -> [[__m256i; M]; W] {
    let words = x.values[0].len() / F::LINES * F::WORDS;
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
fn dots_at_end<F: Form, const W: usize, const M: usize>(
    place: Place<'_>,
    x: &Run<'_, M>,
    half: usize,
) -> [[__m256i; M]; W] {
    dots_at::<F, W, M, true>(place, x, half)
}

/// [`dots`]; at the `END` of `packed` it is read with care.
#[inline]
#[target_feature(enable = "avx2")]
fn dots_at<F: Form, const W: usize, const M: usize, const END: bool>(
    Place { packed, size, ahead }: Place<'_>,
    x: &Run<'_, M>,
    half: usize,
) -> [[__m256i; M]; W] {
    let count = x.values[0].len();
    let steps = count / F::LINES;
    let last = ((steps * F::WORDS - 1) * QUAD + W - 1) * size;
    assert!(packed.len() > last && (END || packed.len() >= last + 32), "weights");
    let mut values = [std::ptr::null::<__m256i>(); M];
    for (values, lines) in values.iter_mut().zip(x.values) {
        assert!(half < 2 && lines.len() == count, "halves of a whole run");
        *values = lines.as_ptr().cast::<__m256i>().wrapping_add(half);
    }
    // SAFETY: there are as many lines, as has just been asserted, each as long as two vectors.
    let x_of = |m: usize, line: usize| unsafe { _mm256_load_si256(values[m].add(2 * line)) };
    let lines = |step: usize, w: usize| {
        let mut words = [_mm256_setzero_si256(); 3];
        for (word, words) in words.iter_mut().enumerate().take(F::WORDS) {
            let word = step * F::WORDS + word;
            let at = (word * QUAD + w) * size;
            let from = packed.as_ptr().wrapping_add(at);
            // Every line once, half of them with either half.
            if word % 2 == half {
                _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(ahead).cast());
            }
            // SAFETY: the last of them is there, as has just been asserted.
            *words = if END {
                load_some(&packed[at..])
            } else {
                unsafe { _mm256_loadu_si256(from.cast()) }
            };
        }
        F::lines(words)
    };
    let ones = _mm256_set1_epi16(1);
    let mut dots = [[_mm256_setzero_si256(); M]; W];
    if F::TOGETHER <= 2 {
        // Steps whose lines come in whole numbers of those that are added.
        let few = F::TOGETHER.div_ceil(F::LINES);
        for step in (0..steps).step_by(few) {
            let mut unpacked = [[[_mm256_setzero_si256(); 4]; 2]; W];
            for (w, unpacked) in unpacked.iter_mut().enumerate() {
                for (next, unpacked) in unpacked.iter_mut().enumerate().take(few) {
                    *unpacked = lines(step + next, w);
                }
            }
            for first in (0..few * F::LINES).step_by(F::TOGETHER) {
                for m in 0..M {
                    let at = step * F::LINES + first;
                    let x = [x_of(m, at), x_of(m, at + F::TOGETHER - 1)];
                    for w in 0..W {
                        let line = |line: usize| unpacked[w][line / F::LINES][line % F::LINES];
                        let mut pairs = F::product(line(first), x[0]);
                        if F::TOGETHER == 2 {
                            pairs = _mm256_add_epi16(pairs, F::product(line(first + 1), x[1]));
                        }
                        dots[w][m] = _mm256_add_epi32(dots[w][m], _mm256_madd_epi16(pairs, ones));
                    }
                }
            }
        }
        return dots;
    }
    // Were it known to the compiler, it would load all before it meets any.
    let together = black_box(F::TOGETHER / F::LINES);
    let mut step = 0;
    while step < steps {
        let mut pairs = [[_mm256_setzero_si256(); M]; W];
        let end = steps.min(step + together);
        while step < end {
            let mut unpacked = [[_mm256_setzero_si256(); 4]; W];
            for (w, unpacked) in unpacked.iter_mut().enumerate() {
                *unpacked = lines(step, w);
            }
            for line in 0..F::LINES {
                for m in 0..M {
                    let x = x_of(m, step * F::LINES + line);
                    for w in 0..W {
                        let product = F::product(unpacked[w][line], x);
                        pairs[w][m] = _mm256_add_epi16(pairs[w][m], product);
                    }
                }
            }
            step += 1;
        }
        for (dots, pairs) in dots.as_flattened_mut().iter_mut().zip(pairs.as_flattened()) {
            *dots = _mm256_add_epi32(*dots, _mm256_madd_epi16(*pairs, ones));
        }
    }
    dots
}
