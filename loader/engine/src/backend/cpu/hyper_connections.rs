//! Hyper-connections: weights, sums and updates of residual streams. Every row is computed by itself and
//! in the order of its streams.

use shardpack_kernels::exp::exp;

use super::{Cpu, Tensor, route::sigmoid};
use crate::backend::{HyperConnections, StreamParams};

impl HyperConnections for Cpu {
    fn stream_weights(&self, mixes: &Tensor, params: &StreamParams<'_, Vec<f32>>) -> Tensor {
        weights(mixes, params)
    }

    fn mix_streams(
        &self,
        x: &Tensor,
        mixes: &Tensor,
        params: &StreamParams<'_, Vec<f32>>,
        rounds: u32,
    ) -> Tensor {
        mix(x, mixes, params, rounds)
    }

    fn collapse_streams(&self, x: &Tensor, weights: &Tensor) -> Tensor {
        collapse(x, weights)
    }

    fn add_to_streams(&self, x: Tensor, part: &Tensor, weights: &Tensor) -> Tensor {
        add(x, part, weights)
    }
}

/// `magnitude · sigmoid(scale · x + base) + eps` of some columns.
fn weights(mixes: &Tensor, params: &StreamParams<'_, Vec<f32>>) -> Tensor {
    let columns = params.columns.clone();
    assert!(
        mixes.width == params.base.len() && columns.end <= mixes.width,
        "a base for every column"
    );
    let mut out = Tensor::unset(mixes.rows(), columns.len());
    let rows = mixes.values.chunks_exact(mixes.width);
    for (out, row) in out.values.chunks_exact_mut(columns.len()).zip(rows) {
        let each = row[columns.clone()].iter().zip(&params.base[columns.clone()]);
        for (out, (x, base)) in out.iter_mut().zip(each) {
            *out = params.magnitude * sigmoid(params.scale * x + base) + params.eps;
        }
    }
    out
}

/// Each row's streams mixed by a matrix of its own.
fn mix(x: &Tensor, mixes: &Tensor, params: &StreamParams<'_, Vec<f32>>, rounds: u32) -> Tensor {
    let columns = params.columns.clone();
    let streams = columns.len().isqrt();
    assert!(
        mixes.width == params.base.len() && columns.end <= mixes.width,
        "a base for every column"
    );
    assert!(streams * streams == columns.len() && x.width.is_multiple_of(streams), "a matrix");
    let hidden = x.width / streams;
    let mut out = Tensor::zeros(x.rows(), x.width);
    let rows = x.values.chunks_exact(x.width).zip(mixes.values.chunks_exact(mixes.width));
    for (out, (row, mixes)) in out.values.chunks_exact_mut(x.width).zip(rows) {
        let each = mixes[columns.clone()].iter().zip(&params.base[columns.clone()]);
        let mut matrix: Vec<f32> = each.map(|(x, base)| params.scale * x + base).collect();
        balance(&mut matrix, streams, params.eps, rounds);
        for (from, stream) in row.chunks_exact(hidden).enumerate() {
            for (to, out) in out.chunks_exact_mut(hidden).enumerate() {
                let weight = matrix[from * streams + to];
                out.iter_mut().zip(stream).for_each(|(out, x)| *out += weight * x);
            }
        }
    }
    out
}

/// Makes a matrix of columns one whose columns and rows sum up to about one.
fn balance(matrix: &mut [f32], size: usize, eps: f32, rounds: u32) {
    for row in matrix.chunks_exact_mut(size) {
        let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        for x in row.iter_mut() {
            *x = exp(*x - largest);
        }
        let sum: f32 = row.iter().sum();
        for x in row {
            *x = *x / sum + eps;
        }
    }
    for round in 0..rounds {
        if round > 0 {
            for row in matrix.chunks_exact_mut(size) {
                let sum = row.iter().sum::<f32>() + eps;
                for x in row {
                    *x /= sum;
                }
            }
        }
        for column in 0..size {
            let column = || (column..size * size).step_by(size);
            let sum = column().map(|at| matrix[at]).sum::<f32>() + eps;
            for at in column() {
                matrix[at] /= sum;
            }
        }
    }
}

/// The weighted sum of each row's streams.
fn collapse(x: &Tensor, weights: &Tensor) -> Tensor {
    let Sizes { streams, hidden } = sizes(x, weights);
    let mut out = Tensor::zeros(x.rows(), hidden);
    let rows = x.values.chunks_exact(x.width).zip(weights.values.chunks_exact(streams));
    for (out, (row, weights)) in out.values.chunks_exact_mut(hidden).zip(rows) {
        for (stream, weight) in row.chunks_exact(hidden).zip(weights) {
            for (out, x) in out.iter_mut().zip(stream) {
                *out += weight * x;
            }
        }
    }
    out
}

