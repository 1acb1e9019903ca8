//! Block-sparse attention (MiniMax M3), as configurations spell it.

use serde_json::{Value, json};

use super::resolve_builtin;
use crate::{
    RulePack, Spec, config_for_package,
    normalise::{Normalised, ResolveError, SourceTensor, expected_tensors},
    rules::{Role, ShardingRule},
    spec::{BlockIndexer, QkNorm},
};
use shardpack_quantize::Dtype;

/// As it is published, smaller.
fn published(keys: &Value) -> Value {
    let text = r#"{
        "architectures": ["MiniMaxM3ForCausalLM"], "model_type": "minimax_m3",
        "attention_output_gate": false, "dense_intermediate_size": 96, "first_k_dense_replace": 1,
        "head_dim": 32, "hidden_act": "swigluoai", "hidden_size": 64, "intermediate_size": 32,
        "max_position_embeddings": 1048576, "moe_layer_freq": [0, 1, 1, 1],
        "n_shared_experts": 1, "num_attention_heads": 4, "num_experts_per_tok": 2,
        "num_hidden_layers": 4, "num_key_value_heads": 2, "num_local_experts": 8,
        "num_mtp_modules": 7, "partial_rotary_factor": 0.5, "qk_norm_type": "per_head",
        "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 16,
        "routed_scaling_factor": 2.0, "scoring_func": "sigmoid", "shared_intermediate_size": 64,
        "sparse_attention_config": {
            "sparse_attention_freq": [0, 1, 0, 1], "sparse_block_size": 8,
            "sparse_disable_index_value": [0, 1, 0, 1], "sparse_index_dim": 32,
            "sparse_init_block": 0, "sparse_local_block": 1, "sparse_num_index_heads": 2,
            "sparse_score_type": "max", "sparse_topk_blocks": 2, "use_sparse_attention": true
        },
        "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "tie_word_embeddings": false,
        "use_gemma_norm": true, "use_qk_norm": true, "use_routing_bias": true, "vocab_size": 64
    }"#;
    let mut config: Value = serde_json::from_str(text).unwrap();
    put(&mut config, keys);
    config
}

/// Puts keys over those of an object, and within objects of both.
fn put(config: &mut Value, keys: &Value) {
    for (key, value) in keys.as_object().unwrap() {
        match (&config[key], value) {
            (Value::Object(_), Value::Object(_)) => put(&mut config[key], value),
            _ => config[key] = value.clone(),
        }
    }
}

