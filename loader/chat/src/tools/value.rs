//! Arguments that a model writes as bare text, and the JSON that they mean by the tool's schema.

use serde_json::Value;

use super::{pythonic::literal, schema::applicable::Applicable};

/// What the text of an argument can mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reading {
    /// Always text.
    Text,
    /// What it looks like among these types, else text.
    Loose(Types),
    /// JSON of one of these types, else text: the model said that it is no text, or the schema says
    /// more than types.
    Told(Types),
    /// JSON; text only if it is none.
    Json,
}

impl Reading {
    /// Whether a grammar has the value written in JSON.
    pub(super) const fn is_json(self) -> bool {
        matches!(self, Self::Json | Self::Told(_))
    }
}

/// Types that JSON schema tells apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Types(u8);

impl Types {
    pub(super) const NULL: Self = Self(1);
    const BOOLEAN: Self = Self(2);
    const NUMBER: Self = Self(4);
    pub(super) const TEXT: Self = Self(8);
    pub(super) const ARRAY: Self = Self(16);
    pub(super) const OBJECT: Self = Self(32);
    const INTEGER: Self = Self(64);
    pub(super) const ALL: Self = Self(127);
    const SCALARS: Self = Self(127 & !(16 | 32));

    pub(super) const fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    pub(super) const fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub(super) const fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Those of a name of JSON schema's.
    pub(super) fn named(name: &str) -> Self {
        match name {
            "null" => Self::NULL,
            "boolean" => Self::BOOLEAN,
            // An integer is a number, too.
            "number" => Self::NUMBER.or(Self::INTEGER),
            "integer" => Self::INTEGER,
            "string" => Self::TEXT,
            "array" => Self::ARRAY,
            "object" => Self::OBJECT,
            _ => Self(0),
        }
    }

    /// The name of JSON schema's that allows just these.
    pub(super) fn name(self) -> Option<&'static str> {
        const NAMES: [&str; 7] =
            ["null", "boolean", "number", "integer", "string", "array", "object"];
        NAMES.into_iter().find(|name| Self::named(name) == self)
    }

    /// That of a value.
    pub(super) fn of(value: &Value) -> Self {
        match value {
            Value::Null => Self::NULL,
            Value::Bool(_) => Self::BOOLEAN,
            // To JSON schema 1.0 is an integer.
            Value::Number(number) if number.as_f64().is_some_and(|it| it.fract() == 0.0) => {
                Self::INTEGER
            }
            Value::Number(_) => Self::NUMBER,
            Value::String(_) => Self::TEXT,
            Value::Array(_) => Self::ARRAY,
            Value::Object(_) => Self::OBJECT,
        }
    }
}

/// The types that an argument with these schemas may have.
pub(super) fn allowed(schemas: Option<&Applicable<'_>>) -> Types {
    schemas.map_or(Types::ALL, Applicable::types)
}

/// How the text of an argument with these schemas is to be read.
pub(super) fn reading(schemas: Option<&Applicable<'_>>) -> Reading {
    let Some(schemas) = schemas else { return Reading::Loose(Types::ALL) };
    let types = schemas.types();
    if types == Types::TEXT {
        Reading::Text
    } else if !types.has(Types::TEXT) {
        Reading::Json
    } else if types == Types::ALL || (types.and(Types::SCALARS) == types && schemas.is_bare()) {
        Reading::Loose(types)
    } else {
        // Constraints tell its alternatives apart, and those are written in JSON.
        Reading::Told(types)
    }
}

/// How it is to be read where the model said whether it is text; the schema has the last word.
pub(super) fn told(schemas: Option<&Applicable<'_>>, is_text: bool) -> Reading {
    let types = allowed(schemas);
    match is_text {
        _ if !types.has(Types::TEXT) => Reading::Json,
        true => Reading::Text,
        false => Reading::Told(types),
    }
}

