//! Grouped-query attention.

use serde::{Deserialize, Serialize};

use super::{BlockIndexer, is_false};
use crate::hex::HexF32;

/// Grouped-query attention.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of a published model")]
pub struct Attention {
    /// Query heads.
    pub heads: u32,
    /// Key and value heads.
    pub kv_heads: u32,
    /// Width of one head.
    pub head_dim: u32,
    /// Factor on `q · k` before the softmax.
    pub scale: HexF32,
    /// Whether the query, key and value projections have a bias.
    pub qkv_bias: bool,
    /// Whether the output projection has a bias.
    pub o_bias: bool,
    /// Normalisation of queries and keys.
    pub qk_norm: QkNorm,
    /// Scores become `cap · tanh(score / cap)` before the mask.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub softcap: Option<HexF32>,
    /// Whether each query head has a sink: one more score in the softmax's denominator.
    #[serde(default, skip_serializing_if = "is_false")]
    pub sinks: bool,
    /// Whether each head has an output gate, projected together with its query; heads are multiplied
    /// by its sigmoid.
    #[serde(rename = "output_gate_in_q", default, skip_serializing_if = "is_false")]
    pub gated: bool,
    /// The tensor of the sinks, where it is not `sinks`.
    #[serde(rename = "sinks_tensor", default, skip_serializing_if = "Option::is_none")]
    pub sinks_in: Option<String>,
    /// Factor on rotated queries that grows with the position.
    #[serde(rename = "temperature_tuning", default, skip_serializing_if = "Option::is_none")]
    pub position_scale: Option<PositionScale>,
    /// Width of a head's values, where it is less than `head_dim`.
    #[serde(rename = "v_head_dim", default, skip_serializing_if = "Option::is_none")]
    pub value_dim: Option<u32>,
    /// Factor on values.
    #[serde(rename = "v_scale", default, skip_serializing_if = "Option::is_none")]
    pub value_scale: Option<HexF32>,
    /// Whether values are the keys before their norm, without a projection of their own.
    #[serde(rename = "k_eq_v", default, skip_serializing_if = "is_false")]
    pub values_are_keys: bool,
    /// Whether each head's values are normalised, without gains.
    #[serde(rename = "v_norm", default, skip_serializing_if = "is_false")]
    pub value_norm: bool,
    /// Queries, keys and values are clipped to this magnitude, after norms and before RoPE.
    #[serde(rename = "clip_qkv", default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<HexF32>,
    /// Output gate: a factor on heads before the output projection.
    #[serde(rename = "output_gate", default, skip_serializing_if = "Option::is_none")]
    pub head_gate: Option<HeadGate>,
    /// Indexer of the layers with block-sparse attention.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block_sparse: Option<BlockIndexer>,
}

impl Attention {
    /// Width of what a head gives to the output projection.
    #[must_use]
    pub fn value_width(&self) -> u32 {
        self.value_dim.unwrap_or(self.head_dim)
    }
}

/// Output gate of attention, from a projection of its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeadGate {
    /// The projection within the module of attention.
    pub module: String,
    /// Whether a head has one gate; else each of its elements has its own.
    #[serde(default, skip_serializing_if = "is_false")]
    pub per_head: bool,
    /// From the projection to the factor.
    #[serde(default, skip_serializing_if = "GateFunction::is_sigmoid")]
    pub function: GateFunction,
}

/// From a gate's projection to the factor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GateFunction {
    /// `1 / (1 + exp(−x))`.
    #[default]
    Sigmoid,
    /// `ln(1 + exp(x))`.
    Softplus,
}

impl GateFunction {
    /// For a field that is skipped while it is neutral.
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
    fn is_sigmoid(&self) -> bool {
        *self == Self::Sigmoid
    }
}

/// Normalisation of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QkNorm {
    /// None.
    None,
    /// Each head by itself before the rotary embedding, with one gain of `head_dim` values for
    /// all heads.
    Head,
    /// The same after the rotary embedding; `query_layernorm` and `key_layernorm` (Hunyuan).
    HeadAfterRope,
    /// All heads together before the rotary embedding, with a gain for every value.
    Full,
    /// Each head by itself after the rotary embedding, without gains; only in layers that have
    /// one (Llama 4).
    PlainAfterRope,
}

/// The factor `1 + beta · ln(1 + floor(position / original))` on rotated queries (Llama 4).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PositionScale {
    /// How fast it grows.
    pub beta: HexF32,
    /// Longest sequence before the extension, in tokens.
    #[serde(rename = "original_max_positions")]
    pub original: u32,
    /// Whether the first position counts as 1.
    #[serde(default, skip_serializing_if = "is_false")]
    pub from_one: bool,
    /// Whether only layers without position embedding have it.
    #[serde(rename = "nope_only", default, skip_serializing_if = "is_false")]
    pub unrotated: bool,
}

impl PositionScale {
    /// The factor at a position.
    #[must_use]
    pub fn at(&self, position: u32) -> f32 {
        let position = position.saturating_add(u32::from(self.from_one));
        let spans = (position / self.original.max(1)) as f32;
        1.0 + self.beta.0 * libm::logf(1.0 + spans)
    }
}
