//! Incremental JSON scanner: validates one value character by character as the model writes it.
//! What has passed so far is always a prefix of valid JSON.

use super::marker::is_code;

/// Deepest nesting: what clients' JSON readers (`serde_json` among them) take.
const DEPTH_MAX: usize = 127;

/// Result of scanning a character.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScanOutcome {
    /// It belongs to the value, which is incomplete.
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
enum State {
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
    Number(NumberState),
    /// Within a literal: the bytes still to come.
    Literal(&'static [u8]),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NumberState {
    Minus,
    Zero,
    Integer,
    Point,
    Fraction,
    Exponent,
    ExponentSign,
    ExponentDigits,
}

impl NumberState {
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
    state: State,
    /// Whether the text being read is a key.
    is_key: bool,
}

impl JsonScan {
    pub(super) const fn new() -> Self {
        Self { open: Vec::new(), state: State::Value, is_key: false }
    }

    #[cfg(test)]
    /// Whether the value may end here without a further character (a number at top level).
    pub(super) fn may_end(&self) -> bool {
        self.open.is_empty() && matches!(self.state, State::Number(state) if state.may_end())
    }

    /// Takes a character and appends what it stands for in clean JSON: control characters within
    /// texts, which models write as they are, become escapes.
    pub(super) fn push(&mut self, c: char, out: &mut String) -> ScanOutcome {
        match self.state {
            State::Text => self.text(c, out),
            State::Escape => {
                match c {
                    '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't' => self.state = State::Text,
                    'u' => self.state = State::Unicode(4),
                    _ => return ScanOutcome::Invalid,
                }
                out.push(c);
                ScanOutcome::More
            }
            State::Unicode(left) => {
                if !c.is_ascii_hexdigit() {
                    return ScanOutcome::Invalid;
                }
                out.push(c);
                self.state = if left == 1 { State::Text } else { State::Unicode(left - 1) };
                ScanOutcome::More
            }
            State::Number(state) => match state.next(c) {
                Some(next) => {
                    out.push(c);
                    self.state = State::Number(next);
                    ScanOutcome::More
                }
                None if !state.may_end() => ScanOutcome::Invalid,
                None if self.open.is_empty() => ScanOutcome::DoneBefore,
                None => {
                    self.state = State::Comma;
                    self.structure(c, out)
                }
            },
            State::Literal(rest) => match rest.split_first() {
                Some((&first, rest)) if char::from(first) == c => {
                    out.push(c);
                    if rest.is_empty() {
                        return self.value_done();
                    }
                    self.state = State::Literal(rest);
                    ScanOutcome::More
                }
                _ => ScanOutcome::Invalid,
            },
            _ => self.structure(c, out),
        }
    }

    fn text(&mut self, c: char, out: &mut String) -> ScanOutcome {
        match c {
            '"' => {
                out.push(c);
                if std::mem::take(&mut self.is_key) {
                    self.state = State::Colon;
                    return ScanOutcome::More;
                }
                return self.value_done();
            }
            '\\' => {
                out.push(c);
                self.state = State::Escape;
            }
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if u32::from(c) < 0x20 => {
                use std::fmt::Write;
                write!(out, "\\u{:04x}", u32::from(c)).expect("strings take any text");
            }
            c if is_code(c) => return ScanOutcome::Invalid,
            c => out.push(c),
        }
        ScanOutcome::More
    }

    fn structure(&mut self, c: char, out: &mut String) -> ScanOutcome {
        if matches!(c, ' ' | '\n' | '\r' | '\t') {
            // Nothing has begun yet: leading space is not part of the value.
            if !(self.open.is_empty() && self.state == State::Value) {
                out.push(c);
            }
            return ScanOutcome::More;
        }
        out.push(c);
        match (self.state, c) {
            (State::FirstItem, ']') | (State::FirstKey, '}') => self.close(),
            (State::Comma, ']') if self.open.last() == Some(&Container::Array) => self.close(),
            (State::Comma, '}') if self.open.last() == Some(&Container::Object) => self.close(),
            (State::Comma, ',') => {
                let is_array = self.open.last() == Some(&Container::Array);
                self.state = if is_array { State::Value } else { State::Key };
                ScanOutcome::More
            }
            (State::Colon, ':') => {
                self.state = State::Value;
                ScanOutcome::More
            }
            (State::FirstKey | State::Key, '"') => {
                self.is_key = true;
                self.state = State::Text;
                ScanOutcome::More
            }
            (State::Value | State::FirstItem, c) => {
                let outcome = self.begin(c);
                if outcome == ScanOutcome::Invalid {
                    out.pop();
                }
                outcome
            }
            _ => {
                out.pop();
                ScanOutcome::Invalid
            }
        }
    }

    fn begin(&mut self, c: char) -> ScanOutcome {
        self.state = match c {
            '{' | '[' if self.open.len() >= DEPTH_MAX => return ScanOutcome::Invalid,
            '{' => {
                self.open.push(Container::Object);
                State::FirstKey
            }
            '[' => {
                self.open.push(Container::Array);
                State::FirstItem
            }
            '"' => State::Text,
            '-' => State::Number(NumberState::Minus),
            '0' => State::Number(NumberState::Zero),
            '1'..='9' => State::Number(NumberState::Integer),
            't' => State::Literal(b"rue"),
            'f' => State::Literal(b"alse"),
            'n' => State::Literal(b"ull"),
            _ => return ScanOutcome::Invalid,
        };
        ScanOutcome::More
    }

    fn close(&mut self) -> ScanOutcome {
        self.open.pop();
        self.value_done()
    }

    fn value_done(&mut self) -> ScanOutcome {
        self.state = State::Comma;
        if self.open.is_empty() { ScanOutcome::Done } else { ScanOutcome::More }
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
                ScanOutcome::More => {}
                ScanOutcome::Done => return Some((out, &text[at + c.len_utf8()..])),
                ScanOutcome::DoneBefore => return Some((out, &text[at..])),
                ScanOutcome::Invalid => return None,
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
