//! A model folder: its config, its weight files and its tokenizer files.

mod choice;
mod embedding;
mod error;
mod folder;
mod foreign;
mod gguf;
mod hashes;
mod local_file;
mod pickle;
mod rows;
#[cfg(test)]
mod tests;
mod texts;
mod tied;
mod weights;

#[cfg(feature = "hub")]
use std::sync::Arc;
use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    path::{Path, PathBuf},
};

use serde_json::Value;
use shardpack_containers::{
    container::TensorInfo,
    stored::{self, Descriptions, Grouped, Logical, StoredConfig},
    tokenizer::{self, Converted},
};
use shardpack_formats::{
    RulePack, SourceTensor,
    chat::{self, special_tokens},
    normalise::{Writer, changed_values, may_be_changed, rows_and_columns},
    spec::Embedding,
};
use shardpack_manifests::{
    Digest,
    manifest::{self, SourceFile},
};

#[cfg(feature = "hub")]
use crate::hub::{Hub, Selection, Snapshot};
use crate::{
    adapter::{self, Adapters, Merge},
    checkpoint::{
        INDEX, Origin, PICKLE_INDEX, Pickles, Subfolder, has_tokenizer, is_safetensors,
        is_tokenizer_file, read_text, without_mark,
    },
};

pub(crate) use embedding::DENSE;
pub use error::SourceError;
use folder::{file_names, index_map, indexed_files, parse_object, read_texts, stored_config};
pub(crate) use hashes::{FileHashes, Follower, piece_count, pieces_within};
pub(crate) use rows::RowBuffers;
pub(crate) use weights::{WeightFile, Weights};

/// What is said of a folder that holds an adapter.
const ADAPTER: &str = "an adapter, not a model: it has adapter_config.json but no config.json; give the folder of the model, and this one with --adapter";

/// What is said of a description of quantized weights beside floats.
const LEFT_OVER: &str = "the configuration describes quantized weights, but every tensor is plain floats: they are taken as they stand";

/// What is said of a folder that holds something else.
const NO_CONFIG: &str = "not a model folder: it has no config.json";

/// Where a vision-language model keeps the configuration of its text model.
const TEXT_CONFIG: &str = "text_config";

/// An open model folder. Of the weight files only the headers have been read.
pub struct Source {
    folder: PathBuf,
    /// `config.json`.
    pub config: Value,
    pub(crate) weights: Weights,
    /// Text files by name.
    pub text: BTreeMap<String, Vec<u8>>,
    /// `config.json` and text files that do not stand in the folder but follow from a weight
    /// file.
    derived: BTreeSet<String>,
    config_bytes: Vec<u8>,
    /// Text files as they stand in the folder, where [`Self::text`] has them changed.
    originals: BTreeMap<String, Vec<u8>>,
    /// What the stored tensors stand for, by name.
    grouped: Grouped,
    /// The `tokenizer.json` that is made of the others, or why there is none.
    pub(crate) tokenizer: Option<Result<Converted, String>>,
    pub(crate) adapters: Adapters,
    /// Keys that the user has taken out of `config`, with their values.
    pub(crate) ignored_keys: BTreeMap<String, Value>,
    origin: Origin,
    /// What was found and mended, for whoever converts.
    pub(crate) notes: Vec<String>,
    /// How it makes embeddings; nothing for a model that generates text.
    pub(crate) embedding: Option<Embedding>,
}

impl Source {
    /// Opens a folder as Hugging Face lays it out: `config.json`, one or more `.safetensors`
    /// files (with an index when there are several), tokenizer files. Or a GGUF file, or a folder
    /// with one and no `.safetensors`.
    pub fn open(folder: &Path) -> Result<Self, SourceError> {
        Self::open_as(folder, Pickles::Refuse)
    }

    /// The same, with a word on files of `torch.save`.
    pub fn open_as(folder: &Path, pickles: Pickles) -> Result<Self, SourceError> {
        if let Some(file) = gguf::find(folder)? {
            return gguf::open(&file);
        }
        if folder.is_file() {
            return Self::open_file(folder);
        }
        Self::open_folder(folder, pickles)
    }

