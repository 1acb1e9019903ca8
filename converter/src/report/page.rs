//! The report as a page for people: `report.md`, beside `report.json`.
//!
//! Markdown that also reads well as plain text. The same report gives the same bytes: no clock,
//! no paths, floats in a fixed number of digits.

mod names;
mod picture;

use std::collections::BTreeMap;

use shardpack_manifests::{
    PackageSet,
    manifest::{MatrixFormat, Quantization},
};

use super::{Report, TensorReport};
use names::{ModuleName, code, layers, plain};

/// Name of the page within the directory of a set.
pub const PAGE_FILE: &str = "report.md";

/// Writes the page of a conversion: `set` says what was made, `report` what became of it.
#[must_use]
pub fn page(report: &Report, set: &PackageSet) -> String {
    let mut lines = head(report, set);
    lines.extend(sizes(report, set));
    let errors = Errors::of(report);
    if errors.0.is_empty() {
        lines.extend(section("Error"));
        lines.push("No matrix is quantized: all weights are stored as floats.".to_owned());
    } else {
        lines.extend(section("Error by layer"));
        lines.extend(picture::by_layer(&errors));
        lines.extend(section("Error by kind of matrix"));
        lines.extend(by_kind(&errors));
        lines.extend(section("Worst matrices"));
        lines.extend(worst(report));
    }
    lines.extend(exceptions(&set.quantization));
    if !report.warnings.is_empty() {
        lines.extend(section("Warnings"));
        lines.extend(report.warnings.iter().map(|warning| format!("- {}", plain(warning))));
    }
    lines.join("\n") + "\n"
}

/// The quantized matrices with their errors, in the order of their names.
struct Errors<'a>(Vec<Measured<'a>>);

struct Measured<'a> {
    module: ModuleName<'a>,
    tensor: &'a TensorReport,
    rmse: f64,
}

impl<'a> Errors<'a> {
    fn of(report: &'a Report) -> Self {
        let measured = report.tensors.iter().filter_map(|(name, tensor)| {
            Some(Measured { module: ModuleName::of(name), tensor, rmse: tensor.relative_rmse? })
        });
        Self(measured.collect())
    }
}

/// Root of the mean of squares; errors of matrices add up in squares.
fn root_mean_square(values: impl Iterator<Item = f64> + Clone) -> f64 {
    let count = values.clone().count().max(1);
    (values.map(|value| value * value).sum::<f64>() / count as f64).sqrt()
}

fn section(title: &str) -> [String; 3] {
    [String::new(), format!("## {title}"), String::new()]
}

fn head(report: &Report, set: &PackageSet) -> Vec<String> {
    let name = set.name.as_deref().or(set.source.repo.as_deref());
    let name = name.map_or_else(|| format!("model {}", set.ids.model.short()), plain);
    let quantization = &set.quantization;
    let format = match quantization.format_of("") {
        MatrixFormat::Plain => format!("not quantized, {}", quantization.dtype),
        MatrixFormat::Float(format) => format!("{format}, other weights {}", quantization.dtype),
        groups @ MatrixFormat::Affine { .. } => format!(
            "{}, rounding {}, scales and other weights {}",
            groups,
            plain(quantization.rounding.as_deref().unwrap_or("unknown")),
            quantization.dtype
        ),
    };
    let mut lines = vec![
        format!("# {name}"),
        String::new(),
        format!("What the conversion did to the weights, by shardpack {}.", report.shardpack),
        String::new(),
        format!("- Weights: {:.2} million", report.parameters as f64 / 1e6),
        format!("- Bits per weight, scales and biases included: {:.3}", report.bits_per_weight),
        format!("- Main format: {format}"),
        format!("- Model id: {}", set.ids.model),
        format!("- Weights id: {}", set.ids.weights),
    ];
    if let Some(repo) = &set.source.repo {
        let commit = set.source.commit.as_deref().unwrap_or("an unknown commit");
        lines.push(format!("- Source: {} at {}", plain(repo), plain(commit)));
    }
    lines
}

