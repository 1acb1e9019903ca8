//! The tool-call format of `MiniMax` M3, `<invoke
//! name="f"><city>Oslo</city><days><item>1</item></days></invoke>`, each tag behind a marker of its
//! own: arguments are named by their tags, objects are tags within tags, lists are members in tags
//! of one name. The tool's schema says what each text means.

use serde_json::Value;
use shardpack_formats::ToolFamily;

use super::{
    calls::ToolCalls,
    input::{Expect, Input, Progress},
    marker::{Markers, is_code},
    value::{Reading, reading},
};

mod tree;

use tree::{End, Outcome};

/// What stands before every tag. One token to the published tokenizer, so that texts cannot hold
/// it.
pub(super) const MARK: &str = "]<]minimax[>[";
pub(super) const SECTION_OPEN: &str = "<tool_call>";
pub(super) const SECTION_CLOSE: &str = "</tool_call>";
pub(super) const CALL_OPEN: &str = "<invoke name=\"";
const CALL_NAME_CLOSE: &str = "\">";
pub(super) const CALL_CLOSE: &str = "</invoke>";
/// The tag about each member of a list.
pub(super) const ITEM: &str = "item";

/// Bytes of a tool's or an argument's name.
const NAME_BYTES_MAX: usize = 256;

/// The format's tags.
#[derive(Debug)]
pub(super) struct MinimaxFormat {
    pub openers: Vec<String>,
    mark: String,
    section_close: String,
}

impl MinimaxFormat {
    pub(super) fn marker_names(family: ToolFamily) -> Vec<&'static str> {
        if family == ToolFamily::MinimaxM3 {
            vec![MARK, SECTION_OPEN, SECTION_CLOSE]
        } else {
            Vec::new()
        }
    }

    pub(super) fn new(markers: &Markers) -> Self {
        let mark = markers.needle(MARK);
        let section = markers.needle(SECTION_OPEN);
        Self {
            // Models forget the mark before a section, and the section about a call.
            openers: vec![mark.clone() + &section, mark.clone() + CALL_OPEN, section],
            section_close: markers.needle(SECTION_CLOSE),
            mark,
        }
    }
}

#[derive(Debug)]
enum State {
    Between,
    Name,
    /// Before an argument or the call's end.
    Arguments,
    /// In an argument's name.
    Key,
    /// In an argument's value that is a text whatever it looks like; its name.
    Text(String),
    /// In one whose end tells its meaning; its name.
    Tree(String),
}

/// One section.
#[derive(Debug)]
pub(super) struct MinimaxSection {
    state: State,
    /// Arguments of the open call so far.
    count: usize,
    /// Whether a call was completed within.
    any: bool,
}

impl MinimaxSection {
    /// After the opener of that number.
    pub(super) const fn new(opener: usize) -> Self {
        let state = if opener == 1 { State::Name } else { State::Between };
        Self { state, count: 0, any: false }
    }

    /// Advances over what is at hand.
    pub(super) fn step(
        &mut self,
        format: &MinimaxFormat,
        input: &mut Input,
        calls: &mut ToolCalls,
    ) -> Progress {
        match &mut self.state {
            State::Between => self.between(format, input),
            State::Name => self.name(input, calls),
            State::Arguments => self.params(format, input, calls),
            State::Key => self.key(input, calls),
            State::Text(key) => {
                let key = std::mem::take(key);
                self.text(key, format, input, calls)
            }
            State::Tree(key) => {
                let schemas = || calls.argument(key);
                match tree::read(key, &format.mark, input.text(), schemas) {
                    Outcome::Value(json, len) => {
                        calls.arguments(&json);
                        input.take(len);
                        self.state = State::Arguments;
                        Progress::Again
                    }
                    Outcome::More if !input.ended => Progress::Wait,
                    Outcome::More | Outcome::NotAValue => Progress::NotACall,
                }
            }
        }
    }

    fn between(&mut self, format: &MinimaxFormat, input: &mut Input) -> Progress {
        match sees_tag(input, &format.mark, &[CALL_OPEN, &format.section_close]) {
            Tag::One(0, len) => {
                input.take(len);
                self.state = State::Name;
                Progress::Again
            }
            Tag::One(_, len) => {
                input.take(len);
                Progress::Leave
            }
            Tag::Wait => Progress::Wait,
            // A model that forgets to close its section has made its calls all the same.
            Tag::Other if self.any => Progress::Leave,
            Tag::Other => Progress::NotACall,
        }
    }

