//! What the user asks of a conversion, and the checks that need no source.

use std::{path::PathBuf, str::FromStr, sync::Arc};

use shardpack_formats::{OwnRules, memory::KvType};
use shardpack_manifests::signature::SigningKey;
use shardpack_quantize::{Dtype, FloatFormat, Rounding};

use super::PlanError;
use crate::{
    cancel::Cancel,
    recipe::{Budget, MainFormat, Overrides, Recipe},
    report::Threshold,
};

/// Most ranks of a group: Thunderbolt meshes end well below, and every pair is a connection.
pub const MAX_RANKS: u32 = 8;

/// What the user asks for.
#[derive(Clone, Debug)]
pub struct ConvertOptions {
    /// Folder that is written; must not exist or be empty.
    pub output: PathBuf,
    /// 2, 3, 4, 5, 6 or 8, or 16 for not quantized.
    pub bits: u32,
    /// Weights per scale: 32, 64 or 128.
    pub group_size: u32,
    /// Float groups for all that would have `bits`, which are its own; affine groups without it.
    pub float: Option<FloatFormat>,
    /// The nodes to shard for.
    pub nodes: Nodes,
    /// Pipeline stages into which the nodes are divided; 1 where every node runs all layers.
    pub stages: u32,
    /// How scale, bias and integers are chosen: the name of a [`Rounding`].
    pub rounding: String,
    /// Type of scales and of everything that is not quantized, as the container spells it; the
    /// source's own, or BF16 for an F32 source, when absent.
    pub dtype: Option<String>,
    /// Name to serve the model under.
    pub name: Option<String>,
    /// Which matrices get more bits: the name of a [`Recipe`].
    pub recipe: String,
    /// How much all weights may take: bits are given out by what `stats` says of their sensitivity.
    pub budget: Option<Budget>,
    /// Exceptions, `pattern=bits[:group]` or `pattern=format`.
    pub overrides: Vec<String>,
    /// An importance file of llama.cpp.
    pub importance: Option<PathBuf>,
    /// A folder of second moments that `calibrate` has measured, for rounding with error feedback.
    pub stats: Option<PathBuf>,
    /// A folder of scales and biases that were learned for the integers of this conversion.
    pub learned: Option<PathBuf>,
    /// What of the report makes the conversion fail, such as `rmse>0.1`.
    pub fail_on: Vec<String>,
    /// How mixtures of experts are sharded.
    pub experts: ExpertSharding,
    /// Rules of the user's, which come before the compiled-in ones.
    pub rules: Option<OwnRules>,
    /// Signs every package with this key.
    pub sign: Option<Arc<SigningKey>>,
    /// Tokens of context to plan memory for; the model's own longest when absent.
    pub context: Option<u32>,
    /// How the engine will store keys and values, for the same plan.
    pub kv: KvType,
    /// Bytes that the conversion may hold in memory.
    pub memory_bytes: u64,
    /// Ends the conversion between two tensors; the next one goes on from there.
    pub cancel: Cancel,
}

impl ConvertOptions {
    /// Memory that a conversion takes unless told otherwise.
    pub const MEMORY_BYTES: u64 = 512 << 20;

    /// Four bits, groups of 64, refined, for `nodes` equal nodes.
    #[must_use]
    pub fn new(output: PathBuf, nodes: u32) -> Self {
        Self {
            output,
            bits: 4,
            group_size: 64,
            float: None,
            nodes: Nodes::Equal(nodes),
            stages: 1,
            rounding: Rounding::Refined.name().to_owned(),
            dtype: None,
            name: None,
            recipe: "uniform".to_owned(),
            budget: None,
            overrides: Vec::new(),
            importance: None,
            stats: None,
            learned: None,
            fail_on: Vec::new(),
            sign: None,
            experts: ExpertSharding::default(),
            rules: None,
            context: None,
            kv: KvType::F32,
            memory_bytes: Self::MEMORY_BYTES,
            cancel: Cancel::default(),
        }
    }
}

/// How mixtures of experts are sharded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExpertSharding {
    /// Inside the experts, unless that is uneven and there are enough of them.
    #[default]
    Auto,
    /// Every rank holds a part of each expert: all ranks have the same work for every token.
    Inside,
    /// Every rank holds some experts whole.
    Whole,
}

impl FromStr for ExpertSharding {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            "inside" => Ok(Self::Inside),
            "whole" => Ok(Self::Whole),
            _ => Err(format!("{text:?} is not possible; auto, inside and whole are")),
        }
    }
}

/// The nodes of a conversion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Nodes {
    /// So many, with as much memory as it takes.
    Equal(u32),
    /// Each with a limit.
    Limited(Vec<NodeLimit>),
}

/// One node's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeLimit {
    /// What people call it.
    pub name: String,
    /// Bytes that a rank may take.
    pub usable_bytes: u64,
}

impl Nodes {
    /// Number of nodes.
    #[must_use]
    pub fn count(&self) -> u32 {
        match self {
            Self::Equal(count) => *count,
            Self::Limited(limits) => limits.len() as u32,
        }
    }
}

