//! Functions of single elements.

use crate::{
    exp::{exp, tanh},
    platform::{self, Task},
    team,
};

/// Operations of an element, with a function to compute.
const COST: usize = 16;

/// `gate = silu(gate) · up`.
pub fn silu_glu(gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len(), "gate and up");
    pieces(gate, up, |gate, up| *gate = *gate / (1.0 + exp(-*gate)) * up);
}

/// `gate = gelu(gate) · up`, with the approximation by tanh.
pub fn gelu_tanh_glu(gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len(), "gate and up");
    pieces(gate, up, |gate, up| *gate = gelu_tanh_of(*gate) * up);
}

/// `gate = gelu(gate) · up`.
pub fn gelu_glu(gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len(), "gate and up");
    pieces(gate, up, |gate, up| *gate = gelu_of(*gate) * up);
}

/// `x = gelu(x)`, with the approximation by tanh.
pub fn gelu_tanh(x: &mut [f32]) {
    each(x, gelu_tanh_of);
}

/// `x = gelu(x)`.
pub fn gelu(x: &mut [f32]) {
    each(x, gelu_of);
}

/// `x = silu(x)`.
pub fn silu(x: &mut [f32]) {
    each(x, |x| x / (1.0 + exp(-x)));
}

/// `x = max(x, 0)²`.
pub fn relu_squared(x: &mut [f32]) {
    each(x, |x| x.max(0.0) * x.max(0.0));
}

/// `x = above·x² + beta·x` above zero, `below·(exp(min(x, eps)) − 1 − x) + beta·x` elsewhere.
pub fn xielu(x: &mut [f32], [above, below, beta, eps]: [f32; 4]) {
    each(x, |x| {
        let bent = if x > 0.0 { above * x * x } else { below * (exp(x.min(eps)) - 1.0 - x) };
        bent + beta * x
    });
}

/// `x = min(max(x, −limit), limit)`.
pub fn limit(x: &mut [f32], limit: f32) {
    each(x, |x| x.max(-limit).min(limit));
}

/// `x = cap · tanh(x / cap)`.
pub fn softcap(x: &mut [f32], cap: f32) {
    each(x, |x| cap * tanh(x / cap));
}

/// `x = x · factor`.
pub fn scale(x: &mut [f32], factor: f32) {
    each(x, |x| x * factor);
}

/// Multiplies each row of `x` by its factor.
pub fn scale_rows(x: &mut [f32], factors: &[f32]) {
    let rows = factors.len().max(1);
    assert!(x.len().is_multiple_of(rows), "{rows} rows");
    let width = (x.len() / rows).max(1);
    for (row, factor) in x.chunks_exact_mut(width).zip(factors) {
        for x in row {
            *x *= factor;
        }
    }
}

/// `x · (1 + tanh(u)) / 2` with `u = √(2/π) · (x + 0.044715 x³)`, which is `x · sigmoid(2u)`.
fn gelu_tanh_of(x: f32) -> f32 {
    const TWICE_ROOT: f32 = 1.595_769;
    x / (1.0 + exp(-TWICE_ROOT * (x + 0.044_715 * x * x * x)))
}

fn gelu_of(x: f32) -> f32 {
    0.5 * x * (1.0 + libm::erff(x * std::f32::consts::FRAC_1_SQRT_2))
}

/// `f` of every element.
fn each(x: &mut [f32], f: impl Fn(f32) -> f32 + Sync) {
    let on = team::current();
    let length = on.units_per_task(x.len(), COST);
    team::chunks(&on, x, length, |_, x| platform::run(on.platform, Each { x, f: &f }));
}

struct Each<'a, F> {
    x: &'a mut [f32],
    f: &'a F,
}

impl<F: Fn(f32) -> f32> Task for Each<'_, F> {
    type Output = ();

    #[expect(clippy::inline_always, reason = "compiled within the function of each platform")]
    #[inline(always)]
    fn run(self) {
        for x in self.x {
            *x = (self.f)(*x);
        }
    }
}

