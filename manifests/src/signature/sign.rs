//! Writing `model.sig` into a package.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

use rayon::prelude::*;

use super::{
    ReadObserver, SIGNATURE_FILE, bundle,
    hash::{hash_file_twice, sha256},
    key::SigningKey,
    statement::{self, Digests},
};
use crate::{
    digest::Digest,
    manifest::{FileEntry, MANIFEST_FILE, MAX_MANIFEST_BYTES, Manifest},
    verify::{EXTRA_FILES, Problem, read_document},
};

/// Why a package was not signed. What was there before is as it was.
#[derive(Debug, thiserror::Error)]
pub enum SignError {
    /// The package is not what its manifest says, and nobody should vouch for it.
    #[error("{}", .package.display())]
    Package {
        /// The package.
        package: PathBuf,
        /// What is wrong with it.
        source: Problem,
    },
    /// A file's bytes are not those that its manifest lists.
    #[error("{}: {file} has the BLAKE3 {found}, the manifest lists {expected}; verify the package", .package.display())]
    Changed {
        /// The package.
        package: PathBuf,
        /// The file.
        file: String,
        /// The manifest's.
        expected: Digest,
        /// The file's.
        found: Digest,
    },
    /// The signature cannot be written.
    #[error("{}: cannot be written", .path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl SignError {
    /// Whether the package was looked at and is wrong (else it could not be signed).
    #[must_use]
    pub const fn is_wrong(&self) -> bool {
        !matches!(
            self,
            Self::Write { .. } | Self::Package { source: Problem::Unreadable { .. }, .. }
        )
    }
}

/// Signs the package in `directory`: hashes every file, checks it against the manifest in the same
/// read, and writes [`SIGNATURE_FILE`], in place of an earlier one. Files are hashed in parallel on
/// the threads of the current pool.
pub fn sign_package(
    directory: &Path,
    key: &SigningKey,
    observe: ReadObserver,
) -> Result<(), SignError> {
    let package = |source| SignError::Package { package: directory.to_owned(), source };
    let bytes =
        read_document(&directory.join(MANIFEST_FILE), MAX_MANIFEST_BYTES).map_err(package)?;
    let manifest = Manifest::parse(&bytes)
        .map_err(|source| package(Problem::Document { file: MANIFEST_FILE.to_owned(), source }))?;
    check_names(directory, &manifest).map_err(package)?;
    let hash = |entry: &FileEntry| hash_entry(directory, entry, observe);
    let mut files: Digests = manifest.files.par_iter().map(hash).collect::<Result<_, _>>()?;
    files.insert(MANIFEST_FILE.to_owned(), sha256(&bytes));
    write_signature(directory, &manifest, &files, key)
}

/// Signs a package that was just written: `text` is its manifest, `sha256` holds the digest of every
/// file that it lists, as the writer computed them beside those of the manifest.
///
/// # Panics
/// When a digest is missing.
pub fn sign_hashed(
    directory: &Path,
    (manifest, text): (&Manifest, &[u8]),
    sha256_of: &BTreeMap<String, [u8; 32]>,
    key: &SigningKey,
) -> Result<(), SignError> {
    let listed = manifest.files.iter().map(|file| &file.name);
    let mut files: Digests = listed.map(|name| (name.clone(), sha256_of[name])).collect();
    files.insert(MANIFEST_FILE.to_owned(), sha256(text));
    write_signature(directory, manifest, &files, key)
}

fn write_signature(
    directory: &Path,
    manifest: &Manifest,
    files: &Digests,
    key: &SigningKey,
) -> Result<(), SignError> {
    let model = manifest.name.as_deref().unwrap_or("model");
    let name = format!("{model}, rank {} of {}", manifest.rank, manifest.layout.ranks);
    let text = bundle::write(&statement::write(&name, files), key);
    write(directory, text.as_bytes())
}

/// Hashes a file that the manifest lists and compares it with its entry.
fn hash_entry(
    directory: &Path,
    entry: &FileEntry,
    observe: ReadObserver,
) -> Result<(String, [u8; 32]), SignError> {
    let package = directory.to_owned();
    let file = entry.name.clone();
    match hash_file_twice(&directory.join(&file), observe) {
        Ok((sha256, blake3)) if blake3 == entry.blake3 => Ok((file, sha256)),
        Ok((_, found)) => Err(SignError::Changed { package, file, expected: entry.blake3, found }),
        Err(source) => {
            Err(SignError::Package { package, source: Problem::Unreadable { file, source } })
        }
    }
}

/// Refuses a package with files that are missing, no regular files, or not listed: other
/// verifiers refuse what is there and not signed.
fn check_names(directory: &Path, manifest: &Manifest) -> Result<(), Problem> {
    let unreadable = |source| Problem::Unreadable { file: String::new(), source };
    for entry in &manifest.files {
        let file = entry.name.clone();
        match fs::symlink_metadata(directory.join(&file)) {
            Ok(metadata) if !metadata.is_file() => {
                return Err(Problem::NotRegular { file, kind: "something else" });
            }
            Ok(metadata) if metadata.len() != entry.size => {
                let (expected, found) = (entry.size, metadata.len());
                return Err(Problem::Length { file, expected, found });
            }
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(Problem::Missing { file });
            }
            Err(source) => return Err(Problem::Unreadable { file, source }),
        }
    }
    for entry in fs::read_dir(directory).map_err(unreadable)? {
        let file = entry.map_err(unreadable)?.file_name().to_string_lossy().into_owned();
        let known = file.starts_with('.')
            || EXTRA_FILES.contains(&file.as_str())
            || manifest.file(&file).is_some();
        if !known {
            return Err(Problem::Extra { file });
        }
    }
    Ok(())
}

/// Writes the signature under a temporary name and gives it its own in one rename.
fn write(directory: &Path, bytes: &[u8]) -> Result<(), SignError> {
    let path = directory.join(SIGNATURE_FILE);
    let temporary = directory.join(format!(".{SIGNATURE_FILE}.partial"));
    let written = || {
        let mut file = File::create(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&temporary, &path)?;
        File::open(directory)?.sync_all()
    };
    written().map_err(|source| SignError::Write { path: path.clone(), source })
}
