//! How every matrix is stored. Bits, group size and their fallback depend on the tensor alone,
//! never on the number of ranks.

use std::collections::BTreeMap;

use shardpack_formats::{Normalised, TensorPlan};
use shardpack_manifests::{
    Digest,
    manifest::{MatrixFormat, Quantization},
};
use shardpack_quantize::{AffineFormat, Dtype};

use super::options::Choice;
use crate::recipe::{Matrix, RecipeError};

/// Decides the format of every matrix; `importance` is the digest of the file that weighs them,
/// `given` are the formats that a budget has given out by module.
pub(super) fn choose(
    normalised: &Normalised,
    choice: &Choice,
    importance: Option<Digest>,
    dtype: Dtype,
    given: Option<&BTreeMap<String, MatrixFormat>>,
) -> Result<Quantization, RecipeError> {
    let matrices = || normalised.tensors.iter().filter(|tensor| tensor.quantizable);
    let modules: Vec<&str> = matrices().map(|tensor| module_name(&tensor.name)).collect();
    choice.overrides.check_used(&modules)?;
    let layers = normalised.spec.layers.len() as u32;
    let wanted = |tensor: &TensorPlan| {
        let module = module_name(&tensor.name);
        let matrix = Matrix { module, layer: tensor.layer, role: tensor.role };
        let given = given.and_then(|given| given.get(module)).copied();
        let wanted = given.unwrap_or_else(|| choice.recipe.format(&matrix, layers, choice.main));
        choice.overrides.format(module, wanted, choice.main)
    };
    // Tensors that stand as one in files have one format: the most precise that any asks for.
    let mut stored: BTreeMap<&str, MatrixFormat> = BTreeMap::new();
    for tensor in matrices() {
        let Some(stored_as) = &tensor.stored_as else { continue };
        let wanted = wanted(tensor);
        stored
            .entry(&stored_as.name)
            .and_modify(|most| *most = finer(*most, wanted))
            .or_insert(wanted);
    }
    let mut overrides = BTreeMap::new();
    for tensor in matrices() {
        let module = module_name(&tensor.name);
        let together = tensor.stored_as.as_ref().and_then(|other| stored.get(other.name.as_str()));
        let wanted = together.copied().unwrap_or_else(|| wanted(tensor));
        let format = for_width(wanted, tensor.shape.last().copied().unwrap_or(0));
        if format != choice.main.stored() {
            overrides.insert(module.to_owned(), format);
        }
    }
    let main = choice.main.stored();
    let is_affine = |format: &MatrixFormat| matches!(format, MatrixFormat::Affine { .. });
    // A model of 16 bits with overrides has always named its rounding.
    let rounds = is_affine(&main)
        || overrides.values().any(is_affine)
        || main == MatrixFormat::Plain && !overrides.is_empty();
    Ok(Quantization {
        bits: choice.main.bits,
        group_size: main.groups().map(|(_, group_size)| group_size),
        float: choice.main.float,
        rounding: rounds.then(|| choice.rounding.name().to_owned()),
        dtype,
        overrides,
        importance,
    })
}

/// The one with more bits, then the one with smaller groups.
fn finer(one: MatrixFormat, other: MatrixFormat) -> MatrixFormat {
    let fineness = |format| match format {
        MatrixFormat::Plain => (u32::MAX, 0),
        MatrixFormat::Affine { bits, group_size } => (bits, u32::MAX - group_size),
        // At the same bits affine groups are nearer to most weights.
        MatrixFormat::Float(format) => (format.bits(), 128 - format.group_size()),
    };
    if fineness(other) > fineness(one) { other } else { one }
}

/// The wanted format with the largest group, from the wanted size down, that divides the width.
pub(super) fn for_width(wanted: MatrixFormat, width: u64) -> MatrixFormat {
    let (bits, group_size) = match wanted {
        MatrixFormat::Plain => return wanted,
        MatrixFormat::Float(format) => {
            let is_whole = width.is_multiple_of(u64::from(format.group_size()));
            return if is_whole { wanted } else { MatrixFormat::Plain };
        }
        MatrixFormat::Affine { bits, group_size } => (bits, group_size),
    };
    [128, 64, 32]
        .into_iter()
        .filter(|group| *group <= group_size && width.is_multiple_of(u64::from(*group)))
        .find(|group| AffineFormat::new(bits, *group).is_some())
        .map_or(MatrixFormat::Plain, |group_size| MatrixFormat::Affine { bits, group_size })
}

/// The type of most weights; F32 checkpoints become BF16, as they would be run.
pub(super) fn main_dtype(tensors: &[TensorPlan], native: impl Fn(&str) -> Option<Dtype>) -> Dtype {
    let of = |tensor: &TensorPlan| {
        tensor.sources.first().and_then(|name| native(name)).unwrap_or(tensor.dtype)
    };
    let bytes = |wanted: Dtype| {
        let all = tensors.iter().filter(|tensor| of(tensor) == wanted);
        all.map(|tensor| tensor.shape.iter().product::<u64>()).sum::<u64>()
            * wanted.size_bytes() as u64
    };
    if bytes(Dtype::F16) > bytes(Dtype::BF16) + bytes(Dtype::F32) {
        Dtype::F16
    } else {
        Dtype::BF16
    }
}

/// How one tensor is stored.
pub(crate) fn format_of(tensor: &TensorPlan, quantization: &Quantization) -> MatrixFormat {
    if tensor.quantizable {
        quantization.format_of(module_name(&tensor.name))
    } else {
        MatrixFormat::Plain
    }
}

/// A tensor's module: its name without `.weight`.
pub(crate) fn module_name(tensor: &str) -> &str {
    tensor.strip_suffix(".weight").unwrap_or(tensor)
}
