//! The parser of answers: tokens in, content, thinking and calls out. Whatever a model writes
//! becomes one of the three, and how its text was cut into tokens changes nothing.

use std::sync::Arc;

use shardpack_formats::{OutputStyle, ThinkingStyle, ToolFamily};

use super::{
    calls::{Calls, IdStyle, ToolSpec},
    harmony::{Harmony, HarmonyFormat},
    input::{Input, Progress},
    marker::{Found, Markers, find, sanitise},
    params::{ParamFormat, ParamSection},
    pythonic::PythonicSection,
    section::{Section, SectionFormat},
};
use crate::{
    engine::TokenId,
    server::inner::{OutputParser, Piece, PlainText},
};

/// How a model writes, resolved against its tokenizer; the same for all its answers.
#[derive(Debug)]
pub(in crate::server) struct OutputFormat {
    style: OutputStyle,
    markers: Markers,
    calls: CallFormat,
    /// What opens and closes thinking.
    thinking: Option<(String, String)>,
    /// Whether thinking may open anywhere: its marker is a token, which texts cannot spell.
    thinks_anywhere: bool,
}

#[derive(Debug)]
enum CallFormat {
    None,
    Section(SectionFormat),
    /// Llama's: what may stand before a list.
    Pythonic {
        openers: Vec<String>,
        closers: Vec<String>,
        json: SectionFormat,
    },
    Params(ParamFormat),
    Harmony(HarmonyFormat),
}

const PYTHONIC_OPENERS: [&str; 2] = ["<|python_tag|>", "<|python_start|>"];
const PYTHONIC_CLOSERS: [&str; 1] = ["<|python_end|>"];

impl OutputFormat {
    /// `token_id` looks a text up among the tokenizer's added tokens, which text cannot spell.
    pub(in crate::server) fn new(
        style: OutputStyle,
        token_id: impl Fn(&str) -> Option<TokenId>,
    ) -> Self {
        let tags = style.thinking.and_then(ThinkingStyle::tags);
        let mut names: Vec<&'static str> = match style.tools {
            Some(ToolFamily::Harmony) => HarmonyFormat::marker_names(),
            Some(ToolFamily::LlamaPythonic) => {
                PYTHONIC_OPENERS.into_iter().chain(PYTHONIC_CLOSERS).collect()
            }
            Some(family) => {
                let mut names = SectionFormat::marker_names(family);
                names.extend(ParamFormat::marker_names(family));
                names
            }
            None if style.thinking == Some(ThinkingStyle::Channels) => {
                HarmonyFormat::marker_names()
            }
            None => Vec::new(),
        };
        names.extend(tags.into_iter().flat_map(|(open, close)| [open, close]));
        let markers = Markers::new(&names, token_id);
        let calls = Self::call_format(style, &markers);
        let thinking = tags.map(|(open, close)| (markers.needle(open), markers.needle(close)));
        let thinks_anywhere = tags.is_some_and(|(open, _)| markers.token(open).is_some());
        Self { style, markers, calls, thinking, thinks_anywhere }
    }

    fn call_format(style: OutputStyle, markers: &Markers) -> CallFormat {
        let needles =
            |names: &[&'static str]| names.iter().map(|name| markers.needle(name)).collect();
        match style.tools {
            Some(ToolFamily::Harmony) => CallFormat::Harmony(HarmonyFormat::new(markers)),
            None if style.thinking == Some(ThinkingStyle::Channels) => {
                CallFormat::Harmony(HarmonyFormat::new(markers))
            }
            None => CallFormat::None,
            Some(ToolFamily::LlamaPythonic) => CallFormat::Pythonic {
                openers: needles(&PYTHONIC_OPENERS),
                closers: needles(&PYTHONIC_CLOSERS),
                json: SectionFormat::new(ToolFamily::LlamaJson, markers)
                    .expect("Llama's JSON is of this kind"),
            },
            Some(family) => SectionFormat::new(family, markers)
                .map(CallFormat::Section)
                .or_else(|| ParamFormat::new(family, markers).map(CallFormat::Params))
                .expect("every family is of one kind"),
        }
    }

    /// The style that it was made for.
    pub(in crate::server) const fn style(&self) -> OutputStyle {
        self.style
    }

    /// The token of a marker, if the tokenizer has one.
    pub(in crate::server) fn marker_token(&self, name: &str) -> Option<TokenId> {
        self.markers.token(name)
    }

    /// Whether a rendered prompt leaves thinking open, so that the answer begins within it.
    pub(in crate::server) fn prompt_opens_thinking(&self, prompt: &str) -> bool {
        let Some((open, close)) = self.style.thinking.and_then(ThinkingStyle::tags) else {
            return false;
        };
        // Only the end of the prompt is the assistant's; the rest may speak of thinking.
        prompt.trim_end().ends_with(open) && !prompt.trim_end().ends_with(close)
    }

    fn openers(&self) -> &[String] {
        match &self.calls {
            CallFormat::None | CallFormat::Harmony(_) => &[],
            CallFormat::Section(format) => &format.openers,
            CallFormat::Pythonic { openers, .. } => openers,
            CallFormat::Params(format) => &format.openers,
        }
    }

    /// Whether a call may be the whole turn, without a marker.
    fn is_bare(&self) -> bool {
        matches!(self.style.tools, Some(ToolFamily::LlamaJson | ToolFamily::LlamaPythonic))
    }
}

