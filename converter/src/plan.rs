//! What a conversion will write, decided from the source's headers before a byte moves.

mod budget;
mod files;
mod formats;
mod layout;
mod memory;
mod options;
mod stacks;
mod stages;
mod statistics;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use serde_json::Value;
use shardpack_containers::{Importance, imatrix::ImatrixError};
use shardpack_formats::{
    Normalised, OwnRules, Role, RulePack, SourceTensor, TensorPlan, chat,
    normalise::{ResolveError, View, reads, resolve, rows_and_columns},
    rules::ShardingRule,
    spec::Embedding,
};
use shardpack_manifests::{
    Layout, TensorShard,
    layout::Stages,
    manifest::{MatrixFormat, Quantization},
};
use shardpack_quantize::{Dtype, Rounding};

use crate::{
    learned::{LearnedScales, ScalesError},
    moments::{MomentsError, StoredMoments},
    recipe::{Budget, RecipeError},
    report::{Report, TensorReport, ThresholdError},
    source::{DENSE, Source, SourceError},
};
pub use budget::BudgetError;
pub(crate) use files::{Destination, PackageFiles};
pub(crate) use formats::{format_of, module_name};
use layout::RankGroup;
pub use memory::{EngineLoad, PROCESS_BYTES, RankMemory, served_memory};
use options::Choice;
pub use options::{ConvertOptions, ExpertSharding, MAX_RANKS, NodeLimit, Nodes, parse_bytes};
pub(crate) use stacks::stacks;
pub(crate) use stages::check as check_stages;
use statistics::{measured, read_importance, read_moments, weighed};

/// Bytes of source weights that a thread takes at a time: enough to make a read large and a
/// vector loop long, little enough that it stays in the core's own cache until it is quantized.
/// Fixed, because the report's sums are added up block by block.
pub(crate) const BLOCK_BYTES: u64 = 1 << 20;

/// The user's rules that a package was made with, whole.
pub(crate) const RULES_FILE: &str = "rules.toml";

/// What the program needs besides its blocks.
const BASE_BYTES: u64 = 64 << 20;

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
    /// The nodes or layers cannot be divided into so many stages.
    #[error("--stages {stages} is not possible: {problem}; --stages {nearest} is")]
    Stages {
        /// What was asked.
        stages: u32,
        /// Why not.
        problem: String,
        /// The nearest number that is possible.
        nearest: u32,
    },
    /// The architecture is unknown, or the checkpoint does not fit it.
    #[error(transparent)]
    Resolve(#[from] ResolveError),
    /// A key to be ignored decides what the model computes.
    #[error(
        "--ignore-config-key {key}: the rules of this architecture read it, so the model would be another one without it; only keys that no rules know can be left out"
    )]
    KeyIsRead {
        /// The key.
        key: String,
    },
    /// The chat template cannot even be tried.
    #[error("{file}: {problem}")]
    Template {
        /// Its file.
        file: &'static str,
        /// What it did.
        problem: String,
    },
    /// The source cannot be read.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// A recipe or an override that cannot be honoured.
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// A threshold that cannot be judged.
    #[error(transparent)]
    Threshold(#[from] ThresholdError),
    /// The importance file cannot be used.
    #[error("{path}: {source}")]
    Importance {
        /// The file.
        path: String,
        /// What is wrong.
        source: ImatrixError,
    },
    /// What `calibrate` has measured cannot be used.
    #[error("--stats")]
    Moments(#[from] MomentsError),
    /// Learned scales cannot be used.
    #[error(transparent)]
    Scales(#[from] ScalesError),
    /// Bits cannot be given out.
    #[error(transparent)]
    Budget(#[from] BudgetError),
    /// Rounding with error feedback, and nothing that says of what.
    #[error(
        "--rounding gptq needs --stats or --calibrate: it rounds by what matrices read, which `shardpack calibrate` measures"
    )]
    NoStats,
    /// Statistics that the rounding does not read.
    #[error(
        "--stats is for --rounding gptq, and the rounding is {0}; add --rounding gptq, or leave --stats away"
    )]
    UnusedStats(String),
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
    /// What each rank needs to run.
    pub memory: Vec<RankMemory>,
    /// Things the user should know.
    pub warnings: Vec<String>,
    pub(crate) importance: Option<Importance>,
    pub(crate) moments: Option<StoredMoments>,
    pub(crate) learned: Option<LearnedScales>,
    /// Bytes that a thread holds beside its blocks while it merges adapters, or weights come from
    /// elsewhere.
    pub(crate) merge_bytes: u64,
    pub(crate) rounding: Rounding,
    pub(crate) steps: Vec<TensorConversion>,
    pub(crate) packages: PackageFiles,
}

