//! The search for the scale and bias with the smallest squared error.
//!
//! 1. The first incumbent is MLX's scale and bias as they are stored, with integers rounded
//!    against what is stored. Nothing replaces an incumbent unless its measured error is smaller.
//! 2. Trial grids follow, each measured as it is stored: a width relative to the group's range
//!    and a shift from the middle of the range. Grids of one width displaced by parts of a step
//!    round the weights independently, so a few of them give most of what a long search gives.
//! 3. With `fit`, the pass that measures a grid also sums what a least-squares fit needs. The fit
//!    with the best predicted error is stored, measured, and fitted again, `polish` times.
//!
//! The order of every sum is part of the format's definition: element `k` belongs to lane
//! `k mod 16`, each lane adds in order, then lanes `l` and `l + 8`, `l + 4`, `l + 2`, `l + 1` are
//! added.

use super::{
    lanes::{Range, round},
    mlx::Mlx,
    trials::Schedule,
};
use crate::{dtype::Dtype, simd::Lanes};

/// A scale and a bias for every lane's group, as they are stored.
#[derive(Clone, Copy)]
pub(super) struct Grid<V> {
    pub(super) scale: V,
    pub(super) bias: V,
}

impl<V: Lanes> Grid<V> {
    #[inline(always)]
    pub(super) fn stored(proof: V::Proof, dtype: Dtype, scale: V, bias: V) -> Self {
        Self { scale: stored(proof, dtype, scale), bias: stored(proof, dtype, bias) }
    }

    #[inline(always)]
    fn if_less(a: V, b: V, yes: Self, no: Self) -> Self {
        Self { scale: V::less(a, b, yes.scale, no.scale), bias: V::less(a, b, yes.bias, no.bias) }
    }
}

/// A float as `dtype` holds it.
#[inline(always)]
fn stored<V: Lanes>(proof: V::Proof, dtype: Dtype, value: V) -> V {
    match dtype {
        Dtype::BF16 => value.round_bf16(proof),
        Dtype::F16 => value.round_f16(proof),
        _ => value,
    }
}

/// The integers of every element: what the search measured.
#[inline(always)]
pub(super) fn integers<V: Lanes, const G: usize>(
    proof: V::Proof,
    values: &[V; G],
    grid: Grid<V>,
    largest: V,
    out: &mut [V; G],
) {
    let inverse = V::splat(proof, 1.0).div(grid.scale);
    for (q, value) in out.iter_mut().zip(values) {
        *q = round(proof, value.sub(grid.bias).mul(inverse), largest);
    }
}

/// Groups, and what their errors weigh.
#[derive(Clone, Copy)]
struct Weights<'a, V, const G: usize> {
    values: &'a [V; G],
    importance: Option<&'a [V; G]>,
    largest: V,
}

/// Sums over a group of the residual `r`, in steps, and the integer `q`; weighted by importance.
#[derive(Clone, Copy)]
struct Sums<V> {
    rr: V,
    r: V,
    qr: V,
    q: V,
    qq: V,
}

impl<V: Lanes> Sums<V> {
    #[inline(always)]
    fn add<const FIT: bool>(self, other: Self) -> Self {
        let rr = self.rr.add(other.rr);
        if !FIT {
            return Self { rr, ..self };
        }
        Self {
            rr,
            r: self.r.add(other.r),
            qr: self.qr.add(other.qr),
            q: self.q.add(other.q),
            qq: self.qq.add(other.qq),
        }
    }
}

/// A grid as the inner loop uses it.
#[derive(Clone, Copy)]
struct Measure<V> {
    bias: V,
    inverse: V,
    largest: V,
    rounder: V,
    zero: V,
}

impl<V: Lanes> Measure<V> {
    #[inline(always)]
    fn one<const FIT: bool>(self, value: V, importance: Option<V>) -> Sums<V> {
        let steps = value.sub(self.bias).mul(self.inverse);
        // The second operand wins on NaN: a degenerate grid keeps it and loses every comparison.
        let q = self.largest.min(self.zero.max(steps)).add(self.rounder).sub(self.rounder);
        let r = steps.sub(q);
        let (weighted_r, weighted_q) = match importance {
            Some(c) => (c.mul(r), if FIT { c.mul(q) } else { q }),
            None => (r, q),
        };
        let rr = weighted_r.mul(r);
        if !FIT {
            return Sums { rr, r, qr: r, q, qq: q };
        }
        Sums { rr, r: weighted_r, qr: weighted_r.mul(q), q: weighted_q, qq: weighted_q.mul(q) }
    }

    /// Elements `l`, `l + 16`, … in order.
    #[inline(always)]
    fn lane<const G: usize, const FIT: bool>(self, of: &Weights<'_, V, G>, l: usize) -> Sums<V> {
        let mut sums = self.one::<FIT>(of.values[l], of.importance.map(|c| c[l]));
        for k in (l + 16..G).step_by(16) {
            sums = sums.add::<FIT>(self.one::<FIT>(of.values[k], of.importance.map(|c| c[k])));
        }
        sums
    }

    /// Lanes `l`, `l + 8`, `l + 4` and `l + 12`.
    #[inline(always)]
    fn quarter<const G: usize, const FIT: bool>(self, of: &Weights<'_, V, G>, l: usize) -> Sums<V> {
        let first = self.lane::<G, FIT>(of, l).add::<FIT>(self.lane::<G, FIT>(of, l + 8));
        let second = self.lane::<G, FIT>(of, l + 4).add::<FIT>(self.lane::<G, FIT>(of, l + 12));
        first.add::<FIT>(second)
    }

