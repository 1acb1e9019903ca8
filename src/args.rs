//! What the user typed, as types. Parsing only; no command is carried out here.

mod cluster;
mod doctor;
mod serve;

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
};

use clap::{Args, Parser, Subcommand, ValueEnum};
use shardpack_converter::Subfolder;

pub(crate) use cluster::{ClusterAction, ClusterArgs, ClusterChoice};
pub(crate) use doctor::{DoctorArgs, ExamArgs};
pub(crate) use serve::{ChatArgs, KeyAction, KeysArgs, ServeArgs};

/// Run the largest open models on a few machines: quantize, cut, push and serve.
#[derive(Parser)]
#[command(version, propagate_version = true, after_help = EXIT_CODES)]
pub(crate) struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

const EXIT_CODES: &str = "\
Exit codes: 0 done; 1 looked at the given model, package or set and it is wrong; 2 could not run.

Start with:  shardpack demo";

/// The commands, in the order in which a model meets them.
#[derive(Subcommand)]
pub(crate) enum Command {
    /// Convert, push and serve a small model on this machine, and ask it a question.
    Demo(DemoArgs),
    /// Show what a conversion would write and whether the nodes can hold it.
    Plan(PlanArgs),
    /// Quantize a model and cut it into one package per node.
    Convert(ConvertArgs),
    /// Cut packages again for another number of nodes, without the source.
    Reshard(ReshardArgs),
    /// Write packages as one model for other programs.
    Export(ExportArgs),
    /// Make a key that signs packages.
    Keygen(KeygenArgs),
    /// Sign every package of a set, so that others can tell whose it is.
    Sign(SignArgs),
    /// Check every byte of a package or a package set.
    Verify(VerifyArgs),
    /// Show what a package or a package set holds.
    Inspect(InspectArgs),
    /// Receive packages on this machine and run ranks of them.
    Node(NodeArgs),
    /// Make a cluster of machines, and take nodes into it.
    Cluster(ClusterArgs),
    /// Send each node its package.
    Push(PushArgs),
    /// Measure how fast a set runs on this machine.
    Bench(BenchArgs),
    /// Measure how well a set predicts a text, and how far it is from another set.
    Eval(EvalArgs),
    /// Install, list and check engines other than this program's own.
    Engine(EngineArgs),
    /// Check this machine, or every node of a set; the report can be attached to a bug.
    Doctor(DoctorArgs),
    /// Serve a model from all its packages behind an OpenAI-compatible API.
    Serve(Box<ServeArgs>),
    /// Talk to a server, or to a package set, from the terminal.
    Chat(ChatArgs),
    /// Make, list and remove API keys of a server.
    Keys(KeysArgs),
    /// Compute the logits of given tokens (for tests and comparisons).
    Logits(LogitsArgs),
    /// One rank of a group; started by `serve` and `node`.
    #[command(hide = true)]
    Rank(RankArgs),
    /// One rank of a self-test; started by `doctor`.
    #[command(hide = true)]
    Exam(ExamArgs),
}

/// `demo`.
#[derive(Args)]
pub(crate) struct DemoArgs {
    /// Leave the server running and print its address.
    #[arg(long)]
    pub keep: bool,
    /// What computes.
    #[command(flatten)]
    pub engine: EngineChoice,
    /// What to ask; the model knows verses of the King James Bible by heart.
    #[arg(long, default_value = "John 3:16", value_name = "TEXT")]
    pub ask: String,
}

