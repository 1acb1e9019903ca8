//! References of every form, and the schema that they mean.

use serde_json::json;

use super::*;

/// The schema with plain references takes `valid` and refuses `invalid`.
fn check(schema: &Value, valid: &Value, invalid: &Value) {
    let plain = localised(schema);
    let text = plain.to_string();
    let references = text.split("\"$ref\":\"").skip(1).map(|it| it.split('"').next().unwrap());
    for reference in references {
        assert!(is_plain(reference), "{reference} in {text}");
        let target = reference.strip_prefix('#').and_then(|pointer| plain.pointer(pointer));
        assert!(target.is_some(), "{reference} leads nowhere in {text}");
    }
    let validator = jsonschema::validator_for(&plain).unwrap();
    assert!(validator.is_valid(valid), "{valid} of {plain}");
    assert!(!validator.is_valid(invalid), "{invalid} of {plain}");
    // Another program's reading of the schema as it came, where its references are URIs.
    if let Ok(validator) = jsonschema::validator_for(schema) {
        assert!(validator.is_valid(valid) && !validator.is_valid(invalid), "{schema}");
    }
}

#[test]
fn references_become_plain_and_mean_the_same() {
    let check_x = |mut schema: Value, reference: &str| {
        schema["properties"]["x"] = json!({ "$ref": reference });
        check(&schema, &json!({"x": true}), &json!({"x": 1}));
    };
    let flag = || json!({"type": "boolean"});
    let named = |name: &str| json!({"$defs": {name: flag()}});
    check_x(named("Page[Item]"), "#/$defs/Page%5BItem%5D");
    check_x(named("Page[Item]"), "#/$defs/Page[Item]");
    check_x(named("a/b"), "#/$defs/a~1b");
    check_x(named("a~b"), "#/$defs/a~0b");
    check_x(named("a/ü b"), "#/$defs/a~1%C3%BC%20b");
    check_x(named("100%"), "#/$defs/100%25");
    check_x(named("a"), "#/%24defs/a");
    check_x(json!({"definitions": {"a": flag()}}), "#/definitions/a");
    check_x(
        json!({"properties": {"y": {"prefixItems": [flag()]}}}),
        "#/properties/y/prefixItems/0",
    );
    check_x(json!({"$defs": {"n": {"$anchor": "nn", "type": "boolean"}}}), "#nn");
    check_x(json!({"$defs": {"a": {"$ref": "#/$defs/b~1c"}, "b/c": flag()}}), "#/$defs/a");
}

#[test]
fn identifiers_are_what_references_are_relative_to() {
    let id = "https://example.com/schemas/root.json";
    let schema = |own: &str, reference: &str| {
        json!({"$id": id, "properties": {"x": {"$ref": reference}}, "$defs": {
            "other": {"$id": own, "$defs": {"t": {"$anchor": "here", "type": "boolean"}},
                "properties": {"v": {"$ref": "#/$defs/t"}}}}})
    };
    let (valid, invalid) = (json!({"x": {"v": true}}), json!({"x": {"v": 1}}));
    for (own, reference) in [
        ("other.json", "other.json"),
        ("./other.json", "other.json"),
        ("/o/other.json", "https://example.com/o/other.json"),
        ("../up.json", "/up.json"),
        ("https://example.org/x", "https://example.org/x"),
        ("urn:example:other", "urn:example:other"),
    ] {
        check(&schema(own, reference), &valid, &invalid);
    }
    let (valid, invalid) = (json!({"x": true}), json!({"x": 1}));
    check(&schema("other.json", "other.json#/$defs/t"), &valid, &invalid);
    check(&schema("other.json", "other.json#here"), &valid, &invalid);
}

#[test]
fn what_says_nothing_by_itself_is_followed() {
    let root = json!({"$ref": "#/$defs/a", "title": "t", "$defs": {
        "a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"type": "object"},
        "c": {"$ref": "#/$defs/b", "minProperties": 1}, "d": {"$ref": "#/$defs/d"}}});
    let check = |name: &str, expected: &str| {
        let [own, target] = [name, expected].map(|it| root.pointer(it).unwrap());
        assert_eq!(followed(own, &root), target, "{name}");
    };
    check("", "/$defs/b");
    check("/$defs/c", "/$defs/c");
    check("/$defs/d", "/$defs/d");
}

#[test]
fn circles_stay_circles() {
    let tree = json!({"properties": {"v": {"type": "integer"},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/properties/child%5B%5D"}]},
        "child[]": {"properties": {"v": {"type": "integer"}, "next": {"$ref": "#/properties/next"}}}}});
    let deep = |v: Value| json!({"next": {"v": 1, "next": {"v": 2, "next": {"v": v}}}});
    check(&tree, &deep(json!(3)), &deep(json!("3")));
    let own = json!({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}});
    let refused = |reference: &str| super::check(reference, &own).unwrap_err().reason;
    assert!(refused("#/$defs/a").contains("back to itself"));
    assert!(refused("#/$defs/c").contains("nothing"));
    assert!(refused("other.json").contains("out of the schema"));
    super::check("#/$defs/c", &json!({"$defs": {"c": {"type": "null"}}})).unwrap();
}

#[test]
fn what_leads_nowhere_or_is_data_stays() {
    for schema in [
        json!({"$ref": "#/$defs/none"}),
        json!({"$ref": "https://example.com/elsewhere.json"}),
        json!({"properties": {"$ref": {"$ref": "#nowhere"}}}),
        json!({"const": {"$ref": "#a"}, "items": {"$ref": "#b"}}),
        json!({"$defs": {"a": {}}, "properties": {"x": {"$ref": "#/$defs/a"}}}),
    ] {
        assert_eq!(localised(&schema), schema);
    }
    // Places within one another are copied; too many copies are refused instead.
    let mut nested = json!({});
    for _ in 0..60 {
        nested = json!({"properties": {"p": nested, "q/": {"enum": [1]}}, "allOf": [
            {"not": {}}, {"anyOf": [{}, {}, {}, {}, {}, {}, {}, {}, {}, {}]}]});
    }
    let place = |depth| "/properties/p".repeat(depth);
    let all = (1..60).map(|depth| json!({"$ref": format!("#/properties/x{}", place(depth))}));
    let all = json!({"properties": {"x": nested}, "allOf": all.collect::<Vec<_>>()});
    assert_eq!(localised(&all), all);
}
