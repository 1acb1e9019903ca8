//! What is validated, and what is refused before it could take long.

use serde_json::json;

use super::*;

#[test]
fn keywords_that_look_at_a_whole_answer_are_judged() {
    let accepts =
        |schema: &Value, value: Value| ArgumentValidator::new(schema).unwrap().accepts(&value);
    let unique = json!({"type": "object", "required": ["a"],
        "properties": {"a": {"$ref": "#/$defs/set%20of"}},
        "$defs": {"set of": {"type": "array", "uniqueItems": true}}});
    assert!(accepts(&unique, json!({"a": [1, 2]})));
    assert!(!accepts(&unique, json!({"a": [1, 1]})));
    assert!(!accepts(&unique, json!({})));
    let contains = json!({"properties": {"a": {"contains": {"const": 1}}}});
    assert!(accepts(&contains, json!({"a": [2, 1]})));
    assert!(!accepts(&contains, json!({"a": [2]})));
    let overlapping = json!({"oneOf": [{"properties": {"a": {"pattern": "^x"}}},
        {"properties": {"a": {"pattern": "y$"}}}]});
    assert!(accepts(&overlapping, json!({"a": "xa"})));
    assert!(!accepts(&overlapping, json!({"a": "xy"})));
}

#[test]
fn what_could_take_long_is_refused_by_name() {
    let refused = |schema: Value, keyword: &str| {
        assert_eq!(ArgumentValidator::new(&schema).unwrap_err().keyword, keyword, "{schema}");
    };
    refused(json!({"$ref": "#"}), "$ref");
    refused(
        json!({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        "$ref": "#/$defs/a"}),
        "$ref",
    );
    refused(
        json!({"$defs": {"a": {"anyOf": [
        {"properties": {"x": {"$ref": "#/$defs/a"}}}, {"properties": {"x": {"$ref": "#/$defs/a"}}}]}},
        "$ref": "#/$defs/a"}),
        "$ref",
    );
    refused(json!({"$ref": "https://localhost/other.json"}), "$ref");
    refused(json!({"$ref": "#/nowhere"}), "$ref");
    refused(json!({"properties": {"a": {"$id": "other", "$ref": "#/x"}}}), "$ref");
    refused(json!({"$dynamicRef": "#a"}), "$dynamicRef");
    refused(json!({"pattern": "(?=a)b"}), "schema");
    refused(json!({"pattern": "(a{1,1000}){1,1000}"}), "schema");
    // Twenty steps that double each.
    let mut definitions = serde_json::Map::new();
    for n in 0..20 {
        let next = json!({"$ref": format!("#/$defs/{}", n + 1)});
        definitions.insert(n.to_string(), json!({"anyOf": [next, next]}));
    }
    definitions.insert("20".to_owned(), json!({"type": "string"}));
    refused(json!({"$defs": definitions, "$ref": "#/$defs/0"}), "schema");
    let mut deep = json!({});
    for _ in 0..400 {
        deep = json!({ "items": deep });
    }
    refused(deep, "schema");
}
