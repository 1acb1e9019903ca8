//! Arguments of `eval`.

use std::path::PathBuf;

use clap::Args;

use super::shared::{OutputForm, ThreadArgs};

/// `eval`.
#[derive(Args)]
#[command(after_help = "\
Perplexity is computed as llama.cpp's perplexity tool does: windows of the context's length, of
which the second half counts.

Examples:
  shardpack eval llama-70b --text wiki.test.raw
  shardpack eval llama-70b --text wiki.test.raw --against llama-70b-16bit")]
pub(crate) struct EvalArgs {
    /// The package set.
    pub set: PathBuf,
    /// Text file to evaluate.
    #[arg(long, value_name = "FILE")]
    pub text: PathBuf,
    /// Reference set of the same model, usually with 16 bits, for the KL divergence.
    #[arg(long, value_name = "SET")]
    pub against: Option<PathBuf>,
    /// Tokens of a window; 512, or the model's longest sequence if that is less, by default.
    #[arg(long, value_name = "N")]
    pub context: Option<usize>,
    /// Compute with activations in 32 bits, not 8, before quantized weights: what is measured is then
    /// the weights alone.
    #[arg(long)]
    pub exact: bool,
    /// Threads.
    #[command(flatten)]
    pub threads: ThreadArgs,
    /// The form of the result.
    #[command(flatten)]
    pub form: OutputForm,
}
