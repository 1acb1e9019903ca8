//! What a model's matrices read over a calibration text: second moments of every matrix's inputs.
//!
//! A folder holds them: the index `calibration.json` ([`Calibration`]), and safetensors files with a
//! tensor for each distinct input, named after the first module that reads it, in F32:
//!
//! | tensor | shape | content |
//! |---|---|---|
//! | `MODULE` | `[matrices, inputs / block, block, block]` | `Σ x xᵀ` over tokens, of each block of consecutive inputs |
//!
//! Matrices are the experts of a stack or the heads of a matrix that is split by heads, 1 otherwise; a
//! block is all inputs where that is not too much. Modules that read the same vectors (queries, keys and
//! values; gate and up projections) share a tensor.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

/// The index within the folder.
pub const CALIBRATION_FILE: &str = "calibration.json";

/// Largest index that is read: a tensor's entry takes about 300 bytes and 4 for each expert; models have a
/// few hundred layers.
pub const MAX_CALIBRATION_BYTES: u64 = 64 << 20;

/// Version of the folder's form.
pub const CALIBRATION_FORMAT: u32 = 1;

/// Most bytes of one tensor; where all inputs together need more, blocks of them are measured.
const MAX_TENSOR_BYTES: u64 = 1 << 30;

/// Widest block: its factorization takes half a gigabyte.
const MAX_BLOCK: u64 = 8192;

/// Blocks end between groups of any size.
const LARGEST_GROUP: u64 = 128;

/// `calibration.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// [`CALIBRATION_FORMAT`].
    pub format: u32,
    /// Weights id of the model that ran.
    pub weights: String,
    /// BLAKE3 of the tokens that it read.
    pub text: String,
    /// Tokens that it read.
    pub tokens: u64,
    /// Tokens of a sequence.
    pub context: u64,
    /// Every distinct input.
    pub inputs: Vec<InputMoments>,
}

/// The inputs of some modules.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InputMoments {
    /// The safetensors file.
    pub file: String,
    /// Modules that read these inputs; the tensor is named after the first.
    pub modules: Vec<String>,
    /// Inputs of a matrix.
    pub inputs: u64,
    /// Consecutive inputs whose moments with each other were measured.
    pub block: u64,
    /// Vectors that each matrix of the stack has read.
    pub tokens: Vec<u64>,
    /// BLAKE3 of each matrix's moments.
    pub blake3: Vec<String>,
}

impl InputMoments {
    /// Floats of one matrix's moments.
    #[must_use]
    pub const fn floats(&self) -> u64 {
        self.inputs * self.block
    }

    /// The tensor's shape.
    #[must_use]
    pub fn shape(&self) -> [u64; 4] {
        [self.tokens.len() as u64, self.inputs / self.block, self.block, self.block]
    }
}

/// An index that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CalibrationError {
    /// Not of this form.
    #[error("{CALIBRATION_FILE} is not what `calibrate` writes")]
    Malformed(#[from] serde_json::Error),
    /// Another version's.
    #[error(
        "{CALIBRATION_FILE} has format {0}, this version reads {CALIBRATION_FORMAT}; calibrate again"
    )]
    Format(u32),
    /// Contradictory.
    #[error("{CALIBRATION_FILE}: {module}: {problem}")]
    Entry {
        /// The first module of the entry.
        module: String,
        /// What is wrong.
        problem: String,
    },
}

