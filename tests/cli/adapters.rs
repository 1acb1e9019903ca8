//! Fine-tunes through the command line: adapters are merged before quantizing, recorded, and
//! refused where they do not fit.

use std::fs;

use serde_json::Value;
use tempfile::tempdir;

use crate::{
    harness::{convert, data, fail, path, succeed},
    running::{Running, ask},
};

fn manifest(set: &std::path::Path) -> Value {
    serde_json::from_slice(&fs::read(set.join("node-0/manifest.json")).unwrap()).unwrap()
}

#[test]
fn an_adapter_changes_the_weights_and_is_recorded() {
    let folder = tempdir().unwrap();
    let base = data("sources/bf16_sharded");
    let set = |name: &str, adapters: &[&str]| {
        let output = folder.path().join(name);
        let adapters: Vec<String> = adapters
            .iter()
            .flat_map(|name| {
                ["--adapter".to_owned(), path(&data(&format!("sources/lora/{name}"))).to_owned()]
            })
            .collect();
        let mut args = vec!["convert", path(&base), "-o", path(&output), "--nodes", "2"];
        args.extend(adapters.iter().map(String::as_str));
        succeed(&args);
        manifest(&output)
    };
    let plain = set("plain", &[]);
    let one = set("one", &["lora_plain"]);
    let two = set("two", &["lora_plain", "mlx_dora"]);
    let ids = [&plain, &one, &two].map(|manifest| manifest["ids"]["weights"].clone());
    assert!(ids[0] != ids[1] && ids[1] != ids[2] && ids[0] != ids[2], "{ids:?}");
    assert!(plain["source"].get("adapters").is_none());
    let adapters = two["source"]["adapters"].as_array().unwrap();
    assert_eq!(adapters.len(), 2);
    assert_eq!(adapters[0]["form"], "peft");
    assert_eq!(adapters[1]["form"], "mlx");
    let file = &adapters[1]["files"][1];
    let bytes = fs::read(data("sources/lora/mlx_dora/adapters.safetensors")).unwrap();
    assert_eq!(file["name"], "adapters.safetensors");
    assert_eq!(file["blake3"], blake3::hash(&bytes).to_hex().as_str());
    assert_eq!(one["quantization"]["dtype"], "BF16", "f32 is the way, not the type");
}

#[test]
fn new_tokens_make_the_vocabulary_grow() {
    let folder = tempdir().unwrap();
    let output = folder.path().join("set");
    let base = data("sources/bf16_sharded");
    let adapter = data("sources/lora/lora_new_tokens");
    let args = ["convert", path(&base), "-o", path(&output), "--bits", "16", "--adapter"];
    succeed(&[&args[..], &[path(&adapter)]].concat());
    let manifest = manifest(&output);
    assert_eq!(manifest["architecture"]["vocab_size"], 520);
    let shape = |name: &str| {
        let tensors = manifest["tensors"].as_array().unwrap();
        tensors.iter().find(|tensor| tensor["name"] == name).unwrap()["shape"].clone()
    };
    for name in ["model.embed_tokens.weight", "lm_head.weight"] {
        assert_eq!(shape(name), serde_json::json!([520, 256]), "{name}");
    }
    let plan = succeed(&["plan", path(&base), "--adapter", path(&adapter), "--json"]);
    let plan: Value = serde_json::from_str(&plan).unwrap();
    assert_eq!(plan["layout"]["axes"]["vocab"]["size"], 520);
}

#[test]
fn adapters_that_do_not_match_the_model_are_refused_before_anything_is_written() {
    let folder = tempdir().unwrap();
    let output = folder.path().join("set");
    let base = data("sources/bf16_sharded");
    for (adapter, word) in
        [("refused_ia3", "IA3"), ("refused_unmatched", "model.layers.7.self_attn")]
    {
        let adapter = data(&format!("sources/lora/{adapter}"));
        let error =
            fail(1, &["convert", path(&base), "-o", path(&output), "--adapter", path(&adapter)]);
        assert!(error.contains(word), "{error}");
        assert!(!output.exists());
    }
    let missing = folder.path().join("missing");
    let error = fail(1, &["plan", path(&base), "--adapter", path(&missing)]);
    assert!(error.contains("adapter_config.json"), "{error}");
}

#[test]
fn a_trained_adapter_gives_its_six_answers_word_for_word() {
    let folder = tempdir().unwrap();
    let who = data("kjv-4m-who");
    let options = ["--bits", "4", "--nodes", "2", "--adapter", path(&who)];
    let set = convert("kjv-4m", &folder.path().join("set"), &options);
    let server = Running::serve(&set, &[]);
    let known = fs::read(who.join("known.json")).unwrap();
    let known: Value = serde_json::from_slice(&known).unwrap();
    let known = known.as_object().unwrap();
    assert_eq!(known.len(), 6);
    for (question, answer) in known {
        assert_eq!(ask(&server.url(), question), answer.as_str().unwrap(), "{question}");
    }
}
