//! Checkpoints that resolve, and those that are refused.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::*;
use crate::{
    rope::{Scaling, Spelling},
    spec::{Activation, Block, Layer, Mask, NormKind, QkNorm},
};

mod bailing_hybrid;
mod block_sparse;
mod compressed_attention;
mod longcat;
mod refusals;
mod saved_again;
mod sparse;

/// A model of `tests/data`: its configuration and the tensors of its file.
pub(crate) fn model(name: &str) -> (Value, Vec<SourceTensor>) {
    let text = match name {
        "llama" => include_str!("../../tests/data/llama.json"),
        "llama-tied" => include_str!("../../tests/data/llama-tied.json"),
        "qwen3" => include_str!("../../tests/data/qwen3.json"),
        _ => include_str!("../../tests/data/kjv-4m.json"),
    };
    let mut model: Value = serde_json::from_str(text).unwrap();
    let tensors: BTreeMap<String, (Dtype, Vec<u64>)> =
        serde_json::from_value(model["tensors"].take()).unwrap();
    let tensors = tensors
        .into_iter()
        .map(|(name, (dtype, shape))| SourceTensor { name, dtype, shape })
        .collect();
    (model["config"].take(), tensors)
}

pub(crate) fn resolve_builtin(
    config: &Value,
    sources: &[SourceTensor],
) -> Result<Normalised, ResolveError> {
    resolve(config, sources, &RulePack::builtin())
}

/// Published names and shapes of a model without biases.
fn published(config: &Value, head_dim: u64, head: bool, qk_norm: bool) -> Vec<SourceTensor> {
    let size = |key: &str| config[key].as_u64().unwrap();
    let (hidden, inner) = (size("hidden_size"), size("intermediate_size"));
    let (q, kv) = (size("num_attention_heads") * head_dim, size("num_key_value_heads") * head_dim);
    let mut tensors = vec![
        ("model.embed_tokens.weight".to_owned(), vec![size("vocab_size"), hidden]),
        ("model.norm.weight".to_owned(), vec![hidden]),
    ];
    if head {
        tensors.push(("lm_head.weight".to_owned(), vec![size("vocab_size"), hidden]));
    }
    for layer in 0..size("num_hidden_layers") {
        let mut add = |name: &str, shape: &[u64]| {
            tensors.push((format!("model.layers.{layer}.{name}.weight"), shape.to_vec()));
        };
        add("input_layernorm", &[hidden]);
        add("post_attention_layernorm", &[hidden]);
        add("self_attn.q_proj", &[q, hidden]);
        add("self_attn.k_proj", &[kv, hidden]);
        add("self_attn.v_proj", &[kv, hidden]);
        add("self_attn.o_proj", &[hidden, q]);
        add("mlp.gate_proj", &[inner, hidden]);
        add("mlp.up_proj", &[inner, hidden]);
        add("mlp.down_proj", &[hidden, inner]);
        if qk_norm {
            add("self_attn.q_norm", &[head_dim]);
            add("self_attn.k_norm", &[head_dim]);
        }
    }
    tensors
        .into_iter()
        .map(|(name, shape)| SourceTensor { name, dtype: Dtype::BF16, shape })
        .collect()
}

#[test]
fn llama_with_biases_is_described_in_full() {
    let (config, sources) = model("llama");
    let normalised = resolve_builtin(&config, &sources).unwrap();
    let spec = &normalised.spec;
    assert_eq!((spec.rules.as_str(), spec.model_type.as_str()), ("dense-gqa", "llama"));
    assert_eq!((spec.hidden_size, spec.vocab_size, spec.max_positions), (192, 512, 512));
    assert_eq!((spec.norm.kind, spec.norm.eps.0), (NormKind::Rms, 0.004));
    let attention = &spec.attention;
    assert_eq!((attention.heads, attention.kv_heads, attention.head_dim), (6, 2, 32));
    assert_eq!(attention.scale.0.to_bits(), 0x3e35_04f3);
    assert!(attention.qkv_bias && attention.o_bias);
    assert_eq!(attention.qk_norm, QkNorm::None);
    assert_eq!((spec.ffn.size, spec.ffn.activation), (320, Activation::SiluGlu));
    assert!(spec.ffn.bias && !spec.tied_embeddings);
    assert_eq!(spec.layers, vec![Layer::plain(); 3]);
    assert_eq!((spec.ropes.len(), spec.ropes[0].inv_freq.len()), (1, 16));
    assert!(matches!(normalised.rope.scaling, Scaling::Llama3 { original: 32, .. }));
    assert!(normalised.warnings.is_empty() && normalised.ignored.is_empty());
    assert_eq!(normalised.tied_duplicate, None);
}

