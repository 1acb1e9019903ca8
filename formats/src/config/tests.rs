//! What goes into a package's config.

use serde_json::json;

use super::*;
use crate::{
    RulePack,
    normalise::{
        expected_tensors,
        tests::{model, resolve_builtin},
    },
};

fn package_config(name: &str, quantization: Option<&ConfigQuantization>) -> (Value, Value) {
    let (config, sources) = model(name);
    let normalised = resolve_builtin(&config, &sources).unwrap();
    let out = config_for_package(&config, &normalised, quantization);
    // A package of one rank is a source again, and means the same.
    let mut again = out.clone();
    for key in ["quantization", "quantization_config"] {
        again.as_object_mut().unwrap().remove(key);
    }
    let resolved = resolve_builtin(&again, &sources).unwrap();
    assert_eq!(resolved, normalised, "{name}");
    (config, out)
}

#[test]
fn quantization_is_stated_as_mlx_does() {
    let quantization = ConfigQuantization {
        main: GroupConfig { group_size: 64, bits: 4, float: None },
        overrides: BTreeMap::from([
            ("lm_head".to_owned(), Some(GroupConfig { group_size: 32, bits: 8, float: None })),
            ("model.layers.0.mlp.down_proj".to_owned(), None),
        ]),
    };
    let (_, out) = package_config("llama", Some(&quantization));
    let expected = json!({
        "group_size": 64, "bits": 4, "mode": "affine",
        "lm_head": {"group_size": 32, "bits": 8}, "model.layers.0.mlp.down_proj": false
    });
    assert_eq!(out["quantization"], expected);
    assert_eq!(out["quantization_config"], expected);
    let (_, out) = package_config("llama", None);
    assert_eq!(out.get("quantization"), None);
}

#[test]
fn what_readers_would_guess_is_spelled_out() {
    let (mut config, sources) = model("llama-tied");
    let map = config.as_object_mut().unwrap();
    for key in ["rms_norm_eps", "max_position_embeddings", "rope_theta", "rope_scaling"] {
        map.remove(key);
    }
    map["num_key_value_heads"] = json!(1);
    map.insert("_name_or_path".to_owned(), json!("/home/someone/out"));
    let normalised = resolve_builtin(&config, &sources).unwrap();
    let out = config_for_package(&config, &normalised, None);
    assert_eq!(out["rms_norm_eps"], json!(1e-6));
    assert_eq!(out["max_position_embeddings"], json!(2048));
    assert_eq!((&out["rope_theta"], &out["rope_scaling"]), (&json!(10000.0), &Value::Null));
    assert_eq!(out["tie_word_embeddings"], json!(true));
    assert_eq!((out.get("_name_or_path"), out.get("rope_parameters")), (None, None));
    assert_eq!(out["torch_dtype"], config["torch_dtype"]);
}

#[test]
fn both_spellings_of_the_position_embedding_are_written_for_newer_sources() {
    let (_, out) = package_config("kjv-4m", None);
    assert_eq!(out["rope_parameters"], json!({"rope_type": "default", "rope_theta": 10000.0}));
    assert_eq!((&out["rope_theta"], &out["rope_scaling"]), (&json!(10000.0), &Value::Null));
    let (config, out) = package_config("llama", None);
    assert_eq!(out["rope_scaling"], config["rope_scaling"]);
    assert_eq!(out.get("rope_parameters"), None);
    package_config("qwen3", None);
}

#[test]
fn scaling_stands_only_in_the_sections_of_kinds_of_layers() {
    for config in [
        include_str!("../../../tests/data/models/laguna/config.json"),
        include_str!("../../../tests/data/models/gemma4_text/config.json"),
    ] {
        let config: Value = serde_json::from_str(config).unwrap();
        let tensors = expected_tensors(&config, &RulePack::builtin()).unwrap();
        let normalised = resolve_builtin(&config, &tensors).unwrap();
        let out = config_for_package(&config, &normalised, None);
        assert!(out["rope_parameters"]["full_attention"].is_object());
        assert_eq!(out["rope_parameters"], config["rope_parameters"]);
        assert_eq!(out.get("rope_scaling"), None);
    }
}

#[test]
fn keys_are_sorted_and_the_vocabulary_is_the_tensors() {
    let (config, mut sources) = model("llama-tied");
    sources.iter_mut().find(|tensor| tensor.name.contains("embed")).unwrap().shape[0] = 520;
    let normalised = resolve_builtin(&config, &sources).unwrap();
    let out = config_for_package(&config, &normalised, None);
    assert_eq!(out["vocab_size"], json!(520));
    let keys: Vec<&String> = out.as_object().unwrap().keys().collect();
    assert!(keys.is_sorted(), "{keys:?}");
}
