//! Element-wise functions that are one kernel each.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use shardpack_formats::spec::{Activation, ClampedSwiglu};
use shardpack_mlx::{Array, Binary, Element, Unary};

/// An element-wise function of arrays.
#[derive(Clone, Copy, Debug)]
pub(super) enum FusedFunction {
    /// `act(x)`.
    Activation(Activation),
    /// `act(gate) ⊙ up`.
    Glu(Activation),
    /// `min(silu(gate), limit) · clamp(up, −limit, limit)`.
    LimitedGlu(f32),
    /// See [`ClampedSwiglu`], of gate and up.
    ClampedGlu(ClampedSwiglu),
    /// `x · sigmoid(gate)`.
    SigmoidGate,
    /// `x · ln(1 + exp(gate))`.
    SoftplusGate,
    /// `clamp(x, −limit, limit)`.
    Limit(f32),
    /// `cap · tanh(x / cap)`.
    Softcap(f32),
}

impl FusedFunction {
    /// What makes this function another one than others.
    fn key(self) -> u64 {
        let of_activation = |kind: u32, activation: Activation| [kind, activation as u32, 0, 0];
        let parts = match self {
            Self::Activation(activation) => of_activation(0, activation),
            Self::Glu(activation) => of_activation(1, activation),
            Self::LimitedGlu(limit) => [2, limit.to_bits(), 0, 0],
            Self::ClampedGlu(ClampedSwiglu { alpha, limit, plain }) => {
                [3, alpha.0.to_bits(), limit.0.to_bits(), u32::from(plain)]
            }
            Self::SigmoidGate => [4, 0, 0, 0],
            Self::SoftplusGate => [5, 0, 0, 0],
            Self::Limit(limit) => [6, limit.to_bits(), 0, 0],
            Self::Softcap(cap) => [7, cap.to_bits(), 0, 0],
        };
        key("function", parts)
    }

    /// The function's value, computed in f32, in the first argument's type.
    pub(super) fn apply<const N: usize>(self, x: [&Array; N]) -> Array {
        let (library, element) = (x[0].library(), x[0].element());
        let rounded = |x: &[Array]| {
            let exact: Vec<Array> = x.iter().map(|x| x.cast(Element::F32)).collect();
            vec![self.of(&exact).cast(element)]
        };
        library.fused(self.key(), 1, &x, &rounded).remove(0)
    }

    fn of(self, x: &[Array]) -> Array {
        match self {
            Self::Activation(activation) => activated(activation, &x[0]),
            Self::Glu(activation) => activated(activation, &x[0]).binary(Binary::Multiply, &x[1]),
            Self::LimitedGlu(limit) => {
                let gate = silu(&x[0]).with_constant(Binary::Minimum, limit);
                gate.binary(Binary::Multiply, &limited(&x[1], limit))
            }
            Self::ClampedGlu(ClampedSwiglu { alpha, limit, plain }) => {
                let gate = x[0].with_constant(Binary::Minimum, limit.0);
                let open = gate.with_constant(Binary::Multiply, alpha.0).unary(Unary::Sigmoid);
                let glu = gate.binary(Binary::Multiply, &open);
                let up = limited(&x[1], limit.0);
                let up = if plain { up } else { up.with_constant(Binary::Add, 1.0) };
                glu.binary(Binary::Multiply, &up)
            }
            Self::SigmoidGate => x[0].binary(Binary::Multiply, &x[1].unary(Unary::Sigmoid)),
            Self::SoftplusGate => {
                let open = x[1].with_constant(Binary::LogAddExp, 0.0);
                x[0].binary(Binary::Multiply, &open)
            }
            Self::Limit(limit) => limited(&x[0], limit),
            Self::Softcap(cap) => softcap(&x[0], cap),
        }
    }
}

/// A key of a fused function: its name and parameters.
pub(super) fn key<const N: usize>(name: &str, parameters: [u32; N]) -> u64 {
    let mut hasher = DefaultHasher::new();
    (name, parameters).hash(&mut hasher);
    hasher.finish()
}

fn limited(x: &Array, limit: f32) -> Array {
    x.with_constant(Binary::Minimum, limit).with_constant(Binary::Maximum, -limit)
}

fn activated(activation: Activation, x: &Array) -> Array {
    match activation {
        Activation::SiluGlu | Activation::Silu => silu(x),
        Activation::GeluTanhGlu | Activation::GeluTanh => gelu_tanh(x),
        Activation::GeluGlu | Activation::Gelu => gelu(x),
        Activation::ReluSquared => x.with_constant(Binary::Maximum, 0.0).unary(Unary::Square),
        Activation::Xielu => unreachable!("xIELU without parameters"),
    }
}

pub(super) fn silu(x: &Array) -> Array {
    x.binary(Binary::Multiply, &x.unary(Unary::Sigmoid))
}

fn gelu_tanh(x: &Array) -> Array {
    // 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³)))
    const ROOT: f32 = 0.797_884_6;
    let cube = x.binary(Binary::Multiply, &x.unary(Unary::Square));
    let inner = x.binary(Binary::Add, &cube.with_constant(Binary::Multiply, 0.044_715));
    let tanh = inner.with_constant(Binary::Multiply, ROOT).unary(Unary::Tanh);
    let half = x.with_constant(Binary::Multiply, 0.5);
    half.binary(Binary::Multiply, &tanh.with_constant(Binary::Add, 1.0))
}

fn gelu(x: &Array) -> Array {
    let erf = x.with_constant(Binary::Multiply, std::f32::consts::FRAC_1_SQRT_2).unary(Unary::Erf);
    let half = x.with_constant(Binary::Multiply, 0.5);
    half.binary(Binary::Multiply, &erf.with_constant(Binary::Add, 1.0))
}

/// `cap · tanh(x / cap)`.
pub(super) fn softcap(x: &Array, cap: f32) -> Array {
    let inner = x.with_constant(Binary::Divide, cap).unary(Unary::Tanh);
    inner.with_constant(Binary::Multiply, cap)
}
