//! Options that several commands take, once each; commands flatten them.

use std::path::PathBuf;

use anyhow::anyhow;
use clap::{Args, ValueEnum};
use shardpack_converter::{Nodes, Subfolder};
use shardpack_mlx::distributed::FIRST_PORT;
use shardpack_quantize::FloatFormat;

/// The form of a command's result.
#[derive(Args)]
pub(crate) struct OutputForm {
    /// Print the result as JSON on standard output.
    #[arg(long)]
    pub json: bool,
}

/// What `plan` and `inspect` list.
#[derive(Args)]
pub(crate) struct ListingArgs {
    /// List every tensor too.
    #[arg(long)]
    pub tensors: bool,
    /// The form of the result.
    #[command(flatten)]
    pub form: OutputForm,
}

/// Threads of a command that computes in its own process.
#[derive(Args)]
pub(crate) struct ThreadArgs {
    /// Threads to use; all cores by default.
    #[arg(long = "threads", value_name = "N")]
    pub count: Option<usize>,
}

/// Memory and threads of a command that goes through all weights.
#[derive(Args)]
pub(crate) struct BudgetArgs {
    /// Most memory to use, such as 512m or 4g; the model may be larger.
    #[arg(long, default_value = "512m", value_name = "BYTES")]
    pub memory: Size,
    /// Threads.
    #[command(flatten)]
    pub threads: ThreadArgs,
}

/// The model that `plan` and `convert` read.
#[derive(Args)]
pub(crate) struct SourceArgs {
    /// Folder of a Hugging Face model (config.json and .safetensors files), a .gguf file, or a
    /// model's name on the hub: organisation/model, organisation/model@revision, or
    /// organisation/model/FILE.gguf.
    #[arg(value_name = "SOURCE")]
    pub path: PathBuf,
    /// Adapter to merge into the weights, in PEFT's or MLX's format; may be given more than once.
    #[arg(long = "adapter", value_name = "FOLDER")]
    pub adapters: Vec<PathBuf>,
    /// Read .bin files of torch.save if the folder has no .safetensors. A restricted unpickler
    /// reads dictionaries of tensors, refuses everything else and runs no code.
    #[arg(long)]
    pub allow_pickle: bool,
    /// Folder below the source that holds the model, such as the text model of a vision-language
    /// repository; the tokenizer may be in it or at the top.
    #[arg(long, value_name = "FOLDER")]
    pub subfolder: Option<Subfolder>,
    /// Leave out a key of config.json that no rules know, because you know that it does not change
    /// the model; may be given more than once. The packages' manifests record it.
    #[arg(long = "ignore-config-key", value_name = "KEY")]
    pub ignored_config_keys: Vec<String>,
}

/// How a model is sharded over nodes.
#[derive(Args)]
pub(crate) struct ShardingArgs {
    /// Nodes to shard the model for: a number from 1 to 8, or a list with each node's memory, as
    /// name=RAM or name=RAM:USABLE (a=512g,b=256g:240g). Without USABLE, three quarters of the RAM
    /// count.
    #[arg(long, value_name = "NODES")]
    pub nodes: String,
    /// Pipeline stages: the nodes are divided, in order, into this many groups, each with
    /// consecutive layers. For links without RDMA, and for models that cannot be sharded over more
    /// nodes.
    #[arg(long, default_value_t = 1, value_name = "S")]
    pub stages: u32,
    /// Context length in tokens for which the nodes' memory must hold the KV cache; the model's
    /// longest by default.
    #[arg(long, value_name = "N")]
    pub context: Option<u32>,
}

impl ShardingArgs {
    /// The nodes.
    pub(crate) fn parse_nodes(&self) -> anyhow::Result<Nodes> {
        self.nodes.parse().map_err(|error| anyhow!("--nodes: {error}"))
    }
}

/// Where `convert` and `reshard` write.
#[derive(Args)]
pub(crate) struct SetOutputArgs {
    /// Folder to write the package set to; must not exist or be empty.
    #[arg(short = 'o', long = "output", value_name = "FOLDER")]
    pub folder: PathBuf,
}

/// The packages that `reshard` and `export` read.
#[derive(Args)]
pub(crate) struct PackagesArgs {
    /// A package set, a folder with all packages of one, or all packages one by one.
    #[arg(required = true, value_name = "SET")]
    pub paths: Vec<PathBuf>,
}

/// Which cluster.
#[derive(Args, Clone)]
pub(crate) struct ClusterChoice {
    /// Folder of the cluster's keys and members; shardpack/cluster in the user's configuration
    /// folder by default.
    #[arg(long = "cluster", env = "SHARDPACK_CLUSTER", value_name = "FOLDER", global = true)]
    pub folder: Option<PathBuf>,
}

/// The nodes of `serve` and `doctor`.
#[derive(Args)]
pub(crate) struct NodesArgs {
    /// Nodes that hold the packages, in rank order: members of the cluster by name or address, or
    /// loopback addresses. Without it, everything runs on this machine.
    #[arg(long = "nodes", requires = "set", value_delimiter = ',', value_name = "NODE,…")]
    pub names: Vec<String>,
    /// The cluster of the nodes.
    #[command(flatten)]
    pub cluster: ClusterChoice,
}

/// The network of MLX's own collectives, for `serve` and `doctor`.
#[derive(Args)]
pub(crate) struct MlxNetworkArgs {
    /// Addresses and RDMA devices of the ranks, as `mlx.distributed_config` writes them, for MLX's
    /// ring and JACCL.
    #[arg(long, requires = "set", value_name = "FILE")]
    pub hostfile: Option<PathBuf>,
    /// Port of rank 0 for MLX's ring and JACCL; in a ring, further ranks use the next ports.
    #[arg(long, default_value_t = FIRST_PORT, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub collectives_port: u16,
}

/// A number of bytes on the command line: `512m`, `4g`, `1t`, or plain bytes; k, m, g, t are
/// powers of 1024.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Size(pub(crate) u64);

impl std::str::FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bytes = shardpack_converter::plan::parse_bytes(text);
        bytes.map(Self).ok_or_else(|| format!("{text:?} is not a size such as 512m or 4g"))
    }
}

/// Float types on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum FloatType {
    /// Brain float, 16 bits.
    Bf16,
    /// IEEE half.
    F16,
    /// IEEE single.
    F32,
}

impl FloatType {
    /// The type as weight files spell it.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "BF16",
            Self::F16 => "F16",
            Self::F32 => "F32",
        }
    }
}

/// Forms of quantized groups on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum GroupFormat {
    /// Integers with a scale and a bias.
    Affine,
    /// E2M1 in groups of 32, scales are powers of two.
    Mxfp4,
    /// E2M1 in groups of 16, scales in E4M3.
    Nvfp4,
    /// E4M3 in groups of 32, scales are powers of two.
    Mxfp8,
}

impl GroupFormat {
    /// The float groups that it names.
    pub(crate) const fn float(self) -> Option<FloatFormat> {
        match self {
            Self::Affine => None,
            Self::Mxfp4 => Some(FloatFormat::Mxfp4),
            Self::Nvfp4 => Some(FloatFormat::Nvfp4),
            Self::Mxfp8 => Some(FloatFormat::Mxfp8),
        }
    }
}

/// Types of the KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum KvFormat {
    /// 32-bit floats.
    #[default]
    F32,
    /// IEEE half precision.
    F16,
    /// Brain float, 16 bits.
    Bf16,
    /// 8-bit integers with a scale for each head of each token.
    Q8,
}
