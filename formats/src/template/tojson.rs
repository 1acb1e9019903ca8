//! The `tojson` filter of transformers' templates: Python's `json.dumps` without HTML escapes.

use std::fmt::Write;

use minijinja::{
    Error, ErrorKind, Value,
    value::{Kwargs, Rest, ValueKind},
};

use super::python;

/// Depth of what is written; parsed requests are at most half as deep.
const DEPTH_MAX: usize = 256;

/// `tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
#[expect(clippy::needless_pass_by_value, reason = "the signature that filters have")]
pub(super) fn tojson(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let argument = |place: usize, name: &str| -> Result<Value, Error> {
        match args.get(place) {
            Some(value) => Ok(value.clone()),
            None => Ok(kwargs.get::<Option<Value>>(name)?.unwrap_or_default()),
        }
    };
    let ascii = argument(0, "ensure_ascii")?.is_true();
    let indent = parse_indent(&argument(1, "indent")?)?;
    let separators = parse_separators(&argument(2, "separators")?)?;
    let sort_keys = argument(3, "sort_keys")?.is_true();
    kwargs.assert_all_used()?;

    let comma = if indent.is_some() { "," } else { ", " };
    let (item, key) = separators.unwrap_or_else(|| (comma.to_owned(), ": ".to_owned()));
    let mut writer = Writer { out: String::new(), ascii, indent, item, key, sort_keys, depth: 0 };
    writer.write(value)?;
    Ok(writer.out.into())
}

/// Spaces or a string per level.
fn parse_indent(value: &Value) -> Result<Option<String>, Error> {
    /// Python has no limit; no template indents by more than 8.
    const INDENT_MAX: usize = 64;
    if value.is_undefined() || value.is_none() {
        return Ok(None);
    }
    if let Some(text) = value.as_str().filter(|text| text.len() <= INDENT_MAX) {
        return Ok(Some(text.to_owned()));
    }
    match value.as_i64() {
        Some(spaces) if spaces <= INDENT_MAX as i64 => {
            Ok(Some(" ".repeat(spaces.max(0).unsigned_abs() as usize)))
        }
        _ => Err(invalid(format!("tojson: indent {value} is not a small number or string"))),
    }
}

fn parse_separators(value: &Value) -> Result<Option<(String, String)>, Error> {
    if value.is_undefined() || value.is_none() {
        return Ok(None);
    }
    let texts: Vec<Value> = value.try_iter()?.take(3).collect();
    match texts.as_slice() {
        [item, key] if item.as_str().is_some() && key.as_str().is_some() => {
            Ok(Some((item.to_string(), key.to_string())))
        }
        _ => Err(invalid("tojson: separators are a pair of strings".to_owned())),
    }
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

struct Writer {
    out: String,
    ascii: bool,
    indent: Option<String>,
    item: String,
    key: String,
    sort_keys: bool,
    depth: usize,
}

impl Writer {
    fn write(&mut self, value: &Value) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&number(value)),
            ValueKind::String => self.write_string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.write_container(('[', ']'), items, |writer, item| writer.write(&item))?;
            }
            ValueKind::Map => {
                let mut members = Vec::new();
                for key in value.try_iter()? {
                    let member = value.get_item(&key)?;
                    members.push((key_text(&key)?, member));
                }
                if self.sort_keys {
                    members.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.write_container(('{', '}'), members, |writer, (key, member)| {
                    writer.write_string(&key);
                    let separator = writer.key.clone();
                    writer.out.push_str(&separator);
                    writer.write(&member)
                })?;
            }
            kind => return Err(invalid(format!("tojson: a value of type {kind} is not JSON"))),
        }
        Ok(())
    }

    fn write_container<T>(
        &mut self,
        (open, close): (char, char),
        items: Vec<T>,
        mut write: impl FnMut(&mut Self, T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(invalid(format!("tojson: more than {DEPTH_MAX} levels")));
        }
        self.out.push(open);
        let empty = items.is_empty();
        for (index, item) in items.into_iter().enumerate() {
            if index > 0 {
                let separator = self.item.clone();
                self.out.push_str(&separator);
            }
            self.break_line();
            write(self, item)?;
        }
        self.depth -= 1;
        if !empty {
            self.break_line();
        }
        self.out.push(close);
        Ok(())
    }

    fn break_line(&mut self) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            for _ in 0..self.depth {
                self.out.push_str(indent);
            }
        }
    }

    fn write_string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.ascii && !(' '..='~').contains(&c)) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        // Writing to a string cannot fail.
                        let _ = write!(self.out, "\\u{unit:04x}");
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

/// `json.dumps` of a number.
fn number(value: &Value) -> String {
    match python::as_float(value) {
        Some(float) if float.is_nan() => "NaN".to_owned(),
        Some(float) if float.is_infinite() => {
            if float > 0.0 { "Infinity" } else { "-Infinity" }.to_owned()
        }
        Some(float) => python::float(float),
        None => value.to_string(),
    }
}

/// Keys as `json.dumps` turns them into strings.
fn key_text(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => Ok(key.to_string()),
        ValueKind::Number => Ok(number(key)),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.to_owned()),
        ValueKind::None => Ok("null".to_owned()),
        kind => Err(invalid(format!("tojson: a key of type {kind} is not JSON"))),
    }
}