/// What an answer's parser is told of its request.
#[derive(Clone, Debug)]
pub(in crate::server) struct ParserOptions {
    /// What the model may call; without any, calls are text.
    pub(in crate::server) tools: Arc<[ToolSpec]>,
    /// Whether the answer begins within thinking.
    pub(in crate::server) in_thinking: bool,
    /// Whether nothing counts after the first call.
    pub(in crate::server) one_call: bool,
    /// Makes ids of calls unique among answers.
    pub(in crate::server) nonce: u64,
}

#[derive(Debug)]
enum Place {
    /// Before anything but white space.
    Start,
    Reasoning,
    Content,
    Section(Section),
    Pythonic(PythonicSection),
    Params(ParamSection),
    Harmony(Harmony),
}

/// Parses one answer.
pub(in crate::server) struct CallParser {
    format: Arc<OutputFormat>,
    text: PlainText,
    input: Input,
    calls: Calls,
    place: Place,
    one_call: bool,
    /// Whether white space at hand belongs to a call or to thinking that went before.
    skips_space: bool,
}

impl CallParser {
    /// For a new answer.
    pub(in crate::server) fn new(format: Arc<OutputFormat>, options: ParserOptions) -> Self {
        let style = match format.style.tools {
            Some(ToolFamily::MistralJson | ToolFamily::MistralNames) => IdStyle::Nine,
            _ => IdStyle::Call,
        };
        let place = match &format.calls {
            CallFormat::Harmony(_) => Place::Harmony(Harmony::new()),
            _ if options.in_thinking => Place::Reasoning,
            _ => Place::Start,
        };
        Self {
            calls: Calls::new(options.tools, style, options.nonce),
            format,
            text: PlainText::default(),
            input: Input::default(),
            place,
            one_call: options.one_call,
            skips_space: options.in_thinking,
        }
    }

    fn run(&mut self) -> Vec<Piece> {
        loop {
            if self.one_call && self.calls.any() {
                self.input.take_all();
                break;
            }
            match self.step() {
                Progress::Again => {}
                Progress::Wait => break,
                Progress::Leave => {
                    self.input.mark();
                    self.skips_space = true;
                    self.place = Place::Content;
                }
                Progress::Garbage => self.give_back(),
            }
        }
        std::mem::take(&mut self.calls.pieces)
    }

    /// What began as a call becomes content, as the model wrote it.
    fn give_back(&mut self) {
        self.calls.abandon();
        let raw = self.input.take_raw();
        self.calls.content(&self.format.markers.reveal(&raw));
        if !matches!(self.place, Place::Harmony(_)) {
            self.skips_space = false;
            self.place = Place::Content;
        }
    }

