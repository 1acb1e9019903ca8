//! Arguments of `rank`.

use std::{net::IpAddr, path::PathBuf};

use clap::Args;

use super::{EngineChoice, shared::ThreadArgs};

/// `rank`.
#[derive(Args)]
pub(crate) struct RankArgs {
    /// The package.
    pub package: PathBuf,
    /// Threads.
    #[command(flatten)]
    pub threads: ThreadArgs,
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1", value_name = "IP")]
    pub bind: IpAddr,
    /// The node's key and membership; connections to the front and to peers then use TLS.
    #[arg(long, value_name = "FOLDER")]
    pub identity: Option<PathBuf>,
    /// The engine.
    #[command(flatten)]
    pub engine: EngineChoice,
}
