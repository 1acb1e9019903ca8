//! Compressed attention (DeepSeek V4), as configurations spell it.

use std::error::Error as _;

use serde_json::{Value, json};

use super::resolve_builtin;
use crate::{
    RulePack, Spec, config_for_package,
    normalise::{Normalised, ResolveError, expected_tensors, resolve},
    rules::builtin_text,
    spec::{CompressedKv, Mask, RopeStyle, Scores},
};

/// As it is published, smaller.
fn published(keys: &Value) -> Value {
    // One more ratio than there are layers: that of the MTP layer.
    let text = r#"{
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4",
        "attention_bias": false, "expert_dtype": "fp4", "hc_eps": 1e-6, "hc_mult": 4,
        "hc_sinkhorn_iters": 20, "head_dim": 64, "hidden_act": "silu", "hidden_size": 64,
        "index_head_dim": 32, "index_n_heads": 4, "index_topk": 16,
        "max_position_embeddings": 1048576, "moe_intermediate_size": 32, "n_routed_experts": 8,
        "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 8,
        "num_experts_per_tok": 2, "num_hidden_layers": 5, "num_hash_layers": 2,
        "num_key_value_heads": 1, "num_nextn_predict_layers": 1, "o_groups": 4, "o_lora_rank": 32,
        "q_lora_rank": 32, "qk_rope_head_dim": 16, "rms_norm_eps": 1e-6,
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 16,
            "original_max_position_embeddings": 65536, "type": "yarn"},
        "rope_theta": 10000, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus",
        "sliding_window": 128, "swiglu_limit": 10.0, "tie_word_embeddings": false,
        "topk_method": "noaux_tc", "vocab_size": 64, "compress_rope_theta": 160000,
        "compress_ratios": [0, 0, 4, 128, 4, 0]
    }"#;
    let mut config: Value = serde_json::from_str(text).unwrap();
    for (key, value) in keys.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

/// The same as transformers writes it.
fn newer() -> Value {
    let mut config = published(&json!({
        "layer_types": ["sliding_attention", "sliding_attention", "compressed_sparse_attention",
            "heavily_compressed_attention", "compressed_sparse_attention"],
        "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        "partial_rotary_factor": 0.25, "mlp_bias": false, "router_jitter_noise": 0.0,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
            "compress": {"rope_type": "yarn", "rope_theta": 160_000.0, "factor": 16.0,
                "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 65536,
                "attention_factor": 1.0, "partial_rotary_factor": 0.25},
        },
    }));
    for key in ["compress_ratios", "num_hash_layers", "rope_scaling", "qk_rope_head_dim"] {
        config.as_object_mut().unwrap().remove(key);
    }
    config
}

fn normalised(config: &Value) -> Result<Normalised, ResolveError> {
    let tensors = expected_tensors(config, &RulePack::builtin())?;
    resolve_builtin(config, &tensors)
}

fn resolved(config: &Value) -> Result<Spec, ResolveError> {
    normalised(config).map(|normalised| normalised.spec)
}

