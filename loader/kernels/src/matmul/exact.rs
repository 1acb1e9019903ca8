//! Products in f32 with few rows of activations, in the one order of summation ([`crate::lanes`]): tiles of four rows of activations and four
//! weight rows stay in registers, so that each vector that is read takes part in four products.

#![expect(clippy::inline_always, reason = "compiled within the function of each platform")]

use std::{array, borrow::Cow, marker::PhantomData};

use shardpack_quantize::Platform;

use crate::{
    attention::{Plain, Vectors},
    lanes::LANES,
    matrix::Matrix,
    platform::{self, Task},
    team::Columns,
};

/// Rows of either side whose products are computed together.
const FOUR: usize = 4;

/// Bytes of weights that are made f32 at once: they stay in the L2 cache while all activations pass.
const WEIGHT_BYTES: usize = 256 << 10;

/// Most weight rows that are made f32 at once.
const MOST_ROWS: usize = 64;

/// A row in whole vectors.
type Row<'a> = &'a [[f32; LANES]];

/// Products of all rows of `x` with the weight rows of `out`'s columns.
pub(super) fn products(platform: Platform, x: &[f32], matrix: &Matrix<'_>, mut out: Columns<'_>) {
    if out.rows() == 1 {
        let one = OneRow { x, matrix, out };
        return match platform {
            // Fused operations are a call of a function each without an instruction for them.
            Platform::Portable => Plain::run(one),
            _ => platform::run(platform, one),
        };
    }
    let padded = matrix.cols().next_multiple_of(LANES);
    let x = in_whole_vectors(x, matrix.cols(), padded);
    let range = out.range();
    let at_once = (WEIGHT_BYTES / (padded * size_of::<f32>())).clamp(FOUR, MOST_ROWS) / FOUR * FOUR;
    let mut weights = vec![0.0; at_once.min(range.len()) * padded];
    for first in range.clone().step_by(at_once) {
        let held = at_once.min(range.end - first);
        let weights = &mut weights[..held * padded];
        platform::run(platform, Dequantize { matrix, first, out: weights, padded });
        let tiles = Tiles { x: &x, weights, padded, place: first - range.start, out: &mut out };
        match platform {
            #[cfg(target_arch = "x86_64")]
            Platform::Avx512 => run::<crate::avx512::Sixteen>(tiles),
            #[cfg(target_arch = "x86_64")]
            Platform::Avx2 => run::<crate::avx2::Sixteen>(tiles),
            #[cfg(target_arch = "aarch64")]
            Platform::Neon => run::<crate::neon::Sixteen>(tiles),
            _ => run::<Plain>(tiles),
        }
    }
}

/// Rows filled up with zeros.
fn in_whole_vectors(x: &[f32], inputs: usize, padded: usize) -> Cow<'_, [f32]> {
    if inputs == padded {
        return Cow::Borrowed(x);
    }
    let mut rows = vec![0.0; x.len() / inputs * padded];
    for (to, from) in rows.chunks_exact_mut(padded).zip(x.chunks_exact(inputs)) {
        to[..inputs].copy_from_slice(from);
    }
    Cow::Owned(rows)
}

/// Some weight rows from `first` on, each in the first of `padded` numbers.
struct Dequantize<'a> {
    matrix: &'a Matrix<'a>,
    first: usize,
    out: &'a mut [f32],
    padded: usize,
}

impl Task for Dequantize<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (index, out) in self.out.chunks_exact_mut(self.padded).enumerate() {
            self.matrix.dequantize_row(self.first + index, &mut out[..self.matrix.cols()]);
        }
    }
}

/// Products of all activations with some weight rows, which are columns of `out` from a place on. Rows of both are
/// `padded` numbers.
struct Tiles<'a, 'b> {
    x: &'a [f32],
    weights: &'a [f32],
    padded: usize,
    place: usize,
    out: &'a mut Columns<'b>,
}

fn run<V: Vectors>(tiles: Tiles<'_, '_>) {
    V::run(TilesOf::<V>(tiles, PhantomData));
}

/// The same with one platform's vectors.
struct TilesOf<'a, 'b, V>(Tiles<'a, 'b>, PhantomData<V>);

