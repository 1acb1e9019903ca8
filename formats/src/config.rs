//! The `config.json` that goes into a package.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::{
    normalise::Normalised,
    rope::Spelling,
    spec::{Layer, Mask, NormKind, Spec},
};
use shardpack_quantize::float_groups::FloatFormat;

/// The quantization that a package's configuration states, in the terms of mlx-lm.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigQuantization {
    /// What holds for every matrix that is not in `overrides`.
    pub main: GroupConfig,
    /// Matrices that differ, by module name (a tensor's name without `.weight`); `None` is not
    /// quantized.
    pub overrides: BTreeMap<String, Option<GroupConfig>>,
}

/// One choice of groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupConfig {
    /// Weights per group.
    pub group_size: u32,
    /// Bits per weight.
    pub bits: u32,
    /// Float groups; affine ones without it.
    pub float: Option<FloatFormat>,
}

/// Keys that name a place on the publisher's machine or a commit of the source: they would be
/// false in the package, and the manifest has the source.
const DROPPED: &[&str] = &["_name_or_path", "_commit_hash"];

/// The family whose pattern of windowed and full layers mlx-lm reads as a text alone, where
/// transformers reads it as a text or as a number.
const PATTERN_AS_TEXT: &str = "exaone4";

/// The family whose positions mlx-lm reads at the top of a configuration although transformers
/// writes sections for each kind of layer; transformers reads them in both places there.
const SCALING_BESIDE_SECTIONS: &str = "gemma3_text";

/// The family of whose layers mlx-lm learns from `mlp_layer_types` alone which have experts, where
/// published configurations have `moe_layer_freq`.
const KINDS_OF_PARTS: &str = "minimax_m3";

/// The pattern as a text: a letter for each layer, or the number's own meaning where no list of
/// layers says more.
fn pattern_text(spec: &Spec, layer_types: Option<&Value>) -> String {
    let letter = |layer: &Layer| if layer.mask == Mask::Full { 'G' } else { 'L' };
    match layer_types {
        Some(Value::Array(_)) => spec.layers.iter().map(letter).collect(),
        _ => "LLLG".to_owned(),
    }
}

