//! Tool-call formats with each argument as bare text between tags (Qwen3-Coder, GLM,
//! `MiniMax`, Seed-OSS, Hunyuan 3, DeepSeek V3.2); the tool's schema says what each text means.

use shardpack_formats::ToolFamily;

use super::{
    calls::ToolCalls,
    input::{Expect, Input, Progress},
    marker::{Found, Markers, find, is_code},
    value::{Reading, reading, to_json, told},
};

/// Bytes of a tool's or an argument's name.
const NAME_BYTES_MAX: usize = 256;
/// What DeepSeek's tags have within, which may be a token though the tags are none.
pub(super) const DSML: &str = "｜DSML｜";

/// The tags of a family of this kind.
#[derive(Debug)]
pub(super) struct TaggedArgumentFormat {
    /// What begins a section.
    pub openers: Vec<String>,
    /// Begins a call within a section; empty: the section is the call.
    call_open: String,
    /// Ends the tool's name; empty: a line end or the next tag does.
    name_close: String,
    key_open: String,
    key_close: String,
    /// Between key and value; empty: nothing.
    value_open: String,
    value_close: String,
    call_close: String,
    /// Ends the section; empty: the call's end does.
    section_close: String,
    /// Whether one line break on each side of a value is the format's.
    trims_lines: bool,
    /// Whether a key says with `" string="true` or `false` that its value is text or JSON.
    tells_text: bool,
}

/// A family's openers, and its tags in the order of the format's fields.
type Names = (&'static [&'static str], [&'static str; 8]);

/// What Qwen3-Coder and Seed-OSS write within their sections.
const fn functions(openers: &'static [&'static str], section_close: &'static str) -> Names {
    let [open, close] = ["<function=", "</function>"];
    (openers, [open, ">", "<parameter=", ">", "", "</parameter>", close, section_close])
}

/// What DeepSeek writes within its sections.
const fn dsml(openers: &'static [&'static str], section_close: &'static str) -> Names {
    let [open, close] = ["<｜DSML｜invoke name=\"", "</｜DSML｜invoke>"];
    let [key, value_close] = ["<｜DSML｜parameter name=\"", "</｜DSML｜parameter>"];
    (openers, [open, "\">", key, "\">", "", value_close, close, section_close])
}

const fn names(family: ToolFamily) -> Option<Names> {
    Some(match family {
        ToolFamily::QwenXml => functions(&["<tool_call>", "<function="], "</tool_call>"),
        ToolFamily::SeedXml => functions(&["<seed:tool_call>", "<function="], "</seed:tool_call>"),
        ToolFamily::HunyuanXml => (
            &["<tool_calls:opensource>", "<tool_call:opensource>"],
            [
                "<tool_call:opensource>",
                "<tool_sep:opensource>",
                "<arg_key:opensource>",
                "</arg_key:opensource>",
                "<arg_value:opensource>",
                "</arg_value:opensource>",
                "</tool_call:opensource>",
                "</tool_calls:opensource>",
            ],
        ),
        ToolFamily::Glm4 => (
            &["<tool_call>"],
            ["", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>", ""],
        ),
        ToolFamily::MinimaxM2 => (
            &["<minimax:tool_call>", "<invoke name=\""],
            [
                "<invoke name=\"",
                "\">",
                "<parameter name=\"",
                "\">",
                "",
                "</parameter>",
                "</invoke>",
                "</minimax:tool_call>",
            ],
        ),
        ToolFamily::DeepseekV32 => dsml(
            &["<｜DSML｜function_calls>", "<｜DSML｜invoke name=\""],
            "</｜DSML｜function_calls>",
        ),
        ToolFamily::DeepseekV4 => {
            dsml(&["<｜DSML｜tool_calls>", "<｜DSML｜invoke name=\""], "</｜DSML｜tool_calls>")
        }
        _ => return None,
    })
}

/// Whether a family's tags have DeepSeek's token within.
pub(super) const fn has_dsml(family: ToolFamily) -> bool {
    matches!(family, ToolFamily::DeepseekV32 | ToolFamily::DeepseekV4)
}

impl TaggedArgumentFormat {
    /// Every tag of the family, for [`Markers::new`].
    pub(super) fn marker_names(family: ToolFamily) -> Vec<&'static str> {
        let Some((openers, tags)) = names(family) else { return Vec::new() };
        if has_dsml(family) {
            return vec![DSML];
        }
        let mut all: Vec<_> = openers.iter().copied().chain(tags).collect();
        all.retain(|tag| tag.starts_with('<') && tag.ends_with('>'));
        all.sort_unstable();
        all.dedup();
        all
    }

    /// The format of a family of this kind.
    pub(super) fn new(family: ToolFamily, markers: &Markers) -> Option<Self> {
        let (openers, tags) = names(family)?;
        let needle = |tag: &'static str| match tag {
            "" => String::new(),
            tag if tag.contains(DSML) => tag.replace(DSML, &markers.needle(DSML)),
            tag => markers.needle(tag),
        };
        let [
            call_open,
            name_close,
            key_open,
            key_close,
            value_open,
            value_close,
            call_close,
            section_close,
        ] = tags.map(needle);
        Some(Self {
            openers: openers.iter().map(|tag| needle(tag)).collect(),
            call_open,
            name_close,
            key_open,
            key_close,
            value_open,
            value_close,
            call_close,
            section_close,
            trims_lines: family == ToolFamily::QwenXml,
            tells_text: has_dsml(family),
        })
    }
}

