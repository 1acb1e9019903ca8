//! Arguments of `cluster`, and the choice of a cluster that other commands share.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use shardpack_trust::JoinToken;

/// Which cluster.
#[derive(Args, Clone)]
pub(crate) struct ClusterChoice {
    /// Folder of the cluster's keys and members; shardpack/cluster in the user's configuration by
    /// default.
    #[arg(long = "cluster", env = "SHARDPACK_CLUSTER", value_name = "FOLDER", global = true)]
    pub folder: Option<PathBuf>,
}

/// `cluster`.
#[derive(Args)]
#[command(after_help = "\
The machine that pushes and serves controls the cluster: its folder holds the keys. Whoever has the
folder has the cluster; copy it to control it from a second machine.

Examples:
  shardpack cluster init                                            once, where you push and serve
  shardpack node --listen 192.168.1.11:7420 --store ~/shardpack     on each other machine
  shardpack cluster add 192.168.1.11:7420 --token spj1_… --name studio-1   the line that it prints
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

/// What to do with a cluster.
#[derive(Subcommand)]
pub(crate) enum ClusterAction {
    /// Make a cluster: its authority and this machine's key.
    Init,
    /// Take in a node that waits for a cluster.
    Add {
        /// Where the node listens.
        #[arg(value_name = "HOST:PORT")]
        address: String,
        /// The token that the node printed when it started.
        #[arg(long)]
        token: JoinToken,
        /// What to call it; from its host by default.
        #[arg(long)]
        name: Option<String>,
    },
    /// Show the members.
    List,
    /// Ask each member how it is and what it holds.
    Status,
    /// Give members new certificates, as push and serve do once a year; those that have ended too.
    Renew {
        /// Names or addresses; all members by default.
        #[arg(value_name = "NODE")]
        nodes: Vec<String>,
    },
    /// Say that a member has another address now; it must answer there with its own key.
    Move {
        /// Its name or old address.
        #[arg(value_name = "NODE")]
        node: String,
        /// Where it listens.
        #[arg(value_name = "HOST:PORT")]
        address: String,
    },
    /// Put a node out: it is told to forget the cluster, and is never called again.
    Remove {
        /// Its name or address.
        #[arg(value_name = "NODE")]
        node: String,
        /// Also when it cannot be told.
        #[arg(long)]
        force: bool,
    },
}
