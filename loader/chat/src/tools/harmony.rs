//! Harmony (gpt-oss): an answer is a row of messages, each with a header that names its channel
//! and perhaps a recipient. Thinking is in `analysis`, calls go to `functions.…`, the answer is in
//! `final`; what is said to the user between calls is in `commentary`.

use super::{
    calls::Calls,
    input::{Input, Progress},
    json_scan::JsonScan,
    marker::{Found, Markers, find},
    json_calls::scan_arguments,
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
enum Place {
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
    place: Place,
}

impl Harmony {
    /// After `<|start|>assistant`, which the prompt ends with.
    pub(super) const fn new() -> Self {
        Self { place: Place::Header }
    }

    /// Advances over what is at hand; [`Progress::Garbage`] is what was taken since the header.
    pub(super) fn step(
        &mut self,
        format: &HarmonyFormat,
        markers: &Markers,
        input: &mut Input,
        calls: &mut Calls,
    ) -> Progress {
        match &mut self.place {
            Place::Header => self.header(format, markers, input, calls),
            Place::Reasoning | Place::Content | Place::Skip => self.text(format, input, calls),
            Place::Arguments(scan) => match scan_arguments(scan, input, calls) {
                Progress::Leave => {
                    self.place = Place::Skip;
                    Progress::Again
                }
                Progress::Garbage => {
                    self.place = Place::Content;
                    Progress::Garbage
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
        calls: &mut Calls,
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
        self.place = match recipient {
            Some(recipient) => {
                let name = recipient.strip_prefix("functions.").unwrap_or(recipient);
                // Markers within a name would be shown to the client.
                if markers.reveal(name) == name && calls.begin(name, None) {
                    Place::Arguments(JsonScan::new())
                } else {
                    self.place = Place::Content;
                    return Progress::Garbage;
                }
            }
            None if channel == "analysis" => Place::Reasoning,
            None => Place::Content,
        };
        Progress::Again
    }

    /// Text without a header; its first character may be a marker that leads nowhere.
    fn headless(&mut self, markers: &Markers, input: &mut Input, calls: &mut Calls) -> Progress {
        let Some(first) = input.text().chars().next() else { return Progress::Wait };
        let first = input.take(first.len_utf8());
        calls.content(&markers.reveal(&first));
        self.place = Place::Content;
        Progress::Again
    }

    fn text(&mut self, format: &HarmonyFormat, input: &mut Input, calls: &mut Calls) -> Progress {
        let ends = format.ends.each_ref().map(String::as_str);
        let (end, which) = match find(input.text(), &ends) {
            Found::At(end, which) => (end, Some(which)),
            Found::NotBefore(_) if input.ended => (input.text().len(), None),
            Found::NotBefore(safe) => (safe, None),
        };
        let text = input.take(end);
        match self.place {
            Place::Reasoning => calls.reasoning(&text),
            Place::Content => calls.content(&text),
            _ => {}
        }
        let Some(which) = which else { return Progress::Wait };
        // A channel's marker belongs to the header that it begins.
        if format.ends[which] != format.channel {
            input.take(format.ends[which].len());
        }
        self.place = Place::Header;
        Progress::Again
    }
}
