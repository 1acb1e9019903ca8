//! Values of expressions.

use std::{
    cmp::Ordering,
    collections::BTreeMap,
    fmt::{self, Write as _},
};

/// Deepest nesting of a value taken from JSON: published configurations have four levels.
const MAX_NESTING: usize = 32;

/// Most characters of a value that an error message shows.
const MAX_SHOWN: usize = 100;

/// What an expression evaluates to. Floats are finite.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Absent or null.
    Null,
    /// A bool.
    Bool(bool),
    /// An integer.
    Int(i64),
    /// A float, never infinite or NaN.
    Float(f64),
    /// A string.
    Text(String),
    /// A list.
    List(Vec<Value>),
    /// An object.
    Map(BTreeMap<String, Value>),
}

impl Value {
    /// The value of a JSON document; `None` if it is nested more than 32 levels deep. Integers
    /// beyond 64 bits become floats.
    #[must_use]
    pub fn from_json(json: &serde_json::Value) -> Option<Self> {
        Self::from_json_within(json, MAX_NESTING)
    }

    fn from_json_within(json: &serde_json::Value, levels: usize) -> Option<Self> {
        let inner = levels.checked_sub(1)?;
        Some(match json {
            serde_json::Value::Null => Self::Null,
            serde_json::Value::Bool(flag) => Self::Bool(*flag),
            serde_json::Value::Number(number) => match number.as_i64() {
                Some(integer) => Self::Int(integer),
                None => Self::Float(number.as_f64().filter(|float| float.is_finite())?),
            },
            serde_json::Value::String(text) => Self::Text(text.clone()),
            serde_json::Value::Array(items) => Self::List(
                items
                    .iter()
                    .map(|item| Self::from_json_within(item, inner))
                    .collect::<Option<_>>()?,
            ),
            serde_json::Value::Object(map) => Self::Map(
                map.iter()
                    .map(|(key, item)| Some((key.clone(), Self::from_json_within(item, inner)?)))
                    .collect::<Option<_>>()?,
            ),
        })
    }

    /// The number as a float, if it is one.
    #[must_use]
    pub fn as_float(&self) -> Option<f64> {
        match self {
            Self::Int(integer) => Some(*integer as f64),
            Self::Float(float) => Some(*float),
            _ => None,
        }
    }

    /// Equality in which an integer equals the float of its value.
    #[must_use]
    pub fn equals(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Int(left), Self::Int(right)) => left == right,
            (Self::List(left), Self::List(right)) => {
                left.len() == right.len()
                    && left.iter().zip(right).all(|(left, right)| left.equals(right))
            }
            _ => match (self.as_float(), other.as_float()) {
                (Some(left), Some(right)) => left.partial_cmp(&right).is_some_and(Ordering::is_eq),
                _ => self == other,
            },
        }
    }

    fn write(&self, out: &mut String) -> fmt::Result {
        // Long values stop growing soon after what is shown.
        if out.len() > 4 * MAX_SHOWN {
            return Ok(());
        }
        match self {
            Self::Null => out.write_str("null"),
            Self::Bool(flag) => write!(out, "{flag}"),
            Self::Int(integer) => write!(out, "{integer}"),
            Self::Float(float) => write!(out, "{float:?}"),
            Self::Text(text) => write!(out, "{text:?}"),
            Self::List(items) => {
                out.write_char('[')?;
                for (index, item) in items.iter().enumerate() {
                    out.write_str(if index == 0 { "" } else { ", " })?;
                    item.write(out)?;
                }
                out.write_char(']')
            }
            Self::Map(map) => {
                out.write_char('{')?;
                for (index, (key, item)) in map.iter().enumerate() {
                    let comma = if index == 0 { "" } else { ", " };
                    write!(out, "{comma}{key:?}: ")?;
                    item.write(out)?;
                }
                out.write_char('}')
            }
        }
    }
}

/// As JSON, shortened for messages.
impl fmt::Display for Value {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = String::new();
        self.write(&mut text)?;
        match text.char_indices().nth(MAX_SHOWN) {
            Some((end, _)) => write!(formatter, "{}…", &text[..end]),
            None => formatter.write_str(&text),
        }
    }
}
