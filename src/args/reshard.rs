//! Arguments of `reshard`.

use clap::Args;

use super::shared::{BudgetArgs, OutputForm, PackagesArgs, SetOutputArgs, ShardingArgs};

/// `reshard`.
#[derive(Args)]
#[command(after_help = "\
Nothing is quantized again: the result is what `convert --nodes --stages` writes from the source.

Examples:
  shardpack reshard llama-70b -o llama-70b-3 --nodes 3
  shardpack reshard llama-70b -o llama-70b-2x2 --nodes 4 --stages 2
  shardpack reshard from-mac-a/node-0 from-mac-b/node-1 -o llama-70b-4 --nodes 4")]
pub(crate) struct ReshardArgs {
    /// The packages.
    #[command(flatten)]
    pub packages: PackagesArgs,
    /// Where the set goes.
    #[command(flatten)]
    pub output: SetOutputArgs,
    /// How the model is sharded.
    #[command(flatten)]
    pub sharding: ShardingArgs,
    /// Memory and threads.
    #[command(flatten)]
    pub budget: BudgetArgs,
    /// The form of the result.
    #[command(flatten)]
    pub form: OutputForm,
}