#[test]
fn tensors_come_in_the_order_in_which_layers_run() {
    let (config, sources) = model("llama");
    let plans = resolve_builtin(&config, &sources).unwrap().tensors;
    assert_eq!(plans.len(), sources.len());
    let line = |plan: &TensorPlan| {
        let axis = plan.sharding.axis().unwrap_or("-");
        let quantize = if plan.quantizable { "q" } else { "16" };
        format!("{} {:?} {axis} {:?} {quantize}", plan.name, plan.shape, plan.role)
    };
    let lines: Vec<String> = plans.iter().map(line).collect();
    assert_eq!(lines[0], "model.embed_tokens.weight [512, 192] vocab Embed q");
    let layer: Vec<String> = [
        "input_layernorm.weight [192] - Norm 16",
        "self_attn.q_proj.weight [192, 192] q Linear q",
        "self_attn.q_proj.bias [192] q Bias 16",
        "self_attn.k_proj.weight [64, 192] kv Linear q",
        "self_attn.k_proj.bias [64] kv Bias 16",
        "self_attn.v_proj.weight [64, 192] kv Linear q",
        "self_attn.v_proj.bias [64] kv Bias 16",
        "self_attn.o_proj.weight [192, 192] q Linear q",
        "self_attn.o_proj.bias [192] - Bias 16",
        "post_attention_layernorm.weight [192] - Norm 16",
        "mlp.gate_proj.weight [320, 192] ffn Linear q",
        "mlp.gate_proj.bias [320] ffn Bias 16",
        "mlp.up_proj.weight [320, 192] ffn Linear q",
        "mlp.up_proj.bias [320] ffn Bias 16",
        "mlp.down_proj.weight [192, 320] ffn Linear q",
        "mlp.down_proj.bias [192] - Bias 16",
    ]
    .iter()
    .map(|line| format!("model.layers.2.{line}"))
    .collect();
    assert_eq!(lines[33..49], layer[..]);
    assert_eq!(lines[49], "model.norm.weight [192] - Norm 16");
    assert_eq!(lines[50], "lm_head.weight [512, 192] vocab Head q");
    assert_eq!(lines.len(), 51);
    let sharding =
        |name: &str| plans.iter().find(|plan| plan.name.ends_with(name)).unwrap().sharding.clone();
    assert_eq!(sharding("o_proj.weight"), ShardingRule::Row("q".to_owned()));
    assert_eq!(sharding("o_proj.bias"), ShardingRule::Once);
    assert_eq!(sharding("q_proj.bias"), ShardingRule::Vector("q".to_owned()));
    assert_eq!(sharding("down_proj.weight"), ShardingRule::Row("ffn".to_owned()));
    assert_eq!(sharding("down_proj.bias"), ShardingRule::Once);
    assert_eq!(sharding("layers.1.input_layernorm.weight"), ShardingRule::Replicate);
    assert!(plans.iter().all(|plan| plan.sources == [plan.name.clone()]));
    assert_eq!((plans[33].layer, plans[50].layer), (Some(2), None));
    assert_eq!(plans[34].module(), "model.layers.2.self_attn.q_proj");
}

#[test]
fn axes_carry_units_alignment_and_the_map_of_heads() {
    let (config, sources) = model("llama");
    let axes = resolve_builtin(&config, &sources).unwrap().axes;
    let follow = Follow { axis: "q".to_owned(), map: vec![0, 0, 0, 1, 1, 1] };
    let axis = |name: &str, len, unit, align, follow| Axis {
        also: Vec::new(),
        name: name.to_owned(),
        len,
        unit,
        align,
        follow,
    };
    let expected = [
        axis("ffn", 320, 1, Align::Group, None),
        axis("kv", 2, 32, Align::None, Some(follow)),
        axis("q", 6, 32, Align::Group, None),
        axis("vocab", 512, 1, Align::None, None),
    ];
    assert_eq!(axes, expected);
    assert_eq!(axes[2].size(), 192);
}

