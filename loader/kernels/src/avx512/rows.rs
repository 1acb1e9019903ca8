//! Products with interleaved weights ([`crate::repack`]): every 16 spans become 16 exact sums, one
//! in each lane of a vector, by nothing but multiplying and adding bytes.
//!
//! One row of activations meets the weights as fast as memory gives them. Several share what is
//! unpacked: four weight rows by four rows of activations, whose sums registers hold.

use std::{arch::x86_64::*, ops::Range};

use zerocopy::IntoBytes;

use super::{
    block::{Factors, fetch_behind, fetch_far, line, nibbles, six_bits},
    trees,
};
use crate::{
    quantized::{Lane, Line, Order, Packed, Quantized},
    repack::{Packing, QUAD},
    team::Columns,
};

/// Rows of activations that share what is unpacked.
const MOST_ROWS: usize = 4;

/// Rows of activations for which factors are read where they are used.
const MOST_ON_THE_WAY: usize = 2;

/// Bytes of weight rows that all rows of activations meet in turn: half of a small second cache.
const BLOCK_BYTES: usize = 128 << 10;

/// Groups of rows of activations up to which four weight rows meet all of them in turn: then
/// nothing interrupts the stream of weights.
const FEW_GROUPS: usize = 8;

/// Groups above which weights of six bits are unpacked once for all of them: four steps for each
/// line are as much as its products with four rows.
const FEWEST_GROUPS: usize = 2;

/// All rows of `x`, in [`Order::Words`], with the weight rows of `out`.
pub(crate) fn rows(weights: &Packed<'_>, x: &Quantized, out: &mut Columns<'_>) {
    assert!(
        super::is_available() && x.fits(weights, Order::Words),
        "activations for these weights"
    );
    assert_eq!(weights.packing, Packing::Interleaved, "weights for these products");
    assert!(out.range().end <= weights.rows() && out.rows() == x.rows(), "rows of the weights");
    let range = out.range();
    assert!(range.start.is_multiple_of(QUAD) && range.end.is_multiple_of(QUAD), "rows by fours");
    macro_rules! by_form {
        ($(($bits:literal, $span:literal, $units:literal)),*) => {
            match (weights.bits, weights.span) {
                // SAFETY: the processor has been asked.
                $(($bits, $span) => unsafe {
                    all::<$bits, $units, { $span / 4 }>(weights, x, out)
                },)*
                other => unreachable!("the constructor admits no {other:?}"),
            }
        };
    }
    // Bits, inputs of a span, words of a span.
    by_form!((4, 32, 4), (4, 64, 8), (6, 32, 8), (6, 64, 16), (8, 32, 8), (8, 64, 16));
}

/// A run of four rows has `UNITS` words of each span and meets `LINES` lines of activations.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,f16c,fma")]
fn all<const BITS: usize, const UNITS: usize, const LINES: usize>(
    weights: &Packed<'_>,
    x: &Quantized,
    out: &mut Columns<'_>,
) {
    if x.rows() == 1 {
        return alone::<BITS, UNITS, LINES>(weights, x, out);
    }
    let range = out.range();
    let groups = x.rows().div_ceil(MOST_ROWS);
    let at_once = if groups <= FEW_GROUPS {
        QUAD
    } else {
        (BLOCK_BYTES / weights.row_bytes()).next_multiple_of(QUAD).max(QUAD)
    };
    let runs = x.scales(0).len();
    let kept = if x.rows() <= MOST_ON_THE_WAY { 0 } else { at_once / QUAD * runs };
    let mut factors = vec![[Factors::none(); QUAD]; kept];
    // Fields of six bits take several steps to unpack, so it pays to keep them as bytes.
    let unpacks = BITS == 6 && groups > FEWEST_GROUPS;
    let mut bytes =
        vec![Line::default(); if unpacks { at_once * weights.cols() / 64 + 1 } else { 0 }];
    for first in range.clone().step_by(at_once) {
        let rows = first..range.end.min(first + at_once);
        for (quad, factors) in rows.clone().step_by(QUAD).zip(factors.chunks_exact_mut(runs)) {
            for (run, factors) in factors.iter_mut().enumerate() {
                Factors::read(weights, quad, run, factors);
            }
        }
        let packed = weights.bytes_of(rows.clone());
        let unpacked = if unpacks { unpack(packed, &mut bytes) } else { &[] };
        for group in 0..groups {
            // As equal as can be: four rows cost little more than two.
            let of_x = x.rows() * group / groups..x.rows() * (group + 1) / groups;
            let block = Block { packed, rows: rows.clone(), factors: &factors };
            let at = (of_x.start, first - range.start);
            macro_rules! some {
                ($rows:expr) => {
                    if unpacks {
                        let block = Block { packed: unpacked, ..block };
                        some::<8, UNITS, LINES, { $rows }>(weights, x, block, at, out)
                    } else {
                        some::<BITS, UNITS, LINES, { $rows }>(weights, x, block, at, out)
                    }
                };
            }
            match of_x.len() {
                2 => some!(2),
                3 => some!(3),
                _ => some!(MOST_ROWS),
            }
        }
    }
}

