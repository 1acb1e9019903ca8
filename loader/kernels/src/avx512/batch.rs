//! A few rows of activations: what is unpacked of the weights once meets all of them.
//!
//! Sixteen spans at a time are turned, so that a vector holds one 4-byte word of each, as the
//! activations lie already ([`crate::quantized::Order::Words`]). Then the sums of a span gather in
//! its lane by themselves: turning costs what folding the sums of one row of activations would,
//! and once instead of for each row.

use std::{arch::x86_64::*, ops::Range};

use super::{
    block::{self, BF16, F16, F32, Factors, fetch_behind, kind_of, line, load, nibbles, six_bits},
    trees,
};
use crate::{
    quantized::{Lane, Line, Order, Packed, Quantized, SPANS},
    team::Columns,
};

/// Rows of activations that share a turned run: as many as registers hold the sums of.
const MOST_ROWS: usize = 4;

/// Weight rows that meet all rows of activations in turn, while they are in the first cache.
const ROWS_AT_ONCE: usize = 4;

/// All rows of `x`, in [`crate::quantized::Order::Words`], with the weight rows of `out`.
pub(crate) fn rows(weights: &Packed<'_>, x: &Quantized, out: &mut Columns<'_>) {
    assert!(
        super::is_available() && x.fits(weights, Order::Words),
        "activations for these weights"
    );
    assert!(out.range().end <= weights.rows() && out.rows() == x.rows(), "rows of the weights");
    macro_rules! by_form {
        ($(($bits:literal, $span:literal, $blocks:literal)),*) => {
            match (weights.bits, weights.span) {
                // SAFETY: the processor has been asked.
                $(($bits, $span) => unsafe {
                    all::<$bits, $blocks, { $span * 2 * $bits }, { $span / 4 }>(weights, x, out)
                },)*
                other => unreachable!("the constructor admits no {other:?}"),
            }
        };
    }
    // Bits, inputs of a span, blocks of 16 spans.
    by_form!((4, 32, 4), (4, 64, 8), (6, 32, 8), (6, 64, 16), (8, 32, 8), (8, 64, 16));
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,f16c")]
fn all<const BITS: usize, const BLOCKS: usize, const BYTES: usize, const LINES: usize>(
    weights: &Packed<'_>,
    x: &Quantized,
    out: &mut Columns<'_>,
) {
    let range = out.range();
    let groups = x.rows().div_ceil(MOST_ROWS);
    let runs = x.scales(0).len();
    let mut factors = vec![Factors::none(); ROWS_AT_ONCE * runs];
    for first in range.clone().step_by(ROWS_AT_ONCE) {
        let rows = first..range.end.min(first + ROWS_AT_ONCE);
        match kind_of(weights) {
            F32 => read_factors::<F32>(weights, rows.clone(), &mut factors),
            F16 => read_factors::<F16>(weights, rows.clone(), &mut factors),
            _ => read_factors::<BF16>(weights, rows.clone(), &mut factors),
        }
        for group in 0..groups {
            // As equal as can be: four rows cost little more than two.
            let rows_of_x = x.rows() * group / groups..x.rows() * (group + 1) / groups;
            let at = (rows.clone(), rows_of_x.start, first - range.start);
            match rows_of_x.len() {
                1 => some::<BITS, BLOCKS, BYTES, LINES, 1>(weights, x, at, &factors, out),
                2 => some::<BITS, BLOCKS, BYTES, LINES, 2>(weights, x, at, &factors, out),
                3 => some::<BITS, BLOCKS, BYTES, LINES, 3>(weights, x, at, &factors, out),
                _ => some::<BITS, BLOCKS, BYTES, LINES, MOST_ROWS>(weights, x, at, &factors, out),
            }
        }
    }
}

/// Scales and biases of some rows, run by run.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,f16c")]
fn read_factors<const KIND: u8>(weights: &Packed<'_>, rows: Range<usize>, out: &mut [Factors]) {
    let runs = weights.spans.div_ceil(SPANS);
    for (row, out) in rows.zip(out.chunks_exact_mut(runs)) {
        for (run, out) in out.iter_mut().enumerate() {
            *out = Factors::load::<KIND>(weights, row, run);
        }
    }
}

/// `M` rows of activations.
#[derive(Clone, Copy)]
struct Rows<'a, const M: usize, const LINES: usize> {
    values: [&'a [[Line; LINES]]; M],
    scales: [&'a [Lane]; M],
    sums: [&'a [Lane]; M],
}

/// Some weight rows with `M` rows of activations from `first` on; results go to `place` on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,f16c")]
fn some<
    const BITS: usize,
    const BLOCKS: usize,
    const BYTES: usize,
    const LINES: usize,
    const M: usize,
>(
    weights: &Packed<'_>,
    x: &Quantized,
    (rows, first, place): (Range<usize>, usize, usize),
    factors: &[Factors],
    out: &mut Columns<'_>,
) {
    let mut held = Rows::<M, LINES> { values: [&[]; M], scales: [&[]; M], sums: [&[]; M] };
    for m in 0..M {
        held.values[m] = x.values(first + m).as_chunks::<LINES>().0;
        held.scales[m] = x.scales(first + m);
        held.sums[m] = x.sums(first + m);
    }
    let (row_bytes, runs) = (weights.row_bytes(), held.scales[0].len());
    let count = rows.len();
    let mut elements = [_mm512_setzero_ps(); ROWS_AT_ONCE * MOST_ROWS];
    for (elements, (row, factors)) in
        elements.as_chunks_mut::<MOST_ROWS>().0.iter_mut().zip(rows.zip(factors.chunks_exact(runs)))
    {
        let (runs, rest) = weights.bytes[row * row_bytes..][..row_bytes].as_chunks::<BYTES>();
        let mut lanes = [_mm512_setzero_ps(); M];
        for (run, (packed, factors)) in runs.iter().zip(factors).enumerate() {
            fetch_behind::<BYTES>(packed);
            let turned = turned::<BITS, BLOCKS, false>(packed);
            add::<BITS, BLOCKS, LINES, M>(&mut lanes, &turned, factors, &held, run);
        }
        if !rest.is_empty() {
            let (turned, run) = (turned::<BITS, BLOCKS, true>(rest), runs.len());
            add::<BITS, BLOCKS, LINES, M>(&mut lanes, &turned, &factors[run], &held, run);
        }
        elements[..M].copy_from_slice(&lanes);
    }
    let sums = trees(&elements);
    for m in 0..M {
        let out = &mut out.row(first + m)[place..place + count];
        for (out, sums) in out.iter_mut().zip(sums.as_chunks::<MOST_ROWS>().0) {
            *out = sums[m];
        }
    }
}

/// Adds a turned run to the lanes of `M` elements.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,f16c")]
fn add<const BITS: usize, const BLOCKS: usize, const LINES: usize, const M: usize>(
    lanes: &mut [__m512; M],
    turned: &[__m512i; BLOCKS],
    factors: &Factors,
    x: &Rows<'_, M, LINES>,
    run: usize,
) {
    let mut values = [&x.values[0][run]; M];
    for (values, x) in values.iter_mut().zip(&x.values) {
        *values = &x[run];
    }
    // Two sums each, so that one does not wait for the other.
    let mut dots = [[_mm512_setzero_si512(); 2]; M];
    for (index, block) in turned.iter().enumerate() {
        if BITS == 4 {
            let [even, odd] = nibbles(*block);
            for m in 0..M {
                dots[m][0] = _mm512_dpbusd_epi32(dots[m][0], even, line(&values[m][2 * index]));
                dots[m][1] = _mm512_dpbusd_epi32(dots[m][1], odd, line(&values[m][2 * index + 1]));
            }
        } else {
            for m in 0..M {
                let dot = &mut dots[m][index % 2];
                *dot = _mm512_dpbusd_epi32(*dot, *block, line(&values[m][index]));
            }
        }
    }
    for m in 0..M {
        let dots = in_order::<BLOCKS>(_mm512_add_epi32(dots[m][0], dots[m][1]));
        lanes[m] = factors.add(lanes[m], dots, &x.scales[m][run], &x.sums[m][run]);
    }
}

/// The weights of a run, bytes unless there are two in each, turned: a vector for each word of a
/// span, with a lane for each span.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn turned<const BITS: usize, const BLOCKS: usize, const ENDS: bool>(
    run: &[u8],
) -> [__m512i; BLOCKS] {
    const { assert!(BLOCKS == 4 || BLOCKS == 8 || BLOCKS == 16) };
    let mut blocks = [_mm512_setzero_si512(); BLOCKS];
    for (index, block) in blocks.iter_mut().enumerate() {
        *block = load::<BITS, ENDS>(run, index * block::bytes_of(BITS));
        if BITS == 6 {
            *block = six_bits(*block);
        }
    }
    // Of every four blocks: word `w` of each quarter of all four.
    let mut fours = blocks;
    for quad in 0..BLOCKS / 4 {
        let [a, b, c, d] = [0, 1, 2, 3].map(|index| 4 * quad + index);
        let low = [
            _mm512_unpacklo_epi32(blocks[a], blocks[b]),
            _mm512_unpacklo_epi32(blocks[c], blocks[d]),
        ];
        let high = [
            _mm512_unpackhi_epi32(blocks[a], blocks[b]),
            _mm512_unpackhi_epi32(blocks[c], blocks[d]),
        ];
        fours[a] = _mm512_unpacklo_epi64(low[0], low[1]);
        fours[b] = _mm512_unpackhi_epi64(low[0], low[1]);
        fours[c] = _mm512_unpacklo_epi64(high[0], high[1]);
        fours[d] = _mm512_unpackhi_epi64(high[0], high[1]);
    }
    let mut out = fours;
    match BLOCKS {
        // A quarter is a span.
        4 => {}
        // Two quarters are a span.
        8 => {
            for word in 0..4 {
                let (a, b) = (fours[word], fours[4 + word]);
                out[word] = _mm512_shuffle_i32x4::<0b10_00_10_00>(a, b);
                out[4 + word] = _mm512_shuffle_i32x4::<0b11_01_11_01>(a, b);
            }
        }
        // Four quarters are a span.
        _ => {
            for word in 0..4 {
                let [a, b] = [fours[word], fours[4 + word]];
                let [c, d] = [fours[8 + word], fours[12 + word]];
                let even = _mm512_shuffle_i32x4::<0b10_00_10_00>(a, b);
                let odd = _mm512_shuffle_i32x4::<0b11_01_11_01>(a, b);
                let even_high = _mm512_shuffle_i32x4::<0b10_00_10_00>(c, d);
                let odd_high = _mm512_shuffle_i32x4::<0b11_01_11_01>(c, d);
                out[word] = _mm512_shuffle_i32x4::<0b10_00_10_00>(even, even_high);
                out[4 + word] = _mm512_shuffle_i32x4::<0b10_00_10_00>(odd, odd_high);
                out[8 + word] = _mm512_shuffle_i32x4::<0b11_01_11_01>(even, even_high);
                out[12 + word] = _mm512_shuffle_i32x4::<0b11_01_11_01>(odd, odd_high);
            }
        }
    }
    out
}

/// Sums of turned spans in the spans' order.
#[inline]
#[target_feature(enable = "avx512f")]
fn in_order<const BLOCKS: usize>(dots: __m512i) -> __m512i {
    match BLOCKS {
        // Quarter q, word i: span 4i + q.
        4 => {
            let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            _mm512_permutexvar_epi32(order, dots)
        }
        // Quarter 2 · quad + half, word i: span 8 · quad + 2i + half.
        8 => {
            let order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
            _mm512_permutexvar_epi32(order, dots)
        }
        _ => dots,
    }
}