/// How one normalised tensor is stored in the packages.
pub(crate) struct TensorConversion {
    pub(crate) tensor: TensorPlan,
    pub(crate) format: MatrixFormat,
    /// What is stored for it: one part, or three for an affine matrix.
    pub(crate) parts: Vec<StoredTensor>,
}

/// A stored tensor before sharding.
#[derive(Clone)]
pub(crate) struct StoredTensor {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    pub(crate) destination: Destination,
    /// The stages that hold it.
    pub(crate) stages: Vec<usize>,
}

impl StoredTensor {
    pub(crate) fn size_bytes(&self) -> u64 {
        self.shape.iter().product::<u64>() * self.dtype.size_bytes() as u64
    }

    /// Bytes of one row: everything below the first dimension.
    pub(crate) fn row_bytes(&self) -> u64 {
        self.shape.iter().skip(1).product::<u64>() * self.dtype.size_bytes() as u64
    }

    /// Bytes of one innermost row: the last dimension, or an element of a vector.
    pub(crate) fn inner_row_bytes(&self) -> u64 {
        rows_and_columns(&self.shape)[1] * self.dtype.size_bytes() as u64
    }
}

impl Plan {
    /// Plans the conversion of `source`.
    pub fn new(source: &Source, options: ConvertOptions) -> Result<Self, PlanError> {
        let choice = Choice::new(&options)?;
        let packs = packs(options.rules.as_ref());
        if let Some(key) = source.ignored_keys.keys().find(|key| reads(&source.config, key, &packs))
        {
            return Err(PlanError::KeyIsRead { key: key.clone() });
        }
        let embedding = source.embedding.as_ref();
        let normalised = resolve_all(&source.config, source.source_tensors(), &packs, embedding)?;
        stages::check(&options, &normalised.spec)?;
        if let Some(head) = &normalised.tied_duplicate {
            check_tied(source, &normalised, head)?;
        }
        let importance = options
            .importance
            .as_deref()
            .map(|path| read_importance(path, &normalised))
            .transpose()?;
        let mut warnings = normalised.warnings.clone();
        let (importance, digest) = importance.unzip();
        warnings.extend(importance.as_ref().map(|it| weighed(it, &normalised)).unwrap_or_default());
        let stats = options.stats.as_deref().map(|folder| read_moments(folder, &normalised));
        let moments = stats.transpose()?;
        warnings.extend(moments.as_ref().and_then(|it| it.shortage(&measured(&normalised))));
        let learned = options.learned.as_deref().map(LearnedScales::open).transpose()?;
        let digest = moments.as_ref().map(StoredMoments::digest).or(digest);
        let digest = learned.as_ref().map(LearnedScales::digest).or(digest);
        let native = |name: &str| source.logical(name).map(|tensor| tensor.native);
        let dtype =
            choice.dtype.unwrap_or_else(|| formats::main_dtype(&normalised.tensors, native));
        let given = options.budget.map(|asked| {
            let measured = budget::read(asked, options.stats.as_deref())?;
            let task = budget::Task { normalised: &normalised, choice: &choice, dtype };
            if asked == Budget::Fit {
                task.give_what_fits(&options, &measured)
            } else {
                Ok(task.give(&options, asked, &measured)?)
            }
        });
        let given = given.transpose()?;
        let formats = given.as_ref().map(|given| &given.formats);
        let quantization = formats::choose(&normalised, &choice, digest, dtype, formats)?;
        if let (Some(asked), Some(given)) = (options.budget, &given) {
            let matrices = normalised.tensors.iter().filter(|tensor| tensor.quantizable);
            let formats: Vec<_> = matrices.map(|it| format_of(it, &quantization)).collect();
            warnings.push(budget::summary(asked, given, &formats));
        }
        warnings.extend(learned.as_ref().map(LearnedScales::summary));
        warnings.extend(source.notes.iter().cloned());
        warnings.extend(text_warnings(source)?);
        warnings.extend(ignored_keys(&source.ignored_keys));
        warnings.extend(source.adapters.warnings.iter().cloned());
        warnings.extend(left_out(&normalised.ignored));
        let plan = Self::of(normalised, quantization, options, choice.rounding, warnings);
        let factors = moments.as_ref().map_or(0, StoredMoments::working_bytes);
        let merge_bytes = source.adapters.working_bytes() + source.working_bytes() + factors;
        Ok(Self { importance, moments, learned, merge_bytes, ..plan })
    }

