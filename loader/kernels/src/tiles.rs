//! Tiled GEMM for many rows of activations: weights are unpacked once per tile and used by all rows.
//!
//! A tile is a handful of weight rows, transposed so that a vector holds one 4-byte word (four
//! inputs) of each; a panel is a handful of rows of activations, whose words are spread to all
//! lanes. The sums of integers stay in registers for a whole span. Spans are visited lane by lane
//! (see [`crate::portable`]), and the lanes are added as they complete, as the tree wants them: a
//! binary counter of partial trees. So the bits are those of a GEMV.

#![expect(
    clippy::inline_always,
    reason = "vector code must be compiled inside the function that enables its instructions"
)]

mod tile;

use std::ops::{Deref, DerefMut};

use tile::Tile;
use zerocopy::{FromBytes, IntoBytes};

use crate::{
    memory,
    platform::Task,
    pool::{Buffer, Pool},
    quantized::{Line, Packed, Quantized, SPANS},
    team::{self, Columns, Current},
};

/// Words of the longest span.
const MOST_WORDS: usize = 16;

/// Most weight rows of a tile.
const MOST_OUTPUTS: usize = 32;

/// Depth of the tree over [`SPANS`] lanes.
const DEPTH: usize = SPANS.ilog2() as usize;

/// Vectors of one platform: one lane for each of [`Lanes::N`] weight rows.
pub(crate) trait Lanes: Copy {
    /// Lanes.
    const N: usize;
    /// Whether 8-bit weights are stored less 128, since the platform multiplies signed bytes.
    const SIGNED: bool;
    /// Four weights of each row, prepared for [`Lanes::dot`].
    type Weights: Copy;
    /// Sums of few products, which may be narrower.
    type Pairs: Copy;
    type Floats: Copy;

    fn zero() -> Self;
    fn weights<const BITS: usize>(from: &[u32]) -> Self::Weights;
    fn no_pairs() -> Self::Pairs;
    /// Words of which products fit [`Self::Pairs`], and are added there: one, two or all of a span.
    #[inline(always)]
    fn words_together<const BITS: usize>() -> usize {
        MOST_WORDS
    }
    /// Adds the products of four weights of each row with four activations.
    fn add_products<const BITS: usize>(
        pairs: Self::Pairs,
        weights: Self::Weights,
        x: u32,
    ) -> Self::Pairs;
    fn plus_pairs(self, pairs: Self::Pairs) -> Self;
    /// Puts the words of interleaved weights to their places in a tile: of weight rows from the
    /// first on, so many of places for so many, each span's to its visit.
    fn transpose_interleaved(
        _weights: &Packed<'_>,
        _rows: [usize; 3],
        _visits: &[usize],
        _words: &mut [u32],
    ) {
        unreachable!("weights that the platform has no tiles of")
    }
    fn plus(self, value: i32) -> Self;
    fn floats(self) -> Self::Floats;

