//! The `config.json` beside a GGUF file. The file's own keys say what is computed; the other may add
//! what they do not say. One that says less, describes other weights or another model is left
//! aside, with a note.

use std::path::Path;

use serde_json::{Map, Value};

use super::super::{SourceError, parse_object, stored_config};
use crate::checkpoint::read_text;

const CONFIG: &str = "config.json";

/// What both have to agree in: else the configuration is of another model.
const SAME: &[&str] = &[
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "num_experts",
    "num_local_experts",
];

/// Numbers in which the file's keys count where the two differ.
const OF_THE_FILE: &[&str] =
    &["vocab_size", "rms_norm_eps", "num_experts_per_tok", "max_position_embeddings"];

/// Without these a configuration says nothing of a model's form.
const NEEDED: &[&str] = &["model_type", "hidden_size", "num_hidden_layers"];

/// What newer configurations say of rotary embeddings in `rope_parameters`.
const ROPE: &[&str] = &["rope_theta", "rope_scaling", "rope_local_base_freq"];

/// Largest relative difference of two spellings of a number: keys have 32 bits.
const TOLERANCE: f64 = 1e-6;

/// The configuration that counts.
pub(super) struct Beside {
    pub(super) config: Value,
    pub(super) bytes: Vec<u8>,
    /// Whether nothing of it is from beside the file.
    pub(super) is_derived: bool,
    pub(super) notes: Vec<String>,
}

/// Chooses between the keys' configuration, or why there is none, and that of the folder.
pub(super) fn choose(
    folder: &Path,
    by_keys: Result<Value, SourceError>,
) -> Result<Beside, SourceError> {
    let path = folder.join(CONFIG);
    if !path.is_file() {
        return Ok(derived(by_keys?, None));
    }
    let bytes = read_text(&path)?;
    let parsed = parse_object(&path, &bytes);
    let keys = match by_keys {
        Ok(keys) => keys,
        Err(error) => return instead(folder, (parsed?, bytes), error),
    };
    let beside = match parsed {
        Ok(beside) => beside,
        Err(error) => return Ok(derived(keys, Some(error.to_string()))),
    };
    if let Some(problem) = foreign(folder, &beside, &keys) {
        return Ok(derived(keys, Some(format!("{}: {problem}", path.display()))));
    }
    let (config, notes) = merge(beside, &keys);
    Ok(Beside { config, bytes, is_derived: false, notes })
}

/// The keys' configuration alone, with what was wrong with the other.
fn derived(config: Value, problem: Option<String>) -> Beside {
    let note = |problem| format!("{problem}; it is left aside: the GGUF file's own keys count");
    let bytes = config.to_string().into_bytes();
    Beside { config, bytes, is_derived: true, notes: problem.map(note).into_iter().collect() }
}

/// The folder's configuration where the file's keys are not understood.
fn instead(
    folder: &Path,
    (config, bytes): (Value, Vec<u8>),
    error: SourceError,
) -> Result<Beside, SourceError> {
    if lacks(&config).is_some() {
        return Err(error);
    }
    if stored_config(folder, &config)?.is_some() {
        let problem = "describes quantized weights, but these are in a GGUF file; take the config.json of the model that the file was made of";
        return Err(SourceError::Json { path: folder.join(CONFIG), problem: problem.to_owned() });
    }
    Ok(Beside { config, bytes, is_derived: false, notes: Vec::new() })
}

/// The part that describes the text model.
fn text_part(config: &Value) -> &Value {
    config.get("text_config").filter(|part| part.is_object()).unwrap_or(config)
}

/// The first key that says what form a model has and is not there.
fn lacks(config: &Value) -> Option<&'static str> {
    let has = |key: &str| !text_part(config)[key].is_null() || !config[key].is_null();
    NEEDED.iter().copied().find(|key| !has(key))
}

/// Why a configuration does not describe the weights of the file.
fn foreign(folder: &Path, beside: &Value, keys: &Value) -> Option<String> {
    if let Some(key) = lacks(beside) {
        return Some(format!("says less than the GGUF file: it has no {key}"));
    }
    if !matches!(stored_config(folder, beside), Ok(None)) {
        return Some("describes quantized weights, but these are in a GGUF file".to_owned());
    }
    let part = text_part(beside);
    let kinds = [&part["model_type"], &beside["model_type"]];
    let theirs = keys["model_type"].as_str().unwrap_or_default();
    // llama.cpp has many families as llama.
    let is_wide = matches!(theirs, "llama" | "mixtral");
    let agrees = |kind: &&Value| kind.as_str().is_some_and(|kind| theirs.starts_with(kind));
    let kind = (!is_wide && !kinds.iter().any(agrees)).then_some(("model_type", kinds[0], theirs));
    let kind = kind.map(|(key, found, expected)| (key, found.clone(), expected.into()));
    let differs = |key: &&&str| is_other(&part[**key], &keys[**key]);
    let size = SAME.iter().find(differs);
    let size = size.map(|key| (*key, part[*key].clone(), keys[*key].clone()));
    let (key, found, expected): (&str, Value, Value) = kind.or(size)?;
    Some(format!("is of another model: {key} is {found} there and {expected} in the GGUF file"))
}

/// Whether two values are there and are not the same.
fn is_other(found: &Value, expected: &Value) -> bool {
    match (found.as_f64(), expected.as_f64()) {
        (Some(found), Some(expected)) => {
            (found - expected).abs() > TOLERANCE * expected.abs().max(found.abs())
        }
        _ => !found.is_null() && !expected.is_null() && found != expected,
    }
}

