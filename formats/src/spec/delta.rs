//! Linear attention: a state per head in place of keys and values.

use serde::{Deserialize, Serialize};

use super::is_false;
use crate::hex::HexF32;

/// Gated `DeltaNet`, in place of attention in some layers.
///
/// Queries, keys and values go through a causal convolution of each channel and `silu`. For each
/// value head there is a state `S` `[key_dim, value_dim]`; with the normalised key `k` and query
/// `q` of its key head, `S ← S·exp(g)`, `S ← S + k·(beta·(v − Sᵀk))ᵀ`, and the result is `Sᵀq`,
/// where `beta = sigmoid(b)` and `g = −exp(A_log)·softplus(a + dt_bias)`. The result is
/// normalised (rms, own gain) and multiplied by `silu(z)`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Delta {
    /// Heads of queries and keys.
    pub key_heads: u32,
    /// Heads of values, a multiple: consecutive ones share a key head.
    pub value_heads: u32,
    /// Width of a key head.
    pub key_dim: u32,
    /// Width of a value head.
    pub value_dim: u32,
    /// Tokens that the convolution sees.
    #[serde(rename = "conv_kernel_size")]
    pub kernel: u32,
    /// Epsilon of the result's norm.
    pub eps: HexF32,
    /// How the state moves on.
    #[serde(rename = "kind", default, skip_serializing_if = "StateRule::is_delta")]
    pub rule: StateRule,
    /// Whether the convolutions have biases.
    #[serde(default, skip_serializing_if = "is_false")]
    pub conv_bias: bool,
    /// Whether what heads give is not normalised.
    #[serde(rename = "no_output_norm", default, skip_serializing_if = "is_false")]
    pub unnormed: bool,
    /// Factors on what is projected.
    #[serde(rename = "multipliers", default, skip_serializing_if = "Option::is_none")]
    pub factors: Option<DeltaFactors>,
    /// By Kimi's rule, whether what makes `g` and `z` is projected at once, without latents.
    #[serde(rename = "full_rank_gates", default, skip_serializing_if = "is_false")]
    pub direct: bool,
    /// By Kimi's rule, what fading is bounded by: `g = −limit·sigmoid(exp(A_log)·(a + dt_bias))`.
    #[serde(rename = "decay_limit", default, skip_serializing_if = "Option::is_none")]
    pub fade_limit: Option<HexF32>,
}

/// Factors on what linear attention projects (Falcon H1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeltaFactors {
    /// On queries.
    pub q: HexF32,
    /// On keys.
    pub k: HexF32,
    /// On values.
    pub v: HexF32,
    /// On gates.
    pub z: HexF32,
    /// On what decides how fast states fade.
    pub a: HexF32,
    /// On the result.
    pub out: HexF32,
}

/// How the state of linear attention moves on, and what becomes of its result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StateRule {
    /// As [`Delta`] says.
    #[default]
    #[serde(rename = "gated_delta_net", alias = "gated_delta")]
    GatedDelta,
    /// Mamba 2: with `dt = softplus(a + dt_bias)`, `S ← S·exp(−exp(A_log)·dt) + k·(dt·v)ᵀ`, and the
    /// result is `Sᵀq + D·v`. It is multiplied by `silu(z)` and then normalised over all value
    /// heads of a key head together, with a gain for every element.
    Mamba2,
    /// As [`Delta`] says, but that each channel of a key fades for itself: `g` and what it is made of
    /// are as wide as the keys, `A_log` aside. What makes `g` and `z` goes through latents, as wide as
    /// a key and as a value, but for [`Delta::direct`]; the result is multiplied by `sigmoid(z)`
    /// (Kimi Linear).
    #[serde(rename = "kimi_delta_attention", alias = "kimi_delta")]
    KimiDelta,
}

impl StateRule {
    /// For a field that is skipped while it is neutral.
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
    fn is_delta(&self) -> bool {
        *self == Self::GatedDelta
    }
}
