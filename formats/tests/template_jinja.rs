//! What templates written for jinja2 use and minijinja lacks.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use serde_json::json;
use shardpack_formats::template::{ChatTemplate, Next};

/// Expected texts are those of jinja2 3.1.6.
fn check(source: &str, expected: &str) {
    let specials: [(&str, &str); 0] = [];
    let template = ChatTemplate::parse(source, specials).unwrap();
    let none: [serde_json::Value; 0] = [];
    let values = [("name", json!("zebra")), ("list", json!([1, 2])), ("n", json!(7))];
    let text = template.render(&none, &none, values, Next::Assistant);
    assert_eq!(text.unwrap(), expected, "{source}");
}

#[test]
fn texts_are_formatted_with_a_percent_sign() {
    check("{{ '%s-%03d-%.2f' % ('a', 5, 1.5) }}", "a-005-1.50");
    check("{{ '%s' % 4 }}{{ \"%s!\" % name }}{{ '%s' % name|upper }}", "4zebra!ZEBRA");
    check("{{ '%s' % name ~ '?' }}{{ '%s' % (name) }}{{ '%s' % (name,) }}", "zebra?zebrazebra");
    check("{% set x = 'a%d' % list[1] %}{{ x }}{% if '%s' % n == '7' %}y{% endif %}", "a2y");
    check("{{ '%s %s' % ('%s' % 1, '(%') }}{{ {'a': '%x' % 255}['a'] }}", "1 (%ff");
    check("{{ '50%' }}{{ n % 4 }}{{ n % 4 * 2 }}{# '%s' % 1 #}{ '%s' % 1 }", "50%36{ '%s' % 1 }");
    check("{% raw %}{{ '%s' % 1 }}{% endraw %}", "{{ '%s' % 1 }}");
}

#[test]
fn urlencode_and_callable_are_those_of_jinja2() {
    check("{{ 'a b/c?é'|urlencode }} {{ {'a b': 'c/d'}|urlencode }}", "a%20b/c%3F%C3%A9 a+b=c%2Fd");
    check("{{ [('a', 1), ('b', 2)]|urlencode }}{{ 7|urlencode }}", "a=1&b=27");
    check("{{ [range is callable, n is callable, name is callable] }}", "[True, False, False]");
    check("{% macro m() %}{% endmacro %}{{ m is callable }}{{ nothing is callable }}", "TrueTrue");
    check("{{ strftime_now is callable }}{{ list is callable }}", "TrueFalse");
}

/// Every case of `tests/data/templates/jinja.json`, which `generate.py` beside it writes with jinja2.
#[test]
fn templates_render_as_in_jinja2() {
    let text = include_str!("../../tests/data/templates/jinja.json");
    let document: serde_json::Value = serde_json::from_str(text).unwrap();
    let values = document["values"].as_object().unwrap();
    let mut wrong = Vec::new();
    for case in document["cases"].as_array().unwrap() {
        let (source, expected) = (case[0].as_str().unwrap(), case[1].as_str());
        let none: [serde_json::Value; 0] = [];
        let specials: [(&str, &str); 0] = [];
        let values = values.iter().map(|(name, value)| (name.as_str(), value));
        let text = ChatTemplate::parse(source, specials)
            .map_err(|error| error.to_string())
            .and_then(|template| {
                let text = template.render(&none, &none, values, Next::Nobody);
                text.map_err(|error| error.to_string())
            });
        if text.as_deref().ok() != expected {
            wrong.push(format!("{source}\n  {text:?} in place of\n  {expected:?}"));
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}