    fn load(from: &[f32]) -> Self::Floats;
    fn store(floats: Self::Floats, to: &mut [f32]);
    fn splat(value: f32) -> Self::Floats;
    fn add(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    fn mul(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `a · b + c`, rounded once.
    fn fma(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
}

/// Rows of activations of a panel.
const ROWS_PER_PANEL: usize = 4;

/// Vectors of weight rows of a tile, two or four: a platform's registers hold their sums with all
/// rows of a panel.
pub(crate) trait Shape {
    type Lanes: Lanes;
    const VECTORS: usize;
}

/// The order in which spans are visited: lane by lane, lanes in the order in which the tree takes
/// them.
fn visits(spans: usize) -> impl Iterator<Item = usize> {
    (0..SPANS).map(lane_of).flat_map(move |lane| (lane..spans).step_by(SPANS))
}

/// The lane that is visited as number `visit`: the tree adds halves to halves, so its leaves
/// stand in the order of their reversed bits.
const fn lane_of(visit: usize) -> usize {
    visit.reverse_bits() >> (usize::BITS as usize - DEPTH)
}

/// Words that begin on a cache line: vectors are read faster than across two lines.
pub(crate) struct Words(Buffer<Line>);

impl Words {
    /// So many of any value.
    fn new(count: usize) -> Self {
        Self(WORDS.take((count * size_of::<u32>()).div_ceil(size_of::<Line>())))
    }
}

impl Deref for Words {
    type Target = [u32];

    #[inline]
    fn deref(&self) -> &[u32] {
        <[u32]>::ref_from_bytes(self.0.as_bytes()).expect("lines are aligned words")
    }
}

impl DerefMut for Words {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u32] {
        <[u32]>::mut_from_bytes(self.0.as_mut_bytes()).expect("lines are aligned words")
    }
}

/// Rows of activations in panels.
pub(crate) struct Panels {
    rows: usize,
    spans: usize,
    words_per_span: usize,
    /// `[panel][span as visited][word][row]`.
    words: Words,
    /// `[panel][span as visited][scale, sum][row]`, and the sums of integers.
    factors: Buffer<f32>,
    totals: Buffer<i32>,
}

static WORDS: Pool<Line> = Pool::new();
static FACTORS: Pool<f32> = Pool::new();
static TOTALS: Pool<i32> = Pool::new();

impl Panels {
    fn new(on: &Current, x: &Quantized, weights: &Packed<'_>, rows_per_panel: usize) -> Self {
        let (spans, words_per_span) = (weights.spans, weights.span / 4);
        let panels = x.rows().div_ceil(rows_per_panel);
        let per_panel = spans * rows_per_panel;
        // Places for rows that there are not keep what they have: nobody reads their results.
        let mut words = Words::new(panels * per_panel * words_per_span);
        let mut factors = FACTORS.take(panels * per_panel * 2);
        let mut totals = TOTALS.take(panels * per_panel);
        let mut parts: Vec<_> = words
            .chunks_exact_mut(per_panel * words_per_span)
            .zip(factors.chunks_exact_mut(per_panel * 2))
            .zip(totals.chunks_exact_mut(per_panel))
            .collect();
        let length = on.units_per_task(panels, 2 * per_panel * words_per_span);
        team::chunks(on, &mut parts, length, |task, parts| {
            for (index, ((words, factors), totals)) in parts.iter_mut().enumerate() {
                let first = (task * length + index) * rows_per_panel;
                for row in 0..rows_per_panel.min(x.rows() - first) {
                    fill_row(x, first + row, [row, rows_per_panel], words, factors, totals);
                }
            }
        });
        drop(parts);
        Self { rows: x.rows(), spans, words_per_span, words, factors, totals }
    }
}

/// Puts a row of activations into its place of a panel.
fn fill_row(
    x: &Quantized,
    row: usize,
    [place, rows]: [usize; 2],
    words: &mut [u32],
    factors: &mut [f32],
    totals: &mut [i32],
) {
    let spans = totals.len() / rows;
    let words_per_span = words.len() / totals.len();
    let (values, scales, sums) = (x.words(row), x.scales(row), x.sums(row));
    for (visit, span) in visits(spans).enumerate() {
        let into = &mut words[visit * rows * words_per_span..][..rows * words_per_span];
        let [first, second] = x.halves(values, span);
        let places = into[place..].iter_mut().step_by(rows);
        for (into, word) in places.zip(first.iter().chain(second)) {
            *into = *word;
        }
        let into = &mut factors[visit * rows * 2..][..rows * 2];
        into[place] = scales[span / SPANS].0[span % SPANS];
        into[rows + place] = sums[span / SPANS].0[span % SPANS];
        totals[visit * rows + place] = x.totals(row)[span];
    }
}

/// Prepares `x` for [`Products`] on a platform of shape `S`.
pub(crate) fn panels<S: Shape>(on: &Current, x: &Quantized, weights: &Packed<'_>) -> Panels {
    Panels::new(on, x, weights, ROWS_PER_PANEL)
}

/// Products of all panels with the weight rows of `out`'s columns.
pub(crate) struct Products<'a, 'b, S> {
    pub(crate) weights: &'a Packed<'a>,
    pub(crate) x: &'a Panels,
    pub(crate) out: &'a mut Columns<'b>,
    pub(crate) shape: std::marker::PhantomData<S>,
}

impl<S: Shape> Task for Products<'_, '_, S> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        match self.weights.bits {
            4 => self.all::<4>(),
            6 => self.all::<6>(),
            8 => self.all::<8>(),
            other => unreachable!("there are no tiles of {other} bits"),
        }
    }
}

