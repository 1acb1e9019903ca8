//! What a conversion did to the weights (`report.json`), and what it cost (`run.json`).

mod page;
mod threshold;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use shardpack_manifests::manifest::MatrixFormat;
use shardpack_quantize::affine::ErrorSums;

pub use page::{PAGE_FILE, page};
pub use threshold::{Threshold, ThresholdError, Violation, violations};

/// Tensors that the report lists as worst.
const WORST: usize = 10;

/// `report.json`: the same for the same input, options and version.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Version of the program.
    pub shardpack: &'static str,
    /// Weights of the model, whatever their storage.
    pub parameters: u64,
    /// Stored bits, scales and biases included, per weight.
    pub bits_per_weight: f64,
    /// Weight bytes of each rank's package, in rank order.
    pub bytes_per_rank: Vec<u64>,
    /// Largest part over the mean, minus 1.
    pub imbalance: f64,
    /// The quantized tensors with the largest relative error, worst first.
    pub worst: Vec<String>,
    /// Every tensor, by name.
    pub tensors: BTreeMap<String, TensorReport>,
    /// Things the user should know.
    pub warnings: Vec<String>,
}

/// One normalised tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TensorReport {
    /// How it is stored.
    pub format: MatrixFormat,
    /// Root of squared error over squared weights; absent when stored as floats of its own type.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relative_rmse: Option<f64>,
    /// Cosine between source and stored weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cosine: Option<f64>,
    /// Share of integers at either end of their range.
    #[serde(
        rename = "saturation",
        alias = "at_ends",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    pub at_ends: Option<f64>,
    /// Sum of the squared errors of the outputs over the calibration text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_error: Option<f64>,
    /// The same with every group rounded by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_error_refined: Option<f64>,
    /// What the source stores it as, when that is not plain floats.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// What became of the source's quantized weights.
    #[serde(
        rename = "prequantized",
        alias = "carried",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    pub carried: Option<Carried>,
}

/// How weights that the source stores quantized are stored in the package.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Carried {
    /// The source's own integers or small floats: every weight is exactly the source's.
    Repacked,
    /// Decoded and quantized anew.
    Requantized,
    /// Decoded and stored as floats.
    Dequantized,
}

impl TensorReport {
    /// A tensor stored as floats.
    #[must_use]
    pub const fn plain() -> Self {
        Self {
            format: MatrixFormat::Plain,
            relative_rmse: None,
            cosine: None,
            at_ends: None,
            output_error: None,
            output_error_refined: None,
            source: None,
            carried: None,
        }
    }

    /// A quantized tensor of `elements` weights.
    #[must_use]
    pub fn quantized(format: MatrixFormat, sums: &ErrorSums, elements: u64) -> Self {
        Self {
            format,
            relative_rmse: Some(sums.relative_rmse()),
            cosine: Some(sums.cosine()),
            at_ends: Some(sums.at_ends as f64 / elements.max(1) as f64),
            ..Self::plain()
        }
    }

    /// A quantized tensor without any error.
    #[must_use]
    pub fn exact(format: MatrixFormat) -> Self {
        Self { format, relative_rmse: Some(0.0), cosine: Some(1.0), ..Self::plain() }
    }
}

impl Report {
    /// Puts the tensors' reports together.
    #[must_use]
    pub fn new(
        tensors: BTreeMap<String, TensorReport>,
        (parameters, stored_bytes): (u64, u64),
        bytes_per_rank: Vec<u64>,
        warnings: Vec<String>,
    ) -> Self {
        let mut worst: Vec<(&String, f64)> = tensors
            .iter()
            .filter_map(|(name, tensor)| Some((name, tensor.relative_rmse?)))
            .collect();
        worst.sort_by(|a, b| b.1.total_cmp(&a.1));
        let worst = worst.into_iter().take(WORST).map(|(name, _)| name.clone()).collect();
        let total: u64 = bytes_per_rank.iter().sum();
        let largest = bytes_per_rank.iter().max().copied().unwrap_or(0);
        Self {
            shardpack: env!("CARGO_PKG_VERSION"),
            parameters,
            bits_per_weight: stored_bytes as f64 * 8.0 / parameters.max(1) as f64,
            imbalance: (largest * bytes_per_rank.len() as u64) as f64 / total.max(1) as f64 - 1.0,
            bytes_per_rank,
            worst,
            tensors,
            warnings,
        }
    }
}

/// `run.json`: differs from run to run, and no id depends on it.
#[derive(Debug, Serialize)]
pub struct Run {
    /// Seconds from the first read to the last rename.
    pub seconds: f64,
    /// Bytes of source tensors read.
    pub source_bytes: u64,
    /// Bytes of source tensors that an earlier, interrupted run had converted.
    pub resumed_bytes: u64,
    /// Bytes written, shared files counted once.
    pub written_bytes: u64,
    /// Threads that quantized and hashed.
    pub threads: usize,
}