    /// Opens the model that a weight file of any name belongs to.
    fn open_file(path: &Path) -> Result<Self, SourceError> {
        let folder = gguf::folder_of(path);
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if !is_safetensors(folder, name) {
            let what = foreign::describe_file(folder, name);
            let problem = format!("neither a GGUF file nor one of safetensors; {what}");
            return Err(SourceError::Folder { path: path.to_owned(), problem });
        }
        let open = |folder: &Path, precision: Option<&StoredConfig>| {
            let weights = choice::open_named(folder, name)?;
            let grouped = group(folder, precision, &weights)?;
            Ok((weights, grouped))
        };
        Self::open_with(folder, INDEX, open)
    }

    /// Opens a folder whatever GGUF files it has beside.
    fn open_folder(folder: &Path, pickles: Pickles) -> Result<Self, SourceError> {
        if pickles == Pickles::Read
            && folder.is_dir()
            && let Some(files) = pickle::files(folder)?
        {
            let open = |folder: &Path, precision: Option<&StoredConfig>| {
                pickle::open(folder, files, precision)
            };
            return Self::open_with(folder, PICKLE_INDEX, open);
        }
        let open = |folder: &Path, precision: Option<&StoredConfig>| {
            let weights = choice::open(folder)?;
            let grouped = group(folder, precision, &weights)?;
            Ok((weights, grouped))
        };
        Self::open_with(folder, INDEX, open)
    }

    fn open_with(
        folder: &Path,
        index: &'static str,
        open_weights: impl FnOnce(
            &Path,
            Option<&StoredConfig>,
        ) -> Result<(Weights, Grouped), SourceError>,
    ) -> Result<Self, SourceError> {
        let problem = |problem: &str| SourceError::Folder {
            path: folder.to_owned(),
            problem: problem.to_owned(),
        };
        if !folder.is_dir() {
            return Err(SourceError::NotFolder(folder.to_owned()));
        }
        let config_path = folder.join("config.json");
        if !config_path.is_file() {
            if folder.join("adapter_config.json").is_file() {
                return Err(problem(ADAPTER));
            }
            let names = file_names(folder)?;
            let below = names.iter().find(|name| folder.join(name).join("config.json").is_file());
            return Err(problem(&match (below, foreign::describe(folder, &names)) {
                // A text model can stand in a part of a repository.
                (Some(name), _) => {
                    format!("{NO_CONFIG}, but {name}/ has one; name it with --subfolder {name}")
                }
                (None, Some(other)) => format!("{NO_CONFIG}; {other}"),
                (None, None) => NO_CONFIG.to_owned(),
            }));
        }
        let config_bytes = read_text(&config_path)?;
        let mut config = parse_object(&config_path, &config_bytes)?;
        let modules = embedding::read(folder)?;
        // Before the weights: a format that is not read may not even have readable headers.
        let precision = stored_config(folder, &config);
        let is_described = !matches!(precision, Ok(None));
        let (mut weights, mut grouped) = match precision {
            Ok(precision) => open_weights(folder, precision.as_ref())?,
            // What was quantized once may have been saved as floats again.
            Err(refusal) => match open_weights(folder, None) {
                Ok((weights, grouped)) if stored::are_plain(weights.tensors()) => {
                    (weights, grouped)
                }
                _ => return Err(refusal),
            },
        };
        let is_left_over = is_described && stored::are_plain(weights.tensors());
        undo_mlx(folder, &config, &weights, &mut grouped)?;
        if let Some(modules) = &modules {
            modules.add_weights(folder, &mut weights, &mut grouped)?;
        }
        let (embedding, note) = embedding::complete(&mut config, modules, &grouped);
        let text = read_texts(folder)?;
        let documents = (config, config_bytes);
        let mut source = Self::of(folder, documents, (weights, grouped), (text, BTreeSet::new()));
        source.embedding = embedding;
        source.notes.extend(note);
        source.notes.extend(is_left_over.then(|| LEFT_OVER.to_owned()));
        source.notes.extend(source.weights.left_aside().iter().cloned());
        source.check_index(index)?;
        Ok(source)
    }

