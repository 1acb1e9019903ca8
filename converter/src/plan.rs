//! What a conversion will write, decided from the source's headers before a byte moves.

mod files;
mod layout;

use std::{collections::BTreeMap, path::PathBuf};

use shardpack_formats::{
    AffineFormat, Dtype, Normalised, Role, Rounding, RulePack, SourceTensor, TensorPlan,
    normalise::{ResolveError, resolve},
};
use shardpack_manifests::{
    Layout,
    manifest::{MatrixFormat, Quantization},
};

use crate::{
    report::{Report, TensorReport},
    source::{Source, SourceError},
};
pub(crate) use files::{Destination, PackageFiles};

/// What the user asks for.
#[derive(Clone, Debug)]
pub struct ConvertOptions {
    /// Folder that is written; must not exist or be empty.
    pub output: PathBuf,
    /// 4, 6 or 8, or 16 for not quantized.
    pub bits: u32,
    /// Weights per scale: 32, 64 or 128.
    pub group_size: u32,
    /// Ranks, 1 to [`MAX_RANKS`].
    pub ranks: u32,
    /// How scale, bias and integers are chosen: the name of a [`Rounding`].
    pub rounding: String,
    /// Type of scales and of everything that is not quantized, as the container spells it; the
    /// source's own, or BF16 for an F32 source, when absent.
    pub dtype: Option<String>,
    /// Name to serve the model under.
    pub name: Option<String>,
    /// Bytes that the conversion may hold in memory.
    pub memory_bytes: u64,
}

impl ConvertOptions {
    /// Memory that a conversion takes unless told otherwise.
    pub const MEMORY_BYTES: u64 = 512 << 20;
}

/// Bytes of source weights that a thread takes at a time: enough to make a read large and a
/// vector loop long, little enough that what comes of it stays near the core. Fixed, because the
/// report's sums are added up block by block.
pub(crate) const BLOCK_BYTES: u64 = 4 << 20;

/// What the program needs besides its blocks.
const BASE_BYTES: u64 = 64 << 20;

/// Most ranks of a group: Thunderbolt meshes end well below, and every pair is a connection.
pub const MAX_RANKS: u32 = 8;

/// Why no plan can be made.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// An option is out of range.
    #[error("{option} {value} is not possible; {possible}")]
    Option {
        /// The option.
        option: &'static str,
        /// What was asked.
        value: String,
        /// What may be asked.
        possible: &'static str,
    },
    /// The architecture is unknown, or the checkpoint does not fit it.
    #[error(transparent)]
    Resolve(#[from] ResolveError),
    /// The source cannot be read.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// `tie_word_embeddings` is set, but there is a head with other values.
    #[error(
        "the config says tie_word_embeddings, but {head:?} differs from the embedding; set \"tie_word_embeddings\": false in config.json to keep both"
    )]
    Tied {
        /// The head.
        head: String,
    },
}

/// A conversion, ready to be carried out.
pub struct Plan {
    /// What was asked.
    pub options: ConvertOptions,
    /// The checkpoint as its rules read it.
    pub normalised: Normalised,
    /// Which rank holds what.
    pub layout: Layout,
    /// How every matrix is stored.
    pub quantization: Quantization,
    /// Things the user should know.
    pub warnings: Vec<String>,
    pub(crate) rounding: Rounding,
    pub(crate) steps: Vec<Step>,
    pub(crate) packages: PackageFiles,
}

/// One normalised tensor on its way into the packages.
pub(crate) struct Step {
    pub(crate) tensor: TensorPlan,
    pub(crate) format: MatrixFormat,
    /// What is stored for it: one part, or three for an affine matrix.
    pub(crate) parts: Vec<Part>,
}

/// A stored tensor before it is cut.
#[derive(Clone)]
pub(crate) struct Part {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    pub(crate) destination: Destination,
}

impl Part {
    pub(crate) fn size_bytes(&self) -> u64 {
        self.shape.iter().product::<u64>() * self.dtype.size_bytes() as u64
    }
}

