//! Attention to near tokens one by one and to far ones in entries.

use serde::{Deserialize, Serialize};

use super::{Index, is_false};
use crate::hex::HexF32;

/// Compressed attention (DeepSeek V4), in place of grouped-query attention in every layer.
///
/// A token has one vector `kv` for all heads, which is key and value at once: normalised, its last
/// `rope` elements rotated at the token's position. Queries come from a latent, are normalised head
/// by head without gains and rotated the same way. A head attends to the tokens of the layer's
/// window ([`super::Mask::Sliding`]) and, in layers with [`Entries`], to entries that each stand
/// for several tokens; one softmax over both, with a sink ([`super::Attention::sinks`]). What it
/// sums up is rotated back at the query's position. Heads are projected in groups, each by a matrix
/// of its own (`o_a_proj`), and what all groups give by one more (`o_b_proj`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Compressed {
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
    /// What chooses entries in the layers that say so ([`Entries::chosen`]). Its keys are made as
    /// entries are, with weights of their own.
    #[serde(rename = "indexer", default, skip_serializing_if = "Option::is_none")]
    pub index: Option<Index>,
}

/// Entries of one layer: each stands for `every` consecutive tokens.
///
/// Of each token there are numbers `c` and `z` as wide as a head; an entry is the sum of its tokens'
/// `softmax(z + position_bias) · c`, element by element, normalised, its last part rotated at the
/// position of its first token. A query sees the entries whose last token is not after its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entries {
    /// Tokens of an entry.
    #[serde(rename = "compression_ratio")]
    pub every: u32,
    /// Whether an entry also stands for as many tokens before its own, for which there are numbers
    /// `c` and `z` apart (the first half of what is projected), and whether a query attends only to
    /// the entries that the index chooses.
    #[serde(rename = "sparse", default, skip_serializing_if = "is_false")]
    pub chosen: bool,
}