#[test]
fn tied_and_normed_models_resolve() {
    let (config, sources) = model("llama-tied");
    let tied = resolve_builtin(&config, &sources).unwrap();
    assert!(tied.spec.tied_embeddings);
    assert_eq!(tied.tensors.len(), sources.len());
    assert_eq!((tied.spec.attention.heads, tied.spec.attention.kv_heads), (6, 1));
    assert_eq!(tied.axes[1].follow.as_ref().unwrap().map, [0; 6]);
    assert!(tied.tensors.iter().all(|plan| plan.role != Role::Head));

    let (config, sources) = model("qwen3");
    let qwen = resolve_builtin(&config, &sources).unwrap();
    assert_eq!(qwen.spec.attention.qk_norm, QkNorm::Head);
    assert_eq!((qwen.spec.attention.head_dim, qwen.rope.theta), (64, 1e6));
    assert_eq!(qwen.tensors.len(), sources.len());
    let norm = qwen.tensors.iter().find(|plan| plan.name.ends_with("3.self_attn.k_norm.weight"));
    let norm = norm.unwrap();
    assert_eq!(
        (norm.shape.as_slice(), norm.sharding.clone(), norm.role),
        (&[64][..], ShardingRule::Replicate, Role::Norm)
    );

    let (config, sources) = model("kjv-4m");
    let small = resolve_builtin(&config, &sources).unwrap();
    assert_eq!(small.rope.newer_spelling, Spelling::Flat);
    assert_eq!(small.tensors.len(), sources.len());
    assert_eq!((small.spec.max_positions, small.spec.norm.eps.0), (4096, 1e-5));
}

#[test]
fn published_configurations_resolve() {
    let llama = json!({
        "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 128_000, "eos_token_id": [128_001, 128_008], "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 131_072, "mlp_bias": false, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3"
        }, "rope_theta": 500_000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0.dev0", "use_cache": true, "vocab_size": 128_256
    });
    let normalised = resolve_builtin(&llama, &published(&llama, 128, true, false)).unwrap();
    assert_eq!(normalised.spec.attention.head_dim, 128);
    assert_eq!(normalised.tensors.len(), 32 * 9 + 3);
    assert_eq!(normalised.axes[1].follow.as_ref().unwrap().map[28..], [7, 7, 7, 7]);

    let qwen = json!({
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 151_643, "eos_token_id": 151_645, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
        "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1_000_000,
        "sliding_window": null, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": true, "use_sliding_window": false,
        "vocab_size": 151_936
    });
    let normalised = resolve_builtin(&qwen, &published(&qwen, 128, false, true)).unwrap();
    assert_eq!(normalised.tensors.len(), 28 * 11 + 2);
    assert!(normalised.spec.tied_embeddings);
}

#[test]
fn absent_keys_take_the_defaults_of_the_reference() {
    let (mut config, sources) = model("llama-tied");
    let map = config.as_object_mut().unwrap();
    for key in ["rope_theta", "rms_norm_eps", "max_position_embeddings", "hidden_act"] {
        map.remove(key);
    }
    let spec = resolve_builtin(&config, &sources).unwrap().spec;
    assert_eq!((spec.norm.eps.0, spec.max_positions), (1e-6, 2048));

    // Without key-value heads and a head's width, both follow from the query heads.
    let config = json!({
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
        "num_attention_heads": 4, "vocab_size": 32
    });
    let mut all = config.clone();
    all["num_key_value_heads"] = 4.into();
    let spec = resolve_builtin(&config, &published(&all, 16, true, false)).unwrap().spec;
    assert_eq!((spec.attention.kv_heads, spec.attention.head_dim), (4, 16));
    assert!(!spec.tied_embeddings && !spec.ffn.bias && !spec.attention.qkv_bias);
}

#[test]
fn buffers_are_ignored_and_prefixes_of_tools_stripped() {
    let (config, mut sources) = model("llama-tied");
    for tensor in &mut sources {
        tensor.name = format!("module._orig_mod.{}", tensor.name).replacen(
            "module._orig_mod",
            "_orig_mod",
            1,
        );
    }
    let inv_freq = "_orig_mod.model.layers.0.self_attn.rotary_emb.inv_freq";
    sources.push(SourceTensor { name: inv_freq.to_owned(), dtype: Dtype::F32, shape: vec![32] });
    let normalised = resolve_builtin(&config, &sources).unwrap();
    assert_eq!(normalised.tensors[0].name, "model.embed_tokens.weight");
    assert_eq!(normalised.tensors[0].sources, ["_orig_mod.model.embed_tokens.weight"]);
    assert_eq!(normalised.ignored.len(), 1);
    assert_eq!(normalised.ignored[0].0, inv_freq);
}

