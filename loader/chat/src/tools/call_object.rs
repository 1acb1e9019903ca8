//! `{"name": …, "arguments": {…}}` as a model writes it: keys in any order, `parameters` for
//! `arguments`, the whole within a `function`, arguments as an object or as a text that holds one;
//! or `{"name": {…}}`.

use super::{
    calls::Calls,
    json_scan::{JsonScan, Step},
};

/// Bytes of a tool's name; the API allows 64.
const NAME_BYTES_MAX: usize = 256;

/// What a character did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The envelope goes on.
    More,
    /// It is complete, and so is the call.
    Done,
    /// This is no call.
    Garbage,
}

#[derive(Debug)]
enum Place {
    Open,
    /// After `{`, or after `,`.
    Key {
        may_close: bool,
    },
    InKey(String),
    Colon(Key),
    /// Before a value.
    Value(Key),
    In(Key, JsonScan, String),
    /// Arguments that go out as they come.
    Streaming(JsonScan),
    /// After a value.
    Comma,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Key {
    Name,
    Arguments,
    Function,
    Ignored,
}

impl Key {
    fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "name" | "tool_name" => Self::Name,
            "arguments" | "parameters" => Self::Arguments,
            "function" => Self::Function,
            "type" | "id" | "tool_call_id" => Self::Ignored,
            _ => return None,
        })
    }
}

/// One envelope.
#[derive(Debug)]
pub(super) struct Envelope {
    place: Place,
    depth: usize,
    name: Option<String>,
    /// Arguments that came before the name.
    arguments: Option<String>,
    is_complete: bool,
    /// Whether the name is the key of the arguments.
    is_keyed: bool,
}

impl Envelope {
    pub(super) const fn new() -> Self {
        Self {
            place: Place::Open,
            depth: 0,
            name: None,
            arguments: None,
            is_complete: false,
            is_keyed: false,
        }
    }

    /// One whose only key is the name.
    pub(super) fn keyed() -> Self {
        Self { is_keyed: true, ..Self::new() }
    }

    /// Takes the next character.
    pub(super) fn push(&mut self, c: char, calls: &mut Calls) -> Verdict {
        let is_space = matches!(c, ' ' | '\n' | '\r' | '\t');
        match &mut self.place {
            Place::Open | Place::Key { .. } | Place::Colon(_) | Place::Value(_) | Place::Comma
                if is_space =>
            {
                return Verdict::More;
            }
            Place::Open if c == '{' => {
                self.depth += 1;
                self.place = Place::Key { may_close: true };
            }
            Place::Key { .. } if c == '"' => self.place = Place::InKey(String::new()),
            Place::Key { may_close: true } | Place::Comma if c == '}' => return self.close(calls),
            Place::Comma if c == ',' => self.place = Place::Key { may_close: false },
            Place::InKey(text) => {
                if c == '"' {
                    let text = std::mem::take(text);
                    let Some(key) = self.key(&text, calls) else { return Verdict::Garbage };
                    self.place = Place::Colon(key);
                } else if text.len() > NAME_BYTES_MAX {
                    return Verdict::Garbage;
                } else {
                    text.push(c);
                }
            }
            Place::Colon(key) if c == ':' => self.place = Place::Value(*key),
            Place::Value(key) => {
                let key = *key;
                return self.begin_value(key, c, calls);
            }
            Place::In(..) => return self.value(c, calls),
            Place::Streaming(scan) => {
                let mut out = String::new();
                let step = scan.push(c, &mut out);
                calls.arguments(&out);
                match step {
                    Step::More => {}
                    Step::Done => self.place = Place::Comma,
                    Step::DoneBefore | Step::Invalid => return Verdict::Garbage,
                }
            }
            _ => return Verdict::Garbage,
        }
        Verdict::More
    }

    /// What a key means.
    fn key(&mut self, text: &str, calls: &mut Calls) -> Option<Key> {
        if !self.is_keyed {
            return Key::parse(text);
        }
        let named = self.named(&serde_json::Value::from(text).to_string(), calls);
        named.then_some(Key::Arguments)
    }

    fn begin_value(&mut self, key: Key, c: char, calls: &mut Calls) -> Verdict {
        match (key, c) {
            (Key::Function, '{') if self.depth == 1 => {
                self.depth += 1;
                self.place = Place::Key { may_close: true };
                return Verdict::More;
            }
            (Key::Name | Key::Function, '"') | (Key::Ignored, _) => {}
            // Some models write `null` where there are none.
            (Key::Arguments, '{' | '"' | 'n') if !self.is_complete => {}
            _ => return Verdict::Garbage,
        }
        if key == Key::Arguments && c == '{' && calls.is_open() {
            self.is_complete = true;
            self.place = Place::Streaming(JsonScan::new());
        } else {
            self.place = Place::In(key, JsonScan::new(), String::new());
        }
        self.push(c, calls)
    }

    fn value(&mut self, c: char, calls: &mut Calls) -> Verdict {
        let Place::In(key, scan, text) = &mut self.place else { return Verdict::Garbage };
        let step = scan.push(c, text);
        if step == Step::More {
            return Verdict::More;
        }
        if step == Step::Invalid {
            return Verdict::Garbage;
        }
        let (key, text) = (*key, std::mem::take(text));
        self.place = Place::Comma;
        let known = match key {
            // `"function": "name"` is written by some, too.
            Key::Name | Key::Function => self.named(&text, calls),
            Key::Arguments => self.argued(text, calls),
            Key::Ignored => true,
        };
        match known {
            false => Verdict::Garbage,
            // A number ended before this character.
            true if step == Step::DoneBefore => self.push(c, calls),
            true => Verdict::More,
        }
    }

    fn named(&mut self, text: &str, calls: &mut Calls) -> bool {
        let Ok(name) = serde_json::from_str::<String>(text) else { return false };
        if self.name.is_some() || !calls.begin(&name, None) {
            return false;
        }
        self.name = Some(name);
        if let Some(arguments) = self.arguments.take() {
            calls.arguments(&arguments);
        }
        true
    }

    fn argued(&mut self, text: String, calls: &mut Calls) -> bool {
        self.is_complete = true;
        let text = match text.as_bytes().first() {
            Some(b'n') => "{}".to_owned(),
            Some(b'"') => match serde_json::from_str::<String>(&text) {
                Ok(inner) => inner,
                Err(_) => return false,
            },
            _ => text,
        };
        if calls.is_open() {
            calls.arguments(&text);
        } else {
            self.arguments = Some(text);
        }
        true
    }

    fn close(&mut self, calls: &mut Calls) -> Verdict {
        self.depth -= 1;
        if self.depth > 0 {
            self.place = Place::Comma;
            return Verdict::More;
        }
        let complete = self.name.is_some() && calls.end();
        if complete { Verdict::Done } else { Verdict::Garbage }
    }
}
