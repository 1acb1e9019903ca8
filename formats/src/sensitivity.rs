//! How far a model's answers move when one of its matrices is quantized, and what other formats would do
//! to it: what bits are given out by.
//!
//! `calibrate --sensitivity` measures, for each matrix (or stack of them) by itself, the mean KL divergence
//! of the model in which that one is rounded in one format ([`PROBE_BITS`]) from the model at 16 bits. Errors are
//! small and independent, so that divergences add, and grow as the squared error of the matrix's outputs
//! does: in another format a matrix costs its measured divergence times [`FormatError::error`].

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use shardpack_quantize::AffineFormat;

/// The file within a calibration's folder.
pub const SENSITIVITY_FILE: &str = "sensitivity.json";

/// Version of the file's form.
pub const SENSITIVITY_FORMAT: u32 = 1;

/// Largest file that is read: a module takes about 700 bytes.
pub const MAX_SENSITIVITY_BYTES: u64 = 64 << 20;

/// Bits that matrices are tried in.
pub const TRIED_BITS: [u32; 5] = [3, 4, 5, 6, 8];

/// Group sizes that matrices are tried in.
pub const TRIED_GROUPS: [u32; 2] = [64, 32];

/// Bits of the format in which each matrix is rounded by itself; its groups are the largest of
/// [`TRIED_GROUPS`] that divide the matrix's inputs.
pub const PROBE_BITS: u32 = 4;

/// `sensitivity.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sensitivities {
    /// [`SENSITIVITY_FORMAT`].
    pub format: u32,
    /// Weights id of the model that ran.
    pub weights: String,
    /// Tokens over which divergences were measured.
    pub tokens: u64,
    /// What was measured, in the order of the model.
    pub modules: Vec<ModuleSensitivity>,
}

/// One matrix, or a stack of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModuleSensitivity {
    /// The tensor's name without `.weight`.
    pub module: String,
    /// Mean KL divergence in nats when this module alone is rounded in the probe format.
    pub kl: f64,
    /// What other formats do; the probe's own among them.
    pub errors: Vec<FormatError>,
}

/// What a format does to a module's outputs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FormatError {
    /// Bits per weight.
    pub bits: u32,
    /// Weights per group.
    pub group_size: u32,
    /// Squared error of the outputs over the calibration text, relative to the probe format's.
    pub error: f64,
}

/// A file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SensitivityError {
    /// Not of this form.
    #[error("{SENSITIVITY_FILE} is not what `calibrate --sensitivity` writes")]
    Malformed(#[from] serde_json::Error),
    /// Another version's.
    #[error(
        "{SENSITIVITY_FILE} has format {0}, this version reads {SENSITIVITY_FORMAT}; calibrate again"
    )]
    Format(u32),
    /// Contradictory.
    #[error("{SENSITIVITY_FILE}: {module}: {problem}")]
    Module {
        /// The module.
        module: String,
        /// What is wrong.
        problem: String,
    },
}

impl Sensitivities {
    /// Parses the file.
    pub fn parse(bytes: &[u8]) -> Result<Self, SensitivityError> {
        #[derive(Deserialize)]
        struct Version {
            format: u32,
        }
        let Version { format } = serde_json::from_slice(bytes)?;
        if format != SENSITIVITY_FORMAT {
            return Err(SensitivityError::Format(format));
        }
        let parsed: Self = serde_json::from_slice(bytes)?;
        let mut modules = BTreeSet::new();
        for entry in &parsed.modules {
            let wrong = |problem: String| SensitivityError::Module {
                module: entry.module.clone(),
                problem,
            };
            if !modules.insert(&entry.module) {
                return Err(wrong("it is there twice".to_owned()));
            }
            if !(entry.kl.is_finite() && entry.kl >= 0.0) {
                return Err(wrong(format!("a divergence of {}", entry.kl)));
            }
            for FormatError { bits, group_size, error } in &entry.errors {
                if AffineFormat::new(*bits, *group_size).is_none() {
                    return Err(wrong(format!("{bits} bits in groups of {group_size}")));
                }
                if !(error.is_finite() && *error >= 0.0) {
                    return Err(wrong(format!("an error of {error} at {bits} bits")));
                }
            }
        }
        Ok(parsed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn module(kl: f64, bits: u32, error: f64) -> ModuleSensitivity {
        let errors = vec![FormatError { bits, group_size: 64, error }];
        ModuleSensitivity { module: "model.layers.0.mlp.down_proj".to_owned(), kl, errors }
    }

    fn parse(modules: Vec<ModuleSensitivity>) -> Result<Sensitivities, String> {
        let written = Sensitivities {
            format: SENSITIVITY_FORMAT,
            weights: "id".to_owned(),
            tokens: 1024,
            modules,
        };
        let bytes = serde_json::to_vec(&written).unwrap();
        let parsed = Sensitivities::parse(&bytes).map_err(|error| error.to_string())?;
        assert_eq!(parsed, written);
        Ok(parsed)
    }

    #[test]
    fn what_is_written_is_read_and_what_contradicts_itself_is_refused() {
        parse(vec![module(1e-4, 4, 1.0)]).unwrap();
        let refused = |modules: Vec<_>, words: &str| {
            let error = parse(modules).unwrap_err();
            assert!(error.contains(words) && error.contains("down_proj"), "{error}");
        };
        refused(vec![module(1e-4, 4, 1.0), module(1e-4, 4, 1.0)], "twice");
        refused(vec![module(-1.0, 4, 1.0)], "divergence of -1");
        refused(vec![module(1e-4, 7, 1.0)], "7 bits");
        refused(vec![module(1e-4, 4, -1.0)], "error of -1");
        let other = Sensitivities::parse(br#"{"format": 2}"#).unwrap_err().to_string();
        assert!(other.contains("format 2, this version reads 1"), "{other}");
        assert!(Sensitivities::parse(b"[]").is_err());
    }
}
