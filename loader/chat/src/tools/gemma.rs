//! The tool-call format of Gemma 4, `call:f{city:<|"|>Oslo<|"|>,days:[1,2]}`: much like JSON, with
//! keys bare and texts between marks of their own.

use serde_json::Value;
use shardpack_formats::ToolFamily;

use super::{
    calls::ToolCalls,
    input::{Expect, Input, Progress},
    marker::{Found, Markers, find, is_code},
    value::{Reading, reading, to_json},
};

/// What begins a call, what ends it, and what stands on each side of a text.
pub(super) const OPEN: &str = "<|tool_call>";
pub(super) const CLOSE: &str = "<tool_call|>";
pub(super) const QUOTE: &str = "<|\"|>";
/// Between a call's opener and the tool's name.
pub(super) const HEAD: &str = "call:";

/// Bytes of a tool's or an argument's name.
const NAME_BYTES_MAX: usize = 256;
/// Bytes of a value that is no text, list or mapping.
const WORD_BYTES_MAX: usize = 4096;
/// Deepest nesting, as for JSON.
const DEPTH_MAX: usize = 127;

/// The format's markers.
#[derive(Debug)]
pub(super) struct GemmaFormat {
    pub openers: Vec<String>,
    close: String,
    quote: String,
}

impl GemmaFormat {
    pub(super) fn marker_names(family: ToolFamily) -> Vec<&'static str> {
        if family == ToolFamily::Gemma4 { vec![OPEN, CLOSE, QUOTE] } else { Vec::new() }
    }

    pub(super) fn new(markers: &Markers) -> Self {
        Self {
            openers: vec![markers.needle(OPEN)],
            close: markers.needle(CLOSE),
            quote: markers.needle(QUOTE),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Container {
    Mapping,
    List,
}

#[derive(Debug)]
enum State {
    Head,
    Name,
    /// Before a key or the end of a mapping.
    Key,
    /// Before a value, or the end of a list.
    Value,
    /// In a text; true: in JSON's quotes.
    Text(bool),
    /// After a value within a container.
    Next,
    /// After the arguments.
    Tail,
}

/// One call.
#[derive(Debug)]
pub(super) struct GemmaSection {
    state: State,
    open: Vec<Container>,
    /// Whether the innermost container has members.
    has_members: bool,
    /// How a bare value of the outermost mapping is to be read.
    reading: Option<Reading>,
}

impl GemmaSection {
    /// After a call's opener.
    pub(super) const fn new() -> Self {
        Self { state: State::Head, open: Vec::new(), has_members: false, reading: None }
    }

    /// Advances over what is at hand.
    pub(crate) fn step(
        &mut self,
        format: &GemmaFormat,
        input: &mut Input,
        calls: &mut ToolCalls,
    ) -> Progress {
        match self.state {
            State::Head => {
                input.skip_space();
                match input.expect(HEAD) {
                    Expect::Taken => self.state = State::Name,
                    Expect::Wait => return Progress::Wait,
                    Expect::Other => return Progress::NotACall,
                }
                Progress::Again
            }
            State::Name => self.name(input, calls),
            State::Key => self.key(format, input, calls),
            State::Value => self.value(format, input, calls),
            State::Text(is_json) => self.text(is_json, format, input, calls),
            State::Next => self.next(input, calls),
            State::Tail => {
                input.skip_space();
                match input.expect(&format.close) {
                    Expect::Wait => Progress::Wait,
                    // A model that forgets to close its call has made it all the same.
                    _ => Progress::Leave,
                }
            }
        }
    }

    fn name(&mut self, input: &mut Input, calls: &mut ToolCalls) -> Progress {
        let name = match input.until(&["{"], NAME_BYTES_MAX, "") {
            Ok(name) => name,
            Err(progress) => return progress,
        };
        if !calls.begin(name.trim(), None) {
            return Progress::NotACall;
        }
        self.enter(Container::Mapping, calls)
    }

    fn enter(&mut self, container: Container, calls: &mut ToolCalls) -> Progress {
        if self.open.len() >= DEPTH_MAX {
            return Progress::NotACall;
        }
        self.open.push(container);
        self.has_members = false;
        let (mark, state) = match container {
            Container::Mapping => ("{", State::Key),
            Container::List => ("[", State::Value),
        };
        calls.arguments(mark);
        self.state = state;
        Progress::Again
    }

    /// After the end of a container.
    fn leave(&mut self, calls: &mut ToolCalls) -> Progress {
        let Some(container) = self.open.pop() else { return Progress::NotACall };
        calls.arguments(if container == Container::Mapping { "}" } else { "]" });
        self.has_members = true;
        self.state = State::Next;
        if self.open.is_empty() {
            self.state = State::Tail;
            if !calls.end() {
                return Progress::NotACall;
            }
        }
        Progress::Again
    }

    fn separate(&mut self, calls: &mut ToolCalls) {
        if std::mem::replace(&mut self.has_members, true) {
            calls.arguments(", ");
        }
    }

    fn key(&mut self, format: &GemmaFormat, input: &mut Input, calls: &mut ToolCalls) -> Progress {
        input.skip_space();
        match input.expect("}") {
            Expect::Taken => return self.leave(calls),
            Expect::Wait => return Progress::Wait,
            Expect::Other => {}
        }
        let quote = match (input.sees(&format.quote), input.sees("\"")) {
            (Expect::Taken, _) => format.quote.as_str(),
            (_, Expect::Taken) => "\"",
            (Expect::Wait, _) => return Progress::Wait,
            _ => "",
        };
        let text = &input.text()[quote.len()..];
        let (end, len) = match find(text, &[if quote.is_empty() { ":" } else { quote }]) {
            Found::At(end, _) => (end, end + 2 * quote.len()),
            Found::NotBefore(safe) if safe <= NAME_BYTES_MAX && !input.ended => {
                return Progress::Wait;
            }
            Found::NotBefore(_) => return Progress::NotACall,
        };
        let key = text[..end].trim().to_owned();
        // The colon comes right behind, or else this is no key.
        let colon = input.text()[len..].trim_start();
        if colon.is_empty() && !input.ended {
            return Progress::Wait;
        }
        if key.is_empty()
            || end > NAME_BYTES_MAX
            || key.contains(is_code)
            || !colon.starts_with(':')
        {
            return Progress::NotACall;
        }
        let taken = input.text().len() - colon.len() + 1;
        input.take(taken);
        self.separate(calls);
        calls.arguments(&format!("{}: ", Value::from(key.as_str())));
        if self.open.len() == 1 {
            self.reading = Some(reading(calls.argument(&key).as_ref()));
        }
        self.state = State::Value;
        Progress::Again
    }

    fn value(
        &mut self,
        format: &GemmaFormat,
        input: &mut Input,
        calls: &mut ToolCalls,
    ) -> Progress {
        input.skip_space();
        let in_list = self.open.last() == Some(&Container::List);
        match input.sees(&format.quote) {
            Expect::Taken => {
                input.take(format.quote.len());
                return self.begin_text(false, in_list, calls);
            }
            Expect::Wait => return Progress::Wait,
            Expect::Other => {}
        }
        match input.text().chars().next() {
            Some(']') if in_list => {
                input.take(1);
                self.leave(calls)
            }
            Some('"') => {
                input.take(1);
                self.begin_text(true, in_list, calls)
            }
            Some(c @ ('{' | '[')) => {
                input.take(1);
                if in_list {
                    self.separate(calls);
                }
                let container = if c == '{' { Container::Mapping } else { Container::List };
                self.enter(container, calls)
            }
            _ => self.word(in_list, input, calls),
        }
    }

    fn begin_text(&mut self, is_json: bool, in_list: bool, calls: &mut ToolCalls) -> Progress {
        if in_list {
            self.separate(calls);
        }
        if !is_json {
            calls.arguments("\"");
        }
        self.state = State::Text(is_json);
        Progress::Again
    }

    /// A number, a literal, or a text that the model left bare.
    fn word(&mut self, in_list: bool, input: &mut Input, calls: &mut ToolCalls) -> Progress {
        let end = match input.peek_until(&[",", "}", "]"], WORD_BYTES_MAX) {
            Ok(end) => end,
            Err(progress) => return progress,
        };
        if end == 0 {
            return Progress::NotACall;
        }
        let word = input.take(end);
        let own = if self.open.len() == 1 { self.reading } else { None };
        if in_list {
            self.separate(calls);
        }
        calls.arguments(&to_json(word.trim(), own.unwrap_or_else(|| reading(None))));
        self.state = State::Next;
        Progress::Again
    }

    fn text(
        &mut self,
        is_json: bool,
        format: &GemmaFormat,
        input: &mut Input,
        calls: &mut ToolCalls,
    ) -> Progress {
        if is_json {
            return self.json_text(input, calls);
        }
        let (end, is_over) = match find(input.text(), &[&format.quote]) {
            Found::At(end, _) => (end, true),
            Found::NotBefore(_) if input.ended => return Progress::NotACall,
            Found::NotBefore(safe) => (safe, false),
        };
        let text = input.take(end);
        if text.contains(is_code) {
            return Progress::NotACall;
        }
        let quoted = Value::from(text).to_string();
        calls.arguments(&quoted[1..quoted.len() - 1]);
        if !is_over {
            return Progress::Wait;
        }
        input.take(format.quote.len());
        calls.arguments("\"");
        self.state = State::Next;
        Progress::Again
    }

    /// A text in JSON's quotes, the first of which was taken.
    fn json_text(&mut self, input: &mut Input, calls: &mut ToolCalls) -> Progress {
        let mut escaped = false;
        let end = input.text().find(|c: char| {
            let ends = c == '"' && !escaped;
            escaped = c == '\\' && !escaped;
            ends
        });
        let Some(end) = end else {
            return if input.ended { Progress::NotACall } else { Progress::Wait };
        };
        let text = input.take(end + 1);
        let whole = serde_json::from_str::<String>(&format!("\"{text}"));
        let Some(text) = whole.ok().filter(|text| !text.contains(is_code)) else {
            return Progress::NotACall;
        };
        calls.arguments(&Value::from(text).to_string());
        self.state = State::Next;
        Progress::Again
    }

    fn next(&mut self, input: &mut Input, calls: &mut ToolCalls) -> Progress {
        input.skip_space();
        let Some(c) = input.text().chars().next() else {
            return if input.ended { Progress::NotACall } else { Progress::Wait };
        };
        let container = self.open.last().copied();
        match (c, container) {
            (',', Some(container)) => {
                input.take(1);
                self.has_members = true;
                self.state = if container == Container::List { State::Value } else { State::Key };
                Progress::Again
            }
            ('}', Some(Container::Mapping)) | (']', Some(Container::List)) => {
                input.take(1);
                self.leave(calls)
            }
            _ => Progress::NotACall,
        }
    }
}
