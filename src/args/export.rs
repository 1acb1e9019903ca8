//! Arguments of `export`.

use std::path::PathBuf;

use clap::Args;

use super::shared::{BudgetArgs, FloatType, OutputForm, PackagesArgs};

/// `export`.
#[derive(Args)]
#[command(
    group = clap::ArgGroup::new("form").required(true),
    after_help = "\
Examples:
  shardpack export llama-70b --mlx -o llama-70b-mlx     mlx_lm.generate --model llama-70b-mlx
  shardpack export llama-70b --hf -o llama-70b-bf16     a checkpoint for transformers"
)]
pub(crate) struct ExportArgs {
    /// The packages.
    #[command(flatten)]
    pub packages: PackagesArgs,
    /// Folder to write to; must not exist or be empty.
    #[arg(short, long, value_name = "FOLDER")]
    pub output: PathBuf,
    /// A model directory of mlx-lm, as quantized; it is also a package for one node.
    #[arg(long, group = "form")]
    pub mlx: bool,
    /// A Hugging Face checkpoint in floats.
    #[arg(long, group = "form")]
    pub hf: bool,
    /// Float type of --hf; that of the set's scales and unquantized weights by default.
    #[arg(long, value_enum, requires = "hf")]
    pub dtype: Option<FloatType>,
    /// Memory and threads.
    #[command(flatten)]
    pub budget: BudgetArgs,
    /// The form of the result.
    #[command(flatten)]
    pub form: OutputForm,
}