impl Calibration {
    /// Parses an index.
    pub fn parse(bytes: &[u8]) -> Result<Self, CalibrationError> {
        #[derive(Deserialize)]
        struct Version {
            format: u32,
        }
        let Version { format } = serde_json::from_slice(bytes)?;
        if format != CALIBRATION_FORMAT {
            return Err(CalibrationError::Format(format));
        }
        let parsed: Self = serde_json::from_slice(bytes)?;
        let mut modules = BTreeSet::new();
        for entry in &parsed.inputs {
            let wrong = |problem: String| CalibrationError::Entry {
                module: entry.modules.first().cloned().unwrap_or_default(),
                problem,
            };
            let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            if !entry.file.chars().all(is_plain) || !entry.file.ends_with(".safetensors") {
                return Err(wrong(format!("{:?} is no name of a safetensors file", entry.file)));
            }
            if entry.modules.is_empty() || entry.tokens.is_empty() {
                return Err(wrong("it is of no module or no matrix".to_owned()));
            }
            let (tokens, digests) = (entry.tokens.len(), entry.blake3.len());
            if tokens != digests {
                return Err(wrong(format!("{tokens} matrices with {digests} digests")));
            }
            let (inputs, block) = (entry.inputs, entry.block);
            if block == 0 || !inputs.is_multiple_of(block) || inputs > 1 << 24 {
                return Err(wrong(format!("{inputs} inputs in blocks of {block}")));
            }
            for module in &entry.modules {
                if !modules.insert(module) {
                    return Err(wrong(format!("a second entry for {module}")));
                }
            }
        }
        Ok(parsed)
    }

    /// Entries by their modules.
    #[must_use]
    pub fn by_module(&self) -> BTreeMap<&str, &InputMoments> {
        self.inputs
            .iter()
            .flat_map(|entry| entry.modules.iter().map(move |module| (module.as_str(), entry)))
            .collect()
    }
}

/// Consecutive inputs whose moments are measured together: all of them where that is not too much, else
/// the largest equal part of whole groups.
#[must_use]
pub fn block_of(matrices: u64, inputs: u64) -> u64 {
    let fits = |block: u64| {
        block <= MAX_BLOCK && matrices.saturating_mul(inputs) * block * 4 <= MAX_TENSOR_BYTES
    };
    if fits(inputs) {
        return inputs;
    }
    let groups = inputs / LARGEST_GROUP;
    let blocks = (1..=groups)
        .filter(|part| inputs.is_multiple_of(LARGEST_GROUP) && groups.is_multiple_of(*part));
    blocks.map(|part| inputs / part).find(|block| fits(*block)).unwrap_or(LARGEST_GROUP.min(inputs))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_all_inputs_or_whole_groups_that_fit() {
        assert_eq!(block_of(1, 576), 576);
        assert_eq!(block_of(1, 8192), 8192);
        assert_eq!(block_of(1, 28672), 7168);
        assert_eq!(block_of(256, 7168), 128);
        assert_eq!(block_of(64, 2048), 2048);
        assert_eq!(block_of(128, 2048), 1024);
    }

    #[test]
    fn contradictory_entries_are_refused() {
        let entry = |modules: &[&str], block| InputMoments {
            file: "layer-00000.safetensors".to_owned(),
            modules: modules.iter().map(|name| (*name).to_owned()).collect(),
            inputs: 256,
            block,
            tokens: vec![7],
            blake3: vec![String::new()],
        };
        let parse = |inputs: Vec<InputMoments>| {
            let index = Calibration {
                format: CALIBRATION_FORMAT,
                weights: String::new(),
                text: String::new(),
                tokens: 7,
                context: 7,
                inputs,
            };
            Calibration::parse(&serde_json::to_vec(&index).unwrap()).map_err(|e| e.to_string())
        };
        let good = parse(vec![entry(&["a", "b"], 128)]).unwrap();
        assert_eq!(good.by_module()["b"].shape(), [1, 2, 128, 128]);
        assert!(
            parse(vec![entry(&["a"], 100)]).unwrap_err().contains("256 inputs in blocks of 100")
        );
        let twice = parse(vec![entry(&["a"], 256), entry(&["b", "a"], 256)]).unwrap_err();
        assert!(twice.contains("a second entry for a"), "{twice}");
        let other = Calibration::parse(br#"{"format": 2}"#).unwrap_err().to_string();
        assert!(other.contains("format 2, this version reads 1"), "{other}");
    }
}