    /// A source of what was read, without adapters.
    fn of(
        folder: &Path,
        (config, config_bytes): (Value, Vec<u8>),
        (weights, grouped): (Weights, Grouped),
        (mut text, mut derived): (BTreeMap<String, Vec<u8>>, BTreeSet<String>),
    ) -> Self {
        if let Some(template) = config["model_type"].as_str().and_then(chat::published)
            && let Ok(None) = chat::lookup(&text)
        {
            text.insert(chat::TEMPLATE_FILE.to_owned(), template.as_bytes().to_vec());
            derived.insert(chat::TEMPLATE_FILE.to_owned());
        }
        let mut source = Self {
            folder: folder.to_owned(),
            tokenizer: None,
            originals: BTreeMap::new(),
            config,
            config_bytes,
            weights,
            grouped,
            text,
            derived,
            adapters: Adapters::default(),
            ignored_keys: BTreeMap::new(),
            origin: Origin::default(),
            notes: Vec::new(),
            embedding: None,
        };
        source.complete_texts();
        source
    }

    /// Brings the text files into the form that packages have.
    fn complete_texts(&mut self) {
        let before = self.text.clone();
        let (text, mut notes) = (&mut self.text, Vec::new());
        let vocab = |config: &Value| config["vocab_size"].as_u64();
        let rows = vocab(&self.config["text_config"]).or_else(|| vocab(&self.config));
        texts::strip_marks(text, &mut notes);
        texts::fold_templates(text, &mut notes);
        self.tokenizer = converted_tokenizer(text);
        texts::add_tokens(text, &mut self.tokenizer, rows, &mut notes);
        let converted = self.tokenizer.as_ref().and_then(|made| made.as_ref().ok());
        texts::complete_ends(text, converted, &self.config, rows, &mut notes);
        for name in self.text.keys().filter(|name| !before.contains_key(*name)) {
            self.derived.insert(name.clone());
        }
        for (name, bytes) in before {
            if self.text.get(&name) != Some(&bytes) && !self.derived.contains(&name) {
                self.originals.entry(name).or_insert(bytes);
            }
        }
        notes.retain(|note| !self.notes.contains(note));
        self.notes.extend(notes);
    }

    /// Opens a folder, or the model in a part of it.
    pub fn open_part(
        folder: &Path,
        subfolder: Option<&Subfolder>,
        pickles: Pickles,
    ) -> Result<Self, SourceError> {
        let Some(subfolder) = subfolder else { return Self::open_as(folder, pickles) };
        let mut source = Self::open_as(&folder.join(subfolder.as_str()), pickles)?;
        source.take_tokenizer_of(folder)?;
        Ok(source)
    }

    /// Without a tokenizer of its own the part has that of the whole.
    fn take_tokenizer_of(&mut self, whole: &Path) -> Result<(), SourceError> {
        if has_tokenizer(self.text.keys().map(String::as_str)) {
            return Ok(());
        }
        for (name, bytes) in read_texts(whole)? {
            if is_tokenizer_file(&name) {
                self.text.entry(name).or_insert(bytes);
            }
        }
        self.complete_texts();
        Ok(())
    }

    /// Opens a model of the hub whose files are in the cache.
    #[cfg(feature = "hub")]
    pub fn open_snapshot(hub: &Hub, snapshot: &Snapshot) -> Result<Self, SourceError> {
        let folder = hub.fetch(snapshot)?;
        let Selection { subfolder, gguf, pickles } = &snapshot.selection;
        // The folder may have files of other choices, too.
        let mut source = match (gguf, subfolder) {
            (Some(path), _) => Self::open(&folder.join(path))?,
            (None, None) => Self::open_folder(&folder, *pickles)?,
            (None, Some(part)) => {
                let mut source = Self::open_folder(&folder.join(part.as_str()), *pickles)?;
                source.take_tokenizer_of(&folder)?;
                source
            }
        };
        source.origin = snapshot.origin();
        Ok(source)
    }

