//! What a program has to know to compute an architecture. A program that does not know a key of the
//! document passes over it, so what came after the first version is named beside it.

use super::{
    Activation, Attention, GateFunction, HeadGate, Layer, Mask, Moe, QkNorm, Scores, Spec,
    StateRule,
};

/// Two forms of attention in one model, attention in chunks, values of another width than keys or
/// made of them, gates of heads, norms without gains.
const ATTENTION_FORMS: &str = "attention-forms";

/// Layers of one part, and factors on the residual stream after a layer.
const LAYER_FORMS: &str = "layer-forms";

/// Experts beside a dense part, in a latent, without gates, limited or weighed by their inputs.
const EXPERT_FORMS: &str = "expert-forms";

/// Experts whose gates and inputs are limited without a summand.
const EXPERT_LIMITS: &str = "expert-limits";

/// Norms without gains and of embeddings, limits of heads and of routers, gates by softplus, biases
/// of the output head, `xIELU`, sparse mixers, norms and factors of a block of experts.
const FURTHER_FORMS: &str = "further-forms";

/// Linear attention by Mamba 2's rule.
const MAMBA2: &str = "mamba2";

/// Attention and linear attention in one layer, results of linear attention that are not normalised,
/// factors on projections of linear attention and of feed-forward parts.
const HYBRID_FORMS: &str = "hybrid-forms";

/// Attention to entries of far tokens, streams that are mixed with each other, experts by a table of
/// tokens, scores by softplus, limits of shared experts.
const COMPRESSED_ATTENTION: &str = "compressed-attention";

/// Attention to blocks of keys that an index chooses, limits of dense feed-forward parts.
const CHOSEN_BLOCKS: &str = "chosen-blocks";

/// Experts whose sum is added a layer later, experts that give what they read, factors on latents.
const DEFERRED_EXPERTS: &str = "deferred-experts";

/// Several residual streams.
const HYPER_CONNECTIONS: &str = "hyper-connections";

/// Latent attention with sinks and with gates of heads, an index that rotates its last part.
const LATENT_FORMS: &str = "latent-forms";

/// Short convolutions in place of attention.
const SHORT_CONVOLUTION: &str = "short-convolution";

/// Linear attention by Kimi's rule.
const KIMI_DELTA: &str = "kimi-delta";

/// Linear attention by Kimi's rule whose gates are projected at once, or whose fading is bounded.
const DIRECT_DELTA: &str = "direct-delta";

/// Attention to keys that an index chooses.
const CHOSEN_KEYS: &str = "chosen-keys";

impl Spec {
    /// Features that this version computes.
    pub const FEATURES: [&str; 16] = [
        ATTENTION_FORMS,
        CHOSEN_BLOCKS,
        CHOSEN_KEYS,
        COMPRESSED_ATTENTION,
        DEFERRED_EXPERTS,
        DIRECT_DELTA,
        EXPERT_FORMS,
        EXPERT_LIMITS,
        FURTHER_FORMS,
        HYBRID_FORMS,
        HYPER_CONNECTIONS,
        KIMI_DELTA,
        LATENT_FORMS,
        LAYER_FORMS,
        MAMBA2,
        SHORT_CONVOLUTION,
    ];

