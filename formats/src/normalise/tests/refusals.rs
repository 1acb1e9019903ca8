//! What is refused, and in which words.

use proptest::prelude::*;

use super::*;

fn chain(error: &ResolveError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

fn message(config: &Value, sources: &[SourceTensor]) -> String {
    chain(&resolve_builtin(config, sources).expect_err("a refusal"))
}

/// The message for a model with one key changed.
fn check_key(name: &str, key: &str, value: Value, expected: &str) {
    let (mut config, sources) = model(name);
    config[key] = value;
    assert_eq!(message(&config, &sources), expected);
}

#[test]
fn unknown_families_are_refused_with_the_known_ones() {
    let mut known: Vec<String> = RulePack::builtin()
        .iter()
        .flat_map(|pack| pack.model_types().map(str::to_owned).collect::<Vec<_>>())
        .collect();
    known.sort();
    let known = format!("known: {}", known.join(", "));
    let check = |value: Value, found: &str| {
        let expected = format!("unknown architecture: model_type is {found}; {known}");
        check_key("llama", "model_type", value, &expected);
    };
    check(json!("gpt2"), "\"gpt2\"");
    check(Value::Null, "null");
    check(json!(["llama"]), "[\"llama\"]");
    assert_eq!(message(&json!([]), &[]), "the configuration is not a JSON object");
    check_key(
        "llama",
        "architectures",
        json!(["LlamaForSequenceClassification"]),
        "a llama model of class [\"LlamaForSequenceClassification\"]; known: LlamaForCausalLM",
    );
}

#[test]
fn unknown_keys_are_refused_with_their_values() {
    for value in [json!(true), json!(1), json!(0.5), json!("x"), json!([0]), json!({"a": null})] {
        let shown = crate::expr::Value::from_json(&value).unwrap();
        let expected =
            format!("config keys that the rules of llama do not know: attn_output_gate = {shown}");
        check_key("llama", "attn_output_gate", value, &expected);
    }
    let (mut config, sources) = model("qwen3");
    config["sliding_window_pattern"] = 4.into();
    config["mlp_bias"] = true.into();
    assert_eq!(
        message(&config, &sources),
        "config keys that the rules of qwen3 do not know: mlp_bias = true, \
         sliding_window_pattern = 4"
    );
}

#[test]
fn values_beyond_the_engine_are_refused_with_the_reason() {
    let check = check_key;
    check(
        "llama",
        "hidden_act",
        json!("xielu"),
        "the activation is not implemented (llama: act = \"xielu\")",
    );
    check(
        "llama",
        "pretraining_tp",
        json!(2),
        "projections summed in slices are not implemented (llama: pretraining_tp = 2)",
    );
    check(
        "llama",
        "auto_map",
        json!({"AutoModelForCausalLM": "modeling.Mine"}),
        "the model runs code from its repository (llama: auto_map = \
         {\"AutoModelForCausalLM\": \"modeling.Mine\"}, native = false)",
    );
    check(
        "qwen3",
        "layer_types",
        json!(["full_attention", "full_attention", "sliding_attention", "full_attention"]),
        "layer_types has a kind of layer that the other keys do not describe (qwen3: L = 2, \
         layer_types = [\"full_attention\", \"full_attention\", \"sliding_attention\", \
         \"full_attention\"])",
    );
    check(
        "llama",
        "rope_scaling",
        json!({"type": "spiral"}),
        "unusable position embedding: rope_scaling has rope_type \"spiral\"; known: default, \
         linear, dynamic, llama3, proportional, yarn, longrope",
    );
}

#[test]
fn impossible_numbers_are_refused_with_their_expression() {
    check_key(
        "llama",
        "num_key_value_heads",
        json!(4),
        "axis kv: `kv_heads` is 4, expected a divisor of 6, the units of axis q",
    );
    check_key(
        "llama",
        "hidden_size",
        json!("192"),
        "hidden_size: `hidden_size` is \"192\", expected an integer from 1 to 268435456",
    );
    check_key(
        "llama",
        "num_hidden_layers",
        json!(4097),
        "layers: `num_hidden_layers` is 4097, expected at most 4096",
    );
    check_key(
        "llama",
        "rms_norm_eps",
        json!(-1.0),
        "norm.eps: `eps` is -1.0, expected a number above 0, at most 1",
    );
    check_key(
        "llama",
        "tie_word_embeddings",
        json!("yes"),
        "tied_embeddings: `tied` is \"yes\", expected true or false",
    );
    check_key(
        "llama",
        "head_dim",
        json!(33),
        "unusable position embedding: 33 rotated elements per head, expected an even number up to \
         16384",
    );
    check_key(
        "llama",
        "num_attention_heads",
        json!(i64::MAX),
        "let q_size cannot be computed: in `num_attention_heads * head_size`: arithmetic on \
         9223372036854775807 and 32 overflows",
    );
    check_key(
        "llama",
        "num_attention_heads",
        json!(65_537),
        "axis q: `num_attention_heads` is 65537, expected at most 65536",
    );
    let (mut config, sources) = model("llama");
    config["head_dim"] = Value::Null;
    config["num_attention_heads"] = 5.into();
    assert_eq!(
        message(&config, &sources),
        "let head_size cannot be computed: in `head_dim ?? hidden_size / num_attention_heads`: \
         192 / 5 is not an integer"
    );
    config["num_attention_heads"] = Value::Null;
    assert_eq!(
        message(&config, &sources),
        "let head_size cannot be computed: in `head_dim ?? hidden_size / num_attention_heads`: \
         `num_attention_heads` (null) is not a number"
    );
}

#[test]
fn tensors_that_do_not_add_up_are_listed_with_shapes() {
    let (config, all) = model("llama-tied");
    let extra =
        |name: &str| SourceTensor { name: name.to_owned(), dtype: Dtype::BF16, shape: vec![384] };
    let mut sources = all.clone();
    sources.push(extra("model.layers.0.self_attn.q_proj.bias"));
    assert_eq!(
        message(&config, &sources),
        "1 unknown tensor (named by no rule): model.layers.0.self_attn.q_proj.bias [384]"
    );
    let mut sources = all.clone();
    sources.retain(|tensor| !tensor.name.contains("layers.1.mlp"));
    sources.push(extra("model.layers.3.input_layernorm.weight"));
    assert_eq!(
        message(&config, &sources),
        "3 missing tensors (expected by the rules): model.layers.1.mlp.gate_proj.weight [320, \
         192], model.layers.1.mlp.up_proj.weight [320, 192], model.layers.1.mlp.down_proj.weight \
         [192, 320]; 1 unknown tensor (named by no rule): model.layers.3.input_layernorm.weight \
         [384]"
    );
    let text = message(&config, &[]);
    assert!(text.starts_with("29 missing tensors"), "{text}");
    assert!(text.ends_with(" and 9 more"), "{text}");
}

#[test]
fn tied_flag_and_output_head_must_agree() {
    let (mut config, mut sources) = model("llama-tied");
    config["tie_word_embeddings"] = false.into();
    assert_eq!(
        message(&config, &sources),
        "1 missing tensor (expected by the rules): lm_head.weight [512, 192]"
    );
    config["tie_word_embeddings"] = true.into();
    let name = "lm_head.weight".to_owned();
    sources.push(SourceTensor { name, dtype: Dtype::BF16, shape: vec![520, 192] });
    assert_eq!(
        message(&config, &sources),
        "tensor \"lm_head.weight\" has shape [520, 192], expected [vocab_size = 512, hidden_size \
         = 192]"
    );
}

#[test]
fn wrong_shapes_types_and_names_are_refused() {
    let (config, all) = model("llama");
    let change = |name: &str, change: &dyn Fn(&mut SourceTensor)| {
        let mut sources = all.clone();
        change(sources.iter_mut().find(|tensor| tensor.name == name).unwrap());
        message(&config, &sources)
    };
    assert_eq!(
        change("model.layers.1.self_attn.k_proj.weight", &|tensor| tensor.shape = vec![192, 64]),
        "tensor \"model.layers.1.self_attn.k_proj.weight\" has shape [192, 64], expected [kv_size \
         = 64, hidden_size = 192]"
    );
    assert_eq!(
        change("model.norm.weight", &|tensor| tensor.dtype = Dtype::U32),
        "tensor \"model.norm.weight\" has element type U32, expected F32, F16 or BF16"
    );
    let mut sources = all.clone();
    sources[3].name = format!("module.{}", sources[4].name);
    let text = message(&config, &sources);
    assert!(text.contains("are both \"model.layers.0.mlp.down_proj.weight\""), "{text}");
}

#[test]
fn a_pack_that_splits_heads_is_refused() {
    let text = "schema = 1\nid = 'mine'\nextends = 'decoder'\n[families.llama]\n\
                architectures = ['LlamaForCausalLM']\nused = ['mlp_bias', 'pretraining_tp']\n\
                let = { ffn_biases = 'mlp_bias ?? false' }\n[axes.kv]\nunit = 16\n";
    let (config, sources) = model("llama");
    let error = resolve(&config, &sources, &[RulePack::parse(text).unwrap()]).unwrap_err();
    assert_eq!(
        chain(&error),
        "tensor \"model.layers.0.self_attn.k_proj.weight\" is sharded along axis kv of 32, but has 64 \
         there"
    );
}

/// Any JSON of three levels, with numbers that are typical of attacks among them.
fn any_json() -> impl Strategy<Value = Value> {
    let number = prop::sample::select(vec![
        json!(0),
        json!(1),
        json!(-1),
        json!(3),
        json!(64),
        json!(1 << 28),
        json!(i64::MAX),
        json!(u64::MAX),
        json!(i64::MIN),
        json!(0.5),
        json!(1e300),
        json!(-1e-300),
    ]);
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        number,
        prop::sample::select(vec!["", "silu", "yarn", "llama3", "full_attention"])
            .prop_map(Value::from),
    ];
    let keys = prop::sample::select(vec![
        "type",
        "rope_type",
        "factor",
        "rope_theta",
        "original_max_position_embeddings",
        "beta_fast",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "low_freq_factor",
        "high_freq_factor",
    ]);
    leaf.prop_recursive(3, 24, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(keys.clone(), inner, 0..6)
                .prop_map(|map| map.into_iter().map(|(k, v)| (k.to_owned(), v)).collect()),
        ]
    })
}

proptest! {
    #[test]
    fn no_configuration_panics(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any_json()), 1..4),
        name in prop::sample::select(vec!["llama", "llama-tied", "qwen3", "kjv-4m"]),
    ) {
        let (mut config, sources) = model(name);
        let mut keys: Vec<String> = config.as_object().unwrap().keys().cloned().collect();
        keys.extend(["rope_scaling", "rope_parameters", "layer_types"].map(str::to_owned));
        for (index, value) in changes {
            config[index.get(&keys)] = value;
        }
        if let Ok(normalised) = resolve_builtin(&config, &sources) {
            let rope = &normalised.spec.ropes[0];
            prop_assert!(rope.inv_freq.iter().all(|frequency| frequency.0.is_finite()));
            prop_assert!(rope.attention_factor.0.is_finite());
            let package = crate::config_for_package(&config, &normalised, None);
            prop_assert_eq!(resolve_builtin(&package, &sources).unwrap().spec, normalised.spec);
        }
    }
}
