//! One object of a configuration that describes a position embedding, key by key.

use serde_json::{Map, Value};

use super::{RopeError, Scaling, Yarn, frequencies::magnitude};
use crate::{config::is_neutral, expr};

/// Largest base, factor or length that is believed: the largest base in use is 1e8.
const MAX_NUMBER: f64 = 1e12;

/// Keys of every type.
const COMMON: &[&str] = &["type", "rope_type", "rope_theta", "original_max_position_embeddings"];

pub(super) struct Section<'a> {
    name: &'static str,
    map: &'a Map<String, Value>,
    kind: &'a str,
}

/// `rope_theta` of an object.
pub(super) fn theta(
    map: &Map<String, Value>,
    section: &'static str,
) -> Result<Option<f64>, RopeError> {
    Reader { section, map }.number("rope_theta", "a number above 1", |theta| theta > 1.0)
}

impl<'a> Section<'a> {
    /// The object `name` of a configuration; `None` if it is absent, null or empty.
    pub(super) fn of(
        config: &'a Map<String, Value>,
        name: &'static str,
    ) -> Result<Option<Self>, RopeError> {
        let map = match config.get(name) {
            None | Some(Value::Null) => return Ok(None),
            Some(Value::Object(map)) if map.is_empty() => return Ok(None),
            Some(Value::Object(map)) => map,
            Some(other) => return Err(wrong("config", name, "an object or null", other)),
        };
        let mut kinds = Vec::new();
        for key in ["rope_type", "type"] {
            match map.get(key) {
                None | Some(Value::Null) => {}
                Some(Value::String(kind)) => kinds.push(kind.as_str()),
                Some(other) => return Err(wrong(name, key, "a string", other)),
            }
        }
        if let [first, second] = kinds[..]
            && first != second
        {
            let problem = format!("{name} has rope_type {first:?} and type {second:?}");
            return Err(RopeError::Contradiction(problem));
        }
        Ok(Some(Self { name, map, kind: kinds.first().copied().unwrap_or("default") }))
    }

    pub(super) fn theta(&self) -> Result<Option<f64>, RopeError> {
        theta(self.map, self.name)
    }

    pub(super) fn scaling(&self, max_positions: u32) -> Result<Scaling, RopeError> {
        let reader = Reader { section: self.name, map: self.map };
        let factor = || reader.required("factor", "a number of at least 1", |factor| factor >= 1.0);
        let positive = |key| reader.required(key, "a positive number", |number| number > 0.0);
        match self.kind {
            "default" => {
                self.check_keys(&[])?;
                Ok(Scaling::Default)
            }
            "linear" => {
                self.check_keys(&["factor"])?;
                Ok(Scaling::Linear { factor: factor()? })
            }
            "dynamic" => {
                self.check_keys(&["factor"])?;
                Ok(Scaling::Dynamic { factor: factor()? })
            }
            "llama3" => {
                self.check_keys(&["factor", "low_freq_factor", "high_freq_factor"])?;
                let low = positive("low_freq_factor")?;
                let high =
                    reader.required("high_freq_factor", "above low_freq_factor", |h| h > low)?;
                let original = reader.original(max_positions)?;
                Ok(Scaling::Llama3 { factor: factor()?, low, high, original })
            }
            "yarn" => {
                self.check_keys(&[
                    "factor",
                    "beta_fast",
                    "beta_slow",
                    "truncate",
                    "attention_factor",
                    "mscale",
                    "mscale_all_dim",
                ])?;
                yarn(&reader, max_positions).map(Scaling::Yarn)
            }
            other => Err(RopeError::UnknownType { section: self.name, found: other.to_owned() }),
        }
    }

