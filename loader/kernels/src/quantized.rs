//! Activations rounded to 8 bits, one scale per span of inputs, in the order in which kernels
//! read them; and quantized weights as these kernels see them.
//!
//! `x ≈ scale · q` with `q` in -127..=127. The product of a span with weights `s · w + b` is
//! `s · scale · Σ w·q + b · scale · Σ q`: the bias meets the sum of the rounded activations, so
//! that the rounding errors meet the centred weights (against the sum of the exact ones the error
//! of the result is about twice as large).

use std::{mem, ops::Range};

use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::{
    floats::Floats,
    platform::{self, Task},
    pool::{Buffer, Pool},
    repack::Packing,
    team::{self, Current},
};

/// Spans whose scales are read at once: as many as the sums of an output element have lanes.
pub(crate) const SPANS: usize = 16;

/// Bytes of a line of activations.
const LINE: usize = 64;

/// Adding it rounds a float of modest size to an integer in its low bits: 1.5 · 2²³.
const ROUNDER: f32 = 12_582_912.0;

/// Largest activation below which a span counts as zero; its reciprocal must be finite.
const SMALLEST: f32 = 1e-30;

/// 64 bytes that lie in one cache line.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C, align(64))]
pub(crate) struct Line(pub(crate) [i8; LINE]);

/// 16 floats that lie in one cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Lane(pub(crate) [f32; SPANS]);

#[cfg(target_arch = "x86_64")]
impl Lane {
    /// The first eight, or the others.
    pub(crate) fn half(&self, half: usize) -> &[f32; SPANS / 2] {
        &self.0.as_chunks().0[half]
    }
}

impl Default for Line {
    fn default() -> Self {
        Self([0; LINE])
    }
}

impl Default for Lane {
    fn default() -> Self {
        Self([0.0; SPANS])
    }
}

static LINES: Pool<Line> = Pool::new();
static LANES: Pool<Lane> = Pool::new();
static TOTALS: Pool<i32> = Pool::new();
static FACTORS: Pool<Factors> = Pool::new();

/// The layout of a row of activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ActivationLayout {
    /// Span after span; before 4-bit weights, which unpack so, of each 128 those with even numbers
    /// first.
    Spans,
    /// As interleaved weights stand: runs of [`SPANS`] spans, of each the first four
    /// of every span, then the next four; before 4-bit weights of every eight those with even
    /// numbers, then those with odd ones.
    Interleaved,
}

/// The layout of a span's activations, which matches what is unpacked at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SpanLayout {
    /// As they follow each other.
    Straight,
    /// Before 4-bit weights: those with even numbers apart from those with odd ones.
    Halved,
    /// Before 6-bit weights in [`Packing::Planes`]: of every sixteen each fourth, four times.
    Quartered,
}

impl SpanLayout {
    const fn of(weights: &Packed<'_>) -> Self {
        match (weights.bits, weights.packing) {
            (4, _) => Self::Halved,
            (6, Packing::Planes) => Self::Quartered,
            _ => Self::Straight,
        }
    }
}

/// Every fourth of sixteen, four times.
const fn quartered(sixteen: [i8; 16]) -> [i8; 16] {
    let mut quarters = [0; 16];
    let mut place = 0;
    while place < 16 {
        quarters[place] = sixteen[place % 4 * 4 + place / 4];
        place += 1;
    }
    quarters
}

/// Whether there are kernels for products of 8-bit activations with such weights.
pub(crate) const fn has_kernels(bits: usize, group: usize) -> bool {
    matches!(bits, 4 | 6 | 8) && matches!(group, 32 | 64 | 128)
}

/// Inputs of a span: activations have a scale for each 32, half of a usual group of weights. A channel that is much
/// larger than the others then makes steps coarse for 31 of them and not for 63.
pub(crate) const fn span_of(group: usize) -> usize {
    if group == 128 { 64 } else { 32 }
}

/// Quantized weights for which there are kernels. A span is a group of weights or half of one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packed<'a> {
    pub(crate) bits: usize,
    pub(crate) packing: Packing,
    /// Inputs of a span: 32 or 64.
    pub(crate) span: usize,
    /// Spans of a row.
    pub(crate) spans: usize,
    /// Spans that share a scale: 1 or 2.
    pub(crate) spans_per_scale: usize,
    /// `[rows, spans · span · bits / 8]`.
    pub(crate) bytes: &'a [u8],
    /// `[rows, spans / spans_per_scale]`.
    pub(crate) scales: Floats<'a>,
    /// `[rows, spans / spans_per_scale]`.
    pub(crate) biases: Floats<'a>,
    rows: usize,
}

