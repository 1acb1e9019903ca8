//! The output parser: tokens in; content, reasoning and tool calls out. Any output becomes one of
//! the three, independent of how its text was cut into tokens.

use std::sync::Arc;

use shardpack_engine_api::TokenId;
use shardpack_formats::{AnswerFrame, OutputStyle, ThinkingStyle, ToolFamily};

use super::{
    calls::{IdStyle, ToolCalls, ToolSpec},
    gemma::{GemmaFormat, GemmaSection},
    harmony::{Harmony, HarmonyFormat},
    input::{Input, Progress},
    json_calls::{JsonCallFormat, JsonCallSection},
    marker::{Found, Markers, find, is_code, sanitise},
    minimax::{MinimaxFormat, MinimaxSection},
    pythonic::PythonicSection,
    tagged_arguments::{TaggedArgumentFormat, TaggedArgumentSection},
};
use crate::conversation::{OutputDelta, OutputParser, PlainText};

/// A model's output format: reasoning tags and tool-call format, resolved against its tokenizer.
#[derive(Debug)]
pub struct OutputFormat {
    style: OutputStyle,
    markers: Markers,
    calls: ToolCallFormat,
    /// What opens and closes thinking.
    thinking: Option<(String, String)>,
    /// Whether thinking may open anywhere: its marker is a token, which texts cannot spell.
    thinks_anywhere: bool,
    /// Tags that may stand around the answer.
    frame: Option<(String, String)>,
    /// Markers that are neither part of the answer nor of a call.
    silent: Vec<String>,
    /// Calls in the generic format besides the family's own, where the prompt may have taught it.
    generic: Option<JsonCallFormat>,
}

/// The family of the generic format.
pub(super) const GENERIC: ToolFamily = ToolFamily::JsonTags;

#[derive(Debug)]
enum ToolCallFormat {
    None,
    JsonCalls(JsonCallFormat),
    /// Calls in Python, and what stands around them.
    Pythonic {
        openers: Vec<String>,
        closers: Vec<String>,
        /// What they write as well.
        json: Option<JsonCallFormat>,
        /// Whether each has a line of its own.
        is_lines: bool,
    },
    TaggedArguments(TaggedArgumentFormat),
    Gemma(GemmaFormat),
    Minimax(MinimaxFormat),
    Harmony(HarmonyFormat),
}

/// What begins calls in Python, and what ends them.
pub(crate) const fn pythonic_names(
    family: ToolFamily,
) -> Option<(&'static [&'static str], &'static str)> {
    Some(match family {
        ToolFamily::LlamaPythonic => (&["<|python_tag|>", "<|python_start|>"], "<|python_end|>"),
        ToolFamily::Lfm2 => (&["<|tool_call_start|>"], "<|tool_call_end|>"),
        ToolFamily::Olmo3 => (&["<function_calls>"], "</function_calls>"),
        _ => return None,
    })
}

impl OutputFormat {
    /// `token_id` looks a text up among the tokenizer's added tokens, which text cannot spell.
    pub fn new(style: OutputStyle, token_id: impl Fn(&str) -> Option<TokenId>) -> Self {
        Self::build(style, None, token_id)
    }

    /// For a template that shows the model no tools: the prompt teaches the generic format, and the
    /// model writes that or its family's own.
    pub fn with_generic_calls(
        style: OutputStyle,
        token_id: impl Fn(&str) -> Option<TokenId>,
    ) -> Self {
        // Families that begin their calls with the same tag write other things in it.
        let shares_tag = matches!(
            style.tools,
            None | Some(
                GENERIC
                    | ToolFamily::QwenXml
                    | ToolFamily::Glm4
                    | ToolFamily::MinimaxM3
                    | ToolFamily::Harmony
            )
        );
        Self::build(style, (!shares_tag).then_some(GENERIC), token_id)
    }

