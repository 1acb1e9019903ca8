//! Verifies a package's documents (tokenizer, template, configs) without its weights, for a front
//! that holds no rank.

use std::{collections::BTreeSet, fs, path::Path};

use shardpack_manifests::{Digest, Manifest};

use super::{FileProblem, OpenError};

/// Compares every file that holds no tensors with the manifest.
pub fn verify_documents(directory: &Path, manifest: &Manifest) -> Result<(), OpenError> {
    let weights: BTreeSet<&str> =
        manifest.tensors.iter().map(|tensor| tensor.file.as_str()).collect();
    let documents = manifest.files.iter().filter(|file| !weights.contains(file.name.as_str()));
    let mut problems = Vec::new();
    for file in documents {
        let path = directory.join(&file.name);
        let problem = match fs::symlink_metadata(&path) {
            Err(_) => FileProblem::Missing,
            Ok(metadata) if !metadata.is_file() => FileProblem::NotAFile,
            Ok(metadata) if metadata.len() != file.size => {
                FileProblem::Size { expected: file.size, found: metadata.len() }
            }
            Ok(_) => {
                let bytes = fs::read(&path).map_err(|source| OpenError::Read { path, source })?;
                if Digest::of(&bytes) == file.blake3 {
                    continue;
                }
                FileProblem::Changed
            }
        };
        problems.push((file.name.clone(), problem));
    }
    if problems.is_empty() { Ok(()) } else { Err(OpenError::Files { problems }) }
}
