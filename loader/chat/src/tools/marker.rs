//! Markers: the texts that delimit tool calls and reasoning, such as `<tool_call>`. Where the
//! tokenizer has an added token for one, only that token is the marker and the same letters are
//! text; else the letters are the marker.
//!
//! Within a parser a marker that is a token stands in the text as one character of Unicode's
//! noncharacters U+FDD0 to U+FDEF, which are meant for such private use; should a model write
//! one of those itself, it becomes U+FFFD.

use std::collections::HashMap;

use shardpack_engine_api::TokenId;

const FIRST: u32 = 0xfdd0;
const COUNT: u32 = 32;

/// Whether a character stands for a marker.
pub(super) const fn is_code(c: char) -> bool {
    matches!(c, '\u{fdd0}'..='\u{fdef}')
}

/// The markers of a model's families, as its tokenizer has them.
#[derive(Clone, Debug, Default)]
pub(super) struct Markers {
    /// Those that are tokens; the index is the code.
    tokens: Vec<(&'static str, TokenId)>,
    by_id: HashMap<TokenId, char>,
}

impl Markers {
    /// Looks each name up among the tokenizer's added tokens.
    pub(super) fn new(names: &[&'static str], token_id: impl Fn(&str) -> Option<TokenId>) -> Self {
        let mut markers = Self::default();
        for &name in names {
            let Some(id) = token_id(name) else { continue };
            let code = FIRST + markers.tokens.len() as u32;
            assert!(code < FIRST + COUNT, "no family has so many markers");
            let code = char::from_u32(code).expect("noncharacters are characters to Rust");
            markers.tokens.push((name, id));
            markers.by_id.insert(id, code);
        }
        markers
    }

    /// The character of a token that is a marker.
    pub(super) fn code(&self, token: TokenId) -> Option<char> {
        self.by_id.get(&token).copied()
    }

    /// The token of a marker, if it has one.
    pub(super) fn token(&self, name: &str) -> Option<TokenId> {
        self.tokens.iter().find(|(text, _)| *text == name).map(|(_, id)| *id)
    }

    /// What to look for in a parser's text: the marker's character, or its letters.
    pub(super) fn needle(&self, name: &'static str) -> String {
        self.token(name).and_then(|id| self.code(id)).map_or_else(|| name.to_owned(), String::from)
    }

    /// Text for readers: markers that turned out to be none are shown as their letters.
    pub(super) fn reveal(&self, text: &str) -> String {
        let mut shown = String::with_capacity(text.len());
        for c in text.chars() {
            match u32::from(c).checked_sub(FIRST).filter(|_| is_code(c)) {
                Some(index) => {
                    shown.push_str(self.tokens.get(index as usize).map_or("\u{fffd}", |(t, _)| *t));
                }
                None => shown.push(c),
            }
        }
        shown
    }
}

/// A model's own text without the characters that stand for markers.
pub(super) fn sanitise(text: String) -> String {
    if text.contains(is_code) { text.replace(is_code, "\u{fffd}") } else { text }
}

/// Where a text holds one of several others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// The needle of that number begins here.
    At(usize, usize),
    /// None does in the first so many bytes; one may begin right after them.
    NotBefore(usize),
}

/// The first of `needles` in `text`, which may go on. No needle may begin with another.
pub(super) fn find(text: &str, needles: &[&str]) -> Found {
    let first = needles
        .iter()
        .enumerate()
        .filter_map(|(number, needle)| text.find(needle).map(|at| (at, number)))
        .min();
    let partial = needles.iter().filter_map(|needle| partial_suffix(text, needle)).min();
    match (first, partial) {
        (Some((at, number)), partial) if partial.is_none_or(|partial| at < partial) => {
            Found::At(at, number)
        }
        (_, Some(partial)) => Found::NotBefore(partial),
        (_, None) => Found::NotBefore(text.len()),
    }
}

/// Where the beginning of `needle`, but not all of it, ends the text: the earliest such place.
fn partial_suffix(text: &str, needle: &str) -> Option<usize> {
    let from = text.len().saturating_sub(needle.len() - 1);
    (from..text.len())
        .filter(|&at| text.is_char_boundary(at))
        .find(|&at| needle.as_bytes().starts_with(&text.as_bytes()[at..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_markers_and_their_letters_are_not() {
        let markers = Markers::new(&["<a>", "<b>"], |name| (name == "<b>").then_some(TokenId(7)));
        assert_eq!(markers.needle("<a>"), "<a>");
        let code = markers.code(TokenId(7)).unwrap();
        assert_eq!(markers.needle("<b>"), code.to_string());
        assert_eq!(markers.reveal(&format!("x{code}y")), "x<b>y");
        assert_eq!(sanitise(format!("x{code}y")), "x\u{fffd}y");
        assert_eq!(markers.code(TokenId(8)), None);
    }

    #[test]
    fn the_first_is_found_and_what_may_become_one_is_held() {
        let needles = ["<a>", "[bc"];
        assert_eq!(find("x[bc<a>", &needles), Found::At(1, 1));
        assert_eq!(find("x<a", &needles), Found::NotBefore(1));
        assert_eq!(find("x<b", &needles), Found::NotBefore(3));
        assert_eq!(find("", &needles), Found::NotBefore(0));
        assert_eq!(find("é[", &needles), Found::NotBefore(2));
    }
}
