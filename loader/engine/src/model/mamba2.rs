//! Mamba-2 (Dao and Gu 2024), in the terms of linear attention: `q` is C, `k` is B and `v` is x.
//!
//! ```text
//! dt = softplus(x · Wa + dt_bias)                  [tokens, value_heads]
//! S ← exp(−exp(A_log) · dt) · S + k ⊗ (dt · v)
//! result = norm((Sᵀq + D · v) ⊙ silu(x · Wz))      [tokens, value_heads, value_dim]
//! ```
//!
//! The norm is over all value heads of a key head together; where ranks share such a group, its sum of
//! squares is all-reduced.

use shardpack_formats::spec;

use super::{
    LoadError,
    gated_delta_net::decay,
    group_norm::GroupNorm,
    linear_attention::{Gates, LinearSlices},
    load::Loader,
};
use crate::backend::Backend;

/// One rank's weights of the rule.
pub(super) struct Mamba2<B: Backend> {
    a: B::Matrix,
    z: B::Matrix,
    /// `D`, one for each value head.
    skip: B::Vector,
    /// One gain for each element of all heads; absent where the result is not normalised, or its
    /// groups are on several ranks.
    norm: Option<B::Vector>,
}

/// The norm of the result: on one rank, over several ranks, or none.
pub(super) struct ResultNorm<B: Backend> {
    pub(super) gain: Option<B::Vector>,
    pub(super) over_ranks: Option<GroupNorm<B>>,
}

impl<B: Backend> Mamba2<B> {
    pub(super) fn load_norm(
        loader: &Loader<'_, B>,
        slices: &LinearSlices,
        form: &spec::LinearAttention,
        module: &str,
    ) -> Result<ResultNorm<B>, LoadError> {
        if form.no_output_norm {
            return Ok(ResultNorm { gain: None, over_ranks: None });
        }
        let values = &slices.values;
        let gain = || loader.vector(&format!("{module}.norm.weight"), values);
        let gain = slices.has_heads().then(gain).transpose()?;
        if !loader.shard.linear.by_values {
            return Ok(ResultNorm { gain, over_ranks: None });
        }
        let groups = form.key_heads as usize;
        let norm = GroupNorm {
            gain,
            groups,
            width: values.full / groups,
            eps: form.eps.0,
            held: values.held.clone(),
        };
        Ok(ResultNorm { gain: None, over_ranks: Some(norm) })
    }

    /// None on a rank without heads.
    pub(super) fn load(
        loader: &Loader<'_, B>,
        slices: &LinearSlices,
        form: &spec::LinearAttention,
        norm: Option<B::Vector>,
        module: &str,
    ) -> Result<Option<Self>, LoadError> {
        if !slices.has_heads() {
            return Ok(None);
        }
        let name = |name: &str| format!("{module}.{name}");
        let LinearSlices { values, per_value_head, hidden, .. } = slices;
        Ok(Some(Self {
            a: decay(loader, form, &name("in_proj_a"), per_value_head, hidden)?,
            z: loader.held_matrix(&name("in_proj_z"), values, hidden)?,
            skip: loader.vector(&name("D"), per_value_head)?,
            norm,
        }))
    }

    pub(super) fn gates(&self, backend: &B, x: &B::Tensor) -> Gates<B::Tensor> {
        Gates { a: backend.linear(x, &self.a), z: backend.linear(x, &self.z) }
    }

    pub(super) const fn skip(&self) -> &B::Vector {
        &self.skip
    }

    pub(super) const fn norm(&self) -> Option<&B::Vector> {
        self.norm.as_ref()
    }
}
