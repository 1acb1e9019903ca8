//! Schemas of answers whose objects stand open only because nobody closed them: a model would ramble
//! on in members that nobody asked for. Strict schemas are written as they are meant.

use serde_json::Value;

/// Keywords under which a closed object may contradict what stands beside it.
const COMBINING: [&str; 12] = [
    "allOf",
    "oneOf",
    "not",
    "if",
    "dependencies",
    "dependentSchemas",
    "dependentRequired",
    "patternProperties",
    "propertyNames",
    "minProperties",
    "unevaluatedProperties",
    "$dynamicRef",
];

/// The schema with its objects closed that name their members, where nothing is combined.
pub(super) fn closed(schema: &Value) -> Value {
    if combines(schema) {
        return schema.clone();
    }
    let mut schema = schema.clone();
    close(&mut schema);
    schema
}

/// Whether a keyword of [`COMBINING`] stands anywhere; members of that name count too, which is
/// on the safe side.
fn combines(value: &Value) -> bool {
    match value {
        Value::Object(object) => object.iter().any(|(key, value)| {
            let beside = key == "anyOf" && object.contains_key("properties");
            beside || COMBINING.contains(&key.as_str()) || combines(value)
        }),
        Value::Array(list) => list.iter().any(combines),
        _ => false,
    }
}

fn close(schema: &mut Value) {
    let Value::Object(object) = schema else { return };
    for (key, value) in object.iter_mut() {
        match (key.as_str(), value) {
            ("properties" | "$defs" | "definitions", Value::Object(named)) => {
                named.values_mut().for_each(close);
            }
            ("anyOf" | "prefixItems" | "items", Value::Array(list)) => {
                list.iter_mut().for_each(close);
            }
            ("items" | "additionalProperties" | "additionalItems", value) => close(value),
            _ => {}
        }
    }
    let properties = object.get("properties").and_then(Value::as_object);
    // An object that lacks a name of its own required members could not be written at all.
    let names_all = |properties: &serde_json::Map<String, Value>| {
        let required = object.get("required").and_then(Value::as_array);
        let mut required = required.into_iter().flatten().filter_map(Value::as_str);
        !properties.is_empty() && required.all(|name| properties.contains_key(name))
    };
    if properties.is_some_and(names_all)
        && !object.contains_key("additionalProperties")
        && !object.contains_key("$ref")
    {
        object.insert("additionalProperties".to_owned(), Value::Bool(false));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn objects_that_nobody_closed_are_closed() {
        let check = |schema: Value, expected: Value| assert_eq!(closed(&schema), expected);
        let object = |more: Value| {
            let mut object = json!({"type": "object", "properties": {"a": {"type": "string"}}});
            for (key, value) in more.as_object().unwrap() {
                object[key] = value.clone();
            }
            object
        };
        let shut = || object(json!({"additionalProperties": false}));
        check(object(json!({})), shut());
        check(json!({"items": object(json!({}))}), json!({"items": shut()}));
        check(
            json!({"$defs": {"d": object(json!({}))}, "anyOf": [{"$ref": "#/$defs/d"}]}),
            json!({"$defs": {"d": shut()}, "anyOf": [{"$ref": "#/$defs/d"}]}),
        );
        for open in [
            object(json!({"additionalProperties": true})),
            object(json!({"required": ["b"]})),
            object(json!({"allOf": [{"required": ["b"]}]})),
            object(json!({"anyOf": [{"required": ["b"]}]})),
            json!({"type": "object"}),
            json!(true),
        ] {
            check(open.clone(), open);
        }
    }
}
