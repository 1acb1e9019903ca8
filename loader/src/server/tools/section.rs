//! Calls whose arguments are one JSON value: an envelope in tags (Hermes, Llama, Mistral), or a
//! head with the name and the arguments alone (Mistral, DeepSeek, Kimi).

use shardpack_formats::ToolFamily;

use super::{
    calls::Calls,
    envelope::{Envelope, Verdict},
    input::{Expect, Input, Progress},
    json_scan::{JsonScan, Step},
    marker::{Markers, is_code},
};

/// Bytes of the text between a call's marker and its arguments.
const HEAD_BYTES_MAX: usize = 512;

/// The markers of the families of this kind, by their place in a call.
#[derive(Debug)]
pub(super) struct SectionFormat {
    family: ToolFamily,
    /// What begins a section.
    pub(super) openers: Vec<String>,
    /// Begins a call within a section.
    call_open: Option<String>,
    /// Ends the head.
    argument_open: Option<String>,
    /// Between name and id in a head.
    id_open: Option<String>,
    call_close: Option<String>,
    section_close: Option<String>,
}

/// The names of a family's markers: openers, call open, id, argument, call close, section close.
type Names = (
    &'static [&'static str],
    Option<&'static str>,
    Option<&'static str>,
    Option<&'static str>,
    Option<&'static str>,
    Option<&'static str>,
);

const fn names(family: ToolFamily) -> Option<Names> {
    Some(match family {
        ToolFamily::JsonTags => (&["<tool_call>"], None, None, None, Some("</tool_call>"), None),
        ToolFamily::LlamaJson => (&["<|python_tag|>"], None, None, None, None, None),
        ToolFamily::MistralJson | ToolFamily::MistralNames => {
            (&["[TOOL_CALLS]"], None, Some("[CALL_ID]"), Some("[ARGS]"), None, None)
        }
        ToolFamily::DeepseekV3 | ToolFamily::DeepseekV31 => (
            &["<｜tool▁calls▁begin｜>"],
            Some("<｜tool▁call▁begin｜>"),
            None,
            Some("<｜tool▁sep｜>"),
            Some("<｜tool▁call▁end｜>"),
            Some("<｜tool▁calls▁end｜>"),
        ),
        ToolFamily::KimiK2 => (
            &["<|tool_calls_section_begin|>"],
            Some("<|tool_call_begin|>"),
            None,
            Some("<|tool_call_argument_begin|>"),
            Some("<|tool_call_end|>"),
            Some("<|tool_calls_section_end|>"),
        ),
        _ => return None,
    })
}

impl SectionFormat {
    /// Every marker of the family, for [`Markers::new`].
    pub(super) fn marker_names(family: ToolFamily) -> Vec<&'static str> {
        let Some((openers, a, b, c, d, e)) = names(family) else { return Vec::new() };
        openers.iter().copied().chain([a, b, c, d, e].into_iter().flatten()).collect()
    }

    /// The format of a family of this kind.
    pub(super) fn new(family: ToolFamily, markers: &Markers) -> Option<Self> {
        let (openers, call_open, id_open, argument_open, call_close, section_close) =
            names(family)?;
        let needle = |name: Option<&'static str>| name.map(|name| markers.needle(name));
        Some(Self {
            family,
            openers: openers.iter().map(|name| markers.needle(name)).collect(),
            call_open: needle(call_open),
            argument_open: needle(argument_open),
            id_open: needle(id_open),
            call_close: needle(call_close),
            section_close: needle(section_close),
        })
    }
}

#[derive(Debug)]
enum Place {
    /// After the section's opener: what form it takes.
    Begin,
    /// Between the calls of a section.
    Between,
    Head,
    /// After a DeepSeek separator: which of its two forms.
    AfterHead(String),
    Envelope(Envelope),
    Arguments(JsonScan),
    /// After a call.
    Tail,
}

/// One section.
#[derive(Debug)]
pub(super) struct Section {
    place: Place,
    /// Whether its calls stand in a JSON array.
    in_array: bool,
}

