//! Schemas of tools as advice: what no grammar and no validator can enforce is left out, by its
//! place, and what other programs write differently is read as what it means.

use serde_json::{Map, Value, json};

use super::SchemaError;
use crate::tools::argument_validator::ArgumentValidator;

/// Keywords left out one after the other, because a compiler names them; then the schema is any
/// object.
const ROUNDS_MAX: usize = 24;

/// Keywords that are refused where a grammar would hold another number than they say.
pub(crate) const NUMBERS: [&str; 7] =
    ["const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"];

/// The part of a schema that can be enforced, and the places of what was left out.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Advice {
    /// What remains.
    pub(crate) schema: Value,
    /// Paths below the schema, such as `properties.to.pattern`.
    pub(crate) left_out: Vec<String>,
}

/// Leaves out what can be told to be at fault from the schema alone.
pub(crate) fn soften(schema: &Value) -> Advice {
    let mut left_out = Vec::new();
    let schema = soft(schema, "", &mut left_out);
    Advice { schema, left_out }
}

/// Leaves out keywords until `check` has nothing to say; it names the keyword that it refuses.
pub(crate) fn soften_until(
    schema: &Value,
    mut check: impl FnMut(&Value) -> Result<(), SchemaError>,
) -> Advice {
    let mut advice = soften(schema);
    for _ in 0..ROUNDS_MAX {
        let Err(error) = check(&advice.schema) else { return advice };
        let before = advice.left_out.len();
        strip(&mut advice.schema, &error.keyword, "", &mut advice.left_out);
        if advice.left_out.len() == before {
            break;
        }
    }
    advice.left_out.push("schema".to_owned());
    Advice { schema: json!({ "type": "object" }), ..advice }
}

/// Where a keyword stands in a schema, for messages.
pub(crate) fn place_of(schema: &Value, keyword: &str) -> Option<String> {
    let softened = soften(schema).left_out;
    let is_it = |path: &&String| path.rsplit('.').next() == Some(keyword);
    if let Some(place) = softened.iter().find(is_it) {
        return Some(place.clone());
    }
    let mut found = Vec::new();
    strip(&mut schema.clone(), keyword, "", &mut found);
    found.into_iter().next()
}

fn at(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

/// The type that a name stands for, where other programs spell it otherwise.
pub(super) fn type_name(name: &str) -> Option<&'static str> {
    Some(match name.to_ascii_lowercase().as_str() {
        "string" | "str" | "text" => "string",
        "integer" | "int" | "long" => "integer",
        "number" | "float" | "double" => "number",
        "boolean" | "bool" => "boolean",
        "array" | "list" | "tuple" => "array",
        "object" | "dict" | "map" => "object",
        "null" | "none" => "null",
        _ => return None,
    })
}

/// The types that are known, and whether every one was.
fn types(value: &Value) -> (Option<Value>, bool) {
    match value {
        Value::String(name) => {
            let known = type_name(name);
            (known.map(Value::from), known.is_some())
        }
        Value::Array(names) => {
            let known: Vec<Value> = names
                .iter()
                .filter_map(|name| name.as_str().and_then(type_name).map(Value::from))
                .collect();
            // One unknown alternative allows anything.
            let all = known.len() == names.len() && !known.is_empty();
            (all.then_some(Value::Array(known)), all)
        }
        _ => (None, false),
    }
}

fn soft(schema: &Value, path: &str, left_out: &mut Vec<String>) -> Value {
    let object = match schema {
        Value::Bool(_) => return schema.clone(),
        Value::Object(object) => object,
        _ => {
            left_out.push(if path.is_empty() { "schema".to_owned() } else { path.to_owned() });
            return Value::Bool(true);
        }
    };
    let mut out = Map::new();
    for (key, value) in object {
        let here = at(path, key);
        match soft_keyword(key, value, &here, left_out) {
            Some(value) => {
                out.insert(key.clone(), value);
            }
            None => left_out.push(here),
        }
    }
    if object.get("nullable") == Some(&Value::Bool(true)) {
        out.remove("nullable");
        if let Some(Value::String(kind)) = out.get("type").cloned() {
            out.insert("type".to_owned(), json!([kind, "null"]));
        }
    }
    Value::Object(out)
}

/// A keyword's value as it can be enforced; nothing where it cannot.
fn soft_keyword(key: &str, value: &Value, here: &str, left_out: &mut Vec<String>) -> Option<Value> {
    match (key, value) {
        ("default" | "const" | "examples" | "example" | "nullable", value) => Some(value.clone()),
        // No keyword means anything when it is null.
        (_, Value::Null) => None,
        ("type", value) => types(value).0,
        ("pattern", Value::String(pattern)) => {
            is_enforceable(&json!({ "pattern": pattern })).then(|| value.clone())
        }
        ("$ref", Value::String(reference)) => reference.starts_with('#').then(|| value.clone()),
        ("enum", Value::Array(values)) => (!values.is_empty()).then(|| value.clone()),
        ("required", Value::Array(names)) => {
            let known: Vec<Value> = names.iter().filter(|name| name.is_string()).cloned().collect();
            Some(known.into())
        }
        ("properties" | "$defs" | "definitions" | "patternProperties", Value::Object(named)) => {
            let mut members = Map::new();
            for (name, schema) in named {
                let place = at(here, name);
                if key == "patternProperties" && !is_enforceable(&json!({ "pattern": name })) {
                    left_out.push(place);
                    continue;
                }
                members.insert(name.clone(), soft(schema, &place, left_out));
            }
            Some(Value::Object(members))
        }
        (
            "items"
            | "additionalItems"
            | "additionalProperties"
            | "contains"
            | "not"
            | "if"
            | "then"
            | "else"
            | "propertyNames",
            Value::Object(_) | Value::Bool(_),
        ) => Some(soft(value, here, left_out)),
        ("items" | "allOf" | "anyOf" | "oneOf" | "prefixItems", Value::Array(list)) => {
            let list = list.iter().enumerate();
            let soft =
                list.map(|(index, schema)| soft(schema, &format!("{here}[{index}]"), left_out));
            let list: Vec<Value> = soft.collect();
            (!list.is_empty()).then_some(Value::Array(list))
        }
        _ => plain_keyword(key, value),
    }
}

