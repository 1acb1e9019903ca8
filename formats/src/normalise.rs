//! From a published checkpoint to normalised tensors and a normalised architecture.
//!
//! [`resolve`] reads a configuration and a list of tensors through the rules of its family and
//! either accounts for every key and every tensor or refuses. It moves no weights and knows
//! nothing of ranks: what it says holds for any number of them.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{
    rope::RopeParameters,
    rules::{Align, Role, RulePack, ShardingRule},
    spec::Spec,
};
use shardpack_quantize::dtype::Dtype;

mod accounting;
mod architecture;
mod axes;
mod block_sparse;
mod compressed_attention;
mod elsewhere;
mod error;
mod family;
mod mlx;
mod parts;
mod respelt;
mod scaffold;
mod scopes;
mod skeleton;
#[cfg(test)]
pub(crate) mod tests;
mod view;

pub use error::{ResolveError, TensorList};
pub use family::may_be_headless;
pub use mlx::{Writer, changed_values, may_be_changed};
pub use scaffold::{Scaffold, scaffold};
pub use skeleton::expected_tensors;
pub use view::{Run, View};

/// Most layers of a model: the deepest published one has under 200.
pub const MAX_LAYERS: u32 = 4096;

/// Largest size, length or count in a configuration: two orders above any published one, and
/// small enough that products of two fit 64 bits.
pub const MAX_SIZE: u32 = 1 << 28;

/// Most units of an axis that another one follows, which a table lists: the most query heads of a
/// published model are under 300.
pub const MAX_LISTED_UNITS: u32 = 1 << 16;

/// A tensor of a checkpoint, as a reader sees it: already decoded to floats.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceTensor {
    /// Its published name.
    pub name: String,
    /// Its element type.
    pub dtype: Dtype,
    /// Its shape, `[out, in]` for a matrix.
    pub shape: Vec<u64>,
}

/// A checkpoint that is understood in full.
#[derive(Clone, Debug, PartialEq)]
pub struct Normalised {
    /// What the engine computes.
    pub spec: Spec,
    /// The position embedding as the configuration states it.
    pub rope: RopeParameters,
    /// A second one, of the layers that see a window.
    pub local_rope: Option<RopeParameters>,
    /// Axes along which tensors can be sharded, sorted by name.
    pub axes: Vec<Axis>,
    /// Every tensor, in the order in which layers run.
    pub tensors: Vec<TensorPlan>,
    /// The source tensor of an output head that a tied model has all the same. It has the
    /// embedding's shape and is in no plan: the caller must make sure that its bytes are the
    /// embedding's. If they are not, the model is not tied, and resolving it again with
    /// `tie_word_embeddings` false keeps both.
    pub tied_duplicate: Option<String>,
    /// Source tensors that a rule ignores, with the rule's reason.
    pub ignored: Vec<(String, String)>,
    /// The configuration of packages, where it is not the source's: that of the text model by itself,
    /// taken out of one that describes more, or with keys put back that another tool has moved.
    pub text_config: Option<Map<String, Value>>,
    /// What a user should know, one sentence each.
    pub warnings: Vec<String>,
}

/// A dimension along which tensors are sharded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Axis {
    /// Its name (`"q"`).
    pub name: String,
    /// Units, such as heads.
    pub len: u32,
    /// Rows or columns of one unit; a shard boundary never splits a unit.
    pub unit: u32,
    /// Rows or columns of one unit in tensors where it has another width.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub also: Vec<u32>,
    /// What else shard boundaries must respect.
    #[serde(default)]
    pub align: Align,
    /// The axis whose ranges decide this one's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub follow: Option<Follow>,
}

/// An axis whose ranges follow those of another one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Follow {
    /// The other axis.
    pub axis: String,
    /// For each unit of the other axis the unit of this one that it uses; never decreasing.
    pub map: Vec<u32>,
}

/// One tensor of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorPlan {
    /// Normalised name.
    pub name: String,
    /// Source tensors that it is made of, one after the other.
    pub sources: Vec<String>,
    /// What is taken of each.
    pub view: View,
    /// Element type of the sources.
    pub dtype: Dtype,
    /// Unsharded shape: `[out, in]` for a matrix, `[experts or heads, out, in]` for a stack.
    pub shape: Vec<u64>,
    /// How it is distributed; its axis has `len · unit` rows or columns of it.
    pub sharding: ShardingRule,
    /// What it is for.
    pub role: Role,
    /// Whether it may be quantized.
    pub quantizable: bool,
    /// Whether it keeps the source's element type.
    pub exact: bool,
    /// What its values are below, all of them whole and at least 0; it is stored in F32.
    pub below: Option<u32>,
    /// The layer that it belongs to.
    pub layer: Option<u32>,
    /// Its name in weight files, if it is another one there: that of a matrix which other programs
    /// keep in one piece, and whose rows are those of all tensors of this name, in order.
    pub stored_as: Option<StoredAs>,
    /// What the publisher of such a model has it in, if not in a tensor of its own name.
    pub published: Option<Published>,
}