/// Adds each row's part to its streams, times their weights.
fn add(mut x: Tensor, part: &Tensor, weights: &Tensor) -> Tensor {
    let Sizes { streams, hidden } = sizes(&x, weights);
    assert_eq!((part.rows(), part.width), (x.rows(), hidden), "a part for every row");
    let width = x.width;
    let parts = part.values.chunks_exact(hidden).zip(weights.values.chunks_exact(streams));
    for (row, (part, weights)) in x.values.chunks_exact_mut(width).zip(parts) {
        for (stream, weight) in row.chunks_exact_mut(hidden).zip(weights) {
            for (x, part) in stream.iter_mut().zip(part) {
                *x += weight * part;
            }
        }
    }
    x
}

struct Sizes {
    /// Streams of a row.
    streams: usize,
    /// Their width.
    hidden: usize,
}

fn sizes(x: &Tensor, weights: &Tensor) -> Sizes {
    let streams = weights.width;
    assert!(streams > 0 && x.width.is_multiple_of(streams), "{streams} streams of a row");
    assert_eq!(weights.rows(), x.rows(), "weights for every row");
    Sizes { streams, hidden: x.width / streams }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(width: usize, values: &[f32]) -> Tensor {
        Tensor { width, values: values.to_vec().into() }
    }

    #[test]
    fn weights_are_bent_scaled_and_lifted() {
        let base = vec![0.0, 9.0, -1.0, 0.5];
        let params =
            StreamParams { columns: 2..4, base: &base, scale: 2.0, magnitude: 3.0, eps: 0.25 };
        let found = weights(&tensor(4, &[7.0, 7.0, 0.5, 0.0, 7.0, 7.0, 1.0, -0.25]), &params);
        let of = |x: f32| 3.0 * sigmoid(x) + 0.25;
        assert_eq!(found.width, 2);
        assert_eq!(*found.values, [of(0.0), of(0.5), of(1.0), of(0.0)]);
        assert_eq!(of(0.0), 1.75);
    }

    #[test]
    fn streams_are_mixed_by_a_matrix_whose_rows_and_columns_sum_up_to_one() {
        let (count, rounds) = (3, 30);
        let base: Vec<f32> = (0..11).map(|i| (i as f32 * 1.3).sin()).collect();
        let mixes: Vec<f32> = (0..22).map(|i| (i as f32 * 0.7).cos()).collect();
        let params =
            StreamParams { columns: 2..11, base: &base, scale: 1.5, magnitude: 1.0, eps: 1e-6 };
        // One stream at a time, so that what comes out is the matrix.
        let mut all = Vec::new();
        for from in 0..count {
            let one: Vec<f32> = (0..count).map(|at| f32::from(u8::from(at == from))).collect();
            let x = tensor(count, &[&one[..], &one[..]].concat());
            all.push(mix(&x, &tensor(11, &mixes), &params, rounds));
        }
        for row in 0..2 {
            let weight = |from: usize, to: usize| all[from].values[row * count + to];
            for at in 0..count {
                let out: f32 = (0..count).map(|to| weight(at, to)).sum();
                let into: f32 = (0..count).map(|from| weight(from, at)).sum();
                assert!((out - 1.0).abs() < 1e-3 && (into - 1.0).abs() < 1e-3, "{out} {into}");
            }
            // The order of columns stays: before it was balanced, the matrix was a softmax of rows.
            let bent = |at: usize| params.scale * mixes[row * 11 + 2 + at] + base[2 + at];
            let odds = (bent(0) - bent(1) - bent(3) + bent(4)).exp();
            let found = weight(0, 0) * weight(1, 1) / (weight(0, 1) * weight(1, 0));
            assert!((found / odds - 1.0).abs() < 1e-3, "{found} {odds}");
        }
        let once = mix(&tensor(3, &[1.0, 0.0, 0.0]), &tensor(11, &mixes[..11]), &params, 1);
        let again = mix(&tensor(3, &[1.0, 0.0, 0.0]), &tensor(11, &mixes[..11]), &params, rounds);
        assert_ne!(*once.values, *again.values, "rounds count");
    }

    #[test]
    fn streams_are_summed_and_added_to_row_by_row() {
        let x = tensor(4, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
        let both = tensor(2, &[1.0, 2.0, 0.5, -1.0]);
        assert_eq!(*collapse(&x, &both).values, [7.0, 10.0, -4.5, -5.0]);
        let part = tensor(2, &[1.0, 10.0, 2.0, 4.0]);
        let found = add(x, &part, &both);
        assert_eq!(*found.values, [2.0, 12.0, 5.0, 24.0, 6.0, 8.0, 5.0, 4.0]);
    }
}
