//! Embedding, projections, norms, rotary embeddings and elementwise functions.

use std::ops::Range;

use shardpack_formats::{
    hex::HexF32,
    spec::{Activation, ClampedSwiglu, NormKind, Rope, RopeStyle},
};
use shardpack_kernels::{
    Rotation as Angles, elementwise, gather, matmul_in_two_planes, matmuls_before, norm,
};

use super::{Cpu, Tensor, mixture_of_experts, route};
use crate::backend::{DenseOps, NormParams, RotatedPart, StoredMatrix, Xielu};

/// Angles of one rotary embedding at the positions of one step.
#[derive(Debug)]
pub struct Rotation {
    style: RopeStyle,
    angles: Angles,
}

impl DenseOps for Cpu {
    type Rotation = Rotation;

    fn embed(&self, tokens: &[u32], table: &StoredMatrix, held: Range<usize>) -> Tensor {
        let mut out = Tensor::unset(tokens.len(), table.inputs);
        gather::gather(tokens, &table.view(), held, &mut out.values);
        out
    }

    fn linear(&self, x: &Tensor, matrix: &StoredMatrix) -> Tensor {
        let [out] = self.linears(x, [matrix]);
        out
    }

    fn linears<const N: usize>(&self, x: &Tensor, matrices: [&StoredMatrix; N]) -> [Tensor; N] {
        if let Some(observer) = &self.observer {
            for matrix in matrices {
                observer.observe(matrix, 0, 1, &x.values);
            }
        }
        let mut outs = matrices.map(|matrix| {
            assert_eq!(x.width, matrix.inputs, "inputs of a matrix");
            Tensor::unset(x.rows(), matrix.outputs)
        });
        let views = matrices.map(StoredMatrix::view);
        let next = self.order.note(&views);
        let places = &mut outs.each_mut().map(|out| &mut out.values[..]);
        matmuls_before(&x.values, &views, places, next.as_deref());
        outs
    }

    fn logits(&self, x: &Tensor, head: &StoredMatrix) -> Tensor {
        if let Some(observer) = &self.observer {
            observer.observe(head, 0, 1, &x.values);
        }
        assert_eq!(x.width, head.inputs, "inputs of the output head");
        let mut out = Tensor::unset(x.rows(), head.outputs);
        let view = head.view();
        let next = self.order.note(&[view]);
        matmul_in_two_planes(&x.values, &view, &mut out.values, next.as_deref());
        out
    }

    fn add_bias(&self, mut x: Tensor, bias: &Vec<f32>) -> Tensor {
        assert_eq!(x.width, bias.len(), "width of a bias");
        elementwise::add_bias(&mut x.values, bias);
        x
    }

    fn norm(&self, x: &Tensor, params: &NormParams<'_, Vec<f32>>) -> Tensor {
        let mut out = Tensor::unset(x.rows(), x.width);
        let compute = match params.kind {
            NormKind::Rms => norm::rms_norm,
            NormKind::Layer => norm::layer_norm,
        };
        compute(&x.values, params.gain, params.eps, &mut out.values);
        match params.bias {
            Some(bias) => self.add_bias(out, bias),
            None => out,
        }
    }

    fn rotation(&self, rope: &Rope, positions: &[u32], totals: &[u32]) -> Rotation {
        assert_eq!(positions.len(), totals.len(), "a length for every row");
        let floats = |all: &[HexF32]| all.iter().map(|freq| freq.0).collect::<Vec<f32>>();
        let short = floats(&rope.inv_freq);
        let long = rope.long.as_ref().map(|long| (long.beyond, floats(&long.inv_freq)));
        let frequencies = |total: u32| match &long {
            Some((beyond, long)) if total > *beyond => long.as_slice(),
            _ => short.as_slice(),
        };
        let rows: Vec<_> = positions
            .iter()
            .zip(totals)
            .map(|(position, total)| (*position, frequencies(*total)))
            .collect();
        let angles = Angles::by_rows(short.len(), rope.attention_factor.0, &rows);
        Rotation { style: rope.style, angles }
    }

