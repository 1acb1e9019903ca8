//! Arguments of the commands around a server: `serve`, `chat` and `keys`.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
};

use clap::{Args, Subcommand};

use super::{
    EngineChoice,
    shared::{MlxNetworkArgs, NodesArgs},
};

/// `serve`.
#[derive(Args)]
#[command(after_help = "\
Examples:
  shardpack serve llama-70b                                       all ranks on this machine
  shardpack serve org/model --bits 4                              converted when it is needed
  shardpack serve llama-70b --nodes studio-1,studio-2             on nodes of the cluster
  shardpack serve llama-70b --nodes 127.0.0.1:7420,127.0.0.1:7421  on nodes of this machine
  shardpack serve llama-70b --engine mlx --collectives jaccl --hostfile macs.json --nodes a:7420,b:7420
  shardpack serve llama-70b --listen 0.0.0.0:8443 --keys keys.json \\
      --tls-cert cert.pem --tls-key key.pem                         for other machines
  shardpack serve llama-70b --script answers.json                   scripted answers, the set's tokenizer
  shardpack serve --engine scripted answers.json                    scripted answers, no model")]
pub(crate) struct ServeArgs {
    /// A package set; a model, which is converted into the managed store when it is not there: its
    /// folder, a .gguf file, or organisation/model of the hub; or a name that `list` shows. With
    /// --engine scripted, a file of answers.
    pub set: PathBuf,
    /// Bits per weight of a model that is converted; 4 by default.
    #[arg(long, value_name = "BITS")]
    pub bits: Option<u32>,
    /// The nodes.
    #[command(flatten)]
    pub nodes: NodesArgs,
    /// Address to serve on; port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:8080", value_name = "HOST:PORT")]
    pub listen: SocketAddr,
    /// Host to serve on, with the default port of --listen.
    #[arg(long, value_name = "IP", conflicts_with = "listen")]
    pub host: Option<IpAddr>,
    /// Port to serve on, with the default host of --listen.
    #[arg(long, conflicts_with = "listen")]
    pub port: Option<u16>,
    /// Name of the model in the API; the set's name, or its folder's, by default.
    #[arg(long)]
    pub name: Option<String>,
    /// Further names of the model in the API.
    #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
    pub alias: Vec<String>,
    /// File of scripted answers to replay instead of computing any.
    #[arg(long, value_name = "FILE")]
    pub script: Option<PathBuf>,
    /// TLS certificate and its chain in PEM; read again on SIGHUP or when the file changes.
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// The TLS certificate's private key in PEM, not encrypted.
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// File of API keys (`shardpack keys`); every request then needs a key.
    #[arg(long, value_name = "FILE")]
    pub keys: Option<PathBuf>,
    /// Serve other machines without API keys.
    #[arg(long)]
    pub insecure: bool,
    /// Allowed CORS origins; none by default.
    #[arg(long, value_delimiter = ',', value_name = "ORIGIN,…")]
    pub cors: Vec<String>,
    /// Most requests at once, waiting ones included; further requests are refused.
    #[arg(long, default_value_t = 256, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub queue: u32,
    /// Seconds after which a request is aborted.
    #[arg(long, default_value_t = 14_400, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub request_timeout: u64,
    /// Seconds that running requests may take to finish when the server stops.
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    pub drain_timeout: u64,
    /// Write one line of JSON per request to standard error, without prompts and answers.
    #[arg(long)]
    pub log: bool,
    /// The engine.
    #[command(flatten)]
    pub engine: EngineChoice,
    /// The network of MLX's own collectives.
    #[command(flatten)]
    pub network: MlxNetworkArgs,
    /// Threads of each rank that runs here; by default the cores divided by the ranks.
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
  shardpack chat llama-70b                          serves the set while the chat runs
  shardpack chat http://127.0.0.1:8080              talks to a running server
  echo 'John 3:16' | shardpack chat kjv             one answer for each line")]
pub(crate) struct ChatArgs {
    /// A server's URL, or a package set.
    pub target: String,
    /// System prompt.
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Name of the model; by default the one that is served.
    #[arg(long)]
    pub model: Option<String>,
    /// File that holds the API key.
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// File that keeps the conversation between calls.
    #[arg(long, value_name = "FILE")]
    pub history: Option<PathBuf>,
    /// Sampling temperature; 0 is greedy. The model's own by default.
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
    /// The file; it holds only hashes of the keys.
    pub file: PathBuf,
    /// What to do.
    #[command(subcommand)]
    pub action: KeyAction,
}

/// What to do with a file of keys.
#[derive(Subcommand)]
pub(crate) enum KeyAction {
    /// Create a key and print it; it cannot be shown again.
    Add {
        /// Name of the key.
        name: String,
        /// Scopes of the key: infer, admin, metrics.
        #[arg(long, value_delimiter = ',', default_value = "infer", value_name = "SCOPE,…")]
        scopes: Vec<String>,
        /// Rate limit in requests per minute.
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
        requests_per_minute: Option<u32>,
        /// Rate limit in tokens per minute, prompts and answers together.
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
        tokens_per_minute: Option<u32>,
        /// Most requests at once.
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
        concurrency: Option<u32>,
    },
    /// Remove a key.
    Remove {
        /// Name of the key.
        name: String,
    },
    /// Show the keys' names, scopes and limits.
    List,
}
