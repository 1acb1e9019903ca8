//! Selects the files of a repository that a conversion needs: the model's configuration, its
//! tokenizer, and one set of weights. Repositories hold second copies in other formats, images and
//! papers.

use serde_json::Value;

use super::RepoFile;
use crate::checkpoint::{
    GGUF, INDEX, PICKLE_INDEX, Pickles, Subfolder, TEMPLATE_ENDING, TEMPLATE_FOLDER, VISION_PREFIX,
    gguf_part, has_tokenizer, is_pickle, is_stray, is_tokenizer_file, without_mark,
};

/// Files beside the weights, where the repository has them.
const SMALL: &[&str] = &[
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "config_sentence_transformers.json",
    "generation_config.json",
    "hf_quant_config.json",
    "merges.txt",
    INDEX,
    "modules.json",
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

/// GGUF files that a message lists: repositories hold up to 40 quantizations.
const GGUFS_SHOWN: usize = 12;

/// Endings of weights in other formats, for the message when there is nothing else.
const OTHERS: &[&str] = &[".ckpt", ".onnx", ".h5", ".msgpack"];

/// What of a repository is the model.
#[derive(Clone, Debug)]
pub struct Selection {
    /// The folder that it stands in; the repository's root when absent.
    pub subfolder: Option<Subfolder>,
    /// The path of the GGUF file that it is, or the first one of it.
    pub gguf: Option<String>,
    /// Whether files of `torch.save` will do where there are no `.safetensors`.
    pub pickles: Pickles,
}

impl Selection {
    /// A model of safetensors at the root.
    pub const WHOLE: Self = Self { subfolder: None, gguf: None, pickles: Pickles::Refuse };
}

/// The needed files of what is the model; `index` is the content of its [`INDEX`] if there is one.
pub(super) fn needed(
    files: &[RepoFile],
    selection: &Selection,
    index: Option<&[u8]>,
) -> Result<Vec<RepoFile>, String> {
    if let Some(path) = &selection.gguf {
        return gguf(files, path);
    }
    let subfolder = selection.subfolder.as_ref();
    let prefix = Subfolder::path_of(subfolder, "");
    let in_folder = |prefix: &str, file: &RepoFile| {
        file.path.strip_prefix(prefix).is_some_and(|name| !name.contains('/'))
    };
    let is_own = |file: &RepoFile| in_folder(&prefix, file) && !is_stray(file.name());
    let here = || files.iter().filter(|file| is_own(file));
    if !here().any(|file| file.name() == "config.json") {
        return Err(no_config(files, subfolder));
    }
    let is_small = |file: &&RepoFile| SMALL.contains(&file.name());
    let mut found: Vec<RepoFile> = here().filter(is_small).cloned().collect();
    let templates = format!("{prefix}{TEMPLATE_FOLDER}");
    let named = files.iter().filter(|file| in_folder(&templates, file));
    found.extend(named.filter(|file| file.path.ends_with(TEMPLATE_ENDING)).cloned());
    found.extend(files.iter().filter(|file| is_module(&prefix, file)).cloned());
    if subfolder.is_some() {
        let whole = files.iter().filter(|file| in_folder("", file));
        found = with_tokenizer(found, whole.filter(is_small));
    }
    if let Some(large) = found.iter().find(|file| file.size > MAX_SMALL_BYTES) {
        return Err(format!("{} has {} bytes; at most {MAX_SMALL_BYTES}", large.path, large.size));
    }
    found.extend(weights(&here().collect::<Vec<_>>(), index, selection.pickles)?);
    found.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(found)
}

/// Whether a file belongs to a module of sentence-transformers, whose folder begins with its number.
fn is_module(prefix: &str, file: &RepoFile) -> bool {
    let Some((folder, name)) = file.path.strip_prefix(prefix).and_then(|path| path.split_once('/'))
    else {
        return false;
    };
    let number = folder.split_once('_').map(|(number, _)| number);
    let numbered =
        number.is_some_and(|it| !it.is_empty() && it.bytes().all(|c| c.is_ascii_digit()));
    numbered && ["config.json", "model.safetensors"].contains(&name)
}

/// Why there is no model here, and where there is one.
fn no_config(files: &[RepoFile], subfolder: Option<&Subfolder>) -> String {
    let below = files.iter().find_map(|file| file.path.strip_suffix("/config.json"));
    if subfolder.is_none()
        && let Some(named) = named_ggufs(files)
    {
        return format!("the repository has no config.json and no .safetensors files, {named}");
    }
    let none = match subfolder {
        None => "the repository has no config.json: it is no model that transformers knows".into(),
        Some(part) => format!("the repository has no {part}/config.json"),
    };
    match below {
        Some(folder) => format!("{none}, but {folder}/ has one; name it with --subfolder {folder}"),
        None => none,
    }
}

/// The files of a part, with the tokenizer of the whole if the part has none of its own.
pub(super) fn with_tokenizer<'a>(
    mut files: Vec<RepoFile>,
    whole: impl Iterator<Item = &'a RepoFile>,
) -> Vec<RepoFile> {
    if !has_tokenizer(files.iter().map(RepoFile::name)) {
        files.extend(whole.filter(|file| is_tokenizer_file(file.name())).cloned());
    }
    files
}

