//! Checking `model.sig` against a key and a package.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};

use rayon::prelude::*;

use super::{
    MAX_SIGNATURE_BYTES, ReadObserver, SIGNATURE_FILE,
    bundle::{self, Refused},
    hash::hash_file,
    key::VerifyingKey,
    statement,
};
use crate::verify::{Problem, read_document};

/// One thing wrong with a signature, or with what it signs.
#[derive(Debug, thiserror::Error)]
pub enum SignatureProblem {
    /// It cannot be read, or is not there.
    #[error(transparent)]
    Unreadable(#[from] Problem),
    /// Not a signature of this kind.
    #[error("{SIGNATURE_FILE}: {problem}")]
    Malformed {
        /// What is wrong.
        problem: String,
    },
    /// Made with another key.
    #[error(
        "{SIGNATURE_FILE}: made with another key: its key's hint is {found}, that of the given key {expected}"
    )]
    OtherKey {
        /// The given key's hint.
        expected: String,
        /// The signature's.
        found: String,
    },
    /// The key did not make it.
    #[error(
        "{SIGNATURE_FILE}: the signature is not the given key's; it was changed after it was made, or forged"
    )]
    Forged,
    /// A signed file that is not there.
    #[error("{file}: signed, but missing")]
    Missing {
        /// Its name.
        file: String,
    },
    /// A file that is there and not signed.
    #[error("{file}: not signed")]
    Unsigned {
        /// Its name.
        file: String,
    },
    /// A file that is not as it was signed.
    #[error("{file}: changed since it was signed")]
    Changed {
        /// Its name.
        file: String,
    },
}

/// Says everything that is wrong with the signature of the package in `directory`: that it is not
/// the key's, or that the files are not those that were signed. Files are hashed (SHA-256) in
/// parallel on the threads of the current pool.
#[must_use]
pub fn verify_signature(
    directory: &Path,
    key: &VerifyingKey,
    observe: ReadObserver,
) -> Vec<SignatureProblem> {
    match stated(directory, key) {
        Ok(stated) => compare(directory, &stated, observe),
        Err(problem) => vec![problem],
    }
}

fn stated(directory: &Path, key: &VerifyingKey) -> Result<statement::Stated, SignatureProblem> {
    let bytes = read_document(&directory.join(SIGNATURE_FILE), MAX_SIGNATURE_BYTES)?;
    let payload = bundle::open(&bytes, key).map_err(|refused| match refused {
        Refused::Malformed(problem) => SignatureProblem::Malformed { problem },
        Refused::OtherKey { found } => SignatureProblem::OtherKey { expected: key.hint(), found },
        Refused::Forged => SignatureProblem::Forged,
    })?;
    statement::parse(&payload).map_err(|problem| SignatureProblem::Malformed { problem })
}

fn compare(
    directory: &Path,
    stated: &statement::Stated,
    observe: ReadObserver,
) -> Vec<SignatureProblem> {
    let present = match list(directory) {
        Ok(present) => present,
        Err(source) => return vec![Problem::Unreadable { file: String::new(), source }.into()],
    };
    let check = |(name, expected): (&String, &[u8; 32])| {
        let path = directory.join(name);
        let file = name.clone();
        match fs::symlink_metadata(&path) {
            Ok(metadata) if !metadata.is_file() => {
                return Some(Problem::NotRegular { file, kind: "something else" }.into());
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Some(SignatureProblem::Missing { file });
            }
            _ => {}
        }
        match hash_file(&path, observe) {
            Ok(found) if found == *expected => None,
            Ok(_) => Some(SignatureProblem::Changed { file }),
            Err(source) => Some(Problem::Unreadable { file, source }.into()),
        }
    };
    let mut problems: Vec<SignatureProblem> =
        stated.files.par_iter().map(check).collect::<Vec<_>>().into_iter().flatten().collect();
    let unsigned = present
        .into_iter()
        .filter(|name| !stated.files.contains_key(name) && !stated.ignored.contains(name));
    problems.extend(unsigned.map(|file| SignatureProblem::Unsigned { file }));
    problems
}

/// Names in the directory, but the signature's own and those that start with a dot.
fn list(directory: &Path) -> io::Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(directory)? {
        let name = PathBuf::from(entry?.file_name()).to_string_lossy().into_owned();
        if name != SIGNATURE_FILE && !name.starts_with('.') {
            names.insert(name);
        }
    }
    Ok(names)
}
