//! Arguments of `logits`.

use std::path::PathBuf;

use clap::Args;

use super::{EngineChoice, shared::ThreadArgs};

/// `logits`.
#[derive(Args)]
#[command(after_help = "\
Example:
  echo '[1, 15, 27]' > ids.json && shardpack logits set --tokens ids.json -o logits.safetensors")]
pub(crate) struct LogitsArgs {
    /// The package set.
    pub set: PathBuf,
    /// A JSON list of token ids.
    #[arg(long, value_name = "FILE")]
    pub tokens: PathBuf,
    /// File to write: `logits`, f32, [tokens, vocabulary].
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    /// The engine.
    #[command(flatten)]
    pub engine: EngineChoice,
    /// Threads.
    #[command(flatten)]
    pub threads: ThreadArgs,
}