impl<'a> Packed<'a> {
    /// The weights of `rows` outputs and `cols` inputs, if there are kernels for them.
    pub(crate) fn new(
        [rows, cols]: [usize; 2],
        bytes: &'a [u8],
        scales: Floats<'a>,
        biases: Floats<'a>,
        [bits, group]: [usize; 2],
        packing: Packing,
    ) -> Option<Self> {
        let alike = mem::discriminant(&scales) == mem::discriminant(&biases);
        if !has_kernels(bits, group) || cols == 0 || !alike {
            return None;
        }
        let span = span_of(group);
        let packed = Self {
            bits,
            packing,
            span,
            spans: cols / span,
            spans_per_scale: group / span,
            bytes,
            scales,
            biases,
            rows,
        };
        // Kernels read without further checks what these lines promise.
        assert!(cols.is_multiple_of(group), "{cols} inputs in groups of {group}");
        assert_eq!(bytes.len(), rows * packed.row_bytes(), "bytes of {rows} rows");
        assert_eq!(scales.len(), rows * packed.row_scales(), "scales of {rows} rows");
        assert_eq!(biases.len(), scales.len(), "biases of {rows} rows");
        Some(packed)
    }

    pub(crate) const fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) const fn cols(&self) -> usize {
        self.spans * self.span
    }

    pub(crate) const fn row_bytes(&self) -> usize {
        self.spans * self.span_bytes()
    }

    /// The bytes of some rows.
    pub(crate) fn bytes_of(&self, rows: Range<usize>) -> &'a [u8] {
        &self.bytes[rows.start * self.row_bytes()..rows.end * self.row_bytes()]
    }

    pub(crate) const fn span_bytes(&self) -> usize {
        self.span / 8 * self.bits
    }

    pub(crate) const fn row_scales(&self) -> usize {
        self.spans / self.spans_per_scale
    }
}

/// Rows of activations in 8 bits.
pub(crate) struct Quantized {
    rows: usize,
    span: usize,
    layout: ActivationLayout,
    within: SpanLayout,
    /// Lines of a row: whole runs of [`SPANS`] spans, zero beyond the row's end.
    lines: usize,
    values: Buffer<Line>,
    /// One per span, `lines · 64 / span / 16` of 16 a row.
    scales: Buffer<Lane>,
    /// `scale · Σ q` of each span.
    sums: Buffer<Lane>,
    /// `Σ q` of each span.
    totals: Buffer<i32>,
}

/// What belongs to a run of spans.
#[derive(Clone, Copy, Default)]
struct Factors {
    scales: Lane,
    sums: Lane,
    totals: [i32; SPANS],
}

impl Quantized {
    /// Rounds `x` `[rows, inputs]` for products with `weights`.
    pub(crate) fn new(
        on: &Current,
        x: &[f32],
        weights: &Packed<'_>,
        layout: ActivationLayout,
    ) -> Self {
        let (cols, span) = (weights.cols(), weights.span);
        let rows = x.len() / cols;
        assert_eq!(x.len(), rows * cols, "activations of {cols} inputs");
        let runs = weights.spans.div_ceil(SPANS);
        let lines = runs * SPANS * span / LINE;
        let within = SpanLayout::of(weights);
        let mut values = LINES.take(rows * lines);
        let mut factors = FACTORS.take(rows * runs);
        if !weights.spans.is_multiple_of(SPANS) {
            // Nothing else is written beyond a row's end.
            values.fill(Line::default());
            factors.fill(Factors::default());
        }
        let rows_per_task = on.units_per_task(rows, 2 * cols);
        // Values and factors are written by the same pass over a row; both are shared out by
        // rows, so the factors are computed with the values and copied out after.
        let mut parts: Vec<_> = values
            .chunks_mut(rows_per_task * lines)
            .zip(factors.chunks_mut(rows_per_task * runs))
            .collect();
        team::chunks(on, &mut parts, 1, |index, part| {
            let (values, factors) = &mut part[0];
            let x = &x[index * rows_per_task * cols..];
            for (row, (values, factors)) in
                values.chunks_exact_mut(lines).zip(factors.chunks_exact_mut(runs)).enumerate()
            {
                let x = &x[row * cols..][..cols];
                platform::run(
                    on.platform,
                    QuantizeRow { x, span, layout, within, values, factors },
                );
            }
        });
        drop(parts);
        let (mut scales, mut sums) = (LANES.take(factors.len()), LANES.take(factors.len()));
        let mut totals = TOTALS.take(factors.len() * SPANS);
        let places = scales.iter_mut().zip(&mut *sums).zip(totals.as_chunks_mut::<SPANS>().0);
        for (factors, ((scales, sums), totals)) in factors.iter().zip(places) {
            (*scales, *sums, *totals) = (factors.scales, factors.sums, factors.totals);
        }
        Self { rows, span, layout, within, lines, values, scales, sums, totals }
    }

