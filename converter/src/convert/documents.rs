//! Everything of a package that is not weights: manifests, `set.json`, config, index, tokenizer
//! files.

use std::{collections::BTreeMap, path::Path};

use serde::Serialize;
use serde_json::{Value, json};
use shardpack_containers::tokenizer::TOKENIZER_FILE;
use shardpack_formats::{
    chat::{self, Chat, Templates},
    config::{ConfigQuantization, GroupConfig, config_for_package},
};
use shardpack_manifests::{
    Digest, Manifest, PackageSet,
    canonical::{self, CanonicalError},
    ids::{self, Ids, TensorIdentity},
    manifest::{
        FORMAT, FileEntry, MANIFEST_FILE, MatrixFormat, Source as SourceRecord, TensorEntry,
        requires,
    },
    set::{PackageEntry, SET_FILE},
    signature::{FileHasher, SignError, sign_hashed},
};

use super::{Finished, output::WrittenFiles};
use crate::{
    package::{FilePlan, WriteError, sync_directory, write_small},
    plan::{Destination, Plan, RULES_FILE, module_name, stacks},
    source::Source,
};

/// Name of the package's model config.
const CONFIG_FILE: &str = "config.json";

/// Name of the file that says which weight file holds which tensor.
const INDEX_FILE: &str = "model.safetensors.index.json";

/// Name of a rank's package within the set.
pub(crate) fn package_name(rank: usize) -> String {
    format!("node-{rank}")
}

/// What writing the documents came to.
pub(crate) struct Written {
    pub(crate) set: PackageSet,
    /// Bytes of all files, shared ones counted once.
    pub(crate) bytes: u64,
}

