//! One object of a configuration that describes a position embedding, key by key.

use serde_json::{Map, Value};

use super::{Long, MAX_WIDTH, RopeError, RopeRequest, Scaling, Yarn, frequencies::magnitude};
use crate::expr;
use shardpack_containers::neutral::is_neutral;

/// Largest base, factor or length that is believed: the largest base in use is 1e8.
const MAX_NUMBER: f64 = 1e12;

/// Keys of yarn.
const YARN: &[&str] = &[
    "factor",
    "beta_fast",
    "beta_slow",
    "truncate",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
];

/// Keys of longrope.
const LONG: &[&str] = &["factor", "short_factor", "long_factor", "attention_factor"];

/// Keys of every type.
const COMMON: &[&str] = &["type", "rope_type", "rope_theta", "original_max_position_embeddings"];

pub(super) struct Section<'a> {
    name: &'static str,
    map: &'a Map<String, Value>,
    kind: &'a str,
    nested: bool,
}

/// `rope_theta` of an object.
pub(super) fn theta(
    map: &Map<String, Value>,
    section: &'static str,
) -> Result<Option<f64>, RopeError> {
    Reader { section, map }.number("rope_theta", "a number above 1", |theta| theta > 1.0)
}

/// The object `name` of a configuration; `None` if it is absent, null or empty.
pub(super) fn check_object<'a>(
    config: &'a Map<String, Value>,
    name: &'static str,
) -> Result<Option<&'a Map<String, Value>>, RopeError> {
    match config.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Object(map)) if map.is_empty() => Ok(None),
        Some(Value::Object(map)) => Ok(Some(map)),
        Some(other) => Err(wrong("config", name, "an object or null", other)),
    }
}