    fn rotate(&self, mut x: Tensor, rotation: &Rotation, part: RotatedPart) -> Tensor {
        let part = (part.head_dim, part.offset);
        match rotation.style {
            RopeStyle::Half => rotation.angles.rotate_half(&mut x.values, part),
            RopeStyle::Interleaved => rotation.angles.rotate_interleaved(&mut x.values, part),
        }
        x
    }

    fn activate(&self, activation: Activation, gate: Option<Tensor>, mut up: Tensor) -> Tensor {
        assert_eq!(gate.is_some(), activation.is_gated(), "a gate for {activation:?}");
        if let Some(mut gate) = gate {
            let compute = match activation {
                Activation::GeluTanhGlu => elementwise::gelu_tanh_glu,
                Activation::GeluGlu => elementwise::gelu_glu,
                _ => elementwise::silu_glu,
            };
            compute(&mut gate.values, &up.values);
            return gate;
        }
        match activation {
            Activation::GeluTanh => elementwise::gelu_tanh(&mut up.values),
            Activation::Gelu => elementwise::gelu(&mut up.values),
            Activation::ReluSquared => elementwise::relu_squared(&mut up.values),
            // Has learned parameters and a method of its own.
            Activation::Xielu => unreachable!("xIELU without parameters"),
            _ => elementwise::silu(&mut up.values),
        }
        up
    }

    fn xielu(&self, mut x: Tensor, params: &Xielu) -> Tensor {
        let Xielu { above, below, beta, eps } = *params;
        elementwise::xielu(&mut x.values, [above, below, beta, eps]);
        x
    }

    fn clamped_glu(&self, mut gate: Tensor, up: Tensor, limit: f32) -> Tensor {
        mixture_of_experts::limited_swiglu(&mut gate.values, &up.values, limit);
        gate
    }

    fn clamped_swiglu(&self, mut gate: Tensor, up: Tensor, clamped: ClampedSwiglu) -> Tensor {
        mixture_of_experts::clamped_swiglu(&mut gate.values, &up.values, clamped);
        gate
    }

    fn sigmoid_gate(&self, x: Tensor, gate: &Tensor) -> Tensor {
        gated(x, gate, route::sigmoid)
    }

    fn softplus_gate(&self, x: Tensor, gate: &Tensor) -> Tensor {
        gated(x, gate, |gate| gate.max(0.0) + libm::log1pf(libm::expf(-gate.abs())))
    }

    fn limit(&self, mut x: Tensor, limit: f32) -> Tensor {
        elementwise::limit(&mut x.values, limit);
        x
    }

    fn scale(&self, mut x: Tensor, factor: f32) -> Tensor {
        elementwise::scale(&mut x.values, factor);
        x
    }

    fn scale_rows(&self, mut x: Tensor, factors: &[f32]) -> Tensor {
        assert_eq!(x.rows(), factors.len(), "a factor for every row");
        elementwise::scale_rows(&mut x.values, factors);
        x
    }

    fn softcap(&self, mut x: Tensor, cap: f32) -> Tensor {
        elementwise::softcap(&mut x.values, cap);
        x
    }

    fn add(&self, mut a: Tensor, b: &Tensor) -> Tensor {
        elementwise::add(&mut a.values, &b.values);
        a
    }

    fn select_rows(&self, x: &Tensor, rows: &[usize]) -> Tensor {
        let row = |row: &usize| &x.values[row * x.width..(row + 1) * x.width];
        let values: Vec<f32> = rows.iter().flat_map(row).copied().collect();
        Tensor { width: x.width, values: values.into() }
    }
}

/// Each column of the gate, by a function of it, for as many consecutive ones of `x`.
fn gated(mut x: Tensor, gate: &Tensor, function: impl Fn(f32) -> f32) -> Tensor {
    assert_eq!(x.rows(), gate.rows(), "a gate for every row");
    assert!(x.width.is_multiple_of(gate.width.max(1)), "gates of a row");
    let each = x.width / gate.width.max(1);
    for (values, gate) in x.values.chunks_exact_mut(each).zip(&*gate.values) {
        let factor = function(*gate);
        for value in values.iter_mut() {
            *value *= factor;
        }
    }
    x
}
