//! Products in f32 with many rows of activations, with the bits of the one order of summation
//! ([`crate::lanes`]): both sides are put in the order in which tiles of outer products ([`crate::outer`]) read
//! them, once for all products that they take part in.
//!
//! Lanes are summed one after the other, each for a whole strip of results. They come in the order in which
//! the tree adds them, so that at most four unfinished branches of it are kept for each result: lane `n` of the
//! order ends as many branches as the number `n` has ones at its end.

#![expect(clippy::inline_always, reason = "compiled within the function of each platform")]

use std::ops::Range;

use shardpack_quantize::Platform;

use crate::{
    attention::Vectors,
    lanes::LANES,
    matrix::{Matrix, SPAN},
    outer::{self, Tiled},
    pool::{Buffer, Pool},
    team::{self, Columns, Current},
};

/// Rows of activations from which on both sides are put in order: weights that few rows are multiplied with
/// are read as they stand.
pub(super) const MANY_ROWS: usize = 64;

/// Most rows of activations that all weights are multiplied with before the next ones: the L3 cache holds so
/// many while each strip of weights passes.
pub(super) const MOST_ROWS: usize = 516;

/// Bytes of a lane of activations that a strip of weights is multiplied with: they stay in the L2 cache, together
/// with their unfinished sums.
const LANE_BYTES: usize = 320 << 10;

/// Steps of a lane that are summed at once: a strip's weights of so many stay in the L1 cache while all rows
/// pass.
const STEPS_AT_ONCE: usize = 192;

/// Unfinished sums of each result: four branches of the tree and the lane itself, or at last the whole.
const BRANCHES: usize = 5;

/// Inputs of sixteen weight rows that are made f32 at once: a run of each that is long enough for the processor
/// to read ahead.
const AT_ONCE: usize = 2 * SPAN;

static MEMORY: Pool<f32> = Pool::new();

/// The lanes in the order of the tree.
const ORDER: [usize; LANES] = {
    let mut order = [0; LANES];
    let mut place = 0;
    while place < LANES {
        order[place] = (place as u8).reverse_bits() as usize >> (u8::BITS - LANES.ilog2());
        place += 1;
    }
    order
};

/// At least so many numbers, in an odd number of cache lines: lanes that are written in turn then lie in
/// different sets of the caches.
const fn apart(len: usize) -> usize {
    (len.div_ceil(LANES) | 1) * LANES
}

/// Activations in the order of tiles: for each lane, tile and step the numbers of a tile's rows.
pub(super) struct Rows {
    values: Buffer<f32>,
    count: usize,
    /// Numbers of each lane.
    steps: usize,
    /// Rows of a tile, and numbers from one lane to the next.
    tile: usize,
    stride: usize,
}

impl Rows {
    /// Puts rows of `inputs` numbers in order.
    pub(super) fn new(on: &Current, x: &[f32], inputs: usize) -> Self {
        let (count, steps) = (x.len() / inputs, inputs.div_ceil(LANES));
        let [tile, _] = outer::tile(on.platform);
        let tiles = count.div_ceil(tile);
        let stride = apart(tiles * steps * tile);
        let mut values = MEMORY.take(LANES * stride);
        let ranges: Vec<_> =
            (0..tiles).map(|it| it * steps * tile..(it + 1) * steps * tile).collect();
        team::parts(on, &mut values, stride, (LANES, &ranges), |_, out| {
            let first = out.range().start / steps;
            outer::run(on.platform, PackRows { x, inputs, first, out });
        });
        Self { values, count, steps, tile, stride }
    }

    /// Some tiles of the lane at a place in order.
    fn lane(&self, place: usize, tiles: &Range<usize>) -> &[f32] {
        let size = self.steps * self.tile;
        &self.values[place * self.stride..][tiles.start * size..tiles.end * size]
    }
}

/// One tile of rows.
struct PackRows<'a, 'b> {
    x: &'a [f32],
    inputs: usize,
    /// The tile's first row.
    first: usize,
    out: Columns<'b>,
}

impl Tiled for PackRows<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vectors, const R: usize, const C: usize>(mut self) {
        let rows = &self.x[self.first * self.inputs..];
        let held = R.min(rows.len() / self.inputs);
        let mut lines = [[0.0; LANES]; LANES];
        let mut turned = [[0.0; LANES]; LANES];
        for (step, at) in (0..self.inputs).step_by(LANES).enumerate() {
            let width = LANES.min(self.inputs - at);
            for (row, line) in lines.iter_mut().enumerate().take(held) {
                let from = &rows[row * self.inputs + at..][..width];
                if let Some(whole) = from.first_chunk::<LANES>() {
                    *line = *whole;
                } else {
                    *line = [0.0; LANES];
                    line[..width].copy_from_slice(from);
                }
            }
            V::transpose(&lines, &mut turned);
            for (place, lane) in ORDER.into_iter().enumerate() {
                let to = &mut self.out.row(place)[step * R..][..R];
                to.copy_from_slice(&turned[lane][..R]);
            }
        }
    }
}

