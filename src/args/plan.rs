//! Arguments of `plan`.

use std::path::PathBuf;

use clap::Args;

use super::{
    FormatArgs,
    shared::{ListingArgs, SourceArgs},
};

/// `plan`.
#[derive(Args)]
#[command(after_help = "\
Reads headers only. Exits with 1 if a node's memory is too small.

Example:
  shardpack plan ~/models/Llama-3.3-70B-Instruct --bits 4 --nodes a=64g,b=64g --context 16384

An architecture that is not known:
  shardpack plan ./new-model --scaffold-rules new.toml     rules based on the nearest known one
  $EDITOR new.toml                                         decide every point of `todo`
  shardpack plan ./new-model --rules new.toml              then convert with the same --rules")]
pub(crate) struct PlanArgs {
    /// The model.
    #[command(flatten)]
    pub source: SourceArgs,
    /// What would be written.
    #[command(flatten)]
    pub format: FormatArgs,
    /// Folder that `calibrate` has written, for --rounding gptq, --bpw and --size: checked against the
    /// model. Sizes of gptq are the same without.
    #[arg(long, value_name = "FOLDER")]
    pub stats: Option<PathBuf>,
    /// If no rules match the model: write a first version of rules for it to this file, which must
    /// not exist.
    #[arg(long, alias = "draft", value_name = "FILE")]
    pub scaffold_rules: Option<PathBuf>,
    /// What is listed.
    #[command(flatten)]
    pub listing: ListingArgs,
}