fn sizes(report: &Report, set: &PackageSet) -> Vec<String> {
    let mut lines = section("Size").to_vec();
    lines.push("| node | weights | share | all files |".to_owned());
    lines.push("|---|---:|---:|---:|".to_owned());
    let total = report.bytes_per_rank.iter().sum::<u64>().max(1);
    for (package, weights) in set.packages.iter().zip(&report.bytes_per_rank) {
        lines.push(format!(
            "| {} | {} | {:.1} % | {} |",
            plain(&package.directory),
            size(*weights),
            *weights as f64 * 100.0 / total as f64,
            size(package.size_bytes),
        ));
    }
    if report.bytes_per_rank.len() > 1 {
        lines.push(String::new());
        let over = report.imbalance * 100.0;
        lines.push(format!("The largest node holds {over:.1} % more than the mean."));
    }
    lines
}

fn by_kind(errors: &Errors) -> Vec<String> {
    let mut kinds: BTreeMap<&str, Vec<&Measured>> = BTreeMap::new();
    for measured in &errors.0 {
        kinds.entry(measured.module.kind).or_default().push(measured);
    }
    let mut lines = vec![
        "| kind | matrices | format | mean error | largest | least cosine | at ends |".to_owned(),
        "|---|---:|---|---:|---:|---:|---:|".to_owned(),
    ];
    for (kind, matrices) in kinds {
        let rmse = matrices.iter().map(|matrix| matrix.rmse);
        let largest = rmse.clone().fold(0.0, f64::max);
        let cosine = matrices.iter().filter_map(|matrix| matrix.tensor.cosine);
        let at_ends = matrices.iter().filter_map(|matrix| matrix.tensor.at_ends);
        let mut formats: Vec<String> =
            matrices.iter().map(|matrix| short(matrix.tensor.format)).collect();
        formats.sort_unstable();
        formats.dedup();
        lines.push(format!(
            "| {} | {} | {} | {:.4} | {largest:.4} | {:.6} | {:.2} % |",
            code(kind),
            matrices.len(),
            formats.join(", "),
            root_mean_square(rmse),
            cosine.fold(1.0, f64::min),
            at_ends.fold(0.0, f64::max) * 100.0,
        ));
    }
    lines
}

fn worst(report: &Report) -> Vec<String> {
    let mut lines =
        vec!["| matrix | format | error | cosine |".to_owned(), "|---|---|---:|---:|".to_owned()];
    for name in &report.worst {
        let Some(tensor) = report.tensors.get(name) else { continue };
        lines.push(format!(
            "| {} | {} | {:.4} | {:.6} |",
            code(name),
            short(tensor.format),
            tensor.relative_rmse.unwrap_or(0.0),
            tensor.cosine.unwrap_or(1.0),
        ));
    }
    lines
}

/// Matrices that are stored differently from the main choice, by format and kind.
fn exceptions(quantization: &Quantization) -> Vec<String> {
    if quantization.overrides.is_empty() {
        return Vec::new();
    }
    let mut groups: BTreeMap<(String, &str), Vec<u32>> = BTreeMap::new();
    for (module, format) in &quantization.overrides {
        let name = ModuleName::of(module);
        let found = groups.entry((format.to_string(), name.kind)).or_default();
        found.extend(name.layer);
    }
    let mut lines = section("Exceptions from the main format").to_vec();
    for ((format, kind), found) in groups {
        let of_layers = layers(found);
        lines.push(format!("- {format}: {}{of_layers}", code(kind)));
    }
    lines
}

fn short(format: MatrixFormat) -> String {
    match format {
        MatrixFormat::Plain => "float".to_owned(),
        MatrixFormat::Affine { bits, group_size } => format!("{bits}:{group_size}"),
        MatrixFormat::Float(format) => format.to_string(),
    }
}

/// Bytes in units of a thousand, as disks are sold.
fn size(bytes: u64) -> String {
    let units = [(1_000_000_000, "GB"), (1_000_000, "MB"), (1_000, "kB")];
    match units.into_iter().find(|(unit, _)| bytes >= *unit) {
        Some((unit, name)) => format!("{:.2} {name}", bytes as f64 / unit as f64),
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests;
