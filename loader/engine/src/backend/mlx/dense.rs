//! Embedding, projections, norms, rotary embeddings and elementwise functions within the graph.

use std::ops::Range;

use shardpack_formats::{
    hex::HexF32,
    spec::{Activation, ClampedSwiglu, NormKind, Rope, RopeStyle},
};
use shardpack_mlx::{Array, Binary, Element, Library, Unary};

use super::{Matrix, Mlx, Tensor, Vector, fused::FusedFunction};
use crate::backend::{DenseOps, NormParams, RotatedPart, Xielu};

/// One rotary embedding at the positions of a step.
#[derive(Debug)]
pub struct Rotation {
    style: RopeStyle,
    pairs: usize,
    angles: Angles,
}

#[derive(Debug)]
enum Angles {
    /// Cosines and sines `[rows, 1, pairs]`, as exact as f32.
    Tables { cos: Array, sin: Array },
    /// What MLX's kernel computes them of: positions `[rows]`, periods `[pairs]`, and a factor on
    /// what is rotated.
    Kernel { positions: Array, periods: Array, factor: f32 },
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
        Tensor::new(tokens.len(), table.inputs(), array.cast(self.activations))
    }

    fn linear(&self, x: &Tensor, matrix: &Matrix) -> Tensor {
        assert_eq!(x.width, matrix.inputs(), "inputs of a matrix");
        Tensor::new(x.rows, matrix.outputs(), matrix.product(&x.array))
    }

    fn add_bias(&self, x: Tensor, bias: &Vector) -> Tensor {
        x.with(x.array.binary(Binary::Add, bias.beside(&x.array)))
    }

    fn norm(&self, x: &Tensor, params: &NormParams<'_, Vector>) -> Tensor {
        let run = params.gain.array.shape()[0];
        let runs = if run == x.width { x.array.clone() } else { x.runs(run) };
        let gain = Some(params.gain.beside(&x.array));
        let normed = match params.kind {
            NormKind::Rms => runs.rms_norm(gain, params.eps),
            NormKind::Layer => runs.layer_norm(gain, None, params.eps),
        };
        let out = x.with(normed.reshape(&[x.rows, x.width]));
        match params.bias {
            Some(bias) => self.add_bias(out, bias),
            None => out,
        }
    }

    fn rotation(&self, rope: &Rope, positions: &[u32], totals: &[u32]) -> Rotation {
        Rotation::new(self.library, rope, positions, totals, self.activations)
    }

    fn rotate(&self, x: Tensor, rotation: &Rotation, part: RotatedPart) -> Tensor {
        let rotated = rotation.apply(&x.runs(part.head_dim), part.offset);
        x.with(rotated.reshape(&[x.rows, x.width]))
    }

    fn activate(&self, activation: Activation, gate: Option<Tensor>, up: Tensor) -> Tensor {
        assert_eq!(gate.is_some(), activation.is_gated(), "a gate for {activation:?}");
        match gate {
            Some(gate) => {
                let function = FusedFunction::Glu(activation);
                up.with(function.apply([&gate.array, &up.array]))
            }
            None => up.with(FusedFunction::Activation(activation).apply([&up.array])),
        }
    }

    fn xielu(&self, x: Tensor, params: &Xielu) -> Tensor {
        let Xielu { above, below, beta, eps } = *params;
        let x_ = &x.exact();
        let square = x_.unary(Unary::Square).with_constant(Binary::Multiply, above);
        let power = x_.with_constant(Binary::Minimum, eps).unary(Unary::Exp);
        let bent = power.with_constant(Binary::Subtract, 1.0).binary(Binary::Subtract, x_);
        let bent = bent.with_constant(Binary::Multiply, below);
        let bent = x_.with_constant(Binary::Greater, 0.0).choose(&square, &bent);
        x.with_exact(&bent.binary(Binary::Add, &x_.with_constant(Binary::Multiply, beta)))
    }

    fn clamped_glu(&self, gate: Tensor, up: Tensor, limit: f32) -> Tensor {
        up.with(FusedFunction::LimitedGlu(limit).apply([&gate.array, &up.array]))
    }

    fn clamped_swiglu(&self, gate: Tensor, up: Tensor, clamped: ClampedSwiglu) -> Tensor {
        up.with(FusedFunction::ClampedGlu(clamped).apply([&gate.array, &up.array]))
    }

    fn sigmoid_gate(&self, x: Tensor, gate: &Tensor) -> Tensor {
        gated(&x, gate, FusedFunction::SigmoidGate)
    }

    fn softplus_gate(&self, x: Tensor, gate: &Tensor) -> Tensor {
        gated(&x, gate, FusedFunction::SoftplusGate)
    }

    fn limit(&self, x: Tensor, limit: f32) -> Tensor {
        x.with(FusedFunction::Limit(limit).apply([&x.array]))
    }

    fn scale(&self, x: Tensor, factor: f32) -> Tensor {
        x.with(x.array.with_constant(Binary::Multiply, factor))
    }

    fn scale_rows(&self, x: Tensor, factors: &[f32]) -> Tensor {
        if factors.iter().all(|factor| *factor == 1.0) {
            return x;
        }
        let factors = self.library.floats(factors, &[x.rows, 1]).cast(x.array.element());
        x.with(x.array.binary(Binary::Multiply, &factors))
    }

    fn softcap(&self, x: Tensor, cap: f32) -> Tensor {
        x.with(FusedFunction::Softcap(cap).apply([&x.array]))
    }

    fn add(&self, a: Tensor, b: &Tensor) -> Tensor {
        a.with(a.array.binary(Binary::Add, &b.array))
    }

    fn select_rows(&self, x: &Tensor, rows: &[usize]) -> Tensor {
        if rows.iter().copied().eq(0..x.rows) {
            return x.clone();
        }
        let indices: Vec<u32> = rows.iter().map(|row| *row as u32).collect();
        let taken = x.array.take(&self.library.indices(&indices, &[rows.len()]), 0);
        Tensor::new(rows.len(), x.width, taken)
    }
}

