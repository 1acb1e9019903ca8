//! Multi-head latent attention (MLA) and the indexer of sparse attention.

use serde::{Deserialize, Serialize};

use super::{RopeStyle, is_false};
use crate::hex::HexF32;

/// Multi-head latent attention, in place of grouped-query attention in every layer.
///
/// Keys and values of all heads are linear in one latent per token, which is all that is cached,
/// with one rotated key part that the heads share. A head's query is brought into the latent space
/// (`embed_q`), and its result out of it (`unembed_out`). Heads may have sinks
/// ([`super::Attention::sinks`]) and gates ([`super::Attention::head_gate`]).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mla {
    /// Width of the queries' latent; none where queries are projected at once.
    #[serde(rename = "q_lora_rank", default, skip_serializing_if = "Option::is_none")]
    pub q_rank: Option<u32>,
    /// Width of the latent of keys and values.
    #[serde(rename = "kv_lora_rank")]
    pub kv_rank: u32,
    /// Width of a head's part without position.
    #[serde(rename = "qk_nope_head_dim")]
    pub nope: u32,
    /// Width of a head's rotated part.
    #[serde(rename = "qk_rope_head_dim")]
    pub rope: u32,
    /// Width of a head's values.
    #[serde(rename = "v_head_dim")]
    pub value: u32,
    /// Epsilon of the norms of both latents.
    pub eps: HexF32,
    /// Whether the projections to the latents have biases.
    #[serde(default, skip_serializing_if = "is_false")]
    pub bias: bool,
    /// Factor on the latent of keys and values, after its norm.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_scale: Option<HexF32>,
    /// Indexer of sparse attention; none where queries attend to all keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub indexer: Option<Indexer>,
}

/// Indexer of sparse attention (DeepSeek Sparse Attention): it selects the top-k keys of a query.
///
/// Each token has an indexer key, and each query has `heads` indexer queries from its latent, with a
/// weight for each. A key's score is the sum over those heads of `weight · max(q · k, 0)`, and a query
/// attends to the `top_k` keys of the largest scores; to all while there are no more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Indexer {
    /// Indexer queries of a token.
    pub heads: u32,
    /// Width of an indexer query and of the key, of which the first part is rotated as the heads'.
    #[serde(rename = "head_dim")]
    pub width: u32,
    /// Keys that a query attends to.
    pub top_k: u32,
    /// How the rotated part is laid out.
    #[serde(rename = "rope_style")]
    pub style: RopeStyle,
    /// Epsilon of the key's norm.
    pub eps: HexF32,
    /// Whether the last part is what is rotated.
    #[serde(rename = "rope_last", default, skip_serializing_if = "is_false")]
    pub rotated_last: bool,
}
