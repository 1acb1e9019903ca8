//! Attention to blocks of keys that an index chooses.

use serde::{Deserialize, Serialize};

/// What chooses blocks of keys (`MiniMax` Sparse Attention).
///
/// In some layers ([`super::Layer::chooses_blocks`]) each token has one key more
/// (`indexer.k_proj`), and for each key-value head one short query (`indexer.q_proj`); both are
/// normalised as heads are (`indexer.q_norm`, `indexer.k_norm`) and rotated as they are. A block's
/// score is the largest `q · k` of its keys that the query sees, and the query heads of a key-value
/// head attend to the `top_k` blocks of the largest scores. The query's own block and the
/// `local − 1` before it come first, whatever their scores.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockIndex {
    /// Tokens of a block, counted from a sequence's beginning.
    #[serde(rename = "block_size")]
    pub tokens: u32,
    /// Blocks that a query attends to.
    pub top_k: u32,
    /// Blocks up to the query's own that it attends to in any case; at least one.
    #[serde(rename = "local_blocks")]
    pub local: u32,
    /// Width of a short query and of the key.
    #[serde(rename = "head_dim")]
    pub width: u32,
}