impl<V: Vectors> Task for TilesOf<'_, '_, V> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Tiles { x, weights, padded, place, out } = self.0;
        let (x, weights) = (x.as_chunks::<LANES>().0, weights.as_chunks::<LANES>().0);
        let lines = padded / LANES;
        let (rows, columns) = (x.len() / lines, weights.len() / lines);
        for row in (0..rows).step_by(FOUR) {
            let (x, held) = (four(x, lines, row), FOUR.min(rows - row));
            for column in (0..columns).step_by(FOUR) {
                let sums = sixteen::<V>((x, held), four(weights, lines, column));
                let wide = FOUR.min(columns - column);
                for (index, sums) in sums.as_chunks::<FOUR>().0.iter().take(held).enumerate() {
                    out.row(row + index)[place + column..][..wide].copy_from_slice(&sums[..wide]);
                }
            }
        }
    }
}

/// Four of the rows; where fewer are left, the last is taken again.
#[inline(always)]
fn four(rows: Row<'_>, lines: usize, first: usize) -> [Row<'_>; FOUR] {
    let last = rows.len() / lines - 1;
    array::from_fn(|index| &rows[(first + index).min(last) * lines..][..lines])
}

/// The products of each of the first `held` of four rows of activations with each of four weight rows.
#[inline(always)]
fn sixteen<V: Vectors>(
    (x, held): ([Row<'_>; FOUR], usize),
    weights: [Row<'_>; FOUR],
) -> [f32; LANES] {
    let mut quarters = [V::quarter([V::pair([V::splat(0.0); 2]); 2]); FOUR];
    let mut done = 0;
    while done < held {
        let (x, quarters) = (&x[done..], &mut quarters[done..]);
        // Constants choose: what a platform does not have is not compiled for it.
        done += if const { V::KEY_HEADS >= 4 } {
            some::<V, 4>(x, weights, quarters)
        } else if const { V::KEY_HEADS >= 2 } {
            some::<V, 2>(x, weights, quarters)
        } else {
            some::<V, 1>(x, weights, quarters)
        };
    }
    V::sums(quarters)
}

/// The same for the first `COUNT` rows, with their lanes added in part; returns `COUNT`.
#[inline(always)]
fn some<V: Vectors, const COUNT: usize>(
    x: &[Row<'_>],
    weights: [Row<'_>; FOUR],
    quarters: &mut [V::Quarter],
) -> usize {
    let x = x.first_chunk::<COUNT>().expect("four are a multiple of those in registers");
    if const { V::KEYS >= FOUR } {
        let sums = lanes::<V, COUNT, FOUR>(x, weights);
        for (quarter, [a, b, c, d]) in quarters.iter_mut().zip(sums) {
            *quarter = V::quarter([V::pair([a, b]), V::pair([c, d])]);
        }
        return COUNT;
    }
    let [a, b, c, d] = weights;
    let first = lanes::<V, COUNT, 2>(x, [a, b]).map(V::pair);
    let last = lanes::<V, COUNT, 2>(x, [c, d]).map(V::pair);
    for (quarter, (first, last)) in quarters.iter_mut().zip(first.into_iter().zip(last)) {
        *quarter = V::quarter([first, last]);
    }
    COUNT
}

/// The lanes of the products of each row of activations with each weight row.
#[inline(always)]
fn lanes<V: Vectors, const ROWS: usize, const COLUMNS: usize>(
    x: &[Row<'_>; ROWS],
    weights: [Row<'_>; COLUMNS],
) -> [[V::Floats; COLUMNS]; ROWS] {
    let lines = weights[0].len();
    // Checked once.
    let (x, weights) = (x.map(|row| &row[..lines]), weights.map(|row| &row[..lines]));
    let mut sums = [[V::splat(0.0); COLUMNS]; ROWS];
    for line in 0..lines {
        let mut factors = [V::splat(0.0); COLUMNS];
        for (factor, row) in factors.iter_mut().zip(weights) {
            *factor = V::load(&row[line]);
        }
        for (sums, row) in sums.iter_mut().zip(x) {
            let x = V::load(&row[line]);
            for (sum, factor) in sums.iter_mut().zip(factors) {
                *sum = V::fma(factor, x, *sum);
            }
        }
    }
    sums
}

/// A single row of activations: weights are read once, and made f32 a span at a time.
struct OneRow<'a, 'b> {
    x: &'a [f32],
    matrix: &'a Matrix<'a>,
    out: Columns<'b>,
}

impl Task for OneRow<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let range = self.out.range();
        for (out, row) in self.out.row(0).iter_mut().zip(range) {
            *out = self.matrix.row_dot(row, self.x);
        }
    }
}
