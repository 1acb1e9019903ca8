//! Arguments of the commands around a server: `serve` and `chat`.

use std::{net::SocketAddr, path::PathBuf};

use clap::Args;
use shardpack_identity::{HostAddress, parse_socket_address};

use super::{
    EngineChoice,
    shared::{MlxNetworkArgs, NodesArgs, Size},
};

/// `serve`.
#[expect(clippy::struct_excessive_bools, reason = "each is an option of its own")]
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
  shardpack serve llama-70b --nodes studio-1,studio-2 --on studio-1 --listen 192.168.1.11:8080 \\
      --keys keys.json                                              a node serves, this machine may leave
  shardpack serve llama-70b qwen3-32b kjv --on-demand --memory 96g  several models, loaded when they are asked for
  shardpack serve llama-70b qwen3-32b --nodes studio-1,studio-2,studio-3 --on-demand \\
      --place qwen3-32b=studio-3                                    several models on nodes
  shardpack serve llama-70b --script answers.json                   scripted answers, the set's tokenizer
  shardpack serve --engine scripted answers.json                    scripted answers, no model")]
pub(crate) struct ServeArgs {
    /// A package set; a model, which is converted into the managed store when it is not there: its
    /// folder, a .gguf file, or organisation/model of the hub; or a name that `list` shows. With
    /// --engine scripted, a file of answers.
    pub set: PathBuf,
    /// Further sets: each is a model of its own, and requests say which they mean.
    #[arg(value_name = "SET")]
    pub more: Vec<PathBuf>,
    /// Load a model when a request asks for it, rather than all at the start; where memory is short
    /// the one that was used least recently is unloaded first.
    #[arg(long)]
    pub on_demand: bool,
    /// Seconds without requests after which a model is unloaded; for ever by default.
    #[arg(long, value_name = "SECONDS", requires = "on_demand")]
    pub idle_timeout: Option<u64>,
    /// Models that are loaded at the start and never unloaded for others or for idleness.
    #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
    pub pin: Vec<String>,
    /// Share of a model in the places of --queue beside other loaded models; 1 by default.
    #[arg(long, value_delimiter = ',', value_name = "NAME=N,…")]
    pub priority: Vec<String>,
    /// Memory that all models may take together, such as 96g: of each node with --nodes, else of this
    /// machine. Three quarters of the machine's by default, of a node no more than it reports free.
    #[arg(long, value_name = "BYTES")]
    pub memory: Option<Size>,
    /// Nodes of a model among --nodes, in rank order; may be given once for each model. Where models come
    /// and go, and where there are several, those without it run where their packages are, on the nodes
    /// with the most free memory.
    #[arg(long, value_name = "NAME=NODE,…", requires = "names")]
    pub place: Vec<String>,
    /// Seconds that loading a model may take, and that a request waits for it.
    #[arg(long, default_value_t = 600, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub load_timeout: u64,
    /// Bits per weight of a model that is converted; 4 by default.
    #[arg(long, value_name = "BITS")]
    pub bits: Option<u32>,
    /// The nodes.
    #[command(flatten)]
    pub nodes: NodesArgs,
    /// Take the nodes' ranks from a server that has them; without it, it is named and nothing is
    /// started.
    #[arg(long, requires = "names")]
    pub take_over: bool,
    /// Node that runs the server, in place of this machine, until `cluster stop` ends it: it starts again
    /// with its node. The node holds a package of the set.
    #[arg(long, value_name = "NODE", requires = "names", conflicts_with_all = ["script", "take_over"])]
    pub on: Option<String>,
    /// Send each node its package straight into the memory of its rank, without its disk; what was pushed
    /// there is neither needed nor used. A rank that is started again is sent it again.
    #[arg(long, requires = "names", conflicts_with_all = ["script", "on"])]
    pub stream: bool,
    /// Leave the server in the background once it answers.
    #[arg(long, conflicts_with = "on")]
    pub detach: bool,
    /// Address to serve on; port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:8080", value_name = "HOST:PORT", value_parser = parse_socket_address)]
    pub listen: SocketAddr,
    /// Host to serve on, with the default port of --listen.
    #[arg(long, value_name = "IP", conflicts_with = "listen")]
    pub host: Option<HostAddress>,
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
    /// File of API keys (`shardpack keys`); every request then needs a key. Read again on SIGHUP or when
    /// the file changes.
    #[arg(long, value_name = "FILE")]
    pub keys: Option<PathBuf>,
    /// File that keeps what API keys have used (`shardpack usage`); without it that is forgotten with the
    /// server.
    #[arg(long, value_name = "FILE", conflicts_with = "on")]
    pub usage: Option<PathBuf>,
    /// Audit log: a line of JSON for each request, without prompts and answers, chained by hashes
    /// (`shardpack audit verify`). Opened anew on SIGHUP.
    #[arg(long, value_name = "FILE", conflicts_with = "on")]
    pub audit: Option<PathBuf>,
    /// Serve other machines without API keys.
    #[arg(long)]
    pub insecure: bool,
    /// Names under which a server without API keys may be asked, besides addresses, localhost, names without
    /// a dot and those that nobody can register (.local, .internal); others are refused, since a stranger's page
    /// could have such a name lead here.
    #[arg(long, value_delimiter = ',', value_name = "HOST,…")]
    pub allow_host: Vec<String>,
    /// Allowed CORS origins; none by default.
    #[arg(long, value_delimiter = ',', value_name = "ORIGIN,…")]
    pub cors: Vec<String>,
    /// Most requests at once, waiting ones included; further requests are refused.
    #[arg(long, default_value_t = 256, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub queue: u32,
    /// Seconds after which a request is aborted.
    #[arg(long, default_value_t = 14_400, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub request_timeout: u64,
    /// Seconds that requests wait for a lost rank to be replaced, with their streams held open; then they
    /// go on where they were. After that they fail with an error that clients retry.
    #[arg(long, default_value_t = 300, value_name = "SECONDS")]
    pub resume_timeout: u64,
    /// Seconds that running requests may take to finish when the server stops.
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    pub drain_timeout: u64,
    /// Write one line of JSON per request to standard error, without prompts and answers.
    #[arg(long)]
    pub log: bool,
    /// The engine.
    #[command(flatten)]
    pub engine: EngineChoice,
    /// Never send hidden states unencrypted between machines: no RDMA, and no collectives of MLX's
    /// own; TCP inside TLS instead.
    #[arg(long)]
    pub require_encryption: bool,
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

impl ServeArgs {
    /// The address to serve on.
    pub(crate) fn address(&self) -> SocketAddr {
        let host = self.host.unwrap_or(HostAddress::of(self.listen));
        host.at(self.port.unwrap_or(self.listen.port()))
    }
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
