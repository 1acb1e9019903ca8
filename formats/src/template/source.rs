//! What minijinja reads otherwise than jinja2 does, written anew in a template's source before it is
//! compiled: line ends, the line after `{% raw %}`, tags for training, `"text" % value`, macros that
//! take any arguments, and lists and dictionaries that a template changes.

use std::{borrow::Cow, collections::BTreeSet, fmt::Write as _};

use super::{
    containers,
    scan::{group_end, literal_end, operand_end, skip_spaces, tag_end, word_end},
};

/// The source as minijinja has to read it, and whether the template changes lists or dictionaries.
pub(super) fn rewritten(source: &str) -> (String, bool) {
    // jinja2 reads every kind of line end as a line feed, in texts too.
    let source = if source.contains('\r') {
        Cow::Owned(source.replace("\r\n", "\n").replace('\r', "\n"))
    } else {
        Cow::Borrowed(source)
    };
    let pieces = pieces(&source);
    let changes = pieces
        .iter()
        .any(|piece| matches!(piece, Piece::Tag(tag) if containers::is_changed_in(tag)));
    let open_macros = macros_of_any_arguments(&pieces);
    let mut out = String::with_capacity(source.len());
    for piece in &pieces {
        match piece {
            Piece::Text(text) => out.push_str(text),
            // Without the sign minijinja drops the line feed behind it.
            Piece::RawTag(tag) => match tag.strip_suffix("%}") {
                Some(open) if !open.ends_with(['-', '+']) => {
                    out.push_str(open);
                    out.push_str("+%}");
                }
                _ => out.push_str(tag),
            },
            Piece::Tag(tag) => {
                let mut tag = Cow::Borrowed(*tag);
                if let Some(plain) = without_generation(&tag) {
                    tag = Cow::Owned(plain);
                }
                tag = Cow::Owned(expression(&tag));
                if changes {
                    tag = Cow::Owned(with_containers(&tag));
                }
                if !open_macros.is_empty() {
                    tag = Cow::Owned(with_open_macros(&tag, &open_macros));
                }
                out.push_str(&tag);
            }
        }
    }
    (out, changes)
}

/// A part of a template's source.
enum Piece<'s> {
    /// Text, a comment, or what stands within `raw`.
    Text(&'s str),
    /// `{% raw %}`.
    RawTag(&'s str),
    /// Another tag, with its signs.
    Tag(&'s str),
}

fn pieces(source: &str) -> Vec<Piece<'_>> {
    let mut pieces = Vec::new();
    let mut rest = source;
    while let Some(start) = rest.find('{') {
        let (before, tag) = rest.split_at(start);
        pieces.push(Piece::Text(before));
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
            pieces.push(Piece::Text(whole));
        } else if word(whole) == "raw" && whole.starts_with("{%") {
            pieces.push(Piece::RawTag(whole));
            // Text up to the end of the block.
            let close = rest.find("endraw").and_then(|at| rest[..at].rfind("{%"));
            let (text, after) = rest.split_at(close.unwrap_or(rest.len()));
            pieces.push(Piece::Text(text));
            rest = after;
        } else {
            pieces.push(Piece::Tag(whole));
        }
    }
    pieces.push(Piece::Text(rest));
    pieces
}

/// What a tag says, without its signs.
fn body(tag: &str) -> &str {
    tag[2..tag.len() - 2].trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim()
}

/// The first word of a tag.
fn word(tag: &str) -> &str {
    body(tag).split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default()
}

/// `{% generation %}` marks the assistant's text for training and renders its body: a block of its
/// own scope does the same. Signs of whitespace control stay.
fn without_generation(tag: &str) -> Option<String> {
    let replacement = match body(tag) {
        "generation" => "with",
        "endgeneration" => "endwith",
        _ => return None,
    };
    tag.starts_with("{%").then(|| tag.replace(body(tag), replacement))
}

/// Macros that ask for `varargs` or `kwargs`: jinja2 gives them what their parameters do not take.
fn macros_of_any_arguments<'s>(pieces: &[Piece<'s>]) -> BTreeSet<&'s str> {
    let mut found = BTreeSet::new();
    let mut open: Vec<&str> = Vec::new();
    for piece in pieces {
        let Piece::Tag(tag) = piece else { continue };
        match word(tag) {
            "macro" => {
                let name = body(tag)["macro".len()..].trim_start();
                open.push(name.split(['(', ' ']).next().unwrap_or_default());
            }
            "endmacro" => {
                open.pop();
            }
            _ => {
                if let Some(name) = open.last()
                    && (tag.contains("varargs") || tag.contains("kwargs"))
                {
                    found.insert(*name);
                }
            }
        }
    }
    found
}

