//! Linear attention: a recurrent state per head in place of a KV cache.

use serde::{Deserialize, Serialize};

use super::is_false;
use crate::hex::HexF32;

/// Linear attention in place of attention in some layers: Gated `DeltaNet`, unless its
/// [`LinearAttentionKind`] says otherwise.
///
/// Queries, keys and values go through a causal convolution of each channel and `silu`. For each
/// value head there is a state `S` `[key_dim, value_dim]`; with the normalised key `k` and query
/// `q` of its key head, `S ← S·exp(g)`, `S ← S + k·(beta·(v − Sᵀk))ᵀ`, and the result is `Sᵀq`,
/// where `beta = sigmoid(b)` and `g = −exp(A_log)·softplus(a + dt_bias)`. The result is
/// normalised (rms, own gain) and multiplied by `silu(z)`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinearAttention {
    /// Heads of queries and keys.
    pub key_heads: u32,
    /// Heads of values, a multiple: consecutive ones share a key head.
    pub value_heads: u32,
    /// Width of a key head.
    pub key_dim: u32,
    /// Width of a value head.
    pub value_dim: u32,
    /// Kernel size of the convolution, in tokens.
    #[serde(rename = "conv_kernel_size")]
    pub kernel: u32,
    /// Epsilon of the result's norm.
    pub eps: HexF32,
    /// The recurrence.
    #[serde(default, skip_serializing_if = "LinearAttentionKind::is_gated_delta_net")]
    pub kind: LinearAttentionKind,
    /// Whether the convolutions have biases.
    #[serde(default, skip_serializing_if = "is_false")]
    pub conv_bias: bool,
    /// Whether the output of heads is not normalised.
    #[serde(default, skip_serializing_if = "is_false")]
    pub no_output_norm: bool,
    /// Factors on the projections (muP).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multipliers: Option<LinearAttentionMultipliers>,
    /// Of Kimi delta attention: whether the gates `g` and `z` have full-rank projections, without
    /// latents.
    #[serde(default, skip_serializing_if = "is_false")]
    pub full_rank_gates: bool,
    /// Of Kimi delta attention: the bound of the decay, `g = −limit·sigmoid(exp(A_log)·(a +
    /// dt_bias))`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decay_limit: Option<HexF32>,
}

/// Factors on the projections of linear attention (muP, Falcon H1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinearAttentionMultipliers {
    /// On queries.
    pub q: HexF32,
    /// On keys.
    pub k: HexF32,
    /// On values.
    pub v: HexF32,
    /// On gates.
    pub z: HexF32,
    /// On the time step, which decides the decay.
    pub a: HexF32,
    /// On the result.
    pub out: HexF32,
}

/// The kind of linear attention: its recurrence and what follows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LinearAttentionKind {
    /// Gated `DeltaNet`, as [`LinearAttention`] describes it.
    #[default]
    #[serde(rename = "gated_delta_net", alias = "gated_delta")]
    GatedDeltaNet,
    /// Mamba-2: with `dt = softplus(a + dt_bias)`, `S ← S·exp(−exp(A_log)·dt) + k·(dt·v)ᵀ`, and the
    /// result is `Sᵀq + D·v`. It is multiplied by `silu(z)` and then normalised over all value
    /// heads of a key head together, with a gain for every element.
    Mamba2,
    /// Kimi delta attention (KDA): as Gated `DeltaNet`, with a decay for each channel of a key. `g`
    /// and its inputs are as wide as the keys, `A_log` aside. `g` and `z` are projected through
    /// latents as wide as a key and a value, unless [`LinearAttention::full_rank_gates`]; the
    /// result is multiplied by `sigmoid(z)`.
    #[serde(rename = "kimi_delta_attention", alias = "kimi_delta")]
    KimiDeltaAttention,
}

impl LinearAttentionKind {
    /// For a field that is skipped while it is neutral.
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
    fn is_gated_delta_net(&self) -> bool {
        *self == Self::GatedDeltaNet
    }
}
