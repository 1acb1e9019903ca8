//! Names of tensors in rule files.

use std::fmt;

use serde::{Deserialize, Deserializer, de};

/// Stands for the layer's index in a name.
const LAYER: &str = "{L}";

/// A tensor's name, with `{L}` for the layer if there is one in each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NamePattern {
    before: String,
    after: Option<String>,
}

impl NamePattern {
    /// Whether there is such a tensor in each layer.
    pub(crate) const fn per_layer(&self) -> bool {
        self.after.is_some()
    }

    /// The name in a layer; without `{L}` the same in all.
    pub(crate) fn in_layer(&self, layer: u32) -> String {
        match &self.after {
            Some(after) => format!("{}{layer}{after}", self.before),
            None => self.before.clone(),
        }
    }
}

impl fmt::Display for NamePattern {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.before)?;
        self.after.as_ref().map_or(Ok(()), |after| write!(formatter, "{LAYER}{after}"))
    }
}

impl<'de> Deserialize<'de> for NamePattern {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let (before, after) = match text.split_once(LAYER) {
            Some((before, after)) => (before, Some(after)),
            None => (text.as_str(), None),
        };
        if text.is_empty() || [before, after.unwrap_or("")].iter().any(|p| p.contains(['{', '}'])) {
            return Err(de::Error::custom(format!(
                "{text:?} is not a name with at most one {LAYER}"
            )));
        }
        Ok(Self { before: before.to_owned(), after: after.map(str::to_owned) })
    }
}

/// Whether `name` is `pattern`, in which `*` stands for any characters.
pub(crate) fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or("");
    let Some(mut rest) = name.strip_prefix(first) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    for part in parts {
        // The leftmost occurrence leaves the most for the parts that follow.
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}
