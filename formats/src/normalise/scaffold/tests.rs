//! Scaffolded rules of models whose rules are known: what they say, and that they can be finished.

use serde_json::json;

use super::*;
use crate::{
    OwnRules,
    normalise::{resolve, tests::model},
    rules::OwnRulesError,
};

/// Scaffolded rules without their points.
fn decided(text: &str) -> String {
    let (before, rest) = text.split_once("todo = [").unwrap();
    let (_, after) = rest.split_once("\n]\n").unwrap();
    format!("{before}{after}")
}

#[test]
fn indices_are_told_apart() {
    assert_eq!(
        pattern("model.layers.3.mlp.experts.17.w1.weight"),
        "model.layers.{L}.mlp.experts.{E}.w1.weight"
    );
    assert_eq!(pattern("model.norm.weight"), "model.norm.weight");
    assert_eq!((layer("model.layers.3.x.5.y"), layer("lm_head.weight")), (Some(3), None));
}

#[test]
fn a_renamed_model_needs_nothing_but_a_decision() {
    let (mut config, sources) = model("qwen3");
    let expected = resolve(&config, &sources, &RulePack::builtin()).unwrap();
    config["model_type"] = "zephyr".into();
    config["architectures"] = json!(["ZephyrForCausalLM"]);
    let scaffold = scaffold(&config, &sources, &RulePack::builtin()).unwrap();
    assert_eq!((scaffold.nearest.as_str(), scaffold.points), ("dense-gqa (qwen3)", 1));
    let OwnRulesError { line, problem } = OwnRules::parse(&scaffold.text).unwrap_err();
    assert!(problem.contains("1 points are not decided"), "{problem}");
    assert!(scaffold.text.lines().nth(line.unwrap() - 1).unwrap().starts_with("todo"));
    let own = OwnRules::parse(&decided(&scaffold.text))
        .unwrap_or_else(|e| panic!("{e}\n{}", scaffold.text));
    let found = resolve(&config, &sources, &[own.pack]).unwrap();
    assert_eq!(found.tensors, expected.tensors);
    assert_eq!(found.spec.layers, expected.spec.layers);
    assert_eq!(found.spec.model_type, "zephyr");
}

#[test]
fn what_differs_becomes_a_point() {
    let (mut config, mut sources) = model("llama-tied");
    config["model_type"] = "zephyr".into();
    config["residual_gate"] = "tanh".into();
    config["attn_dropout_rate"] = 0.1.into();
    config["switched_off"] = false.into();
    sources.retain(|tensor| tensor.name != "model.norm.weight");
    for layer in 0..3 {
        for (name, shape) in [("residual_gate", vec![192, 64]), ("mlp.experts.1.up", vec![7])] {
            let name = format!("model.layers.{layer}.{name}.weight");
            sources.push(SourceTensor { name, dtype: shardpack_quantize::Dtype::BF16, shape });
        }
    }
    let scaffold = scaffold(&config, &sources, &RulePack::builtin()).unwrap();
    // However TOML quotes them.
    let plain = |text: &str| text.replace(['"', '\'', '\\'], "");
    let found = plain(&scaffold.text);
    for expected in [
        "config key residual_gate = tanh is read by nothing",
        "config key attn_dropout_rate = 0.1 was guessed to be without effect",
        "tensor model.norm.weight of llama is not there",
        "    residual_gate, # tanh",
        "    attn_dropout_rate, # 0.1",
        "# layers 0 to 2, [192, 64]; a guess.\n[[tensors]]\nname = model.layers.{L}.residual_gate.weight\n\
         shape = [hidden_size, kv_size]",
        "# [[tensors]]\n# name = model.layers.{L}.mlp.experts.{E}.up.weight",
        "without = [\n    model.norm.weight,\n]",
    ] {
        assert!(found.contains(expected), "{expected}\n{}", scaffold.text);
    }
    assert!(!scaffold.text.contains("switched_off"));
    OwnRules::parse(&decided(&scaffold.text)).unwrap();
}

#[test]
fn without_a_name_there_is_nothing_to_scaffold() {
    let (mut config, sources) = model("llama");
    config["model_type"] = Value::Null;
    let error = scaffold(&config, &sources, &RulePack::builtin()).unwrap_err();
    assert!(error.to_string().contains("model_type is null"), "{error}");
    assert!(scaffold(&json!([]), &sources, &RulePack::builtin()).is_err());
}
