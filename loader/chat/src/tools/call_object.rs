//! The JSON object of a tool call, `{"name": …, "arguments": {…}}`, as a model writes it: keys in
//! any order, `parameters` for `arguments`, the whole within a `function`, arguments as an object
//! or as a text that holds one; or `{"name": {…}}`.

use super::{
    calls::ToolCalls,
    json_scan::{JsonScan, ScanOutcome},
};

/// Bytes of a tool's name; the API allows 64.
const NAME_BYTES_MAX: usize = 256;

/// Result of a character.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The object is incomplete.
    More,
    /// It is complete, and so is the call.
    Done,
    /// This is no call.
    NotACall,
}

#[derive(Debug)]
enum State {
    Open,
    /// After `{`, or after `,`.
    Key {
        may_close: bool,
    },
    InKey(String),
    Colon(Key),
    /// Before a value.
    Value(Key),
    /// In the value of a key.
    In {
        key: Key,
        scan: JsonScan,
        text: String,
    },
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

/// The state of one object.
#[derive(Debug)]
pub(super) struct CallObject {
    state: State,
    depth: usize,
    name: Option<String>,
    /// Arguments that came before the name.
    arguments: Option<String>,
    is_complete: bool,
    /// Whether the name is the key of the arguments.
    is_keyed: bool,
}

impl CallObject {
    pub(super) const fn new() -> Self {
        Self {
            state: State::Open,
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
    pub(super) fn push(&mut self, c: char, calls: &mut ToolCalls) -> Verdict {
        let is_space = matches!(c, ' ' | '\n' | '\r' | '\t');
        match &mut self.state {
            State::Open | State::Key { .. } | State::Colon(_) | State::Value(_) | State::Comma
                if is_space =>
            {
                return Verdict::More;
            }
            State::Open if c == '{' => {
                self.depth += 1;
                self.state = State::Key { may_close: true };
            }
            State::Key { .. } if c == '"' => self.state = State::InKey(String::new()),
            State::Key { may_close: true } | State::Comma if c == '}' => return self.close(calls),
            State::Comma if c == ',' => self.state = State::Key { may_close: false },
            State::InKey(text) => {
                if c == '"' {
                    let text = std::mem::take(text);
                    let Some(key) = self.key(&text, calls) else { return Verdict::NotACall };
                    self.state = State::Colon(key);
                } else if text.len() > NAME_BYTES_MAX {
                    return Verdict::NotACall;
                } else {
                    text.push(c);
                }
            }
            State::Colon(key) if c == ':' => self.state = State::Value(*key),
            State::Value(key) => {
                let key = *key;
                return self.begin_value(key, c, calls);
            }
            State::In { .. } => return self.value(c, calls),
            State::Streaming(scan) => {
                let mut out = String::new();
                let outcome = scan.push(c, &mut out);
                calls.arguments(&out);
                match outcome {
                    ScanOutcome::More => {}
                    ScanOutcome::Done => self.state = State::Comma,
                    ScanOutcome::DoneBefore | ScanOutcome::Invalid => return Verdict::NotACall,
                }
            }
            _ => return Verdict::NotACall,
        }
        Verdict::More
    }

    /// What a key means.
    fn key(&mut self, text: &str, calls: &mut ToolCalls) -> Option<Key> {
        if !self.is_keyed {
            return Key::parse(text);
        }
        let named = self.named(&serde_json::Value::from(text).to_string(), calls);
        named.then_some(Key::Arguments)
    }

    fn begin_value(&mut self, key: Key, c: char, calls: &mut ToolCalls) -> Verdict {
        match (key, c) {
            (Key::Function, '{') if self.depth == 1 => {
                self.depth += 1;
                self.state = State::Key { may_close: true };
                return Verdict::More;
            }
            (Key::Name | Key::Function, '"') | (Key::Ignored, _) => {}
            // Some models write `null` where there are none.
            (Key::Arguments, '{' | '"' | 'n') if !self.is_complete => {}
            _ => return Verdict::NotACall,
        }
        if key == Key::Arguments && c == '{' && calls.is_open() {
            self.is_complete = true;
            self.state = State::Streaming(JsonScan::new());
        } else {
            self.state = State::In { key, scan: JsonScan::new(), text: String::new() };
        }
        self.push(c, calls)
    }

    fn value(&mut self, c: char, calls: &mut ToolCalls) -> Verdict {
        let State::In { key, scan, text } = &mut self.state else { return Verdict::NotACall };
        let outcome = scan.push(c, text);
        if outcome == ScanOutcome::More {
            return Verdict::More;
        }
        if outcome == ScanOutcome::Invalid {
            return Verdict::NotACall;
        }
        let (key, text) = (*key, std::mem::take(text));
        self.state = State::Comma;
        let known = match key {
            // `"function": "name"` is written by some, too.
            Key::Name | Key::Function => self.named(&text, calls),
            Key::Arguments => self.argued(text, calls),
            Key::Ignored => true,
        };
        match known {
            false => Verdict::NotACall,
            // A number ended before this character.
            true if outcome == ScanOutcome::DoneBefore => self.push(c, calls),
            true => Verdict::More,
        }
    }

    fn named(&mut self, text: &str, calls: &mut ToolCalls) -> bool {
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

    fn argued(&mut self, text: String, calls: &mut ToolCalls) -> bool {
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

    fn close(&mut self, calls: &mut ToolCalls) -> Verdict {
        self.depth -= 1;
        if self.depth > 0 {
            self.state = State::Comma;
            return Verdict::More;
        }
        let complete = self.name.is_some() && calls.end();
        if complete { Verdict::Done } else { Verdict::NotACall }
    }
}
