//! Arguments of `bench`.

use std::path::PathBuf;

use clap::Args;

use super::{
    SpeculateName,
    shared::{KvFormat, OutputForm},
};

/// `bench`.
#[derive(Args)]
#[command(after_help = "\
Prompts are random tokens. All ranks run in this process, each on its share of the threads.

Examples:
  shardpack bench llama-1b
  shardpack bench llama-1b --contexts 16,4096 --batches 1,8 --json
  shardpack bench llama-1b --speculate auto       with speculative decoding by prompt lookup
  shardpack bench llama-70b --draft-model llama-1b")]
pub(crate) struct BenchArgs {
    /// The package set.
    pub set: PathBuf,
    /// Prompt lengths in tokens.
    #[arg(long, value_delimiter = ',', default_value = "16,256", value_name = "N,…")]
    pub contexts: Vec<usize>,
    /// Batch sizes: requests at a time.
    #[arg(long, value_delimiter = ',', default_value = "1,8", value_name = "N,…")]
    pub batches: Vec<usize>,
    /// Tokens to generate for each request.
    #[arg(long, default_value_t = 32, value_name = "N")]
    pub generate: usize,
    /// Type of the KV cache.
    #[arg(long, value_enum, default_value_t = KvFormat::F32)]
    pub kv_type: KvFormat,
    /// Measure speculative decoding too: each load without and with draft tokens, for answers
    /// sampled at temperature 1, greedy answers, and answers given as predicted output. All other
    /// figures are without draft tokens.
    #[arg(long, value_enum, default_value = "off", value_name = "WHEN")]
    pub speculate: SpeculateName,
    /// Measure speculative decoding with this draft model too, as in `serve`.
    #[arg(long, value_name = "SET")]
    pub draft_model: Option<PathBuf>,
    /// Threads of all ranks together; all cores by default.
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// The form of the result.
    #[command(flatten)]
    pub form: OutputForm,
}
