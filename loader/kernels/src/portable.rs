//! Plain Rust that defines what the kernels of all platforms compute.
//!
//! An output element has 16 lanes. Span `g` belongs to lane `g mod 16`, and spans follow each
//! other in ascending order: `lane = fma(bias, sum, lane)`, then
//! `lane = fma(Σ w·q, scale · scale, lane)`, where the sum of integers is exact. The lanes are
//! added as a tree of halves. Lanes without a span take part as zeros.

use std::ops::Range;

use crate::{
    lanes::tree,
    quantized::{Packed, Quantized, SPANS},
    team::Columns,
    tiles::{Lanes, Shape},
};

/// Products of all rows of `x` with the weight rows of `out`'s columns.
pub(crate) fn rows(weights: &Packed<'_>, x: &Quantized, out: &mut Columns<'_>) {
    let range = out.range();
    for (place, row) in range.enumerate() {
        for m in 0..x.rows() {
            out.row(m)[place] = element(weights, x, row, m);
        }
    }
}

fn element(weights: &Packed<'_>, x: &Quantized, row: usize, m: usize) -> f32 {
    let mut lanes = [0.0_f32; SPANS];
    let values = x.values(m);
    let bytes = weights.bytes_of(row..row + 1);
    for (run, (scales, sums)) in x.scales(m).iter().zip(x.sums(m)).enumerate() {
        let held = (weights.spans - run * SPANS).min(SPANS);
        for (index, lane) in lanes[..held].iter_mut().enumerate() {
            let span = run * SPANS + index;
            let at = row * weights.row_scales() + span / weights.spans_per_scale;
            let (scale, bias) = (weights.scales.get(at), weights.biases.get(at));
            let packed = &bytes[span * weights.span_bytes()..][..weights.span_bytes()];
            let dot = span_dot(weights, packed, values, span);
            *lane = bias.mul_add(sums.0[index], *lane);
            *lane = (dot as f32).mul_add(scale * scales.0[index], *lane);
        }
    }
    tree(lanes)
}

fn span_dot(
    weights: &Packed<'_>,
    packed: &[u8],
    values: &[crate::quantized::Line],
    span: usize,
) -> i32 {
    let first = span * weights.span;
    let product = |w: u8, x: i8| i32::from(w) * i32::from(x);
    if weights.bits == 4 {
        let (line, at) = (first / 128 * 2, first % 128 / 2);
        let range: Range<usize> = at..at + weights.span / 2;
        let (even, odd) = (&values[line].0[range.clone()], &values[line + 1].0[range]);
        let pairs = packed.iter().zip(even.iter().zip(odd));
        return pairs.map(|(w, (even, odd))| product(w & 15, *even) + product(w >> 4, *odd)).sum();
    }
    let x = &values[first / 64].0[first % 64..][..weights.span];
    if weights.bits == 8 {
        return packed.iter().zip(x).map(|(w, x)| product(*w, *x)).sum();
    }
    let (packed, (x, _)) = (packed.as_chunks::<3>().0, x.as_chunks::<4>());
    let four = |(w, x): (&[u8; 3], &[i8; 4])| -> i32 {
        let w = u32::from_le_bytes([w[0], w[1], w[2], 0]);
        (0..4).map(|index| product((w >> (6 * index)) as u8 & 63, x[index])).sum()
    };
    packed.iter().zip(x).map(four).sum()
}

/// 8 sums of the portable tiles.
#[derive(Clone, Copy)]
pub(crate) struct V([i32; 8]);

/// Tiles of 16 weight rows.
pub(crate) struct Tiles;

impl Shape for Tiles {
    type Lanes = V;
    const VECTORS: usize = 2;
}

impl Lanes for V {
    const N: usize = 8;
    const SIGNED: bool = false;
    type Weights = [u32; 8];
    type Pairs = [i32; 8];
    type Floats = [f32; 8];

    fn zero() -> Self {
        Self([0; 8])
    }

    fn weights<const BITS: usize>(from: &[u32]) -> [u32; 8] {
        *from.first_chunk().expect("a tile has whole vectors")
    }

    fn no_pairs() -> [i32; 8] {
        [0; 8]
    }

    fn add_products<const BITS: usize>(mut sums: [i32; 8], weights: [u32; 8], x: u32) -> [i32; 8] {
        for (sum, weights) in sums.iter_mut().zip(weights) {
            for (w, x) in weights.to_le_bytes().into_iter().zip(x.to_le_bytes()) {
                *sum += i32::from(w) * i32::from(x as i8);
            }
        }
        sums
    }

    fn plus_pairs(self, sums: [i32; 8]) -> Self {
        Self(std::array::from_fn(|lane| self.0[lane] + sums[lane]))
    }

    fn plus(self, value: i32) -> Self {
        Self(self.0.map(|sum| sum + value))
    }

    fn floats(self) -> [f32; 8] {
        self.0.map(|sum| sum as f32)
    }

    fn load(from: &[f32]) -> [f32; 8] {
        *from.first_chunk().expect("a tile has whole vectors")
    }

    fn store(floats: [f32; 8], to: &mut [f32]) {
        to[..8].copy_from_slice(&floats);
    }

    fn splat(value: f32) -> [f32; 8] {
        [value; 8]
    }

    fn add(a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        std::array::from_fn(|i| a[i] + b[i])
    }

    fn mul(a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        std::array::from_fn(|i| a[i] * b[i])
    }

    fn fma(a: [f32; 8], b: [f32; 8], c: [f32; 8]) -> [f32; 8] {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }
}