/// Why documents were not written, for whoever writes a set.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DocumentError {
    #[error(transparent)]
    Write(#[from] WriteError),
    #[error(transparent)]
    Canonical(#[from] CanonicalError),
    #[error(transparent)]
    Sign(Box<SignError>),
    /// The chat template cannot be tried any more.
    #[error("{file}: {problem}")]
    Template { file: &'static str, problem: String },
}

/// Writes every package's documents, and `set.json`.
pub(crate) fn write(
    texts: &Texts,
    plan: &Plan,
    record: SourceRecord,
    finished: &[Finished],
    files: &WrittenFiles,
    directory: &Path,
) -> Result<Written, DocumentError> {
    let ids = plan_ids(plan, finished, texts)?;
    let chat = chat_of(texts)?;
    let mut packages = Vec::new();
    let mut bytes = files.shared.iter().flatten().map(|file| file.size).sum();
    for (rank, own) in files.own.iter().enumerate() {
        let name = package_name(rank);
        let package = directory.join(&name);
        let tensors = tensors(plan, finished, rank);
        let mut small = Vec::new();
        let mut sha256 = files.sha256[rank].clone();
        let shared = &plan.packages.shared[plan.packages.stages[rank]];
        let index = index(shared.iter().chain(&plan.packages.own[rank]));
        let written = texts.iter().map(|(name, bytes)| (name.as_str(), bytes.as_slice()));
        for (name, bytes) in written.chain([(INDEX_FILE, index.as_bytes())]) {
            small.push(write_small(&package, name, bytes)?);
            let mut hasher = FileHasher::default();
            hasher.update(bytes);
            sha256.insert(name.to_owned(), hasher.finish());
        }
        bytes += own.iter().chain(&small).map(|file| file.size).sum::<u64>();
        let mut files: Vec<FileEntry> = files.shared[plan.packages.stages[rank]]
            .iter()
            .chain(own)
            .cloned()
            .chain(small)
            .collect();
        files.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        let size_bytes = files.iter().map(|file| file.size).sum();
        let manifest = Manifest {
            format: FORMAT,
            requires: requires(&plan.normalised.spec, &plan.layout, &plan.quantization),
            name: plan.options.name.clone(),
            ids: ids.clone(),
            source: record.clone(),
            architecture: plan.normalised.spec.clone(),
            quantization: plan.quantization.clone(),
            chat: chat.clone(),
            layout: plan.layout.clone(),
            rank: rank as u32,
            files,
            tensors,
        };
        let text = canonical::to_string(&manifest)? + "\n";
        write_small(&package, MANIFEST_FILE, text.as_bytes())?;
        if let Some(key) = &plan.options.sign {
            sign_hashed(&package, (&manifest, text.as_bytes()), &sha256, key)
                .map_err(|error| DocumentError::Sign(Box::new(error)))?;
        }
        sync_directory(&package)?;
        packages.push(PackageEntry {
            directory: name,
            manifest: Digest::of(text.as_bytes()),
            size_bytes,
        });
    }
    let set = PackageSet {
        format: FORMAT,
        requires: requires(&plan.normalised.spec, &plan.layout, &plan.quantization),
        name: plan.options.name.clone(),
        ids,
        source: record,
        quantization: plan.quantization.clone(),
        packages,
    };
    write_small(directory, SET_FILE, (canonical::to_string(&set)? + "\n").as_bytes())?;
    Ok(Written { set, bytes })
}

fn plan_ids(plan: &Plan, finished: &[Finished], texts: &Texts) -> Result<Ids, CanonicalError> {
    let mut identities = Vec::new();
    for (step, finished) in plan.steps.iter().zip(finished) {
        let (bits, group) = step.format.groups().unwrap_or((0, 0));
        for (part, blake3) in step.parts.iter().zip(&finished.identities) {
            let (name, shape) = (part.name.clone(), part.shape.clone());
            identities.push(TensorIdentity {
                name,
                dtype: part.dtype,
                shape,
                bits,
                group,
                blake3: *blake3,
            });
        }
    }
    let digests = texts.iter().filter(|(name, _)| ids::TEXT_FILES.contains(&name.as_str()));
    let digests = digests.map(|(name, bytes)| (name.clone(), Digest::of(bytes))).collect();
    let weights = ids::weights_id(&identities, &plan.normalised.spec)?;
    let model = ids::model_id(weights, &digests)?;
    Ok(Ids { weights, model, layout: ids::layout_id(model, &plan.layout)? })
}

/// The tensors of one rank's package, by file and place.
fn tensors(plan: &Plan, finished: &[Finished], rank: usize) -> Vec<TensorEntry> {
    let mut digests: BTreeMap<&str, Digest> = BTreeMap::new();
    for (step, finished) in plan.steps.iter().zip(finished) {
        for (part, shards) in step.parts.iter().zip(&finished.shards) {
            let shard = match &part.destination {
                Destination::Shared => shards[plan.packages.stages[rank]],
                Destination::Once | Destination::Sharded(_) => shards[rank],
            };
            if let Some(digest) = shard {
                digests.insert(&part.name, digest);
            }
        }
    }
    let entries = |file: &FilePlan| {
        let entry = |tensor: &crate::package::PlannedTensor| TensorEntry {
            name: tensor.info.name.clone(),
            dtype: tensor.info.dtype,
            shape: tensor.info.shape.clone(),
            file: file.name.clone(),
            offset: tensor.info.offset,
            size: tensor.info.size,
            shard: tensor.shard.clone(),
            blake3: digests[tensor.info.name.as_str()],
        };
        file.tensors.iter().map(entry).collect::<Vec<_>>()
    };
    let shared = &plan.packages.shared[plan.packages.stages[rank]];
    let mut tensors: Vec<TensorEntry> =
        shared.iter().chain(&plan.packages.own[rank]).flat_map(entries).collect();
    tensors.sort_by(|a, b| (&a.file, a.offset).cmp(&(&b.file, b.offset)));
    tensors
}

/// What the chat template of these files can do.
fn chat_of(texts: &Texts) -> Result<Option<Chat>, DocumentError> {
    let Some(templates) = chat::lookup(texts).ok().flatten() else { return Ok(None) };
    let config = texts.get("tokenizer_config.json");
    let config = config.and_then(|text| serde_json::from_slice(text).ok()).unwrap_or_default();
    // The plan has tried it; a machine that is too busy for it now must not lose what it can do.
    let probed = chat::probe(&templates, &chat::special_tokens(&config));
    let file = templates.file;
    probed.map(Some).map_err(|problem| DocumentError::Template { file, problem })
}

/// Text files by name.
pub(crate) type Texts = BTreeMap<String, Vec<u8>>;

/// The text files of every package: the source's, with the config as this package needs it.
pub(super) fn package_texts(source: &Source, plan: &Plan) -> Result<Texts, CanonicalError> {
    let quantization = config_quantization(plan);
    let config = config_for_package(&source.config, &plan.normalised, quantization.as_ref());
    let mut texts = source.text.clone();
    // What a tokenizer was made of is of no use to who has it.
    for name in ["tekken.json", "tiktoken.model"] {
        texts.remove(name);
    }
    if let Some(Ok(converted)) = &source.tokenizer {
        texts.insert(TOKENIZER_FILE.to_owned(), converted.json.clone());
    }
    // The oldest form is read by nobody but transformers: it goes on as a template of its own.
    if let Some(Templates { file: chat::LEGACY_FILE, default, .. }) =
        chat::lookup(&texts).ok().flatten()
    {
        texts.insert(chat::TEMPLATE_FILE.to_owned(), default.into_bytes());
    }
    texts.remove(chat::LEGACY_FILE);
    texts.insert(CONFIG_FILE.to_owned(), pretty(&config)?.into_bytes());
    if let Some(own) = plan.own_rules() {
        texts.insert(RULES_FILE.to_owned(), own.text().as_bytes().to_vec());
    }
    Ok(texts)
}

/// JSON for people and for other programs.
pub(crate) fn pretty<T: Serialize>(value: &T) -> Result<String, CanonicalError> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}

/// `model.safetensors.index.json`, as mlx-lm and transformers read it.
fn index<'a>(files: impl Iterator<Item = &'a FilePlan>) -> String {
    let listed = files.flat_map(|file| file.listed().into_iter().map(move |info| (info, file)));
    let listed: Vec<_> = listed.collect();
    let total: u64 = listed.iter().map(|(info, _)| info.size).sum();
    let map: BTreeMap<&str, &str> =
        listed.iter().map(|(info, file)| (info.name.as_str(), file.name.as_str())).collect();
    let index: Value = json!({ "metadata": { "total_size": total }, "weight_map": map });
    format!("{index:#}\n")
}

