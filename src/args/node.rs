//! Arguments of `node`.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
};

use clap::Args;

use super::EngineChoice;

/// `node`.
#[derive(Args)]
#[command(after_help = "\
On an address that other machines can reach, a node accepts only mutual TLS. At its first start it
prints the `shardpack cluster add` command to run on the controlling machine and the one-time token
that the command asks for; after that it accepts only that cluster's controllers. On a loopback
address it needs no cluster.

Examples:
  shardpack node --listen 192.168.1.11:7420 --store ~/shardpack   this machine, for others
  shardpack node --listen 0.0.0.0:7420 --advertise 10.0.0.11 --store ~/shardpack
                                             ranks use the cable's address
  shardpack node --listen 192.168.1.11:7420 --store ~/shardpack --reset   leave the cluster
  shardpack node --listen 127.0.0.1:7420 --store ~/packages-0     a second node on this machine")]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of the command line")]
pub(crate) struct NodeArgs {
    /// Address to listen on; port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:7420", value_name = "HOST:PORT")]
    pub listen: SocketAddr,
    /// Folder of this node's packages, its key and its cluster membership.
    #[arg(long, value_name = "FOLDER")]
    pub store: PathBuf,
    /// Address of this machine on which its ranks listen; the server and the other nodes must be
    /// able to reach it. The address of --listen by default.
    #[arg(long, value_name = "IP")]
    pub advertise: Option<IpAddr>,
    /// Require mutual TLS on a loopback address too.
    #[arg(long)]
    pub tls: bool,
    /// Announce this node on the local network by multicast DNS until it has joined a cluster, so
    /// that `shardpack cluster add` needs no address.
    #[arg(long)]
    pub announce: bool,
    /// Forget the cluster and the key, and print a new token.
    #[arg(long)]
    pub reset: bool,
    /// Seconds for which a printed token is valid.
    #[arg(long, default_value_t = 3600, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(..=604_800))]
    pub token_ttl: u64,
    /// Threads of each rank that runs here; all cores by default.
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// The engine.
    #[command(flatten)]
    pub engine: EngineChoice,
    /// Print the address as JSON on standard output once listening.
    #[arg(long)]
    pub json: bool,
}
