//! Norms with their weights.

use shardpack_formats::spec;

use super::{LoadError, load::Loader, load::Part};
use crate::backend::{Backend, NormStep};

/// One norm of hidden vectors or of heads.
pub(super) struct Norm<B: Backend> {
    gain: B::Vector,
    bias: Option<B::Vector>,
}

impl<B: Backend> Norm<B> {
    /// The norm of this module, over vectors of this width.
    pub(super) fn load(
        loader: &Loader<'_, B>,
        module: &str,
        width: &Part,
    ) -> Result<Self, LoadError> {
        let norm = &loader.spec.norm;
        if norm.plain {
            return Ok(Self { gain: loader.backend.ones(width.held.len()), bias: None });
        }
        let gain = loader.floats(&format!("{module}.weight"), &[width])?;
        let gain = if norm.plus_one {
            loader.backend.vector_plus_one(gain)
        } else {
            loader.backend.vector(gain)
        };
        let name = format!("{module}.bias");
        let bias = norm.bias.then(|| loader.vector(&name, width)).transpose()?;
        Ok(Self { gain, bias })
    }

    /// What the backend needs to know.
    pub(super) fn step(&self, norm: &spec::Norm) -> NormStep<'_, B::Vector> {
        let bias = self.bias.as_ref();
        NormStep { kind: norm.kind, eps: norm.eps.0, gain: &self.gain, bias }
    }

    pub(super) fn apply(&self, backend: &B, norm: &spec::Norm, x: &B::Tensor) -> B::Tensor {
        backend.norm(x, &self.step(norm))
    }
}