/// The folder's configuration with what the file's keys say otherwise, and of the same family what
/// it does not say.
fn merge(mut beside: Value, keys: &Value) -> (Value, Vec<String>) {
    let mut notes = Vec::new();
    let is_whole = std::ptr::eq(text_part(&beside), &raw const beside);
    let Some(config) = beside.as_object_mut() else { return (beside, notes) };
    let tied = "tie_word_embeddings";
    if config.get(tied).is_some_and(|found| is_other(found, &keys[tied])) {
        replace(config, tied, &keys[tied], &mut notes);
    }
    let part = match config.get_mut("text_config") {
        Some(Value::Object(part)) if !is_whole => part,
        _ => config,
    };
    for key in OF_THE_FILE.iter().copied().chain([tied]) {
        if part.get(key).is_some_and(|found| is_other(found, &keys[key])) {
            replace(part, key, &keys[key], &mut notes);
        }
    }
    let rope = match part.get_mut("rope_parameters") {
        Some(Value::Object(rope)) => rope,
        _ => &mut *part,
    };
    if rope.get("rope_theta").is_some_and(|found| is_other(found, &keys["rope_theta"])) {
        replace(rope, "rope_theta", &keys["rope_theta"], &mut notes);
    }
    if is_whole && part.get("model_type") == keys.get("model_type") {
        let has_rope = part.get("rope_parameters").is_some_and(Value::is_object);
        for (key, value) in keys.as_object().into_iter().flatten() {
            let is_said = part.get(key).is_some_and(|found| !found.is_null());
            let is_elsewhere = has_rope && ROPE.contains(&key.as_str());
            if !is_said && !is_elsewhere {
                part.insert(key.clone(), value.clone());
            }
        }
    }
    (beside, notes)
}

fn replace(config: &mut Map<String, Value>, key: &str, value: &Value, notes: &mut Vec<String>) {
    let found = config.insert(key.to_owned(), value.clone()).unwrap_or_default();
    notes.push(format!(
        "{CONFIG} says {key} = {found}, the GGUF file {value}: the file's own keys count"
    ));
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn keys() -> Value {
        json!({
            "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
            "tie_word_embeddings": true, "vocab_size": 100, "rope_scaling": {"factor": 2.0},
        })
    }

    fn chosen(beside: &str) -> Beside {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(CONFIG), beside).unwrap();
        choose(folder.path(), Ok(keys())).unwrap()
    }

    /// The folder's configuration with some values of its own.
    fn with(changes: Value) -> String {
        let mut config = json!({
            "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2,
        });
        let Value::Object(changes) = changes else { panic!("an object") };
        config.as_object_mut().unwrap().extend(changes);
        config.to_string()
    }

    #[test]
    fn a_configuration_that_says_less_or_something_else_is_left_aside() {
        for (beside, words) in [
            ("{}", ["model_type", "says less"]),
            ("", ["not JSON", "left aside"]),
            (r#"{"model_type": "qwen3"}"#, ["hidden_size", "says less"]),
            (
                &with(json!({"hidden_size": 96})),
                ["hidden_size is 96 there and 64", "another model"],
            ),
            (
                &with(json!({"model_type": "llama"})),
                ["\"llama\" there and \"qwen3\"", "config.json"],
            ),
            (
                &with(json!({"quantization": {"bits": 4, "group_size": 64}})),
                ["quantized", "left aside"],
            ),
        ] {
            let found = chosen(beside);
            assert!(found.is_derived && found.config == keys(), "{beside}");
            let [note] = found.notes.as_slice() else { panic!("{:?}", found.notes) };
            assert!(words.iter().all(|word| note.contains(word)), "{note}");
        }
    }

    #[test]
    fn the_file_counts_where_both_say_something() {
        let changes = json!({
            "rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
            "tie_word_embeddings": false, "attention_bias": false, "num_attention_heads": 4,
        });
        let found = chosen(&with(changes));
        let config = &found.config;
        assert!(!found.is_derived);
        assert_eq!(
            (&config["rms_norm_eps"], &config["attention_bias"]),
            (&json!(1e-6), &json!(false))
        );
        assert_eq!(config["rope_parameters"], json!({"rope_theta": 1e6, "rope_type": "default"}));
        assert_eq!(
            (&config["tie_word_embeddings"], &config["vocab_size"]),
            (&json!(true), &json!(100))
        );
        assert!(config.get("rope_scaling").is_none() && config.get("rope_theta").is_none());
        for key in ["rms_norm_eps = 0.00001", "rope_theta = 10000.0", "tie_word_embeddings = false"]
        {
            assert!(found.notes.iter().any(|note| note.contains(key)), "{:?}", found.notes);
        }
        // Numbers of 32 bits are the same as the decimals that they were written from.
        let same = f64::from(1e-6_f32);
        assert!(chosen(&with(json!({"rms_norm_eps": same}))).notes.is_empty());
    }

    #[test]
    fn keys_that_are_not_understood_need_a_configuration_that_says_enough() {
        let folder = tempfile::tempdir().unwrap();
        let refusal = || SourceError::NotFolder(Path::new("keys").to_owned());
        let choose = |beside: &str| {
            std::fs::write(folder.path().join(CONFIG), beside).unwrap();
            super::choose(folder.path(), Err(refusal()))
        };
        assert!(choose("{}").err().unwrap().to_string().starts_with("keys:"));
        assert_eq!(choose(&with(json!({}))).unwrap().config["hidden_size"], 64);
        let quantized = with(json!({"quantization": {"bits": 4, "group_size": 64}}));
        assert!(choose(&quantized).err().unwrap().to_string().contains("quantized"));
    }
}
