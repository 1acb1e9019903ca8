//! Layers that are published in pairs, as `LongCat` Flash's configuration and tensors spell them.

use serde_json::{Value, json};

use super::resolve_builtin;
use crate::{
    RulePack,
    hex::HexF32,
    normalise::{Normalised, ResolveError, SourceTensor, expected_tensors},
    spec::{Layer, Scores},
};
use shardpack_quantize::Dtype;

/// The published configuration of `LongCat` Flash Chat, of another size.
fn config(keys: &Value) -> Value {
    let mut config = json!({
        "architectures": ["LongcatFlashForCausalLM"], "model_type": "longcat_flash",
        "attention_bias": false, "attention_dropout": 0.0, "attention_method": "MLA",
        "bos_token_id": 1, "eos_token_id": 2, "expert_ffn_hidden_size": 32,
        "ffn_hidden_size": 96, "hidden_size": 64, "kv_lora_rank": 16,
        "max_position_embeddings": 131_072, "mla_scale_kv_lora": true, "mla_scale_q_lora": true,
        "moe_topk": 6, "n_routed_experts": 4, "num_attention_heads": 2, "num_layers": 3,
        "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "rms_norm_eps": 1e-5,
        "rope_theta": 10_000_000.0, "routed_scaling_factor": 6.0, "use_cache": true,
        "v_head_dim": 16, "vocab_size": 64, "zero_expert_num": 2, "zero_expert_type": "identity",
    });
    for (key, value) in keys.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

fn resolved(keys: &Value) -> Result<Normalised, ResolveError> {
    let config = config(keys);
    let mut tensors = expected_tensors(&config, &RulePack::builtin())?;
    let name = "model.mtp.layers.0.eh_proj.weight".to_owned();
    tensors.push(SourceTensor { name, dtype: Dtype::BF16, shape: vec![64, 128] });
    resolve_builtin(&config, &tensors)
}

#[test]
fn a_published_layer_is_two() {
    let model = resolved(&json!({})).unwrap();
    let spec = &model.spec;
    let kinds: Vec<bool> = spec.layers.iter().map(|layer| layer.moe).collect();
    assert_eq!(kinds, [true, false, true, false, true, false]);
    assert!(spec.layers.iter().all(|it| Layer { moe: false, ..it.clone() } == Layer::plain()));
    let moe = spec.moe.as_ref().unwrap();
    assert_eq!([moe.experts, moe.zero_experts, moe.choices(), moe.top_k], [4, 2, 6, 6]);
    assert!(moe.shortcut && moe.router.correction && moe.router.renormalise.is_none());
    assert_eq!((moe.router.scores, moe.router.scale), (Scores::Softmax, HexF32(6.0)));
    // Of latents of 32 and 16 in a width of 64, and of heads of 32.
    assert_eq!(spec.attention.scale, HexF32(0.25));
    assert_eq!(spec.mla.as_ref().unwrap().kv_scale, Some(HexF32(2.0)));
    assert_eq!(spec.features(), ["mla", "moe", "shortcut-moe", "zero-computation-experts"]);
    let begins: Vec<usize> = (0..6).filter(|layer| spec.may_begin(*layer)).collect();
    assert_eq!(begins, [0, 2, 4]);
    assert_eq!(model.ignored.len(), 1);
}

#[test]
fn tensors_of_pairs_stand_in_files_as_published() {
    let model = resolved(&json!({})).unwrap();
    let check = |name: &str, source: &str, stored: &str| {
        let tensor = model.tensors.iter().find(|tensor| tensor.name == name).unwrap();
        assert_eq!(tensor.sources[0], source, "{name}");
        assert_eq!(tensor.stored_as.as_ref().unwrap().name, stored, "{name}");
    };
    let norm = "model.layers.1.input_layernorm.1.weight";
    check("model.layers.3.input_layernorm.weight", norm, norm);
    let dense = "model.layers.2.mlps.0.up_proj.weight";
    check("model.layers.4.mlp.up_proj.weight", dense, dense);
    check(
        "model.layers.5.self_attn.embed_q.weight",
        "model.layers.2.self_attn.1.kv_b_proj.weight",
        "model.layers.2.self_attn.1.embed_q.weight",
    );
    let router = "model.layers.1.mlp.router.classifier.weight";
    check("model.layers.2.shortcut.gate.weight", router, router);
    check(
        "model.layers.2.shortcut.switch_mlp.down_proj.weight",
        "model.layers.1.mlp.experts.0.down_proj.weight",
        "model.layers.1.mlp.switch_mlp.down_proj.weight",
    );
}

#[test]
fn what_is_not_computed_is_refused() {
    for (keys, says) in [
        (json!({"attention_method": "LSA"}), "latent queries"),
        (json!({"zero_expert_type": "copy"}), "zero-computation experts"),
        (json!({"mla_scale_q_lora": false}), "scaled"),
        (json!({"router_bias": true}), "without a bias"),
        (json!({"norm_topk_prob": true}), "without renormalised weights"),
        (json!({"num_hidden_layers": 4}), "do not agree"),
        (json!({"moe_topk": 7}), "at most 6"),
    ] {
        let error = resolved(&keys).unwrap_err().to_string();
        assert!(error.contains(says), "{keys}: {error}");
    }
    for keys in [json!({"num_hidden_layers": 6}), json!({"use_mla": 1, "mtp_num_layers": 1})] {
        resolved(&keys).unwrap_or_else(|error| panic!("{keys}: {error}"));
    }
    // As fine-tunes may have it: no expert is without weights.
    let model = resolved(&json!({"zero_expert_num": 0, "moe_topk": 4})).unwrap();
    assert_eq!(model.spec.moe.unwrap().zero_experts, 0);
}

#[test]
fn the_published_sizes_are_as_many_weights_as_it_is_said_to_have() {
    let config = config(&json!({
        "expert_ffn_hidden_size": 2048, "ffn_hidden_size": 12_288, "hidden_size": 6144,
        "kv_lora_rank": 512, "moe_topk": 12, "n_routed_experts": 512, "num_attention_heads": 64,
        "num_layers": 28, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "vocab_size": 131_072, "zero_expert_num": 256,
    }));
    let tensors = expected_tensors(&config, &RulePack::builtin()).unwrap();
    let weights: u64 = tensors.iter().map(|it| it.shape.iter().product::<u64>()).sum();
    assert_eq!(weights / 1_000_000_000, 560);
    let spec = resolve_builtin(&config, &tensors).unwrap().spec;
    assert_eq!((spec.layers.len(), spec.moe.unwrap().choices()), (56, 768));
}
