//! Arguments of `keygen` and `sign`.

use std::path::PathBuf;

use clap::Args;

use super::shared::{OutputForm, ThreadArgs};

/// `keygen`.
#[derive(Args)]
#[command(after_help = "\
Example:
  shardpack keygen -o signer      writes signer (keep it secret) and signer.pub (give it away)")]
pub(crate) struct KeygenArgs {
    /// File to write the private key to; the public key is written next to it, with .pub added.
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    /// The form of the result.
    #[command(flatten)]
    pub form: OutputForm,
}

/// `sign`.
#[derive(Args)]
#[command(after_help = "\
Each package gets a model.sig, which `shardpack verify --key` checks, and so does
`model_signing verify key` (pip install model-signing pyOpenSSL).

Example:
  shardpack sign llama-70b --key signer")]
pub(crate) struct SignArgs {
    /// A package set or a package.
    pub path: PathBuf,
    /// Private key, as `shardpack keygen` writes it.
    #[arg(long, value_name = "FILE")]
    pub key: PathBuf,
    /// Threads.
    #[command(flatten)]
    pub threads: ThreadArgs,
    /// The form of the result.
    #[command(flatten)]
    pub form: OutputForm,
}
