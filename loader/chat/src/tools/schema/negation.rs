//! Schema negation, for `not`, `if` and `oneOf` (alternatives that exclude each other). A negation
//! here allows nothing that its schema allows, but need not allow everything else.

use serde_json::{Map, Value, json};

const DEPTH_MAX: usize = 12;
const TYPES: [&str; 6] = ["null", "boolean", "number", "string", "array", "object"];

/// Exactly one of `options` as any of the schemas returned; `None` where two cannot be told apart.
pub(super) fn one_of(options: &[Value], root: &Value) -> Option<Vec<Value>> {
    let mut out = Vec::new();
    for (own, option) in options.iter().enumerate() {
        let mut parts = vec![option.clone()];
        for (other, schema) in options.iter().enumerate() {
            if own == other || are_disjoint(option, schema, root, 0) {
                continue;
            }
            parts.push(negate(schema, root, 0)?);
        }
        out.push(if parts.len() == 1 { parts.remove(0) } else { json!({ "allOf": parts }) });
    }
    Some(out)
}

/// A schema that nothing satisfies which satisfies this one.
pub(super) fn negate(schema: &Value, root: &Value, depth: usize) -> Option<Value> {
    let object = match schema {
        Value::Bool(allowed) => return Some(Value::Bool(!allowed)),
        Value::Object(object) if depth < DEPTH_MAX => object,
        _ => return None,
    };
    if object.is_empty() {
        return Some(Value::Bool(false));
    }
    let mut options = Vec::new();
    // Older drafts ignore what stands beside a reference.
    let is_reference = object.contains_key("$ref");
    for (key, value) in object.iter().filter(|(key, _)| !is_reference || *key == "$ref") {
        negate_keyword(key, value, object, root, depth, &mut options);
    }
    match options.len() {
        0 => None,
        1 => options.pop(),
        _ => Some(json!({ "anyOf": options })),
    }
}

/// Ways to break one keyword.
fn negate_keyword(
    key: &str,
    value: &Value,
    object: &Map<String, Value>,
    root: &Value,
    depth: usize,
    options: &mut Vec<Value>,
) {
    let next = |schema: &Value| negate(schema, root, depth + 1);
    match (key, value) {
        ("type", _) => {
            let own = schema_type(value);
            let others: Vec<&str> =
                TYPES.into_iter().filter(|name| !own.iter().any(|o| overlaps(o, name))).collect();
            options.push(json!({ "type": others }));
        }
        ("required", Value::Array(names)) => {
            options.extend(
                names
                    .iter()
                    .filter_map(Value::as_str)
                    .map(|name| json!({ "type": "object", "properties": { name: false } })),
            );
        }
        ("properties", Value::Object(members)) => {
            options.extend(members.iter().filter_map(|(name, schema)| {
                let negated = next(schema)?;
                Some(json!({ "type": "object", "properties": { name.as_str(): negated }, "required": [name] }))
            }));
        }
        ("const", value) => options.extend(other_than(std::slice::from_ref(value))),
        ("enum", Value::Array(values)) => options.extend(other_than(values)),
        ("allOf", Value::Array(parts)) => options.extend(parts.iter().filter_map(next)),
        ("anyOf", Value::Array(parts)) => {
            let negated: Option<Vec<Value>> = parts.iter().map(next).collect();
            options.extend(negated.map(|parts| json!({ "allOf": parts })));
        }
        ("not", schema) => options.push(schema.clone()),
        ("$ref", Value::String(path)) => {
            options.extend(resolve(path, root).and_then(|schema| negate(schema, root, depth + 1)));
        }
        ("minLength", Value::Number(_)) if value.as_u64().is_some_and(|n| n > 0) => {
            let max = value.as_u64().unwrap_or_default() - 1;
            options.push(json!({ "type": "string", "maxLength": max }));
        }
        ("maxLength", Value::Number(_)) => {
            options.extend(value.as_u64().map(|n| json!({ "type": "string", "minLength": n + 1 })));
        }
        ("minItems", Value::Number(_)) if value.as_u64().is_some_and(|n| n > 0) => {
            let max = value.as_u64().unwrap_or_default() - 1;
            options.push(json!({ "type": "array", "maxItems": max }));
        }
        ("maxItems", Value::Number(_)) => {
            options.extend(value.as_u64().map(|n| json!({ "type": "array", "minItems": n + 1 })));
        }
        ("minimum", Value::Number(_)) if !object.contains_key("exclusiveMinimum") => {
            options.push(json!({ "type": "number", "exclusiveMaximum": value }));
        }
        ("maximum", Value::Number(_)) if !object.contains_key("exclusiveMaximum") => {
            options.push(json!({ "type": "number", "exclusiveMinimum": value }));
        }
        _ => {}
    }
}