/// What a conversion writes; `convert` and `plan` share it.
#[derive(Args)]
pub(crate) struct FormatArgs {
    /// Bits per weight: 4, 6 or 8 (2, 3 and 5 too), or 16 for not quantized.
    #[arg(long, default_value_t = 4)]
    pub bits: u32,
    /// Weights that share a scale: 32, 64 or 128.
    #[arg(long, default_value_t = 64, value_name = "N")]
    pub group_size: u32,
    /// Nodes to cut the model for: a number from 1 to 8, or each with its memory, as
    /// name=RAM or name=RAM:USABLE,… (a=512g,b=256g:240g). Three quarters of the RAM are usable unless told.
    #[arg(long, default_value = "1", value_name = "NODES")]
    pub nodes: String,
    /// Pipeline stages: so many groups of nodes, in order, each with consecutive layers of its own;
    /// for links without RDMA, and for models that cannot be cut further.
    #[arg(long, default_value_t = 1, value_name = "S")]
    pub stages: u32,
    /// Which matrices get more bits: uniform, or sensitive (down projections and values of the
    /// first and last layers one step up, embedding and head at 6 bits at least).
    #[arg(long, default_value = "uniform", value_name = "NAME")]
    pub recipe: String,
    /// Exceptions by name; the last match wins. Stars stand for any characters.
    #[arg(long = "override", value_name = "PATTERN=BITS[:GROUP]")]
    pub overrides: Vec<String>,
    /// How weights are rounded: refined is the most accurate; mlx-cpu and mlx-metal give MLX's
    /// own bytes.
    #[arg(long, default_value = "refined", value_name = "RULE")]
    pub rounding: String,
    /// Type of scales and unquantized weights; the source's own (bf16 for f32 sources) by default.
    #[arg(long, value_enum)]
    pub dtype: Option<FloatType>,
    /// How mixtures of experts are cut: inside each expert, whole experts per node, or auto (whole
    /// only where a cut inside is more than 12 % uneven and each node gets 4 experts).
    #[arg(long, default_value = "auto", value_name = "FORM")]
    pub experts: String,
    /// Tokens of context that the nodes' memory must hold; the model's longest by default.
    #[arg(long, value_name = "N")]
    pub context: Option<u32>,
    /// How keys and values will be stored, for the same reckoning.
    #[arg(long, value_enum, default_value_t = KvFormat::F32)]
    pub kv_type: KvFormat,
    /// Rules for an architecture of your own, in the form of formats/rules/*.toml; they come before
    /// the compiled-in ones, may build on one with `extends`, and go into the packages.
    #[arg(long, value_name = "FILE")]
    pub rules: Option<PathBuf>,
    /// Adapter to merge into the weights, in PEFT's or MLX's form; may be given more than once.
    #[arg(long = "adapter", value_name = "FOLDER")]
    pub adapters: Vec<PathBuf>,
    /// Read .bin files of torch.save where a folder has no .safetensors. Their pickles are read
    /// by a machine that knows dictionaries of tensors, refuses all else and runs nothing.
    #[arg(long)]
    pub allow_pickle: bool,
    /// The folder below the source that the model stands in, such as the text model of a repository
    /// for pictures too; its tokenizer stands there or beside the whole.
    #[arg(long, value_name = "FOLDER")]
    pub subfolder: Option<Subfolder>,
}

/// `plan`.
#[derive(Args)]
#[command(after_help = "\
Reads headers only. Exits with 1 if a node's memory is too small.

Example:
  shardpack plan ~/models/Llama-3.3-70B-Instruct --bits 4 --nodes a=64g,b=64g --context 16384

An architecture that is not known:
  shardpack plan ./new-model --draft new.toml     what was seen of it, on the nearest known one
  $EDITOR new.toml                                every point of `todo` is yours to decide
  shardpack plan ./new-model --rules new.toml     and then convert with the same --rules")]
pub(crate) struct PlanArgs {
    /// Folder of a Hugging Face model, a .gguf file, or a model's name on the hub:
    /// organisation/model, organisation/model@revision, or organisation/model/FILE.gguf.
    pub source: PathBuf,
    /// What would be written.
    #[command(flatten)]
    pub format: FormatArgs,
    /// When no rules fit the model: write a draft of some to this file, which must not exist.
    #[arg(long, value_name = "FILE")]
    pub draft: Option<PathBuf>,
    /// List every tensor too.
    #[arg(long)]
    pub tensors: bool,
    /// Print JSON on standard output.
    #[arg(long)]
    pub json: bool,
}

/// `convert`.
#[derive(Args)]
#[command(after_help = "\
Examples:
  shardpack convert ~/models/Llama-3.3-70B-Instruct -o llama-70b --bits 4 --nodes 2
  shardpack convert ./my-fine-tune -o tuned --bits 8 --group-size 32 --nodes 3 --json
  shardpack convert ./model -o staged --nodes 4 --stages 2     two stages of two nodes
  shardpack convert org/model -o out --subfolder text_model    the part of a repository that is one")]
