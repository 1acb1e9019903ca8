//! Grouped-query attention.

use serde::{Deserialize, Serialize};

use super::is_false;
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
    /// Whether each head has a gate behind its query: heads go through by its sigmoid.
    #[serde(default, skip_serializing_if = "is_false")]
    pub gated: bool,
    /// Factor on rotated queries that grows with the position.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub position_scale: Option<PositionScale>,
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
}

/// The factor `1 + beta · ln(1 + floor(position / original))` on rotated queries (Llama 4).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PositionScale {
    /// How fast it grows.
    pub beta: HexF32,
    /// Longest sequence before the extension, in tokens.
    pub original: u32,
}

impl PositionScale {
    /// The factor at a position.
    #[must_use]
    pub fn at(&self, position: u32) -> f32 {
        let spans = (position / self.original.max(1)) as f32;
        1.0 + self.beta.0 * libm::logf(1.0 + spans)
    }
}
