//! Arguments of `doctor`, and of the processes that it starts.

use std::path::PathBuf;

use clap::Args;
use shardpack_mlx::distributed::FIRST_PORT;

use super::{ClusterChoice, EngineChoice};

/// `doctor`.
#[derive(Args)]
#[command(after_help = "\
Exit codes: 0 nothing is wrong, 1 a check failed, 2 the checks could not be run. What cannot be
checked on a machine is skipped, and the report says why.

Examples:
  shardpack doctor                                          what there is
  shardpack doctor --self-test --report doctor.md           whether it computes right, and how fast
  shardpack doctor llama-70b --nodes studio-1,studio-2 --self-test  on every node, and between them")]
pub(crate) struct DoctorArgs {
    /// A package set that the nodes hold.
    #[arg(requires = "nodes")]
    pub set: Option<PathBuf>,
    /// The nodes to check, in rank order; without them, this machine.
    #[arg(long, requires = "set", value_delimiter = ',', value_name = "NODE,…")]
    pub nodes: Vec<String>,
    /// Whose nodes.
    #[command(flatten)]
    pub cluster: ClusterChoice,
    /// Compute, read and send too, rather than only look; takes about a minute.
    #[arg(long)]
    pub self_test: bool,
    /// Addresses and RDMA devices of the nodes, as `mlx.distributed_config` writes them: tests
    /// JACCL between them.
    #[arg(long, requires = "set", value_name = "FILE")]
    pub hostfile: Option<PathBuf>,
    /// Port of rank 0 for MLX's own collectives.
    #[arg(long, default_value_t = FIRST_PORT, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub collectives_port: u16,
    /// Write the report to this file (Markdown) rather than to standard output.
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// Print the report as JSON on standard output.
    #[arg(long)]
    pub json: bool,
}

/// `exam`.
#[derive(Args)]
pub(crate) struct ExamArgs {
    /// The rank's package.
    pub package: PathBuf,
    /// What computes.
    #[command(flatten)]
    pub engine: EngineChoice,
}
