//! What the user calls a source: a folder, or a model's name on the hub.

use std::path::{Path, PathBuf};

use shardpack_converter::{Pickles, Source, SourceError, Subfolder};

use crate::{args::SourceArgs, failure::Failure};

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

/// What is to be opened.
pub(crate) struct Input<'a> {
    /// A folder, a file, or a model's name on the hub.
    pub(crate) source: &'a Path,
    /// The part of it that the model stands in.
    pub(crate) subfolder: Option<&'a Subfolder>,
    /// Adapters to merge into it.
    pub(crate) adapters: &'a [PathBuf],
    /// Whether files of `torch.save` are read.
    pub(crate) pickles: Pickles,
    /// What happens to weights that come from the hub.
    pub(crate) keep: Keep,
}

impl<'a> Input<'a> {
    /// What the arguments say.
    pub(crate) fn of(args: &'a SourceArgs, keep: Keep) -> Self {
        Self {
            source: &args.path,
            subfolder: args.subfolder.as_ref(),
            adapters: &args.adapters,
            pickles: if args.allow_pickle { Pickles::Read } else { Pickles::Refuse },
            keep,
        }
    }
}

/// Opens a source and merges adapters into it. `spool` is the folder for weights that are not
/// kept.
pub(crate) fn open(input: &Input, spool: &Path) -> Result<Source, Failure> {
    let mut opened = open_base(input, spool)?;
    opened.merge_adapters(input.adapters).map_err(failure)?;
    Ok(opened)
}

#[cfg(feature = "hub")]
fn open_base(input: &Input, spool: &Path) -> Result<Source, Failure> {
    match crate::hub::parse(input.source) {
        Some(model) => crate::hub::open(model, input, spool),
        None => open_folder(input),
    }
}

#[cfg(not(feature = "hub"))]
fn open_base(input: &Input, _: &Path) -> Result<Source, Failure> {
    open_folder(input)
}

fn open_folder(input: &Input) -> Result<Source, Failure> {
    Source::open_part(input.source, input.subfolder, input.pickles).map_err(failure)
}

/// A source that was looked at and is wrong, or that could not be looked at.
pub(crate) fn failure(error: SourceError) -> Failure {
    if error.is_wrong() { Failure::wrong(error) } else { error.into() }
}
