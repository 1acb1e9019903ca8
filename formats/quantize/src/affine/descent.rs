//! What remains after error feedback, made smaller: each group's scale and bias are fitted anew to its
//! integers, and each integer is moved where that lowers the squared error of the outputs, one after the
//! other, with everything else as it is (coordinate descent; `QuantEase`, Behdin et al. 2023).
//!
//! Nothing changes unless it lowers `e H eᵀ`, `e` being a row's errors. Its gradient `e H` is computed
//! for a group when its turn comes, sums in the order of inputs, product and sum apart.

use super::{
    hessian::Factor,
    lanes::round,
    products::{VECTORS, sum_errors},
    search::{Grid, stored},
};
use crate::{dtype::Dtype, simd::Lanes};

/// Passes over all groups. Another one is worth less than a hundredth of the error.
const SWEEPS: usize = 3;

/// A row's integers, errors and grids, in the order of turns.
pub(super) struct Solution<'a, V> {
    pub(super) q: &'a mut [V],
    pub(super) errors: &'a mut [V],
    pub(super) grids: &'a mut [Grid<V>],
}

/// Lowers each lane's error; returns by how much it changed.
#[inline(always)]
pub(super) fn descend<V: Lanes, const G: usize>(
    proof: V::Proof,
    factor: &Factor,
    (dtype, largest): (Dtype, V),
    solutions: &mut [Solution<'_, V>; VECTORS],
) -> [V; VECTORS] {
    let zero = V::splat(proof, 0.0);
    let mut changes = [zero; VECTORS];
    let mut gradients = [[zero; G]; VECTORS];
    for _ in 0..SWEEPS {
        for turn in 0..factor.groups.len() {
            let moments = factor.moments(turn);
            let errors = solutions.each_ref().map(|it| &*it.errors);
            sum_errors::<V, G>(proof, moments, errors, &mut gradients);
            let group =
                Group::<V, G> { proof, moments: &moments[turn * G * G..(turn + 1) * G * G] };
            let range = turn * G..(turn + 1) * G;
            for (number, solution) in solutions.iter_mut().enumerate() {
                let (change, gradient) = (&mut changes[number], &mut gradients[number]);
                let q = &mut solution.q[range.clone()];
                let errors = &mut solution.errors[range.clone()];
                let grid = &mut solution.grids[turn];
                *change = change.add(group.fit(dtype, (q, errors), grid, gradient));
                *change = change.add(group.move_integers(largest, (q, errors), *grid, gradient));
            }
        }
    }
    changes
}

/// The moments of a group's inputs with each other.
struct Group<'a, V: Lanes, const G: usize> {
    proof: V::Proof,
    moments: &'a [f32],
}

impl<V: Lanes, const G: usize> Group<'_, V, G> {
    #[inline(always)]
    fn moment(&self, a: usize, b: usize) -> V {
        V::splat(self.proof, self.moments[a * G + b])
    }

    /// Fits scale and bias to the integers, by least squares, as they are stored.
    #[inline(always)]
    fn fit(
        &self,
        dtype: Dtype,
        (q, errors): (&[V], &mut [V]),
        grid: &mut Grid<V>,
        gradient: &mut [V; G],
    ) -> V {
        let zero = V::splat(self.proof, 0.0);
        // What a step of the scale, and of the bias, does to the gradient.
        let (mut by_scale, mut by_bias) = ([zero; G], [zero; G]);
        for (c, q) in q.iter().enumerate() {
            for k in 0..G {
                let moment = self.moment(c, k);
                by_scale[k] = by_scale[k].add(q.mul(moment));
                by_bias[k] = by_bias[k].add(moment);
            }
        }
        let (mut qg, mut g, mut qq, mut qo, mut oo) = (zero, zero, zero, zero, zero);
        for k in 0..G {
            qg = qg.add(q[k].mul(gradient[k]));
            g = g.add(gradient[k]);
            qq = qq.add(q[k].mul(by_scale[k]));
            qo = qo.add(q[k].mul(by_bias[k]));
            oo = oo.add(by_bias[k]);
        }
        let determinant = qq.mul(oo).sub(qo.mul(qo));
        let step = qg.mul(oo).sub(g.mul(qo)).div(determinant);
        let scale = stored(self.proof, dtype, grid.scale.add(step));
        let step = scale.sub(grid.scale);
        let shift = g.sub(step.mul(qo)).div(oo);
        let bias = stored(self.proof, dtype, grid.bias.add(shift));
        let shift = bias.sub(grid.bias);
        let square = step.mul(step).mul(qq).add(shift.mul(shift).mul(oo));
        let cross = step.mul(shift).mul(qo).sub(step.mul(qg)).sub(shift.mul(g));
        let change = square.add(cross).add(cross);
        // A group without a measure gives NaN, and stays as it is.
        let (step, shift) = (V::less(change, zero, step, zero), V::less(change, zero, shift, zero));
        grid.scale = V::less(change, zero, scale, grid.scale);
        grid.bias = V::less(change, zero, bias, grid.bias);
        for k in 0..G {
            errors[k] = errors[k].sub(step.mul(q[k]).add(shift));
            let moved = step.mul(by_scale[k]).add(shift.mul(by_bias[k]));
            gradient[k] = gradient[k].sub(moved);
        }
        V::less(change, zero, change, zero)
    }

    /// Moves each integer to the best one, the others as they are.
    #[inline(always)]
    fn move_integers(
        &self,
        largest: V,
        (q, errors): (&mut [V], &mut [V]),
        grid: Grid<V>,
        gradient: &mut [V; G],
    ) -> V {
        let zero = V::splat(self.proof, 0.0);
        let inverse = V::splat(self.proof, 1.0).div(grid.scale);
        let mut total = zero;
        for k in 0..G {
            let own = self.moment(k, k);
            let best = q[k].add(gradient[k].div(own).mul(inverse));
            let best = round(self.proof, best, largest);
            let step = best.sub(q[k]).mul(grid.scale);
            let slope = step.mul(gradient[k]);
            let change = step.mul(step).mul(own).sub(slope).sub(slope);
            let step = V::less(change, zero, step, zero);
            q[k] = V::less(change, zero, best, q[k]);
            total = total.add(V::less(change, zero, change, zero));
            errors[k] = errors[k].sub(step);
            for (gradient, moment) in gradient.iter_mut().zip(&self.moments[k * G..]) {
                *gradient = gradient.sub(step.mul(V::splat(self.proof, *moment)));
            }
        }
        total
    }
}
