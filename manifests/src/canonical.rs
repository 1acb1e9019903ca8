//! Canonical JSON: one spelling per document, so that a document has one digest.
//!
//! Object keys sorted by their UTF-8 bytes, no white space, no floats, integers below 2^53 in
//! size (every JSON reader holds them exactly), strings escaped as `serde_json` does. A file ends
//! with one newline, which is not part of the digest's input.

use serde::Serialize;
use serde_json::Value;

use crate::digest::Digest;

/// Largest integer that every JSON reader holds exactly.
const INTEGER_LIMIT: u64 = 1 << 53;

/// A value has no canonical form.
#[derive(Debug, thiserror::Error)]
pub enum CanonicalError {
    /// It cannot be written as JSON at all.
    #[error("not representable as JSON")]
    Json(#[from] serde_json::Error),
    /// It holds a float or an integer of 2^53 or more.
    #[error("{number} is not an integer below 2^53")]
    Number {
        /// The number as JSON would have it.
        number: String,
    },
}

/// The canonical text of `value`.
pub fn to_string<T: Serialize>(value: &T) -> Result<String, CanonicalError> {
    let mut text = String::new();
    write(&serde_json::to_value(value)?, &mut text)?;
    Ok(text)
}

/// The BLAKE3 of the canonical text of `value`.
pub fn digest<T: Serialize>(value: &T) -> Result<Digest, CanonicalError> {
    Ok(Digest::of(to_string(value)?.as_bytes()))
}

fn write(value: &Value, text: &mut String) -> Result<(), CanonicalError> {
    match value {
        Value::Number(number) => {
            let small = number.as_u64().or_else(|| number.as_i64().map(i64::unsigned_abs));
            if small.is_none_or(|size| size >= INTEGER_LIMIT) {
                return Err(CanonicalError::Number { number: number.to_string() });
            }
            text.push_str(&number.to_string());
        }
        Value::Array(items) => {
            text.push('[');
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    text.push(',');
                }
                write(item, text)?;
            }
            text.push(']');
        }
        Value::Object(fields) => {
            // Sorted here and not by the map: a feature of serde_json chosen anywhere in the
            // dependency tree may keep insertion order instead.
            let mut keys: Vec<&String> = fields.keys().collect();
            keys.sort_unstable();
            text.push('{');
            for (index, key) in keys.into_iter().enumerate() {
                if index > 0 {
                    text.push(',');
                }
                text.push_str(&serde_json::to_string(key)?);
                text.push(':');
                write(&fields[key], text)?;
            }
            text.push('}');
        }
        Value::Null | Value::Bool(_) | Value::String(_) => {
            text.push_str(&serde_json::to_string(value)?);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn keys_are_sorted_and_nothing_is_padded() {
        let value = json!({"b": [1, -2, null], "a": {"z": "\u{e9}\n", "y": true}});
        assert_eq!(to_string(&value).unwrap(), r#"{"a":{"y":true,"z":"é\n"},"b":[1,-2,null]}"#);
    }

    #[test]
    fn floats_and_large_integers_are_refused() {
        for value in [json!(1.5), json!(1_u64 << 53), json!(-(1_i64 << 53)), json!({"a": [0.0]})] {
            assert!(to_string(&value).is_err(), "{value}");
        }
        assert_eq!(to_string(&json!((1_u64 << 53) - 1)).unwrap(), "9007199254740991");
    }
}
