//! How far quantized groups are from the weights they stand for.
//!
//! Sums over a group are f32, in the order of its elements, of numbers scaled by a power of two
//! that brings the largest weight near one; so nothing overflows and nothing that matters
//! vanishes. Sums over groups are f64: group `i` of a task in lane `i mod 16`, then a fixed tree,
//! then tasks in order. The bits depend neither on the platform nor on the number of threads.

use rayon::prelude::*;

use super::{
    AffineFormat,
    floats::widen_inline,
    lanes::{Range, Rows},
    search::Grid,
};
use crate::{
    dtype::Dtype,
    simd::{Lanes, MAX_LANES, Platform, Task},
};

/// Sums over a tensor; the same bits for any number of threads.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ErrorSums {
    /// Sum of squared weights.
    pub weights: f64,
    /// Sum of squared differences.
    pub errors: f64,
    /// Sum of products of weights and their stand-ins.
    pub products: f64,
    /// Sum of squared stand-ins.
    pub stored: f64,
    /// Integers at the end of their range that clamping put there are not told apart from those
    /// that fit exactly; this counts both ends.
    pub at_ends: u64,
}

impl ErrorSums {
    /// The sums of two tensors, or of two parts of one; not associative in the last bits.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            weights: self.weights + other.weights,
            errors: self.errors + other.errors,
            products: self.products + other.products,
            stored: self.stored + other.stored,
            at_ends: self.at_ends + other.at_ends,
        }
    }

    /// Root of the squared error over the squared weights; 0 for an all-zero tensor.
    #[must_use]
    pub fn relative_rmse(&self) -> f64 {
        if self.weights == 0.0 { 0.0 } else { (self.errors / self.weights).sqrt() }
    }

    /// Cosine between weights and stand-ins; 1 for an all-zero tensor.
    #[must_use]
    pub fn cosine(&self) -> f64 {
        let norms = (self.weights * self.stored).sqrt();
        if norms == 0.0 { 1.0 } else { self.products / norms }
    }
}

/// Groups that one task takes: large enough to hide the task's cost, small enough that two cores
/// end together on a small tensor. Whole vectors on every platform.
pub const GROUPS_PER_TASK: usize = 256;

/// Compares a quantized tensor with its source; arguments as for [`super::quantize`], which
/// returns the same sums.
///
/// # Panics
/// When lengths do not fit each other.
#[must_use]
pub fn error(
    platform: Platform,
    format: AffineFormat,
    (dtype, source): (Dtype, &[u8]),
    store: Dtype,
    (packed, scales, biases): (&[u8], &[u8], &[u8]),
) -> ErrorSums {
    let group_source = format.group_size() as usize * dtype.size_bytes();
    let width = store.size_bytes();
    let groups = source.len() / group_source;
    assert_eq!(source.len(), groups * group_source, "whole groups");
    assert_eq!(packed.len(), groups * format.group_bytes(), "integers of every group");
    assert_eq!((scales.len(), biases.len()), (groups * width, groups * width), "of every group");
    let tasks: Vec<ErrorSums> = source
        .par_chunks(GROUPS_PER_TASK * group_source)
        .zip(packed.par_chunks(GROUPS_PER_TASK * format.group_bytes()))
        .zip(
            scales
                .par_chunks(GROUPS_PER_TASK * width)
                .zip(biases.par_chunks(GROUPS_PER_TASK * width)),
        )
        .map(|((source, packed), (scales, biases))| {
            let compare = Compare { format, dtype, source, store, packed, scales, biases };
            match format.group_size() {
                32 => platform.run(CompareGroups::<32>(compare)),
                64 => platform.run(CompareGroups::<64>(compare)),
                _ => platform.run(CompareGroups::<128>(compare)),
            }
        })
        .collect();
    tasks.into_iter().fold(ErrorSums::default(), ErrorSums::plus)
}

struct Compare<'a> {
    format: AffineFormat,
    dtype: Dtype,
    source: &'a [u8],
    store: Dtype,
    packed: &'a [u8],
    scales: &'a [u8],
    biases: &'a [u8],
}

struct CompareGroups<'a, const G: usize>(Compare<'a>);

impl<const G: usize> Task for CompareGroups<'_, G> {
    type Output = ErrorSums;

    #[inline(always)]
    fn run<V: Lanes>(self, proof: V::Proof) -> ErrorSums {
        self.0.groups::<V, G>(proof)
    }
}

