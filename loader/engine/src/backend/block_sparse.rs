//! Block-sparse attention: each key-value head attends to the `top_k` blocks of keys with the highest
//! index scores.

use super::{AttentionParams, KvCache, Qkv};

/// The indexer of block-sparse attention, and attention to the blocks that it selects.
pub trait BlockSparseAttention: KvCache {
    /// For each row of a step and each key-value head the blocks of keys that it attends to.
    type TopKBlocks: Send;

    /// Appends the indexer's keys to the caches and selects for each row and each key-value head the
    /// `top_k` blocks whose best key up to the row's own has the highest `q · k`; all where there
    /// are no more.
    fn top_k_blocks(
        &self,
        inputs: BlockIndexerInputs<'_, Self::Tensor>,
        caches: &mut [&mut Self::Cache],
        params: &BlockIndexerParams<'_>,
    ) -> Self::TopKBlocks;

    /// Appends keys and values to the caches and attends to the selected blocks. Rows that attend
    /// to all blocks have the results of dense attention.
    fn block_sparse_attention(
        &self,
        top_k: &Self::TopKBlocks,
        qkv: Qkv<'_, Self::Tensor>,
        caches: &mut [&mut Self::Cache],
        params: &AttentionParams<'_, Self::Vector>,
    ) -> Self::Tensor;
}

/// What a block indexer reads of each row.
#[derive(Clone, Copy, Debug)]
pub struct BlockIndexerInputs<'a, T> {
    /// Index queries `[rows, heads · width]`, rotated.
    pub q: &'a T,
    /// Index keys `[rows, width]`, rotated.
    pub k: &'a T,
}

/// The block indexer of one layer over the sequences of a step.
#[derive(Clone, Copy, Debug)]
pub struct BlockIndexerParams<'a> {
    /// The layer, counted among those that keep keys of an indexer here.
    pub layer: usize,
    /// Rows of each sequence, in the order of the caches; they follow what is cached.
    pub lengths: &'a [usize],
    /// Index queries of a row: one for each key-value head held here.
    pub heads: usize,
    /// Their width, and that of the keys.
    pub width: usize,
    /// Tokens of a block: a divisor of [`TOKENS_PER_PAGE`](shardpack_formats::memory::TOKENS_PER_PAGE).
    pub block_tokens: usize,
    /// Blocks that are selected.
    pub top_k: usize,
    /// Blocks up to a row's own that are selected in any case.
    pub local: usize,
}
