//! Rule packs: how the checkpoints of an architecture are named, shaped, sharded and computed, as
//! data. A pack is a TOML file, compiled in or given by the user.
//!
//! ```toml
//! schema = 1
//! id = "dense-gqa"
//! todo = []                       # open points of scaffolded rules; a file with any is refused
//! strip = [{ from = "module.", to = "" }]                # prefixes, each at most once
//! ignore = [{ pattern = "*.inv_freq", reason = "…" }]    # tensors that are not needed
//! [config]
//! used = ["hidden_size", …]       # keys that expressions may name
//! ignored = ["torch_dtype", …]    # keys without effect; any other is refused unless neutral
//! [let]
//! name = "expression"             # over keys and other names; `L` makes it per layer
//! [[require]]
//! that = "expression"             # `L` makes it per layer
//! message = "why not"
//! [families.llama]                # one per model_type; adds to `config`, `let`, `require`, `ignore`
//! architectures = ["LlamaForCausalLM"]
//! same_as = "other"               # what it is called once it stands by itself
//! within = ["whole"]              # whose text model it is, whatever that calls itself
//! [spec]                          # expressions for formats::spec::Spec
//! [axes]
//! q = { len = "heads", unit = "head_size", align = "group" }
//! kv = { len = "kv_heads", unit = "head_size", follow = "q" }  # also = ["value_size"]: other units
//! [[tensors]]                     # in the order in which layers run
//! name = "model.layers.{L}.self_attn.q_proj.weight"
//! shape = ["q_size", "hidden_size"]
//! shard = "column(q)"   # replicate, column(axis), row(axis), vector(axis), vocab, once, and
//!                       # expert_column, _row, _vector, _once: inside each expert, or whole ones
//! role = "linear"       # embed, head, norm, bias, linear, router
//! exact = true          # keeps the source's element type; routers do anyway
//! quantize = true       # default: linear, embed and head
//! required = "expr"     # exists exactly if this holds; default true; false: may be absent
//! rows = "vocab_size"   # the tensor's rows replace this key
//! below = "experts"     # holds whole numbers from 0 on below this, as F32 whatever the source has
//! stored_as = "model.layers.{L}.self_attn.qkv_proj.weight"   # its name in weight files; tensors
//!                       # of one such name stand one after the other there, in this order
//! stored_inner = ["1", "kernel"]     # its dimensions there but the first, of as many elements
//!
//! [[tensors.from]]                # if it is stored otherwise; the first form that is there
//! name = "model.layers.{L}.mlp.experts.{E}.up_proj.weight"    # one source per first index
//! [[tensors.from]]
//! name = "model.layers.{L}.mlp.experts.gate_up_proj"
//! shape = ["experts", "2 * ffn", "hidden_size"]  # default: the tensor's own
//! blocks = "experts"              # matrices one after the other in the source; default 1
//! rows = { first = "ffn", count = "ffn", step = 1 }           # taken of each; default all
//! transpose = "source"            # stored [in, out]; or "result": turned after rows are taken
//! elements = true                 # rows are single elements (vectors, and biases of experts)
//! ```
//!
//! A pack that `extends` another one takes all of it but the families, and adds to it or replaces
//! parts of it: see the module `extend`.
//!
//! Names are checked when a pack is parsed: an expression can only name what is declared, so a
//! misspelt key is found before any model is.

use std::{collections::BTreeMap, sync::Arc};

use toml::Table;

use crate::expr::{Expr, ExprError};

mod check;
mod extend;
mod file;
mod from;
mod mlx;
mod name;
mod own;
mod parts;
#[cfg(test)]
mod tests;

pub use file::{Align, EXPERTS_AXIS, Role, ShardingRule};
pub(crate) use file::{
    AttentionRules, Family, HeadGateRules, IgnoreRule, LayerRules, Presence, RequireRule,
    RopeRules, SpecRules, StripRule, TensorRule,
};
pub(crate) use from::FromRule;
pub use from::Turn;
pub(crate) use mlx::{MlxRules, MlxValueRule};
pub(crate) use name::{NamePattern, matches};
pub use own::{OwnRules, OwnRulesError};
pub(crate) use parts::{
    HyperConnectionRules, IndexerRules, LinearAttentionRules, MlaRules, MoeRules, MultiplierRules,
    RouterRules, ShortConvolutionRules,
};

/// Largest rule file in bytes: the largest known has under 20 KiB.
pub const MAX_RULES_BYTES: usize = 1 << 20;

/// Version of the rule files' form.
pub const SCHEMA: u32 = 1;

/// What packs build on and no model has by itself.
const BASES: &[(&str, &str)] = &[("decoder.toml", include_str!("../rules/decoder.toml"))];

/// The packs that are compiled in, by file name: every other file of `rules/` but the refusals.
const BUILTIN: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/packs.rs"));

/// What several packs add to those that they extend.
const PARTS: &[(&str, &str)] = &[("mamba", include_str!("../rules/parts/mamba.toml"))];

/// Architectures that are known and refused.
const REFUSED: &str = include_str!("../rules/refused.toml");

/// Why the program refuses a `model_type` that it knows by name.
#[must_use]
pub fn refused(model_type: &str) -> Option<String> {
    let table: Table = toml::from_str(REFUSED).expect("a test parses it");
    table.get("refused")?.get(model_type)?.as_str().map(str::to_owned)
}

