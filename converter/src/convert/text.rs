//! The documents of a package that are not weights: config, index, tokenizer files.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use shardpack_formats::config::{AffineConfig, ConfigQuantization, config_for_package};
use shardpack_manifests::{
    canonical::CanonicalError,
    manifest::{MatrixFormat, Quantization, TensorEntry},
};

use crate::{plan::Plan, source::Source};

/// Name of the package's model config.
const CONFIG_FILE: &str = "config.json";

/// The text files of every package: the source's, with the config as this package needs it.
pub(super) fn package_texts(
    source: &Source,
    plan: &Plan,
) -> Result<BTreeMap<String, Vec<u8>>, CanonicalError> {
    let quantization = quantization(&plan.quantization);
    let config = config_for_package(&source.config, &plan.normalised, quantization.as_ref());
    let mut texts = source.text.clone();
    texts.insert(
        CONFIG_FILE.to_owned(),
        (serde_json::to_string_pretty(&config)? + "\n").into_bytes(),
    );
    Ok(texts)
}

/// `model.safetensors.index.json`, as mlx-lm and transformers read it.
pub(super) fn index(tensors: &[TensorEntry]) -> String {
    let total: u64 = tensors.iter().map(|tensor| tensor.size).sum();
    let map: BTreeMap<&str, &str> =
        tensors.iter().map(|tensor| (tensor.name.as_str(), tensor.file.as_str())).collect();
    let index: Value = json!({ "metadata": { "total_size": total }, "weight_map": map });
    format!("{index:#}\n")
}

/// The quantization in the config's terms; `None` at 16 bits.
fn quantization(quantization: &Quantization) -> Option<ConfigQuantization> {
    let affine = |format: &MatrixFormat| match *format {
        MatrixFormat::Plain => None,
        MatrixFormat::Affine { bits, group_size } => Some(AffineConfig { group_size, bits }),
    };
    Some(ConfigQuantization {
        main: AffineConfig { group_size: quantization.group_size?, bits: quantization.bits },
        overrides: quantization
            .overrides
            .iter()
            .map(|(name, format)| (name.clone(), affine(format)))
            .collect(),
    })
}
