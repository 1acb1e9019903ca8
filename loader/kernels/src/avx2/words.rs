//! Products with interleaved weights ([`crate::repack`]): as on AVX-512, with half as wide vectors.
//! Bytes are multiplied in pairs whose sums have 16 bits; as many of these are added as cannot
//! overflow before they are widened.
//!
//! One row of activations meets the weights as fast as memory gives them. Several share what is
//! unpacked: two weight rows by four rows of activations, whose sums registers hold.

use std::{arch::x86_64::*, hint::black_box, ops::Range};

use zerocopy::IntoBytes;

use super::{
    floats_at,
    forms::{Bytes, Form, Nibbles, SixBits, Unpacked},
    rows::{load, load_words},
};
use crate::{
    floats::Floats,
    quantized::{Lane, Line, Order, Packed, Quantized, SPANS},
    repack::{Packing, QUAD},
    team::Columns,
};

/// Rows of activations that share what is unpacked.
const MOST_ROWS: usize = 4;

/// Spans of a vector.
const HALF: usize = SPANS / 2;

/// Bytes of weight rows that all rows of activations meet in turn: a part of a small second cache.
const BLOCK_BYTES: usize = 128 << 10;

/// Groups of rows of activations up to which four weight rows meet all of them in turn: then
/// nothing interrupts the stream of weights.
const FEW_GROUPS: usize = 8;

/// Groups above which weights of six bits are unpacked once for all of them.
const FEWEST_GROUPS: usize = 2;

/// Bytes ahead that are fetched into the first cache for one row of activations.
const NEAR: usize = 2048;

/// Fours of weight rows that meet a run of several rows of activations in turn, which stay in the
/// first cache meanwhile.
const MOST_QUADS: usize = 8;

/// All rows of `x`, in [`Order::Words`], with the weight rows of `out`.
pub(crate) fn words(weights: &Packed<'_>, x: &Quantized, out: &mut Columns<'_>) {
    assert!(
        super::is_available() && x.fits(weights, Order::Words),
        "activations for these weights"
    );
    assert_eq!(weights.packing, Packing::Interleaved, "weights for these products");
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
    // Fields of six bits take several steps to unpack, so it pays to keep them as bytes.
    let unpacks = F::UNIT == SixBits::UNIT && groups > FEWEST_GROUPS;
    let mut bytes =
        vec![Line::default(); if unpacks { at_once * weights.cols() / 64 + 2 } else { 0 }];
    for first in range.clone().step_by(at_once) {
        let rows = first..range.end.min(first + at_once);
        let packed = weights.bytes_of(rows.start..weights.rows());
        if unpacks {
            unpack(&packed[..rows.len() * weights.row_bytes()], &mut bytes);
        }
        for group in 0..groups {
            // As equal as can be: four rows cost little more than two.
            let of_x = x.rows() * group / groups..x.rows() * (group + 1) / groups;
            let at = (of_x.start, first - range.start);
            let block = Block { rows: rows.clone(), packed };
            let kept = Block { rows: rows.clone(), packed: bytes.as_bytes() };
            macro_rules! some {
                ($rows:expr, $together:expr) => {
                    if unpacks {
                        some::<Unpacked, { $together }, { $rows }>(weights, x, kept, at, out)
                    } else {
                        some::<F, { $together }, { $rows }>(weights, x, block, at, out)
                    }
                };
            }
            match of_x.len() {
                1 => alone::<F>(weights, x, block, at, out),
                2 => some!(2, 2),
                3 => some!(3, 2),
                _ => some!(MOST_ROWS, 2),
            }
        }
    }
}

/// Weight rows that meet several rows of activations.
struct Block<'a> {
    rows: Range<usize>,
    /// From the first of them on, beyond the last if there is more.
    packed: &'a [u8],
}