/// Products of all rows with the weight rows of `out`'s columns.
pub(super) fn products(platform: Platform, x: &Rows, matrix: &Matrix<'_>, mut out: Columns<'_>) {
    let [tile, vectors] = outer::tile(platform);
    let (wide, tiles) = (vectors * LANES, x.count.div_ceil(tile));
    let at_once = (LANE_BYTES / (x.steps * tile * size_of::<f32>())).clamp(1, tiles);
    let of_lane = apart(x.steps * wide);
    let mut memory = MEMORY.take(LANES * of_lane + BRANCHES * at_once * tile * wide);
    let (weights, sums) = memory.split_at_mut(LANES * of_lane);
    let range = out.range();
    for column in (0..range.len()).step_by(wide) {
        let held = wide.min(range.len() - column);
        let rows = range.start + column..range.start + column + held;
        outer::run(platform, PackWeights { matrix, rows, stride: of_lane, out: weights });
        for first in (0..tiles).step_by(at_once) {
            let tiles = first..tiles.min(first + at_once);
            let sums = &mut sums[..BRANCHES * tiles.len() * tile * wide];
            for place in 0..LANES {
                let (x, weights) =
                    (x.lane(place, &tiles), &weights[place * of_lane..][..x.steps * wide]);
                outer::run(platform, Strip { x, weights, place, sums });
            }
            let whole = &sums[(BRANCHES - 1) * tiles.len() * tile * wide..];
            for (row, sums) in (first * tile..x.count).zip(whole.chunks_exact(wide)) {
                let to = out.row(row)[column..][..held].chunks_mut(LANES);
                for (to, sums) in to.zip(sums.as_chunks::<LANES>().0) {
                    // Of a known length where it is whole, which takes no call.
                    match to.first_chunk_mut() {
                        Some(to) => *to = *sums,
                        None => to.copy_from_slice(&sums[..to.len()]),
                    }
                }
            }
        }
    }
}

/// Weight rows of a tile's columns, in order: for each lane and step the numbers of all columns.
struct PackWeights<'a, 'b> {
    matrix: &'a Matrix<'a>,
    rows: Range<usize>,
    /// Numbers from one lane to the next.
    stride: usize,
    out: &'b mut [f32],
}

impl Tiled for PackWeights<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vectors, const R: usize, const C: usize>(self) {
        const { assert!(AT_ONCE.is_multiple_of(SPAN), "whole spans of whole lines") };
        let Self { matrix, rows, stride, out } = self;
        let out = out.as_chunks_mut::<LANES>().0;
        let mut held = [[0.0; AT_ONCE]; LANES];
        let mut lines = [[0.0; LANES]; LANES];
        let mut turned = [[0.0; LANES]; LANES];
        for vector in 0..C {
            let first = rows.start + vector * LANES;
            for at in (0..matrix.cols()).step_by(AT_ONCE) {
                let width = AT_ONCE.min(matrix.cols() - at);
                for (row, held) in (first..rows.end).zip(&mut held) {
                    matrix.read_row(row, at, &mut held[..width]);
                    held[width..width.next_multiple_of(LANES)].fill(0.0);
                }
                for step in 0..width.div_ceil(LANES) {
                    for (line, held) in lines.iter_mut().zip(&held) {
                        *line = held.as_chunks::<LANES>().0[step];
                    }
                    V::transpose(&lines, &mut turned);
                    let line = (at / LANES + step) * C + vector;
                    let to = out[line..].iter_mut().step_by(stride / LANES);
                    for (to, lane) in to.zip(ORDER) {
                        *to = turned[lane];
                    }
                }
            }
        }
    }
}

/// One lane of some tiles of rows with one of columns.
struct Strip<'a, 'b> {
    x: &'a [f32],
    weights: &'a [f32],
    /// The lane's place in order.
    place: usize,
    /// For each branch and tile.
    sums: &'b mut [f32],
}

impl Tiled for Strip<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vectors, const R: usize, const C: usize>(self) {
        let Self { x, weights, place, sums } = self;
        let sums = sums.as_chunks_mut::<LANES>().0;
        let (steps, size) = (weights.len() / (C * LANES), sums.len() / BRANCHES);
        for first in (0..steps).step_by(STEPS_AT_ONCE) {
            let end = steps.min(first + STEPS_AT_ONCE);
            let weights = &weights[first * C * LANES..end * C * LANES];
            for (tile, x) in x.chunks_exact(steps * R).enumerate() {
                let branch = |number: usize| {
                    number * size + tile * R * C..number * size + (tile + 1) * R * C
                };
                let begun = if first == 0 {
                    outer::none::<V, R, C>()
                } else {
                    outer::load::<V, R, C>(&sums[branch(BRANCHES - 1)])
                };
                let mut tile =
                    outer::add_products::<V, R, C>(&x[first * R..end * R], weights, begun);
                let mut ended = BRANCHES - 1;
                if end == steps {
                    ended = place.trailing_ones() as usize;
                    (0..ended).for_each(|it| outer::add::<V, R, C>(&mut tile, &sums[branch(it)]));
                }
                outer::store::<V, R, C>(&tile, &mut sums[branch(ended)]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_come_in_the_order_of_the_tree() {
        assert_eq!(ORDER, [0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15]);
    }
}
