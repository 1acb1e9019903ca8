//! `keep_alive`: how long Ollama keeps a model in memory. Here the model stays as long as the server
//! does, so only its form counts, and whether it is no time at all.

use shardpack_chat::json::Json;

use crate::{
    dialect::fields::{Fields, mismatch, number},
    error::ApiError,
};

/// Units of a duration, in seconds.
const UNITS: [(&str, f64); 8] = [
    ("ns", 1e-9),
    ("us", 1e-6),
    ("\u{b5}s", 1e-6),
    ("\u{3bc}s", 1e-6),
    ("ms", 1e-3),
    ("s", 1.0),
    ("m", 60.0),
    ("h", 3600.0),
];

/// Whether the model is to leave memory at once: seconds as a number, or a duration such as `5m`.
pub(super) fn parse_keep_alive(fields: &mut Fields) -> Result<bool, ApiError> {
    let name = "keep_alive";
    match fields.take(name) {
        None => Ok(false),
        Some(Json::String(text)) => seconds(&text).map(|seconds| seconds == 0.0).ok_or_else(|| {
            let message = format!("{name}: expected a duration such as \"5m\", found {text:?}");
            ApiError::param(name, message)
        }),
        Some(value) => number(&value)
            .map(|seconds| seconds == 0.0)
            .ok_or_else(|| mismatch(name, "seconds or a duration", &value)),
    }
}

/// The seconds of a duration as Go writes it: numbers with units, such as `1h30m`.
fn seconds(text: &str) -> Option<f64> {
    let mut rest = text.trim_start_matches(['-', '+']);
    if rest == "0" {
        return Some(0.0);
    }
    // Clients in other languages send plain seconds as a text.
    if let Ok(plain) = rest.parse::<f64>() {
        return plain.is_finite().then_some(plain);
    }
    let mut total = 0.0;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let value: f64 = rest[..digits].parse().ok()?;
        rest = &rest[digits..];
        let unit = rest.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(rest.len());
        let (_, factor) = UNITS.iter().find(|(name, _)| *name == &rest[..unit])?;
        total += value * factor;
        rest = &rest[unit..];
    }
    (!text.is_empty()).then_some(total)
}

#[cfg(test)]
mod tests {
    use shardpack_chat::json::Object;

    use super::*;

    #[test]
    fn only_no_time_at_all_unloads() {
        let check = |value: &str, expected: Option<bool>| {
            let mut body = Object::default();
            body.set("keep_alive", Json::parse(value.as_bytes()).unwrap());
            let found = parse_keep_alive(&mut Fields::new(body));
            assert_eq!(found.as_ref().ok(), expected.as_ref(), "{value}: {found:?}");
        };
        for unloads in ["0", "0.0", "-0.0", "\"0\"", "\"0s\"", "\"0m0s\"", "\"0.0h\""] {
            check(unloads, Some(true));
        }
        for keeps in
            ["null", "-1", "300", "1e-3", "\"5m\"", "\"-1\"", "\"1h30m\"", "\"1.5h\"", "\"300\""]
        {
            check(keeps, Some(false));
        }
        for wrong in ["\"\"", "\"soon\"", "\"5\u{b5}\"", "\"5m3\"", "true", "[0]", "\"nan\""] {
            check(wrong, None);
        }
    }
}