#[test]
fn a_published_configuration_is_described_in_full() {
    let spec = resolved(&published(&json!({}))).unwrap();
    let attention = &spec.attention;
    assert_eq!((attention.heads, attention.kv_heads, attention.head_dim), (8, 1, 64));
    assert_eq!((attention.scale.0, attention.sinks), (0.125, true));
    let compressed = spec.compressed_attention.as_ref().unwrap();
    assert_eq!((compressed.q_rank, compressed.rope, compressed.eps.0), (32, 16, 1e-6));
    assert_eq!((compressed.groups, compressed.group_rank), (4, 32));
    let index = compressed.indexer.as_ref().unwrap();
    assert_eq!((index.heads, index.width, index.top_k, index.eps.0), (4, 32, 16, 1e-6));
    assert_eq!((index.style, index.rotated_last), (RopeStyle::Interleaved, true));
    let entries = |compression_ratio, sparse| Some(CompressedKv { compression_ratio, sparse });
    let found: Vec<Option<CompressedKv>> =
        spec.layers.iter().map(|layer| layer.compressed_kv).collect();
    assert_eq!(found, [None, None, entries(4, true), entries(128, false), entries(4, true)]);
    for (index, layer) in spec.layers.iter().enumerate() {
        assert_eq!((layer.mask, layer.moe), (Mask::Sliding(128), true));
        assert_eq!(layer.rope, Some(u32::from(layer.compressed_kv.is_some())));
        assert_eq!(layer.hash_routing, index < 2);
    }
    // Positions are extended in layers with entries alone, and cosines stay as they are.
    let [near, far] = &spec.ropes[..] else { panic!("{:?}", spec.ropes) };
    assert_eq!(
        (near.style, near.inv_freq.len(), far.inv_freq.len()),
        (RopeStyle::Interleaved, 8, 8)
    );
    assert_eq!([near.attention_factor.0, far.attention_factor.0], [1.0, 1.0]);
    assert_eq!(near.inv_freq[1].0, 10_000_f32.powf(-0.125));
    let last = 160_000_f64.powf(-0.875) / 16.0;
    assert!((f64::from(far.inv_freq[7].0) / last - 1.0).abs() < 1e-6, "{:?}", far.inv_freq);
    let moe = spec.moe.as_ref().unwrap();
    let limits = (moe.clamped.unwrap().limit.0, moe.shared.as_ref().unwrap().limit.unwrap().0);
    assert_eq!((limits, moe.clamped.unwrap().plain), ((10.0, 10.0), true));
    assert_eq!((moe.router.scores, moe.router.correction), (Scores::SqrtSoftplus, true));
    assert_eq!((moe.router.scale.0, moe.router.renormalise.unwrap().added.0), (1.5, 1e-20));
    let streams = spec.hyper_connections.as_ref().unwrap();
    assert_eq!(
        (streams.expansion_rate, streams.magnitude.0, streams.sinkhorn_iterations),
        (4, 2.0, Some(20))
    );
    assert!(spec.features().contains(&"compressed-kv"));
}

#[test]
fn both_spellings_and_packages_of_them_are_the_same_model() {
    let wanted = normalised(&published(&json!({}))).unwrap();
    // Rates that single keys give, as the first versions of transformers' configurations have them.
    let rates = json!({"compress_rate_csa": 4, "compress_rate_hca": 128});
    for config in [newer(), published(&rates)] {
        assert_eq!(resolved(&config).unwrap(), wanted.spec, "{config}");
    }
    // Extended positions in one object beside the base of entries.
    let flat = json!({"rope_scaling": null, "rope_parameters": {"rope_type": "yarn",
        "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "rope_theta": 10000.0,
        "original_max_position_embeddings": 65536}});
    for config in [published(&json!({})), newer(), published(&flat)] {
        let normalised = normalised(&config).unwrap();
        assert_eq!(normalised.spec, wanted.spec, "{config}");
        let package = config_for_package(&config, &normalised, None);
        assert_eq!(resolved(&package).unwrap(), wanted.spec, "{package}");
        assert_eq!(package["rope_theta"], 10000.0);
        assert!(package.get("rope_local_base_freq").is_none(), "{package}");
    }
}