/// The JSON that a text means.
pub(super) fn to_json(text: &str, reading: Reading) -> String {
    let quoted = || Value::from(text).to_string();
    let parsed = || {
        let trimmed = text.trim();
        let value = match trimmed {
            // Templates written in Python print its literals.
            "True" => Some(Value::Bool(true)),
            "False" => Some(Value::Bool(false)),
            "None" => Some(Value::Null),
            _ => serde_json::from_str(trimmed).ok(),
        };
        let is_literal = matches!(trimmed, "True" | "False" | "None");
        let as_is = value.map(|value| {
            (Types::of(&value), if is_literal { value.to_string() } else { trimmed.to_owned() })
        });
        // Lists and mappings too.
        as_is.or_else(|| {
            let json = literal(trimmed).filter(|_| trimmed.starts_with(['[', '{']))?;
            let value = serde_json::from_str(&json).ok()?;
            Some((Types::of(&value), json))
        })
    };
    match reading {
        Reading::Text => quoted(),
        Reading::Json => parsed().map_or_else(quoted, |(_, json)| json),
        Reading::Told(types) => match parsed() {
            Some((found, json)) if types.has(found) => json,
            _ => quoted(),
        },
        Reading::Loose(types) => match parsed() {
            Some((found, json)) if found != Types::TEXT && types.has(found) => json,
            _ => quoted(),
        },
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(schema: &Value, text: &str, expected: &str) {
        assert_eq!(
            to_json(text, reading(Some(&Applicable::root(schema)))),
            expected,
            "{schema} {text}"
        );
    }

    #[test]
    fn the_schema_decides() {
        check(&json!({"type": "string"}), "5", r#""5""#);
        check(&json!({"type": "integer"}), " 5\n", "5");
        check(&json!({"type": "boolean"}), "True", "true");
        check(&json!({"type": ["string", "null"]}), "None", "null");
        check(&json!({"type": ["string", "null"]}), "5", r#""5""#);
        check(&json!({"anyOf": [{"type": "string"}, {"type": "number"}]}), "5", "5");
        check(&json!({"enum": ["a", "b"]}), "a", r#""a""#);
        check(&json!({"type": "object"}), r#"{"a": [1]}"#, r#"{"a": [1]}"#);
        check(&json!({"type": "object"}), "no", r#""no""#);
        check(&json!({"type": "array"}), "['a', True]", r#"["a", true]"#);
        check(&json!({"type": "string"}), "['a']", r#""['a']""#);
        check(&json!({"type": ["string", "array"], "minItems": 1}), r#""x""#, r#""x""#);
        check(&json!({}), "[1", r#""[1""#);
        check(&json!({}), "[1]", "[1]");
        let root =
            json!({"properties": {"a": {"$ref": "#/$defs/t"}}, "$defs": {"t": {"type": "string"}}});
        assert_eq!(reading(Applicable::root(&root).member("a").as_ref()), Reading::Text);
        assert_eq!(to_json("a\"b", reading(None)), r#""a\"b""#);
    }

    #[test]
    fn what_the_model_says_of_its_text_decides_where_the_schema_leaves_it_open() {
        let check = |schema: &Value, is_text, text: &str, expected: &str| {
            let reading = told(Some(&Applicable::root(schema)), is_text);
            assert_eq!(to_json(text, reading), expected, "{schema} {is_text} {text}");
        };
        check(&json!({}), true, "5", r#""5""#);
        check(&json!({}), false, "5", "5");
        check(&json!({}), false, "[1", r#""[1""#);
        check(&json!({"type": ["string", "null"]}), true, "null", r#""null""#);
        check(&json!({"type": ["string", "null"]}), false, "null", "null");
        check(&json!({"type": "string"}), false, "5", r#""5""#);
        check(&json!({"type": "string"}), false, r#""5""#, r#""5""#);
        check(&json!({"type": "integer"}), true, "5", "5");
        assert_eq!(told(None, true), Reading::Text);
    }
}
