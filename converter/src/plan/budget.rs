//! Formats that a budget gives out by what `calibrate --sensitivity` has measured.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::Path,
};

use shardpack_formats::{
    Normalised, Role, TensorPlan,
    sensitivity::{
        MAX_SENSITIVITY_BYTES, ModuleSensitivity, SENSITIVITY_FILE, Sensitivities, SensitivityError,
    },
};
use shardpack_manifests::manifest::MatrixFormat;
use shardpack_quantize::Dtype;

use super::{
    ConvertOptions, Nodes, Plan, PlanError,
    files::stored_size,
    formats::{choose, for_width},
    module_name,
    options::Choice,
};
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
    /// Nodes without a limit.
    #[error("--bpw fit needs the nodes' memory: --nodes with each one's, such as a=64g,b=128g")]
    NoLimits,
    /// Even the fewest bits are too many.
    #[error(
        "--bpw fit: with the fewest bits everywhere a rank needs more than its node allows; use a shorter --context, or more nodes"
    )]
    NothingFits,
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

/// Hundredths of a bit per weight below which no model is.
const FEWEST_BITS: u32 = 200;

/// Hundredths of a bit per weight above which no format is that bits are given out in.
const MOST_BITS: u32 = 1_000;

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

/// A tensor and what was measured of it.
type Measured<'a> = (&'a TensorPlan, &'a ModuleSensitivity);

/// The model's tensors as a budget sees them.
struct Tensors<'a> {
    /// Bytes of what has its format already.
    fixed: u64,
    /// What is free; tensors that stand as one in files have one format.
    units: Vec<Vec<Measured<'a>>>,
}

/// Divides tensors. Overrides stand, and so do the recipe's formats of what was not measured.
fn divide<'a>(
    normalised: &'a Normalised,
    choice: &Choice,
    by_module: &BTreeMap<&str, &'a ModuleSensitivity>,
    dtype: Dtype,
) -> Tensors<'a> {
    let layers = normalised.spec.layers.len() as u32;
    let mut fixed = 0;
    let mut units: BTreeMap<&str, Vec<Measured<'a>>> = BTreeMap::new();
    for tensor in &normalised.tensors {
        let module = module_name(&tensor.name);
        if !tensor.quantizable {
            fixed += stored_size(tensor, MatrixFormat::Plain, dtype);
            continue;
        }
        let measured = by_module.get(module).filter(|_| tensor.role != Role::Indexer);
        let stands = choice.overrides.of(module, choice.main);
        if let (None, Some(measured)) = (stands, measured) {
            let unit = tensor.stored_as.as_ref().map_or(module, |other| &other.name);
            units.entry(unit).or_default().push((tensor, *measured));
            continue;
        }
        let matrix = Matrix { module, layer: tensor.layer, role: tensor.role };
        let format = stands.unwrap_or_else(|| choice.recipe.format(&matrix, layers, choice.main));
        let width = tensor.shape.last().copied().unwrap_or(0);
        fixed += stored_size(tensor, for_width(format, width), dtype);
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
    Tensors { fixed, units }
}

/// What bits are given out to.
pub(super) struct Task<'a> {
    pub(super) normalised: &'a Normalised,
    pub(super) choice: &'a Choice,
    /// Type of scales and of what is not quantized.
    pub(super) dtype: Dtype,
}

