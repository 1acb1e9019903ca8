//! Products with interleaved weights ([`crate::repack`]): every 16 spans become 16 exact sums, one
//! in each lane of a vector, by nothing but multiplying and adding bytes.
//!
//! One row (GEMV) is bound by memory bandwidth. Several (GEMM) share what is
//! unpacked: four weight rows by four rows of activations, whose sums registers hold.

use std::{arch::x86_64::*, ops::Range};

use zerocopy::IntoBytes;

use super::{
    block::{Factors, fetch_behind, fetch_far, line, nibbles, six_bits},
    trees,
};
use crate::{
    floats::Floats,
    quantized::{ActivationLayout, Lane, Line, Packed, Quantized},
    repack::{Packing, QUAD},
    team::Columns,
};

/// Rows of activations that share what is unpacked.
const MOST_ROWS: usize = 4;

/// Rows of activations for which factors are read where they are used.
const MOST_ON_THE_WAY: usize = 2;

/// Bytes of activations that stay in an L1 cache of 32 KiB through which weights go, measured.
const MOST_THAT_STAY: usize = 8 << 10;

/// Bytes of weight rows that all rows of activations are multiplied with in turn: half of a small L2 cache.
const BLOCK_BYTES: usize = 128 << 10;

/// Groups of rows of activations up to which four weight rows meet all of them in turn: then
/// nothing interrupts the stream of weights.
const FEW_GROUPS: usize = 8;

/// Groups above which weights of six bits are unpacked once for all of them: four steps for each
/// line are as much as its products with four rows.
const FEWEST_GROUPS: usize = 2;

/// The exact dot products of a run, `[weight row][row of activations]`, a lane for each span; its
/// units have `size` bytes of each row, fewer in the last run. The units are a loop whose length the compiler
/// does not know: it would load a whole run's weights before it meets any.
macro_rules! dots {
    ($bits:expr, $rows:expr, $packed:expr, $values:expr, $size:expr, $rows_stay:expr) => {{
        let size = $size;
        let mask = u64::MAX >> (64 - size);
        let halves = if $bits == 4 { 2 } else { 1 };
        let mut dots = [[_mm512_setzero_si512(); $rows]; QUAD];
        for (unit, packed) in $packed.chunks_exact(QUAD * size).enumerate() {
            fetch::<$bits, $rows>(packed, $rows_stay);
            let mut weights = [[_mm512_setzero_si512(); 2]; QUAD];
            for (weights, packed) in weights.iter_mut().zip(packed.chunks_exact(size)) {
                // SAFETY: the mask admits what the slice holds.
                let block = unsafe { _mm512_maskz_loadu_epi8(mask, packed.as_ptr().cast()) };
                *weights = match $bits {
                    4 => nibbles(block),
                    6 => [six_bits(block); 2],
                    _ => [block; 2],
                };
            }
            for half in 0..halves {
                for m in 0..$rows {
                    let x = line(&$values[m][halves * unit + half]);
                    for w in 0..QUAD {
                        dots[w][m] = _mm512_dpbusd_epi32(dots[w][m], weights[w][half], x);
                    }
                }
            }
        }
        dots
    }};
}

/// Bytes of a unit of a run with 16 spans.
const fn unit_bytes(bits: usize) -> usize {
    if bits == 6 { 48 } else { 64 }
}