pub(crate) struct ConvertArgs {
    /// Folder of a Hugging Face model (config.json and .safetensors files), a .gguf file, or a
    /// model's name on the hub: organisation/model, organisation/model@revision, or
    /// organisation/model/FILE.gguf.
    pub source: PathBuf,
    /// Folder to write the package set to; must not exist or be empty.
    #[arg(short, long, value_name = "FOLDER")]
    pub output: PathBuf,
    /// What is written.
    #[command(flatten)]
    pub format: FormatArgs,
    /// Importance file of llama.cpp that weights the search for scales.
    #[arg(long, value_name = "FILE")]
    pub imatrix: Option<PathBuf>,
    /// Fail when the report is beyond this, such as 'rmse>0.1'; may be given more than once.
    #[arg(long, value_name = "FIGURE>LIMIT")]
    pub fail_on: Vec<String>,
    /// Name to serve the model under.
    #[arg(long)]
    pub name: Option<String>,
    /// Memory to hold at most, such as 512m or 4g; the model may be of any size.
    #[arg(long, default_value = "512m", value_name = "BYTES")]
    pub(crate) memory: Size,
    /// Threads to use; all cores by default.
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Sign every package with this private key, as `sign` does.
    #[arg(long, value_name = "KEY")]
    pub sign: Option<PathBuf>,
    /// Do not keep the weights of a model from the hub: each file is here only while it is needed.
    #[arg(long)]
    pub no_keep_source: bool,
    /// Print the result as JSON on standard output.
    #[arg(long)]
    pub json: bool,
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

/// `reshard`.
#[derive(Args)]
#[command(after_help = "\
Nothing is quantized again: the result is what `convert --nodes --stages` writes from the source.

Examples:
  shardpack reshard llama-70b -o llama-70b-3 --nodes 3
  shardpack reshard llama-70b -o llama-70b-2x2 --nodes 4 --stages 2
  shardpack reshard from-mac-a/node-0 from-mac-b/node-1 -o llama-70b-4 --nodes 4")]
pub(crate) struct ReshardArgs {
    /// A package set, a folder with all packages of one, or all packages one by one.
    #[arg(required = true, value_name = "SET")]
    pub paths: Vec<PathBuf>,
    /// Folder to write the package set to; must not exist or be empty.
    #[arg(short, long, value_name = "FOLDER")]
    pub output: PathBuf,
    /// Nodes to cut the model for: a number from 1 to 8, or each with its memory, as
    /// name=RAM or name=RAM:USABLE,… (a=512g,b=256g:240g). Three quarters of the RAM are usable unless told.
    #[arg(long, value_name = "NODES")]
    pub nodes: String,
    /// Pipeline stages: so many groups of nodes, in order, each with consecutive layers of its own.
    #[arg(long, default_value_t = 1, value_name = "S")]
    pub stages: u32,
    /// Tokens of context that the nodes' memory must hold; the model's longest by default.
    #[arg(long, value_name = "N")]
    pub context: Option<u32>,
    /// Memory to hold at most, such as 512m or 4g; the model may be of any size.
    #[arg(long, default_value = "512m", value_name = "BYTES")]
    pub memory: Size,
    /// Threads to use; all cores by default.
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Print the result as JSON on standard output.
    #[arg(long)]
    pub json: bool,
}

/// `export`.
#[derive(Args)]
#[command(
    group = clap::ArgGroup::new("form").required(true),
    after_help = "\
Examples:
  shardpack export llama-70b --mlx -o llama-70b-mlx     mlx_lm.generate --model llama-70b-mlx
  shardpack export llama-70b --hf -o llama-70b-bf16     a checkpoint for transformers"
)]
pub(crate) struct ExportArgs {
    /// A package set, a folder with all packages of one, or all packages one by one.
    #[arg(required = true, value_name = "SET")]
    pub paths: Vec<PathBuf>,
    /// Folder to write to; must not exist or be empty.
    #[arg(short, long, value_name = "FOLDER")]
    pub output: PathBuf,
    /// A model directory of mlx-lm, as quantized; it is a package for one node too.
    #[arg(long, group = "form")]
    pub mlx: bool,
    /// A checkpoint in Hugging Face's names, in floats.
    #[arg(long, group = "form")]
    pub hf: bool,
    /// Type of the floats of --hf; that of the set's scales and unquantized weights by default.
    #[arg(long, value_enum, requires = "hf")]
    pub dtype: Option<FloatType>,
    /// Memory to hold at most, such as 512m or 4g; the model may be of any size.
    #[arg(long, default_value = "512m", value_name = "BYTES")]
    pub memory: Size,
    /// Threads to use; all cores by default.
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Print the result as JSON on standard output.
    #[arg(long)]
    pub json: bool,
}

