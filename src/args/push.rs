//! Arguments of `push`.

use std::path::PathBuf;

use clap::Args;

use super::{ClusterChoice, shared::OutputForm};

/// `push-hub`.
#[derive(Args)]
#[command(after_help = "\
HF_TOKEN needs write access. `serve ORGANISATION/NAME` serves the set again, verified.

Examples:
  shardpack push-hub llama-70b my-organisation/llama-70b-shardpack --private")]
pub(crate) struct PushHubArgs {
    /// The package set.
    pub set: PathBuf,
    /// The repository, organisation/name or organisation/name@branch; created unless it is there.
    #[arg(value_name = "REPOSITORY")]
    pub repository: String,
    /// Let only its owner see the repository, if it is created.
    #[arg(long)]
    pub private: bool,
    /// The form of the result.
    #[command(flatten)]
    pub form: OutputForm,
}

/// `pull-hub`.
#[derive(Args)]
#[command(after_help = "\
The set goes to the hub's cache; the result is its folder there. Every file is verified.

Examples:
  shardpack pull-hub my-organisation/llama-70b-shardpack            the whole set
  shardpack pull-hub my-organisation/llama-70b-shardpack --rank 1   one node's package")]
pub(crate) struct PullHubArgs {
    /// The repository, organisation/name or organisation/name@revision.
    #[arg(value_name = "REPOSITORY")]
    pub repository: String,
    /// Fetch the package of this rank alone, with the set's documents.
    #[arg(long, value_name = "RANK")]
    pub rank: Option<u32>,
    /// The form of the result.
    #[command(flatten)]
    pub form: OutputForm,
}

/// `push`.
#[derive(Args)]
#[command(after_help = "\
Run it again after an interruption: what has arrived is not sent again.

Examples:
  shardpack push llama-70b --to studio-1,studio-2                 members of the cluster, by name
  shardpack push llama-70b --to 192.168.1.11:7420,192.168.1.12:7420   or by address
  shardpack push llama-70b --to 127.0.0.1:7420,127.0.0.1:7421     nodes on this machine")]
pub(crate) struct PushArgs {
    /// The package set.
    pub set: PathBuf,
    /// One node per package, in rank order: members by name or address, or loopback addresses.
    #[arg(
        long,
        visible_alias = "nodes",
        required = true,
        value_delimiter = ',',
        value_name = "NODE,…"
    )]
    pub to: Vec<String>,
    /// The cluster of the nodes.
    #[command(flatten)]
    pub cluster: ClusterChoice,
    /// Connections to each node, 1 to 8; by default one for every two cores of this machine.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=8))]
    pub streams: Option<u8>,
    /// Show what would be sent and send nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// The form of the result.
    #[command(flatten)]
    pub form: OutputForm,
}