/// Bytes of a number with a unit (`512g`, `64m`; powers of 1024).
#[must_use]
pub fn parse_bytes(text: &str) -> Option<u64> {
    let lower = text.to_ascii_lowercase();
    let lower = lower.trim_end_matches("ib").trim_end_matches('b');
    let (digits, shift) = match lower.chars().last()? {
        'k' => (&lower[..lower.len() - 1], 10),
        'm' => (&lower[..lower.len() - 1], 20),
        'g' => (&lower[..lower.len() - 1], 30),
        't' => (&lower[..lower.len() - 1], 40),
        _ => (lower, 0),
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

impl FromStr for Nodes {
    type Err = String;

    /// A number, or `name=RAM[:USABLE],…`. Three quarters of the RAM are usable unless told: a
    /// Mac's GPU may not take all of it.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Ok(count) = text.parse() {
            return Ok(Self::Equal(count));
        }
        let limit = |node: &str| {
            let (name, sizes) = node.split_once('=')?;
            let (ram, usable) = match sizes.split_once(':') {
                Some((ram, usable)) => (parse_bytes(ram)?, Some(parse_bytes(usable)?)),
                None => (parse_bytes(sizes)?, None),
            };
            let usable_bytes = usable.unwrap_or(ram / 4 * 3);
            (!name.is_empty() && usable_bytes <= ram)
                .then(|| NodeLimit { name: name.to_owned(), usable_bytes })
        };
        let limits = text.split(',').map(|node| limit(node).ok_or(node)).collect::<Result<_, _>>();
        limits.map(Self::Limited).map_err(|node| {
            format!("{node:?} is neither a number of nodes nor name=RAM or name=RAM:USABLE, such as a=512g or a=512g:480g")
        })
    }
}

/// The options that decide formats, checked.
pub(super) struct Choice {
    pub(super) main: MainFormat,
    pub(super) rounding: Rounding,
    pub(super) dtype: Option<Dtype>,
    pub(super) recipe: Recipe,
    pub(super) overrides: Overrides,
}

impl Choice {
    pub(super) fn new(options: &ConvertOptions) -> Result<Self, PlanError> {
        let refuse = |option, value: &str, possible| {
            Err(PlanError::Option { option, value: value.to_owned(), possible })
        };
        if !matches!(options.bits, 2..=6 | 8 | 16) {
            return refuse("--bits", &options.bits.to_string(), "2 to 6, 8 and 16 are");
        }
        if options.bits == 16
            && let Some(budget) = options.budget
        {
            return refuse("--bits", &format!("16 with {budget}"), "a budget quantizes");
        }
        check_float_groups(options)?;
        if !matches!(options.group_size, 32 | 64 | 128) {
            return refuse("--group-size", &options.group_size.to_string(), "32, 64 and 128 are");
        }
        if !(1..=MAX_RANKS).contains(&options.nodes.count()) {
            return refuse("--nodes", &options.nodes.count().to_string(), "1 to 8 nodes are");
        }
        let Ok(rounding) = options.rounding.parse() else {
            return refuse(
                "--rounding",
                &options.rounding,
                "refined, gptq, mlx-cpu and mlx-metal are",
            );
        };
        // Whether gptq has statistics is asked when weights are rounded: a plan needs none.
        if rounding != Rounding::Gptq && options.stats.is_some() && options.budget.is_none() {
            return Err(PlanError::UnusedStats(options.rounding.clone()));
        }
        let dtype = match &options.dtype {
            None => None,
            Some(name) => match Dtype::from_name(name).filter(|dtype| dtype.is_float()) {
                None => return refuse("--dtype", name, "BF16, F16 and F32 are"),
                dtype => dtype,
            },
        };
        for threshold in &options.fail_on {
            threshold.parse::<Threshold>()?;
        }
        Ok(Self {
            main: MainFormat {
                bits: options.bits,
                group_size: options.group_size,
                float: options.float,
            },
            rounding,
            dtype,
            recipe: options.recipe.parse()?,
            overrides: Overrides::parse(&options.overrides)?,
        })
    }
}

/// Refuses what float groups have not: other bits, and what chooses scales of affine groups.
fn check_float_groups(options: &ConvertOptions) -> Result<(), PlanError> {
    let Some(format) = options.float else { return Ok(()) };
    let refused = if options.bits != format.bits() {
        let possible =
            "mxfp4 and nvfp4 have 4 bits, mxfp8 has 8; --format affine has any that --bits allows";
        Some((format!("--bits {}", options.bits), possible))
    } else if let Some(budget) = options.budget {
        Some((budget.to_string(), "a budget gives out bits of affine groups"))
    } else if options.rounding == Rounding::Gptq.name() || options.stats.is_some() {
        Some(("--rounding gptq".to_owned(), "calibration rounds affine groups"))
    } else if options.importance.is_some() {
        Some(("--imatrix".to_owned(), "it weighs the search for scales of affine groups"))
    } else {
        None
    };
    let Some((other, possible)) = refused else { return Ok(()) };
    Err(PlanError::Option { option: "--format", value: format!("{format} with {other}"), possible })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_a_number_or_limits() {
        let gib = |count: u64| count << 30;
        let limit = |name: &str, usable_bytes| NodeLimit { name: name.to_owned(), usable_bytes };
        assert_eq!("3".parse(), Ok(Nodes::Equal(3)));
        let limits = Nodes::Limited(vec![limit("a", gib(384)), limit("b", gib(480))]);
        assert_eq!("a=512g,b=512GiB:480g".parse(), Ok(limits));
        for bad in ["", "a", "a=", "=5g", "a=1g:2g", "a=12q", "a=1g,,b=1g"] {
            assert!(bad.parse::<Nodes>().is_err(), "{bad}");
        }
    }
}
