//! Importance files of llama.cpp's `llama-imatrix`: how strongly each input of a matrix is
//! excited by a calibration text, so that rounding can favour what matters.
//!
//! Two forms exist and both are read: a plain binary list (`legacy`, usually named `.imatrix` or
//! `.dat`) and a GGUF file of type `imatrix` (`gguf`). Both hold sums of squares of a matrix's
//! inputs, named after llama.cpp's tensors; `names` says which of our modules those are.
//!
//! A figure belongs to an **input column**. llama.cpp stores the rows of some models' `q` and `k`
//! in another order than the checkpoint (its own rotary layout); rows are outputs, so that
//! permutation changes nothing here. Tensors whose *inputs* llama.cpp reorders (the output
//! projections of linear attention) are not mapped.
//!
//! Source: `tools/imatrix/imatrix.cpp` (`save_imatrix`, `save_imatrix_legacy`) and
//! `common/imatrix-loader.cpp` of llama.cpp.

mod cursor;
mod gguf;
mod legacy;
mod names;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

/// Largest file that is worth opening. A trillion-parameter model with 384 experts in 60 layers
/// has about 1.5 GB.
pub const MAX_IMATRIX_BYTES: u64 = 4 << 30;

/// Most entries. Files of the time when experts were separate tensors have about 47,000 for 256
/// experts in 61 layers; twice that for GGUF, which has two tensors per entry.
pub const MAX_ENTRIES: u64 = 1 << 17;

/// Longest name in bytes: llama.cpp's own limit is 64.
pub const MAX_NAME_BYTES: u64 = 256;

/// Smallest figure, relative to the mean: small enough to weigh nothing beside a column that is
/// used, large enough that a group of silent columns is still rounded by its own values.
const LEAST_SHARE: f64 = 1e-6;

/// What a file says of a model's matrices.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Importance {
    /// Per module (a tensor's name without `.weight`) the mean square of each input over the
    /// calibration text, divided by the matrix's mean, so that the mean is 1 and all are
    /// positive and finite. Inputs that were (nearly) silent count one millionth of the mean:
    /// their weights still round to something sensible. Stacked experts are `[experts, in]`
    /// (last axis contiguous), each expert with a mean of its own.
    pub columns: BTreeMap<String, Vec<f32>>,
    /// Entries of tensors that are none of our modules, by the file's name, sorted.
    pub unmapped: Vec<String>,
    /// Entries that saw no tokens or nothing but zeros, by the file's name, sorted: their
    /// matrices are rounded as if without a file.
    pub silent: Vec<String>,
    /// Pieces of text that the figures come from, if the file says.
    pub chunks: Option<u32>,
    /// The text's file names on its maker's machine, if the file says.
    pub datasets: Vec<String>,
}

/// Why an importance file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ImatrixError {
    /// Larger than any such file.
    #[error("{0} bytes; an importance file has at most {MAX_IMATRIX_BYTES}")]
    TooLarge(u64),
    /// It ends too early, or a count cannot be.
    #[error("not an importance file of llama.cpp: {problem} (at byte {at})")]
    Malformed {
        /// Where reading stopped.
        at: u64,
        /// What is wrong there.
        problem: String,
    },
    /// A GGUF file with something else in it.
    #[error("a GGUF file of type {found:?}, expected \"imatrix\"")]
    Kind {
        /// Its `general.type`.
        found: String,
    },
    /// An entry that no calibration can have made.
    #[error("entry {entry:?}: {problem}")]
    Entry {
        /// The file's name for it.
        entry: String,
        /// What is wrong with it.
        problem: String,
    },
    /// No figure is for a matrix of this model.
    #[error(
        "it has figures for none of this model's matrices: it has {found}, the model {expected}; it was made for another model: make one of this model, with llama-imatrix or shardpack calibrate --imatrix-out"
    )]
    Foreign {
        /// What the file has figures for.
        found: String,
        /// A matrix of the model.
        expected: String,
    },
    /// The figures are for another model.
    #[error(
        "module {module:?} has {expected} inputs, the importance file has {found} figures for it: it was made for another model"
    )]
    Shape {
        /// The module.
        module: String,
        /// Inputs of the module, over all its experts.
        expected: u64,
        /// Figures of the file.
        found: u64,
    },
}

/// One entry as it stands in a file.
struct Entry {
    name: String,
    /// Sums of squares, `[matrices, in]`.
    sums: Vec<f32>,
    /// Tokens that each matrix saw; one for all matrices, or one each.
    counts: Vec<f32>,
}

/// A file before its names and figures are looked at.
#[derive(Default)]
struct Raw {
    entries: Vec<Entry>,
    chunks: Option<u32>,
    datasets: Vec<String>,
}

impl Importance {
    /// Parses a file of either form. Takes memory of a small multiple of the file's size.
    pub fn parse(bytes: &[u8]) -> Result<Self, ImatrixError> {
        if bytes.len() as u64 > MAX_IMATRIX_BYTES {
            return Err(ImatrixError::TooLarge(bytes.len() as u64));
        }
        let raw = if bytes.starts_with(&crate::gguf::MAGIC) {
            gguf::parse(bytes)?
        } else {
            legacy::parse(bytes)?
        };
        let mut importance = Self { chunks: raw.chunks, datasets: raw.datasets, ..Self::default() };
        for entry in raw.entries {
            importance.add(entry)?;
        }
        importance.unmapped.sort_unstable();
        importance.silent.sort_unstable();
        Ok(importance)
    }

