//! compressed-tensors: groups of modules by class, name or pattern, each with its own parameters.

use regex::{Regex, RegexBuilder};

use super::{GIVE_ORIGINAL, Section, methods};
use crate::stored::StoredError;

/// Bytes that a compiled pattern may take; published ones take under a hundredth.
const MAX_PATTERN_BYTES: usize = 1 << 20;

/// Longest list of targets or exceptions: some checkpoints list every matrix of the model.
const MAX_TARGETS: usize = 1 << 18;

/// Most patterns: each is compiled. Published checkpoints have under fifty.
const MAX_PATTERNS: usize = 1024;

/// See the module.
#[derive(Clone, Debug)]
pub(in crate::stored) struct CompressedTensors {
    groups: Vec<CompressedGroup>,
    ignore: Vec<Target>,
}

/// What holds for the modules of a group.
#[derive(Clone, Debug)]
pub(in crate::stored) struct CompressedGroup {
    targets: Vec<Target>,
    /// Absent when only activations are quantized.
    pub(in crate::stored) weights: Option<Weights>,
}

/// How weights are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::stored) struct Weights {
    pub(in crate::stored) kind: Kind,
    pub(in crate::stored) bits: u32,
    pub(in crate::stored) symmetric: bool,
    pub(in crate::stored) strategy: Strategy,
}

/// Which tensors a module has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::stored) enum Kind {
    PackQuantized,
    IntQuantized,
    FloatQuantized,
    Nvfp4,
    Mxfp4,
}

/// What shares a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::stored) enum Strategy {
    Tensor,
    Channel,
    Group(u64),
    Block([u64; 2]),
}

#[derive(Clone, Debug)]
enum Target {
    Class,
    Name(String),
    Pattern(Regex),
}

impl Target {
    fn parse(section: &Section<'_>, key: &str) -> Result<Vec<Self>, StoredError> {
        let texts = section.texts(key)?;
        let patterns = texts.iter().filter(|text| text.starts_with("re:")).count();
        if texts.len() > MAX_TARGETS || patterns > MAX_PATTERNS {
            return Err(section.wrong(key, &format!("at most {MAX_PATTERNS} patterns")));
        }
        let target = |text: &&str| match text.strip_prefix("re:") {
            // Python's re.match: from the beginning, not to the end.
            Some(pattern) => RegexBuilder::new(&format!("^(?:{pattern})"))
                .size_limit(MAX_PATTERN_BYTES)
                .build()
                .map(Self::Pattern)
                .map_err(|_| section.wrong(key, "regular expressions after \"re:\"")),
            None if text.starts_with(|first: char| first.is_ascii_uppercase()) => Ok(Self::Class),
            None => Ok(Self::Name((*text).to_owned())),
        };
        texts.iter().map(target).collect()
    }

    /// Whether it names a module. Classes are not seen in a file of tensors.
    fn names(&self, module: &str) -> bool {
        match self {
            Self::Class => false,
            Self::Name(name) => name == module,
            Self::Pattern(pattern) => pattern.is_match(module),
        }
    }
}

impl CompressedTensors {
    /// How a module's weights are stored, given that its tensors say that they are quantized.
    pub(in crate::stored) fn of(&self, module: &str) -> Result<Weights, String> {
        if self.ignore.iter().any(|target| target.names(module)) {
            return Err(
                "it is quantized, but quantization_config lists it under \"ignore\"".to_owned()
            );
        }
        let with_weights = || self.groups.iter().filter_map(|group| Some((group, group.weights?)));
        let named = with_weights()
            .filter(|(group, _)| group.targets.iter().any(|target| target.names(module)));
        let mut found: Vec<Weights> = named.map(|(_, weights)| weights).collect();
        if found.is_empty() {
            let by_class = with_weights().filter(|(group, _)| {
                group.targets.iter().any(|target| matches!(target, Target::Class))
            });
            found = by_class.map(|(_, weights)| weights).collect();
        }
        if found.is_empty() {
            // Names in a file can differ from those of the library's modules by a prefix.
            found = with_weights().map(|(_, weights)| weights).collect();
        }
        found.dedup();
        match found.as_slice() {
            [weights] => Ok(*weights),
            [] => {
                Err("it is quantized, but no group of quantization_config is for weights"
                    .to_owned())
            }
            _ => Err("several groups of quantization_config with different parameters are for it"
                .to_owned()),
        }
    }
}