    pub(crate) const fn rows(&self) -> usize {
        self.rows
    }

    /// Runs of [`SPANS`] spans in a row.
    const fn runs(&self) -> usize {
        self.lines * LINE / self.span / SPANS
    }

    /// Whether the rows were rounded for such weights and stand in this order.
    pub(crate) fn fits(&self, weights: &Packed<'_>, layout: ActivationLayout) -> bool {
        self.layout == layout
            && self.span == weights.span
            && self.within == SpanLayout::of(weights)
            && self.runs() == weights.spans.div_ceil(SPANS)
    }

    /// Lines of values of a row.
    pub(crate) fn values(&self, row: usize) -> &[Line] {
        &self.values[row * self.lines..][..self.lines]
    }

    /// Scales of a row's spans, zero beyond the last.
    pub(crate) fn scales(&self, row: usize) -> &[Lane] {
        &self.scales[row * self.runs()..][..self.runs()]
    }

    /// Scaled sums of a row's spans, zero beyond the last.
    pub(crate) fn sums(&self, row: usize) -> &[Lane] {
        &self.sums[row * self.runs()..][..self.runs()]
    }
}

impl Quantized {
    /// Sums of a row's spans as integers, zero beyond the last.
    pub(crate) fn totals(&self, row: usize) -> &[i32] {
        &self.totals[row * self.runs() * SPANS..][..self.runs() * SPANS]
    }

    /// The values of a row, four in a word.
    pub(crate) fn words(&self, row: usize) -> &[u32] {
        <[u32]>::ref_from_bytes(self.values(row).as_bytes()).expect("lines are aligned words")
    }

    /// The words of a span among the `words` of a row in [`ActivationLayout::Spans`]: the first half, then
    /// the second; of halved values those with even numbers, then those with odd ones.
    pub(crate) fn halves<'a>(&self, words: &'a [u32], span: usize) -> [&'a [u32]; 2] {
        let (half, first) = (self.span / 8, span * self.span);
        if self.within != SpanLayout::Halved {
            return [&words[first / 4..][..half], &words[first / 4 + half..][..half]];
        }
        let at = first / 128 * 32 + first % 128 / 8;
        [&words[at..][..half], &words[at + 16..][..half]]
    }
}

struct QuantizeRow<'a> {
    x: &'a [f32],
    span: usize,
    layout: ActivationLayout,
    within: SpanLayout,
    values: &'a mut [Line],
    factors: &'a mut [Factors],
}

impl Task for QuantizeRow<'_> {
    type Output = ();

    #[expect(clippy::inline_always, reason = "compiled within the function of each platform")]
    #[inline(always)]
    fn run(self) {
        let form = (self.layout, self.within);
        if self.span == 32 {
            quantize_row::<32>(self.x, form, self.values, self.factors);
        } else {
            quantize_row::<64>(self.x, form, self.values, self.factors);
        }
    }
}

/// The scale of a span, and its reciprocal: both zero where the span counts as zero.
#[expect(clippy::inline_always, reason = "compiled within the function of each platform")]
#[inline(always)]
pub(crate) fn rounding_of(x: &[f32]) -> (f32, f32) {
    // As integers, magnitudes order as they do as floats, and NaN is the largest: it ends up
    // in the scale and so in every result, as it would without rounding.
    let mut largest = 0;
    for x in x {
        largest = largest.max(x.to_bits() & (u32::MAX >> 1));
    }
    let largest = f32::from_bits(largest);
    if largest < SMALLEST { (0.0, 0.0) } else { (largest / 127.0, 127.0 / largest) }
}