    fn name(&mut self, input: &mut Input, calls: &mut ToolCalls) -> Progress {
        let name = match input.until(&[CALL_NAME_CLOSE], NAME_BYTES_MAX, "") {
            Ok(name) => name,
            Err(progress) => return progress,
        };
        if !calls.begin(name.trim(), None) {
            return Progress::NotACall;
        }
        self.count = 0;
        self.state = State::Arguments;
        Progress::Again
    }

    fn params(
        &mut self,
        format: &MinimaxFormat,
        input: &mut Input,
        calls: &mut ToolCalls,
    ) -> Progress {
        match sees_tag(input, &format.mark, &[CALL_CLOSE, CALL_OPEN, &format.section_close, "<"]) {
            Tag::One(3, len) => {
                input.take(len);
                self.state = State::Key;
            }
            // A call is over where the next one begins, though the model forgot to close it.
            Tag::One(which, len) => {
                if which == 0 {
                    input.take(len);
                }
                return self.end(calls);
            }
            // At the end of the answer too, if it has all that it needs.
            _ if input.ended && input.text().is_empty() && calls.has_required("}") => {
                return self.end(calls);
            }
            Tag::Wait => return Progress::Wait,
            Tag::Other => return Progress::NotACall,
        }
        Progress::Again
    }

    fn end(&mut self, calls: &mut ToolCalls) -> Progress {
        if self.count > 0 {
            calls.arguments("}");
        }
        if !calls.end() {
            return Progress::NotACall;
        }
        self.any = true;
        self.state = State::Between;
        Progress::Again
    }

    fn key(&mut self, input: &mut Input, calls: &mut ToolCalls) -> Progress {
        let key = match input.until(&[">"], NAME_BYTES_MAX, "") {
            Ok(key) if tree::is_name(&key) => key,
            Ok(_) => return Progress::NotACall,
            Err(progress) => return progress,
        };
        let separator = if self.count == 0 { "{" } else { ", " };
        calls.arguments(&format!("{separator}{}: ", Value::from(key.as_str())));
        self.count += 1;
        self.state = if reading(calls.argument(&key).as_ref()) == Reading::Text {
            calls.arguments("\"");
            State::Text(key)
        } else {
            State::Tree(key)
        };
        Progress::Again
    }

    /// Passes a text on as it comes.
    fn text(
        &mut self,
        key: String,
        format: &MinimaxFormat,
        input: &mut Input,
        calls: &mut ToolCalls,
    ) -> Progress {
        let (end, close) = match tree::text_end(&key, &format.mark, input.text()) {
            End::At(end, close) => (end, Some(close)),
            End::NotBefore(_) if input.ended => return Progress::NotACall,
            End::NotBefore(safe) => (safe, None),
        };
        let text = input.take(end);
        if text.contains(is_code) {
            return Progress::NotACall;
        }
        let quoted = Value::from(text).to_string();
        calls.arguments(&quoted[1..quoted.len() - 1]);
        let Some(close) = close else {
            self.state = State::Text(key);
            return Progress::Wait;
        };
        input.take(close);
        calls.arguments("\"");
        self.state = State::Arguments;
        Progress::Again
    }
}

/// Which of some tags comes next.
enum Tag {
    /// The one of that number, which ends after so many bytes.
    One(usize, usize),
    Wait,
    Other,
}

/// Which tag comes next after white space and the mark, which models forget.
fn sees_tag(input: &mut Input, mark: &str, tags: &[&str]) -> Tag {
    input.skip_space();
    let marked = match input.sees(mark) {
        Expect::Taken => mark.len(),
        Expect::Wait => return Tag::Wait,
        Expect::Other => 0,
    };
    // Some put white space behind the mark, too.
    let rest = input.text()[marked..].trim_start();
    let before = input.text().len() - rest.len();
    if let Some((number, tag)) = tags
        .iter()
        .enumerate()
        .find(|(_, tag)| rest.starts_with(**tag) && !is_begun(tags, tag, rest))
    {
        return Tag::One(number, before + tag.len());
    }
    if !input.ended && tags.iter().any(|tag| tag.starts_with(rest)) {
        return Tag::Wait;
    }
    Tag::Other
}

/// Whether what comes next may yet become a longer tag than this one.
fn is_begun(tags: &[&str], tag: &str, rest: &str) -> bool {
    tags.iter().any(|other| other.len() > tag.len() && other.starts_with(rest))
}