    /// The plan that follows once it is known how every matrix is stored.
    pub(crate) fn of(
        normalised: Normalised,
        quantization: Quantization,
        options: ConvertOptions,
        rounding: Rounding,
        warnings: Vec<String>,
    ) -> Self {
        let shard = |(stages, groups): (Stages, Vec<RankGroup>)| {
            let layout =
                layout::plan(&normalised, &quantization, (stages, &groups), options.experts);
            let steps = steps(&normalised, &quantization, &layout);
            let packages = files::plan(&steps, &layout);
            let memory = memory::of_ranks(
                &normalised.spec,
                &layout,
                &packages.bytes_per_rank(),
                &options.nodes,
                (options.context, options.kv),
            );
            (layout, steps, packages, memory)
        };
        let layers = stages::Costs::new(&normalised, &quantization);
        let mut planned = shard(stages::even(&layers, &options));
        // Where the most even sharding exceeds a node's limit, layers first move between stages,
        // then every stage is sharded within its own nodes' limits.
        let caches =
            memory::layer_caches(&normalised.spec, &planned.0, (options.context, options.kv));
        if let Some(moved) = stages::within(&layers, &options, &planned.3, &caches) {
            planned = shard(moved);
        }
        if let Some(weighted) = stages::weighted(&planned.0, &planned.3) {
            planned = shard(weighted);
        }
        let (layout, steps, packages, memory) = planned;
        Self {
            options,
            normalised,
            layout,
            quantization,
            memory,
            warnings,
            importance: None,
            moments: None,
            learned: None,
            merge_bytes: 0,
            rounding,
            steps,
            packages,
        }
    }

    /// The user's rules, if they made this plan.
    pub(crate) fn own_rules(&self) -> Option<&OwnRules> {
        let made = |own: &&OwnRules| own.pack.id() == self.normalised.spec.rules;
        self.options.rules.as_ref().filter(made)
    }

    /// Whether every rank fits its node.
    #[must_use]
    pub fn fits(&self) -> bool {
        self.memory.iter().all(RankMemory::fits)
    }

    /// Every tensor: name, format, and where it goes (`replicated`, `once`, or its axis).
    pub fn tensors(&self) -> impl Iterator<Item = (&str, MatrixFormat, &str)> {
        self.steps.iter().map(|step| {
            let place = match &step.parts[0].destination {
                Destination::Shared => "replicated",
                Destination::Once => "one rank only",
                Destination::Sharded(shards) => match shards.first() {
                    Some(TensorShard::Range { axis, .. }) => axis,
                    _ => step.tensor.sharding.axis().unwrap_or("cut"),
                },
            };
            (step.tensor.name.as_str(), step.format, place)
        })
    }

    /// Bytes of source tensors that will be read.
    #[must_use]
    pub fn source_bytes(&self) -> u64 {
        self.steps.iter().map(|step| source_size(&step.tensor)).sum()
    }

    /// Threads that may work at a time within the memory budget: each holds a block of the
    /// source, once more in the stored type, its stored form, and a piece of that; of sources that
    /// are decoded also what is read and what becomes of it.
    pub(crate) fn workers(&self) -> usize {
        // A matrix that is turned on the way is read whole, and held as read and as turned.
        let least = |step: &TensorConversion| {
            let tensor = &step.tensor;
            tensor.view.unit() * tensor.columns() * tensor.dtype.size_bytes() as u64
        };
        let block = self.steps.iter().map(least).max().unwrap_or(0).max(BLOCK_BYTES);
        let budget = self.options.memory_bytes.saturating_sub(BASE_BYTES);
        (budget / (6 * block + self.merge_bytes)).max(1).try_into().unwrap_or(usize::MAX)
    }

