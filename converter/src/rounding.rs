//! Matrices that are rounded in memory as a conversion rounds them, for whoever runs the model that comes
//! of it; and what the other formats would do to their outputs. Knows nothing of sources and plans.

use std::path::Path;

use shardpack_formats::sensitivity::{FormatError, PROBE_BITS, TRIED_BITS, TRIED_GROUPS};
use shardpack_quantize::{
    AffineFormat, Dtype, Rounding,
    affine::{self, QuantizeError, QuantizeOptions},
    dequantize::{Floats, Quantized},
};

use crate::moments::{MomentsError, StoredMoments};

/// Rows by which formats are compared, over all matrices of a stack.
const COMPARED_ROWS: usize = 128;

/// Matrices of a stack by which formats are compared.
const COMPARED_MATRICES: usize = 8;

/// The embedding, which reads no vectors and has no moments where it is not the head too.
const EMBEDDING: &str = "model.embed_tokens";

/// Why a matrix cannot be rounded.
#[derive(Debug, thiserror::Error)]
pub enum CandidatesError {
    /// Its moments cannot be used.
    #[error(transparent)]
    Moments(#[from] MomentsError),
    /// Weights that are no numbers, or do not fit the stored type.
    #[error("{module}: {source}")]
    Weights {
        /// The module.
        module: String,
        /// Which element is what.
        source: QuantizeError,
    },
    /// Rounded weights do not fit the type that they are read back in.
    #[error("{module}: {problem}")]
    Back {
        /// The module.
        module: String,
        /// Which element is what.
        problem: String,
    },
}

/// A matrix, or a stack of them, as a package at 16 bits holds it.
#[derive(Clone, Copy, Debug)]
pub struct Weights<'a> {
    /// The tensor's name without `.weight`.
    pub module: &'a str,
    /// Type of its elements.
    pub dtype: Dtype,
    /// `[…, outputs, inputs]`.
    pub shape: &'a [u64],
    /// Its elements.
    pub bytes: &'a [u8],
}

/// What comes of a matrix.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// Its elements as the probe format reads back, in the same type.
    pub rounded: Vec<u8>,
    /// What each format that it can have does to its outputs.
    pub errors: Vec<FormatError>,
}

/// The formats that matrices can have, judged by what they read.
pub struct Candidates(StoredMoments);

impl Candidates {
    /// Opens a folder that `calibrate` has written.
    pub fn open(folder: &Path) -> Result<Self, MomentsError> {
        StoredMoments::open(folder).map(Self)
    }

    /// Rounds a module's matrices in the probe format and compares the others with it. None of what is
    /// never quantized, or is in no groups.
    pub fn measure(&self, weights: &Weights<'_>) -> Result<Option<Measured>, CandidatesError> {
        let Weights { module, dtype, shape, bytes } = *weights;
        let inputs = shape.last().map_or(0, |inputs| *inputs as usize);
        let is_matrix = shape.len() >= 2 && !bytes.is_empty() && dtype.is_float();
        if !is_matrix || !(self.0.has(module) || module == EMBEDDING) {
            return Ok(None);
        }
        let Some(group) = TRIED_GROUPS.into_iter().find(|&it| inputs.is_multiple_of(it as usize))
        else {
            return Ok(None);
        };
        let matrices = self.0.matrices(module).unwrap_or(1) as usize;
        let probe = format(PROBE_BITS, group);
        let each = bytes.len() / matrices;
        let row = inputs * dtype.size_bytes();
        let mut rounded = Vec::with_capacity(bytes.len());
        for (matrix, bytes) in bytes.chunks_exact(each).enumerate() {
            let task = Task { moments: &self.0, module, matrix, dtype, bytes };
            rounded.extend(task.round(probe)?.read_back(&task)?);
        }
        let compared = matrices.min(COMPARED_MATRICES);
        let chosen: Vec<(usize, Vec<u8>)> = (0..compared)
            .map(|number| {
                let matrix = number * matrices / compared;
                let bytes = &bytes[matrix * each..][..each];
                (matrix, spread_rows(bytes, row, COMPARED_ROWS / compared))
            })
            .collect();
        let mut errors = Vec::new();
        let groups = TRIED_GROUPS.into_iter().filter(|&it| inputs.is_multiple_of(it as usize));
        for (group_size, bits) in groups.flat_map(|it| TRIED_BITS.map(|bits| (it, bits))) {
            let mut relative = Vec::new();
            for (matrix, bytes) in &chosen {
                let task = Task { moments: &self.0, module, matrix: *matrix, dtype, bytes };
                let [one, other] = [task.round(probe)?, task.round(format(bits, group_size))?];
                if one.error > 0.0 {
                    relative.push(other.error / one.error);
                }
            }
            let error = relative.iter().sum::<f64>() / relative.len().max(1) as f64;
            errors.push(FormatError { bits, group_size, error });
        }
        Ok(Some(Measured { rounded, errors }))
    }
}

