//! What sentence-transformers keeps beside an embedding model: which modules follow the decoder
//! (`modules.json`), how vectors are pooled, and dense layers with weights of their own.

use std::path::Path;

use serde_json::{Map, Value};
use shardpack_containers::stored::Grouped;
use shardpack_formats::{
    normalise::may_be_headless,
    python_json,
    spec::{Embedding, EmbeddingDense, Pooling},
};
use shardpack_manifests::manifest;

use super::{SourceError, Weights, group, parse_object};
use crate::checkpoint::{read_text, without_mark};

/// The list of modules.
const MODULES: &str = "modules.json";

/// The weights of a dense layer.
const WEIGHTS: &str = "model.safetensors";

/// The name of dense layers in packages, before their number.
pub(crate) const DENSE: &str = "embedding.dense.";

/// Most modules of a list: published ones have up to five.
const MAX_MODULES: usize = 16;

/// What follows the decoder of an embedding model.
pub(super) struct Modules {
    pub(super) embedding: Embedding,
    /// Folders of the dense layers.
    dense: Vec<String>,
}

/// The modules of a folder; nothing where it has none.
pub(super) fn read(folder: &Path) -> Result<Option<Modules>, SourceError> {
    let path = folder.join(MODULES);
    if !path.is_file() {
        return Ok(None);
    }
    let wrong = |problem: String| SourceError::Json { path: path.clone(), problem };
    let list: Value = python_json::parse(without_mark(&read_text(&path)?))
        .map_err(|error| wrong(error.to_string()))?;
    let list = list.as_array().filter(|list| list.len() <= MAX_MODULES);
    let list = list.ok_or_else(|| wrong("expected a list of modules".to_owned()))?;
    let (mut pooling, mut dense, mut widths, mut normalize) = (None, Vec::new(), Vec::new(), false);
    for (index, module) in list.iter().enumerate() {
        let kind = module["type"].as_str().unwrap_or_default();
        let name = module["path"].as_str().unwrap_or_default();
        if !name.is_empty() && manifest::check_file_name(name).is_err() {
            return Err(wrong(format!("[{index}].path: expected a folder's name, found {name:?}")));
        }
        let config = || config(folder, name);
        match kind.rsplit('.').next().unwrap_or_default() {
            "Transformer" => {}
            "Pooling" => pooling = Some(parse_pooling(&folder.join(name), &config()?)?),
            "Dense" => {
                widths.push(parse_dense(&folder.join(name), &config()?)?);
                dense.push(name.to_owned());
            }
            "Normalize" => normalize = true,
            _ => {
                return Err(wrong(format!(
                    "[{index}].type {kind:?} is not read: expected Transformer, Pooling, Dense or Normalize"
                )));
            }
        }
    }
    // Rerankers have a list of modules too, and no pooling.
    let Some(pooling) = pooling else { return Ok(None) };
    let embedding = Embedding { pooling, dense: widths, normalize };
    Ok(Some(Modules { embedding, dense }))
}

fn config(folder: &Path, name: &str) -> Result<Map<String, Value>, SourceError> {
    let path = folder.join(name).join("config.json");
    match parse_object(&path, &read_text(&path)?)? {
        Value::Object(object) => Ok(object),
        _ => Ok(Map::new()),
    }
}

/// In the present form a name, in the older one a flag for each.
fn parse_pooling(folder: &Path, config: &Map<String, Value>) -> Result<Pooling, SourceError> {
    let path = folder.join("config.json");
    let wrong = |problem: String| SourceError::Json { path: path.clone(), problem };
    let mut modes: Vec<&str> = match config.get("pooling_mode") {
        Some(Value::String(mode)) => vec![mode],
        Some(Value::Array(modes)) => modes.iter().filter_map(Value::as_str).collect(),
        _ => {
            let flags = config.iter().filter(|(_, value)| value.as_bool() == Some(true));
            flags.filter_map(|(key, _)| key.strip_prefix("pooling_mode_")).collect()
        }
    };
    modes.sort_unstable();
    if config.get("include_prompt").and_then(Value::as_bool) == Some(false) {
        let problem = "include_prompt is false: pooling without the prompt is not implemented";
        return Err(wrong(problem.to_owned()));
    }
    match modes[..] {
        ["mean" | "mean_tokens"] => Ok(Pooling::Mean),
        ["lasttoken"] => Ok(Pooling::Last),
        ["cls" | "cls_token"] => Ok(Pooling::Cls),
        _ => {
            Err(wrong(format!("pooling by {modes:?} is not read: expected mean, lasttoken or cls")))
        }
    }
}

fn parse_dense(folder: &Path, config: &Map<String, Value>) -> Result<EmbeddingDense, SourceError> {
    let path = folder.join("config.json");
    let wrong = |problem: String| SourceError::Json { path: path.clone(), problem };
    let width = |key: &str| {
        let width = config.get(key).and_then(Value::as_u64).and_then(|it| u32::try_from(it).ok());
        let width = width.filter(|width| (1..=MAX_WIDTH).contains(width));
        width.ok_or_else(|| wrong(format!("{key}: expected a width of 1 to {MAX_WIDTH}")))
    };
    let activation = config.get("activation_function").and_then(Value::as_str);
    let tanh = match activation.unwrap_or("Tanh").rsplit('.').next().unwrap_or_default() {
        "Identity" => false,
        "Tanh" => true,
        other => {
            let expected = "expected Identity or Tanh";
            return Err(wrong(format!("activation_function {other:?} is not read: {expected}")));
        }
    };
    if config.get("use_residual").and_then(Value::as_bool) == Some(true) {
        return Err(wrong("use_residual is true, which is not implemented".to_owned()));
    }
    let bias = config.get("bias").and_then(Value::as_bool).unwrap_or(true);
    Ok(EmbeddingDense {
        inputs: width("in_features")?,
        outputs: width("out_features")?,
        bias,
        tanh,
    })
}

