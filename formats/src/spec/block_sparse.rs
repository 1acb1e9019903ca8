//! Block-sparse attention.

use serde::{Deserialize, Serialize};

/// Indexer of block-sparse attention (`MiniMax` Sparse Attention): it selects the top-k blocks of
/// keys.
///
/// In some layers ([`super::Layer::block_sparse`]) each token has an indexer key
/// (`indexer.k_proj`), and for each KV head one indexer query (`indexer.q_proj`); both are
/// normalised as heads are (`indexer.q_norm`, `indexer.k_norm`) and rotated as they are. A block's
/// score is the largest `q · k` of its keys that the query sees, and the query heads of a key-value
/// head attend to the `top_k` blocks of the largest scores. The query's own block and the
/// `local − 1` before it come first, whatever their scores.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockIndexer {
    /// Tokens of a block, counted from a sequence's beginning.
    #[serde(rename = "block_size")]
    pub tokens: u32,
    /// Blocks that a query attends to.
    pub top_k: u32,
    /// Blocks up to the query's own that it attends to in any case; at least one.
    #[serde(rename = "local_blocks")]
    pub local: u32,
    /// Width of an indexer query and of the key.
    #[serde(rename = "head_dim")]
    pub width: u32,
}