/// `keygen`.
#[derive(Args)]
#[command(after_help = "\
Example:
  shardpack keygen -o signer      writes signer (keep it secret) and signer.pub (give it away)")]
pub(crate) struct KeygenArgs {
    /// File to write the private key to; the public key goes beside it, with .pub added.
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    /// Print the result as JSON on standard output.
    #[arg(long)]
    pub json: bool,
}

/// `sign`.
#[derive(Args)]
#[command(after_help = "\
Each package gets a model.sig, which `shardpack verify --key` checks, and so does
`model_signing verify key` (pip install model-signing pyOpenSSL).

Example:
  shardpack sign llama-70b --key signer")]
pub(crate) struct SignArgs {
    /// A package set or a package.
    pub path: PathBuf,
    /// Private key, as `shardpack keygen` writes it.
    #[arg(long, value_name = "FILE")]
    pub key: PathBuf,
    /// Threads to use; all cores by default.
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Print the result as JSON on standard output.
    #[arg(long)]
    pub json: bool,
}

/// `verify`.
#[derive(Args)]
#[command(after_help = "\
Examples:
  shardpack verify llama-70b                      the whole set
  shardpack verify llama-70b/node-0               one package
  shardpack verify llama-70b --key signer.pub     and that this key has signed it")]
pub(crate) struct VerifyArgs {
    /// A package set or a package.
    pub path: PathBuf,
    /// Public key that every package must be signed with.
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// Threads to use; all cores by default.
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Print the result as JSON on standard output.
    #[arg(long)]
    pub json: bool,
}

/// `inspect`.
#[derive(Args)]
pub(crate) struct InspectArgs {
    /// A package set or a package.
    pub path: PathBuf,
    /// List every tensor too.
    #[arg(long)]
    pub tensors: bool,
    /// Print JSON on standard output.
    #[arg(long)]
    pub json: bool,
}

/// `node`.
#[derive(Args)]
#[command(after_help = "\
On an address that other machines reach, a node speaks mutual TLS alone. At its first start it
prints a line to say on the controlling machine and the one-time token for which that asks; after
that it takes orders from that cluster's controllers and nobody else. On a loopback address it needs
no cluster.

Examples:
  shardpack node --listen 192.168.1.11:7420 --store ~/shardpack   this machine, for others
  shardpack node --listen 0.0.0.0:7420 --advertise 10.0.0.11 --store ~/shardpack
                                             ranks use the cable's address
  shardpack node --listen 192.168.1.11:7420 --store ~/shardpack --reset   leave the cluster
  shardpack node --listen 127.0.0.1:7420 --store ~/packages-0     a second machine, played here")]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of the command line")]
pub(crate) struct NodeArgs {
    /// Address to listen on; port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:7420", value_name = "HOST:PORT")]
    pub listen: SocketAddr,
    /// Folder that holds this node's packages, and its key and membership.
    #[arg(long, value_name = "FOLDER")]
    pub store: PathBuf,
    /// Address of this machine at which its ranks listen: the server and the other nodes must
    /// reach it; that of --listen by default.
    #[arg(long, value_name = "IP")]
    pub advertise: Option<IpAddr>,
    /// Speak mutual TLS on a loopback address too.
    #[arg(long)]
    pub tls: bool,
    /// Tell the local network by multicast DNS where this node is while it waits for a cluster, so
    /// that `shardpack cluster add` needs no address.
    #[arg(long)]
    pub announce: bool,
    /// Forget cluster and key, and print a new token.
    #[arg(long)]
    pub reset: bool,
    /// Seconds for which a printed token holds.
    #[arg(long, default_value_t = 3600, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(..=604_800))]
    pub token_ttl: u64,
    /// Threads of each rank that runs here; all cores by default.
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// What computes.
    #[command(flatten)]
    pub engine: EngineChoice,
    /// Print the address as JSON on standard output once listening.
    #[arg(long)]
    pub json: bool,
}

/// `push`.
#[derive(Args)]
#[command(after_help = "\
Run it again after an interruption: what has arrived is not sent again.

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
    /// Whose nodes.
    #[command(flatten)]
    pub cluster: ClusterChoice,
    /// Connections to each node, 1 to 8; by default one for every two cores of this machine.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=8))]
    pub streams: Option<u8>,
    /// Say what would be sent and send nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// Print the result as JSON on standard output.
    #[arg(long)]
    pub json: bool,
}