impl Section {
    /// After one of the format's openers.
    pub(super) const fn new() -> Self {
        Self { place: Place::Begin, in_array: false }
    }

    /// Advances over what is at hand.
    pub(super) fn step(
        &mut self,
        format: &SectionFormat,
        input: &mut Input,
        calls: &mut Calls,
    ) -> Progress {
        match &mut self.place {
            Place::Begin => self.begin(format, input),
            Place::Between => self.between(format, input),
            Place::Head => self.head(format, input, calls),
            Place::AfterHead(kind) => {
                let kind = std::mem::take(kind);
                self.after_head(kind, input, calls)
            }
            Place::Envelope(_) => self.envelope(input, calls),
            Place::Arguments(_) => self.arguments(input, calls),
            Place::Tail => self.tail(format, input),
        }
    }

    fn begin(&mut self, format: &SectionFormat, input: &mut Input) -> Progress {
        if format.call_open.is_some() {
            self.place = Place::Between;
            return Progress::Again;
        }
        input.skip_space();
        self.place = match (format.family, input.text().chars().next()) {
            (_, None) => return if input.ended { Progress::Garbage } else { Progress::Wait },
            (_, Some('{')) => Place::Envelope(Envelope::new()),
            (ToolFamily::MistralJson | ToolFamily::MistralNames, Some('[')) => {
                input.take(1);
                self.in_array = true;
                return Progress::Again;
            }
            (ToolFamily::MistralJson | ToolFamily::MistralNames, Some(_)) if !self.in_array => {
                Place::Head
            }
            _ => return Progress::Garbage,
        };
        Progress::Again
    }

    fn between(&mut self, format: &SectionFormat, input: &mut Input) -> Progress {
        input.skip_space();
        let (Some(open), Some(close)) = (&format.call_open, &format.section_close) else {
            return Progress::Leave;
        };
        match (input.expect(open), input.sees(close)) {
            (Expect::Taken, _) => {
                self.place = Place::Head;
                Progress::Again
            }
            (_, Expect::Taken) => {
                input.expect(close);
                Progress::Leave
            }
            (Expect::Wait, _) | (_, Expect::Wait) => Progress::Wait,
            (Expect::Other, Expect::Other) => Progress::Leave,
        }
    }

    fn head(&mut self, format: &SectionFormat, input: &mut Input, calls: &mut Calls) -> Progress {
        let Some(argument_open) = &format.argument_open else { return Progress::Garbage };
        let id_open = format.id_open.as_deref().unwrap_or_default();
        let head = match input.until(&[argument_open], HEAD_BYTES_MAX, id_open) {
            Ok(head) => head,
            Err(progress) => return progress,
        };
        let mut id = None;
        let mut name = head.trim();
        match format.family {
            ToolFamily::DeepseekV3 | ToolFamily::DeepseekV31 => {
                self.place = Place::AfterHead(name.to_owned());
                return Progress::Again;
            }
            ToolFamily::KimiK2 => {
                id = Some(name.to_owned());
                name = name.strip_prefix("functions.").unwrap_or(name);
                name = name.rsplit_once(':').map_or(name, |(name, _)| name);
            }
            _ => {
                if let Some(id_open) = &format.id_open
                    && let Some((before, after)) = name.split_once(id_open.as_str())
                {
                    name = before.trim();
                    let after = after.trim();
                    let is_id =
                        after.len() == 9 && after.bytes().all(|b| b.is_ascii_alphanumeric());
                    id = is_id.then(|| after.to_owned());
                }
            }
        }
        let name = name.to_owned();
        self.start(&name, id, calls)
    }

    fn start(&mut self, name: &str, id: Option<String>, calls: &mut Calls) -> Progress {
        if !calls.begin(name, id) {
            return Progress::Garbage;
        }
        self.place = Place::Arguments(JsonScan::new());
        Progress::Again
    }

