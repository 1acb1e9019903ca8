//! Arguments of `cluster`.

use std::{path::PathBuf, str::FromStr, time::Duration};

use clap::{Args, Subcommand};

use super::ClusterChoice;

/// `cluster`.
#[derive(Args)]
#[command(after_help = "\
The machine that pushes and serves controls the cluster: its cluster folder holds the keys. Anyone
who has the folder controls the cluster; `export-controller` makes a second one, of which one acts.

Examples:
  shardpack cluster init                                            once, where you push and serve
  shardpack node --listen 192.168.1.11:7420 --store ~/shardpack     on each other machine
  shardpack cluster add 192.168.1.11:7420 --name studio-1           asks for the token it printed
  shardpack push llama-70b --to studio-1,studio-2
  shardpack serve llama-70b --nodes studio-1,studio-2
  shardpack cluster status
  shardpack cluster status --watch --server http://127.0.0.1:8080
  shardpack cluster health --server http://127.0.0.1:8080           for a cron job
  shardpack cluster events --since 12h                              what happened last night
  shardpack cluster serve llama-70b --nodes studio-1,studio-2 --on studio-1   a node serves
  shardpack cluster rollback                                        to the release before
  shardpack cluster gc --dry-run                                    what no release needs
  shardpack cluster fsck                                            every stored byte
  shardpack cluster upgrade                                         this program on all nodes
  shardpack cluster doctor                                          which cable goes where, what is wrong
  shardpack cluster wire                                            addresses for the cables")]
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

/// A running server.
#[derive(Args)]
pub(crate) struct ServerChoice {
    /// URL of a running `serve`.
    #[arg(long, value_name = "URL")]
    pub server: Option<String>,
    /// File that holds the server's API key.
    #[arg(long, value_name = "FILE", requires = "server")]
    pub key: Option<PathBuf>,
}

/// A time before now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ago(pub Duration);

impl FromStr for Ago {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let units = [("s", 1), ("m", 60), ("h", 60 * 60), ("d", 24 * 60 * 60)];
        let seconds = units.into_iter().find_map(|(unit, seconds)| {
            text.strip_suffix(unit)?.parse::<u64>().ok()?.checked_mul(seconds)
        });
        let seconds = seconds.ok_or_else(|| {
            format!(
                "{text:?} is no time: expected a number and a unit, such as 90s, 15m, 12h or 7d"
            )
        })?;
        Ok(Self(Duration::from_secs(seconds)))
    }
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

/// A server that nodes run.
#[derive(Args)]
pub(crate) struct FrontChoice {
    /// Name of its model.
    #[arg(value_name = "MODEL")]
    pub name: String,
    /// Nodes to look on, by name or address; all members by default.
    #[arg(long, value_delimiter = ',', value_name = "NODE,…")]
    pub nodes: Vec<String>,
}

/// Where the passphrase of an exported controller comes from.
#[derive(Args)]
pub(crate) struct PassphraseChoice {
    /// File whose first line is the passphrase, or - for standard input; by default the terminal, which
    /// does not show it, or a pipe.
    #[arg(long, value_name = "FILE")]
    pub passphrase_file: Option<PathBuf>,
}

const EXPORT: &str = "\
The file holds the cluster's authority and its members, encrypted with a key that Argon2id makes of
the passphrase (64 MiB, 3 passes). Whoever has both controls the cluster.

Examples:
  shardpack cluster export-controller studio.controller
  shardpack cluster export-controller studio.controller --passphrase-file passphrase.txt";

const IMPORT: &str = "\
The imported controller does nothing until `shardpack cluster handover` makes it the one that acts.

Examples:
  shardpack cluster import-controller studio.controller";

const HANDOVER: &str = "\
A majority of the members must accept. From then on they refuse changes by the controller before;
it may still look. Members that are away learn of it at their next contact with this machine.
Servers that nodes run go on. The same command on the other machine takes over again.

Examples:
  shardpack cluster handover
  shardpack cluster handover --name mini --force    where most members are lost";

const UPGRADE: &str = "\
Each node takes the program signed, beside its present one, and checks that it is for its system and
says its version. The present program starts it on trial, on the same port. When this command finds
it well, it takes the place, and the one before is kept as FILE.previous; otherwise the node goes
back by itself. A node that runs the program already is left alone.