/// An activation as an integer.
#[expect(clippy::inline_always, reason = "compiled within the function of each platform")]
#[inline(always)]
fn rounded_to_int8(x: f32, inverse: f32) -> i8 {
    (x * inverse + ROUNDER).to_bits() as i8
}

/// What an activation loses when it is rounded so.
pub(crate) fn has_lost(x: f32, (scale, inverse): (f32, f32)) -> f32 {
    x - scale * f32::from(rounded_to_int8(x, inverse))
}

#[expect(clippy::inline_always, reason = "compiled within the function of each platform")]
#[inline(always)]
fn quantize_row<const SPAN: usize>(
    x: &[f32],
    (layout, within): (ActivationLayout, SpanLayout),
    values: &mut [Line],
    factors: &mut [Factors],
) {
    for (index, x) in x.as_chunks::<SPAN>().0.iter().enumerate() {
        let (scale, inverse) = rounding_of(x);
        let mut rounded = [0_i8; SPAN];
        let mut sum = 0_i32;
        for (rounded, x) in rounded.iter_mut().zip(x) {
            *rounded = rounded_to_int8(*x, inverse);
            sum += i32::from(*rounded);
        }
        if within == SpanLayout::Quartered {
            for sixteen in rounded.as_chunks_mut().0 {
                *sixteen = quartered(*sixteen);
            }
        }
        let run = &mut factors[index / SPANS];
        run.scales.0[index % SPANS] = scale;
        run.sums.0[index % SPANS] = sum as f32 * scale;
        run.totals[index % SPANS] = sum;
        match layout {
            ActivationLayout::Spans => place_span(&rounded, within, index, values),
            ActivationLayout::Interleaved => {
                let lines = SPANS * SPAN / LINE;
                let run = &mut values[index / SPANS * lines..][..lines];
                place_words(&rounded, within, index % SPANS, run);
            }
        }
    }
}

/// Puts span number `index` behind the ones before it.
#[expect(clippy::inline_always, reason = "compiled within the function of each platform")]
#[inline(always)]
fn place_span<const SPAN: usize>(
    rounded: &[i8; SPAN],
    within: SpanLayout,
    index: usize,
    values: &mut [Line],
) {
    let first = index * SPAN;
    if within == SpanLayout::Halved {
        let (line, at) = (first / 128 * 2, first % 128 / 2);
        let [even, odd] = &mut values[line..line + 2] else { unreachable!("two lines") };
        let places = even.0[at..].iter_mut().zip(&mut odd.0[at..]);
        for ((even, odd), pair) in places.zip(rounded.as_chunks::<2>().0) {
            let pair = u16::from_le_bytes(pair.map(i8::cast_unsigned));
            *even = pair as i8;
            *odd = (pair >> 8) as i8;
        }
    } else {
        values[first / LINE].0[first % LINE..][..SPAN].copy_from_slice(rounded);
    }
}

/// Puts a span into its lane of a run.
#[expect(clippy::inline_always, reason = "compiled within the function of each platform")]
#[inline(always)]
fn place_words<const SPAN: usize>(
    rounded: &[i8; SPAN],
    within: SpanLayout,
    lane: usize,
    run: &mut [Line],
) {
    let mut put = |line: usize, word: [i8; 4]| {
        run[line].0.as_chunks_mut::<4>().0[lane] = word;
    };
    if within == SpanLayout::Halved {
        for (index, [a, b, c, d, e, f, g, h]) in rounded.as_chunks::<8>().0.iter().enumerate() {
            put(2 * index, [*a, *c, *e, *g]);
            put(2 * index + 1, [*b, *d, *f, *h]);
        }
    } else {
        for (index, word) in rounded.as_chunks::<4>().0.iter().enumerate() {
            put(index, *word);
        }
    }
}

/// Values that a run of spans takes of a row of `Line`s.
pub(crate) const fn lines_of_run(run: usize, span: usize) -> Range<usize> {
    let lines = SPANS * span / LINE;
    run * lines..(run + 1) * lines
}