impl Vector {
    /// In the type of the array that it is used with.
    pub(super) fn beside(&self, x: &Array) -> &Array {
        if x.element() == Element::F32 { self } else { &self.array }
    }
}

/// Each column of the gate's factors for as many consecutive ones of `x`.
fn gated(x: &Tensor, gate: &Tensor, function: FusedFunction) -> Tensor {
    let factors = gate.array.cast(x.array.element());
    if [1, x.width].contains(&gate.width) {
        return x.with(function.apply([&x.array, &factors]));
    }
    let factors = factors.reshape(&[x.rows, gate.width, 1]);
    let gated = function.apply([&x.runs(x.width / gate.width.max(1)), &factors]);
    x.with(gated.reshape(&[x.rows, x.width]))
}

impl Rotation {
    /// By MLX's kernel where activations have 16 bits, else by tables.
    fn new(
        library: Library,
        rope: &Rope,
        positions: &[u32],
        totals: &[u32],
        activations: Element,
    ) -> Self {
        assert_eq!(positions.len(), totals.len(), "a length for every row");
        let pairs = rope.inv_freq.len();
        let frequencies = |total: u32| match &rope.long {
            Some(long) if total > long.beyond => &long.inv_freq,
            _ => &rope.inv_freq,
        };
        let factor = rope.attention_factor.0;
        let first = totals.first().map_or(&rope.inv_freq, |total| frequencies(*total));
        let is_one = totals.iter().all(|total| std::ptr::eq(frequencies(*total), first));
        if activations != Element::F32 && is_one {
            let periods: Vec<f32> = first.iter().map(|freq| freq.0.recip()).collect();
            let periods = library.floats(&periods, &[pairs]);
            let positions = library.indices(positions, &[positions.len()]);
            let angles = Angles::Kernel { positions, periods, factor };
            return Self { style: rope.style, pairs, angles };
        }
        let table = |of: fn(f32) -> f32| {
            let angles = positions.iter().zip(totals).flat_map(|(position, total)| {
                let angle = |freq: &HexF32| *position as f32 * freq.0;
                frequencies(*total).iter().map(angle)
            });
            let values: Vec<f32> = angles.map(|angle| of(angle) * factor).collect();
            library.floats(&values, &[positions.len(), 1, pairs])
        };
        let angles = Angles::Tables { cos: table(f32::cos), sin: table(f32::sin) };
        Self { style: rope.style, pairs, angles }
    }

