//! Harmony, the output format of gpt-oss: a sequence of messages, each with a header that names its
//! channel and perhaps a recipient. Thinking is in `analysis`, calls go to `functions.…`, the
//! answer is in `final`; what is said to the user between calls is in `commentary`.

use super::{
    calls::ToolCalls,
    input::{Input, Progress},
    json_calls::scan_arguments,
    json_scan::JsonScan,
    marker::{Found, Markers, find},
};

/// Bytes of a message's header.
const HEADER_BYTES_MAX: usize = 512;

const NAMES: [&str; 7] = [
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
];

/// The format's markers.
#[derive(Debug)]
pub(super) struct HarmonyFormat {
    channel: String,
    message: String,
    constrain: String,
    /// What ends a message's text: its own end, or the beginning of another header.
    ends: [String; 5],
}

impl HarmonyFormat {
    pub(super) fn marker_names() -> Vec<&'static str> {
        NAMES.to_vec()
    }

    pub(super) fn new(markers: &Markers) -> Self {
        let [start, channel, message, constrain, end, call, over] =
            NAMES.map(|name| markers.needle(name));
        Self { ends: [start, channel.clone(), end, call, over], channel, message, constrain }
    }
}

#[derive(Debug)]
enum State {
    /// In a header; `true` where the channel's marker was seen.
    Header,
    Reasoning,
    Content,
    Arguments(JsonScan),
    /// After a call's arguments, or in what nobody can read: up to the next message.
    Skip,
}

/// An answer.
#[derive(Debug)]
pub(super) struct Harmony {
    state: State,
}

impl Harmony {
    /// After `<|start|>assistant`, which the prompt ends with.
    pub(super) const fn new() -> Self {
        Self { state: State::Header }
    }

    /// Advances over what is at hand; [`Progress::NotACall`] is what was taken since the header.
    pub(super) fn step(
        &mut self,
        format: &HarmonyFormat,
        markers: &Markers,
        input: &mut Input,
        calls: &mut ToolCalls,
    ) -> Progress {
        match &mut self.state {
            State::Header => self.header(format, markers, input, calls),
            State::Reasoning | State::Content | State::Skip => self.text(format, input, calls),
            State::Arguments(scan) => match scan_arguments(scan, input, calls) {
                Progress::Leave => {
                    self.state = State::Skip;
                    Progress::Again
                }
                Progress::NotACall => {
                    self.state = State::Content;
                    Progress::NotACall
                }
                other => other,
            },
        }
    }

    fn header(
        &mut self,
        format: &HarmonyFormat,
        markers: &Markers,
        input: &mut Input,
        calls: &mut ToolCalls,
    ) -> Progress {
        // A model that answers without a header begins with none of its marks.
        let text = input.text().trim_start();
        let ends = format.ends.each_ref().map(String::as_str);
        let starts = [format.channel.as_str(), "assistant", "to="].into_iter().chain(ends);
        let mut begins = starts.map(|start| text.starts_with(start) || start.starts_with(text));
        let is_header = begins.any(|begins| begins);
        let end = match find(input.text(), &[&format.message]) {
            Found::At(end, _) if end <= HEADER_BYTES_MAX && is_header => end,
            Found::NotBefore(safe) if safe <= HEADER_BYTES_MAX && !input.ended => {
                let text = input.text()[..safe].trim_start();
                if is_header || text.is_empty() {
                    return Progress::Wait;
                }
                return self.headless(markers, input, calls);
            }
            _ => return self.headless(markers, input, calls),
        };
        input.mark();
        let header = input.take(end);
        input.take(format.message.len());
        let (role, channel) = header.split_once(format.channel.as_str()).unwrap_or(("", &header));
        let channel = channel.split(format.constrain.as_str()).next().unwrap_or_default();
        let recipient = [role, channel]
            .into_iter()
            .flat_map(str::split_whitespace)
            .find_map(|word| word.strip_prefix("to="))
            // Some name the channel once more, right behind the recipient.
            .and_then(|recipient| recipient.split(format.channel.as_str()).next());
        let channel = channel.split_whitespace().next().unwrap_or_default();
        self.state = match recipient {
            Some(recipient) => {
                let name = recipient.strip_prefix("functions.").unwrap_or(recipient);
                // Markers within a name would be shown to the client.
                if markers.reveal(name) == name && calls.begin(name, None) {
                    State::Arguments(JsonScan::new())
                } else {
                    self.state = State::Content;
                    return Progress::NotACall;
                }
            }
            None if channel == "analysis" => State::Reasoning,
            None => State::Content,
        };
        Progress::Again
    }

    /// Text without a header; its first character may be a marker that leads nowhere.
    fn headless(
        &mut self,
        markers: &Markers,
        input: &mut Input,
        calls: &mut ToolCalls,
    ) -> Progress {
        let Some(first) = input.text().chars().next() else { return Progress::Wait };
        let first = input.take(first.len_utf8());
        calls.content(&markers.reveal(&first));
        self.state = State::Content;
        Progress::Again
    }

    fn text(
        &mut self,
        format: &HarmonyFormat,
        input: &mut Input,
        calls: &mut ToolCalls,
    ) -> Progress {
        let ends = format.ends.each_ref().map(String::as_str);
        let (end, which) = match find(input.text(), &ends) {
            Found::At(end, which) => (end, Some(which)),
            Found::NotBefore(_) if input.ended => (input.text().len(), None),
            Found::NotBefore(safe) => (safe, None),
        };
        let text = input.take(end);
        match self.state {
            State::Reasoning => calls.reasoning(&text),
            State::Content => calls.content(&text),
            _ => {}
        }
        let Some(which) = which else { return Progress::Wait };
        // A channel's marker belongs to the header that it begins.
        if format.ends[which] != format.channel {
            input.take(format.ends[which].len());
        }
        self.state = State::Header;
        Progress::Again
    }
}