    /// The figures of a module with `matrices` (experts; 1 otherwise) of `inputs` columns each;
    /// `None` if the file has none for it.
    pub fn of(
        &self,
        module: &str,
        matrices: u64,
        inputs: u64,
    ) -> Result<Option<&[f32]>, ImatrixError> {
        let Some(columns) = self.columns.get(module) else { return Ok(None) };
        let found = columns.len() as u64;
        match matrices.checked_mul(inputs) {
            Some(expected) if expected == found => Ok(Some(columns)),
            expected => Err(ImatrixError::Shape {
                module: module.to_owned(),
                expected: expected.unwrap_or(u64::MAX),
                found,
            }),
        }
    }

    /// What the file has figures for, as an example.
    #[must_use]
    pub fn example(&self) -> String {
        let silent = self.silent.first().map(|entry| format!("{entry:?}, which read no tokens"));
        let known = self.columns.keys().next().map(|module| format!("{module:?}"));
        let unknown = self.unmapped.first().map(|entry| format!("{entry:?}"));
        let example = known.or(silent).or(unknown);
        example.map_or_else(|| "none at all".to_owned(), |example| format!("such as {example}"))
    }

    fn add(&mut self, entry: Entry) -> Result<(), ImatrixError> {
        let normalised = normalise(&entry)?;
        let modules = names::modules(&entry.name);
        let (Some(columns), false) = (normalised, modules.is_empty()) else {
            let list = if modules.is_empty() { &mut self.unmapped } else { &mut self.silent };
            list.push(entry.name);
            return Ok(());
        };
        for module in modules {
            if self.columns.insert(module.clone(), columns.clone()).is_some() {
                let problem = format!("a second entry for {module}");
                return Err(ImatrixError::Entry { entry: entry.name, problem });
            }
        }
        Ok(())
    }
}

/// A module's mean squares, for a file.
#[derive(Clone, Debug, PartialEq)]
pub struct MeanSquares {
    /// The module.
    pub module: String,
    /// The mean square of each input, `[matrices, in]`.
    pub columns: Vec<f32>,
}

/// A file of the older form, which every version of llama.cpp reads, of the modules that llama.cpp has
/// as matrices of their own. `chunks` is the number of sequences of the text.
#[must_use]
pub fn write(figures: &[MeanSquares], chunks: u32) -> Vec<u8> {
    let named: Vec<_> =
        figures.iter().filter_map(|it| Some((names::entry(&it.module)?, &it.columns))).collect();
    let mut bytes = (named.len() as u32).to_le_bytes().to_vec();
    for (name, columns) in named {
        bytes.extend((name.len() as u32).to_le_bytes());
        bytes.extend(name.as_bytes());
        // One call: the figures are means.
        bytes.extend(1_u32.to_le_bytes());
        bytes.extend((columns.len() as u32).to_le_bytes());
        bytes.extend(columns.iter().flat_map(|column| column.to_le_bytes()));
    }
    bytes.extend(chunks.to_le_bytes());
    bytes.extend(0_u32.to_le_bytes());
    bytes
}

/// Brings every matrix's figures to a mean of 1; `None` if no matrix has any.
///
/// How many tokens a matrix saw cancels out, so counts only say which matrices saw none. Those
/// among others that saw some get 1 everywhere, as llama.cpp gives them.
fn normalise(entry: &Entry) -> Result<Option<Vec<f32>>, ImatrixError> {
    let wrong = |problem: String| ImatrixError::Entry { entry: entry.name.clone(), problem };
    if entry.sums.is_empty() {
        return Err(wrong("it has no figures".to_owned()));
    }
    let matrices = entry.counts.len();
    if matrices == 0 || !entry.sums.len().is_multiple_of(matrices) {
        return Err(wrong(format!("{} figures for {matrices} matrices", entry.sums.len())));
    }
    if let Some(at) = entry.counts.iter().position(|count| !(count.is_finite() && *count >= 0.0)) {
        return Err(wrong(format!("matrix {at} saw {} tokens", entry.counts[at])));
    }
    if let Some(at) = entry.sums.iter().position(|sum| !(sum.is_finite() && *sum >= 0.0)) {
        return Err(wrong(format!("the sum of squares of input {at} is {}", entry.sums[at])));
    }
    let width = entry.sums.len() / matrices;
    let mut columns = vec![1.0; entry.sums.len()];
    let mut heard = false;
    let rows = entry.sums.chunks_exact(width).zip(columns.chunks_exact_mut(width));
    for ((sums, columns), count) in rows.zip(&entry.counts) {
        let mean = sums.iter().map(|sum| f64::from(*sum)).sum::<f64>() / width as f64;
        if *count == 0.0 || mean == 0.0 {
            continue;
        }
        heard = true;
        for (column, sum) in columns.iter_mut().zip(sums) {
            *column = (f64::from(*sum) / mean).max(LEAST_SHARE) as f32;
        }
    }
    Ok(heard.then_some(columns))
}
