//! Functions of single elements.

use rayon::prelude::*;

use crate::exp::exp;

/// Elements of one piece of work; fewer are not worth another thread.
const ELEMENTS_PER_TASK: usize = 1 << 13;

/// `gate = silu(gate) · up`.
pub fn silu_glu(gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len(), "gate and up");
    pieces(gate, up, |gate, up| *gate = *gate / (1.0 + exp(-*gate)) * up);
}

/// `a += b`.
pub fn add(a: &mut [f32], b: &[f32]) {
    assert_eq!(a.len(), b.len(), "summands");
    pieces(a, b, |a, b| *a += b);
}

fn pieces(a: &mut [f32], b: &[f32], f: impl Fn(&mut f32, f32) + Sync) {
    a.par_chunks_mut(ELEMENTS_PER_TASK).zip(b.par_chunks(ELEMENTS_PER_TASK)).for_each(|(a, b)| {
        for (a, b) in a.iter_mut().zip(b) {
            f(a, *b);
        }
    });
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
    fn a_bias_is_added_to_every_row() {
        let mut x = [1.0, 2.0, 3.0, 4.0];
        add_bias(&mut x, &[10.0, 20.0]);
        assert_eq!(x, [11.0, 22.0, 13.0, 24.0]);
    }
}
