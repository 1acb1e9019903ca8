//! Scales and biases that were learned, in the place of those that rounding has found.

use std::{
    collections::BTreeMap,
    fs::File,
    io,
    ops::Range,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
};

use shardpack_containers::container::TensorInfo;
use shardpack_formats::learned::{
    LEARNED_FILE, Learned, LearnedEntry, LearnedError, MAX_LEARNED_BYTES,
};
use shardpack_manifests::Digest;
use shardpack_quantize::Dtype;

use crate::measured;

/// Why scales and biases cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ScalesError {
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
        source: LearnedError,
    },
    /// A file does not hold what the index says.
    #[error("{path}: {problem}; distill again")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// They belong to other integers.
    #[error(
        "{path}: the scales of {module:?} were learned for other integers: distill this model again, in this format"
    )]
    Foreign {
        /// The folder.
        path: PathBuf,
        /// The module.
        module: String,
    },
}

impl ScalesError {
    /// Whether the folder was looked at and is wrong (else it could not be read).
    #[must_use]
    pub const fn is_wrong(&self) -> bool {
        !matches!(self, Self::Read { .. })
    }
}

/// A folder of scales and biases.
pub(crate) struct LearnedScales {
    folder: PathBuf,
    digest: Digest,
    index: Learned,
    matrices: BTreeMap<String, Stored>,
}

/// Where those of one matrix are.
struct Stored {
    entry: usize,
    path: PathBuf,
    file: File,
    /// First bytes of the scales and of the biases.
    offsets: [u64; 2],
    dtype: Dtype,
}

impl LearnedScales {
    pub(crate) fn open(folder: &Path) -> Result<Self, ScalesError> {
        let path = folder.join(LEARNED_FILE);
        let failed = |source| ScalesError::Read { path: path.clone(), source };
        let bytes = measured::read_index(&path, MAX_LEARNED_BYTES).map_err(failed)?;
        let index = Learned::parse(&bytes)
            .map_err(|source| ScalesError::Index { path: folder.to_owned(), source })?;
        let mut matrices = BTreeMap::new();
        for (number, entry) in index.matrices.iter().enumerate() {
            let path = folder.join(&entry.file);
            matrices.insert(entry.module.clone(), Stored::find(path, (number, entry))?);
        }
        let (folder, digest) = (folder.to_owned(), Digest::of(&bytes));
        Ok(Self { folder, digest, index, matrices })
    }

    /// Digest of the index, which names the digest of everything else.
    pub(crate) const fn digest(&self) -> Digest {
        self.digest
    }

    /// What a report says of it.
    pub(crate) fn summary(&self) -> String {
        let Learned { steps, tokens, held_out, divergence_before, divergence_after, .. } =
            &self.index;
        format!(
            "scales and biases were distilled in {steps} steps over {tokens} tokens: KL divergence {divergence_before:.5} before and {divergence_after:.5} after, over {held_out} tokens that were held out; the errors of single matrices are those before"
        )
    }

    /// Reads the scales and biases of some groups over those that are there; whether this matrix has
    /// learned any.
    pub(crate) fn replace(
        &self,
        module: &str,
        (groups, dtype): (Range<u64>, Dtype),
        [scales, biases]: [&mut [u8]; 2],
    ) -> Result<bool, ScalesError> {
        let Some(stored) = self.matrices.get(module) else { return Ok(false) };
        let size = dtype.size_bytes() as u64;
        let entry = &self.index.matrices[stored.entry];
        if stored.dtype != dtype || groups.end > entry.groups {
            return Err(self.foreign(module));
        }
        for (offset, out) in stored.offsets.into_iter().zip([scales, biases]) {
            let read = stored.file.read_exact_at(out, offset + groups.start * size);
            read.map_err(|source| ScalesError::Read { path: stored.path.clone(), source })?;
        }
        Ok(true)
    }

    /// Checks a whole matrix: that its integers are those that were learned for, and that what was read
    /// is what was written. `digests` are of integers, scales and biases.
    pub(crate) fn check(&self, module: &str, digests: &[Digest]) -> Result<(), ScalesError> {
        let Some(stored) = self.matrices.get(module) else { return Ok(()) };
        let entry = &self.index.matrices[stored.entry];
        let found: Vec<String> = digests.iter().map(ToString::to_string).collect();
        let [integers, scales, biases] = &found[..] else { return Err(self.foreign(module)) };
        if *integers != entry.integers {
            return Err(self.foreign(module));
        }
        if [scales, biases] != entry.blake3.each_ref() {
            let problem = format!("the scales of {module:?} are not what was written");
            return Err(ScalesError::Damaged { path: stored.path.clone(), problem });
        }
        Ok(())
    }

    fn foreign(&self, module: &str) -> ScalesError {
        ScalesError::Foreign { path: self.folder.clone(), module: module.to_owned() }
    }
}

impl Stored {
    fn find(path: PathBuf, (number, entry): (usize, &LearnedEntry)) -> Result<Self, ScalesError> {
        let failed = |source| ScalesError::Read { path: path.clone(), source };
        let damaged = |problem: String| ScalesError::Damaged { path: path.clone(), problem };
        let file = File::open(&path).map_err(failed)?;
        let tensors = measured::tensors(&file).map_err(failed)?;
        let tensors = tensors.map_err(|error| damaged(error.to_string()))?;
        let find = |part: &str| -> Result<TensorInfo, ScalesError> {
            let name = format!("{}.{part}", entry.module);
            let found = tensors.iter().find(|tensor| tensor.name == name);
            let found = found.ok_or_else(|| damaged(format!("it has no tensor {name:?}")))?;
            if found.shape != [entry.groups] {
                let (shape, groups) = (&found.shape, entry.groups);
                return Err(damaged(format!("{name:?} is {shape:?}, expected [{groups}]")));
            }
            Ok(found.clone())
        };
        let [scales, biases] = [find("scales")?, find("biases")?];
        let (offsets, dtype) = ([scales.offset, biases.offset], scales.dtype);
        Ok(Self { entry: number, offsets, dtype, file, path })
    }
}
