//! Values in tags within tags, and the JSON that they mean by the tool's schema.

use serde_json::Value;

use super::{CALL_CLOSE, ITEM, NAME_BYTES_MAX};
use crate::tools::{
    marker::{Found, find, is_code},
    schema::applicable::Applicable,
    value::{Reading, Types, allowed, reading, to_json},
};

/// Deepest nesting of tags; published tools have 5 levels.
const DEPTH_MAX: usize = 64;
/// The schemas of a value, where there are any.
type Schemas<'a> = Option<Applicable<'a>>;

/// What a text holds of a value.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Its JSON, and its bytes with the tag that closes it.
    Value(String, usize),
    /// The rest is still to come.
    More,
    NotAValue,
}

/// Where a text ends.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum End {
    /// Here, and the tag that closes it has so many bytes.
    At(usize, usize),
    /// Not within the first so many bytes.
    NotBefore(usize),
}

/// Whether a tag can have this name.
pub(super) fn is_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= NAME_BYTES_MAX
        && !name.starts_with('/')
        && !name.contains(|c: char| c == '<' || c.is_control() || is_code(c))
}

/// Where a text in the tag of this name ends. Texts may hold tags, its own among them: only the
/// mark tells. Where models forget it, the tag counts if something follows that only stands behind
/// one.
pub(super) fn text_end(key: &str, mark: &str, text: &str) -> End {
    let bare = format!("</{key}>");
    let marked = format!("{mark}{bare}");
    let mut from = 0;
    loop {
        match find(&text[from..], &[&marked, &bare]) {
            Found::NotBefore(safe) => return End::NotBefore(from + safe),
            Found::At(at, 0) => return End::At(from + at, marked.len()),
            Found::At(at, _) => {
                let at = from + at;
                let after = text[at + bare.len()..].trim_start();
                if after.starts_with(CALL_CLOSE) {
                    return End::At(at, bare.len());
                }
                if [mark, CALL_CLOSE, &marked].iter().any(|next| next.starts_with(after)) {
                    return End::NotBefore(at);
                }
                if after.starts_with(mark) && !after.starts_with(&marked) {
                    return End::At(at, bare.len());
                }
                from = at + bare.len();
            }
        }
    }
}

/// The value at the beginning of a text, which stands in the tag of this name.
pub(super) fn read<'a>(
    key: &str,
    mark: &str,
    text: &str,
    schemas: impl Fn() -> Schemas<'a>,
) -> Outcome {
    // Most of the time the end is not there yet.
    if !text.contains(&format!("</{key}>")) {
        return Outcome::More;
    }
    value(key, mark, text, schemas().as_ref(), 0)
}

fn value(
    key: &str,
    mark: &str,
    text: &str,
    schemas: Option<&Applicable<'_>>,
    depth: usize,
) -> Outcome {
    let types = allowed(schemas);
    if types.has(Types::ARRAY.or(Types::OBJECT)) {
        let rest = text.trim_start();
        let (tag, is_marked) = strip(rest, mark);
        let close = format!("</{key}>");
        if mark.starts_with(rest) || (close.starts_with(tag) && close != tag) {
            return Outcome::More;
        }
        // Without the mark a tag is one only where a text cannot be.
        let is_tag = is_marked || !types.has(Types::TEXT);
        if is_tag && tag.starts_with('<') && !tag.starts_with(&close) {
            return members(key, mark, text, schemas, depth);
        }
    }
    let (end, close) = match text_end(key, mark, text) {
        End::At(end, close) => (end, close),
        End::NotBefore(_) => return Outcome::More,
    };
    let text = &text[..end];
    if text.contains(is_code) {
        return Outcome::NotAValue;
    }
    let empty = [(Types::ARRAY, "[]"), (Types::OBJECT, "{}"), (Types::NULL, "null")];
    let empty = empty.iter().find(|(kind, _)| types.has(*kind));
    let json = match (empty, reading(schemas)) {
        (Some((_, json)), _) if text.trim().is_empty() && !types.has(Types::TEXT) => {
            (*json).to_owned()
        }
        (_, Reading::Text) => Value::from(text).to_string(),
        (_, reading) => to_json(text, reading),
    };
    Outcome::Value(json, end + close)
}

/// The tags of a list or an object, to the one that closes it.
fn members(
    key: &str,
    mark: &str,
    text: &str,
    schemas: Option<&Applicable<'_>>,
    depth: usize,
) -> Outcome {
    if depth >= DEPTH_MAX {
        return Outcome::NotAValue;
    }
    let types = allowed(schemas);
    // Where the schema leaves it open, the first tag's name tells.
    let mut is_list = match (types.has(Types::ARRAY), types.has(Types::OBJECT)) {
        (true, true) => None,
        (is_list, _) => Some(is_list),
    };
    let mut found: Vec<(&str, String)> = Vec::new();
    let mut at = 0;
    loop {
        let rest = text[at..].trim_start();
        let (tag, _) = strip(rest, mark);
        let Some((name, after)) = tag.strip_prefix('<').and_then(|tag| tag.split_once('>')) else {
            let is_more = tag.is_empty()
                || mark.starts_with(rest)
                || (tag.starts_with('<') && tag.len() <= NAME_BYTES_MAX + 1);
            return if is_more { Outcome::More } else { Outcome::NotAValue };
        };
        at = text.len() - after.len();
        if name.strip_prefix('/') == Some(key) {
            break;
        }
        if !is_name(name) {
            return Outcome::NotAValue;
        }
        let as_item = *is_list.get_or_insert(name == ITEM);
        let own = schemas.and_then(|schemas| {
            if as_item { schemas.item(found.len()) } else { schemas.member(name) }
        });
        match value(name, mark, after, own.as_ref(), depth + 1) {
            Outcome::Value(json, len) => {
                found.push((name, json));
                at += len;
            }
            other => return other,
        }
    }
    // An object may have a member of that name, too.
    let is_list = is_list == Some(true)
        && (!types.has(Types::OBJECT) || found.iter().all(|(name, _)| *name == ITEM));
    let parts = found
        .into_iter()
        .map(|(name, json)| if is_list { json } else { format!("{}: {json}", Value::from(name)) });
    let inner = parts.collect::<Vec<_>>().join(", ");
    Outcome::Value(if is_list { format!("[{inner}]") } else { format!("{{{inner}}}") }, at)
}

/// A text without the mark at its beginning and white space behind that, and whether it was there.
fn strip<'a>(text: &'a str, mark: &str) -> (&'a str, bool) {
    text.strip_prefix(mark).map_or((text, false), |rest| (rest.trim_start(), true))
}

#[cfg(test)]
mod tests;
