//! A GGUF file as a source: its header is read from the front until it is whole, its tensors are
//! read by position like all others. The config comes from its keys and what stands beside it
//! (`beside`), the tokenizer from beside the file, or from its keys.

mod beside;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use shardpack_containers::{
    gguf::{self, Header, Model, Part, config::Frequencies, tokenizer},
    stored,
};
use shardpack_quantize::Dtype;

use super::{Source, SourceError, Weights, file_names, read_texts, weights::WeightFile};
use crate::checkpoint::{GGUF, VISION_PREFIX, gguf_part, is_gguf, is_safetensors};
use beside::Beside;

/// Bytes of a file that are read at first: a header without a vocabulary fits.
const FIRST_BYTES: u64 = 1 << 20;

/// What llama.cpp calls the architecture of vision towers.
const VISION_ARCHITECTURE: &str = "clip";

/// Most frequencies of a rotary embedding: half of the largest head.
const MAX_FREQUENCIES: u64 = 4096;

/// Files that a tokenizer can be read from.
const TOKENIZERS: &[&str] = &["tekken.json", "tiktoken.model", "tokenizer.json", "tokenizer.model"];

/// The GGUF file that a path stands for, if it is one or a folder with one and no `.safetensors`;
/// of a model that is split into several, the first. A file is one if it begins as they do, whatever
/// its name is.
pub(super) fn find(path: &Path) -> Result<Option<PathBuf>, SourceError> {
    if path.is_file() {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let is_named = name.ends_with(GGUF) && !is_safetensors(folder_of(path), name);
        return Ok((is_named || is_gguf(path)).then(|| path.to_owned()));
    }
    if !path.is_dir() {
        return Ok(None);
    }
    let names = file_names(path)?;
    if names.iter().any(|name| name.ends_with(".safetensors")) {
        return Ok(None);
    }
    let is_first = |name: &&String| gguf_part(name).is_none_or(|(_, index, _)| index == 1);
    let is_named = |name: &&String| name.ends_with(GGUF) && !name.starts_with(VISION_PREFIX);
    let mut found: Vec<&String> = names.iter().filter(is_named).filter(is_first).collect();
    if found.is_empty() {
        found = names.iter().filter(|name| is_gguf(&path.join(name))).collect();
        found.retain(|name| is_model(path, name));
    } else if found.len() > 1 && found.iter().any(|name| is_model(path, name)) {
        found.retain(|name| is_model(path, name));
    }
    match found.as_slice() {
        [] => Ok(None),
        [name] => Ok(Some(path.join(name))),
        [one, other, ..] => {
            let problem =
                format!("has several GGUF files, such as {one:?} and {other:?}; give one of them");
            Err(SourceError::Folder { path: path.to_owned(), problem })
        }
    }
}

/// Whether a GGUF file says that it holds a model, and not a vision tower, an adapter or statistics.
fn is_model(folder: &Path, name: &str) -> bool {
    let path = folder.join(name);
    let header =
        WeightFile::open(folder, name.to_owned()).and_then(|file| read_header(&path, &file));
    header.is_ok_and(|header| {
        let text = |key: &str| header.keys.get(key).and_then(gguf::Value::text);
        text("general.type").is_none_or(|kind| kind == "model")
            && text("general.architecture") != Some(VISION_ARCHITECTURE)
    })
}

/// The folder that a file stands in.
pub(super) fn folder_of(path: &Path) -> &Path {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    parent.unwrap_or_else(|| Path::new("."))
}

/// Opens the model whose only or first file this is.
pub(super) fn open(path: &Path) -> Result<Source, SourceError> {
    let folder = folder_of(path);
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
    let wrong = |source| SourceError::Gguf { path: path.to_owned(), source };
    let first = WeightFile::open(folder, name.clone())?;
    let header = read_header(path, &first)?;
    check_first(path, &name, &header)?;
    let model = Model::new(&header).map_err(wrong)?;
    let mut parts = Vec::new();
    let mut weights = Weights::default();
    let mut add = |file, tensors: Vec<Part>| {
        let infos = tensors.iter().map(Part::info).collect();
        parts.extend(tensors);
        weights.add_tensors(file, infos)
    };
    add(first, model.parts(&header.tensors).map_err(wrong)?)?;
    for name in others(&name, model.file_count().map_err(wrong)?, folder)? {
        let path = folder.join(&name);
        let file = WeightFile::open(folder, name)?;
        let wrong = |source| SourceError::Gguf { path: path.clone(), source };
        let tensors = read_header(&path, &file)?.tensors;
        add(file, model.parts(&tensors).map_err(wrong)?)?;
    }
    let grouped = stored::group_gguf(&parts)
        .map_err(|source| SourceError::Stored { path: path.to_owned(), source })?;
    let mut derived = BTreeSet::new();
    let factors = |name| frequencies(path, &weights, name);
    let frequencies = Frequencies {
        all: factors(gguf::FREQUENCIES)?,
        long: factors(gguf::LONG_FREQUENCIES)?,
        short: factors(gguf::SHORT_FREQUENCIES)?,
    };
    let by_keys = gguf::config::config(&model, &parts, &frequencies).map_err(wrong);
    let Beside { config, bytes, is_derived, notes } = beside::choose(folder, by_keys)?;
    if is_derived {
        derived.insert("config.json".to_owned());
    }
    let mut text = read_texts(folder)?;
    derive_tokenizer(&header, &mut text, &mut derived).map_err(wrong)?;
    let mut source = Source::of(folder, (config, bytes), (weights, grouped), (text, derived));
    source.notes.extend(notes);
    Ok(source)
}

