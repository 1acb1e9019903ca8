//! Products of activations with a weight matrix.
//!
//! Quantized weights meet activations of 8 bits where the team says so, all others f32. Either
//! way a row of activations gives the same bits alone and among others.

use std::marker::PhantomData;

use crate::{
    lanes::dot,
    matrix::Matrix,
    platform::{Platform, Task},
    portable,
    quantized::{Order, Packed, Quantized},
    team::{self, Activations, Columns, Current},
    tiles::{self, Products, Shape},
};

/// Weight rows that are made f32 at once: enough to use a row of activations several times while
/// it is in the first cache.
const ROWS_AT_ONCE: usize = 8;

/// Weight rows of a task are a multiple of this: whole lines of results, and whole tiles.
const ROWS_PER_UNIT: usize = 32;

/// Rows of activations up to which weights are read row by row rather than in tiles: until then
/// turning a tile costs more than it saves.
const fn most_untiled_rows(platform: Platform) -> usize {
    match platform {
        Platform::Avx512 => 64,
        _ => 8,
    }
}

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
    if rows == 0 {
        return;
    }
    let on = team::current();
    let units = outputs.div_ceil(ROWS_PER_UNIT);
    let columns = on.units_per_task(units, ROWS_PER_UNIT * inputs * rows) * ROWS_PER_UNIT;
    match matrix.packed() {
        Some(weights) if on.activations == Activations::Int8 => {
            int8(&on, &weights, x, out, columns);
        }
        _ => team::columns(&on, out, outputs, columns, |out| {
            on.platform.run(Exact { x, matrix, out });
        }),
    }
}

/// Products of activations rounded to 8 bits; a task has `columns` weight rows.
fn int8(on: &Current, weights: &Packed<'_>, x: &[f32], out: &mut [f32], columns: usize) {
    let outputs = weights.rows();
    let rows = x.len() / weights.cols();
    let tiles = rows > most_untiled_rows(on.platform);
    let words = on.platform == Platform::Avx512 && rows > 1 && !tiles;
    let x = Quantized::new(on, x, weights, if words { Order::Words } else { Order::Spans });
    if tiles {
        return match on.platform {
            #[cfg(target_arch = "x86_64")]
            Platform::Avx512 => tiled::<crate::avx512::Tiles>(on, weights, &x, out, columns),
            #[cfg(target_arch = "x86_64")]
            Platform::Avx2 => tiled::<crate::avx2::Tiles>(on, weights, &x, out, columns),
            #[cfg(target_arch = "aarch64")]
            Platform::Neon => tiled::<crate::neon::Tiles>(on, weights, &x, out, columns),
            _ => tiled::<portable::Tiles>(on, weights, &x, out, columns),
        };
    }
    team::columns(on, out, outputs, columns, |mut out| match on.platform {
        #[cfg(target_arch = "x86_64")]
        Platform::Avx512 if words => crate::avx512::rows(weights, &x, &mut out),
        #[cfg(target_arch = "x86_64")]
        Platform::Avx512 => crate::avx512::row(weights, &x, &mut out),
        #[cfg(target_arch = "x86_64")]
        Platform::Avx2 => crate::avx2::rows(weights, &x, &mut out),
        #[cfg(target_arch = "aarch64")]
        Platform::Neon => crate::neon::rows(weights, &x, &mut out),
        _ => portable::rows(weights, &x, &mut out),
    });
}

fn tiled<S: Shape>(
    on: &Current,
    weights: &Packed<'_>,
    x: &Quantized,
    out: &mut [f32],
    columns: usize,
) {
    let panels = tiles::panels::<S>(on, x, weights);
    team::columns(on, out, weights.rows(), columns, |mut out| {
        let shape = PhantomData::<S>;
        on.platform.run(Products { weights, x: &panels, out: &mut out, shape });
    });
}

/// Products in f32 with some of the weight rows.
struct Exact<'a, 'b> {
    x: &'a [f32],
    matrix: &'a Matrix<'a>,
    out: Columns<'b>,
}

impl Task for Exact<'_, '_> {
    type Output = ();

    #[expect(clippy::inline_always, reason = "compiled within the function of each platform")]
    #[inline(always)]
    fn run(mut self) {
        let inputs = self.matrix.cols();
        let range = self.out.range();
        if self.out.rows() == 1 {
            let out = self.out.row(0);
            for (out, row) in out.iter_mut().zip(range) {
                *out = self.matrix.row_dot(row, self.x);
            }
            return;
        }
        let mut weights = vec![0.0; ROWS_AT_ONCE.min(range.len()) * inputs];
        for first in range.clone().step_by(ROWS_AT_ONCE) {
            let held = ROWS_AT_ONCE.min(range.end - first);
            for (index, weights) in weights.chunks_exact_mut(inputs).take(held).enumerate() {
                self.matrix.dequantize_row(first + index, weights);
            }
            for (row, x) in self.x.chunks_exact(inputs).enumerate() {
                let out = &mut self.out.row(row)[first - range.start..][..held];
                for (out, weights) in out.iter_mut().zip(weights.chunks_exact(inputs)) {
                    *out = dot(weights, x);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
