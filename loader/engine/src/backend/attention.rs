//! Attention over the KV cache.

use shardpack_formats::spec::Mask;

use super::KvCache;

/// Multi-head, grouped-query and multi-query attention.
pub trait Attention: KvCache {
    /// Appends keys and values to the caches, one per sequence, and attends to all keys that the
    /// mask shows: `[rows, heads · head_dim]`.
    fn attention(
        &self,
        qkv: Qkv<'_, Self::Tensor>,
        caches: &mut [&mut Self::Cache],
        params: &AttentionParams<'_, Self::Vector>,
    ) -> Self::Tensor;
}

/// Queries `[rows, heads · head_dim]`, keys and values `[rows, kv_heads · head_dim]`.
#[derive(Clone, Copy, Debug)]
pub struct Qkv<'a, T> {
    /// Queries, rotated.
    pub q: &'a T,
    /// Keys, rotated.
    pub k: &'a T,
    /// Values.
    pub v: &'a T,
}

/// Attention of one layer over the sequences of a step. `V` is the backend's vector.
#[derive(Debug)]
pub struct AttentionParams<'a, V> {
    /// The layer, counted among those that keep keys and values here.
    pub layer: usize,
    /// Rows of each sequence, in the order of the caches; they follow what is cached.
    pub lengths: &'a [usize],
    /// For each query head held here, the key-value head held here that it reads.
    pub q_to_kv: &'a [usize],
    /// Width of a head.
    pub head_dim: usize,
    /// Factor on `q · k`.
    pub scale: f32,
    /// Scores become `cap · tanh(score / cap)` before the mask.
    pub softcap: Option<f32>,
    /// Attention sinks: for each query head held here one more score in the softmax's denominator.
    pub sinks: Option<&'a V>,
    /// Which keys a query sees.
    pub mask: Mask,
}
