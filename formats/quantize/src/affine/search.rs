//! The search for the scale and bias with the smallest squared error.
//!
//! 1. The first incumbent is MLX's scale and bias as they are stored, with integers rounded
//!    against what is stored. Nothing replaces an incumbent unless its measured error is smaller.
//! 2. Trial grids follow, as they would be stored: a width relative to the group's range and a
//!    shift from the middle of the range. Grids of one width displaced by parts of a step round
//!    the weights independently, so a few of them give most of what a long search gives.
//! 3. With `polish` steps a trial is worth what its integers are worth: one pass sums what the
//!    least-squares fit to them needs. The fit that explains most of the weights' variance is
//!    measured as it is stored, and fitted again. Without such steps the trials are measured.
//!
//! The order of every sum is part of the format's definition: element `k` belongs to lane
//! `k mod 16`, each lane adds in order, then lanes `l` and `l + 8`, `l + 4`, `l + 2`, `l + 1` are
//! added.

use super::{
    lanes::{Range, round},
    mlx::Mlx,
    trials::Schedule,
};
use crate::{
    dtype::Dtype,
    simd::{Lanes, MAX_LANES},
};

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
pub(super) fn stored<V: Lanes>(proof: V::Proof, dtype: Dtype, value: V) -> V {
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

/// Sums over a group, weighted by importance, of steps `t` from the bias, the integer `q` and the
/// residual `r = t - q`.
#[derive(Clone, Copy)]
struct Sums<V> {
    rr: V,
    q: V,
    qq: V,
    qt: V,
}

impl<V: Lanes> Sums<V> {
    #[inline(always)]
    fn add<const MEASURE: bool, const FIT: bool>(mut self, other: Self) -> Self {
        if MEASURE {
            self.rr = self.rr.add(other.rr);
        }
        if FIT {
            self.q = self.q.add(other.q);
            self.qq = self.qq.add(other.qq);
            self.qt = self.qt.add(other.qt);
        }
        self
    }
}

/// A grid as the inner loop uses it. `LOW` and `HIGH`: whether integers must be kept from falling
/// below zero, and from rising above the largest; not to do what changes nothing saves a fifth of
/// a trial.
#[derive(Clone, Copy)]
struct Pass<V: Lanes, const LOW: bool, const HIGH: bool> {
    proof: V::Proof,
    bias: V,
    inverse: V,
    largest: V,
    zero: V,
}

impl<V: Lanes, const LOW: bool, const HIGH: bool> Pass<V, LOW, HIGH> {
    #[inline(always)]
    fn one<const MEASURE: bool, const FIT: bool>(
        self,
        value: V,
        importance: Option<V>,
        before: Option<Sums<V>>,
    ) -> Sums<V> {
        let t = value.sub(self.bias).mul(self.inverse);
        let q = match (LOW, HIGH) {
            (true, true) => round(self.proof, t, self.largest),
            (true, false) => t.max(self.zero).rint(),
            (false, true) => t.min(self.largest).rint(),
            (false, false) => t.rint(),
        };
        let mut sums = Sums { rr: self.zero, q, qq: q, qt: q };
        if MEASURE {
            // NaN stays: a degenerate grid loses every comparison.
            let r = t.sub(q);
            sums.rr = weigh(importance, r).mul(r);
        }
        if FIT {
            sums.q = weigh(importance, q);
            sums.qt = sums.q.mul(t);
            if let (None, Some(before)) = (importance, before) {
                // Squares of integers and their sums are exact.
                sums.qq = q.mul_add_exact(q, before.qq);
                let qq = sums.qq;
                sums = before.add::<MEASURE, FIT>(sums);
                sums.qq = qq;
                return sums;
            }
            sums.qq = sums.q.mul(q);
        }
        match before {
            Some(before) => before.add::<MEASURE, FIT>(sums),
            None => sums,
        }
    }

    /// Elements `l`, `l + 16`, … in order.
    #[inline(always)]
    fn lane<const G: usize, const MEASURE: bool, const FIT: bool>(
        self,
        of: &Weights<'_, V, G>,
        l: usize,
    ) -> Sums<V> {
        let mut sums = self.one::<MEASURE, FIT>(of.values[l], of.importance.map(|c| c[l]), None);
        for row in 1..G / 16 {
            let k = 16 * row + l;
            let importance = of.importance.map(|c| c[k]);
            sums = self.one::<MEASURE, FIT>(of.values[k], importance, Some(sums));
        }
        sums
    }

    #[inline(always)]
    fn sums<const G: usize, const MEASURE: bool, const FIT: bool>(
        self,
        of: &Weights<'_, V, G>,
    ) -> Sums<V> {
        let nothing = Sums { rr: self.zero, q: self.zero, qq: self.zero, qt: self.zero };
        let mut quarters = [nothing; 4];
        for (l, quarter) in quarters.iter_mut().enumerate() {
            let first = self.lane::<G, MEASURE, FIT>(of, l);
            let first = first.add::<MEASURE, FIT>(self.lane::<G, MEASURE, FIT>(of, l + 8));
            let second = self.lane::<G, MEASURE, FIT>(of, l + 4);
            let second = second.add::<MEASURE, FIT>(self.lane::<G, MEASURE, FIT>(of, l + 12));
            *quarter = first.add::<MEASURE, FIT>(second);
        }
        let even = quarters[0].add::<MEASURE, FIT>(quarters[2]);
        let odd = quarters[1].add::<MEASURE, FIT>(quarters[3]);
        even.add::<MEASURE, FIT>(odd)
    }
}

/// What a search knows of its groups.
struct Search<'a, V: Lanes, const G: usize> {
    proof: V::Proof,
    dtype: Dtype,
    weights: Weights<'a, V, G>,
    low: V,
    high: V,
    /// Sum of importances, and one over it.
    total: V,
    inverse_total: V,
    /// Weighted sum of the distances from `low`.
    from_low: V,
    /// One over the step of a grid over the whole range. Errors are measured in such steps, so
    /// that their squares neither overflow nor vanish.
    inverse_unit: V,
}

