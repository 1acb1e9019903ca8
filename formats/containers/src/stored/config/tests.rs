//! Descriptions of stored precisions as published models have them, and what is wrong with others.

use serde_json::{Value, json};

use super::*;

fn parse(config: &Value) -> Result<Option<StoredConfig>, StoredError> {
    let config = json!({ "quantization_config": config });
    StoredConfig::parse(Documents { config: Some(&config), ..Documents::default() })
}

fn check_refused(config: &Value, words: &[&str]) {
    let error = parse(config).unwrap_err().to_string();
    for word in words {
        assert!(error.contains(word), "expected {word:?} in: {error}");
    }
}

#[test]
fn a_config_without_a_description_means_plain_floats() {
    assert!(parse(&Value::Null).unwrap().is_none());
    assert!(StoredConfig::parse(Documents::default()).unwrap().is_none());
}

#[test]
fn formats_that_are_not_read_are_named() {
    for method in ["exl2", "exl3", "aqlm", "something"] {
        check_refused(&json!({ "quant_method": method }), &[method, "not read", "original"]);
    }
    check_refused(
        &json!({ "quant_method": "gptq", "bits": 3, "group_size": 64 }),
        &["gptq", "3 bits"],
    );
    check_refused(
        &json!({ "quant_method": "gptq", "bits": 4, "group_size": 64, "checkpoint_format": "marlin" }),
        &["gptq", "marlin"],
    );
    check_refused(
        &json!({ "quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv" }),
        &["awq", "gemv"],
    );
    check_refused(&json!({ "quant_method": "modelopt", "quant_algo": "W4A8_AWQ" }), &["W4A8_AWQ"]);
    check_refused(
        &json!({ "quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "has_zero_point": true }),
        &["has_zero_point"],
    );
    for method in ["bitsandbytes", "hqq", "torchao"] {
        check_refused(&json!({ "quant_method": method, "bits": 4 }), &["bits = 4", method]);
    }
}

#[test]
fn unknown_keys_are_refused_unless_they_ask_for_nothing() {
    check_refused(
        &json!({ "quant_method": "fp8", "weight_rotation": "hadamard" }),
        &["weight_rotation", "hadamard", "quantization_config"],
    );
    assert!(parse(&json!({ "quant_method": "fp8", "weight_rotation": null })).unwrap().is_some());
    check_refused(&json!({ "quant_method": "fp8", "fmt": "e5m2" }), &["fmt", "e5m2", "e4m3"]);
    check_refused(
        &json!({ "quant_method": "fp8", "weight_block_size": [128] }),
        &["weight_block_size", "[128]"],
    );
    check_refused(&json!([]), &["quantization_config", "[]", "object"]);
}

fn compressed(weights: &Value, more: &Value) -> Value {
    let mut config = json!({
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": { "group_0": { "targets": ["Linear"], "weights": weights } },
    });
    for (key, value) in more.as_object().into_iter().flatten() {
        config[key] = value.clone();
    }
    config
}

#[test]
fn groups_of_modules_are_told_apart() {
    let weights = |bits: u64| json!({ "num_bits": bits, "strategy": "channel" });
    let config = json!({
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*gate$"],
        "config_groups": {
            "a": { "targets": ["Linear"], "weights": weights(4) },
            "b": { "targets": ["re:model.*down_proj"], "weights": weights(8) },
        },
    });
    let Method::CompressedTensors(config) = parse(&config).unwrap().unwrap().0 else { panic!() };
    assert_eq!(config.of("model.layers.0.mlp.up_proj").unwrap().bits, 4);
    assert_eq!(config.of("model.layers.0.mlp.down_proj").unwrap().bits, 8);
    assert!(config.of("lm_head").unwrap_err().contains("ignore"));
    assert!(config.of("model.layers.0.mlp.gate").unwrap_err().contains("ignore"));
}

#[test]
fn compressed_tensors_that_mean_something_else_are_refused() {
    let four = json!({ "num_bits": 4, "group_size": 32, "strategy": "group" });
    assert!(parse(&compressed(&four, &json!({}))).is_ok());
    let rotated = json!({ "transform_config": { "config_groups": { "u": {} } } });
    check_refused(&compressed(&four, &rotated), &["transform_config", "rotated"]);
    check_refused(&compressed(&four, &json!({ "quantization_status": "frozen" })), &["frozen"]);
    let three = json!({ "num_bits": 3, "group_size": 32, "strategy": "group" });
    check_refused(&compressed(&three, &json!({})), &["pack-quantized", "3 bits"]);
    let ordered =
        json!({ "num_bits": 4, "group_size": 32, "strategy": "group", "actorder": "group" });
    check_refused(&compressed(&ordered, &json!({})), &["actorder"]);
    let pattern = json!({ "ignore": ["re:("] });
    check_refused(&compressed(&four, &pattern), &["ignore", "regular expressions"]);
}

#[test]
fn mlx_choices_hold_for_modules() {
    let config = json!({ "quantization": {
        "group_size": 32, "bits": 8, "a.b": { "group_size": 64, "bits": 4 }, "c": false,
    } });
    let documents = Documents { config: Some(&config), ..Documents::default() };
    let Some(StoredConfig(Method::Mlx(mlx))) = StoredConfig::parse(documents).unwrap() else {
        panic!()
    };
    assert_eq!((mlx.main.bits, mlx.main.group_size), (8, 32));
    assert_eq!(mlx.overrides["a.b"].map(|format| format.bits), Some(4));
    assert_eq!(mlx.overrides["c"], None);
    check_refused(&json!({ "group_size": 48, "bits": 4 }), &["bits", "MLX"]);
    check_refused(&json!({ "group_size": 64, "bits": 7 }), &["bits", "MLX"]);
}