/// The same as transformers writes it.
fn newer() -> Value {
    let mut config = published(&json!({
        "architectures": ["MiniMaxM3VLForCausalLM"], "model_type": "minimax_m3_vl_text",
        "hidden_act": "silu", "index_n_heads": 2, "index_head_dim": 32, "index_block_size": 8,
        "index_topk_blocks": 2, "index_local_blocks": 1,
        "layer_types": ["full_attention", "minimax_m3_sparse", "full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    }));
    for key in ["sparse_attention_config", "moe_layer_freq", "rope_theta", "partial_rotary_factor"]
    {
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
    assert_eq!((attention.heads, attention.kv_heads, attention.head_dim), (4, 2, 32));
    let blocks = BlockIndexer { tokens: 8, top_k: 2, local: 1, width: 32 };
    assert_eq!((attention.block_sparse.as_ref(), attention.qk_norm), (Some(&blocks), QkNorm::Head));
    let chooses: Vec<bool> = spec.layers.iter().map(|layer| layer.block_sparse).collect();
    assert_eq!(chooses, [false, true, false, true]);
    let experts: Vec<bool> = spec.layers.iter().map(|layer| layer.moe).collect();
    assert_eq!(experts, [false, true, true, true]);
    let moe = spec.moe.as_ref().unwrap();
    let limits = moe.clamped.unwrap();
    assert_eq!((limits.alpha.0, limits.limit.0, limits.plain), (1.702, 7.0, false));
    assert_eq!((spec.ffn.clamped, spec.ffn.size), (moe.clamped, 96));
    let shared = moe.shared.as_ref().unwrap();
    assert_eq!((moe.experts, moe.size, shared.size, shared.limit), (8, 32, 64, None));
    assert_eq!((moe.router.correction, moe.router.scale.0), (true, 2.0));
    assert!(spec.norm.plus_one && spec.features().contains(&"block-sparse-attention"));
    assert_eq!((spec.ropes[0].inv_freq.len(), spec.max_positions), (8, 1_048_576));
}

#[test]
fn transformers_spelling_says_the_same() {
    let mut spec = resolved(&newer()).unwrap();
    assert_eq!(spec.model_type, "minimax_m3_vl_text");
    spec.model_type = "minimax_m3".to_owned();
    assert_eq!(spec, resolved(&published(&json!({}))).unwrap());
    // Without the lists all layers attend to all keys.
    let mut all = newer();
    all.as_object_mut().unwrap().remove("layer_types");
    let spec = resolved(&all).unwrap();
    assert!(spec.layers.iter().all(|layer| !layer.block_sparse));
    assert_eq!(spec.attention.block_sparse, None);
    let off = published(&json!({"sparse_attention_config": {"use_sparse_attention": false}}));
    assert_eq!(resolved(&off).unwrap().attention.block_sparse, None);
}

#[test]
fn indexer_tensors_are_sharded_as_keys_and_exist_in_block_sparse_layers() {
    let found = normalised(&published(&json!({}))).unwrap();
    let of_index = |tensor: &&super::super::TensorPlan| tensor.name.contains(".indexer.");
    let tensors: Vec<_> = found.tensors.iter().filter(of_index).collect();
    assert_eq!(tensors.len(), 8);
    let q = tensors[0];
    assert_eq!(q.name, "model.layers.1.self_attn.indexer.q_proj.weight");
    assert_eq!((&q.shape[..], q.role), (&[64, 64][..], Role::Indexer));
    assert_eq!(q.sharding, ShardingRule::Column("kv".to_owned()));
    let stored = q.stored_as.as_ref().unwrap();
    assert_eq!(stored.name, "model.layers.1.self_attn.index_q_proj.weight");
    let [k, q_norm] = [tensors[1], tensors[2]];
    assert_eq!(
        (&k.shape[..], &k.sharding, k.role),
        (&[32, 64][..], &ShardingRule::Replicate, Role::Indexer)
    );
    assert_eq!((&q_norm.shape[..], q_norm.role), (&[32][..], Role::Norm));
}

/// mlx-lm and transformers know the list alone.
#[test]
fn packages_say_which_layers_have_experts() {
    let config = published(&json!({}));
    let packaged = config_for_package(&config, &normalised(&config).unwrap(), None);
    assert_eq!(packaged["mlp_layer_types"], json!(["dense", "sparse", "sparse", "sparse"]));
    assert_eq!(resolved(&packaged).unwrap(), resolved(&config).unwrap());
}

fn names(config: &Value) -> Vec<String> {
    let tensors = expected_tensors(config, &RulePack::builtin()).unwrap();
    tensors.into_iter().map(|tensor| tensor.name).collect()
}

#[test]
fn publishers_and_transformers_have_names_of_their_own() {
    let has = |names: &[String], name: &str| {
        assert!(names.iter().any(|found| found == name), "{name}: {names:?}");
    };
    let own = names(&published(&json!({})));
    for name in ["mlp.gate_proj.weight", "mlp.down_proj.weight"] {
        has(&own, &format!("model.layers.0.{name}"));
    }
    for name in [
        "self_attn.index_q_proj.weight",
        "self_attn.index_k_norm.weight",
        "block_sparse_moe.gate.weight",
        "block_sparse_moe.e_score_correction_bias",
        "block_sparse_moe.experts.7.w2.weight",
        "block_sparse_moe.shared_experts.up_proj.weight",
    ] {
        has(&own, &format!("model.layers.1.{name}"));
    }
    let newer = names(&newer());
    has(&newer, "model.layers.0.mlp.gate_up_proj.weight");
    for name in [
        "self_attn.indexer.q_proj.weight",
        "mlp.gate.weight",
        "mlp.gate.e_score_correction_bias",
        "mlp.experts.gate_up_proj",
        "mlp.shared_experts.gate_up_proj.weight",
        "mlp.shared_experts.down_proj.weight",
    ] {
        has(&newer, &format!("model.layers.1.{name}"));
    }
}

/// A vision-language model has the text model's configuration within it, whatever that calls itself.
#[test]
fn the_text_model_within_another_is_read() {
    let bare = published(&json!({}));
    let own = expected_tensors(&bare, &RulePack::builtin()).unwrap();
    let mut tensors: Vec<SourceTensor> = own
        .iter()
        .map(|it| SourceTensor { name: format!("language_model.{}", it.name), ..it.clone() })
        .collect();
    for name in [
        "vision_tower.vision_model.pre_layrnorm.weight",
        "multi_modal_projector.linear_1.weight",
        "patch_merge_mlp.linear_1.weight",
        "language_model.model.mtp.layers.0.eh_proj.weight",
    ] {
        tensors.push(SourceTensor { name: name.to_owned(), dtype: Dtype::BF16, shape: vec![2] });
    }
    for own_type in [json!(null), json!("minimax_m2"), json!("minimax_m3")] {
        let mut inner = bare.clone();
        inner["model_type"] = own_type;
        let whole = json!({
            "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
            "model_type": "minimax_m3_vl", "text_config": inner, "vision_config": {"depth": 2},
            "image_token_index": 9, "projector_hidden_size": 64,
        });
        let found = resolve_builtin(&whole, &tensors).unwrap();
        assert_eq!(found.spec, resolved(&bare).unwrap());
        assert_eq!(found.ignored.len(), 4);
        let config = found.text_config.unwrap();
        assert_eq!(config["model_type"], "minimax_m3");
        assert_eq!(config["architectures"], json!(["MiniMaxM3ForCausalLM"]));
    }
    // As transformers saves it: its own configuration beside published names.
    let whole = json!({
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "model_type": "minimax_m3_vl", "text_config": newer(),
    });
    let found = resolve_builtin(&whole, &tensors).unwrap();
    assert_eq!(found.spec.model_type, "minimax_m3_vl_text");
}

#[test]
fn what_is_not_implemented_is_refused() {
    for (keys, expected) in [
        (json!({"sparse_num_index_heads": 4}), "one indexer head per KV head"),
        (json!({"sparse_local_block": 0}), "without the query's own block"),
        (json!({"sparse_local_block": 3}), "at most 2, the blocks that are selected"),
        (json!({"sparse_init_block": 1}), "sparse_init_block"),
        (json!({"sparse_score_type": "mean"}), "sparse_score_type"),
        (json!({"sparse_disable_index_value": [0, 1, 0, 0]}), "sparse_disable_index_value 0"),
        (json!({"sparse_block_size": 12}), "a divisor of 256"),
        (json!({"sparse_block_size": 512}), "a divisor of 256"),
        (json!({"sparse_topk_blocks": 0}), "attention.blocks.top_k"),
        (json!({"sparse_index_dim": 8}), "at least the rotated part's 16"),
    ] {
        let config = published(&json!({"sparse_attention_config": keys}));
        let error = resolved(&config).unwrap_err().to_string();
        assert!(error.contains(expected), "{keys}: {error}");
    }
    for (keys, expected) in [
        (json!({"qk_norm_type": "per_layer"}), "per-head QK norms"),
        (json!({"use_gemma_norm": false}), "a gain of 1 + weight"),
        (json!({"scoring_func": "softmax"}), "only sigmoid routers"),
        (json!({"use_routing_bias": false}), "only sigmoid routers"),
        (json!({"hidden_act": "gelu"}), "only the activation silu"),
        (json!({"attention_output_gate": true}), "attention without an output gate"),
        (json!({"rotary_dim": 32}), "rotary_dim and partial_rotary_factor"),
        (json!({"first_k_dense_replace": 2}), "which layers have experts"),
        (
            json!({"layer_types": ["full_attention", "minimax_m3_sparse", "x", "minimax_m3_sparse"]}),
            "layer_types",
        ),
    ] {
        let error = resolved(&published(&keys)).unwrap_err().to_string();
        assert!(error.contains(expected), "{keys}: {error}");
    }
}

/// Rules that contradict themselves.
#[test]
fn block_sparse_layers_have_full_attention() {
    let packs = |from: &str, to: &str| {
        let text = crate::rules::builtin_text("minimax-m3").unwrap();
        assert!(text.contains(from), "{from}");
        vec![RulePack::parse(&text.replace(from, to)).unwrap()]
    };
    let of = |from: &str, to: &str| {
        let packs = packs(from, to);
        let config = published(&json!({}));
        let tensors = expected_tensors(&config, &packs).unwrap();
        super::super::resolve(&config, &tensors, &packs).unwrap_err().to_string()
    };
    let error = of("[spec.layer]\n", "[spec.layer]\nwindow = \"8\"\n");
    assert!(error.contains("attention to all keys"), "{error}");
    let error = of("qk_norm = \"'head'\"", "qk_norm = \"'none'\"");
    assert!(error.contains("per-head QK norms"), "{error}");
}
