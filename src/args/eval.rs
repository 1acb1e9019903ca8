//! Arguments of `eval`.

use std::path::PathBuf;

use clap::{ArgGroup, Args};

use super::shared::{OutputForm, ThreadArgs};

/// `eval`.
#[derive(Args)]
#[command(
    group(ArgGroup::new("what").required(true).multiple(true).args(["texts", "logits", "tasks"])),
    after_help = "\
Perplexity is computed as llama.cpp's perplexity tool does: windows of the context's length, of
which the second half counts.

Examples:
  shardpack eval llama-70b --text wiki.test.raw
  shardpack eval llama-70b --text wiki.test.raw --against llama-70b-16bit
  shardpack eval llama-70b-16bit --text wiki.test.raw --save-logits llama.logits
  shardpack eval llama-4bit llama-6bit llama-8bit --logits llama.logits --svg kl.svg
  shardpack eval llama-4bit llama-16bit --task samples_hellaswag.jsonl"
)]
pub(crate) struct EvalArgs {
    /// The package set; several are compared in a table.
    #[arg(required = true, value_name = "SET")]
    pub sets: Vec<PathBuf>,
    /// Text file to evaluate; may be given more than once.
    #[arg(long = "text", value_name = "FILE")]
    pub texts: Vec<PathBuf>,
    /// Reference set of the same model, usually with 16 bits, for the KL divergence.
    #[arg(long, value_name = "SET")]
    pub against: Option<PathBuf>,
    /// What --save-logits has written, in place of the reference set and the texts.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["texts", "against", "context"])]
    pub logits: Option<PathBuf>,
    /// Write the set's most likely tokens at every position, with their probabilities and what the
    /// others have together, for later runs with --logits.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["logits", "against", "terms"])]
    pub save_logits: Option<PathBuf>,
    /// Tokens that --save-logits keeps at every position; 8 bytes each.
    #[arg(long, value_name = "N", default_value_t = 256, requires = "save_logits", value_parser = clap::value_parser!(u32).range(1..))]
    pub top: u32,
    /// Items of multiple choice or of continuations, one JSON object a line: what
    /// `lm_eval --log_samples` writes, or query, choices and gold; context and continuation; or a
    /// text that its last word is asked of. May be given more than once.
    #[arg(
        long = "task",
        value_name = "FILE",
        conflicts_with_all = ["texts", "logits", "against", "save_logits", "context", "terms", "markdown", "svg"]
    )]
    pub tasks: Vec<PathBuf>,
    /// Tokens of a window; 512, or the model's longest sequence if that is less, by default.
    #[arg(long, value_name = "N")]
    pub context: Option<usize>,
    /// Compute with activations in 32 bits, not 8, before quantized weights: what is measured is then
    /// the weights alone.
    #[arg(long)]
    pub exact: bool,
    /// Evaluate every set twice, with activations in 32 bits and in 8, and tell what the weights
    /// cost and what the activations add.
    #[arg(long, conflicts_with = "exact")]
    pub terms: bool,
    /// Write the result as Markdown too.
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
    /// Draw KL divergence against bits per weight.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Threads.
    #[command(flatten)]
    pub threads: ThreadArgs,
    /// The form of the result.
    #[command(flatten)]
    pub form: OutputForm,
}
