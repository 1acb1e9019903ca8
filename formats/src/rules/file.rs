//! The form of a rule file, as TOML gives it.

use std::{collections::BTreeMap, iter};

use serde::{Deserialize, Deserializer, Serialize, de};

use super::{
    from::FromRule,
    mlx::MlxRules,
    name::NamePattern,
    parts::{
        CompressedAttentionRules, HyperConnectionRules, LinearAttentionRules, MlaRules, MoeRules,
        ShortConvolutionRules,
    },
};
use crate::{
    expr::Expr,
    spec::{GateFunction, NormKind},
};

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PackFile {
    pub(crate) schema: u32,
    pub(crate) id: String,
    /// Points that nobody has decided.
    #[serde(default)]
    pub(crate) todo: Vec<String>,
    /// A compiled-in pack whose `strip`, `ignore` and `config.ignored` hold here too.
    pub(crate) base: Option<String>,
    #[serde(default)]
    pub(crate) strip: Vec<StripRule>,
    /// Layers beyond the last one of the model are not part of it.
    pub(crate) surplus_layers: Option<SurplusRule>,
    #[serde(default)]
    pub(crate) ignore: Vec<IgnoreRule>,
    pub(crate) config: ConfigKeys,
    #[serde(default, rename = "let")]
    pub(crate) lets: BTreeMap<String, Expr>,
    #[serde(default)]
    pub(crate) require: Vec<RequireRule>,
    #[serde(default)]
    pub(crate) families: BTreeMap<String, Family>,
    /// What mlx-lm changes in the values of these checkpoints.
    pub(crate) mlx: Option<MlxRules>,
    pub(crate) spec: SpecRules,
    pub(crate) axes: BTreeMap<String, AxisRule>,
    pub(crate) tensors: Vec<TensorRule>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct StripRule {
    pub(crate) from: String,
    pub(crate) to: String,
    /// Only if a name begins so.
    pub(crate) seen: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct IgnoreRule {
    /// `*` stands for any characters.
    pub(crate) pattern: String,
    pub(crate) reason: String,
}

/// Tensors of layers that the model does not run, such as multi-token prediction (MTP) layers.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SurplusRule {
    /// What stands before the layer's index.
    pub(crate) prefix: String,
    pub(crate) reason: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ConfigKeys {
    pub(crate) used: Vec<String>,
    #[serde(default)]
    pub(crate) ignored: Vec<String>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RequireRule {
    pub(crate) that: Expr,
    pub(crate) message: String,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Family {
    pub(crate) architectures: Vec<String>,
    /// The family of this pack whose model it is, once its tensors have their normalised names:
    /// packages are of that family.
    pub(crate) same_as: Option<String>,
    /// `model_type`s of wholes whose text model it is, whatever that calls itself.
    #[serde(default)]
    pub(crate) within: Vec<String>,
    /// Tensors of this family that are not needed.
    #[serde(default)]
    pub(crate) ignore: Vec<IgnoreRule>,
    /// Values of keys that a configuration does not have, which is not the same as null.
    #[serde(default)]
    pub(crate) absent: BTreeMap<String, Expr>,
    /// Keys of a position embedding's object that expressions read, or that change nothing.
    #[serde(default)]
    pub(crate) rope: Vec<String>,
    /// Keys under the names that transformers 5 saves them by, and the publishers' own.
    #[serde(default)]
    pub(crate) renamed: BTreeMap<String, String>,
    /// Sizes of single layers that are keys of their own in the publishers' configurations.
    pub(crate) per_layer: Option<PerLayerKeys>,
    /// Other names for kinds of rope scaling, as older configurations have them.
    #[serde(default)]
    pub(crate) rope_kinds: BTreeMap<String, String>,
    #[serde(default)]
    pub(crate) used: Vec<String>,
    #[serde(default)]
    pub(crate) ignored: Vec<String>,
    #[serde(default, rename = "let")]
    pub(crate) lets: BTreeMap<String, Expr>,
    #[serde(default)]
    pub(crate) require: Vec<RequireRule>,
}

/// `per_layer_config` for the layers of one kind, as keys of the whole configuration.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PerLayerKeys {
    /// Their kind in `layer_types`.
    pub(crate) kind: String,
    /// A layer's key, and the configuration's.
    pub(crate) keys: BTreeMap<String, String>,
}

/// Expressions for the fields of [`crate::Spec`].
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SpecRules {
    pub(crate) layers: Expr,
    pub(crate) hidden_size: Expr,
    pub(crate) vocab_size: Expr,
    pub(crate) max_positions: Expr,
    pub(crate) tied_embeddings: Expr,
    /// Factor on embeddings; null and absent for none.
    pub(crate) embedding_scale: Option<Expr>,
    /// Whether embeddings are normalised.
    #[serde(default)]
    pub(crate) embedding_norm: bool,
    /// Whether the output head has a bias; absent: no.
    pub(crate) head_bias: Option<Expr>,
    /// Factor on logits; null and absent for none.
    pub(crate) logit_scale: Option<Expr>,
    /// Cap of logits; null and absent for none.
    pub(crate) logit_softcap: Option<Expr>,
    pub(crate) norm: NormRules,
    /// Absent: norms before both parts.
    pub(crate) block: Option<BlockRules>,
    pub(crate) attention: AttentionRules,
    /// Of the layers whose `second` is true.
    pub(crate) second_attention: Option<AttentionRules>,
    /// Of the layers whose `rope` is true or 0.
    pub(crate) rope: RopeRules,
    /// Of the layers whose `rope` is 1.
    pub(crate) local_rope: Option<RopeRules>,
    pub(crate) ffn: FfnRules,
    pub(crate) moe: Option<MoeRules>,
    pub(crate) mla: Option<MlaRules>,
    pub(crate) compressed: Option<CompressedAttentionRules>,
    pub(crate) delta: Option<LinearAttentionRules>,
    pub(crate) convolution: Option<ShortConvolutionRules>,
    pub(crate) streams: Option<HyperConnectionRules>,
    pub(crate) layer: LayerRules,
}

impl SpecRules {
    /// Everything that is the same in all layers.
    pub(super) fn expressions(&self) -> impl Iterator<Item = &Expr> {
        let ffn = &self.ffn;
        let ropes = [Some(&self.rope), self.local_rope.as_ref()].into_iter().flatten();
        let attention = iter::once(&self.attention).chain(&self.second_attention);
        [
            &self.layers,
            &self.hidden_size,
            &self.vocab_size,
            &self.max_positions,
            &self.tied_embeddings,
            &self.norm.eps,
            &ffn.size,
            &ffn.activation,
            &ffn.bias,
        ]
        .into_iter()
        .chain(
            [&self.embedding_scale, &self.head_bias, &self.logit_scale, &self.logit_softcap]
                .into_iter()
                .flatten(),
        )
        .chain(self.block.iter().flat_map(|block| &block.parallel))
        .chain(self.block.iter().flat_map(|block| &block.residual_scale))
        .chain(
            [&ffn.gate_scale, &ffn.out_scale, &ffn.clamped_alpha, &ffn.clamped_limit]
                .into_iter()
                .flatten(),
        )
        .chain(self.convolution.iter().map(|it| &it.kernel))
        .chain(attention.flat_map(AttentionRules::expressions))
        .chain(ropes.flat_map(RopeRules::expressions))
    }
}

impl AttentionRules {
    fn expressions(&self) -> impl Iterator<Item = &Expr> {
        let positions = self.position_scale.iter();
        let gate = self.head_gate.iter().flat_map(HeadGateRules::expressions);
        [&self.heads, &self.kv_heads, &self.head_dim, &self.qkv_bias, &self.o_bias, &self.qk_norm]
            .into_iter()
            .chain(
                [
                    &self.scale,
                    &self.softcap,
                    &self.sinks,
                    &self.sinks_in,
                    &self.gated,
                    &self.value_dim,
                    &self.value_scale,
                    &self.values_are_keys,
                    &self.value_norm,
                    &self.limit,
                ]
                .into_iter()
                .flatten(),
            )
            .chain(positions.flat_map(|scale| [&scale.beta, &scale.original]))
            .chain(gate)
            .chain(self.blocks.iter().flat_map(BlockIndexerRules::expressions))
    }
}

impl RopeRules {
    fn expressions(&self) -> impl Iterator<Item = &Expr> {
        [&self.style, &self.width, &self.default_theta].into_iter().chain(
            [&self.theta, &self.original, &self.attention_factor, &self.scaled, &self.exists]
                .into_iter()
                .flatten(),
        )
    }
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NormRules {
    pub(crate) kind: NormKind,
    pub(crate) eps: Expr,
    /// Whether gains are one more than what is stored.
    #[serde(default)]
    pub(crate) plus_one: bool,
    #[serde(default)]
    pub(crate) bias: bool,
    /// Whether there are no gains.
    #[serde(default)]
    pub(crate) plain: bool,
}

/// Modules of the norms within a layer, and how its parts stand to each other.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct BlockRules {
    pub(crate) before_attention: Option<String>,
    pub(crate) after_attention: Option<String>,
    pub(crate) before_ffn: Option<String>,
    pub(crate) after_ffn: Option<String>,
    /// Whether both parts read the same state; absent: no.
    pub(crate) parallel: Option<Expr>,
    /// A tensor by which the residual stream is multiplied after each layer.
    pub(crate) layer_scale: Option<String>,
    /// Null and absent for none.
    pub(crate) residual_scale: Option<Expr>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct AttentionRules {
    pub(crate) heads: Expr,
    pub(crate) kv_heads: Expr,
    pub(crate) head_dim: Expr,
    /// Absent: `head_dim` to the power of minus one half.
    pub(crate) scale: Option<Expr>,
    pub(crate) qkv_bias: Expr,
    pub(crate) o_bias: Expr,
    /// `'none'`, `'head'` or `'full'`.
    pub(crate) qk_norm: Expr,
    /// Cap of scores; null and absent for none.
    pub(crate) softcap: Option<Expr>,
    /// Whether query heads have sinks; absent: no.
    pub(crate) sinks: Option<Expr>,
    /// Their tensor's name; null and absent for `sinks`.
    pub(crate) sinks_in: Option<Expr>,
    /// Whether heads have gates; absent: no.
    pub(crate) gated: Option<Expr>,
    pub(crate) position_scale: Option<PositionScaleRules>,
    /// Width of values; null, absent and that of a head for the same.
    pub(crate) value_dim: Option<Expr>,
    /// Factor on values; null and absent for none.
    pub(crate) value_scale: Option<Expr>,
    /// Whether values are keys before their norm; absent: no.
    pub(crate) values_are_keys: Option<Expr>,
    /// Whether values are normalised; absent: no.
    pub(crate) value_norm: Option<Expr>,
    /// Largest magnitude of queries, keys and values; null and absent for none.
    pub(crate) limit: Option<Expr>,
    pub(crate) head_gate: Option<HeadGateRules>,
    /// Read where a layer is block-sparse.
    pub(crate) blocks: Option<BlockIndexerRules>,
}

/// See [`crate::spec::BlockIndexer`].
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct BlockIndexerRules {
    /// Indexer queries, as many as there are KV heads.
    pub(crate) heads: Expr,
    pub(crate) width: Expr,
    pub(crate) tokens: Expr,
    pub(crate) top_k: Expr,
    pub(crate) local: Expr,
}

impl BlockIndexerRules {
    fn expressions(&self) -> [&Expr; 5] {
        [&self.heads, &self.width, &self.tokens, &self.top_k, &self.local]
    }
}

/// See [`crate::spec::HeadGate`].
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct HeadGateRules {
    /// Null for none.
    pub(crate) module: Expr,
    /// Absent: no.
    pub(crate) per_head: Option<Expr>,
    #[serde(default)]
    pub(crate) function: GateFunction,
}

impl HeadGateRules {
    pub(super) fn expressions(&self) -> impl Iterator<Item = &Expr> {
        [Some(&self.module), self.per_head.as_ref()].into_iter().flatten()
    }
}

/// See [`crate::spec::PositionScale`].
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PositionScaleRules {
    /// Null and 0 for none.
    pub(crate) beta: Expr,
    pub(crate) original: Expr,
    #[serde(default)]
    pub(crate) from_one: bool,
    #[serde(default)]
    pub(crate) unrotated: bool,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RopeRules {
    /// `'half'` or `'interleaved'`.
    pub(crate) style: Expr,
    pub(crate) width: Expr,
    pub(crate) default_theta: Expr,
    /// The base, in place of the configuration's `rope_theta`.
    pub(crate) theta: Option<Expr>,
    /// Longest sequence before an extension, in place of what the object says; null for that.
    pub(crate) original: Option<Expr>,
    /// The kind of layers that it is for, where `rope_parameters` has an object for each kind.
    pub(crate) section: Option<String>,
    /// Whether `rope_scaling` holds for it; absent: yes.
    pub(crate) scaled: Option<Expr>,
    /// Whether the model has it; absent: yes.
    pub(crate) exists: Option<Expr>,
    /// Factor on cosine and sine, in place of that of a kind that has one; null and absent for that.
    pub(crate) attention_factor: Option<Expr>,
    /// Whether angles run backwards.
    #[serde(default)]
    pub(crate) backwards: bool,
    /// The width of a head, where it is not that of `attention`.
    #[serde(default)]
    pub(crate) second_heads: bool,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FfnRules {
    pub(crate) size: Expr,
    /// The name of an [`crate::spec::Activation`].
    pub(crate) activation: Expr,
    pub(crate) bias: Expr,
    /// Input and output projection, where they are not `up_proj` and `down_proj`.
    pub(crate) names: Option<[String; 2]>,
    /// Factor on the gate's projection; null and absent for none.
    pub(crate) gate_scale: Option<Expr>,
    /// Factor on the result; null and absent for none.
    pub(crate) out_scale: Option<Expr>,
    /// Alpha and limit of a clamped activation, of shared experts too; null and absent for none.
    pub(crate) clamped_alpha: Option<Expr>,
    pub(crate) clamped_limit: Option<Expr>,
    /// Whether a clamped activation has no offset.
    #[serde(default)]
    pub(crate) clamped_plain: bool,
}

/// Evaluated for every layer.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LayerRules {
    /// Tokens of a sliding window, null for none.
    pub(crate) window: Expr,
    /// Tokens of a chunk within which it sees; null and absent for none.
    pub(crate) chunk: Option<Expr>,
    /// Whether tokens see those after them, too; absent: no.
    pub(crate) bidirectional: Option<Expr>,
    /// Whether the layer has a position embedding; 1 for the local one.
    pub(crate) rope: Expr,
    /// The base of its position embedding; null and absent for that of `spec.rope`.
    pub(crate) theta: Option<Expr>,
    /// Whether it has experts; absent: no.
    pub(crate) moe: Option<Expr>,
    /// Whether it has linear attention; absent: no.
    pub(crate) delta: Option<Expr>,
    /// Whether attention runs in parallel with it; absent: no.
    pub(crate) both: Option<Expr>,
    /// Whether it has a short convolution; absent: no.
    pub(crate) convolution: Option<Expr>,
    /// Whether it reuses the top-k indices of the layer before; absent: no.
    pub(crate) shares_keys: Option<Expr>,
    /// Whether it has block-sparse attention; absent: no.
    pub(crate) chooses_blocks: Option<Expr>,
    /// Whether its attention is of the second form; absent: no.
    pub(crate) second: Option<Expr>,
    /// Compression ratio: tokens of a compressed KV entry; null and absent for none.
    pub(crate) entries_every: Option<Expr>,
    /// Whether an indexer selects its compressed KV entries; absent: no.
    pub(crate) entries_chosen: Option<Expr>,
    /// Whether it has hash routing; absent: no.
    pub(crate) experts_by_token: Option<Expr>,
    /// `'attention'` or `'feed_forward'` where it has that part alone; null and absent for both.
    pub(crate) only: Option<Expr>,
    /// Limit of its experts' inner values; null, 0 and absent for none.
    pub(crate) clamp: Option<Expr>,
    /// Limit of its dense part's or shared expert's; null, 0 and absent for none.
    pub(crate) dense_clamp: Option<Expr>,
}

impl LayerRules {
    pub(super) fn expressions(&self) -> impl Iterator<Item = &Expr> {
        [&self.window, &self.rope].into_iter().chain(
            [
                &self.chunk,
                &self.bidirectional,
                &self.theta,
                &self.moe,
                &self.delta,
                &self.both,
                &self.convolution,
                &self.shares_keys,
                &self.chooses_blocks,
                &self.second,
                &self.entries_every,
                &self.entries_chosen,
                &self.experts_by_token,
                &self.only,
                &self.clamp,
                &self.dense_clamp,
            ]
            .into_iter()
            .flatten(),
        )
    }
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct AxisRule {
    pub(crate) len: Expr,
    pub(crate) unit: Option<Expr>,
    /// Other widths of a unit: those of a value head beside those of a query head.
    #[serde(default)]
    pub(crate) also: Vec<Expr>,
    #[serde(default)]
    pub(crate) align: Align,
    /// The axis whose sharding decides this one's.
    pub(crate) follow: Option<String>,
}

/// What shard boundaries must respect besides units.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Align {
    /// Nothing.
    #[default]
    None,
    /// Quantization groups of the matrices that have this axis as their inputs.
    Group,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TensorRule {
    pub(crate) name: NamePattern,
    pub(crate) shape: Vec<Expr>,
    #[serde(alias = "cut", deserialize_with = "sharding_from_text")]
    pub(crate) shard: ShardingRule,
    pub(crate) role: Role,
    pub(crate) quantize: Option<bool>,
    /// Keeps the source's element type.
    #[serde(default)]
    pub(crate) exact: bool,
    /// How checkpoints store it, the first that is there; by its own name if absent.
    #[serde(default)]
    pub(crate) from: Vec<FromRule>,
    /// Its name in weight files, if it is another one there.
    pub(crate) stored_as: Option<NamePattern>,
    /// Its dimensions there but the first, if they are others than here.
    pub(crate) stored_inner: Option<Vec<Expr>>,
    #[serde(default)]
    pub(crate) required: Presence,
    pub(crate) rows: Option<String>,
    /// What its values are below, all of them whole and at least 0.
    pub(crate) below: Option<Expr>,
}

/// Whether a tensor exists.
#[derive(Clone, Debug, Default)]
pub(crate) enum Presence {
    #[default]
    Always,
    Maybe,
    Exactly(Expr),
}

impl<'de> Deserialize<'de> for Presence {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let expression = Expr::deserialize(deserializer)?;
        Ok(match expression.text() {
            "true" => Self::Always,
            "false" => Self::Maybe,
            _ => Self::Exactly(expression),
        })
    }
}

/// How a tensor is distributed over the ranks. Shapes are `[out, in]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ShardingRule {
    /// Every rank holds all of it.
    Replicate,
    /// Outputs by this axis.
    Column(String),
    /// Inputs by this axis; what the ranks compute must be summed.
    Row(String),
    /// A vector by this axis.
    Vector(String),
    /// Rows by the axis `vocab`; one rank's rows answer a lookup.
    Vocab,
    /// Only rank 0 holds it: it would count once per rank in a sum.
    Once,
    /// `[experts, out, in]`: outputs of each expert by this axis, or whole experts.
    ExpertColumn(String),
    /// `[experts, out, in]`: inputs of each expert by this axis, or whole experts.
    ExpertRow(String),
    /// `[experts, out]`: a vector of each expert by this axis, or whole experts.
    ExpertVector(String),
    /// `[experts, out]`: only rank 0 holds it, or each rank those of its experts.
    ExpertOnce,
}

/// The axis of whole experts.
pub const EXPERTS_AXIS: &str = "experts";

impl ShardingRule {
    /// The axis along which it is sharded, if it is.
    #[must_use]
    pub fn axis(&self) -> Option<&str> {
        match self {
            Self::Column(axis)
            | Self::Row(axis)
            | Self::Vector(axis)
            | Self::ExpertColumn(axis)
            | Self::ExpertRow(axis)
            | Self::ExpertVector(axis) => Some(axis),
            Self::Vocab => Some("vocab"),
            Self::Replicate | Self::Once | Self::ExpertOnce => None,
        }
    }

    /// Whether its first dimension counts experts.
    #[must_use]
    pub const fn is_expert(&self) -> bool {
        matches!(
            self,
            Self::ExpertColumn(_) | Self::ExpertRow(_) | Self::ExpertVector(_) | Self::ExpertOnce
        )
    }

    /// The dimension that is sharded.
    #[must_use]
    pub const fn dimension(&self, dimensions: usize) -> Option<usize> {
        match self {
            Self::Column(_) | Self::Vector(_) | Self::Vocab => Some(0),
            Self::Row(_) | Self::ExpertRow(_) => Some(dimensions - 1),
            Self::ExpertColumn(_) | Self::ExpertVector(_) => Some(1),
            Self::Replicate | Self::Once | Self::ExpertOnce => None,
        }
    }

    /// Whether its axis runs along the inputs of matrices, through quantization groups.
    #[must_use]
    pub const fn shards_inputs(&self) -> bool {
        matches!(self, Self::Row(_) | Self::ExpertRow(_))
    }

    /// Fewest and most dimensions that the tensor must have.
    pub(crate) const fn dimensions(&self) -> [usize; 2] {
        match self {
            // Further dimensions are parts of a unit: each head's own matrix.
            Self::Column(_) => [2, 3],
            Self::Row(_) | Self::Vocab | Self::ExpertVector(_) | Self::ExpertOnce => [2, 2],
            Self::Vector(_) => [1, 1],
            Self::ExpertColumn(_) | Self::ExpertRow(_) => [3, 3],
            Self::Replicate => [0, 3],
            Self::Once => [1, 3],
        }
    }

    fn parse(text: &str) -> Option<Self> {
        match text {
            "replicate" => return Some(Self::Replicate),
            "vocab" => return Some(Self::Vocab),
            "once" => return Some(Self::Once),
            "expert_once" => return Some(Self::ExpertOnce),
            _ => {}
        }
        let (kind, axis) = text.strip_suffix(')')?.split_once('(')?;
        let axis = axis.to_owned();
        match kind {
            "column" => Some(Self::Column(axis)),
            "row" => Some(Self::Row(axis)),
            "vector" => Some(Self::Vector(axis)),
            "expert_column" => Some(Self::ExpertColumn(axis)),
            "expert_row" => Some(Self::ExpertRow(axis)),
            "expert_vector" => Some(Self::ExpertVector(axis)),
            _ => None,
        }
    }
}

fn sharding_from_text<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<ShardingRule, D::Error> {
    let text = String::deserialize(deserializer)?;
    ShardingRule::parse(&text).ok_or_else(|| {
        de::Error::custom(format!(
            "unknown sharding rule {text:?}; known: replicate, column(axis), row(axis), vector(axis), \
             vocab, once, expert_column(axis), expert_row(axis), expert_vector(axis), expert_once"
        ))
    })
}

/// What a tensor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Rows that are looked up by token.
    Embed,
    /// The matrix that gives logits.
    Head,
    /// Gains of a normalisation.
    Norm,
    /// What is added to a product.
    Bias,
    /// A matrix that vectors are multiplied by.
    Linear,
    /// The router: never quantized, and in the source's element type, because a
    /// selection has no small errors.
    Router,
    /// A matrix whose errors add up, over the heads of an indexer or over the tokens of a
    /// recurrent state that decays: 8 bits at least.
    Indexer,
}

impl Role {
    /// Whether such tensors are quantized unless a rule says otherwise.
    #[must_use]
    pub const fn is_quantized(self) -> bool {
        matches!(self, Self::Embed | Self::Head | Self::Linear | Self::Indexer)
    }
}
