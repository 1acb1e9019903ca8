//! One JSON value, checked character by character as it is written by a model. What has been let
//! through so far is always the beginning of valid JSON.

use super::marker::is_code;

/// Deepest nesting: what clients' JSON readers (`serde_json` among them) take.
const DEPTH_MAX: usize = 127;

/// What a character did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// It belongs to the value, which goes on.
    More,
    /// It ends the value.
    Done,
    /// The value, a number, ended before it.
    DoneBefore,
    /// No JSON continues like this.
    Invalid,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Container {
    Array,
    Object,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// A value must begin.
    Value,
    /// After `[`: a value or the end.
    FirstItem,
    /// After `{`: a key or the end.
    FirstKey,
    /// After `,` in an object.
    Key,
    Colon,
    /// After a value within a container.
    Comma,
    Text,
    Escape,
    /// Within `\u`: so many digits are missing.
    Unicode(u8),
    Number(NumberPlace),
    /// Within a literal: the bytes still to come.
    Literal(&'static [u8]),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NumberPlace {
    Minus,
    Zero,
    Integer,
    Point,
    Fraction,
    Exponent,
    ExponentSign,
    ExponentDigits,
}

impl NumberPlace {
    const fn may_end(self) -> bool {
        matches!(self, Self::Zero | Self::Integer | Self::Fraction | Self::ExponentDigits)
    }

    const fn next(self, c: char) -> Option<Self> {
        Some(match (self, c) {
            (Self::Minus, '0') => Self::Zero,
            (Self::Minus, '1'..='9') | (Self::Integer, '0'..='9') => Self::Integer,
            (Self::Zero | Self::Integer, '.') => Self::Point,
            (Self::Zero | Self::Integer | Self::Fraction, 'e' | 'E') => Self::Exponent,
            (Self::Point | Self::Fraction, '0'..='9') => Self::Fraction,
            (Self::Exponent, '+' | '-') => Self::ExponentSign,
            (Self::Exponent | Self::ExponentSign | Self::ExponentDigits, '0'..='9') => {
                Self::ExponentDigits
            }
            _ => return None,
        })
    }
}

/// The state between two characters.
#[derive(Clone, Debug)]
pub(super) struct JsonScan {
    open: Vec<Container>,
    place: Place,
    /// Whether the text being read is a key.
    is_key: bool,
}

impl JsonScan {
    pub(super) const fn new() -> Self {
        Self { open: Vec::new(), place: Place::Value, is_key: false }
    }

    #[cfg(test)]
    /// Whether the value may end here without a further character (a number at top level).
    pub(super) fn may_end(&self) -> bool {
        self.open.is_empty() && matches!(self.place, Place::Number(place) if place.may_end())
    }

    /// Takes a character and appends what it stands for in clean JSON: control characters within
    /// texts, which models write as they are, become escapes.
    pub(super) fn push(&mut self, c: char, out: &mut String) -> Step {
        match self.place {
            Place::Text => self.text(c, out),
            Place::Escape => {
                match c {
                    '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't' => self.place = Place::Text,
                    'u' => self.place = Place::Unicode(4),
                    _ => return Step::Invalid,
                }
                out.push(c);
                Step::More
            }
            Place::Unicode(left) => {
                if !c.is_ascii_hexdigit() {
                    return Step::Invalid;
                }
                out.push(c);
                self.place = if left == 1 { Place::Text } else { Place::Unicode(left - 1) };
                Step::More
            }
            Place::Number(place) => match place.next(c) {
                Some(next) => {
                    out.push(c);
                    self.place = Place::Number(next);
                    Step::More
                }
                None if !place.may_end() => Step::Invalid,
                None if self.open.is_empty() => Step::DoneBefore,
                None => {
                    self.place = Place::Comma;
                    self.structure(c, out)
                }
            },
            Place::Literal(rest) => match rest.split_first() {
                Some((&first, rest)) if char::from(first) == c => {
                    out.push(c);
                    if rest.is_empty() {
                        return self.value_done();
                    }
                    self.place = Place::Literal(rest);
                    Step::More
                }
                _ => Step::Invalid,
            },
            _ => self.structure(c, out),
        }
    }

    fn text(&mut self, c: char, out: &mut String) -> Step {
        match c {
            '"' => {
                out.push(c);
                if std::mem::take(&mut self.is_key) {
                    self.place = Place::Colon;
                    return Step::More;
                }
                return self.value_done();
            }
            '\\' => {
                out.push(c);
                self.place = Place::Escape;
            }
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if u32::from(c) < 0x20 => {
                use std::fmt::Write;
                write!(out, "\\u{:04x}", u32::from(c)).expect("strings take any text");
            }
            c if is_code(c) => return Step::Invalid,
            c => out.push(c),
        }
        Step::More
    }

    fn structure(&mut self, c: char, out: &mut String) -> Step {
        if matches!(c, ' ' | '\n' | '\r' | '\t') {
            // Nothing has begun yet: leading space is not part of the value.
            if !(self.open.is_empty() && self.place == Place::Value) {
                out.push(c);
            }
            return Step::More;
        }
        out.push(c);
        match (self.place, c) {
            (Place::FirstItem, ']') | (Place::FirstKey, '}') => self.close(),
            (Place::Comma, ']') if self.open.last() == Some(&Container::Array) => self.close(),
            (Place::Comma, '}') if self.open.last() == Some(&Container::Object) => self.close(),
            (Place::Comma, ',') => {
                let is_array = self.open.last() == Some(&Container::Array);
                self.place = if is_array { Place::Value } else { Place::Key };
                Step::More
            }
            (Place::Colon, ':') => {
                self.place = Place::Value;
                Step::More
            }
            (Place::FirstKey | Place::Key, '"') => {
                self.is_key = true;
                self.place = Place::Text;
                Step::More
            }
            (Place::Value | Place::FirstItem, c) => {
                let step = self.begin(c);
                if step == Step::Invalid {
                    out.pop();
                }
                step
            }
            _ => {
                out.pop();
                Step::Invalid
            }
        }
    }

    fn begin(&mut self, c: char) -> Step {
        self.place = match c {
            '{' | '[' if self.open.len() >= DEPTH_MAX => return Step::Invalid,
            '{' => {
                self.open.push(Container::Object);
                Place::FirstKey
            }
            '[' => {
                self.open.push(Container::Array);
                Place::FirstItem
            }
            '"' => Place::Text,
            '-' => Place::Number(NumberPlace::Minus),
            '0' => Place::Number(NumberPlace::Zero),
            '1'..='9' => Place::Number(NumberPlace::Integer),
            't' => Place::Literal(b"rue"),
            'f' => Place::Literal(b"alse"),
            'n' => Place::Literal(b"ull"),
            _ => return Step::Invalid,
        };
        Step::More
    }

    fn close(&mut self) -> Step {
        self.open.pop();
        self.value_done()
    }

    fn value_done(&mut self) -> Step {
        self.place = Place::Comma;
        if self.open.is_empty() { Step::Done } else { Step::More }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value at the beginning of `text` and what follows it.
    fn scan(text: &str) -> Option<(String, &str)> {
        let mut scan = JsonScan::new();
        let mut out = String::new();
        for (at, c) in text.char_indices() {
            match scan.push(c, &mut out) {
                Step::More => {}
                Step::Done => return Some((out, &text[at + c.len_utf8()..])),
                Step::DoneBefore => return Some((out, &text[at..])),
                Step::Invalid => return None,
            }
        }
        scan.may_end().then_some((out, ""))
    }

    #[test]
    fn values_end_where_they_end() {
        let check = |text: &str, value: &str, rest: &str| {
            assert_eq!(scan(text), Some((value.to_owned(), rest)), "{text}");
        };
        check(
            r#" {"a": [1, -2.5e+3, "}\"\u00e9"], "b": {}} x"#,
            r#"{"a": [1, -2.5e+3, "}\"\u00e9"], "b": {}}"#,
            " x",
        );
        check("[]]", "[]", "]");
        check("12,", "12", ",");
        check("0", "0", "");
        check("true}", "true", "}");
        check("\"a\nb\u{1}\"", r#""a\nb\u0001""#, "");
    }

    #[test]
    fn what_no_reader_takes_is_invalid() {
        for text in [
            "{a",
            "{,",
            "[1,]",
            "[01]",
            "-x",
            "1.x",
            "tru ",
            r#""\x"#,
            r#"{"a" 1"#,
            "}",
            r#"{"a":1,}"#,
            "\"\u{fdd0}",
        ] {
            assert_eq!(scan(text), None, "{text}");
        }
        assert_eq!(scan(&"[".repeat(DEPTH_MAX + 1)), None);
    }

    #[test]
    fn agrees_with_serde_json() {
        let texts =
            [r#"{"a":{"b":[[],{},""],"c":null},"d":[true,false]}"#, r#"[0.5,1e9,-0,{"":"😀"}]"#];
        for text in texts {
            // Every prefix but the whole is unfinished or invalid for both.
            for (end, _) in text.char_indices() {
                let whole = serde_json::from_str::<serde_json::Value>(&text[..end]).is_ok();
                assert_eq!(scan(&text[..end]).is_some(), whole, "{}", &text[..end]);
            }
            assert_eq!(scan(text), Some((text.to_owned(), "")));
        }
    }
}
