//! JSON as Python writes it: with `Infinity` and `NaN`, which JSON does not have, or with objects that
//! stand for them (`{"__float__": "Infinity"}`, as transformers 5 saves them). Configurations of Mamba
//! models have such limits.

use serde_json::{Error, Value};

/// What is not JSON, the longest first.
const WORDS: [&[u8]; 3] = [b"-Infinity", b"Infinity", b"NaN"];

/// The only key of an object that stands for such a word.
const STANDS_FOR: &str = "__float__";

/// Parses a document. Infinities and what is not a number become null; the error is that of the
/// document as it is.
pub fn parse(bytes: &[u8]) -> Result<Value, Error> {
    let mut value = serde_json::from_slice(bytes)
        .or_else(|error| serde_json::from_slice(&with_nulls(bytes)).map_err(|_| error))?;
    replace_objects(&mut value);
    Ok(value)
}

/// Null for every object that stands for such a word. No document is nested deeper than its parser
/// allows.
fn replace_objects(value: &mut Value) {
    match value {
        Value::Object(map) if map.len() == 1 && map.contains_key(STANDS_FOR) => {
            *value = Value::Null;
        }
        Value::Object(map) => map.values_mut().for_each(replace_objects),
        Value::Array(items) => items.iter_mut().for_each(replace_objects),
        _ => {}
    }
}

/// The document with null for each of those words outside texts.
fn with_nulls(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len());
    let (mut at, mut in_text) = (0, false);
    while let Some(rest) = bytes.get(at..).filter(|rest| !rest.is_empty()) {
        let word = WORDS.iter().find(|word| !in_text && rest.starts_with(word));
        if let Some(word) = word {
            out.extend_from_slice(b"null");
            at += word.len();
            continue;
        }
        // Within a text a backslash belongs to the byte behind it.
        let taken = if in_text && rest[0] == b'\\' { rest.len().min(2) } else { 1 };
        in_text ^= rest[0] == b'"';
        out.extend_from_slice(&rest[..taken]);
        at += taken;
    }
    out
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_python_adds_becomes_null() {
        let check = |text: &str, expected: Value| {
            assert_eq!(parse(text.as_bytes()).unwrap(), expected, "{text}");
        };
        check("[0.0, Infinity, -Infinity, NaN]", json!([0.0, null, null, null]));
        check(r#"{"a": "Infinity \" NaN", "b": NaN}"#, json!({"a": "Infinity \" NaN", "b": null}));
        check(r#"["\\", Infinity]"#, json!(["\\", null]));
        check(r#"{"a": [0.0, {"__float__": "Infinity"}]}"#, json!({"a": [0.0, null]}));
    }

    #[test]
    fn what_is_no_document_stays_none() {
        for text in ["", "[Infinit]", "{\"a\": Infinity", "\"\\", "[NaN, x]"] {
            let plain = serde_json::from_str::<Value>(text).unwrap_err().to_string();
            assert_eq!(parse(text.as_bytes()).unwrap_err().to_string(), plain, "{text}");
        }
    }
}
