//! Reading the documents of sets and packages, with errors for people.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, anyhow};
use shardpack_manifests::{
    Manifest, PackageSet,
    manifest::{MANIFEST_FILE, MAX_MANIFEST_BYTES},
    set::{MAX_SET_BYTES, SET_FILE},
};

use crate::failure::Failure;

/// What to give instead of a folder that is neither.
const HINT: &str =
    "give a package set (a folder with set.json) or a package (a folder with manifest.json)";

/// Whether a folder is a set (and not a package, or something else).
pub(crate) fn is_set(folder: &Path) -> bool {
    folder.join(SET_FILE).is_file()
}

/// The document of a set.
pub(crate) fn read_set(folder: &Path) -> Result<PackageSet, Failure> {
    let path = folder.join(SET_FILE);
    let bytes = read(&path, MAX_SET_BYTES)?;
    PackageSet::parse(&bytes).map_err(|error| wrong(&path, error))
}

/// The document of a package.
pub(crate) fn read_manifest(folder: &Path) -> Result<Manifest, Failure> {
    let path = folder.join(MANIFEST_FILE);
    let bytes = read(&path, MAX_MANIFEST_BYTES)?;
    Manifest::parse(&bytes).map_err(|error| wrong(&path, error))
}

/// The packages' folders of a set, in rank order.
pub(crate) fn folders(set_folder: &Path, set: &PackageSet) -> Vec<PathBuf> {
    set.packages.iter().map(|package| set_folder.join(&package.directory)).collect()
}

fn read(path: &Path, limit: u64) -> Result<Vec<u8>, Failure> {
    let shown = || path.display().to_string();
    let size = fs::metadata(path)
        .with_context(shown)
        .map_err(|error| Failure::from(error).hint(HINT))?
        .len();
    if size > limit {
        return Err(Failure::wrong(anyhow!(
            "{}: {size} bytes, at most {limit} are read",
            path.display()
        )));
    }
    Ok(fs::read(path).with_context(shown)?)
}

fn wrong(path: &Path, error: impl Into<anyhow::Error>) -> Failure {
    Failure::wrong(error.into().context(path.display().to_string()))
}
