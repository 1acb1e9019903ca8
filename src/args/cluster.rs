//! Arguments of `cluster`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::ClusterChoice;

/// `cluster`.
#[derive(Args)]
#[command(after_help = "\
The machine that pushes and serves controls the cluster: its cluster folder holds the keys. Anyone
who has the folder controls the cluster; copy it to control the cluster from a second machine.

Examples:
  shardpack cluster init                                            once, where you push and serve
  shardpack node --listen 192.168.1.11:7420 --store ~/shardpack     on each other machine
  shardpack cluster add 192.168.1.11:7420 --name studio-1           asks for the token it printed
  shardpack push llama-70b --to studio-1,studio-2
  shardpack serve llama-70b --nodes studio-1,studio-2
  shardpack cluster status")]
pub(crate) struct ClusterArgs {
    /// What to do.
    #[command(subcommand)]
    pub action: ClusterAction,
    /// Which cluster.
    #[command(flatten)]
    pub cluster: ClusterChoice,
    /// Print the result as JSON on standard output.
    #[arg(long, global = true)]
    pub json: bool,
}

const TOKEN: &str = "\
A token on the command line can be seen by other users of this machine and stays in the shell's
history, though it works only once. Other ways, in the order in which they are looked at:
  --token-file FILE
  SHARDPACK_JOIN_TOKEN in the environment
  the terminal, which does not show it, or a pipe

Examples:
  shardpack cluster add 192.168.1.11:7420 --name studio-1
  shardpack cluster add                                    a node that was started with --announce
  ssh studio-1 cat token.txt | shardpack cluster add 192.168.1.11:7420 --name studio-1";

/// What to do with a cluster.
#[derive(Subcommand)]
pub(crate) enum ClusterAction {
    /// Create a cluster: its certificate authority and this machine's key.
    Init,
    /// Add a node that waits for a cluster. Asks for the token that the node printed; from a pipe
    /// it reads one line.
    #[command(after_help = TOKEN)]
    Add {
        /// Address of the node. Without it, the local network is searched for a node that was
        /// started with --announce and has the token's key.
        #[arg(value_name = "HOST:PORT")]
        address: Option<String>,
        /// The token itself, or - to read it from standard input.
        #[arg(long, value_name = "TOKEN")]
        token: Option<String>,
        /// File whose first line is the token, or - for standard input.
        #[arg(long, value_name = "FILE", conflicts_with = "token")]
        token_file: Option<PathBuf>,
        /// Name of the node in the cluster; derived from its host by default.
        #[arg(long)]
        name: Option<String>,
    },
    /// Find nodes on the local network that wait for a cluster and were started with --announce.
    /// The addresses found are not authenticated; the join token is.
    Discover {
        /// Seconds to listen.
        #[arg(long, default_value_t = 3, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=60))]
        seconds: u64,
    },
    /// List the members.
    List,
    /// Show the state and the packages of each member.
    Status,
    /// Renew certificates of members, expired ones included; push and serve do so once a year.
    Renew {
        /// Names or addresses; all members by default.
        #[arg(value_name = "NODE")]
        nodes: Vec<String>,
    },
    /// Change the address of a member; it must answer there with its own key.
    Move {
        /// Its name or old address.
        #[arg(value_name = "NODE")]
        node: String,
        /// Its new address.
        #[arg(value_name = "HOST:PORT")]
        address: String,
    },
    /// Remove a node from the cluster; the node is told to forget the cluster.
    Remove {
        /// Its name or address.
        #[arg(value_name = "NODE")]
        node: String,
        /// Remove it even if it cannot be reached.
        #[arg(long)]
        force: bool,
    },
}