    fn build(
        style: OutputStyle,
        generic: Option<ToolFamily>,
        token_id: impl Fn(&str) -> Option<TokenId>,
    ) -> Self {
        let tags = style.thinking.and_then(ThinkingStyle::tags);
        let mut names: Vec<&'static str> = match style.tools {
            Some(ToolFamily::Harmony) => HarmonyFormat::marker_names(),
            Some(family) => {
                let mut names = JsonCallFormat::marker_names(family);
                names.extend(TaggedArgumentFormat::marker_names(family));
                names.extend(GemmaFormat::marker_names(family));
                names.extend(MinimaxFormat::marker_names(family));
                if let Some((openers, closer)) = pythonic_names(family) {
                    names.extend(openers.iter().chain([&closer]));
                }
                names
            }
            None if style.thinking == Some(ThinkingStyle::Channels) => {
                HarmonyFormat::marker_names()
            }
            None => Vec::new(),
        };
        names.extend(generic.into_iter().flat_map(JsonCallFormat::marker_names));
        names.extend(tags.into_iter().flat_map(|(open, close)| [open, close]));
        let silent = style.answer.map_or(&[][..], AnswerFrame::silent);
        names.extend(silent.iter().map(|(name, _)| name));
        let frame = style.answer.and_then(AnswerFrame::tags);
        names.extend(frame.into_iter().flat_map(|(open, close)| [open, close]));
        names.sort_unstable();
        names.dedup();
        let markers = Markers::new(&names, token_id);
        let needles = |(open, close)| (markers.needle(open), markers.needle(close));
        let thinking = tags
            .map(needles)
            .map(|(open, close)| (open + style.thinking.map_or("", ThinkingStyle::label), close));
        Self {
            style,
            calls: Self::call_format(style, &markers),
            thinking,
            thinks_anywhere: tags.is_some_and(|(open, _)| markers.token(open).is_some()),
            frame: frame.map(needles),
            silent: silent.iter().map(|(name, rest)| markers.needle(name) + rest).collect(),
            generic: generic.and_then(|family| JsonCallFormat::new(family, &markers)),
            markers,
        }
    }

    fn call_format(style: OutputStyle, markers: &Markers) -> ToolCallFormat {
        let Some(family) = style.tools else {
            let channels = style.thinking == Some(ThinkingStyle::Channels);
            return if channels {
                ToolCallFormat::Harmony(HarmonyFormat::new(markers))
            } else {
                ToolCallFormat::None
            };
        };
        if let Some((openers, closer)) = pythonic_names(family) {
            let json = match family {
                ToolFamily::LlamaPythonic => Some(ToolFamily::LlamaJson),
                ToolFamily::Lfm2 => Some(family),
                _ => None,
            };
            return ToolCallFormat::Pythonic {
                openers: openers.iter().map(|name| markers.needle(name)).collect(),
                closers: vec![markers.needle(closer)],
                json: json.and_then(|json| JsonCallFormat::new(json, markers)),
                is_lines: family == ToolFamily::Olmo3,
            };
        }
        match family {
            ToolFamily::Harmony => ToolCallFormat::Harmony(HarmonyFormat::new(markers)),
            ToolFamily::Gemma4 => ToolCallFormat::Gemma(GemmaFormat::new(markers)),
            ToolFamily::MinimaxM3 => ToolCallFormat::Minimax(MinimaxFormat::new(markers)),
            family => JsonCallFormat::new(family, markers)
                .map(ToolCallFormat::JsonCalls)
                .or_else(|| {
                    TaggedArgumentFormat::new(family, markers).map(ToolCallFormat::TaggedArguments)
                })
                .expect("every family is of one kind"),
        }
    }

    /// The style that it was made for.
    #[must_use]
    pub const fn style(&self) -> OutputStyle {
        self.style
    }

    /// The token of a marker, if the tokenizer has one.
    #[must_use]
    pub fn marker_token(&self, name: &str) -> Option<TokenId> {
        self.markers.token(name)
    }

    /// Whether a rendered prompt leaves thinking open, so that the answer begins within it.
    pub fn prompt_opens_thinking(&self, prompt: &str) -> bool {
        let Some((open, close)) = self.style.thinking.and_then(ThinkingStyle::tags) else {
            return false;
        };
        // Only the end of the prompt is the assistant's; the rest may speak of thinking.
        let label = self.style.thinking.map_or("", ThinkingStyle::label);
        let prompt = prompt.trim_end();
        let prompt = prompt.strip_suffix(label.trim_end()).unwrap_or(prompt);
        prompt.ends_with(open.trim_end()) && !prompt.ends_with(close)
    }

    /// Whether calls in the generic format are taken, too.
    pub(super) const fn takes_generic_calls(&self) -> bool {
        self.generic.is_some()
    }

    /// What begins calls, in the family's format and in the generic one.
    fn openers(&self) -> impl Iterator<Item = &String> {
        let generic = self.generic.iter().flat_map(|format| &format.openers);
        self.own_openers().iter().chain(generic)
    }

    fn own_openers(&self) -> &[String] {
        match &self.calls {
            ToolCallFormat::None | ToolCallFormat::Harmony(_) => &[],
            ToolCallFormat::JsonCalls(format) => &format.openers,
            ToolCallFormat::Pythonic { openers, .. } => openers,
            ToolCallFormat::TaggedArguments(format) => &format.openers,
            ToolCallFormat::Gemma(format) => &format.openers,
            ToolCallFormat::Minimax(format) => &format.openers,
        }
    }

    /// Whether a call may be the whole turn, without a marker.
    fn is_bare(&self) -> bool {
        matches!(self.style.tools, Some(ToolFamily::LlamaJson | ToolFamily::LlamaPythonic))
    }
}