/// The least-squares fit to a grid's integers, as it would be stored, and how much of the
/// weights' variance the fit before it is stored explains.
#[derive(Clone, Copy)]
struct Fit<V> {
    grid: Grid<V>,
    explained: V,
}

impl<V: Lanes, const G: usize> Search<'_, V, G> {
    #[inline(always)]
    fn pass<const LOW: bool, const HIGH: bool>(
        &self,
        grid: Grid<V>,
        inverse: V,
    ) -> Pass<V, LOW, HIGH> {
        let (proof, largest) = (self.proof, self.weights.largest);
        Pass { proof, bias: grid.bias, inverse, largest, zero: V::splat(proof, 0.0) }
    }

    /// One over a grid's step, and the square of the step in units of errors.
    #[inline(always)]
    fn steps(&self, grid: Grid<V>) -> (V, V) {
        let relative = grid.scale.mul(self.inverse_unit);
        (V::splat(self.proof, 1.0).div(grid.scale), relative.mul(relative))
    }

    /// Whether an integer of some group might fall below zero, or rise above the largest. The
    /// steps of a group's ends bound those of all its numbers.
    #[inline(always)]
    fn leaves(&self, grid: Grid<V>, inverse: V) -> [bool; 2] {
        // A single lane rounds faster what is known not to be negative.
        if V::N == 1 {
            return [true; 2];
        }
        let (zero, one) = (V::splat(self.proof, 0.0), V::splat(self.proof, 1.0));
        let half = V::splat(self.proof, 0.5);
        let low = self.low.sub(grid.bias).mul(inverse);
        let high = self.high.sub(grid.bias).mul(inverse);
        // NaN may do anything.
        let below = V::less(zero.sub(half), low, zero, one);
        let above = V::less(high, self.weights.largest.add(half), zero, one);
        [any(below), any(above)]
    }

    /// The squared error of a grid.
    #[inline(always)]
    fn measure(&self, grid: Grid<V>) -> V {
        let (inverse, square) = self.steps(grid);
        let pass = self.pass::<true, true>(grid, inverse);
        square.mul(pass.sums::<G, true, false>(&self.weights).rr)
    }

    /// The fit to a grid's integers.
    #[inline(always)]
    fn fit(&self, grid: Grid<V>) -> Fit<V> {
        let (inverse, square) = self.steps(grid);
        let of = &self.weights;
        let sums = match self.leaves(grid, inverse) {
            [true, true] => self.pass::<true, true>(grid, inverse).sums::<G, false, true>(of),
            [true, false] => self.pass::<true, false>(grid, inverse).sums::<G, false, true>(of),
            [false, true] => self.pass::<false, true>(grid, inverse).sums::<G, false, true>(of),
            [false, false] => self.pass::<false, false>(grid, inverse).sums::<G, false, true>(of),
        };
        self.fit_to(grid, &sums, inverse, square)
    }

    /// Both.
    #[inline(always)]
    fn measure_and_fit(&self, grid: Grid<V>) -> (V, Fit<V>) {
        let (inverse, square) = self.steps(grid);
        let pass = self.pass::<true, true>(grid, inverse);
        let sums = pass.sums::<G, true, true>(&self.weights);
        (square.mul(sums.rr), self.fit_to(grid, &sums, inverse, square))
    }

    #[inline(always)]
    fn fit_to(&self, grid: Grid<V>, sums: &Sums<V>, inverse: V, square: V) -> Fit<V> {
        // t ≈ slope · q + offset.
        let t = self.from_low.sub(self.total.mul(grid.bias.sub(self.low))).mul(inverse);
        let mean_t = t.mul(self.inverse_total);
        let mean_q = sums.q.mul(self.inverse_total);
        let covariance = sums.qt.sub(mean_t.mul(sums.q));
        let variance = sums.qq.sub(mean_q.mul(sums.q));
        let slope = covariance.div(variance);
        let scale = stored(self.proof, self.dtype, grid.scale.mul(slope));
        // The bias for the scale as it is stored.
        let mean = self.low.add(self.from_low.mul(self.inverse_total));
        let bias = stored(self.proof, self.dtype, mean.sub(scale.mul(mean_q)));
        Fit { grid: Grid { scale, bias }, explained: square.mul(covariance).mul(slope) }
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
    let total = match importance {
        Some(importance) => sum(importance),
        None => V::splat(proof, G as f32),
    };
    let search = Search {
        proof,
        dtype,
        weights: Weights { values, importance, largest },
        low: range.low,
        high: range.high,
        total,
        inverse_total: one.div(total),
        from_low: from_low(values, importance, range.low),
        inverse_unit: one.div(mlx.unit),
    };
    let mut best = Grid::stored(proof, dtype, mlx.scale, mlx.bias);
    // A degenerate group has no measure; then nothing is below NaN and MLX's grid stays.
    let mut best_error = search.measure(best);

    let half = V::splat(proof, 0.5);
    let middle = range.low.add(range.high).mul(half);
    let mut fit = Fit { grid: best, explained: V::splat(proof, 0.0) };
    for &(width, shift) in schedule.trials {
        let scale = stored(proof, dtype, mlx.unit.mul(V::splat(proof, width)));
        let below = half.mul(largest).sub(V::splat(proof, shift));
        let trial = Grid { scale, bias: stored(proof, dtype, middle.sub(below.mul(scale))) };
        if schedule.polish == 0 {
            let error = search.measure(trial);
            best = Grid::if_less(error, best_error, trial, best);
            best_error = V::less(error, best_error, error, best_error);
        } else {
            let next = search.fit(trial);
            fit.grid = Grid::if_less(fit.explained, next.explained, next.grid, fit.grid);
            fit.explained = V::less(fit.explained, next.explained, next.explained, fit.explained);
        }
    }
    for step in 0..schedule.polish {
        let last = step + 1 == schedule.polish;
        let (error, next) =
            if last { (search.measure(fit.grid), fit) } else { search.measure_and_fit(fit.grid) };
        best = Grid::if_less(error, best_error, fit.grid, best);
        best_error = V::less(error, best_error, error, best_error);
        fit = next;
    }
    best
}

