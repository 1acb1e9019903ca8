//! The normalised architecture: everything the engine needs to know, resolved once by the
//! converter and written into every manifest. The engine never reads a `config.json`.
//!
//! The canonical JSON of [`Spec`] is part of the weights id. A field that is added later must be
//! skipped while it has its neutral value, or every existing id changes.

use serde::{Deserialize, Serialize};

use crate::hex::HexF32;

/// A decoder, as the engine computes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// Name of the rule pack that produced this (`"dense-gqa"`).
    pub rules: String,
    /// `model_type` of the source's config.
    pub model_type: String,
    /// Width of the residual stream.
    pub hidden_size: u32,
    /// Rows of the embedding and of the output head.
    pub vocab_size: u32,
    /// Longest sequence the model was made for, in tokens.
    pub max_positions: u32,
    /// Every normalisation layer of the blocks and the last one.
    pub norm: Norm,
    /// Attention of every layer.
    pub attention: Attention,
    /// Rotary embeddings; layers name one by index.
    pub ropes: Vec<Rope>,
    /// Feed-forward part of every layer.
    pub ffn: Ffn,
    /// What differs from layer to layer, in order.
    pub layers: Vec<Layer>,
    /// Whether the output head is the embedding.
    pub tied_embeddings: bool,
}

/// Normalisation of hidden vectors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Norm {
    /// The formula.
    pub kind: NormKind,
    /// Added to the mean of squares (`rms_norm_eps`).
    pub eps: HexF32,
}

/// The formula of a [`Norm`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NormKind {
    /// `weight · x / sqrt(mean(x²) + eps)`.
    Rms,
}

/// Grouped-query attention.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attention {
    /// Query heads.
    pub heads: u32,
    /// Key and value heads.
    pub kv_heads: u32,
    /// Width of one head.
    pub head_dim: u32,
    /// Factor on `q · k` before the softmax.
    pub scale: HexF32,
    /// Whether the query, key and value projections have a bias.
    pub qkv_bias: bool,
    /// Whether the output projection has a bias.
    pub o_bias: bool,
    /// Normalisation of queries and keys.
    pub qk_norm: QkNorm,
}

/// Normalisation of queries and keys before the rotary embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QkNorm {
    /// None.
    None,
    /// Each head by itself, with one gain of `head_dim` values for all heads.
    Head,
}

/// A rotary position embedding. Angle of pair `i` at position `p` is `p · inv_freq[i]`, in f32.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rope {
    /// Which elements form a pair.
    pub style: RopeStyle,
    /// Inverse frequencies, one per pair; the first `2 · len` elements of a head are rotated.
    pub inv_freq: Vec<HexF32>,
    /// Factor on cosine and sine.
    pub attention_factor: HexF32,
}

/// How a head's elements pair up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RopeStyle {
    /// Element `i` with element `i + dim/2` (`rotate_half`).
    Half,
}

/// A dense feed-forward part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ffn {
    /// Inner width.
    pub size: u32,
    /// What stands between the input and output projections.
    pub activation: Activation,
    /// Whether its projections have biases.
    pub bias: bool,
}

/// The non-linearity of a feed-forward part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `silu(gate(x)) · up(x)`.
    SiluGlu,
}

/// What one layer has of its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layer {
    /// Which keys a query sees.
    pub mask: Mask,
    /// Index into [`Spec::ropes`]; absent for layers without position embedding.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rope: Option<u32>,
}

/// Which keys a query sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mask {
    /// Every key up to the query's own position.
    Full,
    /// Keys with `query − key < window`.
    Sliding(u32),
}