/// Tensors that a normalised one is a part of, or is made of, in published checkpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Published {
    /// Their names.
    pub names: Vec<String>,
    /// The shape of each.
    pub shape: Vec<u64>,
    /// What of each it is.
    pub view: View,
}

/// What weight files say of a tensor that they list otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredAs {
    /// Its name there.
    pub name: String,
    /// Its dimensions there but the first, of as many elements, if they are others.
    pub inner: Option<Vec<u64>>,
}

impl TensorPlan {
    /// The module's name: without `.weight` or `.bias`.
    #[must_use]
    pub fn module(&self) -> &str {
        self.name.rsplit_once('.').map_or(&self.name, |(module, _)| module)
    }

    /// Innermost rows: each index of all dimensions but the last; a vector's elements.
    #[must_use]
    pub fn rows(&self) -> u64 {
        rows_and_columns(&self.shape)[0]
    }

    /// Elements of an innermost row; 1 for a vector.
    #[must_use]
    pub fn columns(&self) -> u64 {
        rows_and_columns(&self.shape)[1]
    }
}

/// A shape as one matrix: all dimensions but the last, and the last; a vector as a column.
#[must_use]
pub fn rows_and_columns(shape: &[u64]) -> [u64; 2] {
    match shape {
        [] => [1, 1],
        [elements] => [*elements, 1],
        [outer @ .., last] => [outer.iter().product(), *last],
    }
}

impl Axis {
    /// Rows or columns of the whole axis.
    #[must_use]
    pub fn size(&self) -> u64 {
        u64::from(self.len) * u64::from(self.unit)
    }
}

/// Resolves a checkpoint by the first pack that knows its `model_type`: `config` is its
/// `config.json`, `sources` are all tensors of all its files. Packs of the user's come before
/// [`RulePack::builtin`].
pub fn resolve(
    config: &Value,
    sources: &[SourceTensor],
    packs: &[RulePack],
) -> Result<Normalised, ResolveError> {
    let config = config.as_object().ok_or(ResolveError::NotAnObject)?;
    let text = family::text_model(config, packs);
    let config = &text.config;
    let mut warnings = Vec::new();
    let family = family::choose(config, packs)?;
    warnings.extend(family.check_keys(config)?);
    let inventory = accounting::Inventory::new(&family, sources)?;
    let mut scope = scopes::config_scope(&family, config)?;
    warnings.extend(scopes::replace_rows(&family, &inventory, &mut scope));
    scopes::add_lets(&family, &mut scope)?;
    let layers = scopes::layer_scopes(&family, &scope)?;
    family.check_requirements(&scope, &layers)?;
    let axes = axes::resolve(&family, &scope)?;
    let architecture = architecture::resolve(&family, config, &scope, &layers)?;
    let plan = inventory.plan(&family, &scope, &layers, &axes)?;
    Ok(Normalised {
        spec: architecture.spec,
        rope: architecture.rope,
        local_rope: architecture.local_rope,
        axes,
        tensors: plan.tensors,
        tied_duplicate: plan.tied_duplicate,
        ignored: plan.ignored,
        text_config: match (text.is_taken_out, text.is_respelt) {
            (true, _) => Some(text_config(&family, config)),
            (false, true) => Some(config.clone()),
            (false, false) => None,
        },
        warnings,
    })
}

/// Whether the rules of a configuration's family read a key: then the model is another one without
/// it.
#[must_use]
pub fn reads(config: &Value, key: &str, packs: &[RulePack]) -> bool {
    let Some(config) = config.as_object() else { return false };
    let text = family::text_model(config, packs);
    let is_known = |family: family::FamilyRules<'_>| {
        family.used_keys().any(|used| used == key) || ["model_type", "architectures"].contains(&key)
    };
    family::choose(&text.config, packs).is_ok_and(is_known)
}

/// The text model's configuration as that of a model by itself.
fn text_config(
    family: &family::FamilyRules<'_>,
    config: &Map<String, Value>,
) -> Map<String, Value> {
    let mut config = config.clone();
    config.insert("model_type".to_owned(), family.canonical().into());
    config.extend(family.class().map(|class| ("architectures".to_owned(), vec![class].into())));
    config
}
