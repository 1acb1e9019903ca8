//! Products whose errors nothing dampens any more, which are logits: activations keep about 16
//! bits, as two rows of 8, and the weights are read once for both.

use super::matmuls_before;
use crate::{
    matmul::Beginning,
    matrix::Matrix,
    pool::Pool,
    quantized::{has_lost, rounding_of},
    team::{self, Activations},
};

/// Rows of activations at a time: their results take twice the room until they are added.
const ROWS_AT_ONCE: usize = 16;

/// Results that are added by a task.
const SUMS_PER_TASK: usize = 16 << 10;

static PARTS: Pool<f32> = Pool::new();

/// [`super::matmul`] with activations that are rounded to 8 bits, and what that has lost rounded to
/// 8 bits once more, where the team rounds at all. `next` as in [`matmuls_before`].
///
/// On SmolLM2-135M with 8-bit weights the rounding before the output head is two fifths of the KL
/// divergence that all roundings of activations cost.
pub fn matmul_in_two_planes(
    x: &[f32],
    matrix: &Matrix<'_>,
    out: &mut [f32],
    next: Option<&Beginning>,
) {
    let on = team::current();
    let (inputs, outputs) = (matrix.cols(), matrix.rows());
    let weights = matrix.packed().filter(|_| on.activations == Activations::Int8);
    let Some(weights) = weights.filter(|_| outputs > 0) else {
        return matmuls_before(x, &[*matrix], &mut [out], next);
    };
    let span = weights.span;
    for (x, out) in x.chunks(ROWS_AT_ONCE * inputs).zip(out.chunks_mut(ROWS_AT_ONCE * outputs)) {
        let mut planes = Vec::with_capacity(2 * x.len());
        for x in x.chunks_exact(inputs) {
            planes.extend_from_slice(x);
            for x in x.chunks_exact(span) {
                let rounding = rounding_of(x);
                planes.extend(x.iter().map(|x| has_lost(*x, rounding)));
            }
        }
        let mut parts = PARTS.take(2 * out.len());
        matmuls_before(&planes, &[*matrix], &mut [&mut *parts], next);
        let parts = &*parts;
        team::chunks(&on, out, SUMS_PER_TASK, |task, out| {
            let mut at = task * SUMS_PER_TASK;
            let mut out = out;
            while !out.is_empty() {
                let (row, column) = (at / outputs, at % outputs);
                let (now, later) = out.split_at_mut(out.len().min(outputs - column));
                let first = &parts[2 * row * outputs + column..][..now.len()];
                let second = &parts[(2 * row + 1) * outputs + column..][..now.len()];
                for (out, (first, second)) in now.iter_mut().zip(first.iter().zip(second)) {
                    *out = first + second;
                }
                at += now.len();
                out = later;
            }
        });
    }
}