/// Bytes of a whole run of four rows.
const fn run_bytes(bits: usize, lines: usize) -> usize {
    lines * 32 * bits
}

/// Weight rows that meet several rows of activations.
struct Block<'a> {
    rows: Range<usize>,
    packed: &'a [u8],
    /// Of every run of four rows, unless they are read on the way.
    factors: &'a [[Factors; QUAD]],
}

/// Six bits of each weight to bytes, in the same order.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn unpack<'a>(packed: &[u8], bytes: &'a mut [Line]) -> &'a [u8] {
    let lines = packed.chunks(48);
    for (packed, line) in lines.zip(&mut *bytes) {
        fetch_behind::<1>(packed);
        // They may end within the last line.
        let mask = u64::MAX >> (64 - packed.len());
        // SAFETY: the mask admits what there is, and a line is as long as the vector.
        unsafe {
            let block = _mm512_maskz_loadu_epi8(mask, packed.as_ptr().cast());
            _mm512_store_si512(line.0.as_mut_ptr().cast(), six_bits(block));
        }
    }
    &bytes.as_bytes()[..packed.len() / 3 * 4]
}

/// One row of activations.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,f16c,fma")]
fn alone<const BITS: usize, const UNITS: usize, const LINES: usize>(
    weights: &Packed<'_>,
    x: &Quantized,
    out: &mut Columns<'_>,
) {
    let range = out.range();
    let x = Rows::<1, LINES>::new(x, 0);
    for (first, out) in range.clone().step_by(16).zip(out.row(0).chunks_mut(16)) {
        // The lanes of 16 elements are added together, which takes a third of the steps.
        let mut elements = [_mm512_setzero_ps(); 16];
        let quads = elements.as_chunks_mut::<QUAD>().0.iter_mut();
        for (lanes, row) in quads.zip((first..first + out.len()).step_by(QUAD)) {
            let packed = weights.bytes_of(row..row + QUAD);
            let quad = lanes_of::<BITS, UNITS, LINES, 1>(weights, (packed, row), &x, &[]);
            *lanes = *quad.as_flattened().first_chunk().expect("as many");
        }
        out.copy_from_slice(&trees(&elements)[..out.len()]);
    }
}