/// A checked rule pack.
#[derive(Clone, Debug)]
pub struct RulePack {
    /// Shared: a copy of a pack compiles no copying of its rules in the crates above.
    pub(crate) file: Arc<file::PackFile>,
    /// For each family, its names in an order in which each follows those that it mentions.
    pub(crate) lets: BTreeMap<String, Vec<Let>>,
}

/// A name that a pack defines.
#[derive(Clone, Debug)]
pub(crate) struct Let {
    pub(crate) name: String,
    pub(crate) value: Expr,
    /// Whether it depends on the layer.
    pub(crate) per_layer: bool,
}

/// A rule file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RuleError {
    /// Larger than [`MAX_RULES_BYTES`].
    #[error("a rule file of {0} bytes is larger than {MAX_RULES_BYTES}")]
    TooLarge(usize),
    /// Not TOML of this form.
    #[error("not a rule file")]
    Toml(#[from] toml::de::Error),
    /// Another version of the form.
    #[error("rule file of schema {found}, this program reads {SCHEMA}")]
    Schema {
        /// Its version.
        found: u32,
    },
    /// An expression with a name that is not declared.
    #[error("{place}")]
    Expression {
        /// Where it stands.
        place: String,
        /// What is wrong with it.
        source: ExprError,
    },
    /// Scaffolded rules with open points.
    #[error(
        "todo: {count} points are not decided, the first is {first:?}; take each out of the list once it is decided"
    )]
    Open {
        /// Points.
        count: usize,
        /// The first one.
        first: String,
    },
    /// Something that contradicts itself.
    #[error("{place}: {problem}")]
    Invalid {
        /// Where it stands.
        place: String,
        /// What is wrong there.
        problem: String,
    },
}

impl RulePack {
    /// Parses and checks a rule file.
    pub fn parse(text: &str) -> Result<Self, RuleError> {
        if text.len() > MAX_RULES_BYTES {
            return Err(RuleError::TooLarge(text.len()));
        }
        Self::from_table(extend::extended(toml::from_str(text)?, 0)?)
    }

    /// A pack from a file with all that it extends.
    fn from_table(mut table: Table) -> Result<Self, RuleError> {
        let tensors = match table.insert("tensors".to_owned(), toml::Value::Array(Vec::new())) {
            Some(toml::Value::Array(tensors)) => tensors,
            _ => Vec::new(),
        };
        let mut file: file::PackFile = serde::Deserialize::deserialize(table)?;
        // One by one, so that an error says in which.
        for tensor in tensors {
            let name = tensor.get("name").and_then(toml::Value::as_str).unwrap_or("without a name");
            let place = format!("tensor {name}");
            let rule = serde::Deserialize::deserialize(tensor).map_err(|error: toml::de::Error| {
                RuleError::Invalid { place, problem: error.to_string().trim().replace('\n', " ") }
            });
            file.tensors.push(rule?);
        }
        if let Some(first) = file.todo.first() {
            return Err(RuleError::Open { count: file.todo.len(), first: first.clone() });
        }
        inherit(&mut file)?;
        check::check(file)
    }

    /// The packs that are compiled in.
    #[must_use]
    pub fn builtin() -> Vec<Self> {
        BUILTIN
            .iter()
            .map(|(_, text)| Self::parse(text).expect("a test parses every compiled-in pack"))
            .collect()
    }

    /// Its name.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.file.id
    }

    /// The values of `model_type` that it covers, sorted.
    pub fn model_types(&self) -> impl Iterator<Item = &str> {
        self.file.families.keys().map(String::as_str)
    }
}

/// The text of a compiled-in pack.
pub(crate) fn builtin_text(id: &str) -> Option<&'static str> {
    let name = format!("{id}.toml");
    BASES.iter().chain(BUILTIN).find(|(builtin, _)| *builtin == name).map(|(_, text)| *text)
}

/// The text of a compiled-in part.
pub(crate) fn part_text(name: &str) -> Option<&'static str> {
    PARTS.iter().find(|(part, _)| *part == name).map(|(_, text)| *text)
}

/// Takes over the lists of the pack's base.
fn inherit(file: &mut file::PackFile) -> Result<(), RuleError> {
    let Some(base) = &file.base else { return Ok(()) };
    let name = format!("{base}.toml");
    let Some((_, text)) = BASES.iter().find(|(builtin, _)| *builtin == name) else {
        return Err(RuleError::Invalid {
            place: "base".to_owned(),
            problem: format!("{base:?} is not a compiled-in pack"),
        });
    };
    // By way of a table, as every pack: one deserializer of the rule types is compiled, not two.
    let base: file::PackFile = serde::Deserialize::deserialize(toml::from_str::<Table>(text)?)?;
    file.strip.splice(0..0, base.strip);
    file.ignore.extend(base.ignore);
    let own = &file.config;
    let new = |key: &String| !own.used.contains(key) && !own.ignored.contains(key);
    // A family may give a key of the base a meaning of its own.
    let taken = |key: &String| {
        file.families
            .values()
            .any(|family| family.used.contains(key) || family.ignored.contains(key))
    };
    let ignored: Vec<String> =
        base.config.ignored.into_iter().filter(|key| new(key) && !taken(key)).collect();
    file.config.ignored.extend(ignored);
    Ok(())
}
