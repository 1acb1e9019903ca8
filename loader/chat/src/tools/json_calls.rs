//! Tool-call formats with the arguments as one JSON value: a JSON object with name and arguments
//! between tags (Hermes, Llama), a list of those (Mistral, Nemotron, Granite, Cohere, Hunyuan,
//! Apertus), or a head with the name followed by the arguments (Mistral, DeepSeek, Kimi, Solar).

use shardpack_formats::ToolFamily;

use super::{
    call_object::{CallObject, Verdict},
    calls::ToolCalls,
    input::{Expect, Input, Progress},
    json_scan::{JsonScan, ScanOutcome},
    marker::{Found, Markers, find, is_code},
};

/// Bytes of the text between a call's marker and its arguments.
const HEAD_BYTES_MAX: usize = 512;

/// The markers of a family. A section holds the calls of one turn, between its opener and its end.
#[derive(Debug)]
pub(super) struct JsonCallFormat {
    family: ToolFamily,
    /// What begins a section, then what begins a call within one: models forget the section.
    pub openers: Vec<String>,
    /// Begins a call within a section.
    call_open: Option<String>,
    /// Ends the head.
    argument_open: Option<String>,
    /// Between name and id in a head, or id and name.
    id_open: Option<String>,
    /// Ends a call, or a list of them.
    call_close: Option<String>,
    section_closes: Vec<String>,
}

/// Kimi's markers of sections as it writes them now and then: of one call, not of calls.
const KIMI_VARIANTS: [&str; 2] = ["<|tool_call_section_begin|>", "<|tool_call_section_end|>"];

/// The names of a family's markers; each begins with the token that it is, if it is one, and may go
/// on with letters.
pub(super) struct Names {
    pub openers: &'static [&'static str],
    pub call_open: Option<&'static str>,
    id_open: Option<&'static str>,
    argument_open: Option<&'static str>,
    pub call_close: Option<&'static str>,
    pub section_close: Option<&'static str>,
}

impl Names {
    const fn tags(openers: &'static [&'static str], call_close: Option<&'static str>) -> Self {
        Self {
            openers,
            call_open: None,
            id_open: None,
            argument_open: None,
            call_close,
            section_close: None,
        }
    }

    const fn sections(
        openers: &'static [&'static str],
        [call_open, argument_open, call_close, section_close]: [&'static str; 4],
    ) -> Self {
        Self {
            openers,
            call_open: Some(call_open),
            id_open: None,
            argument_open: Some(argument_open),
            call_close: Some(call_close),
            section_close: Some(section_close),
        }
    }
}

pub(super) const fn names(family: ToolFamily) -> Option<Names> {
    Some(match family {
        ToolFamily::JsonTags => Names::tags(&["<tool_call>"], Some("</tool_call>")),
        ToolFamily::NemotronTags => Names::tags(&["<toolcall>"], Some("</toolcall>")),
        ToolFamily::LongcatJson => {
            Names::tags(&["<longcat_tool_call>"], Some("</longcat_tool_call>"))
        }
        ToolFamily::ToolCallsJson => Names::tags(&["<tool_calls>"], Some("</tool_calls>")),
        ToolFamily::NemotronJson => Names::tags(&["<TOOLCALL>"], Some("</TOOLCALL>")),
        ToolFamily::GraniteJson => Names::tags(&["<|tool_call|>"], Some("<|/tool_call|>")),
        ToolFamily::CohereJson => Names::tags(&["<|START_ACTION|>"], Some("<|END_ACTION|>")),
        ToolFamily::HyperclovaJson => Names::tags(&["-> tool/function_call"], None),
        ToolFamily::InternlmJson => Names::tags(&["<|action_start|>"], Some("<|action_end|>")),
        ToolFamily::ApertusJson => Names::tags(&["<|tools_prefix|>"], Some("<|tools_suffix|>")),
        ToolFamily::LlamaJson => {
            Names::tags(&["<|python_tag|>", "<|python_start|>"], Some("<|python_end|>"))
        }
        ToolFamily::MistralJson | ToolFamily::MistralNames => Names {
            id_open: Some("[CALL_ID]"),
            argument_open: Some("[ARGS]"),
            ..Names::tags(&["[TOOL_CALLS]"], None)
        },
        ToolFamily::DeepseekV3 | ToolFamily::DeepseekV31 => Names::sections(
            &["<｜tool▁calls▁begin｜>"],
            [
                "<｜tool▁call▁begin｜>",
                "<｜tool▁sep｜>",
                "<｜tool▁call▁end｜>",
                "<｜tool▁calls▁end｜>",
            ],
        ),
        ToolFamily::KimiK2 => Names::sections(
            &["<|tool_calls_section_begin|>"],
            [
                "<|tool_call_begin|>",
                "<|tool_call_argument_begin|>",
                "<|tool_call_end|>",
                "<|tool_calls_section_end|>",
            ],
        ),
        ToolFamily::Solar => Names {
            id_open: Some("<|tool_call:name|>"),
            ..Names::sections(
                &["<|tool_calls|>"],
                ["<|tool_call:begin|>", "<|tool_call:args|>", "<|tool_call:end|>", "<|calls|>"],
            )
        },
        // What it writes instead of Python if it is asked to.
        ToolFamily::Lfm2 => Names::tags(&["<|tool_call_start|>"], Some("<|tool_call_end|>")),
        _ => return None,
    })
}