Examples:
  shardpack cluster upgrade --dry-run
  shardpack cluster upgrade                                   this program, on all members
  shardpack cluster upgrade --binary ./shardpack-arm64 mini-1
  shardpack cluster upgrade --wait 600                        when their servers have ended";

/// `cluster upgrade`.
#[derive(Args)]
#[command(after_help = UPGRADE)]
pub(crate) struct UpgradeArgs {
    /// Names or addresses; all members by default.
    #[arg(value_name = "NODE")]
    pub nodes: Vec<String>,
    /// The program; this one by default.
    #[arg(long, value_name = "FILE")]
    pub binary: Option<PathBuf>,
    /// Show what would be upgraded and change nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// Seconds to wait for ranks that serve on a node to end by themselves.
    #[arg(long, default_value_t = 0, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(..=600))]
    pub wait: u64,
    /// End ranks that serve; servers that the node runs finish their requests and start again with it.
    #[arg(long)]
    pub force: bool,
    /// Seconds that the new program has to answer before a node goes back.
    #[arg(long, default_value_t = 60, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub timeout: u64,
}

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
    /// Show the state of each node within a second: program, packages, memory, disk, load, power, ranks
    /// and the last fault. Exit code 1 if a node was not reached or reports a problem.
    Status {
        /// Names or addresses; all members by default.
        #[arg(value_name = "NODE")]
        nodes: Vec<String>,
        /// Show it again and again, every 2 seconds or so many.
        #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2", value_parser = clap::value_parser!(u64).range(1..=3600))]
        watch: Option<u64>,
        /// A running `serve` to ask too.
        #[command(flatten)]
        front: ServerChoice,
    },
    /// One line and an exit code for a cron job: 0 if all is well, 1 if something is degraded, 2 if
    /// nothing is served.
    Health {
        /// Names or addresses; all members by default.
        #[arg(value_name = "NODE")]
        nodes: Vec<String>,
        /// A running `serve` to ask too.
        #[command(flatten)]
        front: ServerChoice,
    },
    /// What happened: the event logs of all nodes and of the servers that ran on this machine, by time.
    Events {
        /// Names or addresses; all members by default.
        #[arg(value_name = "NODE")]
        nodes: Vec<String>,
        /// How long ago the first event may be, such as 90s, 15m, 12h or 7d.
        #[arg(long, default_value = "24h", value_name = "TIME")]
        since: Ago,
        /// Kinds of events to show, such as `rank_failed` or `group_lost`; all by default.
        #[arg(long = "kind", value_delimiter = ',', value_name = "KIND,…")]
        kinds: Vec<String>,
    },
    /// Statistics of a running server.
    Stats {
        /// The network: latency and bandwidth of each pair of ranks, collectives and bytes of each token
        /// and step, and how evenly the ranks work.
        #[arg(long, required = true)]
        network: bool,
        /// URL of a running `serve`.
        #[arg(long, value_name = "URL")]
        server: String,
        /// File that holds the server's API key.
        #[arg(long, value_name = "FILE")]
        key: Option<PathBuf>,
    },
    /// Metrics of the whole cluster as text for Prometheus: nodes, ranks, and those of a server with the
    /// node of each rank as a label.
    Metrics {
        /// Names or addresses; all members by default.
        #[arg(value_name = "NODE")]
        nodes: Vec<String>,
        /// A running `serve` to ask too.
        #[command(flatten)]
        front: ServerChoice,
    },
    /// Look at the cables between the nodes: which ports they join, their speed, addresses and RDMA
    /// devices, and for each known fault what mends it. Nodes must hold a package. Exit code 1 if
    /// something is wrong.
    Doctor {
        /// Names or addresses; all members by default.
        #[arg(value_name = "NODE")]
        nodes: Vec<String>,
        /// URL of a running `serve` over these nodes: latency and bandwidth of each pair as it measured
        /// them, and what carries its messages.
        #[arg(long, value_name = "URL")]
        server: Option<String>,
        /// File that holds the server's API key.
        #[arg(long, value_name = "FILE", requires = "server")]
        key: Option<PathBuf>,
    },
    /// Propose an address for each end of each cable, a network of its own for every cable, and print
    /// the commands that set them. Nothing is changed.
    Wire {
        /// Names or addresses; all members by default.
        #[arg(value_name = "NODE")]
        nodes: Vec<String>,
    },
    /// Go back to the release before on all nodes of a model, or on none. Both stay on the nodes: once
    /// more goes forward again. An activation that was interrupted is finished instead.
    Rollback {
        /// The model; not needed where the nodes have one.
        model: Option<String>,
        /// Names or addresses; by default all members that have the model.
        #[arg(long, value_delimiter = ',', value_name = "NODE,…")]
        nodes: Vec<String>,
        /// Number of the release to go back to; by default the one before the current one.
        #[arg(long, value_name = "NUMBER")]
        to: Option<u64>,
    },
    /// Remove packages and leftovers of pushes that no release needs, no rank runs and no push fills.
    Gc {
        /// Names or addresses; all members by default.
        #[arg(value_name = "NODE")]
        nodes: Vec<String>,
        /// Show what would be removed and remove nothing.
        #[arg(long)]
        dry_run: bool,
        /// Releases to keep before the current one of each model.
        #[arg(long, default_value_t = 1, value_name = "N")]
        keep: usize,
        /// Hours for which a push that was interrupted, or a package that was never activated, stays.
        #[arg(long, default_value_t = 24, value_name = "HOURS")]
        older_than: u64,
    },
    /// Verify every chunk of every stored package and the record of releases. Exit code 1 if
    /// something is damaged.
    Fsck {
        /// Names or addresses; all members by default.
        #[arg(value_name = "NODE")]
        nodes: Vec<String>,
        /// Make a record of releases that cannot be read anew from the packages; the damaged file is
        /// kept.
        #[arg(long)]
        rebuild: bool,
    },
    /// Verify what nodes store and replace the chunks that are damaged, and only these: from other
    /// nodes that have them, else from a set on this machine. Exit code 1 if something remains damaged.
    Repair {
        /// Names or addresses; all members by default.
        #[arg(value_name = "NODE")]
        nodes: Vec<String>,
        /// A set on this machine, for chunks that no other node has.
        #[arg(long, value_name = "SET")]
        set: Option<PathBuf>,
    },
    /// Have a node serve a model: `serve` with --on NODE, whose arguments these are.
    Serve {
        /// Arguments of `shardpack serve`, with --on NODE.
        #[arg(
            trailing_var_arg = true,
            allow_hyphen_values = true,
            required = true,
            value_name = "ARGUMENT"
        )]
        arguments: Vec<String>,
    },
    /// List the servers that nodes run.
    Fronts {
        /// Names or addresses; all members by default.
        #[arg(value_name = "NODE")]
        nodes: Vec<String>,
    },
    /// Start a server that was stopped.
    Start {
        /// Which.
        #[command(flatten)]
        front: FrontChoice,
    },
    /// Stop a server that a node runs: requests finish, within its --drain-timeout. It stays stopped
    /// when its node starts again.
    #[command(visible_alias = "drain")]
    Stop {
        /// Which.
        #[command(flatten)]
        front: FrontChoice,
        /// Forget it too.
        #[arg(long)]
        forget: bool,
    },
    /// Stop a server and start it again.
    Restart {
        /// Which.
        #[command(flatten)]
        front: FrontChoice,
    },
    /// Print what a server that a node runs has written.
    Logs {
        /// Which.
        #[command(flatten)]
        front: FrontChoice,
        /// Lines to print, up to 1000.
        #[arg(long, default_value_t = 100, value_name = "N")]
        lines: usize,
        /// Go on with the lines that come.
        #[arg(long)]
        follow: bool,
    },
    /// Bring this program, or another file, to the nodes, one after the other.
    Upgrade(UpgradeArgs),
    /// Write this controller into an encrypted file, for a second machine.
    #[command(after_help = EXPORT)]
    ExportController {
        /// The file, which must not exist.
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// The passphrase.
        #[command(flatten)]
        passphrase: PassphraseChoice,
    },
    /// Make this machine a second controller, from the file that the first one wrote.
    #[command(after_help = IMPORT)]
    ImportController {
        /// The file.
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// The passphrase.
        #[command(flatten)]
        passphrase: PassphraseChoice,
    },
    /// Make this machine's controller the one that acts; the other one is refused from then on.
    #[command(after_help = HANDOVER)]
    Handover {
        /// What this machine is called in messages; its host name by default.
        #[arg(long)]
        name: Option<String>,
        /// Take over without a majority of the members.
        #[arg(long)]
        force: bool,
    },
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