/// Weight rows with `M` rows of activations from `first` on; results go to `place` on.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,f16c,fma")]
fn some<const BITS: usize, const UNITS: usize, const LINES: usize, const M: usize>(
    weights: &Packed<'_>,
    x: &Quantized,
    Block { rows, packed, factors }: Block<'_>,
    (first, place): (usize, usize),
    out: &mut Columns<'_>,
) {
    let runs = x.scales(0).len();
    let x = Rows::<M, LINES>::new(x, first);
    let mut factors = factors.chunks_exact(runs);
    let quads = packed.chunks_exact(QUAD * weights.cols() * BITS / 8);
    for (quad, packed) in rows.clone().step_by(QUAD).zip(quads) {
        let kept = factors.next().unwrap_or_default();
        let lanes = lanes_of::<BITS, UNITS, LINES, M>(weights, (packed, quad), &x, kept);
        let mut elements = [_mm512_setzero_ps(); QUAD * MOST_ROWS];
        for (elements, lanes) in elements.as_chunks_mut::<MOST_ROWS>().0.iter_mut().zip(&lanes) {
            elements[..M].copy_from_slice(lanes);
        }
        let sums = trees(&elements);
        for m in 0..M {
            let out = &mut out.row(first + m)[place + quad - rows.start..][..QUAD];
            for (out, sums) in out.iter_mut().zip(sums.as_chunks::<MOST_ROWS>().0) {
                *out = sums[m];
            }
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

impl<'a, const M: usize, const LINES: usize> Rows<'a, M, LINES> {
    fn new(x: &'a Quantized, first: usize) -> Self {
        let mut rows = Self { values: [&[]; M], scales: [&[]; M], sums: [&[]; M] };
        for m in 0..M {
            rows.values[m] = x.values(first + m).as_chunks().0;
            rows.scales[m] = x.scales(first + m);
            rows.sums[m] = x.sums(first + m);
        }
        rows
    }
}

/// The lanes of the elements of four weight rows, from `row` on, and `M` rows of activations. What
/// factors are not `kept` is read run by run: those of all runs at once interrupt the stream of
/// weights.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,f16c,fma")]
fn lanes_of<const BITS: usize, const UNITS: usize, const LINES: usize, const M: usize>(
    weights: &Packed<'_>,
    (quad, row): (&[u8], usize),
    x: &Rows<'_, M, LINES>,
    kept: &[[Factors; QUAD]],
) -> [[__m512; M]; QUAD] {
    let mut lanes = [[_mm512_setzero_ps(); M]; QUAD];
    let mut now = [Factors::none(); QUAD];
    // The last run may have fewer spans.
    for (run, packed) in quad.chunks(run_bytes(BITS, LINES)).enumerate() {
        let dots = if packed.len() == run_bytes(BITS, LINES) {
            dots::<BITS, UNITS, LINES, M, true>(packed, x, run)
        } else {
            dots::<BITS, UNITS, LINES, M, false>(packed, x, run)
        };
        let factors = if M <= MOST_ON_THE_WAY {
            Factors::read(weights, row, run, &mut now);
            &now
        } else {
            &kept[run]
        };
        add(&mut lanes, &dots, factors, x, run);
    }
    lanes
}

/// Adds the sums of a run to the lanes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,f16c,fma")]
fn add<const M: usize, const LINES: usize>(
    lanes: &mut [[__m512; M]; QUAD],
    dots: &[[__m512i; M]; QUAD],
    factors: &[Factors; QUAD],
    x: &Rows<'_, M, LINES>,
    run: usize,
) {
    for m in 0..M {
        let (scale, sum) = (&x.scales[m][run], &x.sums[m][run]);
        for w in 0..QUAD {
            lanes[w][m] = factors[w].add(lanes[w][m], dots[w][m], scale, sum);
        }
    }
}

/// Adds the products of one unit of a run, `size` bytes of each of four weight rows, to the dots.
macro_rules! meet {
    ($packed:expr, $size:expr, $mask:expr, $values:expr, $unit:expr, $dots:expr) => {{
        let packed: &[u8] = $packed;
        fetch::<BITS, M>(packed);
        let mut weights = [[_mm512_setzero_si512(); 2]; QUAD];
        for (weights, packed) in weights.iter_mut().zip(packed.chunks_exact($size)) {
            // SAFETY: a whole run's chunks are as long as the vector; else the mask admits what
            // there is.
            let block = unsafe {
                if WHOLE && BITS != 6 {
                    _mm512_loadu_si512(packed.as_ptr().cast())
                } else {
                    _mm512_maskz_loadu_epi8($mask, packed.as_ptr().cast())
                }
            };
            *weights = match BITS {
                4 => nibbles(block),
                6 => [six_bits(block); 2],
                _ => [block; 2],
            };
        }
        let halves = if BITS == 4 { 2 } else { 1 };
        for half in 0..halves {
            for m in 0..M {
                let x = line(&$values[m][halves * $unit + half]);
                for w in 0..QUAD {
                    $dots[w][m] = _mm512_dpbusd_epi32($dots[w][m], weights[w][half], x);
                }
            }
        }
    }};
}

/// The exact dot products of a run, a lane for each span; of a `WHOLE` one or of one with fewer.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
fn dots<
    const BITS: usize,
    const UNITS: usize,
    const LINES: usize,
    const M: usize,
    const WHOLE: bool,
>(
    packed: &[u8],
    x: &Rows<'_, M, LINES>,
    run: usize,
) -> [[__m512i; M]; QUAD] {
    let whole = if BITS == 6 { 48 } else { 64 };
    let size = if WHOLE { whole } else { packed.len() / (UNITS * QUAD) };
    let mask = u64::MAX >> (64 - size);
    let mut values = [&x.values[0][run]; M];
    for (values, x) in values.iter_mut().zip(&x.values) {
        *values = &x[run];
    }
    let mut dots = [[_mm512_setzero_si512(); M]; QUAD];
    macro_rules! units {
        ($($unit:literal)*) => {
            $(if $unit < UNITS {
                let packed = &packed[$unit * QUAD * size..][..QUAD * size];
                meet!(packed, size, mask, values, $unit, dots);
            })*
        };
    }
    // One row reads its weights by itself, see `fetch`.
    if WHOLE && M == 1 {
        assert_eq!(packed.len(), UNITS * QUAD * size, "a whole run");
        units!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
    } else {
        for (unit, packed) in packed.chunks_exact(QUAD * size).take(UNITS).enumerate() {
            meet!(packed, size, mask, values, unit, dots);
        }
    }
    dots
}

/// Fetches what comes after some weights. Zen 4 reads ahead by itself for one row, and fetches of
/// ours take a quarter of its speed; eight bits, whose lines come fastest, gain from those that go
/// to the second cache only. With several rows more is computed for each line than it looks ahead.
#[inline]
#[target_feature(enable = "avx512f")]
fn fetch<const BITS: usize, const M: usize>(packed: &[u8]) {
    match (BITS, M) {
        (8, 1) => fetch_far::<4>(packed),
        (_, 1) => {}
        (6, _) => fetch_behind::<3>(packed),
        _ => fetch_behind::<4>(packed),
    }
}
