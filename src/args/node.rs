//! Arguments of `node`.

use std::{net::SocketAddr, num::NonZero, path::PathBuf};

use clap::{Args, Subcommand, ValueEnum};
use shardpack_identity::{HostAddress, parse_socket_address};

use super::EngineChoice;

/// `node`.
#[derive(Args)]
#[command(
    after_help = "\
On an address that other machines can reach, a node accepts only mutual TLS. At its first start it
prints the `shardpack cluster add` command to run on the controlling machine and the one-time token
that the command asks for; after that it accepts only that cluster's controllers. On a loopback
address it needs no cluster.

Examples:
  shardpack node --listen 192.168.1.11:7420 --store ~/shardpack   this machine, for others
  shardpack node --listen 0.0.0.0:7420 --advertise 10.0.0.11 --store ~/shardpack
                                             ranks use the cable's address
  shardpack node --listen 192.168.1.11:7420 --store ~/shardpack --reset   leave the cluster
  shardpack node --listen 127.0.0.1:7420 --store ~/packages-0     a second node on this machine
  sudo shardpack node install --user llm --listen 192.168.1.11:7420 --store /srv/shardpack
                                             a service that starts with the machine",
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true
)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of the command line")]
pub(crate) struct NodeArgs {
    /// Make the node a service of the system, or end that.
    #[command(subcommand)]
    pub action: Option<NodeAction>,
    /// Address to listen on; port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:7420", value_name = "HOST:PORT", value_parser = parse_socket_address)]
    pub listen: SocketAddr,
    /// Folder of this node's packages, its key and its cluster membership.
    #[arg(long, value_name = "FOLDER", required = true)]
    pub store: Option<PathBuf>,
    /// Address of this machine on which its ranks listen; the server and the other nodes must be
    /// able to reach it. The address of --listen by default.
    #[arg(long, value_name = "IP")]
    pub advertise: Option<HostAddress>,
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
    /// Seconds for which a rank keeps its weights when the server that has it is gone, for the next one.
    #[arg(long, default_value_t = 120, value_name = "SECONDS")]
    pub keep_ranks: u64,
    /// Seconds after which a stored package is read again and compared with its manifest, so that damage is
    /// found before it is in the way; 0: never. A week by default.
    #[arg(long, default_value_t = 604_800, value_name = "SECONDS")]
    pub scrub_interval: u64,
    /// Most bytes that are read in a second for that, such as 20M.
    #[arg(long, default_value = "20M", value_name = "RATE", value_parser = super::push::rate)]
    pub scrub_rate: NonZero<u64>,
    /// The engine.
    #[command(flatten)]
    pub engine: EngineChoice,
    /// Print the address as JSON on standard output once listening.
    #[arg(long)]
    pub json: bool,
    /// Serve on the socket that standard input is, which the program before has left there.
    #[arg(long, hide = true)]
    pub socket_on_stdin: bool,
    /// End once the controller confirms this program: the one before watches.
    #[arg(long, hide = true, requires = "socket_on_stdin")]
    pub trial: bool,
}

/// What to do with the node's service.
#[derive(Subcommand)]
pub(crate) enum NodeAction {
    /// Make the node a service that starts with the machine (systemd, or launchd on a Mac), and
    /// start it.
    Install {
        /// How.
        #[command(flatten)]
        service: NodeServiceArgs,
        /// Arguments of `shardpack node`, last.
        #[arg(
            trailing_var_arg = true,
            allow_hyphen_values = true,
            required = true,
            value_name = "ARGUMENT"
        )]
        arguments: Vec<String>,
    },
    /// End the service. The store stays.
    Uninstall {
        /// How.
        #[command(flatten)]
        service: NodeServiceArgs,
    },
}

/// How a node is a service.
#[derive(Args)]
pub(crate) struct NodeServiceArgs {
    /// User that the node runs as; root by default.
    #[arg(long)]
    pub user: Option<String>,
    /// The program; this one by default.
    #[arg(long, value_name = "FILE")]
    pub program: Option<PathBuf>,
    /// Show the service's file and the commands, and change nothing.
    #[arg(long)]
    pub print: bool,
    /// The service manager; this system's by default.
    #[arg(long, value_enum, value_name = "MANAGER")]
    pub target: Option<ServiceTarget>,
}

/// A service manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ServiceTarget {
    /// Linux.
    Systemd,
    /// macOS.
    Launchd,
}
