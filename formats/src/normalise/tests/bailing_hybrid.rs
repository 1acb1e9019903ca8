//! Ling 3.0, as its publisher and as transformers spell it.

use serde_json::{Value, json};

use super::resolve_builtin;
use crate::{
    RulePack, Spec,
    normalise::{ResolveError, expected_tensors},
    spec::LinearAttentionKind,
};

/// In the form of Ling 3.0 flash, with some keys changed; null takes one away.
fn config(keys: &Value) -> Value {
    let mut config = json!({
        "architectures": ["BailingMoeV3ForCausalLM"], "model_type": "bailing_hybrid",
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 12, "layer_group_size": 6,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 64,
        "max_position_embeddings": 262_144, "short_conv_kernel_size": 4, "no_kda_lora": true,
        "kda_safe_gate": true, "kda_lower_bound": -5.0, "kv_lora_rank": 32,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "num_experts": 8,
        "num_experts_per_tok": 2, "num_shared_experts": 1, "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32, "first_k_dense_replace": 2, "n_group": 4,
        "topk_group": 2, "routed_scaling_factor": 2.5, "rope_theta": 6_000_000.0,
        "partial_rotary_factor": 0.5, "group_norm_size": 1, "linear_silu": true,
        "gated_attention_proj_granularity_type": "head_wise",
    });
    for (key, value) in keys.as_object().unwrap() {
        match value {
            Value::Null => config.as_object_mut().unwrap().remove(key),
            value => config.as_object_mut().unwrap().insert(key.clone(), value.clone()),
        };
    }
    config
}

fn resolved(keys: &Value) -> Result<Spec, ResolveError> {
    let config = config(keys);
    let tensors = expected_tensors(&config, &RulePack::builtin())?;
    resolve_builtin(&config, &tensors).map(|normalised| normalised.spec)
}

/// Layers that attend.
fn attending(spec: &Spec) -> Vec<usize> {
    let layers = spec.layers.iter().enumerate();
    layers.filter(|(_, layer)| !layer.linear_attention).map(|(index, _)| index).collect()
}

#[test]
fn the_last_layer_of_each_group_attends() {
    let spec = resolved(&json!({})).unwrap();
    assert_eq!(attending(&spec), [5, 11]);
    let delta = spec.linear_attention.as_ref().unwrap();
    let sizes = (delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim, delta.kernel);
    assert_eq!((delta.kind, sizes), (LinearAttentionKind::KimiDeltaAttention, (4, 4, 32, 32, 4)));
    assert_eq!((delta.full_rank_gates, delta.decay_limit.map(|limit| limit.0)), (true, Some(5.0)));
    let mla = spec.mla.as_ref().unwrap();
    let gate = spec.attention.head_gate.as_ref().unwrap();
    assert_eq!((gate.module.as_str(), gate.per_head, mla.q_rank), ("g_proj", true, None));
    // The part that is rotated is rotated whole.
    assert_eq!(spec.ropes[0].inv_freq.len(), 8);
    assert_eq!(
        spec.features(),
        ["attention-output-gate", "kimi-delta-attention", "linear-attention", "mla", "moe"]
    );
    // As Ling 3.0 tiny has them.
    let tiny = json!({"layer_group_size": 4, "first_k_dense_replace": 1, "q_lora_rank": 16});
    let tiny = resolved(&tiny).unwrap();
    assert_eq!((attending(&tiny), tiny.mla.unwrap().q_rank), (vec![3, 7, 11], Some(16)));
    let unbounded = resolved(&json!({"kda_safe_gate": false})).unwrap();
    assert_eq!(unbounded.linear_attention.unwrap().decay_limit, None);
}

#[test]
fn limits_of_inner_values_are_those_of_the_layer() {
    let spec = resolved(&json!({
        "expert_swiglu_limit_list": [3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 9],
        "share_expert_swiglu_limit_list": [3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5, 7],
    }))
    .unwrap();
    let limits = |layer: usize| {
        let layer = &spec.layers[layer];
        [layer.clamp, layer.dense_clamp].map(|limit| limit.map(|limit| limit.0))
    };
    // Dense layers have none, whatever stands there.
    assert_eq!(limits(0)[1], None);
    assert_eq!(
        [limits(9), limits(10), limits(11)],
        [[None, None], [None, Some(5.0)], [Some(4.0), Some(7.0)]]
    );
    assert!(spec.features().contains(&"clamped-swiglu"));
}

/// transformers writes the same under other names, and the width of what is rotated as `head_dim`.
#[test]
fn both_spellings_say_the_same() {
    let published = resolved(&json!({})).unwrap();
    let written = resolved(&json!({
        "architectures": ["BailingHybridForCausalLM"], "head_dim": 16, "linear_head_dim": 32,
        "linear_num_heads": 4, "linear_conv_kernel_dim": 4, "max_position_embeddings": null,
        "model_max_length": 262_144, "n_group": null, "num_expert_group": 4,
        "num_experts_per_tok": null, "num_experts_per_token": 2, "moe_renormalize": true,
        "rope_theta": null, "rope_parameters": {"rope_theta": 6_000_000.0, "rope_type": "default"},
        "layer_types": (0..12).map(|layer| {
            if layer % 6 == 5 { "full_attention" } else { "linear_attention" }
        }).collect::<Vec<_>>(),
    }));
    assert_eq!(written.unwrap(), published);
}

#[test]
fn what_is_not_implemented_is_refused() {
    for (keys, expected) in [
        (
            json!({"architectures": ["BailingMoeV2_5ForCausalLM"]}),
            "lightning attention (linear attention with a fixed decay per head)",
        ),
        (json!({"no_kda_lora": false}), "full-rank gates"),
        (json!({"num_hidden_layers": 13}), "the last group of layers is not whole"),
        (json!({"gated_attention_proj_granularity_type": "element_wise"}), "output gate per head"),
        (json!({"score_function": "softmax"}), "sigmoid scores"),
        (json!({"use_qkv_bias": true}), "biases"),
        (json!({"kda_lower_bound": 5.0}), "delta.fade_limit"),
        (json!({"use_some_new_thing": true}), "use_some_new_thing"),
    ] {
        let error = resolved(&keys).expect_err("a refusal").to_string();
        assert!(error.contains(expected), "{keys}: {error}");
    }
}