#[inline(always)]
fn weigh<V: Lanes>(importance: Option<V>, x: V) -> V {
    // No closure: one might be compiled apart, without the instructions.
    match importance {
        Some(importance) => importance.mul(x),
        None => x,
    }
}

/// Whether a lane is not zero.
#[inline(always)]
fn any<V: Lanes>(lanes: V) -> bool {
    let mut numbers = [0.0; MAX_LANES];
    lanes.store(&mut numbers);
    let mut any = false;
    for number in numbers {
        any |= number != 0.0;
    }
    any
}

/// A sum over elements in the order of all sums.
#[inline(always)]
fn sum<V: Lanes, const G: usize>(elements: &[V; G]) -> V {
    let mut lanes = [elements[0]; 16];
    lanes.copy_from_slice(&elements[..16]);
    for sixteen in elements[16..].chunks_exact(16) {
        for (lane, element) in lanes.iter_mut().zip(sixteen) {
            *lane = lane.add(*element);
        }
    }
    fold(lanes)
}

/// The weighted sum of the distances from `low`.
#[inline(always)]
fn from_low<V: Lanes, const G: usize>(values: &[V; G], importance: Option<&[V; G]>, low: V) -> V {
    let mut lanes = [low; 16];
    for (l, lane) in lanes.iter_mut().enumerate() {
        *lane = weigh(importance.map(|c| c[l]), values[l].sub(low));
        for row in 1..G / 16 {
            let k = 16 * row + l;
            *lane = lane.add(weigh(importance.map(|c| c[k]), values[k].sub(low)));
        }
    }
    fold(lanes)
}

#[inline(always)]
fn fold<V: Lanes>(mut lanes: [V; 16]) -> V {
    for half in [8, 4, 2, 1] {
        for l in 0..half {
            lanes[l] = lanes[l].add(lanes[l + half]);
        }
    }
    lanes[0]
}
