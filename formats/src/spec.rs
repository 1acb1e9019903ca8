//! The normalised architecture: everything the engine needs to know, resolved once by the
//! converter and written into every manifest. The engine never reads a `config.json`.
//!
//! The canonical JSON of [`Spec`] is part of the weights id. A field that is added later must be
//! skipped while it has its neutral value, or every existing id changes; and it belongs to what a
//! package requires of its reader ([`Spec::features`]), or programs that do not know it pass it over.
//!
//! Names in JSON are those of model configs and papers, and are fixed by the package format.

use serde::{Deserialize, Serialize};

use crate::hex::HexF32;

mod attention;
mod block;
mod block_sparse;
mod compressed_attention;
mod embedding;
mod features;
mod ffn;
mod hyper_connections;
mod linear_attention;
mod mla;
mod moe;
mod norm;
mod rope;
mod short_convolution;

pub use attention::{Attention, GateFunction, HeadGate, PositionScale, QkNorm};
pub use block::Block;
pub use block_sparse::BlockIndexer;
pub use compressed_attention::{CompressedAttention, CompressedKv};
pub use embedding::{Embedding, EmbeddingDense, Pooling};
pub use ffn::{Activation, Ffn};
pub use hyper_connections::HyperConnections;
pub use linear_attention::{LinearAttention, LinearAttentionKind, LinearAttentionMultipliers};
pub use mla::{Indexer, Mla};
pub use moe::{
    ClampedSwiglu, ExpertGroups, GroupScore, Moe, MoeNames, ParallelDense, Renormalise, Router,
    RouterInput, Scores, SharedExpert,
};
pub use norm::{Norm, NormKind};
pub use rope::{LongRope, Rope, RopeStyle};
pub use short_convolution::ShortConvolution;

/// A decoder, as the engine computes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// Name of the rule pack that produced this (`"dense-gqa"`).
    pub rules: String,
    /// `model_type` of the source's config.
    pub model_type: String,
    /// Width of the residual stream.
    pub hidden_size: u32,
    /// Rows of the embedding and of the LM head.
    pub vocab_size: u32,
    /// Longest sequence the model was made for, in tokens.
    pub max_positions: u32,
    /// Every normalisation layer of the blocks and the last one.
    pub norm: Norm,
    /// Attention of every layer.
    pub attention: Attention,
    /// A second form of attention with other heads, of the layers with [`Layer::second_attention`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub second_attention: Option<Attention>,
    /// Rotary embeddings; layers name one by index.
    pub ropes: Vec<Rope>,
    /// Feed-forward part of every layer.
    pub ffn: Ffn,
    /// What differs from layer to layer, in order.
    pub layers: Vec<Layer>,
    /// Whether the LM head is the embedding.
    pub tied_embeddings: bool,
    /// Norms and residual connections of every layer.
    #[serde(default = "Block::pre_norm", skip_serializing_if = "Block::is_pre_norm")]
    pub block: Block,
    /// Factor on embeddings.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embedding_scale: Option<HexF32>,
    /// Whether embeddings are normalised by the model's norm, which has no gains then.
    #[serde(default, skip_serializing_if = "is_false")]
    pub embedding_norm: bool,
    /// Whether the LM head has a bias.
    #[serde(default, skip_serializing_if = "is_false")]
    pub lm_head_bias: bool,
    /// Factor on logits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logit_scale: Option<HexF32>,
    /// Logits become `cap · tanh(logit / cap)`, after the factor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logit_softcap: Option<HexF32>,
    /// Mixture of experts in place of the feed-forward part of some layers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moe: Option<Moe>,
    /// Multi-head latent attention in place of grouped-query attention.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mla: Option<Mla>,
    /// Sliding-window attention with compressed KV entries in place of grouped-query attention.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compressed_attention: Option<CompressedAttention>,
    /// Linear attention in place of attention in some layers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub linear_attention: Option<LinearAttention>,
    /// Short convolutions in place of attention in some layers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub short_convolution: Option<ShortConvolution>,
    /// Hyper-connections: several residual streams in place of one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hyper_connections: Option<HyperConnections>,
    /// What makes an embedding of a text; absent in models that were not trained for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embedding: Option<Embedding>,
}