impl<S: Shape> Products<'_, '_, S> {
    /// Constants choose: what a platform does not have is not compiled for it.
    #[inline(always)]
    fn all<const BITS: usize>(self) {
        if const { S::VECTORS == 4 } {
            self.tiles::<BITS, 4, ROWS_PER_PANEL>();
        } else {
            const { assert!(S::VECTORS == 4 || S::VECTORS == 2, "vectors of a tile") };
            self.tiles::<BITS, 2, ROWS_PER_PANEL>();
        }
    }

    #[inline(always)]
    fn tiles<const BITS: usize, const VECTORS: usize, const ROWS: usize>(self) {
        let outputs = S::Lanes::N * VECTORS;
        let mut tile = Tile::new(self.weights, outputs);
        let range = self.out.range();
        let panels = self.x.rows.div_ceil(ROWS);
        let mut results = [0.0; MOST_OUTPUTS];
        let mut trees = [[[S::Lanes::splat(0.0); VECTORS]; ROWS]; DEPTH + 1];
        for first in range.clone().step_by(outputs) {
            let held = outputs.min(range.end - first);
            tile.fill::<S::Lanes, BITS>(self.weights, [first, held, outputs]);
            let mut next =
                self.weights.bytes_of(first + held..range.end.min(first + held + outputs));
            let fetched = next.len().div_ceil(panels).next_multiple_of(size_of::<Line>());
            for panel in 0..panels {
                let now = next.split_off(..fetched.min(next.len())).unwrap_or_default();
                for line in now.iter().step_by(size_of::<Line>()) {
                    memory::fetch(std::ptr::from_ref(line).addr());
                }
                product::<S::Lanes, BITS, VECTORS, ROWS>(&tile, self.x, panel, &mut trees);
                let sums = &trees[DEPTH];
                for (row, sums) in sums.iter().enumerate().take(self.x.rows - panel * ROWS) {
                    let out = &mut self.out.row(panel * ROWS + row)[first - range.start..][..held];
                    if held == outputs {
                        for (vector, sums) in sums.iter().enumerate() {
                            S::Lanes::store(*sums, &mut out[vector * S::Lanes::N..]);
                        }
                        continue;
                    }
                    for (vector, sums) in sums.iter().enumerate() {
                        S::Lanes::store(*sums, &mut results[vector * S::Lanes::N..]);
                    }
                    out.copy_from_slice(&results[..held]);
                }
            }
        }
    }
}

type Sums<L, const VECTORS: usize, const ROWS: usize> = [[<L as Lanes>::Floats; VECTORS]; ROWS];

/// A tile with a panel. The results are the last of the trees; what these hold before is not read.
#[inline(always)]
fn product<L: Lanes, const BITS: usize, const VECTORS: usize, const ROWS: usize>(
    tile: &Tile,
    x: &Panels,
    panel: usize,
    trees: &mut [Sums<L, VECTORS, ROWS>; DEPTH + 1],
) {
    let outputs = L::N * VECTORS;
    let (tile_words, panel_words) = (x.words_per_span * outputs, x.words_per_span * ROWS);
    let words = &x.words[panel * x.spans * panel_words..][..x.spans * panel_words];
    let factors = &x.factors[panel * x.spans * 2 * ROWS..][..x.spans * 2 * ROWS];
    let totals = &x.totals[panel * x.spans * ROWS..][..x.spans * ROWS];
    let zero = L::splat(0.0);
    // Partial trees over 1, 2, 4, … lanes. They stay where they are from call to call: to clear
    // them costs a thirtieth of a short product.
    let mut visit = 0;
    for number in 0..SPANS {
        let mut sums = [[zero; VECTORS]; ROWS];
        for _ in (lane_of(number)..x.spans).step_by(SPANS) {
            let dots = span_dots::<L, BITS, VECTORS, ROWS>(
                &tile.words[visit * tile_words..][..tile_words],
                &words[visit * panel_words..][..panel_words],
            );
            scale::<L, BITS, VECTORS, ROWS>(
                &mut sums,
                &dots,
                &tile.factors[visit * 2 * outputs..][..2 * outputs],
                &factors[visit * 2 * ROWS..][..2 * ROWS],
                &totals[visit * ROWS..][..ROWS],
            );
            visit += 1;
        }
        let mut level = 0;
        while number >> level & 1 == 1 {
            for (sums, tree) in sums.iter_mut().zip(&trees[level]) {
                for (sum, tree) in sums.iter_mut().zip(tree) {
                    *sum = L::add(*tree, *sum);
                }
            }
            level += 1;
        }
        trees[level] = sums;
    }
}

