//! Arguments of the commands around the managed store: `list`, `rm` and `du`.

use clap::Args;

use super::shared::OutputForm;

/// `list` and `du`.
#[derive(Args)]
#[command(after_help = "\
Models are kept below SHARDPACK_MODELS, or shardpack/models in the user's data folder.")]
pub(crate) struct StoreArgs {
    /// The form of the result.
    #[command(flatten)]
    pub form: OutputForm,
}

/// `rm`.
#[derive(Args)]
#[command(after_help = "\
Examples:
  shardpack list
  shardpack rm org--model-4bit")]
pub(crate) struct RemoveArgs {
    /// Names of models, as `list` shows them.
    #[arg(required = true, value_name = "NAME")]
    pub names: Vec<String>,
}
