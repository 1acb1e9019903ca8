//! Embedding, projections, norms, rotary embeddings and elementwise functions within the graph.

use std::ops::Range;

use shardpack_formats::{
    hex::HexF32,
    spec::{Activation, ClampedSwiglu, NormKind, Rope, RopeStyle},
};
use shardpack_mlx::{Array, Binary, Unary};

use super::{Matrix, Mlx, Tensor, mixture_of_experts};
use crate::backend::{DenseOps, NormParams, RotatedPart, Xielu};

/// Cosines and sines `[rows, 1, pairs]` of one rotary embedding.
#[derive(Debug)]
pub struct Rotation {
    style: RopeStyle,
    pairs: usize,
    cos: Array,
    sin: Array,
}

impl DenseOps for Mlx {
    type Rotation = Rotation;

    fn embed(&self, tokens: &[u32], table: &Matrix, held: Range<usize>) -> Tensor {
        let inside = |token: &u32| held.contains(&(*token as usize));
        let index = |token: &u32| if inside(token) { *token - held.start as u32 } else { 0 };
        let indices: Vec<u32> = tokens.iter().map(index).collect();
        let rows = table.rows(&self.library.indices(&indices, &[tokens.len()]));
        let array = if tokens.iter().all(inside) {
            rows
        } else {
            let factor = |token: &u32| if inside(token) { 1.0 } else { 0.0 };
            let mask: Vec<f32> = tokens.iter().map(factor).collect();
            rows.binary(Binary::Multiply, &self.library.floats(&mask, &[tokens.len(), 1]))
        };
        Tensor::new(tokens.len(), table.inputs(), array)
    }

    fn linear(&self, x: &Tensor, matrix: &Matrix) -> Tensor {
        assert_eq!(x.width, matrix.inputs(), "inputs of a matrix");
        Tensor::new(x.rows, matrix.outputs(), matrix.product(&x.array))
    }

    fn add_bias(&self, x: Tensor, bias: &Array) -> Tensor {
        x.with(x.array.binary(Binary::Add, bias))
    }

    fn norm(&self, x: &Tensor, params: &NormParams<'_, Array>) -> Tensor {
        let run = params.gain.shape()[0];
        let runs = x.runs(run);
        let normed = match params.kind {
            NormKind::Rms => runs.rms_norm(Some(params.gain), params.eps),
            NormKind::Layer => runs.layer_norm(Some(params.gain), None, params.eps),
        };
        let out = x.with(normed.reshape(&[x.rows, x.width]));
        match params.bias {
            Some(bias) => self.add_bias(out, bias),
            None => out,
        }
    }

    fn rotation(&self, rope: &Rope, positions: &[u32], totals: &[u32]) -> Rotation {
        assert_eq!(positions.len(), totals.len(), "a length for every row");
        let pairs = rope.inv_freq.len();
        let frequencies = |total: u32| match &rope.long {
            Some(long) if total > long.beyond => &long.inv_freq,
            _ => &rope.inv_freq,
        };
        let factor = rope.attention_factor.0;
        let table = |of: fn(f32) -> f32| {
            let angles = positions.iter().zip(totals).flat_map(|(position, total)| {
                let angle = |freq: &HexF32| *position as f32 * freq.0;
                frequencies(*total).iter().map(angle)
            });
            let values: Vec<f32> = angles.map(|angle| of(angle) * factor).collect();
            self.library.floats(&values, &[positions.len(), 1, pairs])
        };
        Rotation { style: rope.style, pairs, cos: table(f32::cos), sin: table(f32::sin) }
    }

    fn rotate(&self, x: Tensor, rotation: &Rotation, part: RotatedPart) -> Tensor {
        let rotated = rotation.apply(&x.runs(part.head_dim), part.offset);
        x.with(rotated.reshape(&[x.rows, x.width]))
    }

    fn activate(&self, activation: Activation, gate: Option<Tensor>, up: Tensor) -> Tensor {
        assert_eq!(gate.is_some(), activation.is_gated(), "a gate for {activation:?}");
        match gate {
            Some(gate) => {
                let open = silu_like(activation, &gate.array);
                up.with(open.binary(Binary::Multiply, &up.array))
            }
            None => up.with(silu_like(activation, &up.array)),
        }
    }

    fn xielu(&self, x: Tensor, params: &Xielu) -> Tensor {
        let Xielu { above, below, beta, eps } = *params;
        let x_ = &x.array;
        let square = x_.unary(Unary::Square).with_constant(Binary::Multiply, above);
        let power = x_.with_constant(Binary::Minimum, eps).unary(Unary::Exp);
        let bent = power.with_constant(Binary::Subtract, 1.0).binary(Binary::Subtract, x_);
        let bent = bent.with_constant(Binary::Multiply, below);
        let bent = x_.with_constant(Binary::Greater, 0.0).choose(&square, &bent);
        x.with(bent.binary(Binary::Add, &x_.with_constant(Binary::Multiply, beta)))
    }

