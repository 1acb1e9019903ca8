//! What is refused, and by which name.

use super::*;

#[test]
fn what_has_no_counterpart_is_refused_by_name() {
    let check = |schema: Value, keyword: &str| {
        assert_eq!(enforceable(&schema).unwrap_err().keyword, keyword, "{schema}");
    };
    check(json!({"type": "array", "uniqueItems": true}), "uniqueItems");
    check(json!({"properties": {"a": {"contains": {}}}}), "contains");
    check(json!({"unevaluatedProperties": false}), "unevaluatedProperties");
    check(json!({"not": {"pattern": "a"}}), "not");
    check(json!({"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}), "oneOf");
    check(json!({"if": {"pattern": "a"}, "then": {"maxLength": 3}}), "if");
    check(json!({"propertyNames": {"maxLength": 3}}), "propertyNames");
    check(json!({"items": 3}), "schema");
    let mut deep = json!({});
    for _ in 0..100 {
        deep = json!({ "items": deep });
    }
    check(deep, "schema");
    check(json!({"description": "x".repeat(SCHEMA_BYTES_MAX)}), "schema");
}

#[test]
fn remarks_are_left_out_and_names_are_not_keywords() {
    let schema = json!({"properties": {"uniqueItems": {"type": "string", "format": "path"}},
        "x-guidance": {"lenient": true}, "default": {"not": 1}});
    let expected = json!({"properties": {"uniqueItems": {"type": "string"}}});
    assert_eq!(enforceable(&schema).unwrap(), expected);
}
