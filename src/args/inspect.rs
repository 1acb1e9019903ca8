//! Arguments of `inspect`.

use std::path::PathBuf;

use clap::Args;

use super::shared::ListingArgs;

/// `inspect`.
#[derive(Args)]
pub(crate) struct InspectArgs {
    /// A package set or a package.
    pub path: PathBuf,
    /// What is listed.
    #[command(flatten)]
    pub listing: ListingArgs,
}