/// Whether a family writes its calls as a JSON list.
pub(super) const fn is_list(family: ToolFamily) -> bool {
    matches!(
        family,
        ToolFamily::MistralJson
            | ToolFamily::MistralNames
            | ToolFamily::ToolCallsJson
            | ToolFamily::NemotronJson
            | ToolFamily::GraniteJson
            | ToolFamily::CohereJson
            | ToolFamily::HyperclovaJson
            | ToolFamily::ApertusJson
    )
}

/// Whether fine-tunes of a family write lists though it does not.
const fn is_tuned(family: ToolFamily) -> bool {
    matches!(family, ToolFamily::LlamaJson | ToolFamily::Lfm2)
}

impl JsonCallFormat {
    /// Every marker of the family, for [`Markers::new`].
    pub(super) fn marker_names(family: ToolFamily) -> Vec<&'static str> {
        let Some(names) = names(family) else { return Vec::new() };
        let Names { openers, call_open, id_open, argument_open, call_close, section_close } = names;
        let others = [call_open, id_open, argument_open, call_close, section_close];
        let mut all: Vec<_> = openers.iter().copied().chain(others.into_iter().flatten()).collect();
        match family {
            ToolFamily::InternlmJson => all.push(PLUGIN),
            ToolFamily::KimiK2 => all.extend(KIMI_VARIANTS),
            _ => {}
        }
        all
    }

    /// The format of a family of this kind.
    pub(super) fn new(family: ToolFamily, markers: &Markers) -> Option<Self> {
        let names = names(family)?;
        let needle = |name: Option<&'static str>| name.map(|name| markers.needle(name));
        let plugin = if family == ToolFamily::InternlmJson { PLUGIN } else { "" };
        let opener = |name: &&'static str| markers.needle(name) + &markers.needle(plugin);
        let mut openers: Vec<String> = names.openers.iter().map(opener).collect();
        let mut section_closes: Vec<String> = needle(names.section_close).into_iter().collect();
        if family == ToolFamily::KimiK2 {
            let [open, close] = KIMI_VARIANTS.map(|name| markers.needle(name));
            openers.push(open);
            section_closes.push(close);
        }
        openers.extend(needle(names.call_open));
        Some(Self {
            family,
            openers,
            call_open: needle(names.call_open),
            argument_open: needle(names.argument_open),
            id_open: needle(names.id_open),
            call_close: needle(names.call_close),
            section_closes,
        })
    }
}

/// What `InternLM` writes after its opener.
pub(super) const PLUGIN: &str = "<|plugin|>";

#[derive(Debug)]
enum State {
    /// After the section's opener: what form it takes.
    Begin,
    /// Between the calls of a section.
    Between,
    Head,
    /// After a DeepSeek separator: which of its two forms.
    AfterHead(String),
    CallObject(CallObject),
    Arguments(JsonScan),
    /// After a call.
    Tail,
}