/// Gives such macros two parameters more, and calls them by the function that fills these.
fn with_open_macros(tag: &str, names: &BTreeSet<&str>) -> String {
    let kind = word(tag);
    if kind == "macro" {
        let name = body(tag)["macro".len()..].trim_start();
        if names.iter().any(|known| {
            name.strip_prefix(known).is_some_and(|rest| rest.trim_start().starts_with('('))
        }) {
            let Some(close) = tag.rfind(')') else { return tag.to_owned() };
            let comma = if tag[..close].trim_end().ends_with('(') { "" } else { ", " };
            return format!("{}{comma}varargs=(), kwargs={{}}{}", &tag[..close], &tag[close..]);
        }
    }
    if kind == "call" {
        return tag.to_owned();
    }
    let bytes = tag.as_bytes();
    let (mut out, mut from, mut at) = (String::new(), 0, 0);
    while at < bytes.len() {
        if matches!(bytes[at], b'"' | b'\'') {
            let Some(end) = literal_end(bytes, at) else { break };
            at = end;
        } else if let Some(end) = word_end(bytes, at) {
            let is_member = tag[..at].trim_end().ends_with(['.', '|']);
            let open = skip_spaces(bytes, end);
            if !is_member && bytes.get(open) == Some(&b'(') && names.contains(&tag[at..end]) {
                let comma =
                    if bytes.get(skip_spaces(bytes, open + 1)) == Some(&b')') { "" } else { ", " };
                let _ =
                    write!(out, "{}{}({}{comma}", &tag[from..at], containers::CALL, &tag[at..end]);
                from = open + 1;
            }
            at = end;
        } else {
            at += 1;
        }
    }
    out.push_str(&tag[from..]);
    out
}

/// Words behind which a bracket opens a list and not a subscript.
const OPERATORS: [&str; 10] = ["and", "do", "elif", "else", "if", "in", "is", "not", "set", "with"];

/// Makes every list and dictionary of a tag one that can be changed: what is written there, and what
/// a variable is set to.
fn with_containers(tag: &str) -> String {
    let tag = with_literals(tag);
    if word(&tag) != "set" {
        return tag;
    }
    let Some(sign) = assignment(&tag) else { return tag };
    let end = tag.len() - 2 - usize::from(tag[..tag.len() - 2].ends_with(['-', '+']));
    format!("{} ({})|{} {}", &tag[..=sign], &tag[sign + 1..end], containers::OWN, &tag[end..])
}

/// The `=` of an assignment.
fn assignment(tag: &str) -> Option<usize> {
    let bytes = tag.as_bytes();
    let mut at = 2;
    while at < bytes.len() {
        match bytes[at] {
            b'"' | b'\'' => at = literal_end(bytes, at)?,
            b'(' | b'[' | b'{' => at = group_end(bytes, at)?,
            b'=' => return (bytes.get(at + 1) != Some(&b'=')).then_some(at),
            _ => at += 1,
        }
    }
    None
}

fn with_literals(tag: &str) -> String {
    let bytes = tag.as_bytes();
    let mut out = String::from(&tag[..2]);
    // Whether each open bracket opened a list or a dictionary.
    let mut open: Vec<bool> = Vec::new();
    // Whether a value ends here, of which a bracket would be a subscript.
    let mut value = false;
    let (mut at, end) = (2, tag.len() - 2);
    while at < end {
        let start = at;
        at += 1;
        match bytes[start] {
            b'"' | b'\'' => {
                let Some(stop) = literal_end(bytes, start) else { break };
                at = stop;
                value = true;
            }
            b'[' => {
                open.push(!value);
                if !value {
                    out.push_str(containers::LIST);
                    out.push('(');
                }
                value = false;
            }
            b'{' => {
                open.push(true);
                out.push_str(containers::DICT);
                out.push('(');
                value = false;
            }
            b'(' => {
                open.push(false);
                value = false;
            }
            b')' | b']' | b'}' => {
                value = true;
                if open.pop() == Some(true) {
                    out.push_str(&tag[start..at]);
                    out.push(')');
                    continue;
                }
            }
            byte if byte.is_ascii_whitespace() => {}
            _ => {
                if let Some(stop) = word_end(bytes, start) {
                    let is_member = out.trim_end().ends_with('.');
                    value = is_member || !OPERATORS.contains(&&tag[start..stop]);
                    at = stop;
                } else {
                    value = false;
                    // A letter may have several bytes.
                    while !tag.is_char_boundary(at) {
                        at += 1;
                    }
                }
            }
        }
        out.push_str(&tag[start..at]);
    }
    out.push_str(&tag[at..]);
    out
}

/// Writes `"text" % value` as `"text"|format(value)`. A remainder of numbers, which begins with no
/// text, stays.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_for_training_leave_no_trace() {
        let check = |source: &str, expected: &str| assert_eq!(rewritten(source).0, expected);
        check("a{%- generation +%}b{% endgeneration -%}c", "a{%- with +%}b{% endwith -%}c");
        check("{% generationx %}{% if generation %}{%", "{% generationx %}{% if generation %}{%");
    }

    #[test]
    fn only_templates_that_change_containers_are_given_such() {
        let check = |source: &str, expected: &str| assert_eq!(rewritten(source).0, expected);
        check("{{ [1, {'a': 2}][0] }}", "{{ [1, {'a': 2}][0] }}");
        check("{{ [x[0], 'é'].append({}) }}", "{{ __list([x[0], 'é']).append(__dict({})) }}");
        check("{% set a = x.pop() -%}", "{% set a = ( x.pop() )|__own -%}");
        check(
            "{% if y.pop() in [1] and n.in[0] == [] %}",
            "{% if y.pop() in __list([1]) and n.in[0] == __list([]) %}",
        );
    }
}
