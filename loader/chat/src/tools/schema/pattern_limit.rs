//! Limits the number of patterns (`pattern`, `format`, `patternProperties`) that one string may
//! have to match at once, through `allOf` and its kin. The grammar compiler tries every combination
//! of them and cannot be interrupted: 12 take 16 ms, 17 half a second, 20 more than twenty seconds.

use std::collections::BTreeSet;

use serde_json::Value;

use super::SchemaError;

/// Most patterns, of which all may meet.
const MAX: usize = 16;

/// Most bytes of all patterns of a schema. Compiling cannot be interrupted: the worst of so many bytes,
/// Unicode classes, were measured at 1.1 s and 120 MB of memory. Published schemas have some hundred.
pub(in crate::tools) const PATTERN_BYTES_MAX: usize = 64 << 10;

/// Members of schemas that hold values.
const VALUES: [&str; 4] = ["enum", "const", "default", "examples"];

/// Refuses a schema whose patterns could all meet in one place and are too many. Where they do is
/// not followed, through references and properties: without anything that joins schemas they do
/// not meet.
pub(super) fn check(schema: &Value) -> Result<(), SchemaError> {
    let mut found = Found::default();
    found.look(schema);
    let bytes = found.patterns.iter().map(|pattern| pattern.len()).sum();
    check_bytes(bytes)?;
    let count = found.patterns.len();
    if !found.joins || count <= MAX {
        return Ok(());
    }
    let reason = format!(
        "{count} patterns and formats in a schema that joins others (allOf, $ref beside keywords, patternProperties, not): at most {MAX}; use enums, or fewer"
    );
    Err(SchemaError::new("pattern", reason))
}

/// Refuses patterns that are too long.
pub(in crate::tools) fn check_bytes(bytes: usize) -> Result<(), SchemaError> {
    if bytes <= PATTERN_BYTES_MAX {
        return Ok(());
    }
    let reason = format!("the schema's patterns have {bytes} bytes: at most {PATTERN_BYTES_MAX}");
    Err(SchemaError::new("pattern", reason))
}

#[derive(Default)]
struct Found<'a> {
    patterns: BTreeSet<&'a str>,
    /// Whether there is anything that demands two schemas of one value.
    joins: bool,
}

impl<'a> Found<'a> {
    fn look(&mut self, value: &'a Value) {
        match value {
            Value::Array(all) => all.iter().for_each(|value| self.look(value)),
            Value::Object(members) => {
                let beside = members.keys().any(|key| key != "$ref" && key != "$defs");
                self.joins |= members.contains_key("$ref") && beside;
                for (key, value) in members {
                    self.joins |= matches!(key.as_str(), "allOf" | "patternProperties");
                    match (key.as_str(), value) {
                        ("pattern" | "format", Value::String(text)) => {
                            self.patterns.insert(text);
                        }
                        ("patternProperties", Value::Object(named)) => {
                            self.patterns.extend(named.keys().map(String::as_str));
                            self.look(value);
                        }
                        (key, _) if VALUES.contains(&key) => {}
                        _ => self.look(value),
                    }
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::tools::{ArgumentValidator, schema::enforceable};

    fn text(number: usize) -> Value {
        json!({"type": "string", "pattern": format!("^.*[a-z]{{1,{}}}{number}.*$", 5 + number)})
    }

    #[test]
    fn patterns_that_could_meet_are_few() {
        let all = |count: usize| json!({"allOf": (0..count).map(text).collect::<Vec<_>>()});
        enforceable(&all(MAX)).unwrap();
        let error = enforceable(&all(MAX + 1)).unwrap_err();
        assert_eq!(error.keyword, "pattern");
        assert!(error.reason.contains("17 patterns and formats"), "{}", error.reason);
        // Properties of one name meet as well.
        let within = |number| json!({"properties": {"x": text(number)}});
        let nested = json!({"allOf": (0..=MAX).map(within).collect::<Vec<_>>()});
        assert_eq!(enforceable(&nested).unwrap_err().keyword, "pattern");
        // So do those that follow one another's references.
        let link = |number: usize| json!({"$ref": format!("#/$defs/{}", number + 1), "pattern": number.to_string()});
        let chain = (0..=MAX).map(|number| (number.to_string(), link(number)));
        let mut definitions: serde_json::Map<_, _> = chain.collect();
        definitions.insert((MAX + 1).to_string(), json!({"type": "string"}));
        let chain = json!({"$ref": "#/$defs/0", "$defs": definitions});
        assert_eq!(enforceable(&chain).unwrap_err().keyword, "pattern");
    }

    #[test]
    fn patterns_have_few_bytes_together() {
        let long = |bytes: usize| json!({"type": "string", "pattern": "a".repeat(bytes)});
        enforceable(&long(PATTERN_BYTES_MAX)).unwrap();
        let half = PATTERN_BYTES_MAX / 2 + 1;
        let named =
            json!({"properties": {"a": long(half)}, "patternProperties": {"b".repeat(half): {}}});
        for schema in [long(PATTERN_BYTES_MAX + 1), named] {
            let error = enforceable(&schema).unwrap_err();
            assert_eq!(error.keyword, "pattern");
            assert!(error.reason.contains("at most 65536"), "{}", error.reason);
            assert_eq!(ArgumentValidator::new(&schema).unwrap_err(), error);
        }
    }

    #[test]
    fn patterns_apart_are_as_many_as_one_likes() {
        let apart: serde_json::Map<_, _> = (0..100).map(|it| (it.to_string(), text(it))).collect();
        let apart = json!({"type": "object", "properties": apart});
        assert_eq!(enforceable(&apart).unwrap(), apart);
        // One pattern many times is one; what an enum holds is none.
        let same = json!({"allOf": (0..100).map(|_| text(1)).collect::<Vec<_>>()});
        enforceable(&same).unwrap();
        let values = (0..100).map(text).collect::<Vec<_>>();
        enforceable(&json!({"allOf": [{"enum": values}]})).unwrap();
    }
}