/// All rows of `x`, in [`ActivationLayout::Interleaved`], with the weight rows of `out`.
pub(crate) fn rows(weights: &Packed<'_>, x: &Quantized, out: &mut Columns<'_>) {
    assert!(
        super::is_available() && x.fits(weights, ActivationLayout::Interleaved),
        "activations for these weights"
    );
    assert_eq!(weights.packing, Packing::Interleaved, "weights for these products");
    assert!(out.range().end <= weights.rows() && out.rows() == x.rows(), "rows of the weights");
    let range = out.range();
    assert!(range.start.is_multiple_of(QUAD) && range.end.is_multiple_of(QUAD), "rows by fours");
    // SAFETY: the processor has been asked.
    unsafe {
        match weights.bits {
            4 => all::<4>(weights, x, out),
            6 => all::<6>(weights, x, out),
            8 => all::<8>(weights, x, out),
            other => unreachable!("the constructor admits no {other} bits"),
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,f16c,fma")]
fn all<const BITS: usize>(weights: &Packed<'_>, x: &Quantized, out: &mut Columns<'_>) {
    if x.rows() == 1 {
        return gemv::<BITS>(weights, x, out);
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
                        some::<8, { $rows }>(weights, x, block, at, out)
                    } else {
                        some::<BITS, { $rows }>(weights, x, block, at, out)
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
fn gemv<const BITS: usize>(weights: &Packed<'_>, x: &Quantized, out: &mut Columns<'_>) {
    let range = out.range();
    let x = Rows::<1>::new(weights.span, x, 0);
    for (first, out) in range.clone().step_by(16).zip(out.row(0).chunks_mut(16)) {
        // The lanes of 16 elements are added together, which takes a third of the steps.
        let mut elements = [_mm512_setzero_ps(); 16];
        let quads = elements.as_chunks_mut::<QUAD>().0.iter_mut();
        for (lanes, row) in quads.zip((first..first + out.len()).step_by(QUAD)) {
            let packed = weights.bytes_of(row..row + QUAD);
            let quad = lanes_of::<BITS, 1>(weights, (packed, row), &x, &[]);
            *lanes = *quad.as_flattened().first_chunk().expect("as many");
        }
        out.copy_from_slice(&trees(&elements)[..out.len()]);
    }
}

/// Weight rows with `M` rows of activations from `first` on; results go to `place` on.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,f16c,fma")]
fn some<const BITS: usize, const M: usize>(
    weights: &Packed<'_>,
    x: &Quantized,
    Block { rows, packed, factors }: Block<'_>,
    (first, place): (usize, usize),
    out: &mut Columns<'_>,
) {
    let runs = x.scales(0).len();
    let x = Rows::<M>::new(weights.span, x, first);
    let mut factors = factors.chunks_exact(runs);
    let quads = packed.chunks_exact(QUAD * weights.cols() * BITS / 8);
    for (quad, packed) in rows.clone().step_by(QUAD).zip(quads) {
        let kept = factors.next().unwrap_or_default();
        let lanes = lanes_of::<BITS, M>(weights, (packed, quad), &x, kept);
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
struct Rows<'a, const M: usize> {
    /// Lines that meet a run of weights.
    lines: usize,
    /// Whether the values stay in the L1 cache while weights go through it.
    stay: bool,
    values: [&'a [Line]; M],
    scales: [&'a [Lane]; M],
    sums: [&'a [Lane]; M],
}

impl<'a, const M: usize> Rows<'a, M> {
    fn new(span: usize, x: &'a Quantized, first: usize) -> Self {
        let stay = M * size_of_val(x.values(first)) <= MOST_THAT_STAY;
        let mut rows =
            Self { lines: span / 4, stay, values: [&[]; M], scales: [&[]; M], sums: [&[]; M] };
        for m in 0..M {
            rows.values[m] = x.values(first + m);
            rows.scales[m] = x.scales(first + m);
            rows.sums[m] = x.sums(first + m);
        }
        rows
    }

    /// Bytes of a whole run of four weight rows.
    const fn run_bytes(&self, bits: usize) -> usize {
        self.lines * 32 * bits
    }

    /// The lines that meet a run.
    fn of_run(&self, run: usize) -> [&'a [Line]; M] {
        self.values.map(|values| &values[run * self.lines..][..self.lines])
    }
}

/// The lanes of the elements of four weight rows, from `row` on, and `M` rows of activations. What
/// factors are not `kept` is read run by run: those of all runs at once interrupt the stream of
/// weights.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,f16c,fma")]
fn lanes_of<const BITS: usize, const M: usize>(
    weights: &Packed<'_>,
    (quad, row): (&[u8], usize),
    x: &Rows<'_, M>,
    kept: &[[Factors; QUAD]],
) -> [[__m512; M]; QUAD] {
    let mut lanes = [[_mm512_setzero_ps(); M]; QUAD];
    let met = if M <= MOST_ON_THE_WAY {
        whole_runs::<BITS, M>(weights, (quad, row), x, &mut lanes)
    } else {
        0
    };
    let whole = x.run_bytes(BITS);
    let units = whole / (QUAD * unit_bytes(BITS));
    let mut now = [Factors::none(); QUAD];
    // The last run may have fewer spans.
    for (run, packed) in quad.chunks(whole).enumerate().skip(met) {
        let values = x.of_run(run);
        let dots = if packed.len() == whole {
            dots!(BITS, M, packed, values, const { unit_bytes(BITS) }, x.stay)
        } else {
            dots!(BITS, M, packed, values, packed.len() / (units * QUAD), x.stay)
        };
        let factors = if M <= MOST_ON_THE_WAY {
            Factors::read(weights, row, run, &mut now);
            &now
        } else {
            &kept[run]
        };
        for m in 0..M {
            let (scale, sum) = (&x.scales[m][run], &x.sums[m][run]);
            for w in 0..QUAD {
                lanes[w][m] = factors[w].add(lanes[w][m], dots[w][m], scale, sum);
            }
        }
    }
    lanes
}

/// Adds the sums of all whole runs to the lanes, if factors are halves; how many runs these are.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,f16c,fma")]
fn whole_runs<const BITS: usize, const M: usize>(
    weights: &Packed<'_>,
    (quad, row): (&[u8], usize),
    x: &Rows<'_, M>,
    lanes: &mut [[__m512; M]; QUAD],
) -> usize {
    let per_row = weights.row_scales();
    let of_quad = row * per_row..(row + QUAD) * per_row;
    macro_rules! halves {
        ($scales:expr, $biases:expr, $bf16:literal) => {{
            let factors = [&$scales[of_quad.clone()], &$biases[of_quad]];
            if weights.spans_per_scale == 2 {
                with_halves::<BITS, M, $bf16, true>(quad, factors, x, lanes)
            } else {
                with_halves::<BITS, M, $bf16, false>(quad, factors, x, lanes)
            }
        }};
    }
    match (weights.scales, weights.biases) {
        (Floats::F16(scales), Floats::F16(biases)) => halves!(scales, biases, false),
        (Floats::BF16(scales), Floats::BF16(biases)) => halves!(scales, biases, true),
        _ => return 0,
    }
    quad.len() / x.run_bytes(BITS)
}

/// Adds the sums of all whole runs of four weight rows with such scales and biases to the lanes.
/// Nothing is called and all sums stay in registers, so that weights keep coming meanwhile.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,f16c,fma")]
fn with_halves<const BITS: usize, const M: usize, const BF16: bool, const SHARED: bool>(
    quad: &[u8],
    factors: [&[u16]; 2],
    x: &Rows<'_, M>,
    lanes: &mut [[__m512; M]; QUAD],
) {
    let per_row = factors[0].len() / QUAD;
    let mut all = *lanes;
    for (run, packed) in quad.chunks_exact(x.run_bytes(BITS)).enumerate() {
        let values = x.of_run(run);
        let dots = dots!(BITS, M, packed, values, const { unit_bytes(BITS) }, x.stay);
        for w in 0..QUAD {
            let factors = Factors::halves::<BF16, SHARED>(factors, w * per_row, run);
            for m in 0..M {
                let (scale, sum) = (&x.scales[m][run], &x.sums[m][run]);
                all[w][m] = factors.add(all[w][m], dots[w][m], scale, sum);
            }
        }
    }
    *lanes = all;
}

/// Fetches what comes after some weights. Zen 4 reads ahead by itself for one row, and for two as
/// long as they stay in the L1 cache beside the weights: fetches of ours then take a quarter of
/// its speed; eight bits, whose lines come fastest, gain from those that go to the L2 cache
/// only. Where more is computed for each line it looks ahead too little.
#[inline]
#[target_feature(enable = "avx512f")]
fn fetch<const BITS: usize, const M: usize>(packed: &[u8], rows_stay: bool) {
    match (BITS, M) {
        (8, 1) => fetch_far::<4>(packed),
        (_, 1) => {}
        (8, 2) if rows_stay => fetch_far::<4>(packed),
        (4, 2) if rows_stay => {}
        (6, _) => fetch_behind::<3>(packed),
        _ => fetch_behind::<4>(packed),
    }
}
