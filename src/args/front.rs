//! Arguments of `front`.

use std::path::PathBuf;

use clap::Args;

/// `front`.
#[derive(Args)]
pub(crate) struct FrontArgs {
    /// What to serve, and how.
    pub assignment: PathBuf,
    /// A package of the set, for its tokenizer and template.
    #[arg(long, value_name = "FOLDER")]
    pub package: PathBuf,
    /// The node's key and membership.
    #[arg(long, value_name = "FOLDER")]
    pub identity: Option<PathBuf>,
}
