//! Templates that take stack, memory or time without end.

use super::{Outcome, TRIGGER, attack, in_parallel};

/// What a template does once it is asked.
struct Hostile {
    name: &'static str,
    source: String,
}

fn hostile(name: &'static str, source: impl Into<String>) -> Hostile {
    Hostile { name, source: source.into() }
}

/// A namespace `n` whose `t` is changed so often.
fn grown(first: &str, times: usize, change: &str, after: &str) -> String {
    format!(
        "{{% set n = namespace(t={first}) %}}{{% for i in range({times}) %}}\
         {{% set n.t = {change} %}}{{% endfor %}}{after}"
    )
}

/// Deep values, expressions, blocks and calls.
fn deep() -> Vec<Hostile> {
    let many = |part: &str, count: usize| part.repeat(count);
    let around = |open: &str, inner: &str, close: &str, count: usize| {
        format!("{}{inner}{}", many(open, count), many(close, count))
    };
    let nested = |after: &str| grown("[]", 90_000, "[n.t]", after);
    vec![
        hostile("a nested list, printed", nested("{{ n.t }}")),
        hostile("a nested list as JSON", nested("{{ n.t | tojson }}")),
        hostile("a nested list, compared", nested("{{ n.t == n.t }}{{ n.t | string | length }}")),
        hostile("nested mappings, printed", grown("{}", 90_000, "{'a': n.t}", "{{ n.t }}")),
        hostile("a namespace in itself", "{% set n = namespace() %}{% set n.n = n %}{{ n }}"),
        hostile("200,000 not", format!("{{{{ {}true }}}}", many("not ", 200_000))),
        hostile("100,000 filters", format!("{{{{ 'a'{} }}}}", many("|upper", 100_000))),
        hostile("parentheses", format!("{{{{ {} }}}}", around("(", "1", ")", 100_000))),
        hostile("brackets", format!("{{{{ {} }}}}", around("[", "1", "]", 100_000))),
        hostile("indexes", format!("{{{{ a{} }}}}", many("[0]", 100_000))),
        hostile("powers", format!("{{{{ 1{} }}}}", many("**1", 100_000))),
        hostile("if in if", around("{% if true %}", "a", "{% endif %}", 40_000)),
        hostile("for in for", around("{% for a in [1] %}", "a", "{% endfor %}", 25_000)),
        hostile(
            "a macro that calls itself",
            "{% macro m(a) %}{{ m(a + 1) }}{% endmacro %}{{ m(0) }}",
        ),
        hostile("a template that includes itself", "{% include 'chat_template' %}"),
        hostile("a template that imports itself", "{% import 'chat_template' as t %}{{ t }}"),
        hostile(
            "mapped, and mapped again",
            grown("[1]", 90_000, "n.t | map('string')", "{{ n.t | list }}"),
        ),
    ]
}

/// Values that double, and calls that make long ones.
fn large() -> Vec<Hostile> {
    let doubled = |change: &str| grown("'aaaaaaaa'", 60, change, "{{ n.t | length }}");
    vec![
        hostile("doubled by ~", doubled("n.t ~ n.t")),
        hostile("doubled by join", doubled("[n.t, n.t] | join(n.t)")),
        hostile("doubled by replace", doubled("n.t | replace('a', 'aaaaaaaa')")),
        hostile("doubled by indent", doubled("(n.t ~ '\n' ~ n.t) | indent(1000000)")),
        hostile("doubled by format", doubled("'%s%s' | format(n.t, n.t)")),
        hostile("a list, doubled", grown("[1, 2]", 60, "n.t + n.t", "{{ n.t | length }}")),
        hostile("times", "{{ ('a' * 100000000000) | length }}"),
        hostile("a width of a gigabyte", "{{ '%4000000000d' | format(1) }}"),
        hostile(
            "a refusal of two gigabytes",
            grown("'aaaaaaaa'", 28, "n.t ~ n.t", "{{ raise_exception(n.t) }}"),
        ),
        hostile(
            "sorted, and sorted again",
            grown(
                "range(100000) | list",
                5,
                "n.t + n.t",
                "{{ (n.t | sort | unique | list) == (n.t | reverse | sort | list) }}{% for a in n.t %}{{ n.t | sort | first }}{% endfor %}",
            ),
        ),
        hostile(
            "slices of slices",
            grown("range(100000) | list", 100_000, "n.t[0:] + n.t[::-1]", "{{ n.t | length }}"),
        ),
    ]
}

/// Loops.
fn long() -> Vec<Hostile> {
    vec![
        hostile("a range without end", "{% for i in range(1000000000) %}a{% endfor %}"),
        hostile(
            "loops in loops",
            "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}\
             {% endfor %}{% endfor %}{% endfor %}",
        ),
    ]
}

/// Those that the renderer takes today: they must end in time, and no more.
const HARMLESS: [&str; 2] = ["a namespace in itself", "mapped, and mapped again"];

#[test]
#[expect(clippy::print_stdout, reason = "what became of each; shown where one fails")]
fn hostile_templates_take_nothing_with_them() {
    let cases: Vec<Hostile> = [deep(), large(), long()].into_iter().flatten().collect();
    assert!(cases.len() >= 21);
    in_parallel(&cases, |Hostile { name, source }| {
        let source = format!(
            "{{% if '{TRIGGER}' in messages[-1].content %}}{source}{{% else %}}fine{{% endif %}}"
        );
        let begun = std::time::Instant::now();
        let outcome = attack(name, &[("chat_template.jinja", source.as_bytes())]);
        let seconds = begun.elapsed().as_secs_f32();
        let shown = format!("{name}: {seconds:.1} s, {}", outcome.shown());
        println!("{shown:.300}");
        assert!(HARMLESS.contains(name) || !matches!(outcome, Outcome::Harmless), "{name}");
    });
}