/// The state of one section of calls.
#[derive(Debug)]
pub(super) struct JsonCallSection {
    state: State,
    /// Whether its calls stand in a JSON array.
    in_array: bool,
}

impl JsonCallSection {
    /// At the beginning of a section.
    pub(super) const fn new() -> Self {
        Self { state: State::Begin, in_array: false }
    }

    /// After one of the format's openers.
    pub(super) fn opened(format: &JsonCallFormat, opener: &str) -> Self {
        let in_call = format.call_open.as_deref() == Some(opener);
        Self { state: if in_call { State::Head } else { State::Begin }, in_array: false }
    }

    /// Advances over what is at hand.
    pub(super) fn step(
        &mut self,
        format: &JsonCallFormat,
        input: &mut Input,
        calls: &mut ToolCalls,
    ) -> Progress {
        match &mut self.state {
            State::Begin => self.begin(format, input),
            State::Between => self.between(format, input),
            State::Head => self.head(format, input, calls),
            State::AfterHead(kind) => {
                let kind = std::mem::take(kind);
                self.after_head(kind, input, calls)
            }
            State::CallObject(_) => self.call_object(input, calls),
            State::Arguments(_) => self.arguments(input, calls),
            State::Tail => self.tail(format, input),
        }
    }

    fn begin(&mut self, format: &JsonCallFormat, input: &mut Input) -> Progress {
        if format.call_open.is_some() {
            self.state = State::Between;
            return Progress::Again;
        }
        input.skip_space();
        self.state = match (format.family, input.text().chars().next()) {
            (_, None) => return if input.ended { Progress::NotACall } else { Progress::Wait },
            (ToolFamily::ApertusJson, Some('{')) => State::CallObject(CallObject::keyed()),
            (_, Some('{')) => State::CallObject(CallObject::new()),
            (family, Some('[')) if !self.in_array && (is_list(family) || is_tuned(family)) => {
                input.take(1);
                self.in_array = true;
                return Progress::Again;
            }
            (ToolFamily::MistralJson | ToolFamily::MistralNames, Some(_)) if !self.in_array => {
                State::Head
            }
            _ => return Progress::NotACall,
        };
        Progress::Again
    }

    fn between(&mut self, format: &JsonCallFormat, input: &mut Input) -> Progress {
        input.skip_space();
        let Some(open) = &format.call_open else { return Progress::Leave };
        let begun = input.expect(open);
        if begun == Expect::Taken {
            self.state = State::Head;
            return Progress::Again;
        }
        let mut is_open = begun == Expect::Wait;
        for close in &format.section_closes {
            match input.expect(close) {
                Expect::Taken => return Progress::Leave,
                Expect::Wait => is_open = true,
                Expect::Other => {}
            }
        }
        if is_open { Progress::Wait } else { Progress::Leave }
    }

