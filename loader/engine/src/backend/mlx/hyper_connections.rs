//! Hyper-connections within the graph.

use shardpack_mlx::{Array, Binary, Reduce, Unary};

use super::{Mlx, Tensor, Vector};
use crate::backend::{HyperConnections, StreamParams};

impl HyperConnections for Mlx {
    fn stream_weights(&self, mixes: &Tensor, params: &StreamParams<'_, Vector>) -> Tensor {
        weights(mixes, params)
    }

    fn mix_streams(
        &self,
        x: &Tensor,
        mixes: &Tensor,
        params: &StreamParams<'_, Vector>,
        rounds: u32,
    ) -> Tensor {
        mix(x, mixes, params, rounds)
    }

    fn collapse_streams(&self, x: &Tensor, weights: &Tensor) -> Tensor {
        collapse(x, weights)
    }

    fn add_to_streams(&self, x: Tensor, part: &Tensor, weights: &Tensor) -> Tensor {
        add(&x, part, weights)
    }
}

/// `magnitude · sigmoid(scale · x + base) + eps` of some columns.
fn weights(mixes: &Tensor, params: &StreamParams<'_, Vector>) -> Tensor {
    let (from, to) = (params.columns.start, params.columns.end);
    let scaled = mixes.exact().slice(1, from, to).with_constant(Binary::Multiply, params.scale);
    let open = scaled.binary(Binary::Add, &params.base.slice(0, from, to)).unary(Unary::Sigmoid);
    let open = open.with_constant(Binary::Multiply, params.magnitude);
    Tensor::new(mixes.rows, to - from, open.with_constant(Binary::Add, params.eps))
}

/// Each row's streams mixed by a matrix of its own.
fn mix(x: &Tensor, mixes: &Tensor, params: &StreamParams<'_, Vector>, rounds: u32) -> Tensor {
    let (from, to) = (params.columns.start, params.columns.end);
    let streams = (to - from).isqrt();
    let scaled = mixes.exact().slice(1, from, to).with_constant(Binary::Multiply, params.scale);
    let scaled = scaled.binary(Binary::Add, &params.base.slice(0, from, to));
    let matrix = scaled.reshape(&[mixes.rows, streams, streams]).softmax(-1);
    let mut matrix = matrix.with_constant(Binary::Add, params.eps);
    let divided = |matrix: &Array, axis| {
        let sum = matrix.reduce(Reduce::Sum, axis).with_constant(Binary::Add, params.eps);
        matrix.binary(Binary::Divide, &sum)
    };
    for round in 0..rounds {
        if round > 0 {
            matrix = divided(&matrix, 2);
        }
        matrix = divided(&matrix, 1);
    }
    let mixed = matrix.transpose(&[0, 2, 1]).matmul(&x.runs(x.width / streams));
    x.with_exact(&mixed.reshape(&[x.rows, x.width]))
}

/// The weighted sum of each row's streams.
fn collapse(x: &Tensor, weights: &Tensor) -> Tensor {
    let hidden = x.width / weights.width;
    let factors = weights.array.reshape(&[x.rows, weights.width, 1]);
    let sum = x.runs(hidden).binary(Binary::Multiply, &factors).reduce(Reduce::Sum, 1);
    let sum = sum.reshape(&[x.rows, hidden]);
    Tensor::new(x.rows, hidden, sum.cast(x.array.element()))
}

/// Adds each row's part to its streams, times their weights.
fn add(x: &Tensor, part: &Tensor, weights: &Tensor) -> Tensor {
    let factors = weights.array.reshape(&[x.rows, weights.width, 1]);
    let parts = part.array.reshape(&[x.rows, 1, part.width]).binary(Binary::Multiply, &factors);
    let sum = x.runs(part.width).binary(Binary::Add, &parts);
    x.with_exact(&sum.reshape(&[x.rows, x.width]))
}
