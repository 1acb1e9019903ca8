//! The second moments that `calibrate` has measured, as rounding with error feedback reads them.

use std::{
    collections::BTreeMap,
    fs::File,
    io,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use shardpack_formats::{
    Calibration,
    calibration::{CALIBRATION_FILE, CalibrationError, InputMoments, MAX_CALIBRATION_BYTES},
};
use shardpack_manifests::Digest;
use shardpack_quantize::{Dtype, Platform, affine::Hessian};

use crate::measured;

/// Factors that are kept: modules that read the same inputs follow each other, and several threads are
/// at different ones.
const KEPT_FACTORS: usize = 4;

/// Damping relative to the mean of the diagonal, as GPTQ's authors have it; a twentieth of it and five
/// times as much give the same within two hundredths (docs/log.md).
const DAMPING: f64 = 0.01;

/// A matrix that has read fewer vectors than this part of its inputs is rounded without feedback: what so
/// few say of the others is noise.
const LEAST_TOKENS: u64 = 4;

/// Bytes that a factor of a block takes for each pair of inputs while it is made: f64, the moments, and
/// the triangle that stays.
const BYTES_PER_PAIR: u64 = 8 + 4 + 2;

/// Why moments cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum MomentsError {
    /// A file cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The index cannot be used.
    #[error("{path}")]
    Index {
        /// The folder.
        path: PathBuf,
        /// What is wrong.
        source: CalibrationError,
    },
    /// A file does not hold what the index says.
    #[error("{path}: {problem}; calibrate again")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// The moments are of another model.
    #[error(
        "module {module:?} has {expected} inputs, the calibration has {found} for it: it was made for another model"
    )]
    Shape {
        /// The module.
        module: String,
        /// Inputs of the module, over all its matrices.
        expected: u64,
        /// Inputs in the index.
        found: u64,
    },
    /// Nothing in it is of this model.
    #[error("{path} has moments of none of this model's matrices: it was made for another model")]
    Foreign {
        /// The folder.
        path: PathBuf,
    },
}

impl MomentsError {
    /// Whether the moments were looked at and are wrong (else they could not be read).
    #[must_use]
    pub const fn is_wrong(&self) -> bool {
        !matches!(self, Self::Read { .. })
    }
}

/// A folder of moments.
pub(crate) struct StoredMoments {
    folder: PathBuf,
    index: Calibration,
    digest: Digest,
    places: BTreeMap<String, usize>,
    factors: Mutex<Vec<(FactorKey, Arc<Hessian>)>>,
}

/// Entry of the index, matrix, group size.
type FactorKey = (usize, usize, usize);

impl StoredMoments {
    pub(crate) fn open(folder: &Path) -> Result<Self, MomentsError> {
        let path = folder.join(CALIBRATION_FILE);
        let failed = |source| MomentsError::Read { path: path.clone(), source };
        let bytes = measured::read_index(&path, MAX_CALIBRATION_BYTES).map_err(failed)?;
        let index = Calibration::parse(&bytes)
            .map_err(|source| MomentsError::Index { path: folder.to_owned(), source })?;
        let of = |(place, entry): (usize, &InputMoments)| {
            entry.modules.iter().map(move |module| (module.clone(), place)).collect::<Vec<_>>()
        };
        let places = index.inputs.iter().enumerate().flat_map(of).collect();
        let (folder, digest) = (folder.to_owned(), Digest::of(&bytes));
        Ok(Self { folder, index, digest, places, factors: Mutex::default() })
    }

    /// Digest of the index, which names the digest of everything else.
    pub(crate) const fn digest(&self) -> Digest {
        self.digest
    }

    /// Whether there are moments for a module.
    pub(crate) fn has(&self, module: &str) -> bool {
        self.places.contains_key(module)
    }

    /// Matrices of a module's stack.
    pub(crate) fn matrices(&self, module: &str) -> Option<u64> {
        self.places.get(module).map(|place| self.index.inputs[*place].tokens.len() as u64)
    }

    /// Checks that a module of `rows` rows has such inputs; whether there are moments for it.
    pub(crate) fn check(&self, module: &str, rows: u64, inputs: u64) -> Result<bool, MomentsError> {
        let Some(place) = self.places.get(module) else { return Ok(false) };
        let entry = &self.index.inputs[*place];
        let matrices = entry.tokens.len() as u64;
        if entry.inputs == inputs && rows.is_multiple_of(matrices) {
            return Ok(true);
        }
        let (module, found) = (module.to_owned(), entry.inputs * matrices);
        Err(MomentsError::Shape { module, expected: inputs, found })
    }

    /// What is to be said where matrices are rounded without feedback because no text was read for
    /// them, or too little.
    pub(crate) fn shortage(&self, modules: &[&str]) -> Option<String> {
        let (mut matrices, mut short) = (0_u64, 0_u64);
        for module in modules {
            let entry = self.places.get(*module).map(|place| &self.index.inputs[*place]);
            let Some(entry) = entry else {
                (matrices, short) = (matrices + 1, short + 1);
                continue;
            };
            matrices += entry.tokens.len() as u64;
            let is_short = |tokens: &&u64| tokens.saturating_mul(LEAST_TOKENS) < entry.block;
            short += entry.tokens.iter().filter(is_short).count() as u64;
        }
        let tokens = self.index.tokens;
        (short > 0).then(|| {
            format!(
                "the calibration read {tokens} tokens, too few for {short} of {matrices} matrices (those of experts counted singly): they are rounded without error feedback; calibrate with a longer text"
            )
        })
    }

