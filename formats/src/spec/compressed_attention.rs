//! Compressed attention: a sliding window and compressed KV entries (CSA and HCA).

use serde::{Deserialize, Serialize};

use super::{Indexer, is_false};
use crate::hex::HexF32;

/// Compressed attention (DeepSeek V4), in place of grouped-query attention in every layer.
///
/// A token has one vector `kv` for all heads, which is key and value at once: normalised, its last
/// `rope` elements rotated at the token's position. Queries come from a latent, are normalised head
/// by head without gains and rotated the same way. A head attends to the tokens of the layer's
/// window ([`super::Mask::Sliding`]) and, in layers with [`CompressedKv`], to compressed KV entries
/// that each stand for several tokens; one softmax over both, with a sink
/// ([`super::Attention::sinks`]). What it sums up is rotated back at the query's position. Heads
/// are projected in groups, each by a matrix of its own (`o_a_proj`), and what all groups give by
/// one more (`o_b_proj`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompressedAttention {
    /// Width of the queries' latent (`q_lora_rank`).
    #[serde(rename = "q_lora_rank")]
    pub q_rank: u32,
    /// Width of the rotated part, the last one of a head (`qk_rope_head_dim`).
    #[serde(rename = "qk_rope_head_dim")]
    pub rope: u32,
    /// Epsilon of the norms within attention.
    pub eps: HexF32,
    /// Groups of consecutive heads (`o_groups`).
    #[serde(rename = "o_groups")]
    pub groups: u32,
    /// What a group gives (`o_lora_rank`).
    #[serde(rename = "o_lora_rank")]
    pub group_rank: u32,
    /// Indexer of the layers with sparse entries ([`CompressedKv::sparse`]). Its keys are
    /// compressed as entries are, with weights of their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub indexer: Option<Indexer>,
}

/// Compressed KV entries of one layer: each stands for `compression_ratio` consecutive tokens.
///
/// Each token has values `c` and weights `z` as wide as a head; an entry is the sum of its tokens'
/// `softmax(z + position_bias) · c`, element by element, normalised, its last part rotated at the
/// position of its first token. A query sees the entries whose last token is not after its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompressedKv {
    /// Tokens of an entry.
    pub compression_ratio: u32,
    /// Whether an entry also stands for as many tokens before its own, with `c` and `z` of their
    /// own (the first half of the projection), and whether a query attends only to the top-k
    /// entries of the indexer (CSA); otherwise it attends to all (HCA).
    #[serde(default, skip_serializing_if = "is_false")]
    pub sparse: bool,
}