/// What an answer's parser is told of its request.
#[derive(Clone, Debug)]
pub struct ParserOptions {
    /// What the model may call; without any, calls are text.
    pub tools: Arc<[ToolSpec]>,
    /// Whether the answer begins within thinking.
    pub in_thinking: bool,
    /// Whether nothing counts after the first call.
    pub one_call: bool,
    /// Makes ids of calls unique among answers.
    pub nonce: u64,
}

#[derive(Debug)]
enum State {
    /// Before anything but white space.
    Start,
    Reasoning,
    Content,
    JsonCalls(JsonCallSection),
    GenericCalls(JsonCallSection),
    Pythonic(PythonicSection),
    TaggedArguments(TaggedArgumentSection),
    Gemma(GemmaSection),
    Minimax(MinimaxSection),
    Harmony(Harmony),
}

/// Where an answer is with regard to the tags around it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Frame {
    Before,
    Within,
    /// There is none, or it is over.
    Over,
}

/// Parses one answer.
pub struct ToolCallParser {
    format: Arc<OutputFormat>,
    text: PlainText,
    input: Input,
    calls: ToolCalls,
    state: State,
    one_call: bool,
    /// Whether white space at hand belongs to a call or to thinking that went before.
    skips_space: bool,
    frame: Frame,
    /// Whether the open call interrupted thinking.
    in_reasoning: bool,
}

impl ToolCallParser {
    /// For a new answer.
    #[must_use]
    pub fn new(format: Arc<OutputFormat>, options: ParserOptions) -> Self {
        let style = match format.style.tools {
            Some(ToolFamily::MistralJson | ToolFamily::MistralNames) => IdStyle::Nine,
            _ => IdStyle::Call,
        };
        let state = match &format.calls {
            ToolCallFormat::Harmony(_) => State::Harmony(Harmony::new()),
            _ if options.in_thinking => State::Reasoning,
            _ => State::Start,
        };
        let frame = if format.frame.is_some() { Frame::Before } else { Frame::Over };
        // The head of the turn ends with a line end.
        let turns = format.style.answer == Some(AnswerFrame::HyperclovaTurns);
        Self {
            calls: ToolCalls::new(options.tools, style, options.nonce),
            format,
            text: PlainText::default(),
            input: Input::default(),
            state,
            one_call: options.one_call,
            skips_space: options.in_thinking || turns,
            frame,
            in_reasoning: false,
        }
    }

    fn run(&mut self) -> Vec<OutputDelta> {
        loop {
            if self.one_call && self.calls.completed() > 0 {
                self.input.take_all();
                break;
            }
            let completed = self.calls.completed();
            let progress = self.step();
            if self.calls.completed() > completed {
                // What follows a call may be none; the call is one.
                self.input.mark();
            }
            match progress {
                Progress::Again => {}
                Progress::Wait => break,
                Progress::Leave => {
                    self.input.mark();
                    self.skips_space = true;
                    self.in_reasoning = false;
                    self.state = State::Content;
                }
                Progress::NotACall => self.give_back(),
            }
        }
        std::mem::take(&mut self.calls.deltas)
    }

    /// What began as a call becomes content, as the model wrote it.
    fn give_back(&mut self) {
        self.calls.abandon();
        let raw = self.input.take_raw();
        let raw = self.format.markers.reveal(&raw);
        if std::mem::take(&mut self.in_reasoning) {
            self.calls.reasoning(&raw);
            self.skips_space = false;
            self.state = State::Reasoning;
            return;
        }
        self.calls.content(&raw);
        if !matches!(self.state, State::Harmony(_)) {
            self.skips_space = false;
            self.state = State::Content;
        }
    }

