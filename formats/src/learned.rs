//! Scales and biases that distillation has found for the integers of a conversion.
//!
//! A folder holds them: the index `learned.json` ([`Learned`]), and a safetensors file for each part of
//! the model, with two tensors for each matrix in affine groups, in the type that packages store them in:
//!
//! | tensor | shape | content |
//! |---|---|---|
//! | `MODULE.scales` | `[groups]` | in the order of the packed integers |
//! | `MODULE.biases` | `[groups]` | the same |

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

/// The index within the folder.
pub const LEARNED_FILE: &str = "learned.json";

/// Largest index that is read: a matrix takes about 400 bytes.
pub const MAX_LEARNED_BYTES: u64 = 64 << 20;

/// Version of the folder's form.
pub const LEARNED_FORMAT: u32 = 1;

/// `learned.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Learned {
    /// [`LEARNED_FORMAT`].
    pub format: u32,
    /// Weights id of the model at 16 bits.
    pub weights: String,
    /// Steps of the optimizer.
    pub steps: usize,
    /// Tokens that were learned from, each perhaps more than once.
    pub tokens: u64,
    /// Tokens that were held out of them.
    pub held_out: u64,
    /// Mean KL divergence from the model at 16 bits over the held-out tokens, in nats: as rounded.
    pub divergence_before: f64,
    /// The same with what was learned.
    pub divergence_after: f64,
    /// Every matrix.
    pub matrices: Vec<LearnedEntry>,
}

/// One matrix.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LearnedEntry {
    /// The tensor's name without `.weight`.
    pub module: String,
    /// The safetensors file.
    pub file: String,
    /// Groups.
    pub groups: u64,
    /// BLAKE3 of the packed integers that these scales belong to.
    pub integers: String,
    /// BLAKE3 of the scales and of the biases.
    pub blake3: [String; 2],
}

/// An index that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LearnedError {
    /// Not of this form.
    #[error("{LEARNED_FILE} is not what a distillation writes")]
    Malformed(#[from] serde_json::Error),
    /// Another version's.
    #[error("{LEARNED_FILE} has format {0}, this version reads {LEARNED_FORMAT}; distill again")]
    Format(u32),
    /// Contradictory.
    #[error("{LEARNED_FILE}: {module}: {problem}")]
    Entry {
        /// The module.
        module: String,
        /// What is wrong.
        problem: String,
    },
}

impl Learned {
    /// Parses an index.
    pub fn parse(bytes: &[u8]) -> Result<Self, LearnedError> {
        #[derive(Deserialize)]
        struct Version {
            format: u32,
        }
        let Version { format } = serde_json::from_slice(bytes)?;
        if format != LEARNED_FORMAT {
            return Err(LearnedError::Format(format));
        }
        let parsed: Self = serde_json::from_slice(bytes)?;
        let mut modules = BTreeSet::new();
        for entry in &parsed.matrices {
            let wrong = |problem: String| {
                Err(LearnedError::Entry { module: entry.module.clone(), problem })
            };
            let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            if !entry.file.chars().all(is_plain) || !entry.file.ends_with(".safetensors") {
                return wrong(format!("{:?} is no name of a safetensors file", entry.file));
            }
            if !modules.insert(&entry.module) {
                return wrong("a second entry".to_owned());
            }
        }
        Ok(parsed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index(files: &[(&str, &str)]) -> Learned {
        let entry = |(module, file): &(&str, &str)| LearnedEntry {
            module: (*module).to_owned(),
            file: (*file).to_owned(),
            groups: 4,
            integers: String::new(),
            blake3: [String::new(), String::new()],
        };
        Learned {
            format: LEARNED_FORMAT,
            weights: String::new(),
            steps: 3,
            tokens: 64,
            held_out: 16,
            divergence_before: 0.2,
            divergence_after: 0.1,
            matrices: files.iter().map(entry).collect(),
        }
    }

    #[test]
    fn contradictory_entries_are_refused() {
        let parse = |files: &[(&str, &str)]| {
            let bytes = serde_json::to_vec(&index(files)).unwrap();
            Learned::parse(&bytes).map_err(|error| error.to_string())
        };
        let good = [("a", "stage-0.safetensors"), ("b", "stage-0.safetensors")];
        assert_eq!(parse(&good).unwrap(), index(&good));
        let twice = parse(&[good[0], good[0]]).unwrap_err();
        assert!(twice.contains("a: a second entry"), "{twice}");
        let outside = parse(&[("a", "../x.safetensors")]).unwrap_err();
        assert!(outside.contains("no name of a safetensors file"), "{outside}");
        let other = Learned::parse(br#"{"format": 2}"#).unwrap_err().to_string();
        assert!(other.contains("format 2, this version reads 1"), "{other}");
    }
}
