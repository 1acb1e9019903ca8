//! Why a folder, file or snapshot is no usable source.

use std::{io, path::PathBuf};

use shardpack_containers::{
    container::ContainerError,
    gguf::GgufError,
    pickle::PickleError,
    stored::{Damage, StoredError},
};
use shardpack_formats::normalise::ResolveError;

#[cfg(feature = "hub")]
use crate::hub::HubError;
use crate::{adapter::AdapterError, checkpoint::TextError};

/// Why a folder is no usable source.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// There is no such folder.
    #[error("{}: no such folder; give the folder of a Hugging Face model, or a .gguf file", .0.display())]
    NotFolder(PathBuf),
    /// The folder holds something else.
    #[error("{}: {problem}", .path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A file could not be read.
    #[error("{}: cannot be read", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A JSON file is not what it should be.
    #[error("{}: {problem}", .path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A weight file is damaged or foreign.
    #[error("{}", .path.display())]
    Container {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: ContainerError,
    },
    /// A GGUF file that is not read, or is damaged.
    #[error("{}", .path.display())]
    Gguf {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: GgufError,
    },
    /// A file of `torch.save` that is not read, or is damaged.
    #[error("{}", .path.display())]
    Pickle {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: PickleError,
    },
    /// A stored precision that is not read, or does not fit together.
    #[error("{}", .path.display())]
    Stored {
        /// The folder.
        path: PathBuf,
        /// What is wrong.
        source: StoredError,
    },
    /// Stored bytes that mean nothing.
    #[error("tensor {tensor:?} in {file:?}; the checkpoint is damaged")]
    Tensor {
        /// The tensor.
        tensor: String,
        /// The file that holds it.
        file: String,
        /// What is wrong.
        source: Damage,
    },
    /// The index names a file that is not there.
    #[error("{index} names {file:?}, which is missing from {}; finish the download or copy", .folder.display())]
    MissingFile {
        /// The index.
        index: &'static str,
        /// The file.
        file: String,
        /// The folder.
        folder: PathBuf,
    },
    /// The index names a tensor that no file holds.
    #[error(
        "{index} says that {file:?} holds tensor {tensor:?}, but it does not; the download is incomplete or mixed up"
    )]
    MissingTensor {
        /// The index.
        index: &'static str,
        /// The tensor.
        tensor: String,
        /// The file that should hold it.
        file: String,
    },
    /// A tensor stands in two files.
    #[error(
        "tensor {tensor:?} stands in both {first:?} and {second:?}; remove the file that does not belong to the model"
    )]
    DuplicateTensor {
        /// The tensor.
        tensor: String,
        /// One file.
        first: String,
        /// The other file.
        second: String,
    },
    /// Nobody can tell what the values mean.
    #[error("{}", .path.display())]
    Layout {
        /// The folder.
        path: PathBuf,
        /// Why.
        source: Box<ResolveError>,
    },
    /// A key to be ignored is not there.
    #[error(
        "--ignore-config-key {key}: config.json has no key of that name, nor has its text_config; name the key as the error spells it"
    )]
    NoSuchKey {
        /// The key.
        key: String,
    },
    /// An adapter cannot be merged.
    #[error(transparent)]
    Adapter(#[from] AdapterError),
    /// The hub does not give the model.
    #[cfg(feature = "hub")]
    #[error(transparent)]
    Hub(#[from] HubError),
}

impl SourceError {
    /// Whether the source was looked at and is wrong (else it could not be looked at).
    #[must_use]
    pub const fn is_wrong(&self) -> bool {
        match self {
            Self::Read { .. } | Self::NotFolder(_) => false,
            Self::Adapter(error) => error.is_wrong(),
            #[cfg(feature = "hub")]
            Self::Hub(error) => error.is_wrong(),
            _ => true,
        }
    }
}

impl From<TextError> for SourceError {
    fn from(error: TextError) -> Self {
        match error {
            TextError::Read { path, source } => Self::Read { path, source },
            TextError::TooLarge { path, problem } => Self::Json { path, problem },
        }
    }
}