    fn step(&mut self) -> Progress {
        let format = Arc::clone(&self.format);
        let (input, calls) = (&mut self.input, &mut self.calls);
        match (&mut self.state, &format.calls) {
            (State::Start, _) => self.start(&format),
            (State::Reasoning, _) => self.reasoning(&format),
            (State::JsonCalls(section), ToolCallFormat::JsonCalls(format)) => {
                section.step(format, input, calls)
            }
            (State::JsonCalls(section), ToolCallFormat::Pythonic { json: Some(json), .. }) => {
                section.step(json, input, calls)
            }
            (State::GenericCalls(section), _) => match &format.generic {
                Some(generic) => section.step(generic, input, calls),
                None => Progress::NotACall,
            },
            (State::Gemma(section), ToolCallFormat::Gemma(format)) => {
                section.step(format, input, calls)
            }
            (State::Minimax(section), ToolCallFormat::Minimax(format)) => {
                section.step(format, input, calls)
            }
            (State::Pythonic(section), ToolCallFormat::Pythonic { closers, json, .. }) => {
                match section.is_json(input).filter(|_| json.is_some()) {
                    None if json.is_some() => Progress::Wait,
                    Some(true) => {
                        self.state = State::JsonCalls(JsonCallSection::new());
                        Progress::Again
                    }
                    _ => section.step(closers, input, calls),
                }
            }
            (State::TaggedArguments(section), ToolCallFormat::TaggedArguments(format)) => {
                section.step(format, input, calls)
            }
            (State::Harmony(harmony), ToolCallFormat::Harmony(own)) => {
                harmony.step(own, &format.markers, input, calls)
            }
            _ => self.content(&format),
        }
    }

    /// The first character that is not white space decides.
    fn start(&mut self, format: &OutputFormat) -> Progress {
        let text = self.input.text().trim_start();
        if text.is_empty() && !self.input.ended {
            return Progress::Wait;
        }
        if let Some((open, close)) = &format.thinking {
            if format.style.thinking.is_some_and(ThinkingStyle::closes_nothing) {
                if text.starts_with(close.as_str()) {
                    self.input.skip_space();
                    self.input.take(close.len());
                    self.state = State::Content;
                    self.skips_space = true;
                    return Progress::Again;
                }
                if close.starts_with(text) && !self.input.ended {
                    return Progress::Wait;
                }
            }
            if text.starts_with(open.as_str()) {
                self.input.skip_space();
                self.input.take(open.len());
                self.state = State::Reasoning;
                self.skips_space = true;
                return Progress::Again;
            }
            if open.starts_with(text) && !self.input.ended {
                return Progress::Wait;
            }
        }
        let bare = match text.chars().next() {
            Some('{') if format.is_bare() => Some(State::JsonCalls(JsonCallSection::new())),
            Some('[') if format.style.tools == Some(ToolFamily::LlamaJson) => {
                Some(State::JsonCalls(JsonCallSection::new()))
            }
            Some('[') if format.style.tools == Some(ToolFamily::LlamaPythonic) => {
                Some(State::Pythonic(PythonicSection::list()))
            }
            _ => None,
        };
        self.state = State::Content;
        if let Some(state) = bare.filter(|_| self.calls.has_tools()) {
            self.input.mark();
            self.state = state;
        }
        Progress::Again
    }

    fn reasoning(&mut self, format: &OutputFormat) -> Progress {
        let Some((_, close)) = &format.thinking else { return self.content(format) };
        if std::mem::take(&mut self.skips_space) {
            self.input.skip_space();
            self.skips_space = self.input.text().is_empty();
        }
        // Models call tools without a word that they have thought enough; only tokens are believed.
        let openers = format.openers().filter(|opener| opener.contains(is_code));
        let mut needles = vec![close.as_str()];
        needles.extend(openers.map(String::as_str).filter(|_| self.calls.has_tools()));
        match find(self.input.text(), &needles) {
            Found::At(end, which) => {
                let text = self.input.take(end);
                self.calls.reasoning(format.markers.reveal(text.trim_end()).as_str());
                self.input.mark();
                self.input.take(needles[which].len());
                if which > 0 {
                    self.in_reasoning = true;
                    self.state = Self::section(format, needles[which]);
                    return Progress::Again;
                }
                self.skips_space = true;
                // What follows thinking is as good as the beginning, but for its white space.
                self.state = if format.is_bare() { State::Start } else { State::Content };
                Progress::Again
            }
            Found::NotBefore(safe) => {
                let safe = if self.input.ended { self.input.text().len() } else { safe };
                let len = self.input.text()[..safe].trim_end().len();
                let text = self.input.take(len);
                self.input.mark();
                self.calls.reasoning(&format.markers.reveal(&text));
                Progress::Wait
            }
        }
    }