impl Compare<'_> {
    #[inline(always)]
    fn groups<V: Lanes, const G: usize>(self, proof: V::Proof) -> ErrorSums {
        let mut rows = Rows::new();
        let mut tally = Tally::new();
        let largest = V::splat(proof, self.format.max_q() as f32);
        let (mut values, mut q) = ([largest; G], [largest; G]);
        let width = self.store.size_bytes();
        let batches = self
            .source
            .chunks(V::N * G * self.dtype.size_bytes())
            .zip(self.packed.chunks(V::N * self.format.group_bytes()))
            .zip(self.scales.chunks(V::N * width).zip(self.biases.chunks(V::N * width)));
        for ((source, packed), (scales, biases)) in batches {
            let live = scales.len() / width;
            let mut affine = [[0.0; MAX_LANES]; 2];
            widen_inline(self.store, scales, &mut affine[0][..live]);
            widen_inline(self.store, biases, &mut affine[1][..live]);
            let grid = Grid { scale: V::load(proof, &affine[0]), bias: V::load(proof, &affine[1]) };
            rows.load(proof, self.dtype, source, &mut values);
            rows.unpack(proof, self.format.bits(), packed, &mut q);
            tally.add(proof, (&values, Range::of(&values)), (&q, grid, largest), live);
        }
        tally.sums()
    }
}

/// Sums over the groups of one task.
pub(super) struct Tally {
    groups: usize,
    /// Squared weights, squared errors, squared stand-ins, ends.
    lanes: [[f64; MAX_LANES]; 4],
}

impl Tally {
    pub(super) const fn new() -> Self {
        Self { groups: 0, lanes: [[0.0; MAX_LANES]; 4] }
    }

    /// Adds the first `live` lanes' groups.
    #[inline(always)]
    pub(super) fn add<V: Lanes, const G: usize>(
        &mut self,
        proof: V::Proof,
        (values, range): (&[V; G], Range<V>),
        (q, grid, largest): (&[V; G], Grid<V>, V),
        live: usize,
    ) {
        let mut factors = [0.0; MAX_LANES];
        range.magnitude().store(&mut factors);
        for factor in &mut factors {
            *factor = factor_of(*factor);
        }
        let factor = V::load(proof, &factors);
        let (scale, bias) = (grid.scale.mul(factor), grid.bias.mul(factor));
        // An end is as far from the middle as integers can be, one further than any other. Halves
        // are exact, and so are their sums.
        let middle = largest.mul(V::splat(proof, 0.5));
        let inside = middle.sub(V::splat(proof, 1.0));
        let mut sums = [V::splat(proof, 0.0); 3];
        let mut ends = V::splat(proof, 0.0).sub(inside.mul(V::splat(proof, G as f32)));
        for (value, q) in values.iter().zip(q) {
            let value = value.mul(factor);
            let stored = q.mul(scale).add(bias);
            let error = value.sub(stored);
            sums[0] = sums[0].add(value.mul(value));
            sums[1] = sums[1].add(error.mul(error));
            sums[2] = sums[2].add(stored.mul(stored));
            ends = ends.add(q.sub(middle).abs().max(inside));
        }
        let first = self.groups % MAX_LANES;
        self.groups += live;
        let [weights, errors, stored] = sums;
        let sums = [weights, errors, stored, ends];
        // Twice the same; the first with a length that the compiler knows.
        if live == V::N {
            self.add_lanes(first, V::N, sums, &factors);
        } else {
            self.add_lanes(first, live, sums, &factors);
        }
    }

    /// Adds sums of numbers scaled by `factors`, and the ends, to the lanes from `first` on.
    #[inline(always)]
    fn add_lanes<V: Lanes>(
        &mut self,
        first: usize,
        live: usize,
        sums: [V; 4],
        factors: &[f32; MAX_LANES],
    ) {
        let mut units = [1.0; MAX_LANES];
        for (unit, factor) in units.iter_mut().zip(factors) {
            *unit = unit_of(*factor);
        }
        for (index, (lanes, sum)) in self.lanes.iter_mut().zip(sums).enumerate() {
            let mut sums = [0.0; MAX_LANES];
            sum.store(&mut sums);
            let lanes = &mut lanes[first..first + live];
            for ((lane, sum), unit) in lanes.iter_mut().zip(&sums[..live]).zip(&units[..live]) {
                *lane += f64::from(*sum) * if index == 3 { 1.0 } else { *unit };
            }
        }
    }

    pub(super) fn sums(&self) -> ErrorSums {
        let [weights, errors, stored, ends] = self.lanes.map(|mut lanes| {
            for half in [8, 4, 2, 1] {
                for lane in 0..half {
                    lanes[lane] += lanes[lane + half];
                }
            }
            lanes[0]
        });
        ErrorSums {
            weights,
            errors,
            // From (w - s)² = w² - 2ws + s².
            products: (weights + stored - errors) / 2.0,
            stored,
            at_ends: ends as u64,
        }
    }
}

/// The power of two that brings a magnitude to one or below two (four for the largest).
#[inline(always)]
fn factor_of(magnitude: f32) -> f32 {
    let exponent = (magnitude.to_bits() & 0x7f80_0000).min(253 << 23);
    f32::from_bits((254 << 23) - exponent)
}

/// One over the square of a power of two from 2⁻¹²⁶ to 2¹²⁷.
#[inline(always)]
const fn unit_of(factor: f32) -> f64 {
    let exponent = (factor.to_bits() >> 23) as u64;
    f64::from_bits((1023 + 2 * 127 - 2 * exponent) << 52)
}
