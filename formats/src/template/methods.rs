//! Methods of Python's values that minijinja-contrib lacks or has otherwise.

use minijinja::{
    Error, ErrorKind, State, Value,
    value::{Tuple, ValueKind},
};

use super::{
    arguments::{Arguments, invalid},
    python,
};

/// Calls a method of a value that has none of its own.
pub(super) fn call(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let own = match (value.kind(), value.as_str()) {
        (ValueKind::String, Some(text)) => of_text(text, method, &Arguments::of(args)?),
        (ValueKind::Seq, _) => of_list(value, method, &Arguments::of(args)?),
        (ValueKind::Map, _) if method == "copy" => {
            let keys = value.try_iter()?;
            let members: Result<Vec<_>, Error> =
                keys.map(|key| Ok((key.clone(), value.get_item(&key)?))).collect();
            members.map(|members| Some(Value::from_pairs(members)))
        }
        (ValueKind::Number, _) => Ok(of_number(value, method)),
        _ => Ok(None),
    };
    match own? {
        Some(result) => Ok(result),
        None => minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args),
    }
}

fn of_number(value: &Value, method: &str) -> Option<Value> {
    match (method, python::as_float(value)) {
        ("is_integer", Some(number)) => Some((number.fract() == 0.0).into()),
        ("is_integer", None) => Some(true.into()),
        ("bit_length", None) => {
            let number = i128::try_from(value.clone()).ok()?;
            Some((i128::BITS - number.unsigned_abs().leading_zeros()).into())
        }
        _ => None,
    }
}

fn of_list(value: &Value, method: &str, args: &Arguments) -> Result<Option<Value>, Error> {
    match method {
        "copy" => {
            args.finish(0)?;
            Ok(Some(value.try_iter()?.collect()))
        }
        "index" => {
            let wanted = args.given(0).ok_or_else(|| Error::from(ErrorKind::MissingArgument))?;
            let items: Vec<Value> = value.try_iter()?.collect();
            let range = range(args, items.len())?;
            let found = (range.0..range.1).find(|at| items[*at] == wanted);
            args.finish(3)?;
            found.map_or_else(
                || Err(invalid(format!("{wanted} is not in the list"))),
                |at| Ok(Some(at.into())),
            )
        }
        _ => Ok(None),
    }
}

/// From the second argument to the third, as Python counts: from the end below zero.
fn range(args: &Arguments, len: usize) -> Result<(usize, usize), Error> {
    let place = |at: i64| {
        let at = if at < 0 { at.saturating_add_unsigned(len as u64) } else { at };
        usize::try_from(at).unwrap_or(0).min(len)
    };
    let (from, to) = (args.get_or(1, "start", 0_i64)?, args.get_or(2, "end", i64::MAX)?);
    Ok((place(from), place(to)))
}

/// Python counts characters, not bytes.
fn of_text(text: &str, method: &str, args: &Arguments) -> Result<Option<Value>, Error> {
    let sub = || args.text(0, "sub")?.ok_or_else(|| Error::from(ErrorKind::MissingArgument));
    let (value, places): (Value, usize) = match method {
        "casefold" => (text.to_lowercase().replace('ß', "ss").replace('ς', "σ").into(), 0),
        "swapcase" => (text.chars().map(swapped).collect::<String>().into(), 0),
        "title" => (title(text).into(), 0),
        "isdecimal" => (holds(text, |c| c.is_ascii_digit()).into(), 0),
        "isidentifier" => {
            let starts = text.starts_with(|c: char| c.is_alphabetic() || c == '_');
            (Value::from(starts && holds(text, |c| c.is_alphanumeric() || c == '_')), 0)
        }
        "isprintable" => {
            (text.chars().all(|c| c == ' ' || !(c.is_control() || c.is_whitespace())).into(), 0)
        }
        "istitle" => (is_title(text).into(), 0),
        "encode" => (Value::from_bytes(text.as_bytes().to_vec()), 2),
        "center" | "ljust" | "rjust" => {
            let width = args.get_or(0, "width", 0_usize)?;
            let fill = args.text(1, "fillchar")?.unwrap_or_else(|| " ".to_owned());
            (padded(text, method, width, &fill)?.into(), 2)
        }
        "zfill" => {
            let sign = usize::from(text.starts_with(['+', '-']));
            let width = width(args.get_or(0, "width", 0_usize)?)?;
            let zeros = width.saturating_sub(text.chars().count());
            (format!("{}{}{}", &text[..sign], "0".repeat(zeros), &text[sign..]).into(), 1)
        }
        "removeprefix" => (text.strip_prefix(&*sub()?).unwrap_or(text).into(), 1),
        "removesuffix" => (text.strip_suffix(&*sub()?).unwrap_or(text).into(), 1),
        "partition" | "rpartition" => (partition(text, method, &sub()?)?, 1),
        "expandtabs" => (expandtabs(text, width(args.get_or(0, "tabsize", 8_usize)?)?).into(), 1),
        "find" | "rfind" | "index" | "rindex" => (find(text, method, &sub()?, args)?, 3),
        "startswith" | "endswith" => (begins_or_ends(text, method, args)?.into(), 3),
        "split" | "rsplit" => (split(text, method, args)?, 2),
        _ => return Ok(None),
    };
    args.finish(places)?;
    Ok(Some(value))
}

/// The text from the second argument to the third, and where it begins, in characters.
fn part<'t>(text: &'t str, args: &Arguments) -> Result<(&'t str, usize), Error> {
    let bytes: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
    let (from, to) = range(args, bytes.len() - 1)?;
    Ok((text.get(bytes[from]..bytes[to]).unwrap_or_default(), from))
}