    /// After an opener.
    fn section(format: &OutputFormat, opener: &str) -> State {
        if let Some(generic) = &format.generic
            && generic.openers.iter().any(|own| own == opener)
        {
            return State::GenericCalls(JsonCallSection::opened(generic, opener));
        }
        match &format.calls {
            ToolCallFormat::TaggedArguments(format) => {
                let number = format.openers.iter().position(|own| own == opener);
                State::TaggedArguments(TaggedArgumentSection::new(
                    format,
                    number.unwrap_or_default(),
                ))
            }
            ToolCallFormat::Gemma(_) => State::Gemma(GemmaSection::new()),
            ToolCallFormat::Minimax(format) => {
                let number = format.openers.iter().position(|own| own == opener);
                State::Minimax(MinimaxSection::new(number.unwrap_or_default()))
            }
            ToolCallFormat::Pythonic { is_lines: true, .. } => {
                State::Pythonic(PythonicSection::lines())
            }
            ToolCallFormat::Pythonic { .. } => State::Pythonic(PythonicSection::list()),
            ToolCallFormat::JsonCalls(format) => {
                State::JsonCalls(JsonCallSection::opened(format, opener))
            }
            _ => State::JsonCalls(JsonCallSection::new()),
        }
    }

    /// At the beginning of an answer: the tag around it, if it has one.
    fn frame(&mut self, (open, _): &(String, String)) -> Option<Progress> {
        let text = self.input.text().trim_start();
        if text.starts_with(open.as_str()) {
            self.input.skip_space();
            self.input.take(open.len());
            self.input.mark();
            self.frame = Frame::Within;
            self.skips_space = true;
            return Some(Progress::Again);
        }
        if open.starts_with(text) && !self.input.ended {
            return Some(Progress::Wait);
        }
        self.frame = Frame::Over;
        None
    }

    fn content(&mut self, format: &OutputFormat) -> Progress {
        if self.skips_space {
            self.input.skip_space();
            self.skips_space = self.input.text().is_empty();
        }
        if let Some(frame) = format.frame.as_ref().filter(|_| self.frame == Frame::Before)
            && let Some(progress) = self.frame(frame)
        {
            return progress;
        }
        let mut needles: Vec<&str> = Vec::new();
        if self.calls.has_tools() {
            needles.extend(format.openers().map(String::as_str));
        }
        let openers = needles.len();
        let thinking = format.thinking.as_ref().filter(|_| format.thinks_anywhere);
        needles.extend(thinking.map(|(open, _)| open.as_str()));
        let quiet = needles.len();
        needles.extend(format.silent.iter().map(String::as_str));
        let frame = format.frame.as_ref().filter(|_| self.frame == Frame::Within);
        needles.extend(frame.map(|(_, close)| close.as_str()));
        match find(self.input.text(), &needles) {
            Found::At(at, which) => {
                let text = self.input.take(at);
                self.calls.content(&format.markers.reveal(text.trim_end()));
                self.input.mark();
                self.input.take(needles[which].len());
                if which < openers {
                    self.state = Self::section(format, needles[which]);
                    return Progress::Again;
                }
                self.skips_space = true;
                if which < quiet {
                    self.state = State::Reasoning;
                } else if frame.is_some() && which + 1 == needles.len() {
                    self.frame = Frame::Over;
                }
                Progress::Again
            }
            Found::NotBefore(safe) => {
                // White space may turn out to stand before a call.
                let len = if self.input.ended {
                    self.input.text().len()
                } else {
                    self.input.text()[..safe].trim_end().len()
                };
                let text = self.input.take(len);
                self.input.mark();
                self.calls.content(&format.markers.reveal(&text));
                Progress::Wait
            }
        }
    }
}

impl OutputParser for ToolCallParser {
    fn push(&mut self, token: TokenId, bytes: &[u8]) -> Vec<OutputDelta> {
        if let Some(code) = self.format.markers.code(token) {
            let rest = self.text.rest();
            self.input.append(&rest);
            self.input.append_char(code);
        } else {
            let text = sanitise(self.text.text(bytes));
            if text.is_empty() {
                return Vec::new();
            }
            self.input.append(&text);
        }
        self.run()
    }

    fn finish(&mut self) -> Vec<OutputDelta> {
        let rest = self.text.rest();
        self.input.append(&rest);
        self.input.ended = true;
        if self.calls.is_shown() {
            // It stays open: what is left of it is neither call nor content.
            let deltas = self.run_open();
            self.input.take_all();
            return deltas;
        }
        self.run()
    }
}

impl ToolCallParser {
    /// The end within a call: it is completed if only its closing marks are missing.
    fn run_open(&mut self) -> Vec<OutputDelta> {
        while self.calls.is_open() {
            match self.step() {
                Progress::Again => {}
                Progress::Wait | Progress::NotACall | Progress::Leave => break,
            }
        }
        std::mem::take(&mut self.calls.deltas)
    }
}

#[cfg(test)]
mod tests;
