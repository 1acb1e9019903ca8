//! Compressed KV entries (DeepSeek V4: CSA and HCA): distant tokens are attended to through entries,
//! each compressed from several tokens.

use super::{AttentionParams, CompressedKvPart, IndexerInputs, IndexerParams, Qkv, SparseIndexer};

/// Compression of keys and values, and attention to the compressed entries.
pub trait CompressedKv: SparseIndexer {
    /// Takes every row's values and gates and returns the entries, or their index keys, that are
    /// complete with them, `[entries, width]` in the order of the sequences: over an entry's tokens
    /// the sum of `softmax(gate + bias) · value`, element by element.
    fn compress(
        &self,
        inputs: CompressorInputs<'_, Self::Tensor>,
        caches: &mut [&mut Self::Cache],
        params: &CompressorParams<'_, Self::Vector>,
    ) -> Self::Tensor;

    /// [`SparseIndexer::top_k_keys`] among compressed entries: `k` are the index keys that
    /// [`CompressedKv::compress`] returned last, and the layer is counted among those that keep
    /// entries here.
    fn top_k_entries(
        &self,
        inputs: IndexerInputs<'_, Self::Tensor>,
        caches: &mut [&mut Self::Cache],
        params: &IndexerParams<'_>,
    ) -> Self::TopK;

    /// Attention to the last tokens one by one and to compressed entries, in one softmax; keys are
    /// values.
    fn compressed_attention(
        &self,
        entries: CompressedEntries<'_, Self::Tensor, Self::TopK>,
        qkv: Qkv<'_, Self::Tensor>,
        caches: &mut [&mut Self::Cache],
        params: &AttentionParams<'_, Self::Vector>,
    ) -> Self::Tensor;
}

/// What a compressor reads of each row, `[rows, columns]` each.
#[derive(Clone, Copy, Debug)]
pub struct CompressorInputs<'a, T> {
    /// `c`, which is summed up.
    pub values: &'a T,
    /// `z`, of which the softmax is taken.
    pub gates: &'a T,
}

/// The compressor of one layer over the sequences of a step.
#[derive(Debug)]
pub struct CompressorParams<'a, V> {
    /// The layer, counted among those that keep entries here.
    pub layer: usize,
    /// What is made.
    pub part: CompressedKvPart,
    /// Rows of each sequence, in the order of the caches.
    pub lengths: &'a [usize],
    /// The last of them that may be rolled back; empty where none are.
    pub drafts: &'a [usize],
    /// Added to the gates, `[ratio, columns]`.
    pub bias: &'a V,
}

/// The entries that one layer attends to.
#[derive(Debug)]
pub struct CompressedEntries<'a, T, K> {
    /// The layer, counted among those that keep entries here.
    pub layer: usize,
    /// The entries that [`CompressedKv::compress`] returned last.
    pub new: &'a T,
    /// The entries that each row attends to; all whose last token is not after the row's own
    /// without an indexer.
    pub top_k: Option<&'a K>,
    /// Tokens up to a row's own that are attended to one by one.
    pub window: usize,
}