/// What computes, and what carries its sums between ranks.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct EngineChoice {
    /// What computes.
    #[arg(long, value_enum, default_value_t, value_name = "ENGINE")]
    pub engine: EngineName,
    /// What carries sums between ranks; `ring` and `jaccl` are MLX's own.
    #[arg(long, value_enum, default_value_t, value_name = "WHICH")]
    pub collectives: CollectivesName,
    /// Instructions of the cpu engine: portable, neon, avx2 or avx512; the machine's best by
    /// default. Results are the same on all.
    #[arg(long, value_name = "NAME")]
    pub platform: Option<String>,
    /// Leave activations as they are before quantized weights, rather than round them to 8 bits:
    /// closer to the weights' exact results, and slower.
    #[arg(long)]
    pub exact: bool,
    /// How keys and values are stored; with mlx f32, f16 or bf16. 16 bits take half the memory.
    #[arg(long, value_enum, default_value_t = KvFormat::F32)]
    pub kv_type: KvFormat,
    /// Memory of each rank for keys and values, such as 8g; by default one sequence of the model's
    /// longest context, and 64m at least.
    #[arg(long, value_name = "BYTES")]
    pub kv_memory: Option<Size>,
    /// Guess next tokens from what a request has said before, and run them with the next one: the
    /// same tokens in fewer steps. With mlx there are no guesses, since its results may depend on
    /// how many rows are computed together.
    #[arg(long, value_enum, default_value_t, value_name = "WHEN")]
    pub speculate: SpeculateName,
    /// Ask a small model what comes next and check its guesses with this one: the same tokens in
    /// fewer steps. A package set for one node of a model with the same tokens, read by rank 0 (by
    /// its node, where ranks are on others).
    #[arg(long, value_name = "SET")]
    pub draft_model: Option<PathBuf>,
}

/// When next tokens are guessed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum SpeculateName {
    /// As far as it pays.
    #[default]
    Auto,
    /// Never.
    Off,
}

/// Engines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum EngineName {
    /// This program's own kernels.
    #[default]
    Cpu,
    /// Apple's MLX; `shardpack engine install mlx` installs it.
    Mlx,
    /// A file of answers; `serve` alone.
    #[value(hide = true)]
    Scripted,
}

/// Collectives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum CollectivesName {
    /// This program's own: a lost rank is an error.
    #[default]
    Auto,
    /// This program's own: a lost rank is an error.
    Own,
    /// MLX's ring over TCP, for ranks on this machine.
    Ring,
    /// MLX's JACCL over RDMA.
    Jaccl,
}

/// `bench`.
#[derive(Args)]
#[command(after_help = "\
Prompts are random tokens. All ranks run in this process, each on its share of the threads.

Examples:
  shardpack bench llama-1b
  shardpack bench llama-1b --contexts 16,4096 --batches 1,8 --json
  shardpack bench llama-1b --speculate auto       with what guessed tokens give
  shardpack bench llama-70b --draft-model llama-1b")]
pub(crate) struct BenchArgs {
    /// The package set.
    pub set: PathBuf,
    /// Tokens of the prompts.
    #[arg(long, value_delimiter = ',', default_value = "16,256", value_name = "N,…")]
    pub contexts: Vec<usize>,
    /// Requests at a time.
    #[arg(long, value_delimiter = ',', default_value = "1,8", value_name = "N,…")]
    pub batches: Vec<usize>,
    /// Tokens to generate for each.
    #[arg(long, default_value_t = 32, value_name = "N")]
    pub generate: usize,
    /// How keys and values are stored.
    #[arg(long, value_enum, default_value_t = KvFormat::F32)]
    pub kv_type: KvFormat,
    /// Measure guessed tokens too: each load without and with them, on answers that say new
    /// things, that are the likeliest, and that are foretold to the letter. All other figures are
    /// without.
    #[arg(long, value_enum, default_value = "off", value_name = "WHEN")]
    pub speculate: SpeculateName,
    /// Measure guessed tokens, and guess with a small model too, as `serve` does.
    #[arg(long, value_name = "SET")]
    pub draft_model: Option<PathBuf>,
    /// Threads of all ranks together; all cores by default.
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Print the result as JSON on standard output.
    #[arg(long)]
    pub json: bool,
}

/// How keys and values are stored.
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

/// `eval`.
#[derive(Args)]
#[command(after_help = "\
Figures are counted as llama.cpp's perplexity counts them: windows of the context's length, of
which the second half counts.