    /// V3.1 goes on with the arguments, V3 with the name and a fence.
    fn after_head(&mut self, kind: String, input: &mut Input, calls: &mut Calls) -> Progress {
        const FENCE: &str = "```json";
        let text = input.text().trim_start();
        if text.starts_with('{') {
            return self.start(&kind, None, calls);
        }
        let before = text.find(FENCE).map_or(text, |fence| &text[..fence]);
        let hopeless = before.len() > HEAD_BYTES_MAX || before.contains(is_code);
        let Some(fence) = text.find(FENCE).filter(|_| !hopeless) else {
            self.place = Place::AfterHead(kind);
            return if hopeless || input.ended { Progress::Garbage } else { Progress::Wait };
        };
        let name = text[..fence].trim().to_owned();
        let len = input.text().len() - text.len() + fence + FENCE.len();
        input.take(len);
        self.start(&name, None, calls)
    }

    fn envelope(&mut self, input: &mut Input, calls: &mut Calls) -> Progress {
        let Place::Envelope(envelope) = &mut self.place else { return Progress::Garbage };
        let mut end = None;
        for (at, c) in input.text().char_indices() {
            match envelope.push(c, calls) {
                Verdict::More => {}
                verdict => {
                    end = Some((at + c.len_utf8(), verdict));
                    break;
                }
            }
        }
        match end {
            None => {
                input.take_all();
                if input.ended { Progress::Garbage } else { Progress::Wait }
            }
            Some((len, Verdict::Done)) => {
                input.take(len);
                self.place = Place::Tail;
                Progress::Again
            }
            Some((len, _)) => {
                input.take(len);
                Progress::Garbage
            }
        }
    }

    fn arguments(&mut self, input: &mut Input, calls: &mut Calls) -> Progress {
        let Place::Arguments(scan) = &mut self.place else { return Progress::Garbage };
        match scan_arguments(scan, input, calls) {
            Progress::Leave => {
                self.place = Place::Tail;
                Progress::Again
            }
            other => other,
        }
    }

    fn tail(&mut self, format: &SectionFormat, input: &mut Input) -> Progress {
        input.skip_space();
        if matches!(format.family, ToolFamily::DeepseekV3 | ToolFamily::DeepseekV31) {
            match input.expect("```") {
                Expect::Taken => input.skip_space(),
                Expect::Wait if !input.text().is_empty() => return Progress::Wait,
                _ => {}
            }
        }
        if input.text().is_empty() && !input.ended {
            return Progress::Wait;
        }
        let separator = if self.in_array { "," } else { ";" };
        let has_list = self.in_array || format.family == ToolFamily::LlamaJson;
        if has_list && input.expect(separator) == Expect::Taken {
            self.place = Place::Begin;
            return Progress::Again;
        }
        if self.in_array {
            input.expect("]");
        }
        match format.call_close.as_deref().map(|close| input.expect(close)) {
            Some(Expect::Wait) => return Progress::Wait,
            // A model that forgets to close its call has made it all the same.
            _ if format.call_open.is_none() => return Progress::Leave,
            _ => self.place = Place::Between,
        }
        Progress::Again
    }
}

/// Passes one JSON object on as the open call's arguments; [`Progress::Leave`] after its end.
pub(super) fn scan_arguments(
    scan: &mut JsonScan,
    input: &mut Input,
    calls: &mut Calls,
) -> Progress {
    let mut out = String::new();
    let mut end = None;
    for (at, c) in input.text().char_indices() {
        match scan.push(c, &mut out) {
            Step::More => {}
            step => {
                end = Some((at + c.len_utf8(), step));
                break;
            }
        }
    }
    calls.arguments(&out);
    match end {
        None => {
            input.take_all();
            if input.ended { Progress::Garbage } else { Progress::Wait }
        }
        Some((len, Step::Done)) => {
            input.take(len);
            if calls.end() { Progress::Leave } else { Progress::Garbage }
        }
        Some((len, _)) => {
            input.take(len);
            Progress::Garbage
        }
    }
}