fn read_header(path: &Path, file: &WeightFile) -> Result<Header, SourceError> {
    let mut start = Vec::new();
    let mut wanted = FIRST_BYTES.min(file.size);
    loop {
        let have = start.len() as u64;
        start.resize(wanted as usize, 0);
        file.read(&mut start[have as usize..], have)
            .map_err(|source| SourceError::Read { path: path.to_owned(), source })?;
        match gguf::parse_start(&start, file.size) {
            Ok(header) => return Ok(header),
            // Twice as much each time, so that all is parsed but a few times.
            Err(Ok(needed)) => wanted = needed.max(2 * wanted).min(file.size),
            Err(Err(source)) => return Err(SourceError::Gguf { path: path.to_owned(), source }),
        }
    }
}

/// Whether the file is the first one of its model: only that one says what the model is.
fn check_first(path: &Path, name: &str, header: &Header) -> Result<(), SourceError> {
    let number = |key: &str| header.keys.get(key).and_then(gguf::Value::integer);
    let by_name = gguf_part(name).filter(|(_, index, count)| *index > 1 && index <= count);
    let by_keys = number("split.no").filter(|index| *index > 0).map(|index| index + 1);
    let (index, count) = match (by_keys, by_name) {
        (Some(index), named) => {
            let named = named.map(|(_, _, count)| count as i64);
            (index, number("split.count").or(named).unwrap_or(index))
        }
        // A file that was renamed is what its keys say.
        (None, Some((_, index, count))) if !header.keys.contains_key("general.architecture") => {
            (index as i64, count as i64)
        }
        (None, _) => return Ok(()),
    };
    let first = match gguf_part(name) {
        Some((stem, _, _)) => format!("{stem}-00001-of-{count:05}{GGUF}"),
        None => format!("the file that ends in -00001-of-{count:05}{GGUF}"),
    };
    let problem = format!(
        "part {index} of {count} of a model that is split into several files; give the first part, {first}, with the others beside it"
    );
    Err(SourceError::Folder { path: path.to_owned(), problem })
}

/// The other files of a model that is split.
fn others(name: &str, count: u64, folder: &Path) -> Result<Vec<String>, SourceError> {
    if count == 1 {
        return Ok(Vec::new());
    }
    let problem = |problem: String| SourceError::Folder { path: folder.to_owned(), problem };
    let Some((stem, 1, _)) = gguf_part(name).filter(|(_, _, stated)| *stated == count) else {
        return Err(problem(format!(
            "{name:?} says that its model has {count} files; give the one that ends in -00001-of-{count:05}{GGUF}"
        )));
    };
    let names = (2..=count).map(|index| format!("{stem}-{index:05}-of-{count:05}{GGUF}"));
    let names: Vec<String> = names.collect();
    match names.iter().find(|name| !folder.join(name).is_file()) {
        Some(missing) => Err(problem(format!("{missing:?} is missing; finish the download"))),
        None => Ok(names),
    }
}

/// The factors of the rotary frequencies, where the file has them.
fn frequencies(
    path: &Path,
    weights: &Weights,
    name: &str,
) -> Result<Option<Vec<f32>>, SourceError> {
    let Some((file, info)) = weights.find(name) else { return Ok(None) };
    if info.dtype != Dtype::F32 || info.size > 4 * MAX_FREQUENCIES {
        let problem = format!("{name} is not a short list of F32 values");
        return Err(SourceError::Folder { path: path.to_owned(), problem });
    }
    let mut bytes = vec![0; info.size as usize];
    weights.files[file]
        .read(&mut bytes, info.offset)
        .map_err(|source| SourceError::Read { path: path.to_owned(), source })?;
    let (fours, _) = bytes.as_chunks::<4>();
    Ok(Some(fours.iter().map(|four| f32::from_le_bytes(*four)).collect()))
}

/// Adds the tokenizer of the keys where none stands beside the file.
fn derive_tokenizer(
    header: &Header,
    text: &mut BTreeMap<String, Vec<u8>>,
    derived: &mut BTreeSet<String>,
) -> Result<(), gguf::GgufError> {
    if !tokenizer::is_there(header) {
        return Ok(());
    }
    let mut documents = Vec::new();
    if !TOKENIZERS.iter().any(|name| text.contains_key(*name)) {
        documents.push(("tokenizer.json", tokenizer::tokenizer(header)?));
    }
    if !text.contains_key("tokenizer_config.json") {
        documents.push(("tokenizer_config.json", tokenizer::tokenizer_config(header)));
    }
    for (name, document) in documents {
        derived.insert(name.to_owned());
        text.insert(name.to_owned(), document.to_string().into_bytes());
    }
    Ok(())
}
