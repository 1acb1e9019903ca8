//! Arguments of `convert`, and the format of packages, which `plan` takes too.

use std::{num::NonZeroUsize, path::PathBuf};

use clap::Args;
use shardpack_converter::recipe::Budget;

use super::shared::{
    BudgetArgs, FloatType, GroupFormat, KvFormat, OutputForm, SetOutputArgs, ShardingArgs, Size,
    SourceArgs,
};

/// What a conversion writes; `convert` and `plan` share it.
#[derive(Args)]
#[command(mut_arg("nodes", |nodes| nodes.required(false).default_value("1")))]
pub(crate) struct FormatArgs {
    /// Bits per weight: 4, 6 or 8 (2, 3 and 5 too), or 16 for not quantized; 4 unless --format has others.
    #[arg(long)]
    pub bits: Option<u32>,
    /// How weights are grouped: affine (integers with a scale and a bias), or float groups for
    /// hardware and models that are made for them: mxfp4, nvfp4 (both 4 bits) or mxfp8 (8 bits),
    /// rounded as MLX rounds.
    #[arg(long = "format", value_enum, default_value_t = GroupFormat::Affine, value_name = "FORMAT")]
    pub groups: GroupFormat,
    /// Weights that share a scale: 32, 64 or 128.
    #[arg(long, default_value_t = 64, value_name = "N")]
    pub group_size: u32,
    /// How the model is sharded.
    #[command(flatten)]
    pub sharding: ShardingArgs,
    /// Bits per weight over the whole model, or `fit`: as many as the nodes' memory allows (--nodes with
    /// memory). Each matrix gets 3 to 8 by what `calibrate --sensitivity` says of it (--stats or
    /// --calibrate), and is rounded with gptq unless --rounding says otherwise.
    #[arg(long, value_name = "BITS", conflicts_with = "bits")]
    pub bpw: Option<Budget>,
    /// The same by the bytes of all weights, such as 60g.
    #[arg(long, value_name = "BYTES", conflicts_with_all = ["bits", "bpw"])]
    pub size: Option<Size>,
    /// Which matrices get more bits: uniform, sensitive (down projections and values of the first and
    /// last layers one step up, embedding and LM head at 6 bits at least), or a file of overrides, one a
    /// line, such as the recipe.txt that --bpw leaves beside the packages.
    #[arg(long, default_value = "uniform", value_name = "NAME|FILE")]
    pub recipe: String,
    /// Exceptions by tensor name; `*` matches any characters, the last match wins.
    #[arg(long = "override", value_name = "PATTERN=BITS[:GROUP]|FORMAT")]
    pub overrides: Vec<String>,
    /// How weights are rounded: refined is the most accurate without calibration; gptq makes up for
    /// each rounding's error by what a calibration text says (--stats or --calibrate); mlx-cpu and mlx-metal give the same
    /// bytes as MLX. Refined unless bits are given out by --bpw or --size, then gptq.
    #[arg(long, value_name = "RULE")]
    pub rounding: Option<String>,
    /// Type of scales and unquantized weights; the source's own (bf16 for f32 sources) by default.
    #[arg(long, value_enum)]
    pub dtype: Option<FloatType>,
    /// How mixtures of experts are sharded: inside (every expert over all nodes), whole (each node
    /// gets whole experts), or auto (whole only if inside is more than 12 % uneven and each node
    /// gets at least 4 experts).
    #[arg(long, default_value = "auto", value_name = "FORM")]
    pub experts: String,
    /// Type of the KV cache in the memory estimate.
    #[arg(long, value_enum, default_value_t = KvFormat::F32)]
    pub kv_type: KvFormat,
    /// Rules for an architecture of your own, in the format of formats/rules/*.toml. They come
    /// before the built-in ones, may extend one of them with `extends`, and are stored in the
    /// packages.
    #[arg(long, value_name = "FILE")]
    pub rules: Option<PathBuf>,
}

/// `convert`.
#[derive(Args)]
#[command(after_help = "\
Examples:
  shardpack convert ~/models/Llama-3.3-70B-Instruct -o llama-70b --bits 4 --nodes 2
  shardpack convert ./my-fine-tune -o tuned --bits 8 --group-size 32 --nodes 3 --json
  shardpack convert ./model -o small --bpw 4.6 --calibrate      bits where they matter
  shardpack convert openai/gpt-oss-20b -o gpt-oss --bits 8 --override '*.experts.*=mxfp4'
                                                                as published
  shardpack convert ./model -o tuned --bits 4 --calibrate text.txt --distill 200
  shardpack convert ./model -o staged --nodes 4 --stages 2     two stages of two nodes
  shardpack convert org/model -o out --subfolder text_model    a model in a subfolder")]
pub(crate) struct ConvertArgs {
    /// The model.
    #[command(flatten)]
    pub source: SourceArgs,
    /// Where the set goes.
    #[command(flatten)]
    pub output: SetOutputArgs,
    /// What is written.
    #[command(flatten)]
    pub format: FormatArgs,
    /// Importance matrix of llama.cpp (imatrix) that weights the search for scales.
    #[arg(long, value_name = "FILE")]
    pub imatrix: Option<PathBuf>,
    /// Folder that `calibrate` has written, for --rounding gptq, --bpw and --size.
    #[arg(long, value_name = "FOLDER")]
    pub stats: Option<PathBuf>,
    /// Calibrate with the text first, as `calibrate` does, and round with gptq; without a FILE with a
    /// built-in text.
    #[arg(long, value_name = "FILE", num_args = 0.., conflicts_with = "stats")]
    pub calibrate: Option<Vec<PathBuf>>,
    /// Most tokens of that text to read.
    #[arg(long, value_name = "N", requires = "calibrate")]
    pub calibration_tokens: Option<usize>,
    /// Tokens of a sequence of it; 512, or the model's longest sequence if that is less, by default.
    #[arg(long, value_name = "N", requires = "calibrate")]
    pub calibration_context: Option<usize>,
    /// Then tune scales and biases by so many steps against the answers of the model at 16 bits over the
    /// same text (mlx-lm calls it DWQ). Needs MLX (`engine install mlx`).
    #[arg(long, value_name = "STEPS", requires = "calibrate")]
    pub distill: Option<NonZeroUsize>,
    /// Fail if a figure of the report exceeds a limit, such as 'rmse>0.1'; may be given more than
    /// once.
    #[arg(long, value_name = "FIGURE>LIMIT")]
    pub fail_on: Vec<String>,
    /// Name to serve the model under.
    #[arg(long)]
    pub name: Option<String>,
    /// Memory and threads.
    #[command(flatten)]
    pub budget: BudgetArgs,
    /// Sign every package with this private key, as `sign` does.
    #[arg(long, value_name = "KEY")]
    pub sign: Option<PathBuf>,
    /// Do not keep the downloaded weights of a hub model: each file is deleted after use.
    #[arg(long)]
    pub no_keep_source: bool,
    /// The form of the result.
    #[command(flatten)]
    pub form: OutputForm,
}
