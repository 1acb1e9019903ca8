//! One object of a description, read key by key.

use serde_json::{Map, Value};

use crate::{neutral::is_neutral, stored::StoredError};

/// Longest value that a message shows.
const MAX_SHOWN_BYTES: usize = 200;

/// See the module.
pub(super) struct Section<'a> {
    place: String,
    map: &'a Map<String, Value>,
}

/// A value for a message.
pub(super) fn shown(value: &Value) -> String {
    let mut text = value.to_string();
    if text.len() > MAX_SHOWN_BYTES {
        let end = (0..=MAX_SHOWN_BYTES).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(end);
        text.push('…');
    }
    text
}

impl<'a> Section<'a> {
    pub(super) fn new(place: &str, map: &'a Map<String, Value>) -> Self {
        Self { place: place.to_owned(), map }
    }

    /// The object under a key.
    pub(super) fn section(&self, key: &str) -> Result<Option<Self>, StoredError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => {
                Ok(Some(Self { place: format!("{}.{key}", self.place), map }))
            }
            Some(_) => Err(self.wrong(key, "an object")),
        }
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = (&'a String, &'a Value)> {
        self.map.iter()
    }

    /// The value of a key; null is absent.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    pub(super) fn has(&self, key: &str) -> bool {
        self.get(key).is_some()
    }

    /// The error of a key with this value.
    pub(super) fn wrong(&self, key: &str, expected: &str) -> StoredError {
        StoredError::Config {
            place: format!("{key:?} of {}", self.place),
            found: self.map.get(key).map_or_else(|| "absent".to_owned(), shown),
            expected: expected.to_owned(),
        }
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>, StoredError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.wrong(key, "text")),
        }
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>, StoredError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(_) => Err(self.wrong(key, "true or false")),
        }
    }

    /// A size of at most `most`.
    pub(super) fn size(&self, key: &str, most: u64) -> Result<Option<u64>, StoredError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => match value.as_u64() {
                Some(size) if (1..=most).contains(&size) => Ok(Some(size)),
                _ => Err(self.wrong(key, &format!("a number from 1 to {most}"))),
            },
        }
    }

    /// Texts of a list.
    pub(super) fn texts(&self, key: &str) -> Result<Vec<&'a str>, StoredError> {
        match self.get(key) {
            None => Ok(Vec::new()),
            Some(Value::Array(items)) => items
                .iter()
                .map(|item| item.as_str().ok_or_else(|| self.wrong(key, "a list of texts")))
                .collect(),
            Some(_) => Err(self.wrong(key, "a list of texts")),
        }
    }

    /// Refuses keys beyond these, unless their values ask for nothing.
    pub(super) fn only(&self, format: &str, known: &[&str]) -> Result<(), StoredError> {
        let unknown: Vec<String> = self
            .map
            .iter()
            .filter(|(key, value)| !known.contains(&key.as_str()) && !is_neutral(value))
            .map(|(key, value)| format!("{key} = {}", shown(value)))
            .collect();
        if unknown.is_empty() {
            return Ok(());
        }
        Err(StoredError::Keys {
            place: self.place.clone(),
            format: format.to_owned(),
            keys: unknown.join(", "),
        })
    }
}