#[derive(Debug)]
enum State {
    Between,
    Name,
    /// Before a key or the call's end.
    Arguments,
    Key,
    BeforeValue(String),
    Value(Reading),
    /// After the last call of a section without an end of its own.
    Tail,
}

/// One section.
#[derive(Debug)]
pub(super) struct TaggedArgumentSection {
    state: State,
    /// Arguments of the open call so far.
    count: usize,
    /// Whether the open value's beginning was passed on already.
    begun: bool,
    /// Whether a call was completed within.
    any: bool,
}

impl TaggedArgumentSection {
    /// After the opener of that number.
    pub(super) fn new(format: &TaggedArgumentFormat, opener: usize) -> Self {
        // The opener of a call stands for that of its section, which models forget.
        let in_call = opener > 0 || format.call_open.is_empty();
        let state = if in_call { State::Name } else { State::Between };
        Self { state, count: 0, begun: false, any: false }
    }

    /// Advances over what is at hand.
    pub(crate) fn step(
        &mut self,
        format: &TaggedArgumentFormat,
        input: &mut Input,
        calls: &mut ToolCalls,
    ) -> Progress {
        match &self.state {
            State::Between => self.between(format, input),
            State::Name => self.name(format, input, calls),
            State::Arguments => self.params(format, input, calls),
            State::Key => self.key(format, input),
            State::BeforeValue(_) => self.before_value(format, input, calls),
            State::Value(reading) => {
                let reading = *reading;
                self.value(reading, format, input, calls)
            }
            State::Tail => Progress::Leave,
        }
    }

    fn between(&mut self, format: &TaggedArgumentFormat, input: &mut Input) -> Progress {
        input.skip_space();
        match (input.expect(&format.call_open), input.sees(&format.section_close)) {
            (Expect::Taken, _) => {
                self.state = State::Name;
                Progress::Again
            }
            (_, Expect::Taken) => {
                input.expect(&format.section_close);
                Progress::Leave
            }
            (Expect::Wait, _) | (_, Expect::Wait) => Progress::Wait,
            // A model that forgets to close its section has made its calls all the same.
            _ if self.any => Progress::Leave,
            _ => Progress::NotACall,
        }
    }

