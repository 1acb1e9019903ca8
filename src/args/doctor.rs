//! Arguments of `doctor`, and of the processes that it starts.

use std::path::PathBuf;

use super::{
    EngineChoice,
    shared::{MlxNetworkArgs, NodesArgs},
};
use clap::{Args, ValueEnum};

/// `doctor`.
#[derive(Args)]
#[command(after_help = "\
Exit codes: 0 no check failed, 1 a check failed, 2 the checks could not be run. A check that a
machine cannot run is skipped, and the report says why.

Examples:
  shardpack doctor                                          what the machine has
  shardpack doctor --self-test --report doctor.md           whether it computes correctly, and how fast
  shardpack doctor llama-70b --nodes studio-1,studio-2 --self-test  on every node, and between them")]
pub(crate) struct DoctorArgs {
    /// A package set that the nodes hold.
    #[arg(requires = "names")]
    pub set: Option<PathBuf>,
    /// The nodes.
    #[command(flatten)]
    pub nodes: NodesArgs,
    /// Test computing, reading and sending too; takes some minutes.
    #[arg(long)]
    pub self_test: bool,
    /// The network of MLX's own collectives, which are tested if it is given.
    #[command(flatten)]
    pub network: MlxNetworkArgs,
    /// Write the report to this file (Markdown) rather than to standard output.
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// Print the report as JSON on standard output.
    #[arg(long)]
    pub json: bool,
}

/// `self-test`.
#[derive(Args)]
pub(crate) struct SelfTestArgs {
    /// The rank's package.
    #[arg(required_unless_present = "probe")]
    pub package: Option<PathBuf>,
    /// Carry out one probe of this machine instead.
    #[arg(long, value_enum)]
    pub probe: Option<ProbeName>,
    /// The engine.
    #[command(flatten)]
    pub engine: EngineChoice,
}

/// What a probe looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ProbeName {
    /// MLX's operations against exact arithmetic.
    Kernels,
    /// Memory that is taken without copies.
    NoCopy,
    /// How fast memory is read.
    Bandwidth,
    /// How long it takes to wire memory.
    Wiring,
    /// How long the GPU may wait.
    Wait,
}