    fn check_keys(&self, own: &[&str]) -> Result<(), RopeError> {
        let unknown: Vec<String> = self
            .map
            .iter()
            .filter(|(key, value)| {
                !COMMON.contains(&key.as_str())
                    && !own.contains(&key.as_str())
                    && !is_neutral(value)
            })
            .map(|(key, value)| format!("{key} = {}", shown(value)))
            .collect();
        if unknown.is_empty() {
            return Ok(());
        }
        Err(RopeError::UnknownKeys {
            section: self.name,
            kind: self.kind.to_owned(),
            keys: unknown.join(", "),
        })
    }
}

fn yarn(reader: &Reader<'_>, max_positions: u32) -> Result<Yarn, RopeError> {
    let positive = |key| reader.number(key, "a positive number", |number| number > 0.0);
    let finite = |key| reader.number(key, "a number", |_| true);
    // Zero means the default, as in the reference implementation.
    let beta = |key, default| {
        let beta = reader.number(key, "a number of at least 0", |number| number >= 0.0)?;
        Ok(beta.filter(|beta| *beta > 0.0).unwrap_or(default))
    };
    let original = reader.original(max_positions)?;
    let factor = match positive("factor")? {
        Some(factor) => factor,
        None => f64::from(max_positions) / f64::from(original),
    };
    let mscale = [finite("mscale")?, finite("mscale_all_dim")?];
    let attention_factor = match (positive("attention_factor")?, mscale) {
        (Some(stated), _) => stated,
        (None, [Some(numerator), Some(denominator)]) if numerator != 0.0 && denominator != 0.0 => {
            magnitude(factor, numerator) / magnitude(factor, denominator)
        }
        _ => magnitude(factor, 1.0),
    };
    if !(attention_factor.is_finite() && attention_factor > 0.0) {
        let found = Value::from(attention_factor);
        return Err(wrong(reader.section, "attention_factor", "a positive number", &found));
    }
    let truncate = match reader.map.get("truncate") {
        None | Some(Value::Null) => true,
        Some(Value::Bool(truncate)) => *truncate,
        Some(other) => return Err(wrong(reader.section, "truncate", "a bool", other)),
    };
    let (beta_fast, beta_slow) = (beta("beta_fast", 32.0)?, beta("beta_slow", 1.0)?);
    Ok(Yarn { factor, original, beta_fast, beta_slow, truncate, attention_factor, mscale })
}

struct Reader<'a> {
    section: &'static str,
    map: &'a Map<String, Value>,
}

impl Reader<'_> {
    fn number(
        &self,
        key: &'static str,
        expected: &'static str,
        valid: impl Fn(f64) -> bool,
    ) -> Result<Option<f64>, RopeError> {
        let value = match self.map.get(key) {
            None | Some(Value::Null) => return Ok(None),
            Some(value) => value,
        };
        match value.as_f64().filter(|number| number.abs() <= MAX_NUMBER && valid(*number)) {
            Some(number) => Ok(Some(number)),
            None => Err(wrong(self.section, key, expected, value)),
        }
    }

    fn required(
        &self,
        key: &'static str,
        expected: &'static str,
        valid: impl Fn(f64) -> bool,
    ) -> Result<f64, RopeError> {
        let found = self.number(key, expected, valid)?;
        found.ok_or_else(|| wrong(self.section, key, expected, &Value::Null))
    }

    /// Longest sequence before the extension, the model's longest if it is not stated.
    fn original(&self, max_positions: u32) -> Result<u32, RopeError> {
        let key = "original_max_position_embeddings";
        // A fraction would change the value when it becomes an integer.
        let whole = |number: f64| {
            (1.0..=f64::from(u32::MAX)).contains(&number)
                && f64::from(number as u32).total_cmp(&number).is_eq()
        };
        let stated = self.number(key, "a positive integer", whole)?;
        Ok(stated.map_or(max_positions, |number| number as u32))
    }
}

fn wrong(
    section: &'static str,
    key: &'static str,
    expected: &'static str,
    found: &Value,
) -> RopeError {
    RopeError::Value { section, key, expected, found: shown(found) }
}

fn shown(value: &Value) -> String {
    expr::Value::from_json(value).map_or_else(|| "nested too deep".to_owned(), |v| v.to_string())
}