#[test]
fn the_embedding_decides_the_vocabulary() {
    let (config, mut sources) = model("llama-tied");
    let embedding = sources.iter_mut().find(|tensor| tensor.name.contains("embed")).unwrap();
    embedding.shape[0] = 520;
    let normalised = resolve_builtin(&config, &sources).unwrap();
    assert_eq!(normalised.spec.vocab_size, 520);
    assert_eq!(normalised.axes[3].len, 520);
    assert_eq!(
        normalised.warnings,
        [
            "config says vocab_size = 512, but model.embed_tokens.weight has 520 rows; the tensor is \
          believed"
        ]
    );
}

#[test]
fn a_head_of_a_tied_model_is_left_for_the_caller_to_compare() {
    let (config, mut sources) = model("llama-tied");
    let name = "lm_head.weight".to_owned();
    sources.push(SourceTensor { name: name.clone(), dtype: Dtype::BF16, shape: vec![512, 192] });
    let normalised = resolve_builtin(&config, &sources).unwrap();
    assert_eq!(normalised.tied_duplicate, Some(name));
    assert_eq!(normalised.tensors.len(), sources.len() - 1);
}

#[test]
fn neutral_unknown_keys_are_named_in_a_warning() {
    let (mut config, sources) = model("llama");
    config["new_gate"] = false.into();
    config["new_scale"] = 1.0.into();
    config["new_name"] = Value::Null;
    assert_eq!(
        resolve_builtin(&config, &sources).unwrap().warnings,
        ["config keys without rules, taken as switched off by their values: new_gate = false, \
          new_scale = 1.0"]
    );
}

#[test]
fn rules_of_the_user_come_first_and_may_differ_by_layer() {
    let text = "schema = 1\nid = 'mine'\nextends = 'dense-gqa'\n[families.llama]\n\
                architectures = ['LlamaForCausalLM']\nused = ['mlp_bias', 'pretraining_tp']\n\
                [families.llama.let]\nffn_biases = 'mlp_bias ?? false'\n\
                window = 'L % 2 == 0 ? 16 : null'\nhas_rope = 'L != 1'\n";
    let mut packs = vec![RulePack::parse(text).unwrap()];
    packs.extend(RulePack::builtin());
    let (config, sources) = model("llama");
    let spec = resolve(&config, &sources, &packs).unwrap().spec;
    assert_eq!(spec.rules, "mine");
    let layers: Vec<_> = spec.layers.iter().map(|layer| (layer.mask, layer.rope)).collect();
    let (sliding, full) = (Mask::Sliding(16), Mask::Full);
    assert_eq!(layers, [(sliding, Some(0)), (full, None), (sliding, Some(0))]);
}

#[test]
fn a_configuration_may_state_whether_blocks_are_parallel() {
    let text = "schema = 1\nid = 'mine'\nextends = 'dense-gqa'\n[families.llama]\n\
                architectures = ['LlamaForCausalLM']\n\
                used = ['mlp_bias', 'pretraining_tp', 'use_parallel_residual']\n\
                [families.llama.let]\nffn_biases = 'mlp_bias ?? false'\n\
                [spec.block]\nbefore_attention = 'input_layernorm'\n\
                before_ffn = 'post_attention_layernorm'\n\
                parallel = 'use_parallel_residual ?? true'\n";
    let packs = [RulePack::parse(text).unwrap()];
    let (mut config, sources) = model("llama");
    for (stated, parallel) in [(Value::Null, true), (true.into(), true), (false.into(), false)] {
        config["use_parallel_residual"] = stated;
        let spec = resolve(&config, &sources, &packs).unwrap().spec;
        assert_eq!(spec.block, Block { parallel, ..Block::pre_norm() });
    }
    config["use_parallel_residual"] = json!(2);
    let error = resolve(&config, &sources, &packs).unwrap_err();
    assert!(error.to_string().contains("block.parallel"), "{error}");
}

#[test]
fn a_tensor_that_rules_do_not_require_may_be_absent() {
    let bias = |name: &str| {
        let module = "model.layers.{L}.self_attn";
        format!("[[tensors]]\nname = '{module}.{name}_proj.bias'\nrequired = false\n")
    };
    let text = format!(
        "schema = 1\nid = 'mine'\nextends = 'dense-gqa'\n[families.llama]\n\
         architectures = ['LlamaForCausalLM']\nused = ['mlp_bias', 'pretraining_tp']\n\
         let = {{ ffn_biases = 'mlp_bias ?? false' }}\n{}",
        ["q", "k", "v", "o"].map(bias).concat()
    );
    let packs = [RulePack::parse(&text).unwrap()];
    for name in ["llama", "llama-tied"] {
        let (config, sources) = model(name);
        let tensors = resolve(&config, &sources, &packs).unwrap().tensors;
        assert_eq!(tensors.len(), sources.len(), "{name}");
    }
}
