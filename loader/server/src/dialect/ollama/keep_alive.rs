//! `keep_alive`: how long a model stays in memory after its last request, as Ollama's clients say it.
//! The model of a server of one stays as long as the server does.

use std::time::Duration;

use shardpack_chat::json::Json;

use crate::{
    dialect::fields::{Fields, mismatch, number},
    error::ApiError,
    registry::KeepAlive,
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

/// Seconds as a number, or a duration such as `5m`; negative ones are for ever, and none at all
/// unloads.
pub(super) fn parse_keep_alive(fields: &mut Fields) -> Result<Option<KeepAlive>, ApiError> {
    let name = "keep_alive";
    let of = |seconds: f64| match Duration::try_from_secs_f64(seconds) {
        _ if seconds == 0.0 => KeepAlive::For(Duration::ZERO),
        Ok(time) => KeepAlive::For(time),
        // Negative, or longer than anything lasts.
        Err(_) => KeepAlive::Forever,
    };
    match fields.take(name) {
        None | Some(Json::Null) => Ok(None),
        Some(Json::String(text)) => {
            seconds(&text).map(|seconds| Some(of(seconds))).ok_or_else(|| {
                let message = format!("{name}: expected a duration such as \"5m\", found {text:?}");
                ApiError::param(name, message)
            })
        }
        Some(value) => number(&value)
            .map(|seconds| Some(of(seconds)))
            .ok_or_else(|| mismatch(name, "seconds or a duration", &value)),
    }
}

/// The seconds of a duration as Go writes it: numbers with units, such as `1h30m`.
fn seconds(text: &str) -> Option<f64> {
    let mut rest = text.trim_start_matches(['-', '+']);
    let sign = if text.starts_with('-') { -1.0 } else { 1.0 };
    // Clients in other languages send plain seconds as a text.
    if let Ok(plain) = rest.parse::<f64>() {
        return plain.is_finite().then_some(sign * plain);
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
    (!text.is_empty()).then_some(sign * total)
}

#[cfg(test)]
mod tests {
    use shardpack_chat::json::Object;

    use super::*;

    #[test]
    fn durations_are_read_in_every_form() {
        let parse = |value: &str| {
            let mut body = Object::default();
            body.set("keep_alive", Json::parse(value.as_bytes()).unwrap());
            parse_keep_alive(&mut Fields::new(body))
        };
        let check = |value: &str, expected: Option<KeepAlive>| {
            assert_eq!(parse(value).unwrap(), expected, "{value}");
        };
        let secs = |seconds: f64| Some(KeepAlive::For(Duration::from_secs_f64(seconds)));
        for unloads in ["0", "0.0", "-0.0", "\"0\"", "\"0s\"", "\"0m0s\"", "\"0.0h\""] {
            check(unloads, secs(0.0));
        }
        check("null", None);
        for (text, seconds) in [
            ("300", 300.0),
            ("1e-3", 0.001),
            ("\"5m\"", 300.0),
            ("\"1h30m\"", 5400.0),
            ("\"1.5h\"", 5400.0),
            ("\"300\"", 300.0),
        ] {
            check(text, secs(seconds));
        }
        for forever in ["-1", "\"-1\"", "\"-1m\"", "1e300"] {
            check(forever, Some(KeepAlive::Forever));
        }
        for wrong in ["\"\"", "\"soon\"", "\"5\u{b5}\"", "\"5m3\"", "true", "[0]", "\"nan\""] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
