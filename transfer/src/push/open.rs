//! Reads a set's documents and looks at its files before anything is sent.

use std::{
    fs,
    path::{Path, PathBuf},
};

use shardpack_manifests::{
    Digest, Manifest, PackageSet,
    manifest::{MANIFEST_FILE, MAX_MANIFEST_BYTES},
    set::{MAX_SET_BYTES, SET_FILE},
    signature::{MAX_SIGNATURE_BYTES, SIGNATURE_FILE},
    verify::{Problem, check_member, read_document},
};

use super::PushError;
use crate::protocol::PackageKey;

/// A set's document.
pub(super) struct Set {
    pub(super) document: PackageSet,
    pub(super) bytes: Vec<u8>,
}

/// A package to be sent.
pub(super) struct Package {
    pub(super) path: PathBuf,
    pub(super) key: PackageKey,
    pub(super) manifest: Manifest,
    pub(super) manifest_bytes: Vec<u8>,
    /// Bytes of `model.sig`; empty without one.
    pub(super) signature: Vec<u8>,
}

pub(super) fn open_set(directory: &Path) -> Result<Set, PushError> {
    let wrong = |problem| PushError::Set { path: directory.to_owned(), problem };
    let bytes = read_document(&directory.join(SET_FILE), MAX_SET_BYTES).map_err(wrong)?;
    let document = PackageSet::parse(&bytes)
        .map_err(|source| wrong(Problem::Document { file: SET_FILE.to_owned(), source }))?;
    Ok(Set { document, bytes })
}

pub(super) fn open_package(directory: &Path, set: &Set, rank: u32) -> Result<Package, PushError> {
    let entry = &set.document.packages[rank as usize];
    let path = directory.join(&entry.directory);
    let wrong = |problem| PushError::Set { path: path.clone(), problem };
    let manifest_bytes =
        read_document(&path.join(MANIFEST_FILE), MAX_MANIFEST_BYTES).map_err(wrong)?;
    let found = Digest::of(&manifest_bytes);
    if found != entry.manifest {
        return Err(wrong(Problem::ManifestDiffers { expected: entry.manifest, found }));
    }
    let manifest = Manifest::parse(&manifest_bytes)
        .map_err(|source| wrong(Problem::Document { file: MANIFEST_FILE.to_owned(), source }))?;
    if let Some(problem) = check_member(&set.document, rank, &manifest, None).pop() {
        return Err(wrong(problem));
    }
    // Lengths only: the node checks every byte.
    for entry in &manifest.files {
        let file = entry.name.clone();
        match fs::symlink_metadata(path.join(&file)) {
            Err(_) => return Err(wrong(Problem::Missing { file })),
            Ok(metadata) if !metadata.is_file() => {
                return Err(wrong(Problem::NotRegular { file, kind: "a link or a directory" }));
            }
            Ok(metadata) if metadata.len() != entry.size => {
                let (expected, found) = (entry.size, metadata.len());
                return Err(wrong(Problem::Length { file, expected, found }));
            }
            Ok(_) => {}
        }
    }
    let signature = match read_document(&path.join(SIGNATURE_FILE), MAX_SIGNATURE_BYTES) {
        Ok(bytes) => bytes,
        Err(Problem::Missing { .. }) => Vec::new(),
        Err(problem) => return Err(wrong(problem)),
    };
    let key = PackageKey { layout: manifest.ids.layout, rank };
    Ok(Package { path, key, manifest, manifest_bytes, signature })
}
