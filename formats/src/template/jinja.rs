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
