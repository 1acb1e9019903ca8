//! Rounding with error feedback: what one input's rounding leaves over is made good by the inputs that
//! are rounded after it, as far as their correlation lets them ([`Hessian`]).
//!
//! Lanes are rows of the matrix, which do not depend on each other. Each group's scale and bias are
//! searched as [`Rounding::Refined`](super::Rounding::Refined) does when its turn comes, on weights that
//! have taken up the errors so far, weighted by the factor's pivots.
//!
//! Sums run over inputs in the order of their turns, product and sum apart: the bits depend neither on
//! the platform nor on the number of threads.

use rayon::prelude::*;

use super::{
    ErrorSums, QuantizeError, QuantizeOptions,
    descent::{Solution, descend},
    error,
    hessian::{Factor, Hessian},
    lanes::{Range, Rows, round},
    mlx::{self, Backend},
    products::{VECTORS, sum_errors},
    search::{self, Grid},
    trials::Schedule,
};
use crate::{
    dtype::Dtype,
    simd::{Lanes, MAX_LANES, Task},
};

/// Rows of a task: whole vectors on every platform.
const ROWS_PER_TASK: usize = VECTORS * MAX_LANES;

/// The squared error of a matrix's outputs over the calibration text.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OutputError {
    /// With each group rounded by itself, as [`Rounding::Refined`](super::Rounding::Refined) does.
    pub refined: f64,
    /// As it is stored.
    pub stored: f64,
}

impl OutputError {
    /// The errors of two parts of a tensor.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self { refined: self.refined + other.refined, stored: self.stored + other.stored }
    }
}

/// Like [`super::quantize`], for whole rows, with error feedback by `hessian`. Rows that are no better
/// for it are rounded as [`Rounding::Refined`](super::Rounding::Refined) rounds them.
///
/// # Panics
/// When lengths do not fit each other.
pub fn quantize_with_feedback(
    options: &QuantizeOptions<'_>,
    hessian: &Hessian,
    (dtype, source): (Dtype, &[u8]),
    (packed, scales, biases): (&mut [u8], &mut [u8], &mut [u8]),
) -> Result<(ErrorSums, OutputError), QuantizeError> {
    let QuantizeOptions { format, store, platform, .. } = *options;
    let (inputs, group) = (hessian.inputs(), format.group_size() as usize);
    assert_eq!(hessian.group(), group, "a factor for these groups");
    let rows = source.len() / (inputs * dtype.size_bytes());
    assert_eq!(source.len(), rows * inputs * dtype.size_bytes(), "whole rows");
    let groups = inputs / group;
    let (words, width) = (groups * format.group_bytes(), groups * store.size_bytes());
    assert_eq!(packed.len(), rows * words, "integers of every group");
    assert_eq!((scales.len(), biases.len()), (rows * width, rows * width), "of every group");
    let found = source
        .par_chunks(ROWS_PER_TASK * inputs * dtype.size_bytes())
        .zip(packed.par_chunks_mut(ROWS_PER_TASK * words))
        .zip(
            scales
                .par_chunks_mut(ROWS_PER_TASK * width)
                .zip(biases.par_chunks_mut(ROWS_PER_TASK * width)),
        )
        .enumerate()
        .map(|(task, ((source, packed), (scales, biases)))| {
            let rows = FeedbackRows {
                options,
                hessian,
                source: (dtype, source),
                first: task * ROWS_PER_TASK * inputs,
            };
            rows.quantize((packed, scales, biases))
        })
        .collect::<Vec<_>>();
    let mut output = OutputError::default();
    for task in found {
        output = task?.into_iter().fold(output, OutputError::plus);
    }
    let sums = error::error(platform, format, (dtype, source), store, (packed, scales, biases));
    Ok((sums, output))
}

/// Rows of one task.
struct FeedbackRows<'a> {
    options: &'a QuantizeOptions<'a>,
    hessian: &'a Hessian,
    source: (Dtype, &'a [u8]),
    /// Elements of the tensor before them.
    first: usize,
}

type Bytes<'a> = (&'a mut [u8], &'a mut [u8], &'a mut [u8]);