    #[inline(always)]
    fn sums<const G: usize, const FIT: bool>(self, of: &Weights<'_, V, G>) -> Sums<V> {
        let zero = self.zero;
        let mut quarters = [Sums { rr: zero, r: zero, qr: zero, q: zero, qq: zero }; 4];
        for (l, quarter) in quarters.iter_mut().enumerate() {
            *quarter = self.quarter::<G, FIT>(of, l);
        }
        let even = quarters[0].add::<FIT>(quarters[2]);
        even.add::<FIT>(quarters[1].add::<FIT>(quarters[3]))
    }
}

/// The state of a search.
struct Search<'a, V: Lanes, const G: usize> {
    proof: V::Proof,
    dtype: Dtype,
    weights: Weights<'a, V, G>,
    /// One over the sum of importances.
    inverse_total: V,
    /// One over the step of a grid over the whole range. Errors are measured in such steps, so
    /// that their squares neither overflow nor vanish.
    inverse_unit: V,
    best: Grid<V>,
    best_error: V,
}

impl<V: Lanes, const G: usize> Search<'_, V, G> {
    /// Measures a grid and keeps it if it is better. With `FIT`, returns the least-squares fit of
    /// its integers and the error that the fit would have before it is stored.
    #[inline(always)]
    fn measure<const FIT: bool>(&mut self, grid: Grid<V>) -> (Grid<V>, V) {
        let one = V::splat(self.proof, 1.0);
        let measure = Measure {
            bias: grid.bias,
            inverse: one.div(grid.scale),
            largest: self.weights.largest,
            rounder: V::splat(self.proof, 8_388_608.0),
            zero: V::splat(self.proof, 0.0),
        };
        let sums = measure.sums::<G, FIT>(&self.weights);
        let relative = grid.scale.mul(self.inverse_unit);
        let square = relative.mul(relative);
        let error = square.mul(sums.rr);
        self.best = Grid::if_less(error, self.best_error, grid, self.best);
        self.best_error = V::less(error, self.best_error, error, self.best_error);
        if !FIT {
            return (grid, error);
        }
        // r ≈ slope · q + offset.
        let mean_r = sums.r.mul(self.inverse_total);
        let mean_q = sums.q.mul(self.inverse_total);
        let covariance = sums.qr.sub(mean_r.mul(sums.q));
        let variance = sums.qq.sub(mean_q.mul(sums.q));
        let slope = covariance.div(variance);
        let left = sums.rr.sub(mean_r.mul(sums.r)).sub(slope.mul(covariance));
        let scale = grid.scale.add(grid.scale.mul(slope));
        let scale = stored(self.proof, self.dtype, scale);
        // The bias for the scale as it is stored.
        let moved = grid.scale.sub(scale).mul(mean_q);
        let bias = grid.bias.add(grid.scale.mul(mean_r)).add(moved);
        (Grid { scale, bias: stored(self.proof, self.dtype, bias) }, square.mul(left))
    }
}

/// The best grid found for each lane's group.
#[inline(always)]
pub(super) fn refine<V: Lanes, const G: usize>(
    proof: V::Proof,
    (values, importance): (&[V; G], Option<&[V; G]>),
    (range, mlx, largest): (Range<V>, Mlx<V>, V),
    dtype: Dtype,
    schedule: &Schedule<'_>,
) -> Grid<V> {
    let one = V::splat(proof, 1.0);
    let infinity = V::splat(proof, f32::INFINITY);
    let total = importance.map_or(V::splat(proof, G as f32), total);
    let first = Grid::stored(proof, dtype, mlx.scale, mlx.bias);
    let mut search = Search {
        proof,
        dtype,
        weights: Weights { values, importance, largest },
        inverse_total: one.div(total),
        inverse_unit: one.div(mlx.unit),
        best: first,
        best_error: infinity,
    };
    // A degenerate group has no measure; then nothing is below NaN and MLX's grid stays.
    search.best_error = search.measure::<false>(first).1;

    let half = V::splat(proof, 0.5);
    let middle = range.low.add(range.high).mul(half);
    let (mut fit, mut fit_error) = (first, infinity);
    for &(width, shift) in schedule.trials {
        let scale = stored(proof, dtype, mlx.unit.mul(V::splat(proof, width)));
        let below = half.mul(largest).sub(V::splat(proof, shift));
        let bias = stored(proof, dtype, middle.sub(below.mul(scale)));
        let trial = Grid { scale, bias };
        if schedule.polish == 0 {
            search.measure::<false>(trial);
        } else {
            let (candidate, error) = search.measure::<true>(trial);
            fit = Grid::if_less(error, fit_error, candidate, fit);
            fit_error = V::less(error, fit_error, error, fit_error);
        }
    }
    for _ in 1..schedule.polish {
        fit = search.measure::<true>(fit).0;
    }
    if schedule.polish > 0 {
        search.measure::<false>(fit);
    }
    search.best
}

/// The sum of importances, in the order of all sums.
#[inline(always)]
fn total<V: Lanes, const G: usize>(importance: &[V; G]) -> V {
    let mut lanes = [importance[0]; 16];
    lanes.copy_from_slice(&importance[..16]);
    for sixteen in importance[16..].chunks_exact(16) {
        for (lane, c) in lanes.iter_mut().zip(sixteen) {
            *lane = lane.add(*c);
        }
    }
    for half in [8, 4, 2, 1] {
        for l in 0..half {
            lanes[l] = lanes[l].add(lanes[l + half]);
        }
    }
    lanes[0]
}