Examples:
  shardpack eval llama-70b --text wiki.test.raw
  shardpack eval llama-70b --text wiki.test.raw --against llama-70b-16bit")]
pub(crate) struct EvalArgs {
    /// The package set.
    pub set: PathBuf,
    /// A text.
    #[arg(long, value_name = "FILE")]
    pub text: PathBuf,
    /// A set of the same model whose predictions count as the truth, with 16 bits as a rule.
    #[arg(long, value_name = "SET")]
    pub against: Option<PathBuf>,
    /// Tokens of a window; 512, or the model's longest sequence where that is less, by default.
    #[arg(long, value_name = "N")]
    pub context: Option<usize>,
    /// Threads to use; all cores by default.
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Print the result as JSON on standard output.
    #[arg(long)]
    pub json: bool,
}

/// `logits`.
#[derive(Args)]
#[command(after_help = "\
Example:
  echo '[1, 15, 27]' > ids.json && shardpack logits set --tokens ids.json -o logits.safetensors")]
pub(crate) struct LogitsArgs {
    /// The package set.
    pub set: PathBuf,
    /// A JSON list of token ids.
    #[arg(long, value_name = "FILE")]
    pub tokens: PathBuf,
    /// File to write: `logits`, f32, [tokens, vocabulary].
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    /// What computes.
    #[command(flatten)]
    pub engine: EngineChoice,
    /// Threads to use; all cores by default.
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
}

/// `rank`.
#[derive(Args)]
pub(crate) struct RankArgs {
    /// The package.
    pub package: PathBuf,
    /// Threads to use.
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1", value_name = "IP")]
    pub bind: IpAddr,
    /// The node's key and membership: front and peers are then spoken to inside TLS.
    #[arg(long, value_name = "FOLDER")]
    pub identity: Option<PathBuf>,
    /// What computes.
    #[command(flatten)]
    pub engine: EngineChoice,
}

/// `engine`.
#[derive(Args)]
#[command(after_help = "\
Examples:
  shardpack engine install mlx          Apple's MLX: the GPU of a Mac, or for tests the processor
  shardpack engine list
  shardpack engine check mlx            every byte against what was installed

An installed engine is one folder; copy it whole to other machines of the same kind.")]
pub(crate) struct EngineArgs {
    /// What to do.
    #[command(subcommand)]
    pub action: EngineAction,
}

/// What `engine` does.
#[derive(Subcommand)]
pub(crate) enum EngineAction {
    /// Lay an engine down: fetched, checked, compiled.
    Install(EngineInstallArgs),
    /// Show which engines there are.
    List(EngineListArgs),
    /// Compare every byte of an installed engine, and load it.
    Check(EngineCheckArgs),
}

/// Engines that can be installed.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum InstalledEngine {
    /// Apple's MLX.
    Mlx,
}

/// `engine install`.
#[derive(Args)]
pub(crate) struct EngineInstallArgs {
    /// Which engine.
    #[arg(value_enum)]
    pub engine: InstalledEngine,
    /// Folder that holds engines.
    #[arg(long, value_name = "FOLDER", env = "SHARDPACK_ENGINES")]
    pub dir: Option<PathBuf>,
    /// The wheel of MLX, if it is already here; else pip fetches it.
    #[arg(long, value_name = "FILE")]
    pub wheel: Option<PathBuf>,
    /// Python whose pip fetches the wheel.
    #[arg(long, default_value = "python3", value_name = "PROGRAM")]
    pub python: String,
    /// C++ compiler.
    #[arg(long, default_value = "c++", value_name = "PROGRAM")]
    pub cxx: String,
    /// Print the result as JSON on standard output.
    #[arg(long)]
    pub json: bool,
}

/// `engine list`.
#[derive(Args)]
pub(crate) struct EngineListArgs {
    /// Folder that holds engines.
    #[arg(long, value_name = "FOLDER", env = "SHARDPACK_ENGINES")]
    pub dir: Option<PathBuf>,
    /// Print the result as JSON on standard output.
    #[arg(long)]
    pub json: bool,
}

/// `engine check`.
#[derive(Args)]
pub(crate) struct EngineCheckArgs {
    /// Which engine.
    #[arg(value_enum)]
    pub engine: InstalledEngine,
    /// Folder that holds engines.
    #[arg(long, value_name = "FOLDER", env = "SHARDPACK_ENGINES")]
    pub dir: Option<PathBuf>,
    /// Print the result as JSON on standard output.
    #[arg(long)]
    pub json: bool,
}