impl FeedbackRows<'_> {
    /// The errors of each so many rows as [`MAX_LANES`].
    fn quantize(
        &self,
        (packed, scales, biases): Bytes<'_>,
    ) -> Result<[OutputError; VECTORS], QuantizeError> {
        let QuantizeOptions { format, store, platform, .. } = *self.options;
        let (dtype, source) = self.source;
        let inputs = self.hessian.inputs();
        let mut values = vec![0.0; source.len() / dtype.size_bytes()];
        super::widen(platform, dtype, source, &mut values);
        if let Some(at) = values.iter().position(|value| !value.is_finite()) {
            let value = values[at].to_string();
            return Err(QuantizeError::NotFinite { index: self.first + at, value });
        }
        let groups = inputs / format.group_size() as usize;
        let rows = values.len() / inputs;
        let mut results = [Rounded::new(rows, inputs, groups), Rounded::new(rows, inputs, groups)];
        for (feedback, result) in [false, true].into_iter().zip(&mut results) {
            let task =
                Round { options: self.options, hessian: self.hessian, values: &values, feedback };
            match format.group_size() {
                32 => platform.run(RoundInto::<32>(task, result)),
                64 => platform.run(RoundInto::<64>(task, result)),
                _ => platform.run(RoundInto::<128>(task, result)),
            }
        }
        let [refined, fed] = results;
        let mut outputs = [OutputError::default(); VECTORS];
        for row in 0..rows {
            let is_better = fed.errors[row] < refined.errors[row];
            let best = if is_better { &fed } else { &refined };
            let output = &mut outputs[row / MAX_LANES];
            output.refined += refined.errors[row];
            output.stored += best.errors[row];
            let group = format.group_size() as usize;
            let q = best.q[row * inputs..][..inputs].chunks_exact(group);
            let out = packed.chunks_exact_mut(format.group_bytes()).skip(row * groups);
            for (q, out) in q.zip(out) {
                super::pack(format, q, out);
            }
            for (from, to) in [(&best.scales, &mut *scales), (&best.biases, &mut *biases)] {
                let from = &from[row * groups..][..groups];
                if let Some(at) = from.iter().position(|value| !value.is_finite()) {
                    let index = self.first + row * inputs + at * group;
                    return Err(QuantizeError::TooWide { index, dtype: store });
                }
                let width = store.size_bytes();
                super::narrow(
                    platform,
                    store,
                    from,
                    &mut to[row * groups * width..][..groups * width],
                );
            }
        }
        Ok(outputs)
    }
}

/// What rows were rounded to.
struct Rounded {
    q: Vec<u8>,
    scales: Vec<f32>,
    biases: Vec<f32>,
    /// Squared error of the outputs of each row.
    errors: Vec<f64>,
}

impl Rounded {
    fn new(rows: usize, inputs: usize, groups: usize) -> Self {
        Self {
            q: vec![0; rows * inputs],
            scales: vec![0.0; rows * groups],
            biases: vec![0.0; rows * groups],
            errors: vec![0.0; rows],
        }
    }
}

/// Some rows, rounded with or without feedback.
#[derive(Clone, Copy)]
struct Round<'a> {
    options: &'a QuantizeOptions<'a>,
    hessian: &'a Hessian,
    values: &'a [f32],
    feedback: bool,
}

/// What becomes of a block's inputs, in the order of their turns.
struct Buffers<V> {
    errors: Vec<V>,
    q: Vec<V>,
    grids: Vec<Grid<V>>,
}

/// Constants make functions that the compiler handles one by one.
struct RoundInto<'a, const G: usize>(Round<'a>, &'a mut Rounded);

impl<const G: usize> Task for RoundInto<'_, G> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self, proof: V::Proof) {
        let rows = self.1.errors.len();
        let zero = V::splat(proof, 0.0);
        let block = self.0.hessian.block();
        let mut buffers = [(); VECTORS].map(|()| Buffers {
            errors: vec![zero; block],
            q: vec![zero; block],
            grids: vec![Grid { scale: zero, bias: zero }; block / G],
        });
        for first in (0..rows).step_by(VECTORS * V::N) {
            for block in 0..self.0.hessian.factors().len() {
                self.0.block::<V, G>(proof, (first, block), &mut buffers, self.1);
            }
        }
    }
}

