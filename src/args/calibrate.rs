//! Arguments of `calibrate`.

use std::path::PathBuf;

use clap::Args;

use super::shared::{BudgetArgs, OutputForm, SourceArgs};

/// Tokens that are read unless told otherwise: eight times the widest block of inputs whose moments are
/// measured together.
const TOKENS: usize = 65_536;

/// Tokens over which each matrix is rounded by itself unless told otherwise.
pub(crate) const SENSITIVITY_TOKENS: &str = "1024";

/// `calibrate`.
#[derive(Args)]
#[command(after_help = "\
The model is run layer by layer at 16 bits, so that memory holds one layer at a time. A calibration
that was interrupted goes on at the layer where it was.

Examples:
  shardpack calibrate ~/models/Llama-3.3-70B-Instruct -o llama-stats
  shardpack convert ~/models/Llama-3.3-70B-Instruct -o llama-70b --rounding gptq --stats llama-stats
  shardpack calibrate ./my-fine-tune -o stats --sensitivity      for convert --bpw 4.8 --stats stats
  shardpack calibrate ./my-fine-tune -o stats --text notes.txt --text code.txt --tokens 262144")]
pub(crate) struct CalibrateArgs {
    /// The model, or a package set of one node.
    #[command(flatten)]
    pub source: SourceArgs,
    /// Folder to write the statistics to; must not exist.
    #[arg(short = 'o', long = "output", value_name = "FOLDER")]
    pub output: PathBuf,
    /// The text.
    #[command(flatten)]
    pub text: CalibrationTextArgs,
    /// Also round each matrix by itself and measure how far answers move, over so many tokens: what
    /// `convert --bpw` and `--size` give out bits by.
    #[arg(long, value_name = "TOKENS", num_args = 0..=1, default_missing_value = SENSITIVITY_TOKENS)]
    pub sensitivity: Option<usize>,
    /// Write the mean squares of all inputs as an importance matrix of llama.cpp (imatrix) too.
    #[arg(long, value_name = "FILE")]
    pub imatrix_out: Option<PathBuf>,
    /// Memory and threads.
    #[command(flatten)]
    pub budget: BudgetArgs,
    /// The form of the result.
    #[command(flatten)]
    pub form: OutputForm,
}

/// What the model reads.
#[derive(Args, Clone)]
pub(crate) struct CalibrationTextArgs {
    /// Text file to calibrate with; may be given more than once. A built-in text of prose, code,
    /// conversations and several languages by default.
    #[arg(long = "text", value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Most tokens to read.
    #[arg(long, default_value_t = TOKENS, value_name = "N")]
    pub tokens: usize,
    /// Tokens of a sequence; 512, or the model's longest sequence if that is less, by default.
    #[arg(long, value_name = "N")]
    pub context: Option<usize>,
}

impl Default for CalibrationTextArgs {
    fn default() -> Self {
        Self { files: Vec::new(), tokens: TOKENS, context: None }
    }
}