fn format(bits: u32, group_size: u32) -> AffineFormat {
    AffineFormat::new(bits, group_size).expect("of those that are tried")
}

/// At most `count` rows, spread evenly.
fn spread_rows(bytes: &[u8], row: usize, count: usize) -> Vec<u8> {
    let rows = bytes.len() / row;
    let taken = rows.min(count);
    (0..taken).flat_map(|number| &bytes[number * rows / taken * row..][..row]).copied().collect()
}

/// One matrix, or some rows of it.
struct Task<'a> {
    moments: &'a StoredMoments,
    module: &'a str,
    matrix: usize,
    dtype: Dtype,
    bytes: &'a [u8],
}

/// Rows in a format.
struct Rounded {
    format: AffineFormat,
    store: Dtype,
    parts: [Vec<u8>; 3],
    /// Squared error of the outputs, or of the weights where nothing is known of the inputs.
    error: f64,
}

impl Task<'_> {
    fn round(&self, format: AffineFormat) -> Result<Rounded, CandidatesError> {
        let Self { moments, module, matrix, dtype, bytes } = *self;
        // As `convert` stores scales unless it is told otherwise.
        let store = if dtype == Dtype::F32 { Dtype::BF16 } else { dtype };
        let group = format.group_size() as usize;
        let groups = bytes.len() / dtype.size_bytes() / group;
        let mut packed = vec![0; groups * format.group_bytes()];
        let mut scales = vec![0; groups * store.size_bytes()];
        let mut biases = scales.clone();
        let out = (&mut packed[..], &mut scales[..], &mut biases[..]);
        let options = |rounding| QuantizeOptions::new(format, rounding, store);
        let found = if let Some(factor) = moments.factor(module, matrix as u64, group)? {
            let options = options(Rounding::Gptq);
            affine::quantize_with_feedback(&options, &factor, (dtype, bytes), out)
                .map(|(_, outputs)| outputs.stored)
        } else {
            let options = options(Rounding::Refined);
            affine::quantize(&options, (dtype, bytes), out).map(|sums| sums.errors)
        };
        let error = found
            .map_err(|source| CandidatesError::Weights { module: module.to_owned(), source })?;
        Ok(Rounded { format, store, parts: [packed, scales, biases], error })
    }
}

impl Rounded {
    fn read_back(&self, task: &Task<'_>) -> Result<Vec<u8>, CandidatesError> {
        let parts = self.parts.each_ref().map(Vec::as_slice);
        let stored = Quantized { format: self.format, dtype: self.store, parts };
        let mut out = Vec::new();
        let read = stored.dequantize(task.dtype, &mut out, &mut Floats::default());
        let module = || task.module.to_owned();
        read.map_err(|problem| CandidatesError::Back { module: module(), problem })?;
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_spread_evenly_and_none_twice() {
        let bytes: Vec<u8> = (0..20).collect();
        assert_eq!(spread_rows(&bytes, 2, 5), [0, 1, 4, 5, 8, 9, 12, 13, 16, 17]);
        assert_eq!(spread_rows(&bytes, 2, 50), bytes);
    }
}
