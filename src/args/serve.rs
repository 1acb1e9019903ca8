//! Arguments of the commands around a server: `serve`, `chat` and `keys`.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
};

use clap::{Args, Subcommand};

use shardpack_mlx::distributed::FIRST_PORT;

use super::{ClusterChoice, EngineChoice};

/// `serve`.
#[derive(Args)]
#[command(after_help = "\
Examples:
  shardpack serve llama-70b                                       all ranks on this machine
  shardpack serve llama-70b --nodes studio-1,studio-2             on nodes of the cluster
  shardpack serve llama-70b --nodes 127.0.0.1:7420,127.0.0.1:7421  on nodes of this machine
  shardpack serve llama-70b --engine mlx --collectives jaccl --hostfile macs.json --nodes a:7420,b:7420
  shardpack serve llama-70b --listen 0.0.0.0:8443 --keys keys.json \\
      --tls-cert cert.pem --tls-key key.pem                         for other machines
  shardpack serve llama-70b --script answers.json                   canned answers in its words
  shardpack serve --engine scripted answers.json                    canned answers, no model")]
pub(crate) struct ServeArgs {
    /// The package set; with --engine scripted, a file of answers.
    pub set: PathBuf,
    /// Nodes that hold the packages, in rank order: members by name or address, or loopback
    /// addresses; without it, this machine runs every rank.
    #[arg(long, value_delimiter = ',', value_name = "NODE,…")]
    pub nodes: Vec<String>,
    /// Whose nodes.
    #[command(flatten)]
    pub cluster: ClusterChoice,
    /// Address to serve on; port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:8080", value_name = "HOST:PORT")]
    pub listen: SocketAddr,
    /// The host alone, as other servers have it; with the port of --listen's default.
    #[arg(long, value_name = "IP", conflicts_with = "listen")]
    pub host: Option<IpAddr>,
    /// The port alone; with --listen's default host.
    #[arg(long, conflicts_with = "listen")]
    pub port: Option<u16>,
    /// Name of the model in the API; the set's name, or its folder's, by default.
    #[arg(long)]
    pub name: Option<String>,
    /// Further names under which clients may ask for it.
    #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
    pub alias: Vec<String>,
    /// File of answers to replay instead of computing any.
    #[arg(long, value_name = "FILE")]
    pub script: Option<PathBuf>,
    /// Certificate to speak TLS with, and its chain, in PEM; read again on SIGHUP or when it changes.
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// The certificate's private key in PEM, not encrypted.
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// File of API keys (`shardpack keys`); every request then needs one.
    #[arg(long, value_name = "FILE")]
    pub keys: Option<PathBuf>,
    /// Serve other machines without keys.
    #[arg(long)]
    pub insecure: bool,
    /// Origins whose web pages may ask; none by default.
    #[arg(long, value_delimiter = ',', value_name = "ORIGIN,…")]
    pub cors: Vec<String>,
    /// Answers at once, waiting ones counted; more are turned away.
    #[arg(long, default_value_t = 256, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub queue: u32,
    /// Seconds that a request may take.
    #[arg(long, default_value_t = 14_400, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub request_timeout: u64,
    /// Seconds that running requests get when the server is asked to stop.
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    pub drain_timeout: u64,
    /// Write a line of JSON for each request to standard error; nothing of what is said.
    #[arg(long)]
    pub log: bool,
    /// What computes.
    #[command(flatten)]
    pub engine: EngineChoice,
    /// Addresses and RDMA devices of the ranks, as `mlx.distributed_config` writes them, for
    /// --collectives ring or jaccl.
    #[arg(long, value_name = "FILE")]
    pub hostfile: Option<PathBuf>,
    /// Port of rank 0 for --collectives ring or jaccl; of a ring, further ranks have the next ones.
    #[arg(long, default_value_t = FIRST_PORT, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub collectives_port: u16,
    /// Threads of each rank that runs here; the cores shared out by default.
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Print the address as JSON on standard output once serving.
    #[arg(long)]
    pub json: bool,
}

/// `chat`.
#[derive(Args)]
#[command(after_help = "\
Lines go to the model; /clear forgets the conversation, /quit or Ctrl-D ends it.

Examples:
  shardpack chat llama-70b                          serves the set for as long as it lasts
  shardpack chat http://127.0.0.1:8080              talks to a running server
  echo 'John 3:16' | shardpack chat kjv             one answer for each line")]
pub(crate) struct ChatArgs {
    /// A server's URL, or a package set.
    pub target: String,
    /// What the model is told before the conversation.
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// The model to ask for; whichever is served by default.
    #[arg(long)]
    pub model: Option<String>,
    /// File that holds the API key.
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// File that keeps the conversation from one call to the next.
    #[arg(long, value_name = "FILE")]
    pub history: Option<PathBuf>,
    /// 0 is the likeliest answer; the model's own by default.
    #[arg(long)]
    pub temperature: Option<f64>,
    /// Most tokens of an answer.
    #[arg(long, value_name = "N")]
    pub max_tokens: Option<u32>,
}

/// `keys`.
#[derive(Args)]
#[command(after_help = "\
Examples:
  shardpack keys keys.json add laptop                            prints the key, once
  shardpack keys keys.json add grafana --scopes metrics
  shardpack keys keys.json list
  shardpack keys keys.json remove laptop")]
pub(crate) struct KeysArgs {
    /// The file; it holds the keys' hashes alone.
    pub file: PathBuf,
    /// What to do.
    #[command(subcommand)]
    pub action: KeyAction,
}

/// What to do with a file of keys.
#[derive(Subcommand)]
pub(crate) enum KeyAction {
    /// Make a key and print it; it cannot be shown again.
    Add {
        /// Whose it is.
        name: String,
        /// What it opens: infer, admin, metrics.
        #[arg(long, value_delimiter = ',', default_value = "infer", value_name = "SCOPE,…")]
        scopes: Vec<String>,
        /// Requests in a minute.
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
        requests_per_minute: Option<u32>,
        /// Tokens in a minute, of prompts and answers together.
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
        tokens_per_minute: Option<u32>,
        /// Requests at once.
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
        concurrency: Option<u32>,
    },
    /// Take a key out.
    Remove {
        /// Whose it is.
        name: String,
    },
    /// Show the keys' names, scopes and limits.
    List,
}