impl Plan {
    /// Plans the conversion of `source`.
    pub fn new(source: &Source, options: ConvertOptions) -> Result<Self, PlanError> {
        let choice = Choice::new(&options)?;
        let tensors: Vec<SourceTensor> = source
            .tensors()
            .map(|info| SourceTensor {
                name: info.name.clone(),
                dtype: info.dtype,
                shape: info.shape.clone(),
            })
            .collect();
        let normalised = resolve(&source.config, &tensors, &RulePack::builtin())?;
        if let Some(head) = &normalised.tied_duplicate {
            check_tied(source, &normalised, head)?;
        }
        let quantization = choose_formats(&normalised, &choice);
        let layout = layout::plan(&normalised, &quantization, options.ranks);
        let steps: Vec<Step> = normalised
            .tensors
            .iter()
            .map(|tensor| {
                let format = format_of(tensor, &quantization);
                let parts = files::parts(tensor, format, quantization.dtype, &layout);
                Step { tensor: tensor.clone(), format, parts }
            })
            .collect();
        let packages = files::plan(&steps, &layout);
        let mut warnings = normalised.warnings.clone();
        if !source.text.contains_key("tokenizer.json") {
            warnings.push(
                "the source has no tokenizer.json: the packages compute logits but cannot chat"
                    .to_owned(),
            );
        }
        Ok(Self {
            options,
            normalised,
            layout,
            quantization,
            warnings,
            rounding: choice.rounding,
            steps,
            packages,
        })
    }

    /// Bytes of source tensors that will be read.
    #[must_use]
    pub fn source_bytes(&self) -> u64 {
        self.steps.iter().map(|step| source_size(&step.tensor)).sum()
    }

    /// Threads that may work at a time within the memory budget: each holds a block of the
    /// source, once more in the stored type, its stored form, and a piece of that.
    pub(crate) fn workers(&self) -> usize {
        let row = |step: &Step| {
            source_size(&step.tensor) / step.tensor.shape.first().copied().unwrap_or(1).max(1)
        };
        let block = self.steps.iter().map(row).max().unwrap_or(0).max(BLOCK_BYTES);
        let budget = self.options.memory_bytes.saturating_sub(BASE_BYTES);
        (budget / (4 * block)).max(1).try_into().unwrap_or(usize::MAX)
    }

    /// The report of a conversion of this plan.
    pub(crate) fn report(&self, tensors: BTreeMap<String, TensorReport>) -> Report {
        let stored = self.steps.iter().flat_map(|step| &step.parts).map(Part::size_bytes).sum();
        let parameters =
            self.steps.iter().map(|step| step.tensor.shape.iter().product::<u64>()).sum();
        Report::new(
            tensors,
            (parameters, stored),
            self.weight_bytes_per_rank(),
            self.warnings.clone(),
        )
    }

    /// Bytes of weights that each rank's package will hold.
    #[must_use]
    pub fn weight_bytes_per_rank(&self) -> Vec<u64> {
        self.packages.bytes_per_rank()
    }
}

pub(crate) fn source_size(tensor: &TensorPlan) -> u64 {
    tensor.shape.iter().product::<u64>() * tensor.dtype.size_bytes() as u64
}

/// The options that decide formats, checked.
struct Choice {
    bits: u32,
    group_size: u32,
    rounding: Rounding,
    dtype: Option<Dtype>,
}

