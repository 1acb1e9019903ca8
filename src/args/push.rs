//! Arguments of `push`.

use std::{num::NonZero, path::PathBuf};

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
Run it again after an interruption: what has arrived is not sent again. When every node holds its
package, the release becomes current on all of them or on none; `shardpack cluster rollback` goes
back.

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
    /// Most bytes that are sent in a second, over all nodes, such as 200M; at least 1M for each node.
    #[arg(long, value_name = "RATE", value_parser = rate)]
    pub bwlimit: Option<NonZero<u64>>,
    /// Send every node all of its files, also those that other nodes get too; by default such a file
    /// leaves this machine once, and each further node fetches it from the one before.
    #[arg(long)]
    pub no_relay: bool,
    /// Attempts to go on after a connection broke, in a row without a chunk that came through.
    #[arg(long, default_value_t = 4, value_name = "N")]
    pub retries: u32,
    /// Number of the release; by default one above the highest that a node knows. A node refuses a
    /// number that is not above its current one's.
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u64).range(1..1 << 53))]
    pub release: Option<u64>,
    /// Make the release current even where a newer one is.
    #[arg(long)]
    pub allow_rollback: bool,
    /// Show what would be sent and send nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// The form of the result.
    #[command(flatten)]
    pub form: OutputForm,
}

/// Bytes in a second: a number, and K, M or G for thousands, millions or billions.
pub(super) fn rate(text: &str) -> Result<NonZero<u64>, String> {
    let (number, unit) = match text.strip_suffix(['K', 'M', 'G']) {
        Some(number) if text.ends_with('K') => (number, 1_000),
        Some(number) if text.ends_with('M') => (number, 1_000_000),
        Some(number) => (number, 1_000_000_000),
        None => (text, 1),
    };
    let bytes = number.parse().ok().and_then(|number: u64| number.checked_mul(unit));
    bytes.and_then(NonZero::new).ok_or_else(|| {
        format!("expected bytes per second such as 500K, 200M or 1G, found {text:?}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_numbers_with_a_unit() {
        let bytes = |text| rate(text).ok().map(NonZero::get);
        assert_eq!(
            ["7", "500K", "200M", "1G"].map(bytes),
            [7, 500_000, 200_000_000, 1_000_000_000].map(Some)
        );
        assert_eq!(["0", "", "M", "1.5M", "-1", "1T", "99999999999G"].map(bytes), [None; 7]);
    }
}