/// The exact dot products of a span.
#[expect(clippy::needless_range_loop, reason = "sums of a row and a vector")]
#[inline(always)]
fn span_dots<L: Lanes, const BITS: usize, const VECTORS: usize, const ROWS: usize>(
    tile: &[u32],
    panel: &[u32],
) -> [[L; VECTORS]; ROWS] {
    let mut dots = [[L::zero(); VECTORS]; ROWS];
    let (outputs, panel) = (L::N * VECTORS, panel.as_chunks::<ROWS>().0);
    let weights_of =
        |words: &[u32], vector: usize| L::weights::<BITS>(&words[vector * L::N..][..L::N]);
    match L::words_together::<BITS>() {
        1 => {
            for (words, x) in tile.chunks_exact(outputs).zip(panel) {
                for vector in 0..VECTORS {
                    let weights = weights_of(words, vector);
                    for row in 0..ROWS {
                        let pairs = L::add_products::<BITS>(L::no_pairs(), weights, x[row]);
                        dots[row][vector] = dots[row][vector].plus_pairs(pairs);
                    }
                }
            }
        }
        // Of one element after another, so that registers hold all sums.
        2 => {
            for (words, x) in tile.chunks_exact(2 * outputs).zip(panel.as_chunks::<2>().0) {
                let (first, second) = words.split_at(outputs);
                for vector in 0..VECTORS {
                    let (first, second) = (weights_of(first, vector), weights_of(second, vector));
                    for row in 0..ROWS {
                        let pairs = L::add_products::<BITS>(L::no_pairs(), first, x[0][row]);
                        let pairs = L::add_products::<BITS>(pairs, second, x[1][row]);
                        dots[row][vector] = dots[row][vector].plus_pairs(pairs);
                    }
                }
            }
        }
        _ => {
            let mut pairs = [[L::no_pairs(); VECTORS]; ROWS];
            for (words, x) in tile.chunks_exact(outputs).zip(panel) {
                for vector in 0..VECTORS {
                    let weights = weights_of(words, vector);
                    for row in 0..ROWS {
                        let pairs = &mut pairs[row][vector];
                        *pairs = L::add_products::<BITS>(*pairs, weights, x[row]);
                    }
                }
            }
            for (dots, pairs) in dots.as_flattened_mut().iter_mut().zip(pairs.as_flattened()) {
                *dots = dots.plus_pairs(*pairs);
            }
        }
    }
    dots
}

/// Adds a span to its lane.
#[inline(always)]
fn scale<L: Lanes, const BITS: usize, const VECTORS: usize, const ROWS: usize>(
    sums: &mut Sums<L, VECTORS, ROWS>,
    dots: &[[L; VECTORS]; ROWS],
    tile: &[f32],
    panel: &[f32],
    totals: &[i32],
) {
    let outputs = L::N * VECTORS;
    for vector in 0..VECTORS {
        let scales = L::load(&tile[vector * L::N..]);
        let biases = L::load(&tile[outputs + vector * L::N..]);
        for row in 0..ROWS {
            let mut dots = dots[row][vector];
            if BITS == 8 && L::SIGNED {
                dots = dots.plus(totals[row] << 7);
            }
            let sum = L::fma(biases, L::splat(panel[ROWS + row]), sums[row][vector]);
            let scale = L::mul(scales, L::splat(panel[row]));
            sums[row][vector] = L::fma(dots.floats(), scale, sum);
        }
    }
}
