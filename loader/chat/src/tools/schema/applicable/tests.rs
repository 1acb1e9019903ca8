//! Members and items, however a schema comes to them.

use serde_json::json;

use super::*;
use crate::tools::value::{reading, to_json};

/// What `texts` of the member `x` mean.
fn check(schema: impl Into<Value>, texts: &[(&str, &str)]) {
    let schema = schema.into();
    let member = Applicable::root(&schema).member("x");
    for (text, expected) in texts {
        let found = to_json(text, reading(member.as_ref()));
        assert_eq!(&found, expected, "{text} of {schema}");
    }
}

/// Each under the schema `{"type": "string"}`, which keeps numbers as text.
fn check_string(schema: impl Into<Value>) {
    check(schema, &[("42", r#""42""#), ("[1]", r#""[1]""#)]);
}

#[test]
fn a_member_is_found_by_every_keyword_that_names_members() {
    let text = || json!({"type": "string"});
    let own = || json!({"properties": {"x": text()}});
    check_string(own());
    check_string(json!({"additionalProperties": text()}));
    check_string(json!({"unevaluatedProperties": text()}));
    check_string(json!({"patternProperties": {"^x$": text(), "^y$": {"type": "integer"}}}));
    check_string(json!({"properties": {"y": {}}, "additionalProperties": text()}));
    check_string(json!({"$ref": "#/$defs/a", "$defs": {"a": own()}}));
    check_string(
        json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [own()]}}}),
    );
    check_string(json!({"properties": {"x": {"$ref": "#/$defs/t"}}, "$defs": {"t": text()}}));
    check_string(json!({"properties": {"x": {"$ref": "#/$defs/a~1b"}}, "$defs": {"a/b": text()}}));
    check_string(json!({"allOf": [{"properties": {"y": {}}}, own()]}));
    check_string(json!({"oneOf": [own(), {"properties": {"z": {"type": "boolean"}}}]}));
    check_string(json!({"anyOf": [own(), {"additionalProperties": false}]}));
    check_string(json!({"if": {"required": ["y"]}, "then": own()}));
    check_string(json!({"if": {"required": ["y"]}, "then": {}, "else": own()}));
    check_string(json!({"if": own(), "then": {"required": ["y"]}}));
    check_string(json!({"dependentSchemas": {"y": own()}}));
    check_string(json!({"dependencies": {"y": own(), "z": ["y"]}}));
    // Both hold.
    check_string(json!({"properties": {"x": {}}, "allOf": [own()]}));
    check_string(json!({"patternProperties": {"x": {}, "^x": text()}}));
}

#[test]
fn a_member_of_which_nothing_is_said_is_what_it_looks_like() {
    for schema in [
        json!(true),
        json!({}),
        json!({"properties": {"y": {"type": "string"}}}),
        json!({"properties": {"y": {}}, "additionalProperties": false}),
        json!({"patternProperties": {"^(?=y)": {"type": "string"}, "(": {"type": "string"}}}),
        json!({"$ref": "#/$defs/none"}),
    ] {
        check(schema, &[("42", "42"), ("[1]", "[1]"), ("a", r#""a""#)]);
    }
}

#[test]
fn alternatives_allow_the_types_of_all_and_joined_schemas_those_of_each() {
    let member = |schema: Value| json!({"properties": {"x": schema}});
    let both = [("42", "42"), ("4.5", r#""4.5""#), ("a", r#""a""#), ("true", r#""true""#)];
    check(member(json!({"anyOf": [{"type": "integer"}, {"type": "string"}]})), &both);
    check(member(json!({"oneOf": [{"type": "string"}, {"type": "integer"}]})), &both);
    check(member(json!({"type": ["string", "integer"]})), &both);
    check(
        json!({"oneOf": [member(json!({"type": "string"})), member(json!({"type": "integer"}))]}),
        &both,
    );
    check(
        json!({"allOf": [member(json!({"type": ["string", "integer"]})), member(json!({"type": "string"}))]}),
        &[("42", r#""42""#)],
    );
    check(member(json!({"type": "integer"})), &[("42.0", "42.0"), ("42", "42")]);
    check(member(json!({"enum": ["1", "2", null]})), &[("1", r#""1""#), ("null", "null")]);
    check(member(json!({"const": "7"})), &[("7", r#""7""#)]);
    check(
        member(json!({"type": "string", "nullable": true})),
        &[("7", r#""7""#), ("null", "null")],
    );
    check(member(json!({"type": "STR"})), &[("7", r#""7""#)]);
    check(member(json!({"type": "any"})), &[("7", "7")]);
    check(
        member(json!({"if": {}, "then": {"type": "string"}, "else": {"type": "null"}})),
        &[("7", r#""7""#), ("null", "null")],
    );
}

#[test]
fn items_are_typed_by_their_places() {
    let check = |schema: Value, types: [Option<Types>; 2]| {
        let found = [0, 1].map(|index| Applicable::root(&schema).item(index).map(|it| it.types()));
        assert_eq!(found, types, "{schema}");
    };
    let text = || json!({"type": "string"});
    let nothing = || json!({"type": "null"});
    let [own, other] = [Some(Types::TEXT), Some(Types::NULL)];
    check(json!({"items": text()}), [own, own]);
    check(json!({"prefixItems": [text()], "items": nothing()}), [own, other]);
    check(json!({"prefixItems": [text()], "items": false}), [own, None]);
    check(json!({"items": [text()], "additionalItems": nothing()}), [own, other]);
    check(json!({"items": [text()]}), [own, None]);
    check(json!({"anyOf": [{"type": "null"}, {"items": text()}]}), [own, own]);
    check(json!({"type": "array"}), [None, None]);
}

#[test]
fn circles_and_endless_alternatives_end() {
    let many: Vec<Value> = (0..50).map(|_| json!({"$ref": "#"})).collect();
    check(json!({"anyOf": many}), &[("42", "42")]);
    check(json!({"$ref": "#"}), &[("42", "42")]);
    let own = json!({"properties": {"x": {"type": "string"}}, "allOf": [{"$ref": "#"}]});
    check(own, &[("42", r#""42""#)]);
}

#[test]
fn an_outline_has_the_names_that_a_schema_has_anywhere() {
    let check = |schema: Value, expected: Value| assert_eq!(outline(&schema), expected, "{schema}");
    let [text, number] = [json!({"type": "string"}), json!({"type": "integer"})];
    let named = |properties: Value| json!({"type": "object", "properties": properties});
    check(
        json!({"oneOf": [named(json!({"a": text})), {"$ref": "#/$defs/b"}],
            "$defs": {"b": named(json!({"b": number, "c": {"enum": [1, "x"]}}))},
            "if": {"required": ["a"]}, "then": named(json!({"d": {"type": ["null"]}}))}),
        named(json!({"a": text, "b": number, "c": true, "d": {"type": "null"}})),
    );
    check(named(json!({"a": text, "b": {"minimum": 1}})), named(json!({"a": text, "b": true})));
    let open = || json!({"type": "object", "additionalProperties": true});
    for schema in [
        json!({"type": "object", "minProperties": 1}),
        json!({"patternProperties": {"^a": text}, "properties": {"b": text}}),
        json!({"allOf": [{"additionalProperties": number}]}),
    ] {
        check(schema, open());
    }
}