    pub(crate) fn foreign(&self) -> MomentsError {
        MomentsError::Foreign { path: self.folder.clone() }
    }

    /// Bytes that the largest factor takes while it is made.
    pub(crate) fn working_bytes(&self) -> u64 {
        let bytes =
            |entry: &InputMoments| entry.floats() * 4 + entry.block * entry.block * BYTES_PER_PAIR;
        self.index.inputs.iter().map(bytes).max().unwrap_or(0)
    }

    /// The factor for one matrix of a module, in groups of `group` inputs. None where it has read too
    /// little.
    pub(crate) fn factor(
        &self,
        module: &str,
        matrix: u64,
        group: usize,
    ) -> Result<Option<Arc<Hessian>>, MomentsError> {
        let Some(place) = self.places.get(module).copied() else { return Ok(None) };
        let entry = &self.index.inputs[place];
        let tokens = entry.tokens.get(matrix as usize).copied().unwrap_or(0);
        if tokens.saturating_mul(LEAST_TOKENS) < entry.block
            || !entry.block.is_multiple_of(group as u64)
        {
            return Ok(None);
        }
        let key = (place, matrix as usize, group);
        let kept = || self.factors.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, factor)) = kept().iter().find(|(at, _)| *at == key) {
            return Ok(Some(Arc::clone(factor)));
        }
        let moments = self.read(entry, matrix)?;
        let platform = Platform::detect_for_quantizing();
        let block = entry.block as usize;
        let Some(factor) = Hessian::new(platform, &moments, [block, group], DAMPING) else {
            return Ok(None);
        };
        let factor = Arc::new(factor);
        let mut kept = kept();
        if kept.len() == KEPT_FACTORS {
            kept.remove(0);
        }
        kept.push((key, Arc::clone(&factor)));
        Ok(Some(factor))
    }

    fn read(&self, entry: &InputMoments, matrix: u64) -> Result<Vec<f32>, MomentsError> {
        let path = self.folder.join(&entry.file);
        let failed = |source| MomentsError::Read { path: path.clone(), source };
        let damaged = |problem: String| MomentsError::Damaged { path: path.clone(), problem };
        let file = File::open(&path).map_err(failed)?;
        let tensors = measured::tensors(&file).map_err(failed)?;
        let tensors = tensors.map_err(|error| damaged(error.to_string()))?;
        let name = &entry.modules[0];
        let tensor = tensors.iter().find(|tensor| tensor.name == *name);
        let tensor = tensor.ok_or_else(|| damaged(format!("it has no tensor {name:?}")))?;
        if tensor.dtype != Dtype::F32 || tensor.shape != entry.shape() {
            let (dtype, shape) = (tensor.dtype, &tensor.shape);
            let expected = entry.shape();
            return Err(damaged(format!(
                "tensor {name:?} is {dtype} {shape:?}, expected F32 {expected:?}"
            )));
        }
        let bytes = entry.floats() * 4;
        let mut stored = vec![0; bytes as usize];
        file.read_exact_at(&mut stored, tensor.offset + matrix * bytes).map_err(failed)?;
        if Digest::of(&stored).to_string() != entry.blake3[matrix as usize] {
            return Err(damaged(format!("matrix {matrix} of {name:?} is not what was written")));
        }
        let (floats, _) = stored.as_chunks::<4>();
        Ok(floats.iter().map(|four| f32::from_le_bytes(*four)).collect())
    }
}

#[cfg(test)]
mod tests {
    use shardpack_formats::calibration::CALIBRATION_FORMAT;

    use super::*;

    #[test]
    fn matrices_that_have_read_too_little_are_counted() {
        let entry = |module: &str, tokens: Vec<u64>| InputMoments {
            file: "layer-00000.safetensors".to_owned(),
            modules: vec![module.to_owned()],
            inputs: 256,
            block: 128,
            blake3: vec![String::new(); tokens.len()],
            tokens,
        };
        // A quarter of 128 inputs is 32 vectors.
        let inputs = vec![entry("enough", vec![32]), entry("experts", vec![31, 32, 0])];
        let (weights, text) = (String::new(), String::new());
        let index = Calibration {
            format: CALIBRATION_FORMAT,
            weights,
            text,
            tokens: 64,
            context: 64,
            inputs,
        };
        let folder = tempfile::tempdir().unwrap();
        let document = serde_json::to_vec(&index).unwrap();
        std::fs::write(folder.path().join(CALIBRATION_FILE), document).unwrap();
        let moments = StoredMoments::open(folder.path()).unwrap();
        assert_eq!(moments.shortage(&["enough"]), None);
        let note = moments.shortage(&["enough", "experts", "nowhere"]).unwrap();
        assert!(note.contains("read 64 tokens, too few for 3 of 5 matrices"), "{note}");
    }
}
