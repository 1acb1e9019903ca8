//! Writes a package set for other programs: as a model directory of mlx-lm, or as a 16-bit
//! checkpoint with Hugging Face's tensor names.
//!
//! For mlx-lm it is the package of a one-node set, manifest and all: mlx-lm reads past the
//! manifest, and `verify` goes on checking every byte. For Hugging Face affine groups are
//! dequantized in f32 and rounded once, and tensors are those of a published checkpoint: experts
//! one by one or fused, as their family has them.

mod checkpoint;
mod published;

use std::{
    fs,
    path::{Path, PathBuf},
};

use shardpack_manifests::{canonical::CanonicalError, signature::SignError};
use shardpack_quantize::Dtype;

use crate::{
    convert::documents::package_name,
    package::{WriteError, at},
    plan::ConvertOptions,
    reshard::{ReshardError, ReshardEvent, ReshardObserver, clear, write},
    staging::{Staging, StagingError},
    unsharded::{UnshardError, UnshardedModel},
};

/// Why nothing was exported. Nothing is left under the output's name.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// An option is out of range.
    #[error("--dtype {0} is not possible; BF16, F16 and F32 are")]
    Dtype(String),
    /// The packages.
    #[error(transparent)]
    Join(#[from] UnshardError),
    /// The output cannot be begun.
    #[error(transparent)]
    Staging(#[from] StagingError),
    /// The output cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// A weight that the asked type cannot hold.
    #[error("tensor {tensor:?}: {problem}")]
    Weight {
        /// The tensor.
        tensor: String,
        /// Which element is what.
        problem: String,
    },
    /// A document has no canonical form: a bug of ours.
    #[error("a document cannot be written")]
    Canonical(#[from] CanonicalError),
    /// A package cannot be signed.
    #[error(transparent)]
    Sign(Box<SignError>),
    /// The chat template cannot be tried.
    #[error("{file}: {problem}")]
    Template {
        /// Its file.
        file: &'static str,
        /// What it did.
        problem: String,
    },
}

impl ExportError {
    /// Whether the packages were looked at and are wrong (else it could not be done).
    #[must_use]
    pub const fn is_wrong(&self) -> bool {
        match self {
            Self::Join(error) => error.is_wrong(),
            Self::Weight { .. } => true,
            _ => false,
        }
    }
}

impl From<ReshardError> for ExportError {
    fn from(error: ReshardError) -> Self {
        match error {
            ReshardError::Join(error) => Self::Join(error),
            ReshardError::Staging(error) => Self::Staging(error),
            ReshardError::Write(error) => Self::Write(error),
            ReshardError::Canonical(error) => Self::Canonical(error),
            ReshardError::Sign(error) => Self::Sign(error),
            ReshardError::Template { file, problem } => Self::Template { file, problem },
        }
    }
}

/// The form to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExportForm {
    /// mlx-lm: as quantized.
    Mlx,
    /// transformers and others: floats.
    HuggingFace {
        /// Element type as the container spells it; that of the set's own floats when absent.
        dtype: Option<String>,
    },
}

/// What the user asks for.
#[derive(Clone, Debug)]
pub struct ExportOptions {
    /// Folder that is written; must not exist or be empty.
    pub output: PathBuf,
    /// The form to write.
    pub form: ExportForm,
    /// Bytes that may be held in memory.
    pub memory_bytes: u64,
}

/// A finished export.
#[derive(Debug)]
pub struct Exported {
    /// The folder.
    pub output: PathBuf,
    /// Tensors in it.
    pub tensors: usize,
    /// Bytes of all files.
    pub size_bytes: u64,
}

/// Writes a package set as one unsharded model. The output appears under its name complete or not at all.
pub fn export(
    model: &UnshardedModel,
    options: &ExportOptions,
    observe: ReshardObserver,
) -> Result<Exported, ExportError> {
    let dtype = match &options.form {
        ExportForm::HuggingFace { dtype: Some(name) } => {
            let dtype = Dtype::from_name(name).filter(|dtype| dtype.is_float());
            dtype.ok_or_else(|| ExportError::Dtype(name.clone()))?
        }
        _ => model.manifest().quantization.dtype,
    };
    let plan = model.plan(ConvertOptions {
        memory_bytes: options.memory_bytes,
        ..ConvertOptions::new(options.output.clone(), 1)
    })?;
    let staging = Staging::begin(&options.output)?;
    let directory = staging.directory();
    clear(directory)?;
    let tensors = match &options.form {
        ExportForm::Mlx => {
            write(model, &plan, directory, observe)?;
            unwrap_package(directory)?;
            plan.steps.iter().map(|step| step.parts.len()).sum()
        }
        ExportForm::HuggingFace { .. } => {
            checkpoint::write(model, &plan, dtype, directory, observe)?
        }
    };
    let size_bytes = size_of_files(directory)?;
    observe(ReshardEvent::Publishing);
    staging.publish()?;
    Ok(Exported { output: options.output.clone(), tensors, size_bytes })
}

/// Makes a set's only package of the set.
fn unwrap_package(directory: &Path) -> Result<(), WriteError> {
    let package = directory.join(package_name(0));
    for entry in at(directory, fs::read_dir(directory))? {
        let path = at(directory, entry)?.path();
        if path != package {
            at(&path, fs::remove_file(&path))?;
        }
    }
    for entry in at(&package, fs::read_dir(&package))? {
        let entry = at(&package, entry)?;
        let path = directory.join(entry.file_name());
        at(&path, fs::rename(entry.path(), &path))?;
    }
    at(&package, fs::remove_dir(&package))
}

fn size_of_files(directory: &Path) -> Result<u64, WriteError> {
    let size = || {
        fs::read_dir(directory)?.map(|entry| Ok(entry?.metadata()?.len())).sum::<Result<u64, _>>()
    };
    at(directory, size())
}