    fn name(
        &mut self,
        format: &TaggedArgumentFormat,
        input: &mut Input,
        calls: &mut ToolCalls,
    ) -> Progress {
        let taken = if format.name_close.is_empty() {
            // The end is not the name's own and stays.
            match input.peek_until(&[&format.key_open, &format.call_close], NAME_BYTES_MAX) {
                Ok(len) => Ok(input.take(len)),
                // A call without arguments, whose end the model forgot.
                Err(_) if input.ended && input.text().len() <= NAME_BYTES_MAX => {
                    Ok(input.take_all())
                }
                Err(progress) => Err(progress),
            }
        } else {
            input.until(&[&format.name_close], NAME_BYTES_MAX, "")
        };
        let name = match taken {
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
        format: &TaggedArgumentFormat,
        input: &mut Input,
        calls: &mut ToolCalls,
    ) -> Progress {
        input.skip_space();
        let next = [input.expect(&format.key_open), input.expect(&format.call_close)];
        match next {
            [Expect::Taken, _] => {
                self.state = State::Key;
                Progress::Again
            }
            [_, Expect::Taken] => self.end(format, calls),
            // A call is over where the next one begins or its section ends, though the model forgot to
            // close it; and at the end of the answer, if it has all that it needs.
            _ => match Self::sees_end(format, input) {
                Expect::Taken => self.end(format, calls),
                _ if input.ended && input.text().is_empty() && calls.has_required("}") => {
                    self.end(format, calls)
                }
                Expect::Wait => Progress::Wait,
                _ if next.contains(&Expect::Wait) => Progress::Wait,
                Expect::Other => Progress::NotACall,
            },
        }
    }

    /// Whether something comes next that only stands behind a call.
    fn sees_end(format: &TaggedArgumentFormat, input: &Input) -> Expect {
        let mut seen = Expect::Other;
        for tag in format.openers.iter().chain([&format.call_open, &format.section_close]) {
            match input.sees(tag) {
                _ if tag.is_empty() => {}
                Expect::Taken => return Expect::Taken,
                Expect::Wait => seen = Expect::Wait,
                Expect::Other => {}
            }
        }
        seen
    }

    /// The end of a call.
    fn end(&mut self, format: &TaggedArgumentFormat, calls: &mut ToolCalls) -> Progress {
        if self.count > 0 {
            calls.arguments("}");
        }
        if !calls.end() {
            return Progress::NotACall;
        }
        self.any = true;
        let over = format.section_close.is_empty();
        self.state = if over { State::Tail } else { State::Between };
        Progress::Again
    }

    fn key(&mut self, format: &TaggedArgumentFormat, input: &mut Input) -> Progress {
        let key = match input.until(&[&format.key_close], NAME_BYTES_MAX, "") {
            Ok(key) => key,
            Err(progress) => return progress,
        };
        self.state = State::BeforeValue(key);
        Progress::Again
    }

    fn before_value(
        &mut self,
        format: &TaggedArgumentFormat,
        input: &mut Input,
        calls: &mut ToolCalls,
    ) -> Progress {
        if !format.value_open.is_empty() {
            input.skip_space();
            match input.expect(&format.value_open) {
                Expect::Taken => {}
                Expect::Wait => return Progress::Wait,
                Expect::Other => return Progress::NotACall,
            }
        } else if format.trims_lines && input.text().is_empty() && !input.ended {
            return Progress::Wait;
        }
        if format.trims_lines {
            input.expect("\n");
        }
        let State::BeforeValue(key) = &self.state else { return Progress::NotACall };
        let (key, reading) = match split(key.trim()).filter(|_| format.tells_text) {
            Some((key, is_text)) => (key, told(calls.argument(key).as_ref(), is_text)),
            None => (key.trim(), reading(calls.argument(key.trim()).as_ref())),
        };
        let separator = if self.count == 0 { "{" } else { ", " };
        calls.arguments(&format!("{separator}{}: ", serde_json::Value::from(key)));
        self.count += 1;
        self.begun = false;
        self.state = State::Value(reading);
        Progress::Again
    }

    fn value(
        &mut self,
        reading: Reading,
        format: &TaggedArgumentFormat,
        input: &mut Input,
        calls: &mut ToolCalls,
    ) -> Progress {
        let text = input.text();
        let (end, is_over) = match Self::value_end(format, input) {
            Ending::At(end) => (end, true),
            Ending::NotBefore(_) if input.ended => return Progress::NotACall,
            Ending::NotBefore(safe) => (safe, false),
        };
        let mut value = text[..end].to_owned();
        if is_over && format.trims_lines {
            value.truncate(value.strip_suffix('\n').unwrap_or(&value).len());
        } else if !is_over && format.trims_lines && value.ends_with('\n') {
            // It may be the format's own.
            value.pop();
        }
        if value.contains(is_code) {
            return Progress::NotACall;
        }
        if reading == Reading::Text {
            let quoted = serde_json::Value::from(value.as_str()).to_string();
            let inner = &quoted[1..quoted.len() - 1];
            if !self.begun {
                calls.arguments("\"");
                self.begun = true;
            }
            calls.arguments(inner);
        } else if is_over {
            calls.arguments(&to_json(&value, reading));
        } else {
            return Progress::Wait;
        }
        if !is_over {
            let len = value.len();
            input.take(len);
            return Progress::Wait;
        }
        if self.begun {
            calls.arguments("\"");
        }
        input.take(end);
        input.expect(&format.value_close);
        self.state = State::Arguments;
        Progress::Again
    }

    /// A value ends at its closing tag if that is followed by what follows a value: texts may
    /// hold the tag themselves.
    fn value_end(format: &TaggedArgumentFormat, input: &Input) -> Ending {
        let text = input.text();
        let mut from = 0;
        loop {
            match find(&text[from..], &[&format.value_close]) {
                Found::NotBefore(safe) => return Ending::NotBefore(from + safe),
                Found::At(at, _) => {
                    let at = from + at;
                    let after = text[at + format.value_close.len()..].trim_start();
                    if input.ended && after.is_empty() {
                        return Ending::At(at);
                    }
                    let next = || {
                        let tags = [&format.key_open, &format.call_close, &format.call_open];
                        let tags = tags.into_iter().chain([&format.section_close]);
                        tags.chain(&format.openers).filter(|tag| !tag.is_empty())
                    };
                    if next().any(|next| after.starts_with(next.as_str())) {
                        return Ending::At(at);
                    }
                    if next().any(|next| next.starts_with(after)) {
                        return Ending::NotBefore(at);
                    }
                    from = at + format.value_close.len();
                }
            }
        }
    }
}

/// An argument's name and whether its value is said to be text.
fn split(key: &str) -> Option<(&str, bool)> {
    let text = key.strip_suffix("\" string=\"true").map(|name| (name, true));
    text.or_else(|| key.strip_suffix("\" string=\"false").map(|name| (name, false)))
}

/// Where a value ends.
enum Ending {
    At(usize),
    /// Not within the first so many bytes.
    NotBefore(usize),
}
