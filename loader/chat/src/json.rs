//! JSON whose objects keep the order of their keys: chat templates print tools and arguments as
//! they came, and another order is another prompt.

use std::{collections::HashMap, fmt};

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{Error as _, MapAccess, SeqAccess, Visitor},
    ser::{SerializeMap, SerializeSeq},
};
use serde_json::Number;

/// A JSON value.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Json {
    /// `null`.
    #[default]
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// An integer or a float; `1.0` stays a float.
    Number(Number),
    /// A string.
    String(String),
    /// An array.
    Array(Vec<Json>),
    /// An object, keys in the order in which they came.
    Object(Object),
}

/// Members of a JSON object in the order in which they came; no key twice.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Object(Vec<(String, Json)>);

impl Json {
    /// Parses text; nesting is bounded by the parser (128).
    pub fn parse(text: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(text)
    }

    /// The string, if this is one.
    #[must_use]
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(text) => Some(text),
            _ => None,
        }
    }

    /// The object, if this is one.
    #[must_use]
    pub const fn as_object(&self) -> Option<&Object> {
        match self {
            Self::Object(object) => Some(object),
            _ => None,
        }
    }

    /// The items, if this is an array.
    #[must_use]
    pub fn as_array(&self) -> Option<&[Self]> {
        match self {
            Self::Array(items) => Some(items),
            _ => None,
        }
    }

    /// What this is, for messages.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool(_) => "a boolean",
            Self::Number(_) => "a number",
            Self::String(_) => "a string",
            Self::Array(_) => "an array",
            Self::Object(_) => "an object",
        }
    }
}

impl Json {
    /// About what it takes in memory.
    pub fn size_bytes(&self) -> usize {
        let own = size_of::<Self>();
        own + match self {
            Self::String(text) => text.len(),
            Self::Array(items) => items.iter().map(Self::size_bytes).sum(),
            Self::Object(members) => {
                members.iter().map(|(name, value)| own + name.len() + value.size_bytes()).sum()
            }
            _ => 0,
        }
    }
}

impl Json {
    /// The text that Python's `json.dumps` writes, with letters beyond ASCII as they are.
    pub(crate) fn dumped(&self) -> String {
        let mut out = String::new();
        self.dump(&mut out);
        out
    }

    /// Nesting is bounded by the parser.
    fn dump(&self, out: &mut String) {
        match self {
            Self::Array(items) => {
                out.push('[');
                for (index, item) in items.iter().enumerate() {
                    out.push_str(if index == 0 { "" } else { ", " });
                    item.dump(out);
                }
                out.push(']');
            }
            Self::Object(members) => {
                out.push('{');
                for (index, (name, value)) in members.iter().enumerate() {
                    out.push_str(if index == 0 { "" } else { ", " });
                    Self::from(name).dump(out);
                    out.push_str(": ");
                    value.dump(out);
                }
                out.push('}');
            }
            plain => out.push_str(&serde_json::to_string(plain).unwrap_or_default()),
        }
    }
}

impl From<&str> for Json {
    fn from(text: &str) -> Self {
        Self::String(text.to_owned())
    }
}

impl From<String> for Json {
    fn from(text: String) -> Self {
        Self::String(text)
    }
}

impl Object {
    /// Takes a member out.
    pub fn remove(&mut self, key: &str) -> Option<Json> {
        let place = self.0.iter().position(|(name, _)| name == key)?;
        Some(self.0.remove(place).1)
    }

    /// The value of a key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Json> {
        self.0.iter().find(|(name, _)| name == key).map(|(_, value)| value)
    }

    /// The value of a key, to change it in place.
    pub fn get_mut(&mut self, key: &str) -> Option<&mut Json> {
        self.0.iter_mut().find(|(name, _)| name == key).map(|(_, value)| value)
    }

    /// Replaces a key's value where it stands, or adds it at the end.
    pub fn set(&mut self, key: &str, value: Json) {
        match self.get_mut(key) {
            Some(place) => *place = value,
            None => self.0.push((key.to_owned(), value)),
        }
    }

    /// Members in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Json)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// Members in order, taken out.
    #[must_use]
    pub fn into_members(self) -> Vec<(String, Json)> {
        self.0
    }
}

impl FromIterator<(String, Json)> for Object {
    /// Of members with the same key the last value counts, at the first one's place, as in Python.
    fn from_iter<I: IntoIterator<Item = (String, Json)>>(members: I) -> Self {
        let mut places: HashMap<String, usize> = HashMap::new();
        let mut kept: Vec<(String, Json)> = Vec::new();
        for (key, value) in members {
            if let Some(&place) = places.get(&key) {
                kept[place].1 = value;
            } else {
                places.insert(key.clone(), kept.len());
                kept.push((key, value));
            }
        }
        Self(kept)
    }
}

impl Serialize for Json {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Null => serializer.serialize_unit(),
            Self::Bool(value) => serializer.serialize_bool(*value),
            Self::Number(value) => value.serialize(serializer),
            Self::String(value) => serializer.serialize_str(value),
            Self::Array(items) => {
                let mut seq = serializer.serialize_seq(Some(items.len()))?;
                for item in items {
                    seq.serialize_element(item)?;
                }
                seq.end()
            }
            Self::Object(object) => object.serialize(serializer),
        }
    }
}

impl Serialize for Object {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (key, value) in &self.0 {
            map.serialize_entry(key, value)?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(JsonVisitor)
    }
}

impl<'de> Deserialize<'de> for Object {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Json::deserialize(deserializer)? {
            Json::Object(object) => Ok(object),
            other => Err(D::Error::custom(format!("expected an object, found {}", other.kind()))),
        }
    }
}

struct JsonVisitor;

impl<'de> Visitor<'de> for JsonVisitor {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Json, E> {
        Ok(Json::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Json, E> {
        Ok(Json::Number(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Json, E> {
        Ok(Json::Number(value.into()))
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Json, E> {
        let number = Number::from_f64(value).ok_or_else(|| E::custom("number out of range"))?;
        Ok(Json::Number(number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Json, E> {
        Ok(Json::String(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> Result<Json, E> {
        Ok(Json::String(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Json, A::Error> {
        // The length is not known in advance; growth follows the bytes that were really sent.
        let mut items = Vec::new();
        while let Some(item) = seq.next_element()? {
            items.push(item);
        }
        Ok(Json::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Json, A::Error> {
        let mut members = Vec::new();
        while let Some(member) = map.next_entry()? {
            members.push(member);
        }
        Ok(Json::Object(members.into_iter().collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: &str) {
        let value = Json::parse(text.as_bytes()).unwrap();
        assert_eq!(serde_json::to_string(&value).unwrap(), expected, "{text}");
    }

    #[test]
    fn order_and_kinds_of_numbers_survive() {
        check(
            r#"{"z":1,"a":{"y":[1.0,-2,null,true]},"b":"ü"}"#,
            r#"{"z":1,"a":{"y":[1.0,-2,null,true]},"b":"ü"}"#,
        );
        check("18446744073709551615", "18446744073709551615");
        check(r#"{"a":1,"b":2,"a":3}"#, r#"{"a":3,"b":2}"#);
    }

    #[test]
    fn bottomless_nesting_is_an_error() {
        assert!(Json::parse("[".repeat(100_000).as_bytes()).is_err());
    }
}