#[test]
fn what_a_configuration_leaves_out_is_as_transformers_has_it() {
    let mut config = published(&json!({}));
    for key in ["compress_ratios", "num_hash_layers", "hc_sinkhorn_iters", "swiglu_limit"] {
        config.as_object_mut().unwrap().remove(key);
    }
    let spec = resolved(&config).unwrap();
    let ratios: Vec<u32> =
        spec.layers.iter().map(|layer| layer.compressed_kv.unwrap().compression_ratio).collect();
    assert_eq!(ratios, [128, 128, 128, 4, 128]);
    let by_token = spec.layers.iter().filter(|layer| layer.hash_routing).count();
    assert_eq!((by_token, spec.hyper_connections.unwrap().sinkhorn_iterations), (3, Some(20)));
    assert_eq!(spec.moe.unwrap().clamped.unwrap().limit.0, 10.0);
    // Without a layer with sparse entries there is no indexer, and none of its tensors.
    let near = published(&json!({"compress_ratios": [0, 128, 0, 128, 0]}));
    let normalised = normalised(&near).unwrap();
    assert_eq!(normalised.spec.compressed_attention.unwrap().indexer, None);
    assert!(normalised.tensors.iter().all(|tensor| !tensor.name.contains(".indexer.")));
    // Of transformers' own spelling a factor that is not stated follows from the extension.
    let mut stated = newer();
    stated["rope_parameters"]["compress"].as_object_mut().unwrap().remove("attention_factor");
    let factor = resolved(&stated).unwrap().ropes[1].attention_factor.0;
    assert!((factor - (0.1 * 16_f32.ln() + 1.0)).abs() < 1e-6, "{factor}");
}

#[test]
fn what_is_not_implemented_is_refused() {
    let tensors = expected_tensors(&published(&json!({})), &RulePack::builtin()).unwrap();
    for (keys, expected) in [
        (json!({"o_groups": 3}), "groups of equal size"),
        (json!({"qk_rope_head_dim": 64}), "less than the head's 64"),
        (json!({"qk_rope_head_dim": 15}), "15 rotated elements"),
        (json!({"partial_rotary_factor": 0.5}), "contradicts itself in the rotary width"),
        (json!({"compress_rate_hca": 96}), "a divisor of 256"),
        (json!({"compress_rate_hca": 512}), "a divisor of 256"),
        (json!({"compress_rate_csa": 0}), "layer.entries_every (layer 2)"),
        (json!({"compress_ratios": [0, 8, 4, 128, 4]}), "compress_ratios has a kind"),
        (json!({"mlp_layer_types": ["moe", "dense", "moe", "moe", "moe"]}), "mlp_layer_types"),
        (json!({"index_head_dim": 8}), "at least the rotated part's 16"),
        (json!({"index_topk": 0}), "compressed.index.top_k"),
        (json!({"hc_sinkhorn_iters": 0}), "streams.mixed"),
        (json!({"num_key_value_heads": 8}), "only one KV head"),
        (json!({"attention_bias": true}), "biases"),
        (json!({"n_shared_experts": 2}), "one shared expert"),
        (json!({"norm_topk_prob": false}), "renormalised weights"),
        (json!({"scoring_func": "relu"}), "noaux_tc"),
        (json!({"swiglu_limit": 0.0}), "swiglu_limit above 0"),
        (json!({"num_experts_per_tok": 9}), "at most 8, the experts"),
        (json!({"sliding_window": 0}), "layer.window"),
    ] {
        // Of tensors nothing is asked before.
        let error = resolve_builtin(&published(&keys), &tensors).unwrap_err();
        let error = format!("{error}: {:?}", error.source().map(ToString::to_string));
        assert!(error.contains(expected), "{keys}: {error}");
    }
}

#[test]
fn rules_that_contradict_themselves_are_refused() {
    let config = published(&json!({}));
    let tensors = expected_tensors(&config, &RulePack::builtin()).unwrap();
    let text = builtin_text("deepseek-v4").unwrap();
    let without = |from: &str, to: &str| {
        let (before, rest) = text.split_once(from).unwrap();
        format!("{before}{to}{}", rest.split_once(to).unwrap().1)
    };
    for (text, expected) in [
        (text.replace("moe = \"true\"", "moe = \"false\""), "in a layer without experts"),
        (without("[spec.compressed]", "# Of layers that attend"), "without compressed attention"),
        (without("[spec.compressed.index]", "# Of layers that attend"), "without an indexer"),
    ] {
        let pack = RulePack::parse(&text).unwrap();
        let error = resolve(&config, &tensors, &[pack]).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}
