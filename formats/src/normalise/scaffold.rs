//! Scaffolded rules for a model that no rules match: what its configuration and its tensors say by
//! themselves, on the nearest compiled-in rules. Nobody has checked what the model computes, so
//! the file holds a list of points and is refused until a person has decided each.

mod nearest;
mod text;

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::{ResolveError, SourceTensor, family::shown};
use crate::rules::RulePack;
use nearest::Nearest;

/// Scaffolded rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scaffold {
    /// The rule file.
    pub text: String,
    /// The pack that it builds on, and the family whose values it takes (`"dense-gqa (llama)"`).
    pub nearest: String,
    /// Points to decide.
    pub points: usize,
}

/// Scaffolds rules for a checkpoint: `config` is its `config.json`, `sources` are all its tensors, and
/// `packs` are the compiled-in rules, or some of them.
pub fn scaffold(
    config: &Value,
    sources: &[SourceTensor],
    packs: &[RulePack],
) -> Result<Scaffold, ResolveError> {
    let config = config.as_object().ok_or(ResolveError::NotAnObject)?;
    let unknown = || ResolveError::UnknownFamily {
        found: config.get("model_type").map_or_else(|| "null".to_owned(), shown),
        known: "a name that a person may give it in config.json".to_owned(),
    };
    let model_type = config.get("model_type").and_then(Value::as_str).ok_or_else(unknown)?;
    let keys = merged(config);
    let nearest = Nearest::of(&keys, sources, packs).ok_or_else(unknown)?;
    Ok(text::write(model_type, &keys, &nearest))
}

/// The keys that rules for the whole model see: those of a text model within it, too.
fn merged(config: &Map<String, Value>) -> Map<String, Value> {
    const INNER: &str = "text_config";
    let Some(inner) = config.get(INNER).and_then(Value::as_object) else { return config.clone() };
    let mut keys = inner.clone();
    keys.remove("architectures");
    let outer = config.iter().filter(|(key, _)| *key != INNER);
    keys.extend(outer.map(|(key, value)| (key.clone(), value.clone())));
    keys
}

/// A tensor's name with its indices told apart: `{L}` for the first number, `{E}` for the next.
fn pattern(name: &str) -> String {
    let mut places = ["{L}", "{E}"].into_iter();
    let part = |part: &str| {
        let is_number = !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        if is_number {
            places.next().map_or_else(|| part.to_owned(), str::to_owned)
        } else {
            part.to_owned()
        }
    };
    name.split('.').map(part).collect::<Vec<_>>().join(".")
}

/// The layer that a tensor's name states: the first number in it.
fn layer(name: &str) -> Option<u32> {
    name.split('.').find_map(|part| part.parse().ok())
}

/// Tensors of one pattern.
#[derive(Clone, Debug, Default)]
struct Group {
    /// Layers that have it; empty for one that stands outside of them.
    layers: Vec<u32>,
    /// Their shapes, each once.
    shapes: Vec<Vec<u64>>,
}

/// Tensors by pattern.
fn groups<'a>(tensors: impl Iterator<Item = (&'a str, &'a [u64])>) -> BTreeMap<String, Group> {
    let mut groups: BTreeMap<String, Group> = BTreeMap::new();
    for (name, shape) in tensors {
        let group = groups.entry(pattern(name)).or_default();
        if let Some(layer) = layer(name)
            && !group.layers.contains(&layer)
        {
            group.layers.push(layer);
        }
        if !group.shapes.iter().any(|other| other == shape) {
            group.shapes.push(shape.to_vec());
        }
    }
    for group in groups.values_mut() {
        group.layers.sort_unstable();
    }
    groups
}

#[cfg(test)]
mod tests;
