//! What clients are told of a served model, from the manifests of its packages.

use std::{collections::BTreeMap, path::Path};

use shardpack_manifests::{
    Manifest, TensorShard,
    manifest::{Quantization, TensorEntry},
};
use shardpack_server::ModelInfo;

/// Facts of the model of these packages; of none, an empty description.
pub(super) fn of(manifests: &[Manifest]) -> ModelInfo {
    let Some(first) = manifests.first() else { return ModelInfo::default() };
    let (spec, quantization) = (&first.architecture, &first.quantization);
    let files = manifests.iter().flat_map(|manifest| &manifest.files);
    // Ranks share tensors, and stages have their own: each counts once, by its name.
    let tensors: BTreeMap<&str, &TensorEntry> = manifests
        .iter()
        .flat_map(|manifest| &manifest.tensors)
        .map(|tensor| (tensor.name.as_str(), tensor))
        .collect();
    ModelInfo {
        digest: first.ids.model.to_string(),
        size_bytes: files.map(|file| file.size).sum(),
        family: spec.model_type.clone(),
        repository: first.source.repo.clone(),
        commit: first.source.commit.clone(),
        gguf: gguf(first),
        conversion: conversion(first),
        ranks: first.layout.ranks,
        nodes: Vec::new(),
        parameter_count: tensors.values().map(|tensor| weights(tensor, quantization)).sum(),
        bits: quantization.bits,
        dtype: quantization.dtype.to_string().to_uppercase(),
        hidden_size: spec.hidden_size,
        layers: u32::try_from(spec.layers.len()).unwrap_or(u32::MAX),
        heads: spec.attention.heads,
        kv_heads: spec.attention.kv_heads,
        ffn_size: spec.ffn.size,
        vocab_size: spec.vocab_size,
    }
}

/// The file that it was made of, where that is a GGUF file.
fn gguf(manifest: &Manifest) -> Option<String> {
    let mut names = manifest.source.files.iter().map(|file| &file.name);
    names.find(|name| Path::new(name).extension().is_some_and(|it| it == "gguf")).cloned()
}

/// Options of its conversion that a conversion by bits and nodes alone would leave away.
fn conversion(manifest: &Manifest) -> Vec<String> {
    let Manifest { source, quantization, layout, .. } = manifest;
    let chosen = [
        ("--adapter", !source.adapters.is_empty()),
        ("--subfolder", source.subfolder.is_some()),
        ("--ignore-config-key", !source.ignored_config_keys.is_empty()),
        ("--format", !quantization.float_formats().is_empty()),
        ("--imatrix", quantization.importance.is_some()),
        ("--stages", !layout.stages.is_empty()),
    ];
    chosen.iter().filter(|(_, is_chosen)| *is_chosen).map(|(name, _)| (*name).to_owned()).collect()
}

/// The element type of packed weights.
const PACKED: &str = "U32";

/// Weights of a tensor before it was sharded and packed; none of what quantization added.
fn weights(tensor: &TensorEntry, quantization: &Quantization) -> u64 {
    let mut shape = tensor.shape.clone();
    if let TensorShard::Range { dim, full, .. } = &tensor.shard
        && let Some(size) = shape.get_mut(*dim as usize)
    {
        *size = *full;
    }
    let elements: u64 = shape.iter().product();
    let Some((module, part)) = tensor.name.rsplit_once('.') else { return elements };
    match (quantization.format_of(module).groups(), part) {
        (Some((bits, _)), "weight") if tensor.dtype.to_string() == PACKED => {
            elements * 32 / u64::from(bits)
        }
        (Some(_), "scales" | "biases") => 0,
        _ => elements,
    }
}