    /// The report of a conversion of this plan.
    pub(crate) fn report(&self, tensors: BTreeMap<String, TensorReport>) -> Report {
        let stored =
            self.steps.iter().flat_map(|step| &step.parts).map(StoredTensor::size_bytes).sum();
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

/// What is to be said of the source's tokenizer and chat template.
fn text_warnings(source: &Source) -> Result<Vec<String>, PlanError> {
    let mut warnings = Vec::new();
    match &source.tokenizer {
        Some(Ok(converted)) => {
            warnings.push(format!("tokenizer.json is made of {}", converted.from));
        }
        Some(Err(problem)) => {
            warnings.push(format!("{problem}; the packages compute logits but cannot chat"));
        }
        None if !source.text.contains_key("tokenizer.json") => {
            warnings.push(
                "the source has no tokenizer.json: the packages compute logits but cannot chat"
                    .to_owned(),
            );
        }
        None => {}
    }
    match chat::lookup(&source.text) {
        Ok(Some(templates)) => {
            let probed = chat::probe(&templates, &source.special_tokens());
            let file = templates.file;
            let probed = probed.map_err(|problem| PlanError::Template { file, problem })?;
            let problem = probed.problem;
            warnings.extend(problem.map(|problem| format!("{}: {problem}", templates.file)));
        }
        Ok(None) => {}
        Err(problem) => warnings.push(problem),
    }
    Ok(warnings)
}

/// Resolves a checkpoint that may be an embedding model: dense layers after the pooling are no part of
/// the decoder that rules know.
pub(crate) fn resolve_all(
    config: &Value,
    tensors: Vec<SourceTensor>,
    packs: &[RulePack],
    embedding: Option<&Embedding>,
) -> Result<Normalised, ResolveError> {
    let (dense, tensors): (Vec<_>, Vec<_>) =
        tensors.into_iter().partition(|tensor| tensor.name.starts_with(DENSE));
    let mut normalised = resolve(config, &tensors, packs)?;
    normalised.spec.embedding = embedding.cloned();
    normalised.tensors.extend(dense.into_iter().map(dense_layer));
    Ok(normalised)
}

/// A tensor of a dense layer after the pooling: small, on every rank, and as it is.
fn dense_layer(tensor: SourceTensor) -> TensorPlan {
    let [rows, columns] = rows_and_columns(&tensor.shape);
    TensorPlan {
        sources: vec![tensor.name.clone()],
        name: tensor.name,
        view: View::whole(rows, columns),
        dtype: tensor.dtype,
        shape: tensor.shape,
        sharding: ShardingRule::Replicate,
        role: Role::Linear,
        quantizable: false,
        exact: true,
        below: None,
        layer: None,
        stored_as: None,
        published: None,
    }
}

pub(crate) fn source_size(tensor: &TensorPlan) -> u64 {
    tensor.shape.iter().product::<u64>() * tensor.dtype.size_bytes() as u64
}

/// What rules leave out of the packages, a sentence for each reason.
fn left_out(ignored: &[(String, String)]) -> Vec<String> {
    let mut reasons: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (name, reason) in ignored {
        reasons.entry(reason).or_default().push(name);
    }
    let sentence = |(reason, names): (&&str, &Vec<&str>)| {
        let tensors = if names.len() == 1 { "tensor is" } else { "tensors are" };
        format!("{} {tensors} left out, such as {:?}: {reason}", names.len(), names[0])
    };
    reasons.iter().map(sentence).collect()
}

/// The keys that the user has taken out of the configuration.
fn ignored_keys(keys: &BTreeMap<String, Value>) -> Option<String> {
    let listed: Vec<String> = keys.iter().map(|(key, value)| format!("{key} = {value}")).collect();
    (!keys.is_empty())
        .then(|| format!("config keys left out by --ignore-config-key: {}", listed.join(", ")))
}

/// The user's rules before the compiled-in ones.
pub(crate) fn packs(own: Option<&OwnRules>) -> Vec<RulePack> {
    own.map(|own| own.pack.clone()).into_iter().chain(RulePack::builtin()).collect()
}

/// Some checkpoints store a tied head a second time; that is harmless while the bytes agree.
fn check_tied(source: &Source, normalised: &Normalised, head: &str) -> Result<(), PlanError> {
    let embedding = normalised.tensors.iter().find(|tensor| tensor.role == Role::Embed);
    let same = embedding.map(|tensor| source.is_same(&tensor.sources[0], head)).transpose()?;
    if same == Some(true) { Ok(()) } else { Err(PlanError::Tied { head: head.to_owned() }) }
}

/// Every tensor with its format and its parts.
fn steps(
    normalised: &Normalised,
    quantization: &Quantization,
    layout: &Layout,
) -> Vec<TensorConversion> {
    let step = |tensor: &TensorPlan| {
        let format = formats::format_of(tensor, quantization);
        let parts = files::parts(normalised, tensor, format, quantization.dtype, layout);
        TensorConversion { tensor: tensor.clone(), format, parts }
    };
    normalised.tensors.iter().map(step).collect()
}