    fn step(&mut self) -> Progress {
        let format = Arc::clone(&self.format);
        let (input, calls) = (&mut self.input, &mut self.calls);
        match (&mut self.place, &format.calls) {
            (Place::Start, _) => self.start(&format),
            (Place::Reasoning, _) => self.reasoning(&format),
            (Place::Section(section), CallFormat::Section(format)) => {
                section.step(format, input, calls)
            }
            (Place::Section(section), CallFormat::Pythonic { json, .. }) => {
                section.step(json, input, calls)
            }
            (Place::Pythonic(section), CallFormat::Pythonic { closers, .. }) => {
                let progress = section.step(input, calls);
                if progress == Progress::Leave {
                    for closer in closers {
                        input.expect(closer);
                    }
                }
                progress
            }
            (Place::Params(section), CallFormat::Params(format)) => {
                section.step(format, input, calls)
            }
            (Place::Harmony(harmony), CallFormat::Harmony(own)) => {
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
        if let Some((open, _)) = &format.thinking {
            if text.starts_with(open.as_str()) {
                self.input.skip_space();
                self.input.take(open.len());
                self.place = Place::Reasoning;
                self.skips_space = true;
                return Progress::Again;
            }
            if open.starts_with(text) && !self.input.ended {
                return Progress::Wait;
            }
        }
        let bare = match text.chars().next() {
            Some('{') if format.is_bare() => Some(Place::Section(Section::new())),
            Some('[') if matches!(format.calls, CallFormat::Pythonic { .. }) => {
                Some(Place::Pythonic(PythonicSection::new()))
            }
            _ => None,
        };
        self.place = Place::Content;
        if let Some(place) = bare.filter(|_| self.calls.has_tools()) {
            self.input.mark();
            self.place = place;
        }
        Progress::Again
    }

    fn reasoning(&mut self, format: &OutputFormat) -> Progress {
        let Some((_, close)) = &format.thinking else { return self.content(format) };
        if std::mem::take(&mut self.skips_space) {
            self.input.skip_space();
            self.skips_space = self.input.text().is_empty();
        }
        match find(self.input.text(), &[close]) {
            Found::At(end, _) => {
                let text = self.input.take(end);
                self.calls.reasoning(format.markers.reveal(text.trim_end()).as_str());
                self.input.take(close.len());
                self.skips_space = true;
                // What follows thinking is as good as the beginning, but for its white space.
                self.place = if format.is_bare() { Place::Start } else { Place::Content };
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

    fn content(&mut self, format: &OutputFormat) -> Progress {
        if self.skips_space {
            self.input.skip_space();
            self.skips_space = self.input.text().is_empty();
        }
        let has_tools = self.calls.has_tools();
        let mut needles: Vec<&str> = Vec::new();
        if has_tools {
            needles.extend(format.openers().iter().map(String::as_str));
        }
        let thinking = format.thinking.as_ref().filter(|_| format.thinks_anywhere);
        needles.extend(thinking.map(|(open, _)| open.as_str()));
        match find(self.input.text(), &needles) {
            Found::At(at, which) => {
                let text = self.input.take(at);
                self.calls.content(&format.markers.reveal(text.trim_end()));
                self.input.mark();
                self.input.take(needles[which].len());
                self.place = match &format.calls {
                    _ if !has_tools || which >= format.openers().len() => {
                        self.skips_space = true;
                        Place::Reasoning
                    }
                    CallFormat::Params(format) => Place::Params(ParamSection::new(format, which)),
                    CallFormat::Pythonic { .. } => Place::Pythonic(PythonicSection::new()),
                    _ => Place::Section(Section::new()),
                };
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

impl OutputParser for CallParser {
    fn push(&mut self, token: TokenId, bytes: &[u8]) -> Vec<Piece> {
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

    fn finish(&mut self) -> Vec<Piece> {
        let rest = self.text.rest();
        self.input.append(&rest);
        self.input.ended = true;
        if self.calls.is_shown() {
            // It stays open: what is left of it is neither call nor content.
            let pieces = self.run_open();
            self.input.take_all();
            return pieces;
        }
        self.run()
    }
}

impl CallParser {
    /// The end within a call: it is completed if only its closing marks are missing.
    fn run_open(&mut self) -> Vec<Piece> {
        while self.calls.is_open() {
            match self.step() {
                Progress::Again => {}
                Progress::Wait | Progress::Garbage | Progress::Leave => break,
            }
        }
        std::mem::take(&mut self.calls.pieces)
    }
}

#[cfg(test)]
mod tests;