pub(super) fn parse(section: &Section<'_>) -> Result<CompressedTensors, StoredError> {
    section.only(
        "compressed-tensors",
        &[
            "config_groups",
            "format",
            "ignore",
            "quant_method",
            "quantization_status",
            "version",
            "global_compression_ratio",
            "kv_cache_scheme",
            "sparsity_config",
            "transform_config",
            "moe_sparsity_config",
            "run_compressed",
        ],
    )?;
    if !matches!(section.text("quantization_status")?, None | Some("compressed")) {
        return Err(section.wrong("quantization_status", "\"compressed\""));
    }
    for key in ["sparsity_config", "moe_sparsity_config", "transform_config"] {
        let Some(part) = section.section(key)? else { continue };
        let dense = part.text("format")? == Some("dense");
        if !dense && part.keys().next().is_some() {
            return Err(section.wrong(key, "none: sparse or rotated weights are not read"));
        }
    }
    let main = section.text("format")?;
    let groups = section
        .section("config_groups")?
        .ok_or_else(|| section.wrong("config_groups", "an object"))?;
    let mut parsed = Vec::new();
    for (key, _) in groups.keys() {
        let group = groups.section(key)?.ok_or_else(|| groups.wrong(key, "an object"))?;
        parsed.push(parse_group(&group, main)?);
    }
    Ok(CompressedTensors { groups: parsed, ignore: Target::parse(section, "ignore")? })
}

fn parse_group(group: &Section<'_>, main: Option<&str>) -> Result<CompressedGroup, StoredError> {
    let known = ["targets", "weights", "input_activations", "output_activations", "format"];
    group.only("compressed-tensors", &known)?;
    let targets = Target::parse(group, "targets")?;
    let Some(weights) = group.section("weights")? else {
        return Ok(CompressedGroup { targets, weights: None });
    };
    let known = [
        "num_bits",
        "type",
        "symmetric",
        "group_size",
        "strategy",
        "block_structure",
        "dynamic",
        "actorder",
        "observer",
        "observer_kwargs",
        "scale_dtype",
        "zp_dtype",
        "is_mx",
    ];
    weights.only("compressed-tensors", &known)?;
    let format = group.text("format")?.filter(|format| *format != "mixed-precision").or(main);
    let bits =
        weights.size("num_bits", 64)?.ok_or_else(|| weights.wrong("num_bits", "a number"))?;
    let is_float = match weights.text("type")? {
        Some("float") => true,
        None | Some("int") => false,
        Some(_) => return Err(weights.wrong("type", "\"int\" or \"float\"")),
    };
    let kind = kind(format, bits, is_float)?;
    // With "group", inputs are stored in another order than their groups.
    if !matches!(weights.text("actorder")?, None | Some("static" | "weight")) {
        return Err(weights.wrong("actorder", "none or \"static\""));
    }
    let symmetric = weights.flag("symmetric")?.unwrap_or(true);
    let strategy = strategy(&weights, kind)?;
    if is_float && !symmetric {
        return Err(weights.wrong("symmetric", "true for floats"));
    }
    let weights = Some(Weights { kind, bits: bits as u32, symmetric, strategy });
    Ok(CompressedGroup { targets, weights })
}

fn kind(format: Option<&str>, bits: u64, is_float: bool) -> Result<Kind, StoredError> {
    let named = format.unwrap_or("an unnamed format");
    Ok(match (named, bits, is_float) {
        ("pack-quantized", 4 | 8, false) => Kind::PackQuantized,
        ("int-quantized" | "naive-quantized", 8, false) => Kind::IntQuantized,
        ("float-quantized" | "naive-quantized", 8, true) => Kind::FloatQuantized,
        ("nvfp4-pack-quantized", 4, true) => Kind::Nvfp4,
        ("mxfp4-pack-quantized", 4, true) => Kind::Mxfp4,
        _ => {
            let element = if is_float { "floats" } else { "integers" };
            return Err(StoredError::Refused {
                format: format!("compressed-tensors {named} with {element} of {bits} bits"),
                reason: format!(
                    "integers of 4 and 8 bits, FP8, NVFP4 and MXFP4 are read; {GIVE_ORIGINAL}"
                ),
            });
        }
    })
}

fn strategy(weights: &Section<'_>, kind: Kind) -> Result<Strategy, StoredError> {
    let group_size = || methods::group_size(weights);
    Ok(match weights.text("strategy")? {
        Some("tensor") => Strategy::Tensor,
        Some("channel") => Strategy::Channel,
        Some("group" | "tensor_group") => match group_size()? {
            Some(group_size) => Strategy::Group(group_size),
            None => Strategy::Channel,
        },
        Some("block") => match methods::block(weights, "block_structure")? {
            Some(block) => Strategy::Block(block),
            None => return Err(weights.wrong("block_structure", "two sizes")),
        },
        None if weights.has("group_size") => match group_size()? {
            Some(group_size) => Strategy::Group(group_size),
            None => Strategy::Channel,
        },
        None if matches!(kind, Kind::FloatQuantized | Kind::IntQuantized) => Strategy::Tensor,
        _ => {
            return Err(weights.wrong("strategy", "tensor, channel, group, tensor_group or block"));
        }
    })
}