impl<'a> Section<'a> {
    /// The object `name` of a configuration, or the one in it for the requested kind of layers.
    pub(super) fn of(
        config: &'a Map<String, Value>,
        name: &'static str,
        request: &RopeRequest<'a>,
    ) -> Result<Option<Self>, RopeError> {
        let Some(mut map) = check_object(config, name)? else { return Ok(None) };
        let inner = request.section.and_then(|section| map.get(section));
        let nested = match inner {
            Some(Value::Object(inner)) => {
                map = inner;
                true
            }
            Some(other) => return Err(wrong(name, "the layers' kind", "an object", other)),
            None => false,
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
        let kind = kinds.first().copied().unwrap_or("default");
        let kind = request.kinds.get(kind).map_or(kind, String::as_str);
        Ok(Some(Self { name, map, kind, nested }))
    }

    /// Whether it is for one kind of layers alone.
    pub(super) const fn is_nested(&self) -> bool {
        self.nested
    }

    /// Keys that belong to other parts of the model.
    pub(super) fn extra(&self, request: &RopeRequest<'_>) -> Map<String, Value> {
        let is_extra = |(key, _): &(&String, &Value)| request.extra.contains(*key);
        self.map.iter().filter(is_extra).map(|(k, v)| (k.clone(), v.clone())).collect()
    }

    pub(super) fn theta(&self) -> Result<Option<f64>, RopeError> {
        theta(self.map, self.name)
    }

    pub(super) fn scaling(&self, request: &RopeRequest<'_>) -> Result<Scaling, RopeError> {
        let reader = Reader { section: self.name, map: self.map };
        let factor = || reader.required("factor", "a number of at least 1", |factor| factor >= 1.0);
        let positive = |key| reader.required(key, "a positive number", |number| number > 0.0);
        match self.kind {
            "default" => {
                self.check_keys(&[], request)?;
                Ok(Scaling::Default)
            }
            "linear" => {
                self.check_keys(&["factor"], request)?;
                Ok(Scaling::Linear { factor: factor()? })
            }
            "dynamic" if self.map.get("alpha").is_some_and(|alpha| !alpha.is_null()) => {
                self.check_keys(&["alpha", "factor"], request)?;
                // At no less than 1 the base grows; beyond this nothing is published.
                let alpha = reader.required("alpha", "a number from 1 to 1e9", |alpha| {
                    (1.0..=1e9).contains(&alpha)
                })?;
                reader
                    .number("factor", "1, beside alpha", |factor| factor.total_cmp(&1.0).is_eq())?;
                Ok(Scaling::Stretched { alpha })
            }
            "dynamic" => {
                self.check_keys(&["factor"], request)?;
                Ok(Scaling::Dynamic { factor: factor()? })
            }
            "llama3" => {
                self.check_keys(&["factor", "low_freq_factor", "high_freq_factor"], request)?;
                let low = positive("low_freq_factor")?;
                let expected = "low_freq_factor at least";
                let high = reader.required("high_freq_factor", expected, |high| high >= low)?;
                let original = reader.original(request)?;
                Ok(Scaling::Llama3 { factor: factor()?, low, high, original })
            }
            "proportional" => {
                self.check_keys(&["partial_rotary_factor"], request)?;
                let share = |partial: f64| (0.0..=1.0).contains(&partial);
                let partial = reader.number("partial_rotary_factor", "a number up to 1", share)?;
                Ok(Scaling::Proportional { partial: partial.unwrap_or(1.0) })
            }
            "yarn" => {
                self.check_keys(YARN, request)?;
                yarn(&reader, request).map(Scaling::Yarn)
            }
            "longrope" => {
                self.check_keys(LONG, request)?;
                long(&reader, request).map(Scaling::Long)
            }
            other => Err(RopeError::UnknownType { section: self.name, found: other.to_owned() }),
        }
    }

    fn check_keys(&self, own: &[&str], request: &RopeRequest<'_>) -> Result<(), RopeError> {
        let unknown: Vec<String> = self
            .map
            .iter()
            .filter(|(key, value)| {
                !COMMON.contains(&key.as_str())
                    && !own.contains(&key.as_str())
                    && !request.extra.contains(key)
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

fn long(reader: &Reader<'_>, request: &RopeRequest<'_>) -> Result<Long, RopeError> {
    let positive = |key| reader.number(key, "a positive number", |number| number > 0.0);
    let original = reader.original(request)?;
    let stated = positive("factor")?;
    // With a length of its own the extension is what the model's longest sequence says.
    let extension = f64::from(request.max_positions) / f64::from(original);
    let factor = match stated {
        Some(factor) if original == request.max_positions => factor,
        _ => extension,
    };
    let attention_factor = match positive("attention_factor")? {
        Some(stated) => stated,
        None if factor <= 1.0 => 1.0,
        None => libm::sqrt(1.0 + libm::log(factor) / libm::log(f64::from(original))),
    };
    if !(attention_factor.is_finite() && attention_factor > 0.0) {
        let found = Value::from(attention_factor);
        return Err(wrong(reader.section, "attention_factor", "a positive number", &found));
    }
    Ok(Long {
        short_factor: reader.divisors("short_factor")?,
        long_factor: reader.divisors("long_factor")?,
        original,
        attention_factor,
    })
}

fn yarn(reader: &Reader<'_>, request: &RopeRequest<'_>) -> Result<Yarn, RopeError> {
    let positive = |key| reader.number(key, "a positive number", |number| number > 0.0);
    let finite = |key| reader.number(key, "a number", |_| true);
    // Zero means the default, as in the reference implementation.
    let beta = |key, default| {
        let beta = reader.number(key, "a number of at least 0", |number| number >= 0.0)?;
        Ok(beta.filter(|beta| *beta > 0.0).unwrap_or(default))
    };
    let original = reader.original(request)?;
    let factor = match positive("factor")? {
        Some(factor) => factor,
        None => f64::from(request.max_positions) / f64::from(original),
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

    /// A list of positive numbers, one for each pair.
    fn divisors(&self, key: &'static str) -> Result<Vec<f64>, RopeError> {
        let value = self.map.get(key).unwrap_or(&Value::Null);
        let number =
            |value: &Value| value.as_f64().filter(|number| *number > 0.0 && *number <= MAX_NUMBER);
        let numbers = value
            .as_array()
            .filter(|items| items.len() <= MAX_WIDTH as usize)
            .and_then(|items| items.iter().map(number).collect());
        numbers.ok_or_else(|| wrong(self.section, key, "a list of positive numbers", value))
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
    fn original(&self, request: &RopeRequest<'_>) -> Result<u32, RopeError> {
        let key = "original_max_position_embeddings";
        if let Some(original) = request.original {
            return Ok(original);
        }
        // A fraction would change the value when it becomes an integer.
        let whole = |number: f64| {
            (1.0..=f64::from(u32::MAX)).contains(&number)
                && f64::from(number as u32).total_cmp(&number).is_eq()
        };
        let stated = self.number(key, "a positive integer", whole)?;
        Ok(stated.map_or(request.max_positions, |number| number as u32))
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
