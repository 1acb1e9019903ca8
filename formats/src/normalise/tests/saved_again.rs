//! Configurations of all reference models as transformers 5.24 saves them again: they describe the
//! same model. `tests/data/saved_again.json` has for each what `save_pretrained` changes.

use std::{fs, path::Path};

use super::*;
use crate::python_json;
use shardpack_containers::container;

fn models() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/models")
}

fn tensors(model: &str) -> Vec<SourceTensor> {
    let mut all = Vec::new();
    for entry in fs::read_dir(models().join(model)).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if name.starts_with("model") && name.ends_with("safetensors") {
            let file = fs::read(models().join(model).join(name)).unwrap();
            all.extend(container::parse(&file).unwrap().into_iter().map(|info| SourceTensor {
                name: info.name,
                // Tables of integers are stored forms, which the converter widens first.
                dtype: if info.dtype.is_float() { info.dtype } else { Dtype::F32 },
                shape: info.shape,
            }));
        }
    }
    all
}

fn config(model: &str) -> Value {
    let text = fs::read(models().join(model).join("config.json")).unwrap();
    serde_json::from_slice(&text).unwrap()
}

/// The configuration with what `save_pretrained` changes in it.
fn saved(model: &str, changes: &Value) -> Value {
    let mut config = config(model);
    let keys = config.as_object_mut().unwrap();
    for key in changes["removed"].as_array().unwrap() {
        keys.remove(key.as_str().unwrap());
    }
    keys.extend(changes["set"].as_object().unwrap().clone());
    // As the converter reads files: infinity is a word of Python's.
    python_json::parse(config.to_string().as_bytes()).unwrap()
}

/// transformers saves the other context length in place of the one that frequencies were chosen by:
/// what it writes is another model, for itself too.
const CHANGED: &str = "phimoe";

#[test]
fn what_transformers_has_saved_again_is_the_same_model() {
    let all: BTreeMap<String, Value> =
        serde_json::from_str(include_str!("../../../tests/data/saved_again.json")).unwrap();
    assert!(all.len() > 80, "only {}", all.len());
    let packs = RulePack::builtin();
    let mut wrong = Vec::new();
    for (model, changes) in all.iter().filter(|(model, _)| *model != CHANGED) {
        let tensors = tensors(model);
        let described = |config: &Value| {
            resolve(config, &tensors, &packs).map(|found| {
                // The description has every frequency of the position embedding.
                let Normalised { spec, axes, tensors, .. } = found;
                [format!("{spec:?}"), format!("{axes:?}"), format!("{tensors:?}")]
            })
        };
        let expected = described(&config(model)).unwrap();
        match described(&saved(model, changes)) {
            Ok(found) => {
                let differing = found.iter().zip(&expected).find(|(found, own)| found != own);
                wrong.extend(differing.map(|(found, own)| format!("{model}:\n{found}\n{own}")));
            }
            Err(error) => wrong.push(format!("{model}: {error}")),
        }
    }
    assert!(wrong.is_empty(), "{} of {}: {}", wrong.len(), all.len(), wrong.join("\n"));
}

#[test]
fn keys_of_tools_change_no_model_and_a_note_names_them() {
    let tools = json!({
        "model_name": "org/model", "unsloth_training_mode": "lora", "axolotl_version": "0.9",
        "transformers.js_config": {"dtype": "q4"}, "is_llama_config": true,
        "tokenizer_model_max_length": 4096, "vllm_config": {"seed": 1}, "use_liger_kernel": true,
        "_attn_implementation": "flash_attention_2",
    });
    let saved: BTreeMap<String, Value> =
        serde_json::from_str(include_str!("../../../tests/data/saved_again.json")).unwrap();
    let packs = RulePack::builtin();
    for model in saved.keys() {
        let (config, tensors) = (config(model), tensors(model));
        let mut marked = config.clone();
        marked.as_object_mut().unwrap().extend(tools.as_object().unwrap().clone());
        let [own, found] = [&config, &marked].map(|it| resolve(it, &tensors, &packs).unwrap());
        assert!(found.spec == own.spec, "{model}");
        let notes = found.warnings.join("; ");
        for key in ["model_name", "unsloth_training_mode", "transformers.js_config", "vllm_config"]
        {
            assert!(notes.contains(key), "{model}: {notes}");
        }
        // What could be the model's own is still refused.
        marked["attention_sink_scale"] = 2.5.into();
        let refused = resolve(&marked, &tensors, &packs).unwrap_err();
        assert!(matches!(refused, ResolveError::UnknownKeys { .. }), "{model}: {refused}");
    }
}

/// Checkpoints as `save_pretrained(save_original_format=False)` and FSDP leave them.
#[test]
fn names_of_transformers_own_modules_are_the_same_model() {
    let all: BTreeMap<String, BTreeMap<String, Vec<u64>>> =
        serde_json::from_str(include_str!("../../../tests/data/module_names.json")).unwrap();
    let packs = RulePack::builtin();
    for (model, shapes) in &all {
        let saved: Vec<SourceTensor> = shapes
            .iter()
            .map(|(name, shape)| SourceTensor {
                name: name.clone(),
                dtype: Dtype::BF16,
                shape: shape.clone(),
            })
            .collect();
        let described = |tensors: &[SourceTensor]| {
            let found = resolve(&config(model), tensors, &packs);
            let found = found.unwrap_or_else(|error| panic!("{model}: {error}"));
            let shapes = found.tensors.iter().map(|it| (it.name.clone(), it.shape.clone()));
            (found.spec, shapes.collect::<Vec<_>>())
        };
        assert!(described(&saved) == described(&tensors(model)), "{model}");
    }
}
