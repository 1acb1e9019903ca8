//! What a program has to know to compute an architecture: one name per operator. A program that does
//! not know a key of the document ignores it, so an operator that changes what is computed is named
//! in the package's requirements, and a program without it refuses the package.
//!
//! A decoder with grouped-query attention (full or sliding window), rotary embeddings, norms before
//! or after each block and dense feed-forward layers requires nothing.

use super::{Activation, Attention, Layer, LinearAttentionKind, Mask, QkNorm, Spec};

/// The name of an operator, and whether an architecture has it.
type Feature = (&'static str, fn(&Spec) -> bool);

/// Every operator that this version computes beyond the plain decoder, sorted by name.
const ALL: [Feature; 36] = [
    ("asymmetric-head-dims", |spec| has_attention(spec, |it| it.value_dim.is_some())),
    ("attention-output-gate", |spec| has_attention(spec, |it| it.gated || it.head_gate.is_some())),
    ("attention-sinks", |spec| has_attention(spec, |it| it.sinks || it.sinks_in.is_some())),
    ("attention-temperature-tuning", |spec| has_attention(spec, |it| it.position_scale.is_some())),
    ("bidirectional-attention", Spec::is_bidirectional),
    ("block-sparse-attention", |spec| {
        has_attention(spec, |it| it.block_sparse.is_some()) || has_layer(spec, |it| it.block_sparse)
    }),
    ("chunked-attention", |spec| has_layer(spec, |it| matches!(it.mask, Mask::Chunked(_)))),
    ("clamped-swiglu", has_clamped_swiglu),
    ("compressed-kv", |spec| {
        spec.compressed_attention.is_some() || has_layer(spec, |it| it.compressed_kv.is_some())
    }),
    ("embedding", |spec| spec.embedding.is_some()),
    ("embedding-norm", |spec| spec.embedding_norm),
    ("hash-routing", |spec| has_layer(spec, |it| it.hash_routing)),
    ("heterogeneous-attention", |spec| {
        spec.second_attention.is_some() || has_layer(spec, |it| it.second_attention)
    }),
    ("hyper-connections", |spec| spec.hyper_connections.is_some()),
    ("k-eq-v", |spec| has_attention(spec, |it| it.values_are_keys)),
    ("kimi-delta-attention", |spec| {
        spec.linear_attention
            .as_ref()
            .is_some_and(|it| it.kind == LinearAttentionKind::KimiDeltaAttention)
    }),
    ("latent-moe", |spec| spec.moe.as_ref().is_some_and(|moe| moe.latent.is_some())),
    ("layer-scale", |spec| spec.block.layer_scale.is_some()),
    ("linear-attention", |spec| {
        spec.linear_attention.is_some() || has_layer(spec, |it| it.linear_attention)
    }),
    ("lm-head-bias", |spec| spec.lm_head_bias),
    ("mamba2", |spec| {
        spec.linear_attention.as_ref().is_some_and(|it| it.kind == LinearAttentionKind::Mamba2)
    }),
    ("mla", |spec| spec.mla.is_some()),
    ("moe", |spec| spec.moe.is_some() || has_layer(spec, |it| it.moe)),
    ("mup-multipliers", |spec| {
        spec.ffn.gate_scale.is_some()
            || spec.ffn.out_scale.is_some()
            || spec.linear_attention.as_ref().is_some_and(|it| it.multipliers.is_some())
    }),
    ("parallel-dense-moe", |spec| {
        spec.moe.as_ref().is_some_and(|moe| moe.parallel_dense.is_some())
    }),
    ("parallel-linear-attention", |spec| has_layer(spec, |it| it.parallel_attention)),
    ("qkv-clipping", |spec| has_attention(spec, |it| it.limit.is_some())),
    ("short-convolution", |spec| {
        spec.short_convolution.is_some() || has_layer(spec, |it| it.short_convolution)
    }),
    ("shortcut-moe", |spec| spec.moe.as_ref().is_some_and(|moe| moe.shortcut)),
    ("single-block-layers", |spec| has_layer(spec, |it| it.only.is_some())),
    ("sparse-attention", |spec| {
        spec.mla.as_ref().is_some_and(|mla| mla.indexer.is_some())
            || has_layer(spec, |it| it.reuses_top_k)
    }),
    ("unweighted-norm", has_unweighted_norm),
    ("value-norm", |spec| has_attention(spec, |it| it.value_norm)),
    ("value-scale", |spec| has_attention(spec, |it| it.value_scale.is_some())),
    ("xielu", |spec| spec.ffn.activation == Activation::Xielu),
    ("zero-computation-experts", |spec| spec.moe.as_ref().is_some_and(|it| it.zero_experts > 0)),
];

impl Spec {
    /// Names of the operators that this version computes beyond the plain decoder.
    pub fn known_features() -> impl Iterator<Item = &'static str> {
        ALL.iter().map(|(name, _)| *name)
    }

    /// Those of [`Spec::known_features`] that this architecture has.
    #[must_use]
    pub fn features(&self) -> Vec<&'static str> {
        ALL.iter().filter(|(_, has)| has(self)).map(|(name, _)| *name).collect()
    }
}

fn has_attention(spec: &Spec, has: fn(&Attention) -> bool) -> bool {
    [Some(&spec.attention), spec.second_attention.as_ref()].into_iter().flatten().any(has)
}

fn has_layer(spec: &Spec, has: fn(&Layer) -> bool) -> bool {
    spec.layers.iter().any(has)
}

fn has_clamped_swiglu(spec: &Spec) -> bool {
    let of_moe = spec.moe.as_ref().is_some_and(|moe| {
        moe.clamped.is_some() || moe.shared.as_ref().is_some_and(|it| it.limit.is_some())
    });
    of_moe
        || spec.ffn.clamped.is_some()
        || has_layer(spec, |it| it.clamp.is_some() || it.dense_clamp.is_some())
}

fn has_unweighted_norm(spec: &Spec) -> bool {
    spec.norm.plain || has_attention(spec, |it| it.qk_norm == QkNorm::PlainAfterRope)
}
