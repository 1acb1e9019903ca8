//! What files a model folder has, and what its documents say.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use serde_json::{Map, Value};
use shardpack_containers::stored::{Documents, StoredConfig};
use shardpack_manifests::manifest;

use super::SourceError;
use crate::checkpoint::{
    TEMPLATE_ENDING, TEMPLATE_FOLDER, TEXT_FILES, is_stray, read_text, without_mark,
};

/// What the folder says of its stored precision.
pub(super) fn stored_config(
    folder: &Path,
    config: &Value,
) -> Result<Option<StoredConfig>, SourceError> {
    let read = |name: &str| {
        let path = folder.join(name);
        path.is_file().then(|| parse_object(&path, &read_text(&path)?)).transpose()
    };
    let hf_quant_config = read("hf_quant_config.json")?;
    let quantize_config = read("quantize_config.json")?;
    StoredConfig::parse(Documents {
        config: Some(config),
        hf_quant_config: hf_quant_config.as_ref(),
        quantize_config: quantize_config.as_ref(),
    })
    .map_err(|source| SourceError::Stored { path: folder.to_owned(), source })
}

/// The files that an index names, if the folder has that index.
pub(super) fn indexed_files(
    folder: &Path,
    index: &'static str,
    present: &BTreeSet<String>,
) -> Result<BTreeSet<String>, SourceError> {
    let map = index_map(folder, index)?;
    let mut names = BTreeSet::new();
    for file in map.values().filter_map(Value::as_str) {
        if !present.contains(file) {
            let (file, folder) = (file.to_owned(), folder.to_owned());
            return Err(SourceError::MissingFile { index, file, folder });
        }
        names.insert(file.to_owned());
    }
    Ok(names)
}

/// The file that an index names for every tensor, all of them names of files; empty without an index.
pub(super) fn index_map(
    folder: &Path,
    index: &'static str,
) -> Result<Map<String, Value>, SourceError> {
    let path = folder.join(index);
    if !path.is_file() {
        return Ok(Map::new());
    }
    let mut document = parse_object(&path, &read_text(&path)?)?;
    if let Some(Value::Object(map)) = document.get_mut("weight_map").map(Value::take) {
        let is_name = |file: &&Value| {
            file.as_str().is_some_and(|file| manifest::check_file_name(file).is_ok())
        };
        return match map.values().find(|file| !is_name(file)) {
            Some(file) => {
                let problem = format!("{file} is not a file name");
                Err(SourceError::Json { path, problem })
            }
            None => Ok(map),
        };
    }
    let problem = "has no \"weight_map\" object".to_owned();
    Err(SourceError::Json { path, problem })
}

/// What a folder holds, without what other programs leave there.
pub(super) fn file_names(folder: &Path) -> Result<BTreeSet<String>, SourceError> {
    let read = |source| SourceError::Read { path: folder.to_owned(), source };
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(folder).map_err(read)? {
        if let Ok(name) = entry.map_err(read)?.file_name().into_string()
            && !is_stray(&name)
        {
            names.insert(name);
        }
    }
    Ok(names)
}

pub(super) fn read_texts(folder: &Path) -> Result<BTreeMap<String, Vec<u8>>, SourceError> {
    let present = TEXT_FILES.iter().filter(|name| folder.join(name).is_file());
    let named = folder.join(TEMPLATE_FOLDER);
    let named = if named.is_dir() { file_names(&named)? } else { BTreeSet::new() };
    let named = named.iter().filter(|name| name.ends_with(TEMPLATE_ENDING));
    let named = named.map(|name| format!("{TEMPLATE_FOLDER}{name}"));
    let names = present.map(|name| (*name).to_owned()).chain(named);
    names.map(|name| Ok((name.clone(), read_text(&folder.join(&name))?))).collect()
}

pub(super) fn parse_object(path: &Path, bytes: &[u8]) -> Result<Value, SourceError> {
    let problem = |problem| SourceError::Json { path: path.to_owned(), problem };
    match shardpack_formats::python_json::parse(without_mark(bytes)) {
        Ok(value @ Value::Object(_)) => Ok(value),
        Ok(_) => Err(problem("not a JSON object".to_owned())),
        Err(error) => Err(problem(format!("not JSON: {error}"))),
    }
}
