//! Arguments of `pull`.

use std::path::PathBuf;

use clap::Args;

use super::{ClusterChoice, shared::OutputForm};

/// `pull`.
#[derive(Args)]
#[command(after_help = "\
Every chunk is verified as it comes, and every package as a whole at the end. Run it again after an
interruption: what has arrived is not fetched again. Given the nodes of all ranks, the folder is a
package set as `convert` wrote it; given some, it holds their packages.

Examples:
  shardpack pull studio-1,studio-2 -o llama-70b            the set that they serve
  shardpack pull studio-1 -o backup --model llama-70b      one node's package
  shardpack pull 127.0.0.1:7420 -o set --json              a node on this machine")]
pub(crate) struct PullArgs {
    /// The nodes: members by name or address, or loopback addresses.
    #[arg(required = true, value_delimiter = ',', value_name = "NODE,…")]
    pub from: Vec<String>,
    /// The folder to write; each package goes to node-RANK in it.
    #[arg(short, long, value_name = "FOLDER")]
    pub output: PathBuf,
    /// The model whose current release is fetched; needed where a node has several.
    #[arg(long, value_name = "MODEL")]
    pub model: Option<String>,
    /// Fetch this package, current or not: LAYOUT-RANK, as `cluster fsck` names it. Of one node alone.
    #[arg(long, value_name = "PACKAGE", conflicts_with = "model")]
    pub package: Option<String>,
    /// The cluster of the nodes.
    #[command(flatten)]
    pub cluster: ClusterChoice,
    /// The form of the result.
    #[command(flatten)]
    pub form: OutputForm,
}
