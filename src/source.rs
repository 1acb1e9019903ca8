//! What the user calls a source: a folder, or a model's name on the hub.

use std::path::{Path, PathBuf};

use shardpack_converter::{Source, SourceError};

use crate::failure::Failure;

/// What happens to the weights of a model of the hub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keep {
    /// They are downloaded and stay in the cache.
    All,
    /// Their headers alone are read.
    Headers,
    /// They are here only while they are needed.
    Nothing,
}

/// Opens a folder or a model of the hub and merges adapters into it. `spool` is the folder for
/// weights that are not kept.
pub(crate) fn open(
    source: &Path,
    adapters: &[PathBuf],
    keep: Keep,
    spool: &Path,
) -> Result<Source, Failure> {
    let mut opened = open_base(source, keep, spool)?;
    opened.merge_adapters(adapters).map_err(failure)?;
    Ok(opened)
}

#[cfg(feature = "hub")]
fn open_base(source: &Path, keep: Keep, spool: &Path) -> Result<Source, Failure> {
    match crate::hub::name(source) {
        Some(name) => crate::hub::open(&name, keep, spool),
        None => Source::open(source).map_err(failure),
    }
}

#[cfg(not(feature = "hub"))]
fn open_base(source: &Path, _: Keep, _: &Path) -> Result<Source, Failure> {
    Source::open(source).map_err(failure)
}

/// A source that was looked at and is wrong, or that could not be looked at.
pub(crate) fn failure(error: SourceError) -> Failure {
    if error.is_wrong() { Failure::wrong(error) } else { error.into() }
}