    /// Opens a model of the hub whose weights stay there: pieces of files are brought to `spool` when
    /// their data is needed; without it the source can only be planned.
    #[cfg(feature = "hub")]
    pub fn open_remote(
        hub: &Arc<Hub>,
        snapshot: &Snapshot,
        spool: Option<&Path>,
    ) -> Result<Self, SourceError> {
        let whole = hub.fetch_texts(snapshot)?;
        let part = snapshot.selection.subfolder.as_ref();
        let folder = part.map_or_else(|| whole.clone(), |part| whole.join(part.as_str()));
        let files = hub.weights(snapshot, spool);
        let open = |folder: &Path, precision: Option<&StoredConfig>| {
            let weights = Weights::remote(folder, files)?;
            let grouped = group(folder, precision, &weights)?;
            Ok((weights, grouped))
        };
        let mut source = Self::open_with(&folder, INDEX, open)?;
        if part.is_some() {
            source.take_tokenizer_of(&whole)?;
        }
        source.origin = snapshot.origin();
        Ok(source)
    }

    /// Merges adapters into the weights, in this order. Tokenizer files that come with one take the
    /// place of the model's.
    pub fn merge_adapters(&mut self, folders: &[PathBuf]) -> Result<(), SourceError> {
        let tied = self.tied();
        let base = |name: &str| {
            let shared = || tied.as_ref().filter(|tied| tied.head == name);
            let shared = || self.logical(&shared()?.embedding);
            let tensor = self.logical(name).or_else(shared)?;
            let size = tensor.shape.iter().product::<u64>() * tensor.dtype.size_bytes() as u64;
            let (name, shape) = (name.to_owned(), tensor.shape.clone());
            Some(TensorInfo { name, dtype: tensor.dtype, shape, offset: 0, size })
        };
        let mut adapters = Adapters::open(folders, &base)?;
        if let Some(tied) = tied {
            self.part(tied, &mut adapters)?;
        }
        let has_template = |bytes: &Vec<u8>| {
            serde_json::from_slice::<Value>(without_mark(bytes))
                .is_ok_and(|config| !config["chat_template"].is_null())
        };
        let config = adapters.texts.get("tokenizer_config.json");
        if config.is_some_and(has_template) {
            // The model's own template file would win over the one that the adapter was trained
            // with.
            self.text.remove("chat_template.jinja");
        }
        self.text.extend(adapters.texts.clone());
        self.originals.retain(|name, _| !adapters.texts.contains_key(name));
        self.complete_texts();
        self.adapters = adapters;
        Ok(())
    }

    /// Takes keys out of the configuration, the text model's too. Keys that rules read are refused
    /// by [`crate::Plan::new`].
    pub fn ignore_config_keys(&mut self, keys: &[String]) -> Result<(), SourceError> {
        for key in keys {
            let mut removed = self.config.as_object_mut().and_then(|config| config.remove(key));
            if let Some(text) = self.config.get_mut(TEXT_CONFIG).and_then(Value::as_object_mut) {
                removed = text.remove(key).or(removed);
            }
            let missing = || SourceError::NoSuchKey { key: key.clone() };
            self.ignored_keys.insert(key.clone(), removed.ok_or_else(missing)?);
        }
        Ok(())
    }

