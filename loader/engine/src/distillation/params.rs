//! The parameters of one matrix and their optimizer (Adam; Kingma and Ba 2015).
//!
//! A group of integers `q` from 0 to `n` has the weights `s q + b`. Scale and bias pull at the same
//! weights, so that the middle of a group, `c = b + s n / 2`, is learned in place of the bias; and both
//! are measured in steps of the group as it was: `s` by what the outermost integer moves. So a rate means
//! the same for every group, whatever its bits and its size.

use shardpack_quantize::Dtype;

use crate::backend::mlx::GroupParams;

const DECAY_OF_MEAN: f32 = 0.9;
const DECAY_OF_SQUARE: f32 = 0.95;
/// Far below any gradient of a mean in nats by a step.
const LEAST: f32 = 1e-12;

/// How far a step of descent goes.
#[derive(Clone, Copy, Debug)]
pub struct Rate {
    /// Steps of the optimizer with this one, from 1.
    pub number: usize,
    /// Most that a parameter moves, in steps of its group.
    pub size: f32,
}

/// Scales and biases of one matrix that are learned.
#[derive(Clone, Debug)]
pub struct LearnedMatrix {
    module: String,
    /// Half of the largest integer.
    middle: f32,
    origin: GroupParams,
    /// How far scales and middles have moved.
    moved: [Vec<f32>; 2],
    means: [Vec<f32>; 2],
    squares: [Vec<f32>; 2],
}

impl LearnedMatrix {
    /// A matrix before it has learned anything.
    #[must_use]
    pub(super) fn new(module: String, bits: u32, origin: GroupParams) -> Self {
        let zeros = || [vec![0.0; origin.scales.len()], vec![0.0; origin.scales.len()]];
        let (moved, means, squares) = (zeros(), zeros(), zeros());
        let middle = ((1_u32 << bits) - 1) as f32 / 2.0;
        Self { module, middle, origin, moved, means, squares }
    }

    /// Its module.
    #[must_use]
    pub fn module(&self) -> &str {
        &self.module
    }

    /// All that is learned, as numbers.
    pub(super) fn values(&self) -> Vec<f32> {
        [&self.moved, &self.means, &self.squares].into_iter().flatten().flatten().copied().collect()
    }

    /// Takes these numbers back from the start of `values`; the rest, or nothing if there are too few.
    pub(super) fn restore<'a>(&mut self, values: &'a [f32]) -> Option<&'a [f32]> {
        let mut rest = values;
        for to in [&mut self.moved, &mut self.means, &mut self.squares].into_iter().flatten() {
            let (from, after) = rest.split_at_checked(to.len())?;
            to.copy_from_slice(from);
            rest = after;
        }
        Some(rest)
    }

    /// Scales and biases, perhaps as they are stored. A bias makes good for what rounding does to its
    /// scale, so that the middle of the group stays.
    #[must_use]
    pub fn params(&self, store: Option<Dtype>) -> GroupParams {
        let GroupParams { scales, biases } = &self.origin;
        let (mut found, [by_scale, by_middle]) = (GroupParams::default(), &self.moved);
        for (index, (scale, bias)) in scales.iter().zip(biases).enumerate() {
            let (wider, higher) = (by_scale[index], by_middle[index]);
            if wider == 0.0 && higher == 0.0 {
                found.scales.push(*scale);
                found.biases.push(*bias);
                continue;
            }
            let middle = bias + self.middle * scale + scale * higher;
            let scale = stored(store, scale + scale / self.middle * wider);
            found.scales.push(scale);
            found.biases.push(stored(store, middle - self.middle * scale));
        }
        found
    }

    /// One step against the gradients by scales and biases.
    pub(super) fn update(&mut self, gradients: &GroupParams, rate: Rate) {
        let corrections =
            [DECAY_OF_MEAN, DECAY_OF_SQUARE].map(|it| 1.0 - it.powi(rate.number as i32));
        for (index, scale) in self.origin.scales.iter().enumerate() {
            let (by_scale, by_bias) = (gradients.scales[index], gradients.biases[index]);
            let by_moves =
                [scale / self.middle * (by_scale - self.middle * by_bias), scale * by_bias];
            for (part, gradient) in by_moves.into_iter().enumerate() {
                let mean = &mut self.means[part][index];
                let square = &mut self.squares[part][index];
                *mean += (1.0 - DECAY_OF_MEAN) * (gradient - *mean);
                *square += (1.0 - DECAY_OF_SQUARE) * (gradient * gradient - *square);
                let [mean, square] = [*mean / corrections[0], *square / corrections[1]];
                self.moved[part][index] -= rate.size * mean / (square.sqrt() + LEAST);
            }
        }
    }
}

fn stored(store: Option<Dtype>, value: f32) -> f32 {
    match store {
        Some(Dtype::BF16) => half::bf16::from_f32(value).to_f32(),
        Some(Dtype::F16) => half::f16::from_f32(value).to_f32(),
        _ => value,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix() -> LearnedMatrix {
        let origin = GroupParams { scales: vec![0.5, -0.25], biases: vec![-4.0, 2.0] };
        LearnedMatrix::new("m".to_owned(), 4, origin)
    }

    #[test]
    fn what_has_learned_nothing_is_as_it_was_stored() {
        let it = matrix();
        assert_eq!(it.params(None), it.origin);
        assert_eq!(it.params(Some(Dtype::BF16)), it.origin);
    }

    #[test]
    fn a_step_goes_against_the_gradient_by_its_size() {
        let mut it = matrix();
        // The loss grows with the first group's bias alone: its middle falls by the rate in steps of the group.
        let gradients = GroupParams { scales: vec![7.5, 0.0], biases: vec![1.0, 0.0] };
        it.update(&gradients, Rate { number: 1, size: 0.01 });
        let params = it.params(None);
        assert_eq!((params.scales[0], params.scales[1]), (0.5, -0.25));
        assert!((params.biases[0] - (-4.0 - 0.01 * 0.5)).abs() < 1e-6, "{params:?}");
        assert_eq!(params.biases[1], 2.0);
    }

    #[test]
    fn numbers_that_were_kept_are_the_same_matrix() {
        let mut it = matrix();
        let gradients = GroupParams { scales: vec![1.0, -2.0], biases: vec![0.5, 3.0] };
        it.update(&gradients, Rate { number: 1, size: 0.01 });
        let (values, mut other) = (it.values(), matrix());
        assert!(other.restore(&values).is_some_and(<[f32]>::is_empty));
        assert_eq!((other.params(None), other.values()), (it.params(None), values.clone()));
        assert!(other.restore(&values[1..]).is_none());
    }
}
