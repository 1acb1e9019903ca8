//! Bad input ends in one line that names what is wrong, the right exit code, and no result.

use std::{fs, path::Path};

use serde_json::Value;
use tempfile::tempdir;

use crate::harness::{copy_folder, data, fail, path};

/// Damages a copy of a model, converts it, and expects exit code 1 and these words in the error.
fn check(damage: impl FnOnce(&Path), words: &[&str]) {
    let folder = tempdir().unwrap();
    let (source, output) = (folder.path().join("model"), folder.path().join("set"));
    copy_folder(&data("models/llama"), &source);
    damage(&source);
    let error = fail(1, &["convert", path(&source), "-o", path(&output), "--nodes", "2"]);
    for word in words {
        assert!(error.contains(word), "expected {word:?} in: {error}");
    }
    let left: Vec<_> =
        fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["model"], "nothing half-written is left");
}

fn change_config(model: &Path, change: impl FnOnce(&mut Value)) {
    let file = model.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    change(&mut config);
    fs::write(file, config.to_string()).unwrap();
}

#[test]
fn a_folder_that_is_no_model() {
    check(
        |model| fs::remove_file(model.join("config.json")).unwrap(),
        &["not a model folder", "config.json"],
    );
    check(|model| fs::write(model.join("config.json"), "{").unwrap(), &["config.json", "not JSON"]);
    let below = |model: &Path| {
        fs::create_dir(model.join("language_model")).unwrap();
        fs::rename(model.join("config.json"), model.join("language_model/config.json")).unwrap();
    };
    check(below, &["no config.json", "language_model/ has one; give that folder"]);
    let weights = |model: &Path| {
        fs::remove_file(model.join("model.safetensors")).unwrap();
        fs::remove_file(model.join("expected.safetensors")).unwrap();
    };
    check(weights, &["no .safetensors files"]);
    let folder = tempdir().unwrap();
    let missing = folder.path().join("missing");
    let output = folder.path().join("set");
    assert!(fail(2, &["convert", path(&missing), "-o", path(&output)]).contains("no such folder"));
}

#[test]
fn a_truncated_weight_file() {
    let truncate = |model: &Path| {
        let file = fs::File::options().write(true).open(model.join("model.safetensors")).unwrap();
        file.set_len(1_000_000).unwrap();
    };
    check(truncate, &["model.safetensors", "describes 2105000 bytes", "has 1000000", "incomplete"]);
}

#[test]
fn an_index_that_names_what_is_not_there() {
    let index = |tensor: &'static str, file: &'static str| {
        move |model: &Path| {
            let index = serde_json::json!({ "weight_map": { tensor: file } });
            fs::write(model.join("model.safetensors.index.json"), index.to_string()).unwrap();
        }
    };
    check(
        index("model.norm.weight", "model-00002-of-00002.safetensors"),
        &["model-00002-of-00002.safetensors", "missing"],
    );
    check(
        index("model.extra.weight", "model.safetensors"),
        &["model.extra.weight", "model.safetensors"],
    );
    check(
        index("model.norm.weight", "../model.safetensors"),
        &["../model.safetensors", "not a file name"],
    );
}

#[test]
fn a_weight_that_is_no_number() {
    let poison = |model: &Path| {
        let file = model.join("model.safetensors");
        let mut bytes = fs::read(&file).unwrap();
        let at = bytes.len() - 100;
        bytes[at..at + 2].copy_from_slice(&0x7fc0_u16.to_le_bytes());
        fs::write(file, bytes).unwrap();
    };
    check(poison, &["model.safetensors", "is NaN", "damaged"]);
}

#[test]
fn an_unknown_architecture_or_key() {
    check(
        |model| change_config(model, |config| config["model_type"] = "frontier".into()),
        &["frontier", "llama", "qwen3"],
    );
    check(
        |model| change_config(model, |config| config["attention_sinks"] = 4.into()),
        &["attention_sinks"],
    );
    check(
        |model| change_config(model, |config| config["hidden_act"] = "xielu".into()),
        &["activation", "xielu"],
    );
    check(
        |model| change_config(model, |config| config["num_hidden_layers"] = 2.into()),
        &["model.layers.2"],
    );
    check(
        |model| change_config(model, |config| config["intermediate_size"] = 384.into()),
        &["320", "384"],
    );
}

#[test]
fn options_that_are_not_possible() {
    let folder = tempdir().unwrap();
    let (source, output) = (data("models/llama"), folder.path().join("set"));
    for (option, value) in [
        ("--bits", "7"),
        ("--group-size", "48"),
        ("--nodes", "9"),
        ("--nodes", "0"),
        ("--rounding", "up"),
    ] {
        let error = fail(2, &["convert", path(&source), "-o", path(&output), option, value]);
        assert!(error.contains(option) && error.contains(value), "{error}");
    }
}