/// The value of a keyword that holds no schema, where it is of the right kind.
fn plain_keyword(key: &str, value: &Value) -> Option<Value> {
    match (key, value) {
        ("minimum" | "maximum" | "multipleOf" | "exclusiveMinimum" | "exclusiveMaximum", value) => {
            value.is_number().then(|| value.clone())
        }
        (
            "minLength" | "maxLength" | "minItems" | "maxItems" | "minProperties" | "maxProperties"
            | "minContains" | "maxContains",
            value,
        ) => value.as_u64().map(Value::from),
        (
            "description" | "title" | "format" | "$schema" | "$id" | "$comment" | "$anchor"
            | "contentEncoding" | "contentMediaType",
            value,
        ) => value.is_string().then(|| value.clone()),
        ("uniqueItems", value) => value.is_boolean().then(|| value.clone()),
        (
            "required"
            | "properties"
            | "$defs"
            | "definitions"
            | "patternProperties"
            | "items"
            | "allOf"
            | "anyOf"
            | "oneOf"
            | "prefixItems"
            | "additionalProperties"
            | "enum"
            | "pattern"
            | "$ref"
            | "additionalItems"
            | "not"
            | "if"
            | "then"
            | "else",
            _,
        ) => None,
        _ => Some(value.clone()),
    }
}

fn is_enforceable(schema: &Value) -> bool {
    ArgumentValidator::new(schema).is_ok()
}

/// Members of schemas that hold schemas by name.
const NAMED: [&str; 4] = ["properties", "patternProperties", "$defs", "definitions"];

/// Leaves a keyword out wherever it stands.
fn strip(schema: &mut Value, keyword: &str, path: &str, left_out: &mut Vec<String>) {
    match schema {
        Value::Object(object) => {
            if object.remove(keyword).is_some() {
                left_out.push(at(path, keyword));
            }
            for (key, value) in object.iter_mut() {
                let here = at(path, key);
                match value {
                    Value::Object(named) if NAMED.contains(&key.as_str()) => {
                        for (name, schema) in named.iter_mut() {
                            strip(schema, keyword, &at(&here, name), left_out);
                        }
                    }
                    _ if matches!(key.as_str(), "enum" | "const" | "default" | "examples") => {}
                    value => strip(value, keyword, &here, left_out),
                }
            }
        }
        Value::Array(list) => {
            for (index, value) in list.iter_mut().enumerate() {
                strip(value, keyword, &format!("{path}[{index}]"), left_out);
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_enforced_is_left_out_by_its_place() {
        let check = |schema: Value, remains: Value, left_out: &[&str]| {
            let advice = soften(&schema);
            assert_eq!(advice.schema, remains, "{schema}");
            assert_eq!(advice.left_out, left_out, "{schema}");
        };
        check(
            json!({"properties": {"to": {"type": "string", "pattern": "^(?!x)y"}}}),
            json!({"properties": {"to": {"type": "string"}}}),
            &["properties.to.pattern"],
        );
        check(json!({"items": {"pattern": "(a)\\1"}}), json!({"items": {}}), &["items.pattern"]);
        check(json!({"pattern": "(?<=a)b"}), json!({}), &["pattern"]);
        check(json!({"type": "any"}), json!({}), &["type"]);
        check(json!({"type": ["string", "any"]}), json!({}), &["type"]);
        check(json!({"type": "STRING"}), json!({"type": "string"}), &[]);
        check(json!({"type": ["NULL", "Integer"]}), json!({"type": ["null", "integer"]}), &[]);
        check(
            json!({"properties": null, "required": null}),
            json!({}),
            &["properties", "required"],
        );
        check(json!({"$ref": "https://example.com/x.json"}), json!({}), &["$ref"]);
        check(json!({"anyOf": [{"$ref": "x.json"}]}), json!({"anyOf": [{}]}), &["anyOf[0].$ref"]);
        check(json!({"enum": []}), json!({}), &["enum"]);
        check(
            json!({"required": true, "type": "string"}),
            json!({"type": "string"}),
            &["required"],
        );
        check(
            json!({"type": "string", "nullable": true}),
            json!({"type": ["string", "null"]}),
            &[],
        );
        check(json!({"default": null}), json!({"default": null}), &[]);
        check(
            json!({"properties": {"pattern": {"type": "string"}}}),
            json!({"properties": {"pattern": {"type": "string"}}}),
            &[],
        );
        check(json!("x"), json!(true), &["schema"]);
    }

    #[test]
    fn keywords_that_a_compiler_refuses_are_left_out_one_by_one() {
        let schema = json!({"type": "object", "properties": {"a": {"odd": 1, "type": "string"}}});
        let advice = soften_until(&schema, |schema| {
            let has = schema.to_string().contains("odd");
            if has { Err(SchemaError::new("odd", "no")) } else { Ok(()) }
        });
        assert_eq!(advice.left_out, ["properties.a.odd"]);
        let never = soften_until(&schema, |_| Err(SchemaError::new("schema", "no")));
        assert_eq!(never.schema, json!({"type": "object"}));
        assert_eq!(place_of(&schema, "odd").as_deref(), Some("properties.a.odd"));
    }
}
