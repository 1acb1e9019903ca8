//! The fields of a request body, taken out one by one: each error names its parameter, and unread
//! fields are known at the end.

use shardpack_chat::json::{Json, Object};

use crate::error::ApiError;

/// The unread fields of a body. `null` is the same as absent.
pub(crate) struct Fields(Vec<(String, Json)>);

impl Fields {
    pub(crate) fn new(object: Object) -> Self {
        let members = object.into_members();
        Self(members.into_iter().filter(|(_, value)| *value != Json::Null).collect())
    }

    pub(crate) fn take(&mut self, name: &str) -> Option<Json> {
        let place = self.0.iter().position(|(key, _)| key == name)?;
        Some(self.0.remove(place).1)
    }

    /// Puts a field back.
    pub(crate) fn put(&mut self, name: &str, value: Json) {
        self.0.push((name.to_owned(), value));
    }

    pub(crate) fn array(&mut self, name: &str) -> Result<Option<Vec<Json>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Json::Array(items)) => Ok(Some(items)),
            Some(other) => Err(mismatch(name, "an array", &other)),
        }
    }

    pub(crate) fn object(&mut self, name: &str) -> Result<Option<Object>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Json::Object(object)) => Ok(Some(object)),
            Some(other) => Err(mismatch(name, "an object", &other)),
        }
    }

    pub(crate) fn string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Json::String(text)) => Ok(Some(text)),
            Some(other) => Err(mismatch(name, "a string", &other)),
        }
    }

    pub(crate) fn boolean(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Json::Bool(value)) => Ok(Some(value)),
            Some(other) => Err(mismatch(name, "a boolean", &other)),
        }
    }

    pub(crate) fn integer(&mut self, name: &str) -> Result<Option<i128>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(value) => {
                integer(&value).map(Some).ok_or_else(|| mismatch(name, "an integer", &value))
            }
        }
    }

    pub(crate) fn number(&mut self, name: &str) -> Result<Option<f64>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(value) => {
                number(&value).map(Some).ok_or_else(|| mismatch(name, "a number", &value))
            }
        }
    }

    /// Names of unread fields.
    pub(crate) fn into_names(self) -> Vec<String> {
        self.0.into_iter().map(|(name, _)| name).collect()
    }
}

/// A value of the wrong type.
pub(crate) fn mismatch(name: &str, expected: &str, found: &Json) -> ApiError {
    let found = found.kind();
    ApiError::param(name, format!("{name}: expected {expected}, found {found}"))
}

/// An integer; `3.0` is one, since some clients know only floats.
pub(crate) fn integer(value: &Json) -> Option<i128> {
    let Json::Number(number) = value else { return None };
    number.as_i128().or_else(|| {
        let float = number.as_f64()?;
        // Every integer below 2^53 has a float of its own.
        let exact = float.fract() == 0.0 && float.abs() < 9_007_199_254_740_992.0;
        exact.then_some(float as i128)
    })
}

pub(crate) fn number(value: &Json) -> Option<f64> {
    match value {
        Json::Number(number) => number.as_f64(),
        _ => None,
    }
}
