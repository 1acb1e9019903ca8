//! Linear attention: a state per head in place of keys and values.

use shardpack_formats::spec;

use super::KvCache;

/// Linear attention by one of several state updates.
pub trait LinearAttention: KvCache {
    /// Runs the rows of every sequence, `[rows, value_heads · value_dim]`; each cache's state moves
    /// on by its rows.
    fn linear_attention(
        &self,
        inputs: &LinearAttentionInputs<'_, Self::Tensor>,
        caches: &mut [&mut Self::Cache],
        params: &LinearAttentionParams<'_, Self::Tensor, Self::Vector>,
    ) -> Self::Tensor;
}

/// What linear attention reads of each row.
#[derive(Clone, Copy, Debug)]
pub struct LinearAttentionInputs<'a, T> {
    /// Queries `[rows, key_heads · key_dim]`.
    pub q: &'a T,
    /// Keys `[rows, key_heads · key_dim]`.
    pub k: &'a T,
    /// Values `[rows, value_heads · value_dim]`.
    pub v: &'a T,
    /// Output gate `[rows, value_heads · value_dim]`.
    pub z: &'a T,
    /// Decay of the state, `[rows, value_heads]`; as wide as the keys in KDA.
    pub a: &'a T,
}

/// Linear attention of one layer over the sequences of a step.
#[derive(Debug)]
pub struct LinearAttentionParams<'a, T, V> {
    /// The layer, counted among those that keep a state here.
    pub layer: usize,
    /// Rows of each sequence, in the order of the caches.
    pub lengths: &'a [usize],
    /// The last of them that may be rolled back; empty where none are.
    pub drafts: &'a [usize],
    /// Key heads held here.
    pub key_heads: usize,
    /// For each value head held here, the key head held here that it reads.
    pub v_to_k: &'a [usize],
    /// Widths and epsilon.
    pub spec: &'a spec::LinearAttention,
    /// Convolutions of queries, keys and values: `[channels, kernel]`.
    pub convolutions: [&'a V; 3],
    /// Their biases, where they have some.
    pub conv_biases: Option<[&'a V; 3]>,
    /// `[value_heads]`.
    pub a_log: &'a V,
    /// As wide as `a`.
    pub dt_bias: &'a V,
    /// How the state moves on.
    pub update: StateUpdate<'a, T, V>,
}

/// How the state of linear attention moves on with each token.
#[derive(Debug)]
pub enum StateUpdate<'a, T, V> {
    /// Gated `DeltaNet`: the state fades by one factor per head and moves by the delta rule.
    GatedDeltaNet {
        /// Strength of the change, `[rows, value_heads]`.
        beta: &'a T,
        /// Gain of the result's norm, one for each element of a head.
        norm: &'a V,
    },
    /// Kimi Delta Attention: the state fades by one factor per channel of a key.
    Kda {
        /// Strength of the change, `[rows, value_heads]`.
        beta: &'a T,
        /// Gain of the result's norm, one for each element of a head.
        norm: &'a V,
    },
    /// Mamba-2.
    Mamba2 {
        /// `D`, how much of a value the result has, `[value_heads]`.
        skip: &'a V,
        /// Gain of the result's norm, one for each element of all heads; absent where the result is
        /// not normalised here.
        norm: Option<&'a V>,
    },
}
