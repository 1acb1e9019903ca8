//! The logical tensors of a package: resolves its configuration and tensors by the rules, as they
//! were planned from the source.

use std::{collections::BTreeMap, path::Path};

use serde_json::Value;
use shardpack_formats::{Normalised, OwnRules, SourceTensor};
use shardpack_manifests::{Manifest, manifest::MatrixFormat, verify::Problem};
use shardpack_quantize::{AffineFormat, Dtype};

use super::{UnshardError, tensors::UnshardedTensor};
use crate::plan::{RULES_FILE, format_of, packs, resolve_all};

/// The package's model config.
const CONFIG_FILE: &str = "config.json";

/// Keys that the package's config has beyond the source's.
const QUANTIZATION_KEYS: &[&str] = &["quantization", "quantization_config"];

/// The configuration without its quantization, and what the rules read from it. They must come to
/// the architecture that the manifest states.
pub(super) fn normalised(
    package: &Path,
    manifest: &Manifest,
    texts: &BTreeMap<String, Vec<u8>>,
    tensors: &BTreeMap<String, UnshardedTensor>,
) -> Result<(Value, Normalised), UnshardError> {
    let package = package.to_owned();
    let Some(text) = texts.get(CONFIG_FILE) else {
        let source = Problem::Missing { file: CONFIG_FILE.to_owned() };
        return Err(UnshardError::Package { package, source });
    };
    let mut config: Value = match serde_json::from_slice(text) {
        Ok(config) => config,
        Err(error) => return Err(UnshardError::Config { package, problem: error.to_string() }),
    };
    if let Some(map) = config.as_object_mut() {
        map.retain(|key, _| !QUANTIZATION_KEYS.contains(&key.as_str()));
    }
    let sources = tensors
        .iter()
        .filter_map(|(name, unsharded)| logical(manifest, tensors, name, unsharded).transpose())
        .collect::<Result<Vec<_>, _>>()?;
    let own = own_rules(&package, texts)?;
    let embedding = manifest.architecture.embedding.as_ref();
    match resolve_all(&config, sources, &packs(own.as_ref()), embedding) {
        Ok(normalised) if normalised.spec == manifest.architecture => {
            check_formats(&normalised, manifest, tensors)?;
            Ok((config, normalised))
        }
        Ok(_) => Err(UnshardError::Architecture(package)),
        Err(source) => Err(UnshardError::Resolve { package, source }),
    }
}

/// The rules that the package brings along, when the compiled-in ones do not know the model.
fn own_rules(
    package: &Path,
    texts: &BTreeMap<String, Vec<u8>>,
) -> Result<Option<OwnRules>, UnshardError> {
    let Some(bytes) = texts.get(RULES_FILE) else { return Ok(None) };
    let parsed = str::from_utf8(bytes)
        .map_err(|error| error.to_string())
        .and_then(|text| OwnRules::parse(text).map_err(|error| error.to_string()));
    parsed.map(Some).map_err(|problem| UnshardError::Rules { package: package.to_owned(), problem })
}

/// Quantized is what the manifest says is quantized, and nothing else: no plan is made of a
/// format that the stored tensor does not have.
fn check_formats(
    normalised: &Normalised,
    manifest: &Manifest,
    tensors: &BTreeMap<String, UnshardedTensor>,
) -> Result<(), UnshardError> {
    for tensor in &normalised.tensors {
        let packed =
            tensors.get(&tensor.name).is_some_and(|unsharded| unsharded.dtype == Dtype::U32);
        let format = format_of(tensor, &manifest.quantization);
        if packed == (format == MatrixFormat::Plain) {
            let problem = format!("is not stored as the manifest says: {format:?}");
            return Err(UnshardError::Tensor { tensor: tensor.name.clone(), problem });
        }
    }
    Ok(())
}

/// The matrix or vector that a stored tensor stands for; none for scales and biases of groups,
/// which stand for none of their own.
fn logical(
    manifest: &Manifest,
    tensors: &BTreeMap<String, UnshardedTensor>,
    name: &str,
    unsharded: &UnshardedTensor,
) -> Result<Option<SourceTensor>, UnshardError> {
    let is_packed = |module: &str| {
        tensors.get(&format!("{module}.weight")).is_some_and(|weight| weight.dtype == Dtype::U32)
    };
    let of_groups = [".scales", ".biases"]
        .iter()
        .any(|ending| name.strip_suffix(ending).is_some_and(is_packed));
    if of_groups {
        return Ok(None);
    }
    let mut tensor = SourceTensor {
        name: name.to_owned(),
        dtype: unsharded.dtype,
        shape: unsharded.shape.clone(),
    };
    let module = name.strip_suffix(".weight").filter(|module| is_packed(module));
    if let Some(module) = module {
        let format = manifest.quantization.format_of(module);
        let width = tensor.shape.last_mut().expect("an unsharded tensor has dimensions");
        *width = logical_width(format, *width).ok_or_else(|| UnshardError::Tensor {
            tensor: name.to_owned(),
            problem: format!("{width} packed u32 elements are not whole groups of {format:?}"),
        })?;
        tensor.dtype = manifest.quantization.dtype;
    }
    Ok(Some(tensor))
}

/// Weights in so many packed u32 elements, if they are whole groups of a format that exists.
fn logical_width(format: MatrixFormat, words: u64) -> Option<u64> {
    let (bits, group_size) = format.groups()?;
    if let MatrixFormat::Affine { .. } = format {
        AffineFormat::new(bits, group_size)?;
    }
    let bits_of_words = words.checked_mul(32)?;
    let width = bits_of_words / u64::from(bits);
    let whole = bits_of_words.is_multiple_of(u64::from(bits))
        && width.is_multiple_of(u64::from(group_size));
    whole.then_some(width)
}

#[cfg(test)]
mod tests {
    use shardpack_quantize::FloatFormat;

    use super::*;

    #[test]
    fn only_whole_groups_of_formats_that_exist_have_a_width() {
        let affine = |bits, group_size| MatrixFormat::Affine { bits, group_size };
        assert_eq!(logical_width(affine(4, 64), 16), Some(128));
        assert_eq!(logical_width(affine(6, 64), 12), Some(64));
        assert_eq!(logical_width(affine(6, 64), 13), None);
        assert_eq!(logical_width(affine(4, 64), 4), None);
        assert_eq!(logical_width(affine(0, 64), 4), None);
        assert_eq!(logical_width(affine(4, 0), 4), None);
        assert_eq!(logical_width(affine(4, 64), u64::MAX), None);
        assert_eq!(logical_width(MatrixFormat::Plain, 4), None);
        assert_eq!(logical_width(MatrixFormat::Float(FloatFormat::Nvfp4), 6), Some(48));
        assert_eq!(logical_width(MatrixFormat::Float(FloatFormat::Mxfp4), 6), None);
        assert_eq!(logical_width(MatrixFormat::Float(FloatFormat::Mxfp8), 8), Some(32));
    }
}
