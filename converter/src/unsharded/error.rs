//! Why packages cannot be read as one model.

use std::path::PathBuf;

use shardpack_formats::normalise::ResolveError;
use shardpack_manifests::{Digest, verify::Problem};

use crate::plan::PlanError;

/// Why packages cannot be read as one model.
#[derive(Debug, thiserror::Error)]
pub enum UnshardError {
    /// The path is neither a set nor a package nor a folder of packages.
    #[error(
        "{}: neither a package set (set.json), nor a package (manifest.json), nor a folder of packages", .0.display()
    )]
    NoPackages(PathBuf),
    /// A document or a file of a package is missing, damaged or cannot be read.
    #[error("{}", .package.display())]
    Package {
        /// The package, or the set.
        package: PathBuf,
        /// What is wrong.
        source: Problem,
    },
    /// Packages of different sets.
    #[error("{} does not belong with {}: {what} differs", .package.display(), .first.display())]
    Different {
        /// The package.
        package: PathBuf,
        /// The package that it was compared with.
        first: PathBuf,
        /// What differs.
        what: &'static str,
    },
    /// The same rank twice.
    #[error("{} and {} both hold rank {rank}", .first.display(), .second.display())]
    Twice {
        /// The rank.
        rank: u32,
        /// One package.
        first: PathBuf,
        /// The other package.
        second: PathBuf,
    },
    /// Not all packages of the set are there.
    #[error("packages are missing: of {ranks} ranks, those of rank {} were not given", list(.missing))]
    Incomplete {
        /// Ranks of the set.
        ranks: u32,
        /// Those without a package.
        missing: Vec<u32>,
    },
    /// The packages do not hold what a tensor needs.
    #[error("tensor {tensor:?}: {problem}")]
    Tensor {
        /// The tensor.
        tensor: String,
        /// What is wrong.
        problem: String,
    },
    /// The configuration of the packages is none that the rules know.
    #[error("{}: config.json", .package.display())]
    Resolve {
        /// The package.
        package: PathBuf,
        /// Why.
        source: ResolveError,
    },
    /// The configuration cannot be used at all.
    #[error("{}: config.json: {problem}", .package.display())]
    Config {
        /// The package.
        package: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// The package's own rules cannot be used.
    #[error("{}: rules.toml: {problem}", .package.display())]
    Rules {
        /// The package.
        package: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// The rules make another architecture of the configuration than the manifest states.
    #[error(
        "{}: this version reads another architecture from config.json than the manifest states; convert the source again", .0.display()
    )]
    Architecture(PathBuf),
    /// The unsharded tensors are not those that the packages name.
    #[error("the unsharded tensors have the {what} id {found}, the packages name {expected}")]
    WrongId {
        /// Which id.
        what: &'static str,
        /// The packages'.
        expected: Digest,
        /// That of what they hold.
        found: Digest,
    },
    /// It cannot be sharded as asked.
    #[error(transparent)]
    Plan(#[from] PlanError),
}

impl UnshardError {
    /// Whether the packages were looked at and are wrong (else they could not be looked at).
    #[must_use]
    pub const fn is_wrong(&self) -> bool {
        !matches!(
            self,
            Self::NoPackages(_)
                | Self::Package { source: Problem::Unreadable { .. }, .. }
                | Self::Plan(PlanError::Option { .. } | PlanError::Stages { .. })
        )
    }
}

fn list(ranks: &[u32]) -> String {
    ranks.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