impl Round<'_> {
    /// Rounds a block's inputs of the rows from `first` on, as many as there are lanes in all vectors.
    #[inline(always)]
    fn block<V: Lanes, const G: usize>(
        &self,
        proof: V::Proof,
        (first, block): (usize, usize),
        buffers: &mut [Buffers<V>; VECTORS],
        out: &mut Rounded,
    ) {
        let factor = &self.hessian.factors()[block];
        let zero = V::splat(proof, 0.0);
        let mut moved = [[zero; G]; VECTORS];
        let mut rows = Rows::new();
        let mut totals = [zero; VECTORS];
        for turn in 0..factor.groups.len() {
            let at = block * self.hessian.block() + factor.groups[turn] * G;
            let before = buffers.each_ref().map(|it| &it.errors[..turn * G]);
            sum_errors::<V, G>(proof, factor.panel(turn), before, &mut moved);
            for (number, buffers) in buffers.iter_mut().enumerate() {
                let first = first + number * V::N;
                let moved = &mut moved[number];
                let residuals = self.turn::<V, G>(
                    proof,
                    (factor, turn),
                    (first, at),
                    (&mut rows, moved),
                    buffers,
                );
                totals[number] = totals[number].add(residuals);
            }
        }
        if self.feedback {
            let largest = V::splat(proof, self.options.format.max_q() as f32);
            let mut solutions = buffers.each_mut().map(|Buffers { q, errors, grids }| Solution {
                q,
                errors,
                grids,
            });
            let store = (self.options.store, largest);
            let changes = descend::<V, G>(proof, factor, store, &mut solutions);
            for (total, change) in totals.iter_mut().zip(changes) {
                *total = total.add(change);
            }
        }
        for (number, Buffers { q, grids, .. }) in buffers.iter().enumerate() {
            let first = first + number * V::N;
            let live = out.errors.len().saturating_sub(first).min(V::N);
            for turn in 0..factor.groups.len() {
                let at = block * self.hessian.block() + factor.groups[turn] * G;
                let found = (&q[turn * G..(turn + 1) * G], grids[turn]);
                self.put::<V, G>((first, live, at), (factor, turn), found, out);
            }
            let mut lanes = [0.0; MAX_LANES];
            totals[number].store(&mut lanes);
            for (error, total) in out.errors.iter_mut().skip(first).zip(&lanes[..live]) {
                *error += f64::from(*total);
            }
        }
    }

    /// Rounds one group of the rows from `first` on, at `at` in each, of which the errors before have asked
    /// `moved`.
    #[inline(always)]
    fn turn<V: Lanes, const G: usize>(
        &self,
        proof: V::Proof,
        (factor, turn): (&Factor, usize),
        (first, at): (usize, usize),
        (rows, moved): (&mut Rows, &mut [V; G]),
        buffers: &mut Buffers<V>,
    ) -> V {
        let inputs = self.hessian.inputs();
        let zero = V::splat(proof, 0.0);
        let (mut weights, mut natural, mut pivots) = ([zero; G], [zero; G], [zero; G]);
        let empty = [0.0; G];
        let held = self.values.len() / inputs;
        let row = |i: usize| {
            if first + i < held {
                &self.values[(first + i) * inputs + at..][..G]
            } else {
                &empty[..]
            }
        };
        rows.load_rows(proof, row, &mut natural);
        for k in 0..G {
            weights[k] = natural[factor.order[turn * G + k]];
            pivots[k] = V::splat(proof, factor.pivots[turn * G + k]);
            moved[k] = moved[k].add(weights[k]);
        }
        let grid = self.grid::<V, G>(proof, if self.feedback { moved } else { &weights }, &pivots);
        buffers.grids[turn] = grid;
        let range = turn * G..(turn + 1) * G;
        let results = (&mut buffers.errors[range.clone()], &mut buffers.q[range]);
        self.round::<V, G>(proof, (factor, turn), (&weights, moved), grid, results)
    }

    #[inline(always)]
    fn grid<V: Lanes, const G: usize>(
        &self,
        proof: V::Proof,
        values: &[V; G],
        pivots: &[V; G],
    ) -> Grid<V> {
        let format = self.options.format;
        let largest = V::splat(proof, format.max_q() as f32);
        let range = Range::of(values);
        let mlx = mlx::choose(proof, Backend::Cpu, range, largest);
        let weights = (values, Some(pivots));
        search::refine(
            proof,
            weights,
            (range, mlx, largest),
            self.options.store,
            &Schedule::of(format),
        )
    }

    /// Rounds a group's inputs one after the other; the sum of `D · residual²`.
    #[inline(always)]
    fn round<V: Lanes, const G: usize>(
        &self,
        proof: V::Proof,
        (factor, turn): (&Factor, usize),
        (weights, moved): (&[V; G], &mut [V; G]),
        grid: Grid<V>,
        (errors, q): (&mut [V], &mut [V]),
    ) -> V {
        let largest = V::splat(proof, self.options.format.max_q() as f32);
        let inverse = V::splat(proof, 1.0).div(grid.scale);
        let within = &factor.panel(turn)[turn * G * G..];
        let mut total = V::splat(proof, 0.0);
        for k in 0..G {
            let from = if self.feedback { moved[k] } else { weights[k] };
            q[k] = round(proof, from.sub(grid.bias).mul(inverse), largest);
            let stored = q[k].mul(grid.scale).add(grid.bias);
            let (error, residual) = (weights[k].sub(stored), moved[k].sub(stored));
            errors[k] = error;
            let pivot = V::splat(proof, factor.pivots[turn * G + k]);
            total = total.add(pivot.mul(residual).mul(residual));
            let row = &within[k * G..(k + 1) * G];
            for c in k + 1..G {
                moved[c] = moved[c].add(error.mul(V::splat(proof, row[c])));
            }
        }
        total
    }

    /// Keeps a group's integers, scale and bias.
    #[inline(always)]
    fn put<V: Lanes, const G: usize>(
        &self,
        (first, live, at): (usize, usize, usize),
        (factor, turn): (&Factor, usize),
        (q, grid): (&[V], Grid<V>),
        out: &mut Rounded,
    ) {
        let inputs = self.hessian.inputs();
        let mut lanes = [0.0; MAX_LANES];
        for (q, within) in q.iter().zip(&factor.order[turn * G..]) {
            q.store(&mut lanes);
            let place = at + within;
            for (i, lane) in lanes[..live].iter().enumerate() {
                out.q[(first + i) * inputs + place] = *lane as u8;
            }
        }
        for (values, out) in [(grid.scale, &mut out.scales), (grid.bias, &mut out.biases)] {
            values.store(&mut lanes);
            for (i, lane) in lanes[..live].iter().enumerate() {
                out[(first + i) * (inputs / G) + at / G] = *lane;
            }
        }
    }
}
