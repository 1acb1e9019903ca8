//! Values as models write them, and cut anywhere.

use serde_json::json;

use super::*;
use crate::tools::minimax::MARK;

fn schema() -> Value {
    json!({"type": "object", "properties": {
        "text": {"type": "string"}, "count": {"type": "integer"},
        "names": {"type": "array", "items": {"type": "string"}},
        "grid": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
        "order": {"type": "object", "properties": {"item": {"type": "string"},
            "zip": {"type": "string"}, "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}}}},
        "maybe": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
        "extra": {"type": "object", "additionalProperties": {"type": "string"}},
        "open": {"type": "object"}, "note": {"type": ["string", "null"]}},
        "$defs": {"line": {"type": "object", "properties": {
            "sku": {"type": "string"}, "count": {"type": "integer"}}}}})
}

/// `text` without marks gets one before each tag, `key` a tag to close it.
fn check(key: &str, text: &str, expected: &str) {
    let root = schema();
    let own = Applicable::root(&root).member(key);
    let marked = format!("{text}</{key}>").replace('<', &format!("{MARK}<"));
    check_marked(key, &marked, &own, expected);
}

fn check_marked(key: &str, text: &str, own: &Schemas<'_>, expected: &str) {
    let more = format!("{MARK}</invoke>");
    let whole = format!("{text}{more}");
    assert_eq!(
        read(key, MARK, &whole, || own.clone()),
        Outcome::Value(expected.to_owned(), text.len())
    );
    serde_json::from_str::<Value>(expected).unwrap();
    for end in (0..text.len()).filter(|&end| text.is_char_boundary(end)) {
        assert_eq!(
            read(key, MARK, &text[..end], || own.clone()),
            Outcome::More,
            "{}",
            &text[..end]
        );
    }
}

#[test]
fn members_are_typed_by_their_schemas_at_any_depth() {
    check("count", "5", "5");
    check("text", " 5 ", r#"" 5 ""#);
    check("note", "null", "null");
    check("note", "12", r#""12""#);
    check("names", "<item>12</item><item></item>", r#"["12", ""]"#);
    check("names", "\n<item>a</item>\n", r#"["a"]"#);
    check("grid", "<item><item>1</item><item>2</item></item><item></item>", "[[1, 2], []]");
    check(
        "order",
        "<zip>018956</zip><item>x</item><lines><item><sku>7</sku><count>2</count></item></lines>",
        r#"{"zip": "018956", "item": "x", "lines": [{"sku": "7", "count": 2}]}"#,
    );
    check("order", "<item>7</item>", r#"{"item": "7"}"#);
    check("order", "", "{}");
    check("maybe", "<item>1234</item>", r#"["1234"]"#);
    check("maybe", "null", "null");
    check("extra", "<a>5</a>", r#"{"a": "5"}"#);
    check(
        "open",
        "<a>5</a><b><item>x</item></b><$c>true</$c>",
        r#"{"a": 5, "b": ["x"], "$c": true}"#,
    );
    check("unknown", "<item>1</item><item>x</item>", r#"[1, "x"]"#);
    check("unknown", "<item>1</item><b>x</b>", r#"{"item": 1, "b": "x"}"#);
    check("unknown", "so", r#""so""#);
    // Tags of any name, as some models have it.
    check("names", "<name>a</name><name>b</name>", r#"["a", "b"]"#);
    // JSON.
    check("names", r#"["a", "b"]"#, r#"["a", "b"]"#);
    check("open", r#"{"a": [1]}"#, r#"{"a": [1]}"#);
}

#[test]
fn marks_that_are_left_out_cost_nothing_where_they_are_not_needed() {
    let root = schema();
    let check = |key: &str, text: &str, expected: &str| {
        let own = Applicable::root(&root).member(key);
        let text = text.replace('~', MARK);
        let whole = format!("{text}{MARK}</invoke>");
        let found = read(key, MARK, &whole, || own.clone());
        assert_eq!(found, Outcome::Value(expected.to_owned(), text.len()), "{text}");
    };
    check("names", "~<item>a</item>~<item>b</item>~</names>", r#"["a", "b"]"#);
    check("names", "<item>a~</item></names>", r#"["a"]"#);
    check("count", "5</count>", "5");
    check("order", "<zip>1</zip>~<item>x~</item></order>", r#"{"zip": "1", "item": "x"}"#);
    // Texts hold tags.
    check("text", "<p>a</p></text>~</text>", r#""<p>a</p></text>""#);
    check("unknown", "<p>Hi</p>~</unknown>", r#""<p>Hi</p>""#);
}

#[test]
fn garbage_is_no_value() {
    let root = schema();
    let check = |key: &str, text: &str| {
        let text = text.replace('~', MARK);
        let found = read(key, MARK, &text, || Applicable::root(&root).member(key));
        assert_eq!(found, Outcome::NotAValue, "{text}");
    };
    check("names", "~<item>a~</item> oops ~</names>");
    check("names", "~<item>a~</item>~</other>~</names>");
    check("open", &format!("{}~</open>", "~<a>".repeat(80)));
    check("names", "~<>a~</>~</names>");
}
