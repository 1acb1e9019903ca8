//! Several residual streams within the graph.

use shardpack_mlx::{Array, Binary, Reduce, Unary};

use super::Tensor;
use crate::backend::StreamStep;

/// `magnitude · sigmoid(scale · x + base) + eps` of some columns.
pub(super) fn weights(mixes: &Tensor, step: &StreamStep<'_, Array>) -> Tensor {
    let (from, to) = (step.numbers.start, step.numbers.end);
    let scaled = mixes.array.slice(1, from, to).with_constant(Binary::Multiply, step.scale);
    let open = scaled.binary(Binary::Add, &step.base.slice(0, from, to)).unary(Unary::Sigmoid);
    let open = open.with_constant(Binary::Multiply, step.magnitude);
    Tensor::new(mixes.rows, to - from, open.with_constant(Binary::Add, step.eps))
}

/// The weighted sum of each row's streams.
pub(super) fn collapse(x: &Tensor, weights: &Tensor) -> Tensor {
    let hidden = x.width / weights.width;
    let factors = weights.array.reshape(&[x.rows, weights.width, 1]);
    let sum = x.runs(hidden).binary(Binary::Multiply, &factors).reduce(Reduce::Sum, 1);
    Tensor::new(x.rows, hidden, sum.reshape(&[x.rows, hidden]))
}

/// Adds each row's part to its streams, times their weights.
pub(super) fn add(x: &Tensor, part: &Tensor, weights: &Tensor) -> Tensor {
    let factors = weights.array.reshape(&[x.rows, weights.width, 1]);
    let parts = part.array.reshape(&[x.rows, 1, part.width]).binary(Binary::Multiply, &factors);
    let sum = x.runs(part.width).binary(Binary::Add, &parts);
    x.with(sum.reshape(&[x.rows, x.width]))
}
