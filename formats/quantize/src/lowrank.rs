//! Low-rank changes to a matrix, as adapters store them: `W + scale · (left · right)`, and the
//! rescaled rows of `DoRA`. Products are summed over the rank in order, one element at a time, so
//! the bits are the same on every processor and for every split into rows.

#![expect(clippy::inline_always, reason = "a task is compiled once for every platform")]

use crate::simd::{Lanes, Platform, Task};

/// Rows that share one pass over the right factor.
const ROWS: usize = 4;

/// Adds `scale · (left · right)` to `weights`: `[rows, width]`, `left` `[rows, rank]`, `right`
/// `[rank, width]`.
///
/// # Panics
/// When the lengths do not fit each other.
pub fn add(
    platform: Platform,
    weights: &mut [f32],
    width: usize,
    left: &[f32],
    right: &[f32],
    scale: f32,
) {
    if weights.is_empty() {
        return;
    }
    let (rows, rank) = (weights.len() / width, right.len() / width);
    assert_eq!(weights.len(), rows * width, "whole rows");
    assert_eq!((left.len(), right.len()), (rows * rank, rank * width), "factors fit");
    platform.run(Add { weights, width, left, rank, right, scale });
}

struct Add<'a> {
    weights: &'a mut [f32],
    width: usize,
    left: &'a [f32],
    rank: usize,
    right: &'a [f32],
    scale: f32,
}

impl Task for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self, _: V::Proof) {
        let Self { weights, width, left, rank, right, scale } = self;
        let mut delta = vec![0.0_f32; ROWS * width];
        let lefts = left.chunks(ROWS * rank.max(1));
        for (weights, left) in weights.chunks_mut(ROWS * width).zip(lefts) {
            let delta = &mut delta[..weights.len()];
            delta.fill(0.0);
            for (k, right) in right.chunks_exact(width).enumerate() {
                for (row, delta) in delta.chunks_exact_mut(width).enumerate() {
                    let factor = left[row * rank + k];
                    for (sum, right) in delta.iter_mut().zip(right) {
                        *sum += factor * right;
                    }
                }
            }
            for (weight, delta) in weights.iter_mut().zip(delta) {
                *weight += scale * *delta;
            }
        }
    }
}

/// Scales every row of `weights` to the length that `magnitudes` gives it.
///
/// # Panics
/// When the lengths do not fit each other.
pub fn rescale(weights: &mut [f32], width: usize, magnitudes: &[f32]) {
    assert_eq!(weights.len(), magnitudes.len() * width, "one magnitude a row");
    for (row, magnitude) in weights.chunks_exact_mut(width).zip(magnitudes) {
        let square = |sum: f64, value: &f32| sum + f64::from(*value) * f64::from(*value);
        let length = row.iter().fold(0.0, square).sqrt() as f32;
        let factor = magnitude / length;
        for value in row.iter_mut() {
            *value *= factor;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_is_that_of_plain_loops_on_every_platform() {
        let (rows, width, rank) = (11, 37, 3);
        let number = |seed: usize| ((seed * 2_654_435_761) % 1009) as f32 / 500.0 - 1.0;
        let left: Vec<f32> = (0..rows * rank).map(number).collect();
        let right: Vec<f32> = (7..7 + rank * width).map(number).collect();
        let base: Vec<f32> = (99..99 + rows * width).map(number).collect();
        let mut expected = base.clone();
        for row in 0..rows {
            for column in 0..width {
                let terms = (0..rank).map(|k| left[row * rank + k] * right[k * width + column]);
                expected[row * width + column] += 0.75 * terms.fold(0.0, |sum, term| sum + term);
            }
        }
        for platform in Platform::available_for_quantizing() {
            let mut found = base.clone();
            add(platform, &mut found, width, &left, &right, 0.75);
            assert_eq!(found, expected, "{platform:?}");
        }
        add(Platform::detect_for_quantizing(), &mut [], width, &[], &right, 1.0);
    }

    #[test]
    fn rows_get_their_lengths() {
        let mut weights = [3.0, 4.0, 0.0, 2.0];
        rescale(&mut weights, 2, &[10.0, 1.0]);
        assert_eq!(weights, [6.0, 8.0, 0.0, 1.0]);
    }
}
