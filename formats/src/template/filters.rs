//! Filters of jinja2 that minijinja lacks, or whose arguments it takes otherwise.

use std::{borrow::Cow, fmt::Write as _};

use minijinja::{
    Environment, Error, State, Value,
    value::{Kwargs, Rest, Serde, ValueKind},
};

use super::{
    arguments::{Arguments, invalid},
    jinja, python, wrap,
};

/// Gives an environment the filters.
pub(super) fn add_to(env: &mut Environment<'_>) {
    env.add_filter("urlencode", jinja::urlencode);
    env.add_filter("format", super::percent::format);
    env.add_filter("filesizeformat", minijinja_contrib::filters::filesizeformat);
    env.add_filter("striptags", minijinja_contrib::filters::striptags);
    env.add_filter("pprint", python::repr);
    env.add_filter("wordcount", |value: &Value| {
        let text = python::str(value);
        let words = text.split(|c: char| !c.is_alphanumeric() && c != '_');
        words.filter(|word| !word.is_empty()).count()
    });
    // Not of jinja2: templates for other programs read arguments so, which may be an object here.
    for name in ["fromjson", "from_json"] {
        env.add_filter(name, |value: &Value| match value.as_str() {
            Some(text) => serde_json::from_str::<serde_json::Value>(text)
                .map(|json| Value::from(Serde(json)))
                .map_err(|error| invalid(format!("fromjson: {error}"))),
            None => Ok(value.clone()),
        });
    }
    for (name, keeps_safe) in [("escape", true), ("e", true), ("forceescape", false)] {
        env.add_filter(name, move |value: &Value| {
            if keeps_safe && value.is_safe() {
                return value.clone();
            }
            Value::from_safe_string(escaped(&python::str(value)))
        });
    }
    text_filter(env, "center", |text, args| {
        let width = args.get_or(0, "width", 80_usize)?;
        args.finish(1)?;
        super::methods::padded(text, "center", width, " ")
    });
    text_filter(env, "replace", |text, args| {
        let old = args.text(0, "old")?.unwrap_or_default();
        let new = args.text(1, "new")?.unwrap_or_default();
        let count = args.get_or(2, "count", -1_i64)?;
        args.finish(3)?;
        Ok(match usize::try_from(count) {
            Ok(count) => text.replacen(&old, &new, count),
            Err(_) => text.replace(&old, &new),
        })
    });
    text_filter(env, "truncate", wrap::truncate);
    text_filter(env, "wordwrap", wrap::wordwrap);
    text_filter(env, "indent", wrap::indent);
    add_conversions(env);
    add_orders(env);
    env.add_filter("xmlattr", xmlattr);
}

/// Adds a filter of a text.
fn text_filter(
    env: &mut Environment<'_>,
    name: &'static str,
    filter: fn(&str, &Arguments) -> Result<String, Error>,
) {
    env.add_filter(name, move |value: &Value, args: Rest<Value>, kwargs: Kwargs| {
        let text = value.as_str().map_or_else(|| python::str(value).into(), Cow::Borrowed);
        filter(&text, &Arguments::new(args.0, kwargs))
    });
}

/// Numbers: what is none is 0.
fn add_conversions(env: &mut Environment<'_>) {
    env.add_filter(
        "int",
        |state: &State<'_, '_>, value: &Value, args: Rest<Value>, kwargs: Kwargs| {
            let args = Arguments::new(args.0, kwargs);
            let default = args.get(0, "default")?.unwrap_or_else(|| 0.into());
            let base = args.get_or(1, "base", 10_u32)?;
            args.finish(2)?;
            let none = Kwargs::from_iter::<[(&str, Value); 0]>([]);
            minijinja::filters::int(state, value, Some(default), Some(base), none)
        },
    );
    env.add_filter(
        "float",
        |state: &State<'_, '_>, value: &Value, args: Rest<Value>, kwargs: Kwargs| {
            let args = Arguments::new(args.0, kwargs);
            let default = args.get(0, "default")?.unwrap_or_else(|| 0.0.into());
            args.finish(1)?;
            let none = Kwargs::from_iter::<[(&str, Value); 0]>([]);
            minijinja::filters::float(state, value, Some(default), none)
        },
    );
}

/// A filter of minijinja that orders what it is given, by named arguments.
type Order = fn(&State<'_, '_>, Value, Kwargs) -> Result<Value, Error>;

/// What orders values takes its arguments by place, too.
fn add_orders(env: &mut Environment<'_>) {
    let orders: [(&str, Order, &'static [&'static str]); 4] = [
        ("sort", minijinja::filters::sort, &["reverse", "case_sensitive", "attribute"]),
        ("unique", minijinja::filters::unique, &["case_sensitive", "attribute"]),
        ("min", minijinja::filters::min, &["case_sensitive", "attribute"]),
        ("max", minijinja::filters::max, &["case_sensitive", "attribute"]),
    ];
    for (name, order, names) in orders {
        env.add_filter(
            name,
            move |state: &State<'_, '_>, value: Value, args: Rest<Value>, kwargs: Kwargs| {
                let kwargs = Arguments::new(args.0, kwargs).named(names)?;
                order(state, value, kwargs)
            },
        );
    }
    env.add_filter("dictsort", |value: &Value, args: Rest<Value>, kwargs: Kwargs| {
        let names = &["case_sensitive", "by", "reverse"];
        let kwargs = Arguments::new(args.0, kwargs).named(names)?;
        minijinja::filters::dictsort(value, kwargs)
    });
}

/// As markupsafe escapes.
fn escaped(text: &str) -> String {
    let mut out = String::new();
    for letter in text.chars() {
        match letter {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&#39;"),
            '"' => out.push_str("&#34;"),
            letter => out.push(letter),
        }
    }
    out
}

/// Members as attributes of an element, behind a space unless `autospace` is false.
fn xmlattr(value: &Value, autospace: Option<bool>) -> Result<String, Error> {
    if value.kind() != ValueKind::Map {
        return Err(invalid(format!("xmlattr: expected a mapping, found {}", value.kind())));
    }
    let mut out = String::new();
    for key in value.try_iter()? {
        let member = value.get_item(&key)?;
        if member.is_none() || member.is_undefined() {
            continue;
        }
        let key = python::str(&key);
        if key.is_empty() || key.contains([' ', '\t', '\n', '/', '>', '=']) {
            return Err(invalid(format!("xmlattr: {key:?} is not the name of an attribute")));
        }
        let space = if out.is_empty() && autospace == Some(false) { "" } else { " " };
        // Writing to a string cannot fail.
        let _ = write!(out, "{space}{}=\"{}\"", escaped(&key), escaped(&python::str(&member)));
    }
    Ok(out)
}
