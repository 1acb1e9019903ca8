//! Products of activations with a weight matrix.

use rayon::prelude::*;

use crate::{lanes::dot, matrix::Matrix};

/// Weight rows of one piece of work: enough to use a row of activations several times while it
/// is in the first cache.
const ROWS_PER_PIECE: usize = 8;

/// Products below which another thread costs more than it saves (some microseconds of work).
const MIN_PRODUCTS_PER_TASK: usize = 1 << 16;

/// `out[r, o] = Σ_i x[r, i] · matrix[o, i]`: `x` is `[rows, in]`, `out` `[rows, out]`.
pub fn matmul(x: &[f32], matrix: &Matrix<'_>, out: &mut [f32]) {
    let (inputs, outputs) = (matrix.cols(), matrix.rows());
    if inputs == 0 || outputs == 0 {
        out.fill(0.0);
        return;
    }
    let rows = x.len() / inputs;
    assert_eq!(x.len(), rows * inputs, "activations of {inputs} inputs");
    assert_eq!(out.len(), rows * outputs, "results of {rows} rows");
    let pieces_per_task = MIN_PRODUCTS_PER_TASK.div_ceil(ROWS_PER_PIECE * inputs * rows.max(1));
    if rows <= 1 {
        one_row(x, matrix, out, pieces_per_task);
    } else {
        many_rows(x, matrix, out, pieces_per_task);
    }
}

fn one_row(x: &[f32], matrix: &Matrix<'_>, out: &mut [f32], pieces_per_task: usize) {
    out.par_chunks_mut(ROWS_PER_PIECE).with_min_len(pieces_per_task).enumerate().for_each(
        |(piece, out)| {
            for (index, out) in out.iter_mut().enumerate() {
                *out = matrix.row_dot(piece * ROWS_PER_PIECE + index, x);
            }
        },
    );
}

/// Each weight row is dequantized once for all rows of activations. Threads own weight rows, so
/// results arrive as `[out, rows]` and are transposed at the end.
fn many_rows(x: &[f32], matrix: &Matrix<'_>, out: &mut [f32], pieces_per_task: usize) {
    let (inputs, outputs) = (matrix.cols(), matrix.rows());
    let rows = x.len() / inputs;
    let mut transposed = vec![0.0; out.len()];
    transposed
        .par_chunks_mut(ROWS_PER_PIECE * rows)
        .with_min_len(pieces_per_task)
        .enumerate()
        .for_each_init(
            || vec![0.0; ROWS_PER_PIECE * inputs],
            |weights, (piece, out)| {
                let held = out.len() / rows;
                for (index, weights) in weights.chunks_exact_mut(inputs).take(held).enumerate() {
                    matrix.dequantize_row(piece * ROWS_PER_PIECE + index, weights);
                }
                for (row, x) in x.chunks_exact(inputs).enumerate() {
                    for (index, weights) in weights.chunks_exact(inputs).take(held).enumerate() {
                        out[index * rows + row] = dot(weights, x);
                    }
                }
            },
        );
    out.par_chunks_mut(outputs).with_min_len(ROWS_PER_PIECE).enumerate().for_each(|(row, out)| {
        for (out, column) in out.iter_mut().zip(transposed.chunks_exact(rows)) {
            *out = column[row];
        }
    });
}

#[cfg(test)]
mod tests;