/// Values that are none of these, where that can be said.
fn other_than(values: &[Value]) -> Option<Value> {
    let own: Vec<&str> = values.iter().map(type_of).collect();
    let others: Vec<&str> =
        TYPES.into_iter().filter(|name| !own.iter().any(|own| overlaps(own, name))).collect();
    let mut options = vec![json!({ "type": others })];
    if values.iter().all(Value::is_boolean)
        && let [value] = values
    {
        options.push(json!({ "const": !value.as_bool()? }));
    }
    if let [Value::String(text)] = values {
        // Shorter and longer texts are others.
        let len = text.chars().count();
        options.push(json!({ "type": "string", "minLength": len + 1 }));
        if len > 0 {
            options.push(json!({ "type": "string", "maxLength": len - 1 }));
        }
    }
    Some(json!({ "anyOf": options }))
}

/// Whether nothing satisfies both; false where that is not plain to see.
fn are_disjoint(a: &Value, b: &Value, root: &Value, depth: usize) -> bool {
    if *a == Value::Bool(false) || *b == Value::Bool(false) {
        return true;
    }
    let (Some(a), Some(b)) = (a.as_object(), b.as_object()) else { return false };
    if depth > DEPTH_MAX {
        return false;
    }
    for (one, other) in [(a, b), (b, a)] {
        let other = Value::Object(other.clone());
        let with_other = |schema: &Value| are_disjoint(schema, &other, root, depth + 1);
        if let Some(Value::String(path)) = one.get("$ref")
            && resolve(path, root).is_some_and(with_other)
        {
            return true;
        }
        if let Some(Value::Array(parts)) = one.get("allOf")
            && parts.iter().any(with_other)
        {
            return true;
        }
        for key in ["anyOf", "oneOf"] {
            if let Some(Value::Array(parts)) = one.get(key)
                && parts.iter().all(with_other)
            {
                return true;
            }
        }
    }
    if a.contains_key("$ref") || b.contains_key("$ref") {
        return false;
    }
    let (types_a, types_b) = (types_of(a), types_of(b));
    if !types_a.iter().any(|a| types_b.iter().any(|b| overlaps(a, b))) {
        return true;
    }
    if let (Some(a), Some(b)) = (values_of(a), values_of(b))
        && !a.iter().any(|a| b.contains(a))
    {
        return true;
    }
    // Only of objects, the rest may still be told apart by a property.
    let objects_only = [&types_a, &types_b].iter().any(|types| **types == ["object"]);
    objects_only && (tells_apart(a, b, root, depth) || tells_apart(b, a, root, depth))
}

/// Whether a property that `a` needs is forbidden by `b`, or can have no value in both.
fn tells_apart(a: &Map<String, Value>, b: &Map<String, Value>, root: &Value, depth: usize) -> bool {
    let Some(Value::Array(required)) = a.get("required") else { return false };
    required.iter().filter_map(Value::as_str).any(|name| {
        let property = |object: &Map<String, Value>| object.get("properties")?.get(name).cloned();
        match (property(a), property(b)) {
            (_, None) => {
                b.get("additionalProperties") == Some(&Value::Bool(false))
                    && !b.contains_key("patternProperties")
            }
            (own, Some(other)) => {
                let own = own.unwrap_or(Value::Bool(true));
                are_disjoint(&own, &other, root, depth + 1)
            }
        }
    })
}

fn values_of(object: &Map<String, Value>) -> Option<Vec<Value>> {
    object.get("const").map(|value| vec![value.clone()]).or_else(|| match object.get("enum") {
        Some(Value::Array(values)) => Some(values.clone()),
        _ => None,
    })
}

fn types_of(object: &Map<String, Value>) -> Vec<&str> {
    match (object.get("type"), object.get("const"), object.get("enum")) {
        (Some(value), _, _) => schema_type(value),
        (None, Some(value), _) => vec![type_of(value)],
        (None, None, Some(Value::Array(values))) => values.iter().map(type_of).collect(),
        _ => TYPES.to_vec(),
    }
}

fn schema_type(value: &Value) -> Vec<&str> {
    match value {
        Value::String(name) => vec![name],
        Value::Array(names) => names.iter().filter_map(Value::as_str).collect(),
        _ => TYPES.to_vec(),
    }
}

fn overlaps(a: &str, b: &str) -> bool {
    a == b || matches!((a, b), ("number", "integer") | ("integer", "number"))
}

const fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

fn resolve<'a>(path: &str, root: &'a Value) -> Option<&'a Value> {
    root.pointer(path.strip_prefix('#')?)
}
