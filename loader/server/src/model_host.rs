//! Models that a server can load and unload, as the server sees them: what they are, what memory
//! each takes on which machine, and who starts and ends them. It must not know how ranks are run.

use std::time::Duration;

use shardpack_chat::model::ChatModel;
use shardpack_engine_api::EngineHandle;

use super::model_info::ModelInfo;

/// What clients are told of a model whether it is loaded or not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelCard {
    /// Names by which clients may ask for it; the first is reported, and unique among all models.
    pub names: Vec<String>,
    /// What it is made of.
    pub info: ModelInfo,
    /// Longest sequence in tokens.
    pub context: u32,
    /// Whether it makes embeddings and no text.
    pub is_embedding: bool,
    /// Whether its template takes tools.
    pub has_tools: bool,
    /// Whether it thinks before it answers.
    pub thinks: bool,
}

impl ModelCard {
    /// The card of a model whose text side is open.
    #[must_use]
    pub fn of(model: &ChatModel, names: Vec<String>, info: ModelInfo) -> Self {
        Self {
            names,
            info,
            context: model.max_positions(),
            is_embedding: model.embedding().is_some(),
            has_tools: model.has_tools(),
            thinks: model.output().style().thinking.is_some(),
        }
    }

    /// The name that is reported.
    #[must_use]
    pub fn name(&self) -> &str {
        self.names.first().map_or("", String::as_str)
    }
}

/// What a loaded model takes of one machine's memory, as planned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryShare {
    /// The machine, by its name among [`ModelHost::machines`].
    pub machine: String,
    /// Weights of the ranks there.
    pub weights_bytes: u64,
    /// Their KV cache.
    pub cache_bytes: u64,
    /// What they need for a step.
    pub working_bytes: u64,
}

impl MemoryShare {
    /// All of it.
    #[must_use]
    pub const fn total_bytes(&self) -> u64 {
        self.weights_bytes.saturating_add(self.cache_bytes).saturating_add(self.working_bytes)
    }
}

/// A machine's memory for models.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    /// What people call it.
    pub name: String,
    /// What all models there may take together.
    pub limit_bytes: u64,
}

/// A model that can be loaded.
#[derive(Clone, Debug)]
pub struct ModelEntry {
    /// What clients are told of it.
    pub card: ModelCard,
    /// What it takes while it is loaded, one entry for each machine.
    pub memory: Vec<MemoryShare>,
    /// Loaded when the server starts, and unloaded only where somebody asks for it.
    pub is_pinned: bool,
    /// Its weight when the places for requests are shared among loaded models; at least 1.
    pub priority: u32,
    /// Time without requests after which it is unloaded; absent: never.
    pub idle_timeout: Option<Duration>,
}

/// A model that has been loaded.
pub struct StartedModel {
    /// Its text side.
    pub model: ChatModel,
    /// Its engine, which is ready.
    pub engine: EngineHandle,
    /// Names of its nodes, in rank order.
    pub nodes: Vec<String>,
}

/// Takes a few words on how far loading is.
pub type LoadReport<'a> = &'a dyn Fn(&str);

/// Why a model is not loaded or unloaded, in a sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct HostError(pub String);

/// Another set for a model that is served.
#[derive(Clone, Debug)]
pub struct AddedModel {
    /// By which it is loaded and unloaded; no other has it.
    pub key: String,
    /// What it is, under the names of the model.
    pub entry: ModelEntry,
}

/// Starts and ends models, each by its key, which is its first name unless it was [added]. The server
/// decides which and when, and calls it from threads of its own, for different models at the same time,
/// for one model never twice at once.
///
/// [added]: ModelHost::add
pub trait ModelHost: Send + Sync {
    /// Every model that can be served, in the order in which they are listed.
    fn models(&self) -> Vec<ModelEntry>;

    /// The machines on which they run.
    fn machines(&self) -> Vec<Machine>;

    /// Loads a model; returns once it answers, within `timeout`. After an error nothing of it is left in
    /// memory.
    fn load(
        &self,
        key: &str,
        timeout: Duration,
        report: LoadReport<'_>,
    ) -> Result<StartedModel, HostError>;

    /// Ends a model; returns once its memory is free.
    fn unload(&self, key: &str) -> Result<(), HostError>;

    /// Makes a set, by its name in the store of models, one that can be loaded for the model `name` in
    /// place of the set that it has; nothing if it has this set.
    fn add(&self, name: &str, set: &str) -> Result<Option<AddedModel>, HostError>;

    /// Knows a set no more, which is not loaded.
    fn forget(&self, key: &str);
}

/// A package of a served model that was read whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckedPackage {
    /// Its rank.
    pub rank: u32,
    /// Where it is: a node, or a folder of this machine.
    pub place: String,
    /// Bytes that were read and hashed.
    pub read_bytes: u64,
    /// What is wrong with it.
    pub findings: Vec<String>,
}

/// Verifies packages that are served.
pub trait PackageCheck: Send + Sync {
    /// Reads every byte of the packages of a model, by its key. An error says that they could not be
    /// read, and not that they are wrong.
    fn check(&self, key: &str) -> Result<Vec<CheckedPackage>, HostError>;
}

/// How a server loads models.
#[derive(Clone, Copy, Debug)]
pub struct HostOptions {
    /// A request for a model that is not loaded loads it. Without it every model is loaded when the
    /// server starts, and later ones where a client with the scope `admin` says so.
    pub on_demand: bool,
    /// Longest time that a request waits for its model, and that loading may take.
    pub load_timeout: Duration,
}

impl Default for HostOptions {
    fn default() -> Self {
        // As long as a request waits for its first token.
        Self { on_demand: false, load_timeout: Duration::from_mins(10) }
    }
}
