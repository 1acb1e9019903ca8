//! Formats that a budget gives out by what `calibrate --sensitivity` has measured.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::Path,
};

use shardpack_formats::{
    Dtype, Normalised, Role, TensorPlan,
    sensitivity::{
        MAX_SENSITIVITY_BYTES, ModuleSensitivity, SENSITIVITY_FILE, Sensitivities, SensitivityError,
    },
};
use shardpack_manifests::manifest::MatrixFormat;

use super::{files::stored_size, formats::for_width, module_name, options::Choice};
use crate::recipe::{Budget, FormatCost, Matrix, give_out};

/// Why bits cannot be given out.
#[derive(Debug, thiserror::Error)]
pub enum BudgetError {
    /// Nothing says where bits matter.
    #[error(
        "{budget} gives out bits by what `shardpack calibrate --sensitivity` measures; name its folder with --stats, or add --calibrate"
    )]
    NoStats {
        /// What was asked.
        budget: Budget,
    },
    /// The folder has moments alone.
    #[error("{path} has no {SENSITIVITY_FILE}: calibrate again with --sensitivity")]
    NotMeasured {
        /// The folder.
        path: String,
    },
    /// The file cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// The file cannot be used.
    #[error("{path}")]
    Sensitivities {
        /// The folder.
        path: String,
        /// What is wrong.
        source: SensitivityError,
    },
    /// It is of another model.
    #[error(
        "{path}/{SENSITIVITY_FILE} names none of this model's matrices: it was made for another model"
    )]
    Foreign {
        /// The folder.
        path: String,
    },
    /// Less than the smallest formats take.
    #[error(
        "{budget} is too little: with the fewest bits everywhere this model takes {least} bytes, {bits:.2} bits per weight"
    )]
    TooLittle {
        /// What was asked.
        budget: Budget,
        /// Bytes that are needed.
        least: u64,
        /// The same per weight.
        bits: f64,
    },
}

impl BudgetError {
    /// Whether a file was looked at and is wrong (else it could not be read, or the budget is not
    /// possible).
    #[must_use]
    pub const fn is_wrong(&self) -> bool {
        matches!(self, Self::Sensitivities { .. } | Self::Foreign { .. })
    }
}

/// What each matrix gets.
pub(super) struct Given {
    /// Formats by module.
    pub(super) formats: BTreeMap<String, MatrixFormat>,
    /// The mean KL divergence that they are expected to cost.
    pub(super) divergence: f64,
}

/// Reads what was measured beside the moments.
pub(super) fn read(budget: Budget, stats: Option<&Path>) -> Result<Sensitivities, BudgetError> {
    let folder = stats.ok_or(BudgetError::NoStats { budget })?;
    let path = folder.join(SENSITIVITY_FILE);
    let failed = |source| BudgetError::Read { path: path.display().to_string(), source };
    let shown = || folder.display().to_string();
    let size = match fs::metadata(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(BudgetError::NotMeasured { path: shown() });
        }
        found => found.map_err(failed)?.len(),
    };
    if size > MAX_SENSITIVITY_BYTES {
        return Err(failed(io::Error::other(format!("{size} bytes are no such file"))));
    }
    let bytes = fs::read(&path).map_err(failed)?;
    Sensitivities::parse(&bytes)
        .map_err(|source| BudgetError::Sensitivities { path: shown(), source })
}