/// The weight files of a model's folder. The choice is that of a folder on this machine: what the
/// index names and what is called model, else whatever there is but the vendor's second copy.
fn weights(
    files: &[&RepoFile],
    index: Option<&[u8]>,
    pickles: Pickles,
) -> Result<Vec<RepoFile>, String> {
    let indexed = index.map(indexed).transpose()?.unwrap_or_default();
    let is_indexed = |file: &RepoFile| indexed.iter().any(|name| name == file.name());
    let weights = || files.iter().copied().filter(|file| file.is_weights());
    let usual = |file: &&RepoFile| file.name().starts_with("model") || is_indexed(file);
    let mut chosen: Vec<RepoFile> = weights().filter(usual).cloned().collect();
    if chosen.is_empty() {
        let own = |file: &&RepoFile| !file.name().starts_with("consolidated");
        chosen = weights().filter(own).cloned().collect();
    }
    if let Some(missing) = indexed.iter().find(|name| !chosen.iter().any(|f| f.name() == **name)) {
        return Err(format!("{INDEX} names {missing:?}, which the repository does not have"));
    }
    if chosen.is_empty() && pickles == Pickles::Read {
        chosen = pickled(files);
    }
    if chosen.is_empty() { Err(no_weights(files)) } else { Ok(chosen) }
}

/// Files of `torch.save` with their index, by the choice of a folder on this machine.
fn pickled(files: &[&RepoFile]) -> Vec<RepoFile> {
    let usual = |file: &&&RepoFile| file.name().starts_with("pytorch_model");
    let of = |file: &&&RepoFile| is_pickle(file.name()) || file.name() == PICKLE_INDEX;
    let usual: Vec<RepoFile> =
        files.iter().filter(of).filter(usual).map(|file| (*file).clone()).collect();
    let all = files.iter().filter(|file| is_pickle(file.name()));
    if usual.is_empty() { all.map(|file| (*file).clone()).collect() } else { usual }
}

/// Why there are no weights, and what there is instead.
fn no_weights(files: &[&RepoFile]) -> String {
    let ends = |ending: &str| files.iter().find(move |file| file.path.ends_with(ending));
    if let Some(named) = named_ggufs(files.iter().copied()) {
        return format!("the repository has no .safetensors files, {named}");
    }
    if let Some(file) = files.iter().find(|file| is_pickle(file.name())) {
        return format!(
            "the repository has no .safetensors files, only such as {:?}, a pickle; --allow-pickle reads it with a restricted unpickler that runs no code",
            file.path
        );
    }
    match OTHERS.iter().find_map(|ending| ends(ending)) {
        Some(other) => {
            format!("the repository has no .safetensors files, only such as {:?}", other.path)
        }
        None => "the repository has no weights".to_owned(),
    }
}

/// The GGUF files of models, each by its first part; what sees images is part of another model.
fn ggufs<'a>(files: impl IntoIterator<Item = &'a RepoFile>) -> Vec<&'a str> {
    let is_model = |file: &&RepoFile| {
        file.path.ends_with(GGUF)
            && !file.name().starts_with(VISION_PREFIX)
            && gguf_part(file.name()).is_none_or(|(_, index, _)| index == 1)
    };
    files.into_iter().filter(is_model).map(|file| file.path.as_str()).collect()
}

/// What is said of GGUF files where no other weights are; `None` where there are none.
fn named_ggufs<'a>(files: impl IntoIterator<Item = &'a RepoFile>) -> Option<String> {
    let all = ggufs(files);
    let first = all.first()?;
    let shown = all[..all.len().min(GGUFS_SHOWN)].join(", ");
    let more = all.len().saturating_sub(GGUFS_SHOWN);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    Some(format!("only GGUF files: {shown}{more}; name one of them, as organisation/model/{first}"))
}

/// The GGUF file that a repository consists of, if it holds one model and no other weights.
pub(super) fn only_gguf(files: &[RepoFile]) -> Option<String> {
    let others = |file: &RepoFile| file.is_weights() || is_pickle(file.name());
    match &ggufs(files)[..] {
        [only] if !files.iter().any(others) => Some((*only).to_owned()),
        _ => None,
    }
}

/// The one GGUF file with a tag in its name, such as `Q4_K_M`: between what no tag has, and in any case.
pub(super) fn tagged_gguf(files: &[RepoFile], tag: &str) -> Result<String, String> {
    let tag_upper = tag.to_ascii_uppercase();
    let is_of_tag = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let has = |path: &&&str| {
        let name = path.rsplit('/').next().unwrap_or(path).to_ascii_uppercase();
        name.match_indices(&tag_upper).any(|(at, found)| {
            !name[..at].ends_with(is_of_tag) && !name[at + found.len()..].starts_with(is_of_tag)
        })
    };
    let all = ggufs(files);
    let found: Vec<&&str> = all.iter().filter(has).collect();
    if let [only] = &found[..] {
        return Ok((**only).to_owned());
    }
    let named = named_ggufs(files).unwrap_or_else(|| "no GGUF files".to_owned());
    Err(format!("{} GGUF files are of {tag:?}, of {named}", found.len()))
}

