//! Kimi Delta Attention (Kimi Linear): Gated `DeltaNet` whose state fades by one factor per channel of a
//! key.
//!
//! ```text
//! a = x · Wa_down · Wa_up                          [tokens, key_heads, key_dim]
//! g = −exp(A_log) · softplus(a + dt_bias), or −limit · sigmoid(exp(A_log) · (a + dt_bias))
//! beta = sigmoid(x · Wb)                           [tokens, value_heads]
//! S ← exp(g) ⊙ S,  S ← S + k ⊗ (beta · (v − Sᵀk))
//! result = norm(Sᵀq) ⊙ sigmoid(z)                  [tokens, value_heads, value_dim]
//! ```
//!
//! `z` is projected through a latent as `a` is, or both are projected at once (`spec::LinearAttention::full_rank_gates`).

use shardpack_formats::spec;

use super::{
    LoadError,
    gated_delta_net::decay,
    linear_attention::{Gates, LinearSlices},
    load::{Loader, TensorSlice},
};
use crate::backend::Backend;

/// One rank's weights of the rule.
pub(super) struct Kda<B: Backend> {
    a: LowRank<B>,
    b: B::Matrix,
    z: LowRank<B>,
    /// One gain for each element of a head.
    norm: B::Vector,
}

/// A projection, perhaps through a latent that every rank computes whole.
struct LowRank<B: Backend> {
    down: Option<B::Matrix>,
    up: B::Matrix,
}

impl<B: Backend> LowRank<B> {
    fn apply(&self, backend: &B, x: &B::Tensor) -> B::Tensor {
        match &self.down {
            Some(down) => backend.linear(&backend.linear(x, down), &self.up),
            None => backend.linear(x, &self.up),
        }
    }
}

impl<B: Backend> Kda<B> {
    /// None on a rank without heads.
    pub(super) fn load(
        loader: &Loader<'_, B>,
        slices: &LinearSlices,
        form: &spec::LinearAttention,
        module: &str,
    ) -> Result<Option<Self>, LoadError> {
        let name = |name: &str| format!("{module}.{name}");
        let LinearSlices { keys, values, per_value_head, hidden } = slices;
        let [key, value] =
            [form.key_dim, form.value_dim].map(|width| TensorSlice::whole(width as usize));
        // Every rank holds these whole, one without heads too.
        let norm = loader.vector(&name("norm.weight"), &value)?;
        let (a_down, z_down) = if form.full_rank_gates {
            (None, None)
        } else {
            let a = loader.plain_matrix(&name("a_latent"), &key, hidden)?;
            (Some(a), Some(loader.held_matrix(&name("z_latent"), &value, hidden)?))
        };
        if !slices.has_heads() {
            return Ok(None);
        }
        let inputs = |latent: &TensorSlice| {
            if form.full_rank_gates { hidden.clone() } else { latent.clone() }
        };
        let a_up = decay(loader, form, &name("in_proj_a"), keys, &inputs(&key))?;
        let z_up = loader.held_matrix(&name("in_proj_z"), values, &inputs(&value))?;
        Ok(Some(Self {
            a: LowRank { down: a_down, up: a_up },
            b: loader.plain_matrix(&name("in_proj_b"), per_value_head, hidden)?,
            z: LowRank { down: z_down, up: z_up },
            norm,
        }))
    }

    pub(super) fn gates(&self, backend: &B, x: &B::Tensor) -> Gates<B::Tensor> {
        Gates { a: self.a.apply(backend, x), z: self.z.apply(backend, x) }
    }

    /// Strength of the change before the sigmoid, `[tokens, value_heads]`.
    pub(super) fn beta(&self, backend: &B, x: &B::Tensor) -> B::Tensor {
        backend.linear(x, &self.b)
    }

    pub(super) const fn norm(&self) -> &B::Vector {
        &self.norm
    }
}