impl Choice {
    fn new(options: &ConvertOptions) -> Result<Self, PlanError> {
        let refuse = |option, value: &str, possible| {
            Err(PlanError::Option { option, value: value.to_owned(), possible })
        };
        if !matches!(options.bits, 4 | 6 | 8 | 16) {
            return refuse("--bits", &options.bits.to_string(), "4, 6, 8 and 16 are");
        }
        if !matches!(options.group_size, 32 | 64 | 128) {
            return refuse("--group-size", &options.group_size.to_string(), "32, 64 and 128 are");
        }
        if !(1..=MAX_RANKS).contains(&options.ranks) {
            return refuse("--nodes", &options.ranks.to_string(), "1 to 8 nodes are");
        }
        let Ok(rounding) = options.rounding.parse() else {
            return refuse("--rounding", &options.rounding, "refined, mlx-cpu and mlx-metal are");
        };
        let dtype = match &options.dtype {
            None => None,
            Some(name) => match Dtype::from_name(name).filter(|dtype| dtype.is_float()) {
                None => return refuse("--dtype", name, "BF16, F16 and F32 are"),
                dtype => dtype,
            },
        };
        Ok(Self { bits: options.bits, group_size: options.group_size, rounding, dtype })
    }
}

/// Some checkpoints store a tied head a second time; that is harmless while the bytes agree.
fn check_tied(source: &Source, normalised: &Normalised, head: &str) -> Result<(), PlanError> {
    let embedding = normalised.tensors.iter().find(|tensor| tensor.role == Role::Embed);
    let embedding = embedding.map(|tensor| source.read_tensor(&tensor.sources[0])).transpose()?;
    let bytes = source.read_tensor(head)?;
    if bytes.is_some() && embedding.flatten() == bytes {
        Ok(())
    } else {
        Err(PlanError::Tied { head: head.to_owned() })
    }
}

/// Decides how every matrix is stored. Bits, group size and their fallback depend on the tensor
/// alone, never on the number of ranks.
fn choose_formats(normalised: &Normalised, options: &Choice) -> Quantization {
    let dtype = options.dtype.unwrap_or_else(|| main_dtype(&normalised.tensors));
    if options.bits == 16 {
        return Quantization {
            bits: 16,
            group_size: None,
            rounding: None,
            dtype,
            overrides: BTreeMap::new(),
        };
    }
    let main = MatrixFormat::Affine { bits: options.bits, group_size: options.group_size };
    let mut overrides = BTreeMap::new();
    for tensor in normalised.tensors.iter().filter(|tensor| tensor.quantizable) {
        let width = tensor.shape.last().copied().unwrap_or(0);
        let format = affine_for_width(width, options);
        if format != main {
            overrides.insert(module_name(&tensor.name).to_owned(), format);
        }
    }
    Quantization {
        bits: options.bits,
        group_size: Some(options.group_size),
        rounding: Some(options.rounding.name().to_owned()),
        dtype,
        overrides,
    }
}

/// The largest group, from the asked size down, that divides the input width.
fn affine_for_width(width: u64, options: &Choice) -> MatrixFormat {
    [128, 64, 32]
        .into_iter()
        .filter(|group| *group <= options.group_size)
        .find(|group| {
            width.is_multiple_of(u64::from(*group))
                && AffineFormat::new(options.bits, *group).is_some()
        })
        .map_or(MatrixFormat::Plain, |group_size| MatrixFormat::Affine {
            bits: options.bits,
            group_size,
        })
}

/// The type of most weights; F32 checkpoints become BF16, as they would be run.
fn main_dtype(tensors: &[TensorPlan]) -> Dtype {
    let bytes =
        |dtype| tensors.iter().filter(|tensor| tensor.dtype == dtype).map(source_size).sum::<u64>();
    if bytes(Dtype::F16) > bytes(Dtype::BF16) + bytes(Dtype::F32) {
        Dtype::F16
    } else {
        Dtype::BF16
    }
}

/// How one tensor is stored.
fn format_of(tensor: &TensorPlan, quantization: &Quantization) -> MatrixFormat {
    if tensor.quantizable {
        quantization.format_of(module_name(&tensor.name))
    } else {
        MatrixFormat::Plain
    }
}

/// A tensor's module: its name without `.weight`.
pub(crate) fn module_name(tensor: &str) -> &str {
    tensor.strip_suffix(".weight").unwrap_or(tensor)
}
