//! Sparse attention by an indexer (DeepSeek Sparse Attention): each query attends to the `top_k`
//! keys with the highest index scores.

use super::{AttentionParams, KvCache, Qkv};

/// The indexer of sparse attention, and attention to the keys that it selects.
pub trait SparseIndexer: KvCache {
    /// For each row of a step the indices of the keys that it attends to.
    type TopK: Send;

    /// Appends the indexer's keys to the caches, one per sequence, and selects for each row the
    /// `top_k` keys up to its own with the highest score `Σ weight · max(q · k, 0)`; all where
    /// there are no more. A sequence's selection depends on nothing else, and is the same on every
    /// rank.
    fn top_k_keys(
        &self,
        inputs: IndexerInputs<'_, Self::Tensor>,
        caches: &mut [&mut Self::Cache],
        params: &IndexerParams<'_>,
    ) -> Self::TopK;

    /// Appends keys, which are values too, to the caches and attends to the selected ones. Rows
    /// that attend to all keys have the results of dense attention.
    fn sparse_attention(
        &self,
        top_k: &Self::TopK,
        qkv: Qkv<'_, Self::Tensor>,
        caches: &mut [&mut Self::Cache],
        params: &AttentionParams<'_, Self::Vector>,
    ) -> Self::Tensor;
}

/// What an indexer reads of each row.
#[derive(Clone, Copy, Debug)]
pub struct IndexerInputs<'a, T> {
    /// Index queries `[rows, heads · width]`, rotated.
    pub q: &'a T,
    /// Index keys `[rows, width]`, rotated.
    pub k: &'a T,
    /// The weight of each index query, `[rows, heads]`.
    pub weights: &'a T,
}

/// The indexer of one layer over the sequences of a step.
#[derive(Clone, Copy, Debug)]
pub struct IndexerParams<'a> {
    /// The layer, counted among those that keep keys of an indexer here.
    pub layer: usize,
    /// Rows of each sequence, in the order of the caches; they follow what is cached.
    pub lengths: &'a [usize],
    /// Index queries of a row.
    pub heads: usize,
    /// Their width, and that of the keys.
    pub width: usize,
    /// Keys that are selected.
    pub top_k: usize,
}
