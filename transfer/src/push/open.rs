//! Reads a set's documents and checks its files before anything is sent.

use std::{
    fs,
    path::{Path, PathBuf},
};

use shardpack_identity::Endpoint;
use shardpack_manifests::{
    Digest, Manifest, PackageSet,
    manifest::{MANIFEST_FILE, MAX_MANIFEST_BYTES},
    set::PackageEntry,
    signature::{MAX_SIGNATURE_BYTES, SIGNATURE_FILE},
    verify::{Problem, check_member, read_document, read_set},
};

use super::{PushError, Target};
use crate::{
    protocol::PackageKey,
    release::{Release, ReleasePackage},
};

/// The set in a directory, its document read and parsed once.
#[derive(Debug)]
pub struct OpenSet {
    directory: PathBuf,
    document: PackageSet,
    /// The document as it is stored, which every node gets.
    pub(super) bytes: Vec<u8>,
}

impl OpenSet {
    /// Reads the document of the set in `directory`.
    pub fn open(directory: &Path) -> Result<Self, PushError> {
        let (document, bytes) = read_set(directory)
            .map_err(|problem| PushError::Set { path: directory.to_owned(), problem })?;
        Ok(Self { directory: directory.to_owned(), document, bytes })
    }

    /// Number of its packages.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.document.packages.len() as u32
    }

    /// The release of this set with that number.
    pub(super) fn release(&self, model: String, number: u64) -> Release {
        let layout = self.document.ids.layout;
        let package = |(rank, entry): (u32, &PackageEntry)| ReleasePackage {
            package: PackageKey { layout, rank },
            manifest: entry.manifest,
        };
        let packages = (0..).zip(&self.document.packages).map(package).collect();
        Release::new(model, number, Some(Digest::of(&self.bytes)), layout, packages)
    }

    /// One target per node in rank order.
    pub fn targets(&self, nodes: &[Endpoint]) -> Result<Vec<Target>, PushError> {
        if nodes.len() == self.document.packages.len() {
            Ok(Target::in_rank_order(nodes))
        } else {
            Err(PushError::Count { found: nodes.len(), ranks: self.ranks() })
        }
    }
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

pub(super) fn open_package(set: &OpenSet, rank: u32) -> Result<Package, PushError> {
    let entry = &set.document.packages[rank as usize];
    let path = set.directory.join(&entry.directory);
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
