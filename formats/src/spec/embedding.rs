//! What an embedding model makes of its hidden vectors.

use serde::{Deserialize, Serialize};

/// From a text's hidden vectors to its embedding, as sentence-transformers' modules say it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Embedding {
    /// Which vectors count.
    pub pooling: Pooling,
    /// Dense layers after the pooling, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dense: Vec<EmbeddingDense>,
    /// Whether the result is scaled to length one.
    #[serde(default, skip_serializing_if = "super::is_false")]
    pub normalize: bool,
}

/// How one vector is made of those of all tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pooling {
    /// The last token's.
    Last,
    /// The mean of all.
    Mean,
    /// The first token's.
    Cls,
}

/// A dense layer after the pooling.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EmbeddingDense {
    /// Width of its input.
    pub inputs: u32,
    /// Width of its output.
    pub outputs: u32,
    /// Whether it has a bias.
    #[serde(default, skip_serializing_if = "super::is_false")]
    pub bias: bool,
    /// Whether `tanh` follows; nothing otherwise.
    #[serde(default, skip_serializing_if = "super::is_false")]
    pub tanh: bool,
}

impl Embedding {
    /// Of a model that was not trained for embeddings: the last token's vector, which has seen the
    /// whole text.
    pub const UNTRAINED: Self = Self { pooling: Pooling::Last, dense: Vec::new(), normalize: true };
}
