//! Arguments of `demo`.

use clap::Args;

use super::EngineChoice;

/// `demo`.
#[derive(Args)]
pub(crate) struct DemoArgs {
    /// Leave the server running and print its address.
    #[arg(long)]
    pub keep: bool,
    /// The engine.
    #[command(flatten)]
    pub engine: EngineChoice,
    /// What to ask; the model has memorised verses of the King James Bible.
    #[arg(long, default_value = "John 3:16", value_name = "TEXT")]
    pub ask: String,
}