    /// Every tensor of the weight files as it is stored, by name; those that adapters change as
    /// they leave them.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        self.weights.tensors().map(|info| self.adapters.info(&info.name).unwrap_or(info))
    }

    /// Every tensor of the checkpoint as rules see it, whatever it is stored as and as adapters
    /// leave it.
    #[must_use]
    pub fn source_tensors(&self) -> Vec<SourceTensor> {
        let tensor = |tensor: &Logical| {
            let changed = self.adapters.info(&tensor.name);
            SourceTensor {
                name: tensor.name.clone(),
                dtype: changed.map_or(tensor.dtype, |info| info.dtype),
                shape: changed.map_or(&tensor.shape, |info| &info.shape).clone(),
            }
        };
        self.grouped.tensors.iter().map(tensor).collect()
    }

    /// The tokenizer's named special tokens.
    pub(crate) fn special_tokens(&self) -> BTreeMap<String, String> {
        let config = self.text.get("tokenizer_config.json");
        let config = config.and_then(|text| serde_json::from_slice(text).ok());
        special_tokens(&config.unwrap_or_default())
    }

    /// Begins to read a tensor that adapters change; `None` when none does.
    pub(crate) fn merge(&self, name: &str) -> Result<Option<Merge<'_>>, SourceError> {
        Ok(self.adapters.merge(name)?)
    }

    /// Rows of a changed tensor, counted over all dimensions but the last, as little-endian f32.
    pub(crate) fn merged_rows(
        &self,
        merge: &Merge,
        rows: Range<u64>,
        out: &mut Vec<u8>,
    ) -> Result<(), SourceError> {
        let name = &merge.info().name;
        let tensor = self.logical(name).expect("adapters change tensors of the model");
        let row = rows_and_columns(&tensor.shape)[1] * tensor.dtype.size_bytes() as u64;
        let mut buffers = RowBuffers::default();
        let mut base = |rows: Range<u64>, out: &mut [f32]| {
            let mut bytes = vec![0; ((rows.end - rows.start) * row) as usize];
            self.read_bytes(tensor, rows.start * row, &mut bytes, &mut buffers)?;
            adapter::widen(tensor.dtype, &bytes, out);
            Ok(())
        };
        merge.rows(rows, &mut base, out)
    }

    /// Every tensor of the checkpoint, whatever it is stored as, sorted by name.
    pub fn logical_tensors(&self) -> impl Iterator<Item = &Logical> {
        self.grouped.tensors.iter()
    }

    /// Stored tensors that stand for no weight, with the reason.
    #[must_use]
    pub fn dropped(&self) -> &[(String, &'static str)] {
        &self.grouped.dropped
    }

    /// A tensor of the checkpoint.
    #[must_use]
    pub fn logical(&self, name: &str) -> Option<&Logical> {
        let tensors = &self.grouped.tensors;
        let found = tensors.binary_search_by(|tensor| tensor.name.as_str().cmp(name));
        found.ok().map(|index| &tensors[index])
    }

    /// Where the parts of a tensor of the checkpoint are stored: file and place.
    pub(crate) fn places(&self, name: &str) -> impl Iterator<Item = (usize, &TensorInfo)> {
        let parts = self.logical(name).map_or(&[][..], |tensor| &tensor.parts);
        parts.iter().filter_map(|part| self.weights.find(part))
    }

    /// Reads a whole tensor as it is stored.
    pub fn read_tensor(&self, name: &str) -> Result<Option<Vec<u8>>, SourceError> {
        if let Some(merge) = self.merge(name)? {
            let mut bytes = Vec::new();
            let [rows, _] = rows_and_columns(&merge.info().shape);
            self.merged_rows(&merge, 0..rows, &mut bytes)?;
            return Ok(Some(bytes));
        }
        let Some((file, info)) = self.weights.find(name) else { return Ok(None) };
        let mut bytes = vec![0; info.size as usize];
        let file = &self.weights.files[file];
        file.read(&mut bytes, info.offset)
            .map_err(|source| SourceError::Read { path: self.folder.join(&file.name), source })?;
        Ok(Some(bytes))
    }

    /// Path of a weight file.
    pub(crate) fn path_of(&self, file: usize) -> PathBuf {
        self.folder.join(&self.weights.files[file].name)
    }

    /// The weight file that holds a tensor.
    #[must_use]
    pub fn file_of(&self, tensor: &str) -> Option<&str> {
        self.weights.find(tensor).map(|(file, _)| self.weights.files[file].name.as_str())
    }

    /// Bytes that a thread holds while weights come from elsewhere.
    pub(crate) fn working_bytes(&self) -> u64 {
        #[cfg(feature = "hub")]
        if self.weights.files.iter().any(WeightFile::is_remote) {
            return crate::hub::WORKING_BYTES;
        }
        0
    }

    /// Bytes of all weight files.
    #[must_use]
    pub fn weight_bytes(&self) -> u64 {
        self.weights.files.iter().map(|file| file.size).sum()
    }

    /// The source as manifests record it, given the digests of its weight files in order.
    pub(crate) fn record(&self, weights: &[Digest]) -> Result<manifest::Source, SourceError> {
        let is_changed = |name: &String| self.originals.contains_key(name);
        let as_it_is = self.text.iter().filter(|(name, _)| !is_changed(name));
        // Manifests name files, not paths.
        let changed = self.originals.iter().filter(|(name, _)| !name.contains('/'));
        let small = as_it_is.chain(changed);
        let small = small.map(|(name, bytes)| (name.as_str(), bytes.as_slice()));
        let small = small.chain([("config.json", self.config_bytes.as_slice())]);
        let small = small.filter(|(name, _)| !self.derived.contains(*name)).map(|(name, bytes)| {
            SourceFile {
                name: name.to_owned(),
                size: bytes.len() as u64,
                blake3: Digest::of(bytes),
                sha256: None,
            }
        });
        let large = self.weights.files.iter().zip(weights).map(|(file, blake3)| SourceFile {
            // Manifests name files, not paths.
            name: file.name.replace('/', "."),
            size: file.size,
            blake3: *blake3,
            sha256: self.origin.sha256.get(&file.name).copied().map(Digest),
        });
        let mut files: Vec<SourceFile> = small.chain(large).collect();
        files.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        let adapters = self.adapters.records()?;
        let Origin { repo, commit, subfolder, .. } = self.origin.clone();
        let ignored_config_keys = self.ignored_keys.keys().cloned().collect();
        Ok(manifest::Source { repo, commit, subfolder, files, adapters, ignored_config_keys })
    }

    /// Everything that the index promises must be there. Tensors that it omits are used all the
    /// same: published indexes are known to forget some.
    fn check_index(&self, index: &'static str) -> Result<(), SourceError> {
        let is_open = |name: &str| self.weights.files.iter().any(|file| file.name == name);
        for (tensor, file) in &index_map(&self.folder, index)? {
            let file = file.as_str().unwrap_or_default();
            let found = self.file_of(tensor);
            // Of two copies the index may name the one that was left aside.
            if found != Some(file) && (found.is_none() || is_open(file)) {
                return Err(SourceError::MissingTensor {
                    index,
                    tensor: tensor.clone(),
                    file: file.to_owned(),
                });
            }
        }
        Ok(())
    }
}

