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