/// The quantization in the config's terms, under the names of files; `None` at 16 bits.
fn config_quantization(plan: &Plan) -> Option<ConfigQuantization> {
    let groups = |format: MatrixFormat| match format {
        MatrixFormat::Plain => None,
        MatrixFormat::Affine { bits, group_size } => {
            Some(GroupConfig { group_size, bits, float: None })
        }
        MatrixFormat::Float(format) => Some(format.into()),
    };
    let stacks = stacks(&plan.steps);
    let stored_as: BTreeMap<&str, &str> = stacks
        .iter()
        .filter_map(|stack| Some((stack, module_name(&stack.stored_as?.name))))
        .flat_map(|(stack, name)| {
            stack.steps.iter().map(move |step| (module_name(&step.tensor.name), name))
        })
        .collect();
    let quantization = &plan.quantization;
    let (bits, group_size) = (quantization.bits, quantization.group_size?);
    let affine = GroupConfig { group_size, bits, float: None };
    Some(ConfigQuantization {
        main: quantization.float.map_or(affine, GroupConfig::from),
        overrides: quantization
            .overrides
            .iter()
            .map(|(name, format)| {
                let name = stored_as.get(name.as_str()).copied().unwrap_or(name);
                (name.to_owned(), groups(*format))
            })
            .collect(),
    })
}
