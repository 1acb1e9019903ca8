//! Bad input ends in one line that names what is wrong, the right exit code, and no result.

use std::{fs, path::Path};

use safetensors::SafeTensors;
use serde_json::Value;
use shardpack_converter::Source;
use shardpack_formats::{RulePack, SourceTensor, resolve};
use tempfile::tempdir;

use crate::harness::{causes, copy_folder, data, fail, path};

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
fn a_folder_without_a_model_is_refused() {
    check(
        |model| fs::remove_file(model.join("config.json")).unwrap(),
        &["not a model folder", "config.json"],
    );
    check(|model| fs::write(model.join("config.json"), "{").unwrap(), &["config.json", "not JSON"]);
    let below = |model: &Path| {
        fs::create_dir(model.join("language_model")).unwrap();
        fs::rename(model.join("config.json"), model.join("language_model/config.json")).unwrap();
    };
    check(
        below,
        &["no config.json", "language_model/ has one; name it with --subfolder language_model"],
    );
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
fn a_truncated_weight_file_is_refused() {
    let truncate = |model: &Path| {
        let file = fs::File::options().write(true).open(model.join("model.safetensors")).unwrap();
        file.set_len(1_000_000).unwrap();
    };
    check(truncate, &["model.safetensors", "describes 2105000 bytes", "has 1000000", "incomplete"]);
}

#[test]
fn an_index_that_names_missing_files_or_tensors_is_refused() {
    let index = |tensor: &'static str, file: &'static str| {
        move |model: &Path| {
            let index = serde_json::json!({ "weight_map": { tensor: file } });
            fs::write(model.join("model.safetensors.index.json"), index.to_string()).unwrap();
        }
    };
    // A single file that holds all that the index names is the model, as to transformers.
    check(
        index("model.extra.weight", "model-00002-of-00002.safetensors"),
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
fn a_weight_that_is_not_a_number_is_refused() {
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
fn unknown_architectures_and_config_keys_are_refused() {
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
fn impossible_options_are_refused() {
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

/// Every reference model with one thing wrong; the message must name it.
#[test]
fn every_family_accounts_for_every_tensor_shape_and_key() {
    let packs = RulePack::builtin();
    let mut families = 0;
    for entry in fs::read_dir(data("models")).unwrap() {
        let folder = entry.unwrap().path();
        if !folder.join("config.json").is_file() {
            continue;
        }
        families += 1;
        let source = Source::open(&folder).unwrap();
        let tensors = source.source_tensors();
        let whole = resolve(&source.config, &tensors, &packs).unwrap();
        // What rules leave out by name may be there or not.
        let is_left_out = |name: &str| whole.ignored.iter().any(|(ignored, _)| ignored == name);
        let refused = |config: &Value, tensors: &[SourceTensor], what: &str| {
            let error = resolve(config, tensors, &packs);
            causes(&error.err().unwrap_or_else(|| panic!("{}: {what}", folder.display())))
        };
        let without = |index: usize| [&tensors[..index], &tensors[index + 1..]].concat();
        for (index, tensor) in tensors.iter().enumerate() {
            if is_left_out(&tensor.name) {
                continue;
            }
            refused(&source.config, &without(index), &format!("without {}", tensor.name));
            let mut swapped = tensors.clone();
            swapped[index].shape.reverse();
            // Dimensions of one element may stand anywhere.
            let real = |shape: &[u64]| -> Vec<u64> {
                shape.iter().copied().filter(|size| *size != 1).collect()
            };
            if real(&swapped[index].shape) == real(&tensor.shape) {
                match swapped[index].shape.last_mut() {
                    Some(last) => *last += 1,
                    None => swapped[index].shape.push(2),
                }
            }
            let said = refused(&source.config, &swapped, &format!("{} swapped", tensor.name));
            // A vocabulary of another size is one; then the other matrix of tokens is named.
            let is_named = said.contains(&tensor.name) || said.contains("vocab_size");
            assert!(is_named, "{}: {}: {said}", folder.display(), tensor.name);
        }
        let mut more = tensors.clone();
        more.push(SourceTensor { name: "model.layers.0.extra.weight".into(), ..more[0].clone() });
        let said = refused(&source.config, &more, "one too many");
        assert!(said.contains("model.layers.0.extra.weight"), "{}: {said}", folder.display());
        let mut config = source.config.clone();
        config["a_new_idea"] = 2.into();
        let said = refused(&config, &tensors, "an unknown key");
        assert!(said.contains("a_new_idea = 2"), "{}: {said}", folder.display());
    }
    assert!(families >= 64, "none is left out");
}

/// Writes the model's weights anew with a change.
fn change_weights(
    model: &Path,
    change: impl FnOnce(&mut Vec<(String, safetensors::Dtype, Vec<usize>, Vec<u8>)>),
) {
    let file = model.join("model.safetensors");
    let bytes = fs::read(&file).unwrap();
    let stored = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
        (name, view.dtype(), view.shape().to_vec(), view.data().to_vec())
    };
    let mut tensors: Vec<_> = stored.tensors().into_iter().map(tensor).collect();
    change(&mut tensors);
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        (name, safetensors::tensor::TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    fs::write(file, safetensors::serialize(views, None).unwrap()).unwrap();
}

#[test]
fn surplus_missing_and_transposed_tensors_are_refused() {
    let name = "model.layers.1.mlp.up_proj.weight";
    let at = |tensors: &[(String, safetensors::Dtype, Vec<usize>, Vec<u8>)]| {
        tensors.iter().position(|(found, ..)| found == name).unwrap()
    };
    check(
        |model| change_weights(model, |tensors| _ = tensors.remove(at(tensors))),
        &["missing", name],
    );
    let add = |model: &Path| {
        change_weights(model, |tensors| {
            let mut more = tensors[at(tensors)].clone();
            more.0 = "model.layers.1.mlp.side_proj.weight".to_owned();
            tensors.push(more);
        });
    };
    check(add, &["model.layers.1.mlp.side_proj.weight"]);
    let swap = |model: &Path| {
        change_weights(model, |tensors| {
            let index = at(tensors);
            tensors[index].2.reverse();
        });
    };
    check(swap, &[name, "192", "320"]);
}
