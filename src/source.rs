//! Opens a source: a local folder or file, or a model on the hub.

#[cfg(feature = "hub")]
pub(crate) mod hub;

use std::path::{Path, PathBuf};

use shardpack_converter::{Pickles, Source, SourceError, Subfolder, store::PullSource};

use crate::{args::SourceArgs, failure::Failure};

/// Which weights of a hub model are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keep {
    /// All weights are downloaded and kept in the cache.
    All,
    /// Only headers are read.
    Headers,
    /// Each file is deleted after use.
    Nothing,
}

/// A source to open.
pub(crate) struct Input<'a> {
    /// A folder, a file, or a model's name on the hub.
    pub(crate) source: &'a Path,
    /// The subfolder that holds the model.
    pub(crate) subfolder: Option<&'a Subfolder>,
    /// Adapters to merge into it.
    pub(crate) adapters: &'a [PathBuf],
    /// Whether files of `torch.save` are read.
    pub(crate) pickles: Pickles,
    /// Keys of `config.json` to leave out.
    pub(crate) ignored_config_keys: &'a [String],
    /// Which weights of a hub model are kept.
    pub(crate) keep: Keep,
}

impl<'a> Input<'a> {
    /// The source that the arguments name.
    pub(crate) fn of(args: &'a SourceArgs, keep: Keep) -> Self {
        Self {
            source: &args.path,
            subfolder: args.subfolder.as_ref(),
            adapters: &args.adapters,
            pickles: if args.allow_pickle { Pickles::Read } else { Pickles::Refuse },
            ignored_config_keys: &args.ignored_config_keys,
            keep,
        }
    }
}

/// Opens a source and merges adapters into it. `spool` is the folder for weights that are not
/// kept.
pub(crate) fn open(input: &Input, spool: &Path) -> Result<Source, Failure> {
    let mut opened = open_base(input, spool)?;
    opened.ignore_config_keys(input.ignored_config_keys).map_err(failure)?;
    opened.merge_adapters(input.adapters).map_err(failure)?;
    Ok(opened)
}

/// What is pulled into the store for a model's name or address on the hub; none if it is neither.
#[cfg(feature = "hub")]
pub(crate) fn of_hub(given: &Path) -> Result<Option<PullSource>, Failure> {
    hub::parse(given)?.map(hub::pull_source).transpose()
}

/// Whether a text is a model's name or address on the hub.
#[cfg(feature = "hub")]
pub(crate) fn is_of_hub(given: &Path) -> Result<bool, Failure> {
    Ok(hub::parse(given)?.is_some())
}

/// The commit of a revision of a repository on the hub.
#[cfg(feature = "hub")]
pub(crate) fn newest_commit(repository: &str, revision: &str) -> Result<String, Failure> {
    hub::newest_commit(repository, revision)
}

/// Without the hub there is none.
#[cfg(not(feature = "hub"))]
pub(crate) fn newest_commit(_: &str, _: &str) -> Result<String, Failure> {
    Err(anyhow::anyhow!("this program was built without the feature `hub`").into())
}

/// Without the hub nothing is such a name.
#[cfg(not(feature = "hub"))]
#[expect(clippy::unnecessary_wraps, reason = "as with the hub")]
pub(crate) const fn of_hub(_: &Path) -> Result<Option<PullSource>, Failure> {
    Ok(None)
}

/// Without the hub nothing is such a name.
#[cfg(not(feature = "hub"))]
#[expect(clippy::unnecessary_wraps, reason = "as with the hub")]
pub(crate) const fn is_of_hub(_: &Path) -> Result<bool, Failure> {
    Ok(false)
}

#[cfg(feature = "hub")]
fn open_base(input: &Input, spool: &Path) -> Result<Source, Failure> {
    match hub::parse(input.source)? {
        Some(model) => hub::open(model, input, spool),
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

/// The failure for a source that is wrong, or that could not be read.
pub(crate) fn failure(error: SourceError) -> Failure {
    if error.is_wrong() { Failure::wrong(error) } else { error.into() }
}
