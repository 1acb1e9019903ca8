//! What jinja2 has and minijinja lacks: texts formatted with `%`, `urlencode` with spaces in
//! mappings as plus signs, and the test `callable`.

use std::fmt::Write as _;

use minijinja::{Error, ErrorKind, Value, value::ValueKind};

/// Whether a value can be called: functions, macros and, as for jinja2, what is not defined.
pub(super) fn is_callable(value: &Value) -> bool {
    // A macro has members and shows itself as one; a mapping never begins so.
    let is_macro = || value.kind() == ValueKind::Map && value.to_string().starts_with("<macro ");
    let is_function = || value.kind() == ValueKind::Plain && value.as_object().is_some();
    value.is_undefined() || is_function() || is_macro()
}

/// jinja2's `urlencode`: a text, or the members of a mapping or a list of pairs as a query.
pub(super) fn urlencode(value: &Value) -> Result<String, Error> {
    let member = |key: &Value, value: &Value| {
        format!(
            "{}={}",
            quoted(&super::python::str(key), ""),
            quoted(&super::python::str(value), "")
        )
    };
    match value.kind() {
        ValueKind::Map => {
            let keys = value.try_iter()?;
            let members: Result<Vec<String>, Error> =
                keys.map(|key| Ok(member(&key, &value.get_item(&key)?))).collect();
            Ok(members?.join("&").replace("%20", "+"))
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let mut members = Vec::new();
            for pair in value.try_iter()? {
                let pair: Vec<Value> = pair.try_iter()?.collect();
                let [key, value] = pair.as_slice() else {
                    let message = "urlencode: expected pairs";
                    return Err(Error::new(ErrorKind::InvalidOperation, message));
                };
                members.push(member(key, value));
            }
            Ok(members.join("&").replace("%20", "+"))
        }
        _ => Ok(quoted(&super::python::str(value), "/")),
    }
}

fn quoted(text: &str, safe: &str) -> String {
    let mut out = String::new();
    for byte in text.bytes() {
        let letter = char::from(byte);
        if byte.is_ascii_alphanumeric() || "_.-~".contains(letter) || safe.contains(letter) {
            out.push(letter);
        } else {
            // Writing to a string cannot fail.
            let _ = write!(out, "%{byte:02X}");
        }
    }
    out
}

/// Writes `"text" % value` as `"text"|format(value)` in every tag. A remainder of numbers, which
/// begins with no text, stays.
pub(super) fn with_format_filters(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find('{') {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let end = match tag.as_bytes().get(1) {
            Some(b'#') => tag.find("#}").map(|at| at + 2),
            Some(b'%' | b'{') => tag_end(tag),
            _ => Some(1),
        };
        let Some(end) = end else {
            rest = tag;
            break;
        };
        let (whole, after) = tag.split_at(end);
        rest = after;
        if end == 1 || whole.starts_with("{#") {
            out.push_str(whole);
            continue;
        }
        out.push_str(&expression(whole));
        let word = whole.trim_matches(['{', '}', '%', '-', '+', ' ']);
        if word == "raw" {
            // Text up to the end of the block.
            let close = rest.find("endraw").unwrap_or(rest.len());
            out.push_str(&rest[..close]);
            rest = &rest[close..];
        }
    }
    out.push_str(rest);
    out
}

/// Where a tag ends, its closing sign included.
fn tag_end(tag: &str) -> Option<usize> {
    let bytes = tag.as_bytes();
    let (mut at, mut depth) = (2, 0_usize);
    while at < bytes.len() {
        match bytes[at] {
            b'"' | b'\'' => at = literal_end(bytes, at)?,
            b'%' if bytes[1] == b'%' && bytes.get(at + 1) == Some(&b'}') => return Some(at + 2),
            b'}' if depth > 0 => {
                depth -= 1;
                at += 1;
            }
            b'}' if bytes[1] == b'{' && bytes.get(at + 1) == Some(&b'}') => return Some(at + 2),
            b'{' => {
                depth += 1;
                at += 1;
            }
            _ => at += 1,
        }
    }
    None
}

/// The place behind a text that begins at `at`.
fn literal_end(bytes: &[u8], at: usize) -> Option<usize> {
    let mut end = at + 1;
    while *bytes.get(end)? != bytes[at] {
        end += if bytes[end] == b'\\' { 2 } else { 1 };
    }
    Some(end + 1)
}

fn skip_spaces(bytes: &[u8], mut at: usize) -> usize {
    while bytes.get(at).is_some_and(u8::is_ascii_whitespace) {
        at += 1;
    }
    at
}

fn expression(text: &str) -> String {
    let bytes = text.as_bytes();
    let (mut out, mut from, mut at) = (String::new(), 0, 0);
    while at < bytes.len() {
        if !matches!(bytes[at], b'"' | b'\'') {
            at += 1;
            continue;
        }
        let Some(end) = literal_end(bytes, at) else { break };
        at = end;
        let sign = skip_spaces(bytes, end);
        let is_format = bytes.get(sign) == Some(&b'%') && bytes.get(sign + 1) != Some(&b'}');
        if !is_format {
            continue;
        }
        let start = skip_spaces(bytes, sign + 1);
        let Some(stop) = operand_end(bytes, start) else { continue };
        let operand = &text[start..stop];
        let alone = bytes[start] == b'(' && group_end(bytes, start) == Some(stop);
        let arguments = if alone { &operand[1..operand.len() - 1] } else { operand };
        let arguments = arguments.trim().trim_end_matches(',');
        let _ = write!(out, "{}|format({})", &text[from..end], expression(arguments));
        (from, at) = (stop, stop);
    }
    out.push_str(&text[from..]);
    out
}

/// The place behind a bracket's partner.
fn group_end(bytes: &[u8], mut at: usize) -> Option<usize> {
    let mut depth = 0_usize;
    while at < bytes.len() {
        match bytes[at] {
            b'"' | b'\'' => {
                at = literal_end(bytes, at)?;
                continue;
            }
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => {
                depth = depth.checked_sub(1)?;
                if depth == 0 {
                    return Some(at + 1);
                }
            }
            _ => {}
        }
        at += 1;
    }
    None
}

/// The place behind a value with its members, calls and filters, which bind closer than `%`.
fn operand_end(bytes: &[u8], start: usize) -> Option<usize> {
    let is_word = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
    let word_end = |mut at: usize| {
        let from = at;
        while bytes.get(at).is_some_and(is_word) {
            at += 1;
        }
        (at > from).then_some(at)
    };
    let first = if matches!(bytes.get(start), Some(b'-' | b'+')) { start + 1 } else { start };
    let mut at = match bytes.get(first)? {
        b'(' | b'[' | b'{' => group_end(bytes, first)?,
        b'"' | b'\'' => literal_end(bytes, first)?,
        _ => word_end(first)?,
    };
    loop {
        let next = skip_spaces(bytes, at);
        at = match bytes.get(next) {
            Some(b'.') => word_end(next + 1)?,
            Some(b'(' | b'[') => group_end(bytes, next)?,
            Some(b'|') => word_end(skip_spaces(bytes, next + 1))?,
            _ => return Some(at),
        };
    }
}
