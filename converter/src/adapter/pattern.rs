//! `rank_pattern` and `alpha_pattern`: values by module, the first match counting, as PEFT reads
//! them: regular expressions for the end of a module's name.

use std::fmt;

use regex::{Regex, RegexBuilder};
use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, Visitor},
};

/// Most entries: one for every matrix of the largest models.
const MAX_ENTRIES: usize = 200_000;

/// Bytes that one compiled expression may take; a module's name takes some hundred.
const MAX_PROGRAM_BYTES: usize = 1 << 20;

/// Entries in the order of the file, which decides between two that match.
#[derive(Clone, Debug, Default)]
pub(super) struct Patterns(Vec<(String, f64)>);

impl Patterns {
    /// The number of the first entry that matches a module.
    pub(super) fn find(&self, module: &str) -> Result<Option<f64>, String> {
        for (pattern, value) in &self.0 {
            let ends = module == pattern
                || module.strip_suffix(pattern.as_str()).is_some_and(|rest| rest.ends_with('.'));
            if ends || matches(pattern, module)? {
                return Ok(Some(*value));
            }
        }
        Ok(None)
    }
}

fn matches(pattern: &str, module: &str) -> Result<bool, String> {
    // Names without any sign of an expression match by their text alone; a dot that stands for
    // another character has not been seen.
    if pattern.chars().all(|c| c.is_alphanumeric() || matches!(c, '.' | '_' | '-')) {
        return Ok(false);
    }
    compile(pattern)
        .map(|expression| expression.is_match(module))
        .map_err(|error| format!("pattern {pattern:?} is not understood: {error}"))
}

fn compile(pattern: &str) -> Result<Regex, regex::Error> {
    let whole = format!(r"^(?:.*\.)?(?:{pattern})$");
    RegexBuilder::new(&whole).size_limit(MAX_PROGRAM_BYTES).build()
}

impl<'de> Deserialize<'de> for Patterns {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PatternsVisitor)
    }
}

struct PatternsVisitor;

impl<'de> Visitor<'de> for PatternsVisitor {
    type Value = Patterns;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("values by module")
    }

    fn visit_unit<E>(self) -> Result<Patterns, E> {
        Ok(Patterns::default())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Patterns, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = map.next_entry()? {
            if entries.len() == MAX_ENTRIES {
                return Err(serde::de::Error::custom(format!("more than {MAX_ENTRIES} patterns")));
            }
            entries.push(entry);
        }
        Ok(Patterns(entries))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_match_counts_and_dots_separate_modules() {
        let text = r#"{"layers.0.mlp.down_proj": 5, "model\\.layers\\.\\d+\\.mlp\\.down_proj": 16, "k_proj": 24, "a|up_proj": 3}"#;
        let patterns: Patterns = serde_json::from_str(text).unwrap();
        let check = |module: &str, expected: Option<f64>| {
            assert_eq!(patterns.find(module).unwrap(), expected, "{module}");
        };
        check("model.layers.0.mlp.down_proj", Some(5.0));
        check("model.layers.12.mlp.down_proj", Some(16.0));
        check("model.layers.1.self_attn.k_proj", Some(24.0));
        check("model.layers.1.self_attn.xk_proj", None);
        check("model.layers.1.mlp.up_proj", Some(3.0));
        check("model.layers.1.mlp.up_projs", None);
        let bad: Patterns = serde_json::from_str(r#"{"(?=x)y": 1}"#).unwrap();
        assert!(bad.find("z").unwrap_err().contains("(?=x)y"));
    }
}