/// `a += b`.
pub fn add(a: &mut [f32], b: &[f32]) {
    assert_eq!(a.len(), b.len(), "operands");
    pieces(a, b, |a, b| *a += b);
}

/// `f` of every pair.
fn pieces(a: &mut [f32], b: &[f32], f: impl Fn(&mut f32, f32) + Sync) {
    let on = team::current();
    let length = on.units_per_task(a.len(), COST);
    team::chunks(&on, a, length, |index, a| {
        let b = &b[index * length..][..a.len()];
        platform::run(on.platform, Pairs { a, b, f: &f });
    });
}

struct Pairs<'a, F> {
    a: &'a mut [f32],
    b: &'a [f32],
    f: &'a F,
}

impl<F: Fn(&mut f32, f32)> Task for Pairs<'_, F> {
    type Output = ();

    #[expect(clippy::inline_always, reason = "compiled within the function of each platform")]
    #[inline(always)]
    fn run(self) {
        for (a, b) in self.a.iter_mut().zip(self.b) {
            (self.f)(a, *b);
        }
    }
}

/// Adds `bias` to every row of `x`.
pub fn add_bias(x: &mut [f32], bias: &[f32]) {
    assert!(x.len().is_multiple_of(bias.len().max(1)), "rows of {} elements", bias.len());
    for row in x.chunks_exact_mut(bias.len().max(1)) {
        for (x, bias) in row.iter_mut().zip(bias) {
            *x += bias;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silu_is_x_over_one_plus_exp() {
        for x in [-200.0_f32, -20.0, -1.0, 0.0, 0.5, 30.0, 200.0] {
            let mut gate = [x];
            silu_glu(&mut gate, &[2.0]);
            let expected = 2.0 * f64::from(x) / (1.0 + (-f64::from(x)).exp());
            let error = (f64::from(gate[0]) - expected).abs();
            assert!(error <= 1e-6 * expected.abs().max(1e-6), "silu({x}): {} {expected}", gate[0]);
        }
    }

    #[test]
    fn other_activations_agree_with_f64() {
        let check = |ours: fn(&mut [f32]), theirs: fn(f64) -> f64| {
            for x in [-30.0_f32, -3.0, -0.7, -1e-3, 0.0, 1e-3, 0.5, 2.0, 30.0] {
                let mut values = [x];
                ours(&mut values);
                let expected = theirs(f64::from(x));
                let error = (f64::from(values[0]) - expected).abs();
                assert!(error <= 1e-6 * expected.abs().max(1.0), "{x}: {} {expected}", values[0]);
            }
        };
        check(gelu_tanh, |x| {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
            0.5 * x * (1.0 + inner.tanh())
        });
        check(gelu, |x| 0.5 * x * (1.0 + libm::erf(x / 2.0_f64.sqrt())));
        check(relu_squared, |x| x.max(0.0).powi(2));
        check(silu, |x| x / (1.0 + (-x).exp()));
        check(|x| softcap(x, 5.0), |x| 5.0 * (x / 5.0).tanh());
        check(|x| limit(x, 2.5), |x| x.clamp(-2.5, 2.5));
        check(
            |x| xielu(x, [1.5, 0.75, 0.5, -1e-6]),
            |x| {
                let bent = if x > 0.0 { 1.5 * x * x } else { 0.75 * (x.min(-1e-6).exp_m1() - x) };
                bent + 0.5 * x
            },
        );
        check(
            |x| gelu_tanh_glu(x, &[2.0]),
            |x| {
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
                x * (1.0 + inner.tanh())
            },
        );
    }

    #[test]
    fn rows_have_their_own_factors() {
        let mut x = [1.0, 2.0, 3.0, 4.0];
        scale_rows(&mut x, &[2.0, 10.0]);
        assert_eq!(x, [2.0, 4.0, 30.0, 40.0]);
        scale_rows(&mut [], &[2.0]);
    }

    #[test]
    fn a_bias_is_added_to_every_row() {
        let mut x = [1.0, 2.0, 3.0, 4.0];
        add_bias(&mut x, &[10.0, 20.0]);
        assert_eq!(x, [11.0, 22.0, 13.0, 24.0]);
    }
}