    fn head(
        &mut self,
        format: &JsonCallFormat,
        input: &mut Input,
        calls: &mut ToolCalls,
    ) -> Progress {
        let Some(argument_open) = &format.argument_open else { return Progress::NotACall };
        let is_mistral =
            matches!(format.family, ToolFamily::MistralJson | ToolFamily::MistralNames);
        if is_mistral
            && let Found::At(len @ ..=HEAD_BYTES_MAX, 1) = find(input.text(), &[argument_open, "{"])
        {
            // Without a mark between name and arguments, as some templates have it.
            let name = input.take(len);
            return self.start(name.trim(), None, calls);
        }
        let id_open = format.id_open.as_deref().unwrap_or_default();
        let head = match input.until(&[argument_open], HEAD_BYTES_MAX, id_open) {
            Ok(head) => head,
            Err(progress) => return progress,
        };
        let mut id = None;
        let mut name = head.trim();
        match format.family {
            ToolFamily::DeepseekV3 | ToolFamily::DeepseekV31 => {
                self.state = State::AfterHead(name.to_owned());
                return Progress::Again;
            }
            ToolFamily::KimiK2 => {
                id = Some(name.to_owned());
                name = name.strip_prefix("functions.").unwrap_or(name);
                name = name.rsplit_once(':').map_or(name, |(name, _)| name);
            }
            ToolFamily::Solar => {
                let (before, after) = name.split_once(id_open).unwrap_or_default();
                let (before, after) = (before.trim(), after.trim());
                id = (!before.is_empty() && !before.contains(is_code)).then(|| before.to_owned());
                name = after;
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

    fn start(&mut self, name: &str, id: Option<String>, calls: &mut ToolCalls) -> Progress {
        if !calls.begin(name, id) {
            return Progress::NotACall;
        }
        self.state = State::Arguments(JsonScan::new());
        Progress::Again
    }

    /// V3.1 goes on with the arguments, V3 with the name and a fence.
    fn after_head(&mut self, kind: String, input: &mut Input, calls: &mut ToolCalls) -> Progress {
        const FENCE: &str = "```json";
        let text = input.text().trim_start();
        if text.starts_with('{') {
            return self.start(&kind, None, calls);
        }
        let before = text.find(FENCE).map_or(text, |fence| &text[..fence]);
        let hopeless = before.len() > HEAD_BYTES_MAX || before.contains(is_code);
        let Some(fence) = text.find(FENCE).filter(|_| !hopeless) else {
            self.state = State::AfterHead(kind);
            return if hopeless || input.ended { Progress::NotACall } else { Progress::Wait };
        };
        let name = text[..fence].trim().to_owned();
        let len = input.text().len() - text.len() + fence + FENCE.len();
        input.take(len);
        self.start(&name, None, calls)
    }

    fn call_object(&mut self, input: &mut Input, calls: &mut ToolCalls) -> Progress {
        let State::CallObject(object) = &mut self.state else { return Progress::NotACall };
        let mut end = None;
        for (at, c) in input.text().char_indices() {
            match object.push(c, calls) {
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
                if input.ended { Progress::NotACall } else { Progress::Wait }
            }
            Some((len, Verdict::Done)) => {
                input.take(len);
                self.state = State::Tail;
                Progress::Again
            }
            Some((len, _)) => {
                input.take(len);
                Progress::NotACall
            }
        }
    }

    fn arguments(&mut self, input: &mut Input, calls: &mut ToolCalls) -> Progress {
        let State::Arguments(scan) = &mut self.state else { return Progress::NotACall };
        match scan_arguments(scan, input, calls) {
            Progress::Leave => {
                self.state = State::Tail;
                Progress::Again
            }
            other => other,
        }
    }

    fn tail(&mut self, format: &JsonCallFormat, input: &mut Input) -> Progress {
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
            self.state = State::Begin;
            return Progress::Again;
        }
        if self.in_array {
            input.expect("]");
            input.skip_space();
        } else if format.family == ToolFamily::ToolCallsJson && input.text().starts_with('{') {
            // One on each line.
            self.state = State::Begin;
            return Progress::Again;
        }
        match format.call_close.as_deref().map(|close| input.expect(close)) {
            Some(Expect::Wait) => return Progress::Wait,
            // A model that forgets to close its call has made it all the same.
            _ if format.call_open.is_none() => return Progress::Leave,
            _ => self.state = State::Between,
        }
        Progress::Again
    }
}

/// Passes one JSON object on as the open call's arguments; [`Progress::Leave`] after its end.
pub(crate) fn scan_arguments(
    scan: &mut JsonScan,
    input: &mut Input,
    calls: &mut ToolCalls,
) -> Progress {
    let mut out = String::new();
    let mut end = None;
    for (at, c) in input.text().char_indices() {
        match scan.push(c, &mut out) {
            ScanOutcome::More => {}
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
            if input.ended { Progress::NotACall } else { Progress::Wait }
        }
        Some((len, ScanOutcome::Done)) => {
            input.take(len);
            if calls.end() { Progress::Leave } else { Progress::NotACall }
        }
        Some((len, _)) => {
            input.take(len);
            Progress::NotACall
        }
    }
}
