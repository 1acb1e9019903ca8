//! Format 1 of manifests and sets, read so that a package can be rewritten in the current format.
//!
//! Between the formats only names differ: those of fields and values of the architecture and of the
//! layout, and those of required features. Weight files are the same. The ids of a package change,
//! since the weights id covers the names of the architecture.
//!
//! Nothing serves, pushes or verifies a package of format 1: [`crate::Manifest::parse`] refuses it.
//! The old names stand here and nowhere else.

use serde_json::{Map, Value};

/// The version that this module reads.
pub(crate) const FORMAT_1: u32 = 1;

/// Old and new names.
type Names = &'static [(&'static str, &'static str)];

const ATTENTION: Names = &[
    ("gated", "output_gate_in_q"),
    ("sinks_in", "sinks_tensor"),
    ("position_scale", "temperature_tuning"),
    ("value_dim", "v_head_dim"),
    ("value_scale", "v_scale"),
    ("values_are_keys", "k_eq_v"),
    ("value_norm", "v_norm"),
    ("limit", "clip_qkv"),
    ("head_gate", "output_gate"),
    ("blocks", "block_sparse"),
];

const TEMPERATURE: Names = &[("original", "original_max_positions"), ("unrotated", "nope_only")];

const BLOCK_SPARSE: Names =
    &[("tokens", "block_size"), ("local", "local_blocks"), ("width", "head_dim")];

const INDEXER: Names =
    &[("width", "head_dim"), ("style", "rope_style"), ("rotated_last", "rope_last")];

const CLAMPED_SWIGLU: Names = &[("plain", "no_offset")];

/// Renamed fields by the path of their object in the words of format 2; `*` is every element of a
/// list.
const FIELDS: &[(&str, Names)] = &[
    (
        "architecture",
        &[
            ("compressed", "compressed_attention"),
            ("delta", "linear_attention"),
            ("convolution", "short_convolution"),
            ("streams", "hyper_connections"),
            ("head_bias", "lm_head_bias"),
        ],
    ),
    (
        "architecture.layers.*",
        &[
            ("delta", "linear_attention"),
            ("both", "parallel_attention"),
            ("convolution", "short_convolution"),
            ("shares_keys", "reuses_top_k"),
            ("chooses_blocks", "block_sparse"),
            ("second", "second_attention"),
            ("entries", "compressed_kv"),
            ("experts_by_token", "hash_routing"),
            ("clamp", "expert_swiglu_limit"),
            ("dense_clamp", "dense_swiglu_limit"),
        ],
    ),
    (
        "architecture.layers.*.compressed_kv",
        &[("every", "compression_ratio"), ("chosen", "sparse")],
    ),
    ("architecture.attention", ATTENTION),
    ("architecture.attention.temperature_tuning", TEMPERATURE),
    ("architecture.attention.block_sparse", BLOCK_SPARSE),
    ("architecture.second_attention", ATTENTION),
    ("architecture.second_attention.temperature_tuning", TEMPERATURE),
    ("architecture.second_attention.block_sparse", BLOCK_SPARSE),
    (
        "architecture.block",
        &[
            ("before_attention", "pre_attention_norm"),
            ("after_attention", "post_attention_norm"),
            ("before_ffn", "pre_ffn_norm"),
            ("after_ffn", "post_ffn_norm"),
        ],
    ),
    (
        "architecture.compressed_attention",
        &[
            ("q_rank", "q_lora_rank"),
            ("rope", "qk_rope_head_dim"),
            ("groups", "o_groups"),
            ("group_rank", "o_lora_rank"),
            ("index", "indexer"),
        ],
    ),
    ("architecture.compressed_attention.indexer", INDEXER),
    ("architecture.short_convolution", &[("kernel", "kernel_size")]),
    (
        "architecture.linear_attention",
        &[
            ("kernel", "conv_kernel_size"),
            ("rule", "kind"),
            ("unnormed", "no_output_norm"),
            ("factors", "multipliers"),
            ("direct", "full_rank_gates"),
            ("fade_limit", "decay_limit"),
        ],
    ),
    ("architecture.ffn", &[("size", "intermediate_size"), ("clamped", "clamped_swiglu")]),
    ("architecture.ffn.clamped_swiglu", CLAMPED_SWIGLU),
    (
        "architecture.mla",
        &[
            ("q_rank", "q_lora_rank"),
            ("kv_rank", "kv_lora_rank"),
            ("nope", "qk_nope_head_dim"),
            ("rope", "qk_rope_head_dim"),
            ("value", "v_head_dim"),
            ("index", "indexer"),
        ],
    ),
    ("architecture.mla.indexer", INDEXER),
    (
        "architecture.moe",
        &[
            ("identities", "zero_experts"),
            ("size", "intermediate_size"),
            ("clamped", "clamped_swiglu"),
            ("latent", "latent_size"),
            ("shared", "shared_expert"),
            ("weighs_inputs", "router_weights_on_input"),
            ("after", "post_norm"),
            ("beside", "parallel_dense"),
            ("deferred", "shortcut"),
        ],
    ),
    ("architecture.moe.clamped_swiglu", CLAMPED_SWIGLU),
    (
        "architecture.moe.parallel_dense",
        &[
            ("after_dense", "post_dense_norm"),
            ("before_experts", "pre_experts_norm"),
            ("after_experts", "post_experts_norm"),
        ],
    ),
    (
        "architecture.moe.router",
        &[
            ("scores", "scoring"),
            ("correction", "correction_bias"),
            ("groups", "expert_groups"),
            ("input", "input_norm"),
            ("expert_scales", "per_expert_scale"),
        ],
    ),
    ("architecture.moe.router.expert_groups", &[("kept", "top_k"), ("by", "scoring")]),
    ("architecture.moe.shared_expert", &[("size", "intermediate_size"), ("limit", "swiglu_limit")]),
    ("architecture.norm", &[("plain", "unweighted")]),
    ("architecture.ropes.*.long", &[("beyond", "original_max_positions")]),
    (
        "architecture.hyper_connections",
        &[("count", "expansion_rate"), ("mixed", "sinkhorn_iterations")],
    ),
    ("layout", &[("embedding_cut", "embedding_sharded")]),
    ("tensors.*", &[("cut", "shard")]),
];