impl Spec {
    /// Why the context is shorter than the model's own: packages made before the sparse-attention
    /// indexer was read end where it would start to select keys.
    #[must_use]
    pub fn shortened(&self) -> Option<&'static str> {
        const INDEXED: [&str; 2] = ["deepseek_v32", "glm_moe_dsa"];
        let without = self.mla.as_ref().is_some_and(|mla| mla.indexer.is_none());
        (without && INDEXED.contains(&self.model_type.as_str())).then_some(
            "its package was made without the indexer of its attention: convert the model again \
             for longer contexts",
        )
    }

    /// Whether tokens see those after them, so that nothing can be generated.
    #[must_use]
    pub fn is_bidirectional(&self) -> bool {
        self.layers.iter().any(|layer| layer.mask.is_bidirectional())
    }

    /// Whether some layers carry a recurrent state, which is not in the paged KV cache.
    #[must_use]
    pub const fn has_states(&self) -> bool {
        self.linear_attention.is_some() || self.short_convolution.is_some()
    }

    /// Width of the activations between layers: all residual streams.
    #[must_use]
    pub fn residual_width(&self) -> usize {
        let streams = self.hyper_connections.as_ref().map_or(1, |streams| streams.expansion_rate);
        streams as usize * self.hidden_size as usize
    }

    /// Whether a pipeline stage may begin at a layer: not where it reuses the top-k indices of an
    /// earlier layer, nor where it adds the output of an earlier layer's shortcut-connected experts.
    #[must_use]
    pub fn may_begin(&self, layer: usize) -> bool {
        let shortcut = self.moe.as_ref().is_some_and(|moe| moe.shortcut);
        let adds = shortcut && layer.checked_sub(1).is_some_and(|before| self.layers[before].moe);
        !adds && !self.layers[layer].reuses_top_k
    }

    /// Grouped-query attention of a layer.
    #[must_use]
    pub fn attention_of(&self, layer: usize) -> &Attention {
        match &self.second_attention {
            Some(second) if self.layers[layer].second_attention => second,
            _ => &self.attention,
        }
    }
}

/// For fields that are skipped while they are false.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_false(flag: &bool) -> bool {
    !*flag
}

/// What one layer has of its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of a published model")]
pub struct Layer {
    /// Which keys a query sees.
    pub mask: Mask,
    /// Index into [`Spec::ropes`]; absent for layers without position embedding.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rope: Option<u32>,
    /// Whether it has experts ([`Spec::moe`]).
    #[serde(default, skip_serializing_if = "is_false")]
    pub moe: bool,
    /// Whether it has linear attention ([`Spec::linear_attention`]).
    #[serde(default, skip_serializing_if = "is_false")]
    pub linear_attention: bool,
    /// Whether attention runs in parallel with its linear attention: both read the same input, and
    /// their outputs are added.
    #[serde(default, skip_serializing_if = "is_false")]
    pub parallel_attention: bool,
    /// Whether it has a short convolution ([`Spec::short_convolution`]).
    #[serde(default, skip_serializing_if = "is_false")]
    pub short_convolution: bool,
    /// Whether it reuses the top-k indices of the layer before it in place of its own
    /// ([`Mla::indexer`]).
    #[serde(default, skip_serializing_if = "is_false")]
    pub reuses_top_k: bool,
    /// Whether it has block-sparse attention ([`Attention::block_sparse`]).
    #[serde(default, skip_serializing_if = "is_false")]
    pub block_sparse: bool,
    /// Whether its attention is [`Spec::second_attention`].
    #[serde(default, skip_serializing_if = "is_false")]
    pub second_attention: bool,
    /// Compressed KV entries ([`Spec::compressed_attention`]); absent where it attends to its window
    /// alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compressed_kv: Option<CompressedKv>,
    /// Whether it has hash routing: a table selects the experts of a token id (`gate.tid2eid`,
    /// `[vocab_size, top_k]`), and the router only weighs them.
    #[serde(default, skip_serializing_if = "is_false")]
    pub hash_routing: bool,
    /// Whether it has attention alone, or a feed-forward part alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub only: Option<LayerPart>,
    /// Of its experts, largest `silu(gate)` and largest magnitude of `up`.
    #[serde(rename = "expert_swiglu_limit", default, skip_serializing_if = "Option::is_none")]
    pub clamp: Option<HexF32>,
    /// The same of its dense feed-forward part or shared expert.
    #[serde(rename = "dense_swiglu_limit", default, skip_serializing_if = "Option::is_none")]
    pub dense_clamp: Option<HexF32>,
}

impl Layer {
    /// A layer with attention to all keys, a dense feed-forward part and the first rotary
    /// embedding.
    #[must_use]
    pub const fn plain() -> Self {
        Self {
            mask: Mask::Full,
            rope: Some(0),
            moe: false,
            linear_attention: false,
            parallel_attention: false,
            short_convolution: false,
            reuses_top_k: false,
            block_sparse: false,
            second_attention: false,
            compressed_kv: None,
            hash_routing: false,
            only: None,
            clamp: None,
            dense_clamp: None,
        }
    }

    /// Whether it carries a recurrent state.
    #[must_use]
    pub const fn has_state(&self) -> bool {
        self.linear_attention || self.short_convolution
    }

    /// Whether it has attention to keys.
    #[must_use]
    pub fn attends(&self) -> bool {
        (self.parallel_attention || !self.has_state()) && self.only != Some(LayerPart::FeedForward)
    }
}

/// A part of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LayerPart {
    /// Attention or linear attention.
    Attention,
    /// The feed-forward part.
    FeedForward,
}

/// Which keys a query sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mask {
    /// Every key up to the query's own position.
    Full,
    /// Keys with `query − key < window`.
    Sliding(u32),
    /// Keys of the query's own chunk: `query / chunk = key / chunk`.
    Chunked(u32),
    /// Every key of the sequence, later ones too.
    Bidirectional,
    /// Keys with `|query − key| < window`.
    BidirectionalSliding(u32),
}

impl Mask {
    /// Whether a query sees keys after its own position: a sequence is then computed in one step.
    #[must_use]
    pub const fn is_bidirectional(self) -> bool {
        matches!(self, Self::Bidirectional | Self::BidirectionalSliding(_))
    }
}
