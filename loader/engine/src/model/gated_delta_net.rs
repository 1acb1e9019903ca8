//! Gated `DeltaNet` (Yang et al. 2024; Qwen3-Next): the state fades by one factor per head and moves by
//! the delta rule.
//!
//! ```text
//! g = −exp(A_log) · softplus(x · Wa + dt_bias)     [tokens, value_heads]
//! beta = sigmoid(x · Wb)                           [tokens, value_heads]
//! S ← exp(g) · S,  S ← S + k ⊗ (beta · (v − Sᵀk))
//! result = norm(Sᵀq) ⊙ silu(x · Wz)                [tokens, value_heads, value_dim]
//! ```

use shardpack_formats::spec;

use super::{
    LoadError,
    linear_attention::{Gates, LinearSlices},
    load::{Loader, TensorSlice},
};
use crate::backend::Backend;

/// One rank's weights of the rule.
pub(super) struct GatedDeltaNet<B: Backend> {
    a: B::Matrix,
    b: B::Matrix,
    z: B::Matrix,
    /// One gain for each element of a head.
    norm: B::Vector,
}

impl<B: Backend> GatedDeltaNet<B> {
    /// None on a rank without heads.
    pub(super) fn load(
        loader: &Loader<'_, B>,
        slices: &LinearSlices,
        form: &spec::LinearAttention,
        module: &str,
    ) -> Result<Option<Self>, LoadError> {
        let name = |name: &str| format!("{module}.{name}");
        let LinearSlices { values, per_value_head, hidden, .. } = slices;
        // Every rank holds it whole, one without heads too.
        let width = TensorSlice::whole(form.value_dim as usize);
        let norm = loader.vector(&name("norm.weight"), &width)?;
        if !slices.has_heads() {
            return Ok(None);
        }
        Ok(Some(Self {
            a: decay(loader, form, &name("in_proj_a"), per_value_head, hidden)?,
            b: loader.plain_matrix(&name("in_proj_b"), per_value_head, hidden)?,
            z: loader.held_matrix(&name("in_proj_z"), values, hidden)?,
            norm,
        }))
    }

    pub(super) fn gates(&self, backend: &B, x: &B::Tensor) -> Gates<B::Tensor> {
        Gates { a: backend.linear(x, &self.a), z: backend.linear(x, &self.z) }
    }

    /// Strength of the change before the sigmoid, `[tokens, value_heads]`.
    pub(super) fn beta(&self, backend: &B, x: &B::Tensor) -> B::Tensor {
        backend.linear(x, &self.b)
    }

    pub(super) const fn norm(&self) -> &B::Vector {
        &self.norm
    }
}

/// The projection that decides on the decay; quantized only where the spec says so.
pub(super) fn decay<B: Backend>(
    loader: &Loader<'_, B>,
    form: &spec::LinearAttention,
    module: &str,
    outputs: &TensorSlice,
    inputs: &TensorSlice,
) -> Result<B::Matrix, LoadError> {
    if form.full_rank_gates {
        loader.held_matrix(module, outputs, inputs)
    } else {
        loader.plain_matrix(module, outputs, inputs)
    }
}