    /// Rotates heads `[rows, heads, head_dim]`, each from its element `first` on.
    pub(super) fn apply(&self, x: &Array, first: usize) -> Array {
        let shape = x.shape();
        let [_, _, head_dim] = shape[..] else { unreachable!("heads have three axes") };
        let (library, end) = (x.library(), first + 2 * self.pairs);
        if first == 0 && (end == head_dim || self.has_no_factor()) {
            return self.rotate(x);
        }
        let rotated = self.rotate(&x.slice(2, first, end));
        let whole = [x.slice(2, 0, first), rotated, x.slice(2, end, head_dim)];
        let parts = whole.iter().zip([first, 2 * self.pairs, head_dim - end]);
        let parts: Vec<_> = parts.filter_map(|(part, width)| (width > 0).then_some(part)).collect();
        library.concat(&parts, 2)
    }

    /// Whether the kernel may be given more than it rotates.
    fn has_no_factor(&self) -> bool {
        matches!(self.angles, Angles::Kernel { factor, .. } if factor == 1.0)
    }

    /// Rotates the first elements of heads `[rows, heads, …]`.
    fn rotate(&self, x: &Array) -> Array {
        match &self.angles {
            Angles::Kernel { positions, periods, factor } => {
                let shape = x.shape();
                let [rows, heads, width] = shape[..] else { unreachable!("heads have three axes") };
                let x = x.reshape(&[rows, heads, 1, width]);
                let x = if *factor == 1.0 { x } else { x.with_constant(Binary::Multiply, *factor) };
                let is_interleaved = self.style == RopeStyle::Interleaved;
                x.rope(2 * self.pairs, is_interleaved, positions, periods).reshape(&shape)
            }
            Angles::Tables { cos, sin } => self.by_tables(x, [cos, sin]),
        }
    }

    fn by_tables(&self, x: &Array, [cos, sin]: [&Array; 2]) -> Array {
        let element = x.element();
        let x = &x.cast(Element::F32);
        let shape = x.shape();
        let [rows, heads, _] = shape[..] else { unreachable!("heads have three axes") };
        let (pairs, library) = (self.pairs, x.library());
        let turn = |a: &Array, b: &Array| {
            let by = |x: &Array, table: &Array| x.binary(Binary::Multiply, table);
            let first = by(a, cos).binary(Binary::Subtract, &by(b, sin));
            let second = by(b, cos).binary(Binary::Add, &by(a, sin));
            [first, second]
        };
        let rotated = match self.style {
            RopeStyle::Half => {
                let [a, b] = turn(&x.slice(2, 0, pairs), &x.slice(2, pairs, 2 * pairs));
                library.concat(&[&a, &b], 2)
            }
            RopeStyle::Interleaved => {
                let both = x.reshape(&[rows, heads, pairs, 2]);
                let part = |index| both.slice(3, index, index + 1).reshape(&[rows, heads, pairs]);
                let halves = turn(&part(0), &part(1)).map(|x| x.reshape(&[rows, heads, pairs, 1]));
                let [a, b] = &halves;
                library.concat(&[a, b], 3).reshape(&[rows, heads, 2 * pairs])
            }
        };
        rotated.cast(element)
    }
}
