//! Norms with their weights.

use shardpack_formats::{
    Spec,
    spec::{self, NormKind},
};

use super::{
    LoadError,
    load::{Loader, TensorSlice},
};
use crate::backend::{Backend, NormParams};

/// One norm of hidden vectors or of heads, by the model's formula.
pub(super) struct Norm<B: Backend> {
    kind: NormKind,
    eps: f32,
    gain: B::Vector,
    bias: Option<B::Vector>,
}

impl<B: Backend> Norm<B> {
    /// The norm of this module, over vectors of this width.
    pub(super) fn load(
        loader: &Loader<'_, B>,
        module: &str,
        width: &TensorSlice,
    ) -> Result<Self, LoadError> {
        let spec::Norm { kind, eps, .. } = loader.spec.norm;
        let (norm, eps) = (&loader.spec.norm, eps.0);
        if norm.plain {
            return Ok(Self { kind, eps, gain: loader.backend.ones(width.held.len()), bias: None });
        }
        let gain = loader.floats(&format!("{module}.weight"), &[width])?;
        let gain = if norm.plus_one {
            loader.backend.vector_plus_one(gain)
        } else {
            loader.backend.vector(gain)
        };
        let name = format!("{module}.bias");
        let bias = norm.bias.then(|| loader.vector(&name, width)).transpose()?;
        Ok(Self { kind, eps, gain, bias })
    }

    /// What the backend needs to know.
    pub(super) fn params(&self) -> NormParams<'_, B::Vector> {
        let bias = self.bias.as_ref();
        NormParams { kind: self.kind, eps: self.eps, gain: &self.gain, bias }
    }

    pub(super) fn apply(&self, backend: &B, x: &B::Tensor) -> B::Tensor {
        backend.norm(x, &self.params())
    }
}

/// A norm by the model's formula with a gain of ones.
pub(super) fn without_gain<'a, V>(spec: &Spec, ones: &'a V) -> NormParams<'a, V> {
    NormParams { kind: spec.norm.kind, eps: spec.norm.eps.0, gain: ones, bias: None }
}
