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
mod blocks;
mod compressed;
mod convolution;
mod delta;
mod features;
mod ffn;
mod mla;
mod moe;
mod norm;
mod rope;
mod streams;

pub use attention::{Attention, GateFunction, HeadGate, PositionScale, QkNorm};
pub use block::Block;
pub use blocks::BlockIndex;
pub use compressed::{Compressed, Entries};
pub use convolution::Convolution;
pub use delta::{Delta, DeltaFactors, StateRule};
pub use ffn::{Activation, Ffn};
pub use mla::{Index, Mla};
pub use moe::{
    Beside, ClampedSwiglu, ExpertGroups, GroupScore, Moe, MoeNames, Renormalise, Router,
    RouterInput, Scores, SharedExpert,
};
pub use norm::{Norm, NormKind};
pub use rope::{LongRope, Rope, RopeStyle};
pub use streams::Streams;

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
    /// A second form of attention, of the layers that say [`Layer::second`]: theirs has other heads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub second_attention: Option<Attention>,
    /// Rotary embeddings; layers name one by index.
    pub ropes: Vec<Rope>,
    /// Feed-forward part of every layer.
    pub ffn: Ffn,
    /// What differs from layer to layer, in order.
    pub layers: Vec<Layer>,
    /// Whether the output head is the embedding.
    pub tied_embeddings: bool,
    /// How the parts of every layer stand around the residual stream.
    #[serde(default = "Block::pre_norm", skip_serializing_if = "Block::is_pre_norm")]
    pub block: Block,
    /// Factor on embeddings.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embedding_scale: Option<HexF32>,
    /// Whether embeddings are normalised by the model's norm, which has no gains then.
    #[serde(default, skip_serializing_if = "is_false")]
    pub embedding_norm: bool,
    /// Whether the output head has a bias.
    #[serde(rename = "lm_head_bias", default, skip_serializing_if = "is_false")]
    pub head_bias: bool,
    /// Factor on logits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logit_scale: Option<HexF32>,
    /// Logits become `cap · tanh(logit / cap)`, after the factor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logit_softcap: Option<HexF32>,
    /// Experts in place of the feed-forward part of some layers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moe: Option<Moe>,
    /// Attention over a latent in place of grouped-query attention.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mla: Option<Mla>,
    /// Attention to near tokens and to entries of far ones in place of grouped-query attention.
    #[serde(rename = "compressed_attention", default, skip_serializing_if = "Option::is_none")]
    pub compressed: Option<Compressed>,
    /// Linear attention in place of attention in some layers.
    #[serde(rename = "linear_attention", default, skip_serializing_if = "Option::is_none")]
    pub delta: Option<Delta>,
    /// Short convolutions in place of attention in some layers.
    #[serde(rename = "short_convolution", default, skip_serializing_if = "Option::is_none")]
    pub convolution: Option<Convolution>,
    /// Several residual streams in place of one.
    #[serde(rename = "hyper_connections", default, skip_serializing_if = "Option::is_none")]
    pub streams: Option<Streams>,
}

impl Spec {
    /// Why sequences are shorter than the model's own: its package was made when what chooses its
    /// keys was not read yet, so they end where a choice would begin.
    #[must_use]
    pub fn shortened(&self) -> Option<&'static str> {
        const INDEXED: [&str; 2] = ["deepseek_v32", "glm_moe_dsa"];
        let without = self.mla.as_ref().is_some_and(|mla| mla.index.is_none());
        (without && INDEXED.contains(&self.model_type.as_str())).then_some(
            "its package was made without the indexer of its attention: convert the model again \
             for longer contexts",
        )
    }

    /// Whether some layers carry a state from token to token, of which pages hold nothing.
    #[must_use]
    pub const fn has_states(&self) -> bool {
        self.delta.is_some() || self.convolution.is_some()
    }

    /// Width of what goes from layer to layer: all residual streams.
    #[must_use]
    pub fn residual_width(&self) -> usize {
        let streams = self.streams.as_ref().map_or(1, |streams| streams.count);
        streams as usize * self.hidden_size as usize
    }

    /// Whether a pipeline may be cut before a layer: not where it goes by the keys that an earlier one
    /// chose, nor where it adds what an earlier one's experts gave.
    #[must_use]
    pub fn may_begin(&self, layer: usize) -> bool {
        let deferred = self.moe.as_ref().is_some_and(|moe| moe.deferred);
        let adds = deferred && layer.checked_sub(1).is_some_and(|before| self.layers[before].moe);
        !adds && !self.layers[layer].shares_keys
    }

    /// Grouped-query attention of a layer.
    #[must_use]
    pub fn attention_of(&self, layer: usize) -> &Attention {
        match &self.second_attention {
            Some(second) if self.layers[layer].second => second,
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
    /// Whether it has linear attention ([`Spec::delta`]).
    #[serde(rename = "linear_attention", default, skip_serializing_if = "is_false")]
    pub delta: bool,
    /// Whether attention stands beside its linear attention: both read the same, and what they give
    /// is added up.
    #[serde(rename = "parallel_attention", default, skip_serializing_if = "is_false")]
    pub both: bool,
    /// Whether it has a short convolution ([`Spec::convolution`]).
    #[serde(rename = "short_convolution", default, skip_serializing_if = "is_false")]
    pub convolution: bool,
    /// Whether it attends to the keys that the layer before it attends to, and chooses none
    /// ([`Mla::index`]).
    #[serde(rename = "reuses_top_k", default, skip_serializing_if = "is_false")]
    pub shares_keys: bool,
    /// Whether it attends to the blocks of keys that its index chooses ([`Attention::blocks`]).
    #[serde(rename = "block_sparse", default, skip_serializing_if = "is_false")]
    pub chooses_blocks: bool,
    /// Whether its attention is [`Spec::second_attention`].
    #[serde(rename = "second_attention", default, skip_serializing_if = "is_false")]
    pub second: bool,
    /// Entries of far tokens ([`Spec::compressed`]); absent where it attends to its window alone.
    #[serde(rename = "compressed_kv", default, skip_serializing_if = "Option::is_none")]
    pub entries: Option<Entries>,
    /// Whether a table says which experts a token goes to (`gate.tid2eid`, `[vocab_size, top_k]`);
    /// the router weighs them alone.
    #[serde(rename = "hash_routing", default, skip_serializing_if = "is_false")]
    pub experts_by_token: bool,
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
            delta: false,
            both: false,
            convolution: false,
            shares_keys: false,
            chooses_blocks: false,
            second: false,
            entries: None,
            experts_by_token: false,
            only: None,
            clamp: None,
            dense_clamp: None,
        }
    }

    /// Whether it carries a state from token to token.
    #[must_use]
    pub const fn has_state(&self) -> bool {
        self.delta || self.convolution
    }

    /// Whether it has attention to keys.
    #[must_use]
    pub fn attends(&self) -> bool {
        (self.both || !self.has_state()) && self.only != Some(LayerPart::FeedForward)
    }
}

/// A part of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LayerPart {
    /// What looks at other tokens.
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
}
