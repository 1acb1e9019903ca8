//! `str` and `repr` of Python for values in templates.

use std::fmt::Write;

use minijinja::{Value, value::ValueKind};

/// Depth to which containers are printed; parsed requests are at most half as deep.
const DEPTH_MAX: usize = 256;

/// What `{{ value }}` prints: `str(value)`.
pub(super) fn str(value: &Value) -> String {
    match value.kind() {
        ValueKind::Number | ValueKind::Seq | ValueKind::Map | ValueKind::Bytes => repr(value),
        _ => value.to_string(),
    }
}

/// `repr(value)`.
pub(super) fn repr(value: &Value) -> String {
    let mut out = String::new();
    write_repr(&mut out, value, 0);
    out
}

/// `repr(float)`: the shortest digits that read back as the same number, in exponent form below
/// 1e-4 and from 1e16.
pub(super) fn float(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    // Rust's debug form has the same digits and thresholds; only the exponent is written otherwise.
    let text = format!("{value:?}");
    match text.split_once('e') {
        Some((digits, exponent)) => {
            let digits = digits.strip_suffix(".0").unwrap_or(digits);
            match exponent.strip_prefix('-') {
                Some(exponent) => format!("{digits}e-{exponent:0>2}"),
                None => format!("{digits}e+{exponent:0>2}"),
            }
        }
        None => text,
    }
}

/// A number that is not an integer.
pub(super) fn as_float(value: &Value) -> Option<f64> {
    if value.is_number() && !value.is_integer() { value.clone().try_into().ok() } else { None }
}

fn write_repr(out: &mut String, value: &Value, depth: usize) {
    if depth > DEPTH_MAX {
        out.push_str("...");
        return;
    }
    match value.kind() {
        ValueKind::Number => match as_float(value) {
            Some(number) => out.push_str(&float(number)),
            None => out.push_str(&value.to_string()),
        },
        ValueKind::String => match value.as_str() {
            Some(text) => write_quoted(out, text),
            None => out.push_str(&value.to_string()),
        },
        ValueKind::Bytes => {
            let bytes = value.as_bytes().unwrap_or_default();
            let _ = write!(out, "b'{}'", bytes.escape_ascii());
        }
        ValueKind::Seq => {
            let (open, close) = if value.is_tuple() { ('(', ')') } else { ('[', ']') };
            out.push(open);
            for (index, item) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if index == 0 { "" } else { ", " });
                write_repr(out, &item, depth + 1);
            }
            if value.is_tuple() && value.len() == Some(1) {
                out.push(',');
            }
            out.push(close);
        }
        // Namespaces and loops are maps without a plain form; their own is as good as any.
        ValueKind::Map if value.as_object().is_some() => {
            out.push('{');
            for (index, key) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if index == 0 { "" } else { ", " });
                write_repr(out, &key, depth + 1);
                out.push_str(": ");
                write_repr(out, &value.get_item(&key).unwrap_or_default(), depth + 1);
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
}

/// `repr(str)`: single quotes unless only they occur in the text.
fn write_quoted(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            c if c.is_control() => {
                let code = u32::from(c);
                // Writing to a string cannot fail.
                let _ = write!(out, "\\x{code:02x}");
            }
            c => out.push(c),
        }
    }
    out.push(quote);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(clippy::unreadable_literal, reason = "the digits are the subject")]
    fn floats_read_as_in_python() {
        let check = |value: f64, expected: &str| assert_eq!(float(value), expected);
        check(1.0, "1.0");
        check(-0.0, "-0.0");
        check(0.1, "0.1");
        check(0.0001, "0.0001");
        check(0.00001, "1e-05");
        check(1e-7, "1e-07");
        check(1.5e-7, "1.5e-07");
        check(1e15, "1000000000000000.0");
        check(1e16, "1e+16");
        check(1.2345e22, "1.2345e+22");
        check(1e100, "1e+100");
        check(123456789.125, "123456789.125");
        check(5e-324, "5e-324");
        check(f64::NAN, "nan");
        check(f64::NEG_INFINITY, "-inf");
    }
}
