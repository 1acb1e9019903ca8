//! Names of tensors in rule files: texts with `{L}` for the layer's index, `{E}` for an expert's
//! (in sources only), and `{word}` for a name of the rules that stands for a text. Where a published
//! layer holds two, `{L/2}` is its index and `{L%2}` says which of both it is.

use std::fmt;

use serde::{Deserialize, Deserializer, de};

use crate::expr::{Scope, Value};

/// Most placeholders of a name.
const MAX_PLACEHOLDERS: usize = 8;

/// A tensor's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NamePattern {
    text: String,
    parts: Vec<Part>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Text(String),
    Layer,
    /// The index of the published layer that holds two.
    Pair,
    /// Which of its two.
    Half,
    Expert,
    Word(String),
}

impl NamePattern {
    fn parse(text: &str) -> Option<Self> {
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once('{') {
            let (word, after) = after.split_once('}')?;
            if !before.is_empty() {
                parts.push(Part::Text(before.to_owned()));
            }
            parts.push(match word {
                "L" => Part::Layer,
                "L/2" => Part::Pair,
                "L%2" => Part::Half,
                "E" => Part::Expert,
                _ => Part::Word(word.to_owned()),
            });
            rest = after;
        }
        if !rest.is_empty() {
            parts.push(Part::Text(rest.to_owned()));
        }
        let is_name = |word: &str| {
            !word.is_empty() && word.bytes().all(|byte| byte == b'_' || byte.is_ascii_lowercase())
        };
        let count = |wanted: &Part| parts.iter().filter(|part| *part == wanted).count();
        let sound = parts.iter().all(|part| match part {
            Part::Text(text) => !text.contains('}'),
            Part::Word(word) => is_name(word),
            Part::Layer | Part::Pair | Part::Half | Part::Expert => count(part) == 1,
        });
        (sound && !parts.is_empty() && parts.len() <= 2 * MAX_PLACEHOLDERS)
            .then(|| Self { text: text.to_owned(), parts })
    }

    /// Whether there is such a tensor in each layer.
    pub(crate) fn per_layer(&self) -> bool {
        self.parts.contains(&Part::Layer) || self.parts.contains(&Part::Pair)
    }

    /// Whether there is such a tensor for each expert.
    pub(crate) fn per_expert(&self) -> bool {
        self.parts.contains(&Part::Expert)
    }

    /// Names of the rules that it mentions.
    pub(crate) fn words(&self) -> impl Iterator<Item = &str> {
        self.parts.iter().filter_map(|part| match part {
            Part::Word(word) => Some(word.as_str()),
            _ => None,
        })
    }

    /// The name in a layer for an expert; the error is a word that stands for no text.
    pub(crate) fn expand(
        &self,
        scope: &Scope<'_>,
        layer: u32,
        expert: u64,
    ) -> Result<String, &str> {
        let mut name = String::with_capacity(self.text.len() + 8);
        for part in &self.parts {
            match part {
                Part::Text(text) => name.push_str(text),
                Part::Layer => name.push_str(&layer.to_string()),
                Part::Pair => name.push_str(&(layer / 2).to_string()),
                Part::Half => name.push_str(&(layer % 2).to_string()),
                Part::Expert => name.push_str(&expert.to_string()),
                Part::Word(word) => match scope.get(word) {
                    Some(Value::Text(text)) => name.push_str(text),
                    _ => return Err(word),
                },
            }
        }
        Ok(name)
    }
}

impl fmt::Display for NamePattern {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.text)
    }
}

impl<'de> Deserialize<'de> for NamePattern {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::parse(&text).ok_or_else(|| {
            de::Error::custom(format!(
                "{text:?} is not a name with at most one {{L}}, one {{E}}, and {{words}}"
            ))
        })
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