    /// Those of [`Spec::FEATURES`] that this architecture has.
    #[must_use]
    pub fn features(&self) -> Vec<&'static str> {
        let attentions = [Some(&self.attention), self.second_attention.as_ref()];
        let attends_otherwise = self.second_attention.is_some()
            || self.layers.iter().any(|it| it.second || matches!(it.mask, Mask::Chunked(_)))
            || attentions.into_iter().flatten().any(is_later_attention);
        let has_layer_forms =
            self.block.layer_scale.is_some() || self.layers.iter().any(is_later_layer);
        let chooses = self.mla.as_ref().is_some_and(|mla| mla.index.is_some());
        let is_mamba = self.delta.as_ref().is_some_and(|delta| {
            // Its biases came with it.
            delta.rule == StateRule::Mamba2 || delta.conv_bias
        });
        let is_kimi = self.delta.as_ref().is_some_and(|it| it.rule == StateRule::KimiDelta);
        let is_direct = self.delta.as_ref().is_some_and(|it| it.direct || it.fade_limit.is_some());
        let is_hybrid = self.layers.iter().any(|it| it.both)
            || self.ffn.gate_scale.is_some()
            || self.ffn.out_scale.is_some()
            || self.delta.as_ref().is_some_and(|it| it.unnormed || it.factors.is_some());
        let convolves = self.convolution.is_some() || self.layers.iter().any(|it| it.convolution);
        let has = [
            (ATTENTION_FORMS, attends_otherwise),
            (CHOSEN_BLOCKS, self.attention.blocks.is_some() || self.ffn.clamped.is_some()),
            (CHOSEN_KEYS, chooses),
            (COMPRESSED_ATTENTION, self.has_compressed_forms()),
            (DEFERRED_EXPERTS, self.has_deferred_forms()),
            (DIRECT_DELTA, is_direct),
            (EXPERT_FORMS, self.moe.as_ref().is_some_and(is_later_moe)),
            (EXPERT_LIMITS, self.moe.as_ref().is_some_and(has_plain_limits)),
            (FURTHER_FORMS, self.has_further_forms()),
            (HYBRID_FORMS, is_hybrid),
            (HYPER_CONNECTIONS, self.streams.is_some()),
            (KIMI_DELTA, is_kimi),
            (LATENT_FORMS, self.has_latent_forms()),
            (LAYER_FORMS, has_layer_forms),
            (MAMBA2, is_mamba),
            (SHORT_CONVOLUTION, convolves),
        ];
        has.into_iter().filter_map(|(feature, has)| has.then_some(feature)).collect()
    }

    fn has_latent_forms(&self) -> bool {
        let Some(mla) = &self.mla else { return false };
        self.attention.sinks
            || self.attention.head_gate.is_some()
            || mla.index.as_ref().is_some_and(|index| index.rotated_last)
    }

    fn has_deferred_forms(&self) -> bool {
        self.moe.as_ref().is_some_and(|moe| moe.deferred || moe.identities > 0)
            || self.mla.as_ref().is_some_and(|mla| mla.kv_scale.is_some())
    }

    fn has_compressed_forms(&self) -> bool {
        self.compressed.is_some()
            || self.streams.as_ref().is_some_and(|streams| streams.mixed.is_some())
            || self.layers.iter().any(|layer| layer.entries.is_some() || layer.experts_by_token)
            || self.moe.as_ref().is_some_and(|moe| {
                moe.router.scores == Scores::SqrtSoftplus
                    || moe.shared.as_ref().is_some_and(|shared| shared.limit.is_some())
            })
    }

    fn has_further_forms(&self) -> bool {
        let attends_so = |attention: &Attention| {
            let by_softplus = |gate: &HeadGate| gate.function == GateFunction::Softplus;
            attention.limit.is_some() || attention.head_gate.as_ref().is_some_and(by_softplus)
        };
        let mixes_so = |moe: &Moe| {
            let router = &moe.router;
            moe.after.is_some()
                || moe.shared.as_ref().is_some_and(|shared| shared.scale.is_some())
                || router.softcap.is_some()
                || router.jitter.is_some()
                || router.scores == Scores::SparseMixer
        };
        let attentions = [Some(&self.attention), self.second_attention.as_ref()];
        self.norm.plain
            || self.embedding_norm
            || self.head_bias
            || self.ffn.activation == Activation::Xielu
            || attentions.into_iter().flatten().any(attends_so)
            || self.moe.as_ref().is_some_and(mixes_so)
    }
}

fn is_later_attention(attention: &Attention) -> bool {
    let scale = attention.position_scale.as_ref();
    attention.qk_norm == QkNorm::PlainAfterRope
        || attention.sinks_in.is_some()
        || attention.value_dim.is_some()
        || attention.value_scale.is_some()
        || attention.values_are_keys
        || attention.value_norm
        || attention.head_gate.is_some()
        || scale.is_some_and(|scale| scale.from_one || scale.unrotated)
}

const fn is_later_layer(layer: &Layer) -> bool {
    layer.only.is_some() || layer.clamp.is_some() || layer.dense_clamp.is_some()
}

fn is_later_moe(moe: &Moe) -> bool {
    !moe.activation.is_gated()
        || moe.latent.is_some()
        || moe.weighs_inputs
        || moe.beside.is_some()
        || moe.router.input.is_some()
        || moe.router.expert_scales.is_some()
        || moe.router.scores == Scores::SigmoidOfTaken
}

fn has_plain_limits(moe: &Moe) -> bool {
    moe.clamped.is_some_and(|clamped| clamped.plain)
}
