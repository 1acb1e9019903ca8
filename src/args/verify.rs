//! Arguments of `verify`.

use std::path::PathBuf;

use clap::Args;

use super::shared::{OutputForm, ThreadArgs};

/// `verify`.
#[derive(Args)]
#[command(after_help = "\
Examples:
  shardpack verify llama-70b                      the whole set
  shardpack verify llama-70b/node-0               one package
  shardpack verify llama-70b --key signer.pub     and that this key has signed it")]
pub(crate) struct VerifyArgs {
    /// A package set or a package.
    pub path: PathBuf,
    /// Public key that every package must be signed with.
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// Threads.
    #[command(flatten)]
    pub threads: ThreadArgs,
    /// The form of the result.
    #[command(flatten)]
    pub form: OutputForm,
}
