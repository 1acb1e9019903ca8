//! The two rules of MLX (0.32.4): that of its CPU backend (`mlx/backend/cpu/quantized.cpp`) and
//! that of its Metal kernels (`mlx/backend/metal/kernels/quantized.h`). One end of a group's
//! range is exact; integers are rounded against the scale before it is stored.
//!
//! Metal differs in three ways: ties round away from zero; the maximum starts at zero, so a group
//! of negative numbers only has a range up to zero; integers are clamped above only and then
//! converted. They are never negative: the bias is the end from which steps are counted, and
//! without a bias all steps round to zero.

use super::lanes::{Range, round};
use crate::simd::Lanes;

/// Smallest scale before it is fitted to the exact end.
const SMALLEST_SCALE: f32 = 1e-7;

/// Which of MLX's backends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Backend {
    Cpu,
    Metal,
}

/// Scale and bias of each lane's group before they are stored.
#[derive(Clone, Copy)]
pub(super) struct Mlx<V> {
    pub(super) scale: V,
    pub(super) bias: V,
    /// A step of a grid from the smallest to the largest number.
    pub(super) unit: V,
}

#[inline(always)]
pub(super) fn choose<V: Lanes>(
    proof: V::Proof,
    backend: Backend,
    range: Range<V>,
    largest: V,
) -> Mlx<V> {
    let zero = V::splat(proof, 0.0);
    let (low, high) = match backend {
        Backend::Cpu => (range.low, range.high),
        Backend::Metal => (range.low, range.high.max(zero)),
    };
    let unit = high.sub(low).div(largest);
    let scale = unit.max(V::splat(proof, SMALLEST_SCALE));
    let scale = V::less(high.abs(), low.abs(), scale, zero.sub(scale));
    let edge = V::less(high.abs(), low.abs(), low, high);
    let steps = edge.div(scale);
    let steps = match backend {
        Backend::Cpu => steps.rint(),
        // Never positive: the scale's sign is opposite to the edge's.
        Backend::Metal => zero.sub(round_away(proof, zero.sub(steps))),
    };
    let some = steps.abs();
    Mlx {
        scale: V::less(zero, some, edge.div(steps), scale),
        bias: V::less(zero, some, edge, zero),
        unit,
    }
}

/// The integers of every element.
#[inline(always)]
pub(super) fn integers<V: Lanes, const G: usize>(
    proof: V::Proof,
    backend: Backend,
    values: &[V; G],
    mlx: &Mlx<V>,
    largest: V,
    out: &mut [V; G],
) {
    match backend {
        Backend::Cpu => {
            for (q, value) in out.iter_mut().zip(values) {
                *q = round(proof, value.sub(mlx.bias).div(mlx.scale), largest);
            }
        }
        Backend::Metal => {
            let zero = V::splat(proof, 0.0);
            for (q, value) in out.iter_mut().zip(values) {
                let steps = value.sub(mlx.bias).div(mlx.scale).max(zero);
                *q = round_away(proof, steps.min(largest));
            }
        }
    }
}

/// Rounds what is not negative, ties upwards.
#[inline(always)]
fn round_away<V: Lanes>(proof: V::Proof, x: V) -> V {
    let even = x.rint();
    // Exact, because both are near each other.
    V::less(x.sub(even), V::splat(proof, 0.5), even, even.add(V::splat(proof, 1.0)))
}
