//! Arguments of `rank`.

use std::path::PathBuf;

use clap::Args;
use shardpack_identity::HostAddress;

use super::{EngineChoice, shared::ThreadArgs};

/// `rank`.
#[derive(Args)]
pub(crate) struct RankArgs {
    /// The package; with --stream, an empty folder for its documents.
    pub package: PathBuf,
    /// The package comes over connections from the front, and is described here in JSON.
    #[arg(long, value_name = "JSON")]
    pub stream: Option<String>,
    /// Threads.
    #[command(flatten)]
    pub threads: ThreadArgs,
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1", value_name = "IP")]
    pub bind: HostAddress,
    /// The node's key and membership; connections to the front and to peers then use TLS.
    #[arg(long, value_name = "FOLDER")]
    pub identity: Option<PathBuf>,
    /// Seconds for which weights are kept when the front has gone, for another one.
    #[arg(long, default_value_t = 0, value_name = "SECONDS")]
    pub keep: u64,
    /// The engine.
    #[command(flatten)]
    pub engine: EngineChoice,
}
