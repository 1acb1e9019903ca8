//! Sparse attention and hyper-connections, as configurations spell them.

use serde_json::{Value, json};

use super::resolve_builtin;
use crate::{
    RulePack, Spec,
    normalise::{ResolveError, expected_tensors},
    spec::{Layer, RopeStyle},
};

fn config(model_type: &str, class: &str, keys: &Value) -> Value {
    let mut config = json!({
        "architectures": [class], "model_type": model_type, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 64, "q_lora_rank": 32, "kv_lora_rank": 32,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 8,
    });
    for (key, value) in keys.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

fn resolved(config: &Value) -> Result<Spec, ResolveError> {
    let tensors = expected_tensors(config, &RulePack::builtin())?;
    resolve_builtin(config, &tensors).map(|normalised| normalised.spec)
}

/// Layers with an indexer of their own.
fn choosing(keys: &Value) -> Vec<usize> {
    let config = config("glm_moe_dsa", "GlmMoeDsaForCausalLM", keys);
    let tensors = expected_tensors(&config, &RulePack::builtin()).unwrap();
    let normalised = resolve_builtin(&config, &tensors).unwrap();
    let layers = normalised.spec.layers.iter().enumerate();
    let choosing: Vec<usize> =
        layers.filter(|(_, layer)| !layer.reuses_top_k).map(|(index, _)| index).collect();
    let of_index = |layer: &u32| {
        let prefix = format!("model.layers.{layer}.self_attn.indexer.");
        normalised.tensors.iter().filter(|tensor| tensor.name.starts_with(&prefix)).count() == 5
    };
    let with_tensors: Vec<usize> = (0..8).filter(of_index).map(|layer| layer as usize).collect();
    assert_eq!(choosing, with_tensors);
    choosing
}

#[test]
fn layers_have_indexers_as_types_or_turns_say() {
    let types = |letters: &str| -> Vec<&str> {
        letters.chars().map(|letter| if letter == 'F' { "full" } else { "shared" }).collect()
    };
    assert_eq!(choosing(&json!({})), (0..8).collect::<Vec<_>>());
    // As GLM 5.2 says it, in both ways.
    let turns = json!({"index_topk_freq": 4, "index_skip_topk_offset": 3});
    assert_eq!(choosing(&turns), [0, 1, 2, 6]);
    assert_eq!(choosing(&json!({"indexer_types": types("FFFSSSFS")})), [0, 1, 2, 6]);
    assert_eq!(choosing(&json!({"index_topk_freq": 2})), [0, 1, 3, 5, 7]);
    let both = json!({"indexer_types": types("FSFSFSFS"), "index_topk_freq": 4});
    assert_eq!(choosing(&both), [0, 2, 4, 6]);
}

#[test]
fn an_indexer_is_described_in_full() {
    let glm = config(
        "glm_moe_dsa",
        "GlmMoeDsaForCausalLM",
        &json!({"index_topk": 512, "index_n_heads": 4, "index_head_dim": 64}),
    );
    let spec = resolved(&glm).unwrap();
    let index = spec.mla.as_ref().unwrap().indexer.as_ref().unwrap();
    let sizes = (index.heads, index.width, index.top_k, index.style, index.eps.0);
    assert_eq!(sizes, (4, 64, 512, RopeStyle::Interleaved, 1e-6));
    assert_eq!((spec.max_positions, spec.shortened()), (202_752, None));
    let deepseek = config("deepseek_v32", "DeepseekV32ForCausalLM", &json!({}));
    let mut spec = resolved(&deepseek).unwrap();
    let index = spec.mla.as_mut().unwrap().indexer.take().unwrap();
    let sizes = (index.heads, index.width, index.top_k, index.style);
    assert_eq!(sizes, (64, 128, 2048, RopeStyle::Half));
    // As packages were before the indexer was read.
    assert!(spec.shortened().unwrap().contains("convert the model again"));
    let dense = config("deepseek_v3", "DeepseekV3ForCausalLM", &json!({}));
    let spec = resolved(&dense).unwrap();
    assert_eq!((&spec.mla.as_ref().unwrap().indexer, spec.shortened()), (&None, None));
    let text = serde_json::to_string(&spec).unwrap();
    assert!(!text.contains("index") && !text.contains("reuses_top_k"), "{text}");
}

/// Hunyuan V4 without what its configuration may leave out.
#[test]
fn hyper_connections_are_described_in_full() {
    let given = json!({
        "rms_norm_eps": 1e-3, "hc_mult": 3, "hc_magnitude": 1.5, "hc_eps": 1e-4,
        "swiglu_limit": 7.0, "first_k_dense_replace": null,
    });
    let spec = resolved(&config("hy_v4", "HYV4ForCausalLM", &given)).unwrap();
    let streams = spec.hyper_connections.as_ref().unwrap();
    assert_eq!((streams.expansion_rate, streams.magnitude.0, streams.eps.0), (3, 1.5, 1e-4));
    assert_eq!(spec.residual_width(), 3 * 64);
    let mla = spec.mla.as_ref().unwrap();
    let index = mla.indexer.as_ref().unwrap();
    // The key's norm goes by the model's epsilon, those of the latents do not.
    assert_eq!((mla.eps.0, index.eps.0, index.rotated_last), (1e-6, 1e-3, true));
    assert_eq!([spec.ropes[0].style, index.style], [RopeStyle::Half, RopeStyle::Half]);
    let clamped = spec.moe.as_ref().unwrap().clamped.unwrap();
    assert_eq!((clamped.alpha.0, clamped.limit.0, clamped.plain), (1.0, 7.0, true));
    let attention = &spec.attention;
    assert_eq!((attention.sinks, attention.head_gate.is_some()), (true, true));
    let own = |(index, layer): (usize, &Layer)| (!layer.reuses_top_k).then_some(index);
    let choosing: Vec<usize> = spec.layers.iter().enumerate().filter_map(own).collect();
    assert_eq!(choosing, [0, 1, 5]);
    assert_eq!(spec.layers.iter().filter(|layer| layer.moe).count(), 7);
    let usual = resolved(&config("hy_v4", "HYV4ForCausalLM", &json!({}))).unwrap();
    let streams = usual.hyper_connections.unwrap();
    assert_eq!((streams.expansion_rate, streams.magnitude.0, streams.eps.0), (4, 2.0, 1e-6));
    assert_eq!((usual.norm.eps.0, usual.max_positions), (1e-5, 262_144));
    // Other architectures say nothing of them.
    let one = resolved(&config("deepseek_v3", "DeepseekV3ForCausalLM", &json!({}))).unwrap();
    let text = serde_json::to_string(&one).unwrap();
    assert_eq!(one.residual_width(), 64);
    assert!(!text.contains("hyper_connections") && !text.contains("rope_last"), "{text}");
}

#[test]
fn contradictions_are_refused() {
    for (keys, expected) in [
        (
            json!({"indexer_types": ["shared", "full", "full", "full", "full", "full", "full", "full"]}),
            "layer 0",
        ),
        (
            json!({"indexer_types": ["full", "none", "full", "full", "full", "full", "full", "full"]}),
            "indexer_types",
        ),
        (json!({"index_head_dim": 8}), "at least the rotated part's 16"),
        (json!({"q_lora_rank": null}), "q_lora_rank"),
        (json!({"index_topk": 0}), "mla.index.top_k"),
    ] {
        let config = config("glm_moe_dsa", "GlmMoeDsaForCausalLM", &keys);
        let error = resolved(&config).unwrap_err().to_string();
        assert!(error.contains(expected), "{keys}: {error}");
    }
}
