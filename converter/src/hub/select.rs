//! Which files of a repository a conversion needs: the model's configuration, its tokenizer, and
//! one set of weights. Repositories hold second copies in other formats, pictures and papers.

use serde_json::Value;

use super::RepoFile;

/// The file that says which weight file holds which tensor.
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// Files beside the weights, where the repository has them.
const SMALL: &[&str] = &[
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "merges.txt",
    INDEX,
    "quant_config.json",
    "quantize_config.json",
    "special_tokens_map.json",
    "tekken.json",
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
];

/// Largest of those: more is no text.
const MAX_SMALL_BYTES: u64 = 256 << 20;

/// Endings of weights in other formats, for the message when there is nothing else.
const OTHERS: &[&str] = &[".gguf", ".bin", ".pth", ".pt", ".ckpt", ".onnx", ".h5", ".msgpack"];

/// The needed files of a repository; `index` is the content of [`INDEX`] if there is one.
pub(super) fn needed(files: &[RepoFile], index: Option<&[u8]>) -> Result<Vec<RepoFile>, String> {
    let at_root = || files.iter().filter(|file| !file.path.contains('/'));
    if !at_root().any(|file| file.path == "config.json") {
        let none = "the repository has no config.json: it is no model that transformers knows";
        let below = files.iter().find_map(|file| file.path.strip_suffix("/config.json"));
        return Err(match below {
            Some(folder) => {
                format!("{none}, but {folder}/ has one; download that and give its folder")
            }
            None => none.to_owned(),
        });
    }
    let mut found: Vec<RepoFile> =
        at_root().filter(|file| SMALL.contains(&file.path.as_str())).cloned().collect();
    if let Some(large) = found.iter().find(|file| file.size > MAX_SMALL_BYTES) {
        return Err(format!("{} has {} bytes; at most {MAX_SMALL_BYTES}", large.path, large.size));
    }
    let indexed = index.map(indexed).transpose()?.unwrap_or_default();
    let weights = || at_root().filter(|file| file.is_weights());
    // The choice is that of a model folder: what the index names and what is called model, else
    // whatever there is but the vendor's second copy.
    let usual = |file: &&RepoFile| file.path.starts_with("model") || indexed.contains(&file.path);
    let mut chosen: Vec<RepoFile> = weights().filter(usual).cloned().collect();
    if chosen.is_empty() {
        let own = |file: &&RepoFile| !file.path.starts_with("consolidated");
        chosen = weights().filter(own).cloned().collect();
    }
    if let Some(missing) = indexed.iter().find(|name| !chosen.iter().any(|f| f.path == **name)) {
        return Err(format!("{INDEX} names {missing:?}, which the repository does not have"));
    }
    if chosen.is_empty() {
        let other =
            files.iter().find(|file| OTHERS.iter().any(|ending| file.path.ends_with(ending)));
        return Err(match other {
            Some(other) => format!(
                "the repository has no .safetensors files, only such as {:?}; download what you want and give its folder or file",
                other.path
            ),
            None => "the repository has no weights".to_owned(),
        });
    }
    found.extend(chosen);
    found.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(found)
}

fn indexed(index: &[u8]) -> Result<Vec<String>, String> {
    let index: Value =
        serde_json::from_slice(index).map_err(|error| format!("{INDEX} is not JSON: {error}"))?;
    let Some(map) = index["weight_map"].as_object() else {
        return Err(format!("{INDEX} has no \"weight_map\" object"));
    };
    let mut names: Vec<String> =
        map.values().filter_map(Value::as_str).map(str::to_owned).collect();
    names.sort_unstable();
    names.dedup();
    Ok(names)
}