/// Other programs' tokenizers as the one that packages have.
fn converted_tokenizer(text: &BTreeMap<String, Vec<u8>>) -> Option<Result<Converted, String>> {
    let converted = tokenizer::convert(text)?;
    Some(converted.map_err(|(file, problem)| format!("{file} is not converted: {problem}")))
}

/// What the stored tensors stand for.
fn group(
    folder: &Path,
    precision: Option<&StoredConfig>,
    weights: &Weights,
) -> Result<Grouped, SourceError> {
    let tensors: Vec<TensorInfo> = weights.tensors().cloned().collect();
    let mut descriptions = Descriptions::new();
    for tensor in &tensors {
        if precision.is_some_and(|precision| precision.is_description(tensor)) {
            let bytes = weights.read_small(tensor).map_err(|source| SourceError::Read {
                path: folder.join(&weights.file_of(tensor).name),
                source,
            })?;
            descriptions.insert(tensor.name.clone(), bytes);
        }
    }
    stored::group(precision, &tensors, &descriptions)
        .map_err(|source| SourceError::Stored { path: folder.to_owned(), source })
}

/// Takes back what mlx-lm has changed in the values of its copy.
fn undo_mlx(
    folder: &Path,
    config: &Value,
    weights: &Weights,
    grouped: &mut Grouped,
) -> Result<(), SourceError> {
    let tensor = |tensor: &Logical| SourceTensor {
        name: tensor.name.clone(),
        dtype: tensor.dtype,
        shape: tensor.shape.clone(),
    };
    let sources: Vec<SourceTensor> = grouped.tensors.iter().map(tensor).collect();
    if !may_be_changed(&sources) {
        return Ok(());
    }
    let writer = if folder.join(manifest::MANIFEST_FILE).is_file() {
        Writer::Packages
    } else if weights.are_of_mlx() {
        Writer::Mlx
    } else {
        Writer::Other
    };
    let changed = changed_values(config, &sources, writer, &RulePack::builtin());
    let changed = changed.map_err(|source| SourceError::Layout {
        path: folder.to_owned(),
        source: Box::new(source),
    })?;
    for (name, adjustment) in changed {
        let found = grouped.tensors.iter_mut().find(|tensor| tensor.name == name);
        found.expect("rules change tensors that are there").undo(adjustment);
    }
    Ok(())
}