/// Gives out bits. Overrides stand, and so do the recipe's formats of what was not measured.
pub(super) fn give(
    normalised: &Normalised,
    choice: &Choice,
    (budget, stats): (Budget, &Path),
    measured: &Sensitivities,
    dtype: Dtype,
) -> Result<Given, BudgetError> {
    let by_module: BTreeMap<&str, &ModuleSensitivity> =
        measured.modules.iter().map(|entry| (entry.module.as_str(), entry)).collect();
    let layers = normalised.spec.layers.len() as u32;
    let weights = normalised.tensors.iter().map(|tensor| tensor.shape.iter().product::<u64>());
    let weights: u64 = weights.sum();
    let mut fixed = 0;
    // Tensors that stand as one in files have one format.
    let mut units: BTreeMap<&str, Vec<(&TensorPlan, &ModuleSensitivity)>> = BTreeMap::new();
    let mut found = false;
    for tensor in &normalised.tensors {
        let module = module_name(&tensor.name);
        let plain = || stored_size(tensor, MatrixFormat::Plain, dtype);
        if !tensor.quantizable {
            fixed += plain();
            continue;
        }
        let measured = by_module.get(module).filter(|entry| !entry.errors.is_empty());
        found |= measured.is_some();
        let matrix = Matrix { module, layer: tensor.layer, role: tensor.role };
        let stands = choice.overrides.of(module, choice.main).or_else(|| {
            let free = measured.is_some() && tensor.role != Role::Indexer;
            (!free).then(|| choice.recipe.format(&matrix, layers, choice.main))
        });
        match (stands, measured) {
            (None, Some(measured)) => {
                let unit = tensor.stored_as.as_ref().map_or(module, |other| &other.name);
                units.entry(unit).or_default().push((tensor, measured));
            }
            (stands, _) => {
                let format = stands.unwrap_or_else(|| choice.main.stored());
                let width = tensor.shape.last().copied().unwrap_or(0);
                fixed += stored_size(tensor, for_width(format, width), dtype);
            }
        }
    }
    if !found {
        return Err(BudgetError::Foreign { path: stats.display().to_string() });
    }
    let mut units: Vec<_> = units.into_values().collect();
    units.retain(|unit| {
        let has_formats = !shared_formats(unit).is_empty();
        if !has_formats {
            let stored = |it: &TensorPlan| stored_size(it, choice.main.stored(), dtype);
            fixed += unit.iter().map(|(tensor, _)| stored(tensor)).sum::<u64>();
        }
        has_formats
    });
    let formats: Vec<Vec<MatrixFormat>> = units.iter().map(|unit| shared_formats(unit)).collect();
    let costs: Vec<Vec<FormatCost>> = units
        .iter()
        .zip(&formats)
        .map(|(unit, formats)| formats.iter().map(|it| cost(unit, *it, dtype)).collect())
        .collect();
    let bytes = budget.bytes(weights);
    let given = give_out(&costs, bytes.saturating_sub(fixed)).and_then(|given| {
        let least = costs.iter().flat_map(|it| it.iter().map(|it| it.bytes).min()).sum();
        if bytes < fixed { Err(least) } else { Ok(given) }
    });
    let given = given.map_err(|least| {
        let least = least + fixed;
        BudgetError::TooLittle { budget, least, bits: least as f64 * 8.0 / weights.max(1) as f64 }
    })?;
    let mut out = Given { formats: BTreeMap::new(), divergence: 0.0 };
    for (unit, at) in given.into_iter().enumerate() {
        out.divergence += costs[unit][at].divergence;
        for (tensor, _) in &units[unit] {
            out.formats.insert(module_name(&tensor.name).to_owned(), formats[unit][at]);
        }
    }
    Ok(out)
}

/// The formats that every part of a unit was measured in.
fn shared_formats(unit: &[(&TensorPlan, &ModuleSensitivity)]) -> Vec<MatrixFormat> {
    let of = |measured: &ModuleSensitivity| -> BTreeSet<(u32, u32)> {
        measured.errors.iter().map(|error| (error.bits, error.group_size)).collect()
    };
    let shared = unit.iter().map(|(_, measured)| of(measured)).reduce(|a, b| &a & &b);
    let all = shared.unwrap_or_default().into_iter();
    all.map(|(bits, group_size)| MatrixFormat::Affine { bits, group_size }).collect()
}

/// What a unit takes and costs in a format.
fn cost(
    unit: &[(&TensorPlan, &ModuleSensitivity)],
    format: MatrixFormat,
    dtype: Dtype,
) -> FormatCost {
    let mut sum = FormatCost { bytes: 0, divergence: 0.0 };
    for (tensor, measured) in unit {
        sum.bytes += stored_size(tensor, format, dtype);
        let own = measured.errors.iter().find(|error| {
            let (bits, group_size) = (error.bits, error.group_size);
            MatrixFormat::Affine { bits, group_size } == format
        });
        sum.divergence += measured.kl * own.map_or(0.0, |own| own.error);
    }
    sum
}

/// What was given out, for people: how many matrices have which format.
pub(super) fn summary(budget: Budget, given: &Given, quantized: &[MatrixFormat]) -> String {
    let mut counts: Vec<(MatrixFormat, usize)> = Vec::new();
    for format in quantized {
        match counts.iter_mut().find(|(other, _)| other == format) {
            Some((_, count)) => *count += 1,
            None => counts.push((*format, 1)),
        }
    }
    counts.sort_by_key(|(format, _)| match format {
        MatrixFormat::Affine { bits, group_size } => (*bits, u32::MAX - group_size),
        MatrixFormat::Plain => (u32::MAX, 0),
    });
    let named = counts.iter().map(|(format, count)| match format {
        MatrixFormat::Affine { bits, group_size } => {
            format!("{count} at {bits} bits in groups of {group_size}")
        }
        MatrixFormat::Plain => format!("{count} at 16 bits"),
    });
    format!(
        "{budget} gives matrices their bits: {}; expected mean KL divergence from 16 bits {:.2e} (rounding of weights alone)",
        named.collect::<Vec<_>>().join(", "),
        given.divergence,
    )
}