/// The `config.json` of a package: the source's, with what other readers must find in it.
///
/// It states `quantization` as mlx-lm does, and spells out what mlx-lm and transformers would
/// fill in differently when it is absent (`tie_word_embeddings`, `head_dim`, …). Position
/// embeddings stand in the older spelling (mlx-lm) and, if the source has it, in the newer one
/// (transformers from version 5). Keys are sorted.
#[must_use]
pub fn config_for_package(
    config: &Value,
    normalised: &Normalised,
    quantization: Option<&ConfigQuantization>,
) -> Value {
    let mut out: BTreeMap<String, Value> = BTreeMap::new();
    let config = normalised.text_config.as_ref().or(config.as_object());
    for (key, value) in config.into_iter().flatten() {
        if !DROPPED.contains(&key.as_str()) {
            out.insert(key.clone(), sorted(value));
        }
    }
    let spec = &normalised.spec;
    let defaults = [
        ("max_position_embeddings", Value::from(spec.max_positions)),
        ("rms_norm_eps", shortest(spec.norm.eps.0)),
        ("head_dim", spec.attention.head_dim.into()),
        ("num_key_value_heads", spec.attention.kv_heads.into()),
    ];
    // Of a latent the last two say other things, which no reader guesses.
    let guessed = if spec.mla.is_some() { 2 } else { defaults.len() };
    // Where means are taken off, this key says that a model has another norm (`cohere2_moe`).
    let has_means = |key: &str| key == "rms_norm_eps" && spec.norm.kind != NormKind::Rms;
    for (key, value) in defaults.into_iter().take(guessed).filter(|(key, _)| !has_means(key)) {
        let entry = out.entry(key.to_owned()).or_insert(Value::Null);
        if entry.is_null() {
            *entry = value;
        }
    }
    out.insert("vocab_size".to_owned(), spec.vocab_size.into());
    out.insert("tie_word_embeddings".to_owned(), spec.tied_embeddings.into());
    let rope = &normalised.rope;
    // With compressed KV entries, only the RoPE of the layers that have them may be scaled.
    let of_entries = normalised.local_rope.as_ref().filter(|_| spec.compressed_attention.is_some());
    let extended = of_entries.unwrap_or(rope);
    // A list has one for each layer.
    if !out.get("rope_theta").is_some_and(Value::is_array) {
        out.insert("rope_theta".to_owned(), rope.theta.into());
    }
    // Beside sections for each kind of layer transformers takes it for all that there is, null too.
    let sections = rope.newer_spelling == Spelling::PerLayerType;
    if !sections || spec.model_type == SCALING_BESIDE_SECTIONS {
        out.insert("rope_scaling".to_owned(), extended.rope_scaling());
    }
    match rope.newer_spelling {
        // What stands there for each kind of layer is read as it is.
        Spelling::Absent | Spelling::PerLayerType => {}
        Spelling::Flat => {
            out.insert("rope_parameters".to_owned(), extended.rope_parameters());
        }
    }
    if spec.model_type == PATTERN_AS_TEXT {
        let pattern = out.get("sliding_window_pattern").filter(|pattern| pattern.is_number());
        let text = pattern.map(|_| pattern_text(spec, out.get("layer_types")));
        out.extend(text.map(|text| ("sliding_window_pattern".to_owned(), text.into())));
    }
    if spec.model_type == KINDS_OF_PARTS {
        let kind = |layer: &Layer| if layer.moe { "sparse" } else { "dense" };
        let kinds: Vec<&str> = spec.layers.iter().map(kind).collect();
        out.entry("mlp_layer_types".to_owned()).or_insert_with(|| kinds.into());
    }
    if let Some(entries) = of_entries {
        out.insert("compress_rope_theta".to_owned(), entries.theta.into());
    } else if let Some(local) = &normalised.local_rope
        && local.theta != rope.theta
    {
        out.insert("rope_local_base_freq".to_owned(), local.theta.into());
    }
    for key in ["quantization", "quantization_config"] {
        match quantization {
            Some(quantization) => out.insert(key.to_owned(), quantization.to_json()),
            None => out.remove(key),
        };
    }
    Value::Object(out.into_iter().collect())
}

impl ConfigQuantization {
    fn to_json(&self) -> Value {
        let mut map: BTreeMap<String, Value> = self
            .overrides
            .iter()
            .map(|(name, choice)| {
                (name.clone(), choice.map_or(Value::Bool(false), |it| it.to_json(self.main)))
            })
            .collect();
        map.insert("group_size".to_owned(), self.main.group_size.into());
        map.insert("bits".to_owned(), self.main.bits.into());
        map.insert("mode".to_owned(), self.main.mode().into());
        Value::Object(map.into_iter().collect())
    }
}

impl GroupConfig {
    /// MLX's mode.
    const fn mode(self) -> &'static str {
        match self.float {
            Some(format) => format.name(),
            None => "affine",
        }
    }

    /// An exception from `main`. It states its mode where either is not affine: readers take a
    /// missing one for that.
    fn to_json(self, main: Self) -> Value {
        let mut map = Map::from_iter([
            ("bits".to_owned(), self.bits.into()),
            ("group_size".to_owned(), self.group_size.into()),
        ]);
        if self.float.or(main.float).is_some() {
            map.insert("mode".to_owned(), self.mode().into());
        }
        Value::Object(map)
    }
}

impl From<FloatFormat> for GroupConfig {
    fn from(format: FloatFormat) -> Self {
        let (group_size, bits) = (format.group_size(), format.bits());
        Self { group_size, bits, float: Some(format) }
    }
}

/// The shortest decimal number that is this float: 1e-6, not 9.999999974752427e-7.
fn shortest(value: f32) -> Value {
    value.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

/// The same value with the keys of every object in order, whatever order the reader keeps.
fn sorted(value: &Value) -> Value {
    match value {
        Value::Array(items) => Value::Array(items.iter().map(sorted).collect()),
        Value::Object(map) => {
            let map: BTreeMap<String, Value> =
                map.iter().map(|(key, value)| (key.clone(), sorted(value))).collect();
            Value::Object(map.into_iter().collect())
        }
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests;
