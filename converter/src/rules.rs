//! The user's own rules, for models that the built-in ones do not match: reads and scaffolds them.

use std::{
    fs::{self, OpenOptions},
    io::{self, Write as _},
    path::{Path, PathBuf},
};

pub use shardpack_formats::OwnRules;
use shardpack_formats::{
    RulePack,
    normalise::{ResolveError, Scaffold, scaffold},
    rules::{MAX_RULES_BYTES, OwnRulesError},
};

use crate::source::Source;

/// Why a rule file cannot be used, or not be scaffolded.
#[derive(Debug, thiserror::Error)]
pub enum RulesError {
    /// The file cannot be read or written.
    #[error("{}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// More than any rule file has.
    #[error("{}: {size} bytes; a rule file has at most {MAX_RULES_BYTES}", .path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        size: u64,
    },
    /// A slip in the file.
    #[error("{}", .path.display())]
    Rules {
        /// The file.
        path: PathBuf,
        /// Where and what.
        source: OwnRulesError,
    },
    /// No rules can be scaffolded for the model.
    #[error(transparent)]
    Resolve(#[from] ResolveError),
}

impl RulesError {
    /// Whether the file was read and is wrong (else it could not be read).
    #[must_use]
    pub const fn is_wrong(&self) -> bool {
        !matches!(self, Self::File { .. })
    }
}

/// Reads a rule file.
pub fn read(path: &Path) -> Result<OwnRules, RulesError> {
    let file = |source| RulesError::File { path: path.to_owned(), source };
    let size = fs::metadata(path).map_err(file)?.len();
    if size > MAX_RULES_BYTES as u64 {
        return Err(RulesError::TooLarge { path: path.to_owned(), size });
    }
    let text = fs::read_to_string(path).map_err(file)?;
    OwnRules::parse(text.strip_prefix('\u{feff}').unwrap_or(&text))
        .map_err(|source| RulesError::Rules { path: path.to_owned(), source })
}

/// Scaffolds rules for a model, based on the nearest built-in ones, in a file that does not exist
/// yet.
pub fn write_scaffold(source: &Source, path: &Path) -> Result<Scaffold, RulesError> {
    let scaffold = scaffold(&source.config, &source.source_tensors(), &RulePack::builtin())?;
    let file = OpenOptions::new().write(true).create_new(true).open(path);
    file.and_then(|mut file| file.write_all(scaffold.text.as_bytes()))
        .map_err(|source| RulesError::File { path: path.to_owned(), source })?;
    Ok(scaffold)
}