    fn clamped_glu(&self, gate: Tensor, up: Tensor, limit: f32) -> Tensor {
        up.with(mixture_of_experts::limited_swiglu(&gate.array, &up.array, limit))
    }

    fn clamped_swiglu(&self, gate: Tensor, up: Tensor, clamped: ClampedSwiglu) -> Tensor {
        up.with(mixture_of_experts::clamped_swiglu(&gate.array, &up.array, clamped))
    }

    fn sigmoid_gate(&self, x: Tensor, gate: &Tensor) -> Tensor {
        gated(&x, gate, &gate.array.unary(Unary::Sigmoid))
    }

    fn softplus_gate(&self, x: Tensor, gate: &Tensor) -> Tensor {
        gated(&x, gate, &gate.array.with_constant(Binary::LogAddExp, 0.0))
    }

    fn limit(&self, x: Tensor, limit: f32) -> Tensor {
        let limited = x.array.with_constant(Binary::Maximum, -limit);
        x.with(limited.with_constant(Binary::Minimum, limit))
    }

    fn scale(&self, x: Tensor, factor: f32) -> Tensor {
        x.with(x.array.with_constant(Binary::Multiply, factor))
    }

    fn scale_rows(&self, x: Tensor, factors: &[f32]) -> Tensor {
        let factors = self.library.floats(factors, &[x.rows, 1]);
        x.with(x.array.binary(Binary::Multiply, &factors))
    }

    fn softcap(&self, x: Tensor, cap: f32) -> Tensor {
        x.with(softcap(&x.array, cap))
    }

    fn add(&self, a: Tensor, b: &Tensor) -> Tensor {
        a.with(a.array.binary(Binary::Add, &b.array))
    }

    fn select_rows(&self, x: &Tensor, rows: &[usize]) -> Tensor {
        let indices: Vec<u32> = rows.iter().map(|row| *row as u32).collect();
        let taken = x.array.take(&self.library.indices(&indices, &[rows.len()]), 0);
        Tensor::new(rows.len(), x.width, taken)
    }
}

/// Each column of the gate's factors for as many consecutive ones of `x`.
fn gated(x: &Tensor, gate: &Tensor, factors: &Array) -> Tensor {
    if [1, x.width].contains(&gate.width) {
        return x.with(x.array.binary(Binary::Multiply, factors));
    }
    let factors = factors.reshape(&[x.rows, gate.width, 1]);
    let gated = x.runs(x.width / gate.width.max(1)).binary(Binary::Multiply, &factors);
    x.with(gated.reshape(&[x.rows, x.width]))
}

impl Rotation {
    /// Rotates heads `[rows, heads, head_dim]`, each from its element `first` on.
    fn apply(&self, x: &Array, first: usize) -> Array {
        let shape = x.shape();
        let [rows, heads, head_dim] = shape[..] else { unreachable!("heads have three axes") };
        let (pairs, library) = (self.pairs, x.library());
        let end = first + 2 * pairs;
        let turn = |a: &Array, b: &Array| {
            let by = |x: &Array, table: &Array| x.binary(Binary::Multiply, table);
            let first = by(a, &self.cos).binary(Binary::Subtract, &by(b, &self.sin));
            let second = by(b, &self.cos).binary(Binary::Add, &by(a, &self.sin));
            [first, second]
        };
        let rotated = match self.style {
            RopeStyle::Half => {
                let [a, b] = turn(&x.slice(2, first, end - pairs), &x.slice(2, end - pairs, end));
                library.concat(&[&a, &b], 2)
            }
            RopeStyle::Interleaved => {
                let both = x.slice(2, first, end).reshape(&[rows, heads, pairs, 2]);
                let part = |index| both.slice(3, index, index + 1).reshape(&[rows, heads, pairs]);
                let halves = turn(&part(0), &part(1)).map(|x| x.reshape(&[rows, heads, pairs, 1]));
                let [a, b] = &halves;
                library.concat(&[a, b], 3).reshape(&[rows, heads, 2 * pairs])
            }
        };
        let whole = [x.slice(2, 0, first), rotated, x.slice(2, end, head_dim)];
        let parts = whole.iter().zip([first, 2 * pairs, head_dim - end]);
        let parts: Vec<_> = parts.filter_map(|(part, width)| (width > 0).then_some(part)).collect();
        match parts[..] {
            [rotated] => rotated.clone(),
            _ => library.concat(&parts, 2),
        }
    }
}

/// The function of an activation, its gate aside.
pub(super) fn silu_like(activation: Activation, x: &Array) -> Array {
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