/// A weight file that the index names and a list of files lacks; without an index any will do.
pub(super) fn missing_weights(files: &[RepoFile], index: Option<&[u8]>) -> Option<String> {
    // A broken index is told by whoever opens the model.
    let indexed = index.and_then(|index| indexed(index).ok()).unwrap_or_default();
    indexed.into_iter().find(|name| !files.iter().any(|file| file.name() == name))
}

/// A GGUF file with the others of its model, and the tokenizer beside it. A config beside it is
/// left: those of such repositories are often a few keys for the hub's own pages.
fn gguf(files: &[RepoFile], path: &str) -> Result<Vec<RepoFile>, String> {
    let (folder, name) = path.rsplit_once('/').map_or(("", path), |(folder, name)| (folder, name));
    let here: Vec<&RepoFile> = files
        .iter()
        .filter(|file| file.path.rsplit_once('/').map_or("", |(folder, _)| folder) == folder)
        .collect();
    let belongs = |other: &str| match (gguf_part(name), gguf_part(other)) {
        (Some((stem, _, count)), Some((other, _, all))) => (stem, count) == (other, all),
        _ => name == other,
    };
    if !here.iter().any(|file| file.name() == name) {
        let all = files.iter().filter(|file| file.path.ends_with(GGUF));
        let all: Vec<&str> = all.map(|file| file.path.as_str()).collect();
        let all = if all.is_empty() { "none".to_owned() } else { all.join(", ") };
        return Err(format!("the repository has no {path}; its GGUF files: {all}"));
    }
    let needed = |file: &&&RepoFile| belongs(file.name()) || is_tokenizer_file(file.name());
    Ok(here.iter().filter(needed).map(|file| (*file).clone()).collect())
}

fn indexed(index: &[u8]) -> Result<Vec<String>, String> {
    let index: Value = serde_json::from_slice(without_mark(index))
        .map_err(|error| format!("{INDEX} is not JSON: {error}"))?;
    let Some(map) = index["weight_map"].as_object() else {
        return Err(format!("{INDEX} has no \"weight_map\" object"));
    };
    let mut names: Vec<String> =
        map.values().filter_map(Value::as_str).map(str::to_owned).collect();
    names.sort_unstable();
    names.dedup();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(names: &[&str]) -> Vec<RepoFile> {
        let file = |name: &&str| RepoFile {
            path: (*name).to_owned(),
            size: 1,
            oid: Some([0; 20]),
            sha256: None,
        };
        names.iter().map(file).collect()
    }

    #[test]
    fn a_repository_of_gguf_files_alone_is_its_only_one_or_names_them() {
        let split = ["q/m-Q8_0-00001-of-00002.gguf", "q/m-Q8_0-00002-of-00002.gguf"];
        assert_eq!(only_gguf(&files(&split)).as_deref(), Some(split[0]));
        let alone = files(&["README.md", "m-F16.gguf", "mmproj-m.gguf", "config.json"]);
        assert_eq!(only_gguf(&alone).as_deref(), Some("m-F16.gguf"));
        assert_eq!(only_gguf(&files(&["m.gguf", "model.safetensors"])), None);
        assert_eq!(only_gguf(&files(&["README.md"])), None);
        let several = files(&["a-Q4_K_M.gguf", "a-Q8_0.gguf"]);
        assert_eq!(only_gguf(&several), None);
        let error = needed(&several, &Selection::WHOLE, None).unwrap_err();
        assert!(error.contains("a-Q4_K_M.gguf, a-Q8_0.gguf; name one of them"), "{error}");
    }

    #[test]
    fn a_tag_is_the_whole_quantization_in_a_name() {
        let all = files(&["m-Q4_K.gguf", "m-Q4_K_M.gguf", "UD/m-q8_0-00001-of-00002.gguf"]);
        assert_eq!(tagged_gguf(&all, "Q4_K").unwrap(), "m-Q4_K.gguf");
        assert_eq!(tagged_gguf(&all, "q4_k_m").unwrap(), "m-Q4_K_M.gguf");
        assert_eq!(tagged_gguf(&all, "Q8_0").unwrap(), "UD/m-q8_0-00001-of-00002.gguf");
        let error = tagged_gguf(&all, "F16").unwrap_err();
        assert!(error.contains("0 GGUF files") && error.contains("m-Q4_K_M.gguf"), "{error}");
    }

    #[test]
    fn weights_that_the_index_names_are_all_needed() {
        let index = br#"{"weight_map": {"a": "m1.safetensors", "b": "m2.safetensors"}}"#;
        let here = files(&["m1.safetensors"]);
        assert_eq!(missing_weights(&here, Some(index)).as_deref(), Some("m2.safetensors"));
        assert_eq!(missing_weights(&here, None), None);
    }
}