impl Task<'_> {
    /// Gives out bits within a budget.
    pub(super) fn give(
        &self,
        options: &ConvertOptions,
        budget: Budget,
        measured: &Sensitivities,
    ) -> Result<Given, BudgetError> {
        let Self { normalised, choice, dtype } = *self;
        let by_module: BTreeMap<&str, &ModuleSensitivity> =
            measured.modules.iter().map(|entry| (entry.module.as_str(), entry)).collect();
        let mut matrices = normalised.tensors.iter().filter(|tensor| tensor.quantizable);
        if !matrices.any(|tensor| by_module.contains_key(module_name(&tensor.name))) {
            let stats = options.stats.as_deref().unwrap_or(Path::new(""));
            return Err(BudgetError::Foreign { path: stats.display().to_string() });
        }
        let weights = normalised.tensors.iter().map(|it| it.shape.iter().product::<u64>());
        let weights: u64 = weights.sum();
        let Tensors { fixed, units } = divide(normalised, choice, &by_module, dtype);
        let formats: Vec<Vec<MatrixFormat>> =
            units.iter().map(|unit| shared_formats(unit)).collect();
        let costs: Vec<Vec<FormatCost>> = units
            .iter()
            .zip(&formats)
            .map(|(unit, formats)| formats.iter().map(|it| cost(unit, *it, dtype)).collect())
            .collect();
        let given = match budget.bytes(weights).checked_sub(fixed) {
            Some(left) => give_out(&costs, left),
            None => Err(costs.iter().filter_map(|it| it.iter().map(|it| it.bytes).min()).sum()),
        };
        let given = given.map_err(|least| {
            let least = least + fixed;
            let bits = least as f64 * 8.0 / weights.max(1) as f64;
            BudgetError::TooLittle { budget, least, bits }
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

    /// Gives out the most bits, in steps of a hundredth, with which every rank fits its node.
    pub(super) fn give_what_fits(
        &self,
        options: &ConvertOptions,
        measured: &Sensitivities,
    ) -> Result<Given, PlanError> {
        if !matches!(options.nodes, Nodes::Limited(_)) {
            return Err(BudgetError::NoLimits.into());
        }
        let Self { normalised, choice, dtype } = *self;
        let mut best = None;
        let [mut fits, mut too_much] = [FEWEST_BITS, MOST_BITS];
        while too_much - fits > 1 {
            let hundredths = fits.midpoint(too_much);
            let budget = Budget::BitsPerWeight(f64::from(hundredths) / 100.0);
            match self.give(options, budget, measured) {
                // Fewer bits than the fewest: there may be a place above.
                Err(BudgetError::TooLittle { .. }) => fits = hundredths,
                Err(error) => return Err(error.into()),
                Ok(given) => {
                    let formats = Some(&given.formats);
                    let quantization = choose(normalised, choice, None, dtype, formats)?;
                    let (normalised, options) = (normalised.clone(), options.clone());
                    let rounding = choice.rounding;
                    let plan = Plan::of(normalised, quantization, options, rounding, Vec::new());
                    if plan.fits() {
                        fits = hundredths;
                        best = Some(given);
                    } else {
                        too_much = hundredths;
                    }
                }
            }
        }
        best.ok_or_else(|| BudgetError::NothingFits.into())
    }
}

/// The formats that every part of a unit was measured in.
fn shared_formats(unit: &[Measured<'_>]) -> Vec<MatrixFormat> {
    let of = |measured: &ModuleSensitivity| -> BTreeSet<(u32, u32)> {
        measured.errors.iter().map(|error| (error.bits, error.group_size)).collect()
    };
    let shared = unit.iter().map(|(_, measured)| of(measured)).reduce(|a, b| &a & &b);
    let all = shared.unwrap_or_default().into_iter();
    all.map(|(bits, group_size)| MatrixFormat::Affine { bits, group_size }).collect()
}

/// What a unit takes and costs in a format.
fn cost(unit: &[Measured<'_>], format: MatrixFormat, dtype: Dtype) -> FormatCost {
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
        MatrixFormat::Float(format) => (format.bits(), 0),
        MatrixFormat::Plain => (u32::MAX, 0),
    });
    let named = counts.iter().map(|(format, count)| match format {
        MatrixFormat::Affine { bits, group_size } => {
            format!("{count} at {bits} bits in groups of {group_size}")
        }
        MatrixFormat::Float(format) => format!("{count} in {format}"),
        MatrixFormat::Plain => format!("{count} at 16 bits"),
    });
    format!(
        "{budget} gives matrices their bits: {}; expected mean KL divergence from 16 bits {:.2e} (rounding of weights alone)",
        named.collect::<Vec<_>>().join(", "),
        given.divergence,
    )
}