/// Six bits of each weight to bytes, in the same order; what follows them may be anything.
#[inline]
#[target_feature(enable = "avx2")]
fn unpack(packed: &[u8], bytes: &mut [Line]) {
    let mut places = bytes.as_mut_bytes().chunks_exact_mut(32);
    for (index, place) in (0..packed.len()).step_by(SixBits::READ).zip(&mut places) {
        let [weights, _] = SixBits::prepared(SixBits::load_some(&packed[index..]));
        // SAFETY: the place is as long as the vector.
        unsafe { _mm256_storeu_si256(place.as_mut_ptr().cast(), weights) };
    }
}

/// `M` rows of activations.
#[derive(Clone, Copy)]
struct Rows<'a, const M: usize> {
    /// Lines that meet a run of weights.
    lines: usize,
    /// Units whose products are added in 16 bits. The compiler does not know how many: it would
    /// load all their weights before it meets any.
    together: usize,
    values: [&'a [Line]; M],
    scales: [&'a [Lane]; M],
    sums: [&'a [Lane]; M],
    totals: [&'a [i32]; M],
}

impl<'a, const M: usize> Rows<'a, M> {
    fn new<F: Form>(span: usize, x: &'a Quantized, first: usize) -> Self {
        let mut rows = Self {
            lines: span / 4,
            together: black_box(F::TOGETHER),
            values: [&[]; M],
            scales: [&[]; M],
            sums: [&[]; M],
            totals: [&[]; M],
        };
        for m in 0..M {
            rows.values[m] = x.values(first + m);
            rows.scales[m] = x.scales(first + m);
            rows.sums[m] = x.sums(first + m);
            rows.totals[m] = x.totals(first + m);
        }
        rows
    }

    fn of_run(&self, run: usize) -> Run<'a, M> {
        let lines = self.lines;
        let mut of_run = Run {
            together: self.together,
            values: [&[]; M],
            scales: [&self.scales[0][run]; M],
            sums: [&self.sums[0][run]; M],
            totals: [&[0; SPANS]; M],
        };
        for m in 0..M {
            of_run.values[m] = &self.values[m][run * lines..][..lines];
            of_run.scales[m] = &self.scales[m][run];
            of_run.sums[m] = &self.sums[m][run];
            of_run.totals[m] = &self.totals[m].as_chunks().0[run];
        }
        of_run
    }
}

/// What a run of weights meets of `M` rows of activations.
#[derive(Clone, Copy)]
struct Run<'a, const M: usize> {
    /// As in [`Rows`].
    together: usize,
    values: [&'a [Line]; M],
    scales: [&'a Lane; M],
    sums: [&'a Lane; M],
    totals: [&'a [i32; SPANS]; M],
}

/// Weight rows with one row of activations, number `m`; results go to `place` on.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
fn alone<F: Form>(
    weights: &Packed<'_>,
    x: &Quantized,
    Block { rows, packed }: Block<'_>,
    (m, place): (usize, usize),
    out: &mut Columns<'_>,
) {
    let x = Rows::<1>::new::<F>(weights.span, x, m);
    let factors = Factors::new(weights);
    let units = x.lines / F::LINES;
    let run_bytes = QUAD * SPANS * units * F::UNIT;
    let quads = packed.chunks(QUAD * weights.spans * units * F::UNIT);
    for (quad, row) in quads.zip(rows.clone().step_by(QUAD)) {
        let mut lanes = [[[_mm256_setzero_ps(); 2]; 1]; QUAD];
        let met = factors.whole_runs::<F>(quad, row, &x, &mut lanes);
        for (run, packed) in quad.chunks(run_bytes).enumerate().skip(met) {
            let (of_x, size) = (x.of_run(run), packed.len() / units / QUAD);
            for half in 0..(size / F::UNIT).div_ceil(HALF) {
                let packed = &packed[half * HALF * F::UNIT..];
                let place = Place { packed, units, size, ahead: NEAR };
                let dots = dots_within::<F, QUAD, 1>(place, &of_x, half);
                for (w, (lanes, dots)) in lanes.iter_mut().zip(dots).enumerate() {
                    let factors = factors.eight(row + w, run * SPANS + half * HALF);
                    sum::<F, 1>(factors, dots, &of_x, half, lanes);
                }
            }
        }
        let sums = four_trees(lanes.map(|[lanes]| lanes));
        let out = &mut out.row(m)[place + row - rows.start..][..QUAD];
        // SAFETY: the slice above is as long as the vector.
        unsafe { _mm_storeu_ps(out.as_mut_ptr(), sums) };
    }
}

/// Adds the sums of all whole runs of four weight rows with such scales and biases to the lanes;
/// how many runs these are. Nothing is called, so that weights keep coming meanwhile.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
fn with_halves<F: Form, const BF16: bool, const SHARED: bool>(
    quad: &[u8],
    [scales, biases]: [&[u16]; 2],
    x: &Rows<'_, 1>,
    lanes: &mut [[[__m256; 2]; 1]; QUAD],
) -> usize {
    let units = x.lines / F::LINES;
    let runs = quad.chunks_exact(QUAD * SPANS * units * F::UNIT);
    let (count, per_row) = (runs.len(), scales.len() / QUAD);
    for (run, packed) in runs.enumerate() {
        let x = x.of_run(run);
        let dots = whole_dots::<F>(packed, units, &x);
        for (w, (lanes, dots)) in lanes.iter_mut().zip(dots).enumerate() {
            let scales = halves::<BF16, SHARED>(&scales[w * per_row..], run);
            let biases = halves::<BF16, SHARED>(&biases[w * per_row..], run);
            for half in 0..2 {
                sum::<F, 1>((scales[half], biases[half]), [dots[half]], &x, half, lanes);
            }
        }
    }
    count
}

/// Of the spans of a run, from a row's halves; if `SHARED` there is one for two spans each.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn halves<const BF16: bool, const SHARED: bool>(of_row: &[u16], run: usize) -> [__m256; 2] {
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
        let all = floats(of_row[run * HALF..].first_chunk().expect("of a whole run"));
        let first = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
        let last = _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7);
        return [_mm256_permutevar8x32_ps(all, first), _mm256_permutevar8x32_ps(all, last)];
    }
    let all: &[_; SPANS] = of_row[run * SPANS..].first_chunk().expect("of a whole run");
    let [first, last] = all.as_chunks().0 else { unreachable!("two halves") };
    [floats(first), floats(last)]
}

/// The exact dot products of a whole run of four weight rows with one row of activations, in both
/// halves. Every line of the cache is met once, so that lines keep coming.
#[inline]
#[target_feature(enable = "avx2")]
fn whole_dots<F: Form>(packed: &[u8], units: usize, x: &Run<'_, 1>) -> [[__m256i; 2]; QUAD] {
    let size = SPANS * F::UNIT;
    assert_eq!(packed.len(), units * QUAD * size, "a whole run");
    assert_eq!(x.values[0].len(), units * F::LINES, "activations");
    // SAFETY: a line is as long as two vectors, and there are as many lines.
    let x_of = |line: usize, half: usize| unsafe {
        _mm256_load_si256(x.values[0].as_ptr().add(line).cast::<__m256i>().add(half))
    };
    let prepared = |unit: usize, w: usize, half: usize| {
        let from = packed.as_ptr().wrapping_add((unit * QUAD + w) * size + half * F::READ);
        if half == 0 {
            _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(NEAR).cast());
        }
        // SAFETY: there are as many bytes, as has just been asserted.
        F::prepared(unsafe { F::load(from) })
    };
    let ones = _mm256_set1_epi16(1);
    let mut dots = [[_mm256_setzero_si256(); 2]; QUAD];
    let mut unit = 0;
    while unit < units {
        let mut pairs = [[_mm256_setzero_si256(); 2]; QUAD];
        let end = units.min(unit + if F::TOGETHER <= 2 { F::TOGETHER } else { x.together });
        while unit < end {
            for w in 0..QUAD {
                for half in 0..2 {
                    let weights = prepared(unit, w, half);
                    for line in 0..F::LINES {
                        let product = F::product(weights, line, x_of(unit * F::LINES + line, half));
                        pairs[w][half] = _mm256_add_epi16(pairs[w][half], product);
                    }
                }
            }
            unit += 1;
        }
        for (dots, pairs) in dots.as_flattened_mut().iter_mut().zip(pairs.as_flattened()) {
            *dots = _mm256_add_epi32(*dots, _mm256_madd_epi16(*pairs, ones));
        }
    }
    dots
}

/// Weight rows with `M` rows of activations from `first` on, of which `W` weight rows at a time
/// share what is read; results go to `place` on.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
fn some<F: Form, const W: usize, const M: usize>(
    weights: &Packed<'_>,
    x: &Quantized,
    Block { rows, packed }: Block<'_>,
    (first, place): (usize, usize),
    out: &mut Columns<'_>,
) {
    let x = Rows::<M>::new::<F>(weights.span, x, first);
    let factors = Factors::new(weights);
    let units = x.lines / F::LINES;
    let quad_bytes = QUAD * weights.spans * units * F::UNIT;
    let whole = QUAD * SPANS * units * F::UNIT;
    let runs = weights.spans.div_ceil(SPANS);
    let mut lanes = [[[[_mm256_setzero_ps(); 2]; M]; QUAD]; MOST_QUADS];
    for start in rows.clone().step_by(MOST_QUADS * QUAD) {
        let quads = (rows.end - start).div_ceil(QUAD).min(MOST_QUADS);
        let packed = &packed[(start - rows.start) / QUAD * quad_bytes..];
        let lanes = &mut lanes[..quads];
        lanes.fill([[[_mm256_setzero_ps(); 2]; M]; QUAD]);
        for run in 0..runs {
            let held = (weights.spans - run * SPANS).min(SPANS);
            let size = held * F::UNIT;
            // The same place of the next run, or of the next rows' first.
            let ahead = if run + 1 < runs { whole } else { quads * quad_bytes - run * whole };
            let of_x = x.of_run(run);
            for (quad, lanes) in lanes.iter_mut().enumerate() {
                let packed = &packed[quad * quad_bytes + run * whole..];
                for pair in 0..QUAD / W {
                    let lanes: &mut [_; W] =
                        lanes[pair * W..].first_chunk_mut().expect("as many rows");
                    let row = start + quad * QUAD + pair * W;
                    for half in 0..2 {
                        if half * HALF < held {
                            let at = pair * W * size + half * HALF * F::UNIT;
                            let place = Place { packed: &packed[at..], units, size, ahead };
                            let mut of_rows = [(_mm256_setzero_ps(), _mm256_setzero_ps()); W];
                            for (w, of_row) in of_rows.iter_mut().enumerate() {
                                *of_row = factors.eight(row + w, run * SPANS + half * HALF);
                            }
                            add::<F, W, M>(&of_rows, place, &of_x, half, lanes);
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
struct Place<'a> {
    /// Begins with those of the first row.
    packed: &'a [u8],
    /// Units of a span.
    units: usize,
    /// Bytes of a unit of a row.
    size: usize,
    /// Bytes ahead that are fetched.
    ahead: usize,
}

/// Adds eight spans to the lanes of `W` weight rows with these scales and biases.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn add<F: Form, const W: usize, const M: usize>(
    factors: &[(__m256, __m256); W],
    place: Place<'_>,
    x: &Run<'_, M>,
    half: usize,
    lanes: &mut [[[__m256; 2]; M]; W],
) {
    let dots = dots_within::<F, W, M>(place, x, half);
    for w in 0..W {
        sum::<F, M>(factors[w], dots[w], x, half, &mut lanes[w]);
    }
}

/// Adds the exact sums of eight spans to the lanes of a weight row with this scale and bias.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn sum<F: Form, const M: usize>(
    (scale, bias): (__m256, __m256),
    dots: [__m256i; M],
    x: &Run<'_, M>,
    half: usize,
    lanes: &mut [[__m256; 2]; M],
) {
    for m in 0..M {
        let mut dots = dots[m];
        if F::LESS_128 {
            let totals = load_words(&x.totals[m].as_chunks::<HALF>().0[half]);
            dots = _mm256_add_epi32(dots, _mm256_slli_epi32::<7>(totals));
        }
        let (x_scale, x_sum) = (x.scales[m].half(half), x.sums[m].half(half));
        let sum = _mm256_fmadd_ps(bias, load(x_sum), lanes[m][half]);
        let scale = _mm256_mul_ps(scale, load(x_scale));
        lanes[m][half] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots), scale, sum);
    }
}

/// [`dots`], also where `packed` ends before the last vector does.
#[inline]
#[target_feature(enable = "avx2")]
fn dots_within<F: Form, const W: usize, const M: usize>(
    place: Place<'_>,
    x: &Run<'_, M>,
    half: usize,
) -> [[__m256i; M]; W] {
    // What is read beyond the eighth span belongs to others and meets zeros.
    let last = ((place.units - 1) * QUAD + W - 1) * place.size;
    if place.packed.len() >= last + F::READ {
        dots::<F, W, M, false>(place, x, half)
    } else {
        last_dots::<F, W, M>(place, x, half)
    }
}

/// [`dots`] where `packed` ends before the last vector does.
#[cold]
#[inline(never)]
#[target_feature(enable = "avx2")]
fn last_dots<F: Form, const W: usize, const M: usize>(
    place: Place<'_>,
    x: &Run<'_, M>,
    half: usize,
) -> [[__m256i; M]; W] {
    dots::<F, W, M, true>(place, x, half)
}

/// The exact dot products of eight spans, `[weight row][row of activations]`, a lane for each
/// span. At the `END` of `packed` it is read with care.
#[inline]
#[target_feature(enable = "avx2")]
fn dots<F: Form, const W: usize, const M: usize, const END: bool>(
    Place { packed, units, size, ahead }: Place<'_>,
    x: &Run<'_, M>,
    half: usize,
) -> [[__m256i; M]; W] {
    let last = ((units - 1) * QUAD + W - 1) * size;
    assert!(packed.len() > last && (END || packed.len() >= last + F::READ), "weights");
    let mut values = [std::ptr::null::<__m256i>(); M];
    for (values, lines) in values.iter_mut().zip(x.values) {
        assert!(half < 2 && lines.len() == units * F::LINES, "halves of a whole run");
        *values = lines.as_ptr().cast::<__m256i>().wrapping_add(half);
    }
    // SAFETY: there are as many lines, as has just been asserted, each as long as two vectors.
    let x_of = |m: usize, line: usize| unsafe { _mm256_load_si256(values[m].add(2 * line)) };
    let prepared = |unit: usize, w: usize| {
        let at = (unit * QUAD + w) * size;
        let from = packed.as_ptr().wrapping_add(at);
        // Every line once, half of them with either half.
        if unit % 2 == half {
            _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(ahead).cast());
        }
        // SAFETY: the last of them is there, as has just been asserted.
        F::prepared(if END { F::load_some(&packed[at..]) } else { unsafe { F::load(from) } })
    };
    let ones = _mm256_set1_epi16(1);
    let mut dots = [[_mm256_setzero_si256(); M]; W];
    if F::TOGETHER <= 2 {
        for unit in (0..units).step_by(F::TOGETHER) {
            let mut weights = [[[_mm256_setzero_si256(); 2]; 2]; W];
            for (w, weights) in weights.iter_mut().enumerate() {
                for (next, weights) in weights.iter_mut().enumerate().take(F::TOGETHER) {
                    *weights = prepared(unit + next, w);
                }
            }
            for m in 0..M {
                let x = [x_of(m, unit), x_of(m, unit + F::TOGETHER - 1)];
                for w in 0..W {
                    let mut pairs = F::product(weights[w][0], 0, x[0]);
                    if F::TOGETHER == 2 {
                        pairs = _mm256_add_epi16(pairs, F::product(weights[w][1], 0, x[1]));
                    }
                    dots[w][m] = _mm256_add_epi32(dots[w][m], _mm256_madd_epi16(pairs, ones));
                }
            }
        }
        return dots;
    }
    let mut unit = 0;
    while unit < units {
        let mut pairs = [[_mm256_setzero_si256(); M]; W];
        let end = units.min(unit + x.together);
        while unit < end {
            let mut weights = [[_mm256_setzero_si256(); 2]; W];
            for (w, weights) in weights.iter_mut().enumerate() {
                *weights = prepared(unit, w);
            }
            for line in 0..F::LINES {
                for m in 0..M {
                    let x = x_of(m, unit * F::LINES + line);
                    for w in 0..W {
                        let product = F::product(weights[w], line, x);
                        pairs[w][m] = _mm256_add_epi16(pairs[w][m], product);
                    }
                }
            }
            unit += 1;
        }
        for (dots, pairs) in dots.as_flattened_mut().iter_mut().zip(pairs.as_flattened()) {
            *dots = _mm256_add_epi32(*dots, _mm256_madd_epi16(*pairs, ones));
        }
    }
    dots
}

/// Scales and biases of weight rows.
struct Factors<'a> {
    scales: Floats<'a>,
    biases: Floats<'a>,
    spans: usize,
    per_row: usize,
    /// Whether two spans share each.
    shared: bool,
}

impl<'a> Factors<'a> {
    fn new(weights: &Packed<'a>) -> Self {
        Self {
            scales: weights.scales,
            biases: weights.biases,
            spans: weights.spans,
            per_row: weights.row_scales(),
            shared: weights.spans_per_scale == 2,
        }
    }

    /// [`with_halves`] of four rows from `row` on, where these are halves.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn whole_runs<F: Form>(
        &self,
        quad: &[u8],
        row: usize,
        x: &Rows<'_, 1>,
        lanes: &mut [[[__m256; 2]; 1]; QUAD],
    ) -> usize {
        let of_quad = row * self.per_row..(row + QUAD) * self.per_row;
        let (bf16, factors) = match (self.scales, self.biases) {
            (Floats::BF16(scales), Floats::BF16(biases)) => (true, [scales, biases]),
            (Floats::F16(scales), Floats::F16(biases)) => (false, [scales, biases]),
            _ => return 0,
        };
        let factors = factors.map(|factors| &factors[of_quad.clone()]);
        match (bf16, self.shared) {
            (true, false) => with_halves::<F, true, false>(quad, factors, x, lanes),
            (true, true) => with_halves::<F, true, true>(quad, factors, x, lanes),
            (false, false) => with_halves::<F, false, false>(quad, factors, x, lanes),
            (false, true) => with_halves::<F, false, true>(quad, factors, x, lanes),
        }
    }

    /// Scales and biases of eight spans from `first` on, zero beyond the row's end.
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    fn eight(&self, row: usize, first: usize) -> (__m256, __m256) {
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

/// The sums of the lanes of four elements, halves added to halves.
#[inline]
#[target_feature(enable = "avx2")]
fn four_trees(lanes: [[__m256; 2]; QUAD]) -> __m128 {
    let [a, b, c, d] = lanes.map(|[low, high]| _mm256_add_ps(low, high));
    let four = |a, b| {
        let low = _mm256_permute2f128_ps::<0x20>(a, b);
        _mm256_add_ps(low, _mm256_permute2f128_ps::<0x31>(a, b))
    };
    let (ab, cd) = (four(a, b), four(c, d));
    let low = _mm256_shuffle_ps::<0b01_00_01_00>(ab, cd);
    let twos = _mm256_add_ps(low, _mm256_shuffle_ps::<0b11_10_11_10>(ab, cd));
    let even = _mm256_shuffle_ps::<0b10_00_10_00>(twos, twos);
    let sums = _mm256_add_ps(even, _mm256_shuffle_ps::<0b11_01_11_01>(twos, twos));
    // The first half has those of a and c, the second those of b and d.
    _mm_unpacklo_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps::<1>(sums))
}
