//! Arguments that a model writes as bare text, and the JSON that they mean by the tool's schema.

use serde_json::Value;

use super::pythonic::literal;

/// What the text of an argument can mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reading {
    /// Always text.
    Text,
    /// What it looks like among these types, else text.
    Loose(Types),
    /// JSON of one of these types, else text; the model said that it is no text.
    Told(Types),
    /// JSON; text only if it is none.
    Json,
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
    const ALL: Self = Self(63);

    const fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    pub(super) const fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub(super) const fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    fn named(name: &str) -> Self {
        match name {
            "null" => Self::NULL,
            "boolean" => Self::BOOLEAN,
            "number" | "integer" => Self::NUMBER,
            "string" => Self::TEXT,
            "array" => Self::ARRAY,
            "object" => Self::OBJECT,
            _ => Self(0),
        }
    }

    const fn of(value: &Value) -> Self {
        match value {
            Value::Null => Self::NULL,
            Value::Bool(_) => Self::BOOLEAN,
            Value::Number(_) => Self::NUMBER,
            Value::String(_) => Self::TEXT,
            Value::Array(_) => Self::ARRAY,
            Value::Object(_) => Self::OBJECT,
        }
    }
}

/// Alternatives and references followed; deeper schemas mean anything.
const DEPTH_MAX: usize = 16;

/// The types that a schema allows; `root` is what its references point into.
fn types(schema: &Value, root: &Value, depth: usize) -> Types {
    let Some(object) = schema.as_object().filter(|_| depth < DEPTH_MAX) else { return Types::ALL };
    let mut found = Types::ALL;
    match object.get("type") {
        Some(Value::String(name)) => found = Types::named(name),
        Some(Value::Array(names)) => {
            let names = names.iter().filter_map(Value::as_str).map(Types::named);
            found = names.fold(Types::default(), Types::or);
        }
        _ => {}
    }
    if let Some(value) = object.get("const") {
        found = found.and(Types::of(value));
    }
    if let Some(Value::Array(values)) = object.get("enum") {
        found = found.and(values.iter().map(Types::of).fold(Types::default(), Types::or));
    }
    for key in ["anyOf", "oneOf"] {
        if let Some(Value::Array(options)) = object.get(key) {
            let options = options.iter().map(|option| types(option, root, depth + 1));
            found = found.and(options.fold(Types::default(), Types::or));
        }
    }
    if let Some(Value::Array(parts)) = object.get("allOf") {
        found = parts.iter().map(|part| types(part, root, depth + 1)).fold(found, Types::and);
    }
    if let Some(Value::String(reference)) = object.get("$ref")
        && let Some(target) = reference.strip_prefix('#').and_then(|path| root.pointer(path))
    {
        found = found.and(types(target, root, depth + 1));
    }
    found
}

/// Whether a schema says no more of its texts, numbers and literals than their types.
fn is_bare(schema: &Value) -> bool {
    const PLAIN: [&str; 6] = ["type", "description", "title", "default", "examples", "anyOf"];
    schema.as_object().is_none_or(|object| {
        object.iter().all(|(key, value)| match (key.as_str(), value) {
            ("anyOf", Value::Array(options)) => options.iter().all(is_bare),
            (key, _) => PLAIN.contains(&key),
        })
    })
}

/// The types that an argument with this schema may have.
pub(super) fn allowed(schema: Option<(&Value, &Value)>) -> Types {
    schema.map_or(Types::ALL, |(schema, root)| types(schema, root, 0))
}

/// How the text of an argument with this schema is to be read.
pub(super) fn reading(schema: Option<(&Value, &Value)>) -> Reading {
    let Some((schema, root)) = schema else { return Reading::Loose(Types::ALL) };
    let types = types(schema, root, 0);
    let scalars = Types::NULL.or(Types::BOOLEAN).or(Types::NUMBER).or(Types::TEXT);
    if types == Types::TEXT {
        Reading::Text
    } else if !types.has(Types::TEXT) {
        Reading::Json
    } else if types == Types::ALL || (types.and(scalars) == types && is_bare(schema)) {
        Reading::Loose(types)
    } else {
        // Constraints tell its alternatives apart, and those are written in JSON.
        Reading::Json
    }
}

/// How it is to be read where the model said whether it is text; the schema has the last word.
pub(super) fn told(schema: Option<(&Value, &Value)>, is_text: bool) -> Reading {
    let types = schema.map_or(Types::ALL, |(schema, root)| types(schema, root, 0));
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
        assert_eq!(to_json(text, reading(Some((schema, schema)))), expected, "{schema} {text}");
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
        assert_eq!(reading(Some((&root["properties"]["a"], &root))), Reading::Text);
        assert_eq!(to_json("a\"b", reading(None)), r#""a\"b""#);
    }

    #[test]
    fn what_the_model_says_of_its_text_decides_where_the_schema_leaves_it_open() {
        let check = |schema: &Value, is_text, text: &str, expected: &str| {
            let reading = told(Some((schema, schema)), is_text);
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