fn find(text: &str, method: &str, sub: &str, args: &Arguments) -> Result<Value, Error> {
    let (part, from) = part(text, args)?;
    let found = if method.starts_with('r') { part.rfind(sub) } else { part.find(sub) };
    match found {
        Some(at) => Ok((from + part[..at].chars().count()).into()),
        None if method.ends_with("find") => Ok((-1).into()),
        None => Err(invalid(format!("{method}: {sub:?} is not in the string"))),
    }
}

fn begins_or_ends(text: &str, method: &str, args: &Arguments) -> Result<bool, Error> {
    let (part, _) = part(text, args)?;
    let wanted = args.given(0).ok_or_else(|| Error::from(ErrorKind::MissingArgument))?;
    let is = |wanted: &str| match method {
        "startswith" => part.starts_with(wanted),
        _ => part.ends_with(wanted),
    };
    match wanted.as_str() {
        Some(wanted) => Ok(is(wanted)),
        None => Ok(wanted.try_iter()?.any(|wanted| wanted.as_str().is_some_and(is))),
    }
}

fn split(text: &str, method: &str, args: &Arguments) -> Result<Value, Error> {
    let most = usize::try_from(args.get_or(1, "maxsplit", -1_i64)?).unwrap_or(usize::MAX);
    let parts = most.saturating_add(1);
    match args.text(0, "sep")? {
        Some(sep) if sep.is_empty() => Err(invalid(format!("{method}: empty separator"))),
        Some(sep) if method == "split" => Ok(text.splitn(parts, &sep).map(Value::from).collect()),
        Some(sep) => {
            let parts: Vec<&str> = text.rsplitn(parts, &sep).collect();
            Ok(parts.into_iter().rev().map(Value::from).collect())
        }
        None => Ok(words(text, most, method == "rsplit")),
    }
}

/// Whether all characters are such, and there is one.
fn holds(text: &str, is: impl Fn(char) -> bool) -> bool {
    !text.is_empty() && text.chars().all(is)
}

fn swapped(letter: char) -> String {
    if letter.is_uppercase() {
        letter.to_lowercase().collect()
    } else {
        letter.to_uppercase().collect()
    }
}

/// Letters that follow none are upper case, all others lower case.
fn title(text: &str) -> String {
    let (mut out, mut within) = (String::new(), false);
    for letter in text.chars() {
        if within {
            out.extend(letter.to_lowercase());
        } else {
            out.extend(letter.to_uppercase());
        }
        within = letter.is_alphabetic();
    }
    out
}

fn is_title(text: &str) -> bool {
    let has_case = |letter: char| letter.is_uppercase() || letter.is_lowercase();
    text.chars().any(has_case) && title(text) == text
}

/// Widths that templates may ask for: what they allocate counts towards no other limit.
fn width(width: usize) -> Result<usize, Error> {
    const WIDTH_MAX: usize = 1 << 20;
    if width > WIDTH_MAX {
        return Err(invalid(format!("a width of {width}: at most {WIDTH_MAX}")));
    }
    Ok(width)
}

/// `center`, `ljust` and `rjust`.
pub(super) fn padded(text: &str, method: &str, to: usize, fill: &str) -> Result<String, Error> {
    if fill.chars().count() != 1 {
        return Err(invalid(format!(
            "{method}: expected one character to fill with, found {fill:?}"
        )));
    }
    let to = width(to)?;
    let more = to.saturating_sub(text.chars().count());
    let left = match method {
        "ljust" => 0,
        "rjust" => more,
        // Where the rest is odd, Python puts one more to the left of an odd width.
        _ => more / 2 + (more & to & 1),
    };
    Ok(format!("{}{text}{}", fill.repeat(left), fill.repeat(more - left)))
}

fn partition(text: &str, method: &str, sep: &str) -> Result<Value, Error> {
    if sep.is_empty() {
        return Err(invalid(format!("{method}: empty separator")));
    }
    let parts = if method == "partition" {
        text.split_once(sep).map_or([text, "", ""], |(before, after)| [before, sep, after])
    } else {
        text.rsplit_once(sep).map_or(["", "", text], |(before, after)| [before, sep, after])
    };
    Ok(Value::from(Tuple::from(parts.map(Value::from).to_vec())))
}

/// Parts between white space, of which there are `most` splits.
fn words(text: &str, most: usize, from_the_end: bool) -> Value {
    let mut parts = Vec::new();
    let mut rest = if from_the_end { text.trim_end() } else { text.trim_start() };
    while !rest.is_empty() {
        let cut = if parts.len() == most {
            None
        } else if from_the_end {
            rest.rfind(char::is_whitespace)
        } else {
            rest.find(char::is_whitespace)
        };
        let Some(at) = cut else {
            parts.push(Value::from(rest));
            break;
        };
        if from_the_end {
            let space = rest[at..].chars().next().map_or(1, char::len_utf8);
            parts.push(Value::from(&rest[at + space..]));
            rest = rest[..at].trim_end();
        } else {
            parts.push(Value::from(&rest[..at]));
            rest = rest[at..].trim_start();
        }
    }
    if from_the_end {
        parts.reverse();
    }
    parts.into()
}

fn expandtabs(text: &str, size: usize) -> String {
    let (mut out, mut column) = (String::new(), 0);
    for letter in text.chars() {
        match letter {
            '\t' => {
                let spaces = if size == 0 { 0 } else { size - column % size };
                out.push_str(&" ".repeat(spaces));
                column += spaces;
            }
            '\n' | '\r' => {
                out.push(letter);
                column = 0;
            }
            _ => {
                out.push(letter);
                column += 1;
            }
        }
    }
    out
}