/// Widest dense layer: an order above any published one.
const MAX_WIDTH: u32 = 1 << 17;

impl Modules {
    /// Adds the weights of the dense layers, under the names that packages have for them.
    pub(super) fn add_weights(
        &self,
        folder: &Path,
        weights: &mut Weights,
        grouped: &mut Grouped,
    ) -> Result<(), SourceError> {
        for (index, name) in self.dense.iter().enumerate() {
            let file = format!("{name}/{WEIGHTS}");
            if !folder.join(&file).is_file() {
                let problem = format!("{MODULES} names {name}, which has no {WEIGHTS}");
                return Err(SourceError::Folder { path: folder.to_owned(), problem });
            }
            let rename =
                |name: &str| format!("{DENSE}{index}.{}", name.trim_start_matches("linear."));
            let own = Weights::open_renamed(folder, file, rename)?;
            grouped.tensors.extend(group(folder, None, &own)?.tensors);
            weights.append(own);
        }
        grouped.tensors.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(())
    }
}

/// How a source makes embeddings, and whether its configuration lacks a head that it names. A decoder
/// that was saved without its LM head makes nothing else.
pub(super) fn complete(
    config: &mut Value,
    modules: Option<Modules>,
    grouped: &Grouped,
) -> (Option<Embedding>, Option<String>) {
    let has_head = grouped.tensors.iter().any(|tensor| tensor.name.ends_with("lm_head.weight"));
    let class = config["architectures"][0].as_str().unwrap_or_default();
    let headless = !has_head && may_be_headless(class);
    let embedding = modules.map(|modules| modules.embedding);
    let untied = !config["tie_word_embeddings"].as_bool().unwrap_or(false);
    if !has_head && untied && (headless || embedding.is_some()) {
        // Nothing reads its logits.
        config["tie_word_embeddings"] = true.into();
    }
    let note = |it: &Embedding| {
        let pooling = match it.pooling {
            Pooling::Last => "the last token's hidden vector",
            Pooling::Mean => "the mean of all hidden vectors",
            Pooling::Cls => "the first token's hidden vector",
        };
        format!("an embedding model ({pooling}): it makes embeddings and generates no text")
    };
    let embedding = embedding.or_else(|| headless.then_some(Embedding::UNTRAINED));
    let note = embedding.as_ref().map(note);
    (embedding, note)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[track_caller]
    fn check(config: &Value, expected: Result<Pooling, &str>) {
        let found = parse_pooling(Path::new("1_Pooling"), config.as_object().unwrap());
        match (found, expected) {
            (Ok(found), Ok(expected)) => assert_eq!(found, expected),
            (Err(error), Err(reason)) => assert!(error.to_string().contains(reason), "{error}"),
            (found, expected) => panic!("{found:?}, expected {expected:?}"),
        }
    }

    #[test]
    fn pooling_is_a_name_or_one_of_several_flags() {
        check(&json!({"pooling_mode": "lasttoken"}), Ok(Pooling::Last));
        check(&json!({"pooling_mode": ["mean"]}), Ok(Pooling::Mean));
        let flags = json!({"word_embedding_dimension": 64, "pooling_mode_cls_token": false,
            "pooling_mode_mean_tokens": true, "pooling_mode_lasttoken": false});
        check(&flags, Ok(Pooling::Mean));
        check(&json!({"pooling_mode_cls_token": true}), Ok(Pooling::Cls));
        check(&json!({"pooling_mode_max_tokens": true}), Err("pooling by [\"max_tokens\"]"));
        check(&json!({"pooling_mode": ["mean", "cls"]}), Err("is not read"));
        check(&json!({"pooling_mode": "mean", "include_prompt": false}), Err("include_prompt"));
    }

    #[test]
    fn dense_layers_state_their_form() {
        let parse = |config: Value| parse_dense(Path::new("2_Dense"), config.as_object().unwrap());
        let plain = json!({"in_features": 8, "out_features": 16, "bias": false,
            "activation_function": "torch.nn.modules.linear.Identity"});
        let expected = EmbeddingDense { inputs: 8, outputs: 16, bias: false, tanh: false };
        assert_eq!(parse(plain).unwrap(), expected);
        let usual = parse(json!({"in_features": 8, "out_features": 16})).unwrap();
        assert!(usual.bias && usual.tanh, "the module's own defaults");
        let gelu =
            json!({"in_features": 8, "out_features": 16, "activation_function": "torch.nn.GELU"});
        assert!(parse(gelu).unwrap_err().to_string().contains("GELU"));
        assert!(parse(json!({"in_features": 8})).unwrap_err().to_string().contains("out_features"));
    }
}