/// Renamed values by the path of their field.
const VALUES: &[(&str, Names)] = &[
    (
        "architecture.linear_attention.kind",
        &[("gated_delta", "gated_delta_net"), ("kimi_delta", "kimi_delta_attention")],
    ),
    (
        "architecture.moe.router.scoring",
        &[("softmax_of_taken", "softmax_of_top_k"), ("sigmoid_of_taken", "sigmoid_of_top_k")],
    ),
    (
        "architecture.moe.router.expert_groups.scoring",
        &[("best", "max"), ("best_two", "top_2_sum")],
    ),
];

/// What a package of format 1 may require.
const FEATURES: [&str; 17] = [
    "attention-forms",
    "chosen-blocks",
    "chosen-keys",
    "compressed-attention",
    "deferred-experts",
    "direct-delta",
    "expert-forms",
    "expert-limits",
    "further-forms",
    "hybrid-forms",
    "hyper-connections",
    "kimi-delta",
    "latent-forms",
    "layer-forms",
    "mamba2",
    "short-convolution",
    "stages",
];

/// Whether format 1 had a feature.
pub(crate) fn is_feature(feature: &str) -> bool {
    FEATURES.contains(&feature)
}

/// Renames the fields and values of a manifest.
pub(crate) fn rename(manifest: &mut Value) {
    for (path, names) in FIELDS {
        visit(manifest, path, &|value| {
            if let Value::Object(fields) = value {
                rename_fields(fields, names);
            }
        });
    }
    for (path, names) in VALUES {
        visit(manifest, path, &|value| {
            let new = names.iter().find(|(old, _)| value.as_str() == Some(old));
            if let Some((_, new)) = new {
                *value = Value::from(*new);
            }
        });
    }
}

fn rename_fields(fields: &mut Map<String, Value>, names: Names) {
    for (old, new) in names {
        if let Some(value) = fields.remove(*old) {
            fields.insert((*new).to_owned(), value);
        }
    }
}

/// Calls `edit` with every value at a path.
fn visit(value: &mut Value, path: &str, edit: &impl Fn(&mut Value)) {
    if path.is_empty() {
        return edit(value);
    }
    let (step, rest) = path.split_once('.').unwrap_or((path, ""));
    match value {
        Value::Array(items) if step == "*" => {
            for item in items {
                visit(item, rest, edit);
            }
        }
        Value::Object(fields) => {
            if let Some(value) = fields.get_mut(step) {
                visit(value, rest, edit);
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests;
