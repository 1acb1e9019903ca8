//! Every family against a template of its own form: rendering a call and parsing it back gives the
//! call, however its text is cut; and garbage is content.

use std::sync::Arc;

use proptest::prelude::*;
use serde_json::{Value, json};
use shardpack_formats::{
    AnswerFrame, OutputStyle, ToolFamily,
    template::{ChatTemplate, Next},
};

use super::*;

mod near_forms;

const TEMPLATES: [(ToolFamily, &str); 30] = [
    (ToolFamily::JsonTags, include_str!("templates/json_tags.jinja")),
    (ToolFamily::LlamaJson, include_str!("templates/llama_json.jinja")),
    (ToolFamily::LlamaPythonic, include_str!("templates/llama_pythonic.jinja")),
    (ToolFamily::MistralJson, include_str!("templates/mistral_json.jinja")),
    (ToolFamily::MistralNames, include_str!("templates/mistral_names.jinja")),
    (ToolFamily::QwenXml, include_str!("templates/qwen_xml.jinja")),
    (ToolFamily::DeepseekV3, include_str!("templates/deepseek_v3.jinja")),
    (ToolFamily::DeepseekV31, include_str!("templates/deepseek_v31.jinja")),
    (ToolFamily::KimiK2, include_str!("templates/kimi_k2.jinja")),
    (ToolFamily::Glm4, include_str!("templates/glm4.jinja")),
    (ToolFamily::Harmony, include_str!("templates/harmony.jinja")),
    (ToolFamily::MinimaxM2, include_str!("templates/minimax_m2.jinja")),
    (ToolFamily::MinimaxM3, include_str!("templates/minimax_m3.jinja")),
    (ToolFamily::SeedXml, include_str!("templates/seed_xml.jinja")),
    (ToolFamily::HunyuanXml, include_str!("templates/hunyuan_xml.jinja")),
    (ToolFamily::DeepseekV4, include_str!("../../../../../formats/templates/deepseek_v4.jinja")),
    (ToolFamily::ToolCallsJson, include_str!("templates/tool_calls_json.jinja")),
    (ToolFamily::NemotronJson, include_str!("templates/nemotron_json.jinja")),
    (ToolFamily::NemotronTags, include_str!("templates/nemotron_tags.jinja")),
    (ToolFamily::LongcatJson, include_str!("templates/longcat_json.jinja")),
    (ToolFamily::GraniteJson, include_str!("templates/granite_json.jinja")),
    (ToolFamily::CohereJson, include_str!("templates/cohere_json.jinja")),
    (ToolFamily::HyperclovaJson, include_str!("templates/hyperclova_json.jinja")),
    (ToolFamily::InternlmJson, include_str!("templates/internlm_json.jinja")),
    (ToolFamily::ApertusJson, include_str!("templates/apertus_json.jinja")),
    (ToolFamily::Solar, include_str!("templates/solar.jinja")),
    (ToolFamily::Lfm2, include_str!("templates/lfm2.jinja")),
    (ToolFamily::Olmo3, include_str!("templates/olmo3.jinja")),
    (ToolFamily::Gemma4, include_str!("templates/gemma4.jinja")),
    (ToolFamily::DeepseekV32, include_str!("../../../../../formats/templates/deepseek_v32.jinja")),
];

/// Ends of turns in the templates, which the engine does not report.
const TURN_ENDS: [&str; 14] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eot|>",
    "</s>",
    "<｜end▁of▁sentence｜>",
    "<|return|>",
    "<|call|>",
    "[e~[",
    "<|END_OF_TURN_TOKEN|>",
    "<|endofturn|>",
    "<|stop|>",
    "<turn|>",
    "<|user_end|>",
    "</longcat_s>",
];

/// A tokenizer of bytes, with the markers of a family as tokens of their own or not.
struct Tokens {
    markers: Vec<&'static str>,
}

impl Tokens {
    fn new(style: OutputStyle, as_tokens: bool) -> Self {
        let markers = std::cell::RefCell::new(Vec::new());
        OutputFormat::new(style, |name| {
            let name: &'static str = Box::leak(name.to_owned().into_boxed_str());
            markers.borrow_mut().push(name);
            None
        });
        let markers = if as_tokens { markers.into_inner() } else { Vec::new() };
        Self { markers }
    }

    fn id(&self, name: &str) -> Option<TokenId> {
        let place = self.markers.iter().position(|marker| *marker == name)?;
        Some(TokenId(256 + place as u32))
    }

    /// Tokens and their bytes.
    fn encode(&self, text: &str) -> Vec<(TokenId, Vec<u8>)> {
        let mut tokens = Vec::new();
        let mut rest = text;
        while let Some(byte) = rest.bytes().next() {
            let marker = self.markers.iter().filter(|marker| rest.starts_with(**marker));
            if let Some(marker) = marker.max_by_key(|marker| marker.len()) {
                tokens.push((self.id(marker).unwrap(), marker.as_bytes().to_vec()));
                rest = &rest[marker.len()..];
            } else {
                let len = rest.chars().next().map_or(1, char::len_utf8);
                let bytes = &rest.as_bytes()[..len];
                tokens.extend(bytes.iter().map(|byte| (TokenId(u32::from(*byte)), vec![*byte])));
                let _ = byte;
                rest = &rest[len..];
            }
        }
        tokens
    }
}

/// An answer, with pieces of the same kind joined.
#[derive(Debug, Default, PartialEq)]
struct Answer {
    content: String,
    reasoning: String,
    /// Name, id and arguments of complete calls.
    calls: Vec<(String, String, String)>,
    /// Calls that have begun and not ended.
    cut: usize,
}

fn collect(deltas: Vec<OutputDelta>) -> Answer {
    let mut answer = Answer::default();
    let mut open: Option<(String, String, String)> = None;
    let mut next = 0;
    for delta in deltas {
        match delta {
            OutputDelta::Content(text) => {
                assert!(!text.is_empty());
                answer.content.push_str(&text);
            }
            OutputDelta::Reasoning(text) => answer.reasoning.push_str(&text),
            OutputDelta::ToolCallBegin { index, id, name } => {
                assert_eq!(index, next);
                next += 1;
                answer.cut += usize::from(open.is_some());
                open = Some((name, id, String::new()));
            }
            OutputDelta::ToolCallArguments { index, fragment } => {
                assert!(index + 1 == next && !fragment.is_empty());
                open.as_mut().unwrap().2.push_str(&fragment);
            }
            OutputDelta::ToolCallEnd { index } => {
                assert_eq!(index + 1, next);
                let call = open.take().unwrap();
                assert!(serde_json::from_str::<Value>(&call.2).unwrap().is_object());
                answer.calls.push(call);
            }
        }
    }
    answer.cut += usize::from(open.is_some());
    answer
}

fn tools() -> Arc<[ToolSpec]> {
    let schema = json!({"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"},
        "tags": {"type": "array"}, "more": {"type": "object"}, "note": {"type": ["string", "null"]},
        "ratio": {"type": "number"},
    }});
    ["get_weather", "get_time"]
        .map(|name| ToolSpec { name: name.to_owned(), schema: schema.clone(), validator: None })
        .into()
}

struct Model {
    format: Arc<OutputFormat>,
    tokens: Tokens,
}

impl Model {
    fn new(style: OutputStyle, as_tokens: bool) -> Self {
        let tokens = Tokens::new(style, as_tokens);
        let format = Arc::new(OutputFormat::new(style, |name| tokens.id(name)));
        Self { format, tokens }
    }

    fn parser(&self, in_thinking: bool) -> ToolCallParser {
        let options = ParserOptions { tools: tools(), in_thinking, one_call: false, nonce: 1 };
        ToolCallParser::new(Arc::clone(&self.format), options)
    }

    /// Parses tokens whose bytes are joined where `cuts` is false.
    fn parse_cut(&self, tokens: &[(TokenId, Vec<u8>)], cuts: &[bool], thinking: bool) -> Answer {
        let mut parser = self.parser(thinking);
        let mut deltas = Vec::new();
        let mut joined: Vec<u8> = Vec::new();
        for (number, (token, bytes)) in tokens.iter().enumerate() {
            if self.format.markers.code(*token).is_some() {
                deltas.extend(parser.push(TokenId(0), &std::mem::take(&mut joined)));
                deltas.extend(parser.push(*token, bytes));
                continue;
            }
            joined.extend_from_slice(bytes);
            if cuts.is_empty() || cuts[number % cuts.len()] {
                deltas.extend(parser.push(TokenId(0), &std::mem::take(&mut joined)));
            }
        }
        deltas.extend(parser.push(TokenId(0), &joined));
        deltas.extend(parser.finish());
        collect(deltas)
    }

    fn parse(&self, text: &str) -> Answer {
        self.parse_cut(&self.tokens.encode(text), &[], false)
    }
}

/// What the template writes for the assistant's turn, without the end of turn.
fn rendered(template: &str, message: &Value) -> String {
    let specials = [("bos_token", "<s>"), ("eos_token", "</s>")];
    let template = ChatTemplate::parse(template, specials).unwrap();
    let user = json!({"role": "user", "content": "hello"});
    let none: [(&str, Value); 0] = [];
    let no_tools: [Value; 0] = [];
    let render = |messages: Vec<Value>, next| {
        template.render(messages, no_tools.clone(), none.clone(), next).unwrap()
    };
    let prompt = render(vec![user.clone()], Next::Assistant);
    let whole = render(vec![user, message.clone()], Next::Nobody);
    let mut turn = whole.strip_prefix(&prompt).unwrap_or_else(|| panic!("{prompt:?} {whole:?}"));
    turn = turn.trim_end_matches('\n');
    for end in TURN_ENDS {
        turn = turn.strip_suffix(end).unwrap_or(turn);
    }
    turn.to_owned()
}

fn message(content: &str, calls: &[(&str, Value)]) -> Value {
    let calls: Vec<Value> = calls
        .iter()
        .enumerate()
        .map(|(number, (name, arguments))| {
            let id = format!("functions.{name}:{number}");
            json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
        })
        .collect();
    json!({"role": "assistant", "content": content, "tool_calls": calls})
}

/// Whether the family can say something, or several things, beside one call.
fn may(family: ToolFamily) -> (bool, bool) {
    match family {
        ToolFamily::LlamaJson => (false, false),
        // HyperCLOVA's template has turns of their own for what is said.
        ToolFamily::LlamaPythonic | ToolFamily::MistralJson | ToolFamily::HyperclovaJson => {
            (false, true)
        }
        ToolFamily::Harmony => (true, false),
        _ => (true, true),
    }
}

fn arguments() -> impl Strategy<Value = Value> {
    let city = prop_oneof![
        Just("Oslo".to_owned()),
        Just("a \"quoted\"\n\\ {line}".to_owned()),
        Just("</tool_call> </parameter> </arg_value>".to_owned()),
        Just("5".to_owned()),
        "[a-zA-Zé😀<>\\[\\]{}'\"., \n:=()]{1,12}",
    ];
    let more = prop_oneof![Just(json!({})), Just(json!({"a": [1, {"b": "}"}], "c": null}))];
    (city, any::<i32>(), any::<bool>(), prop::collection::vec(-3..9, 0..3), more, any::<u8>())
        .prop_map(|(city, days, exact, tags, more, which)| {
            let all = json!({"city": city, "days": days, "exact": exact, "tags": tags,
                "more": more, "note": "x y", "ratio": 0.5});
            let all = all.as_object().unwrap().clone();
            let kept = all.into_iter().enumerate().filter(|(n, _)| which >> n & 1 == 1);
            Value::Object(kept.map(|(_, member)| member).collect())
        })
}

fn check_round_trip(
    family: ToolFamily,
    template: &str,
    said: &str,
    calls: &[(&str, Value)],
    cuts: &[bool],
) {
    let style = OutputStyle::detect(template);
    assert_eq!(style.tools, Some(family));
    let (speaks, parallel) = may(family);
    let said = if speaks { said } else { "" };
    let calls = if parallel { calls } else { &calls[..1] };
    let text = rendered(template, &message(said, calls));
    // A template's text makes tokens of markers within values, too; a model spells those out.
    let spells = calls.iter().any(|(_, arguments)| arguments.to_string().contains("</tool_call>"));
    for as_tokens in [true, false] {
        if as_tokens && spells {
            continue;
        }
        let model = Model::new(style, as_tokens);
        let tokens = model.tokens.encode(&text);
        let answer = model.parse_cut(&tokens, cuts, false);
        let thinks =
            matches!(family, ToolFamily::Harmony | ToolFamily::CohereJson | ToolFamily::Solar);
        let spoken = if thinks { &answer.reasoning } else { &answer.content };
        assert_eq!(spoken, said, "{family:?} {text:?} {answer:?}");
        assert_eq!(answer.cut, 0, "{family:?} {text:?} {answer:?}");
        let found: Vec<(&str, Value)> = answer
            .calls
            .iter()
            .map(|(name, _, arguments)| (name.as_str(), serde_json::from_str(arguments).unwrap()))
            .collect();
        assert_eq!(found, calls, "{family:?} {as_tokens} {text:?}");
        // Ids are unique, and where the model writes them they are its own.
        let ids: std::collections::HashSet<_> = answer.calls.iter().map(|call| &call.1).collect();
        assert_eq!(ids.len(), calls.len());
        if matches!(family, ToolFamily::KimiK2 | ToolFamily::Solar) {
            assert_eq!(answer.calls[0].1, format!("functions.{}:0", calls[0].0));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn rendered_calls_come_back_however_they_are_cut(
        first in arguments(),
        second in arguments(),
        said in prop_oneof![Just(""), Just("I will look.")],
        count in 1_usize..3,
        cuts in prop::collection::vec(any::<bool>(), 1..40),
    ) {
        let calls = [("get_weather", first), ("get_time", second)];
        for (family, template) in TEMPLATES {
            // Only a marker that is a token can be told from its letters in a text.
            check_round_trip(family, template, said, &calls[..count], &cuts);
        }
    }

    #[test]
    fn garbage_is_never_an_error_and_cuts_change_nothing(
        parts in prop::collection::vec((any::<u8>(), ".{0,6}"), 0..14),
        cuts in prop::collection::vec(any::<bool>(), 1..20),
        thinking in any::<bool>(),
    ) {
        const SNIPPETS: [&str; 23] = [
            "{\"name\": \"get_weather\"", ", \"arguments\": {", "}}", "\"city\": \"x\"", "{", "[",
            "get_time", "get_weather(", "city='x'", ")", "]", "<parameter=city>", "</parameter>",
            "</function>", ":0", "```json", "\n", " ", "functions.get_time", "assistant",
            "<｜DSML｜function_calls>", "<｜DSML｜invoke name=\"get_time\">",
            "<｜DSML｜parameter name=\"city\" string=\"true\">",
        ];
        for (_, template) in TEMPLATES {
            let mut style = OutputStyle::detect(template);
            style.thinking = style.thinking.or(Some(ThinkingStyle::ThinkTags));
            for as_tokens in [true, false] {
                let model = Model::new(style, as_tokens);
                let all = Tokens::new(style, true).markers;
                let text: String = parts.iter().map(|(pick, free)| {
                    let pick = usize::from(*pick) % (SNIPPETS.len() + all.len() + 4);
                    let pick = SNIPPETS.get(pick).or_else(|| all.get(pick - SNIPPETS.len()));
                    pick.map_or(free.as_str(), |snippet| snippet)
                }).collect();
                let tokens = model.tokens.encode(&text);
                let whole = model.parse_cut(&tokens, &[false], thinking);
                prop_assert_eq!(&whole, &model.parse_cut(&tokens, &[], thinking), "{}", text);
                prop_assert_eq!(&whole, &model.parse_cut(&tokens, &cuts, thinking), "{}", text);
            }
        }
    }

    #[test]
    fn random_bytes_are_content(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        for (_, template) in TEMPLATES {
            let model = Model::new(OutputStyle::detect(template), true);
            let token = |byte: &u8| (TokenId(u32::from(*byte)), vec![*byte]);
            let expected = sanitise(String::from_utf8_lossy(&bytes).into_owned());
            let found = model.parse_cut(&bytes.iter().map(token).collect::<Vec<_>>(), &[], false);
            // Some formats have white space around what is said.
            prop_assert_eq!(found.content.trim(), expected.trim());
            prop_assert_eq!(&found, &Answer { content: found.content.clone(), ..Answer::default() });
            // The same among markers: what they make of it does not depend on where it is cut.
            let token = |byte: &u8| {
                let id = u32::from(*byte) + 200;
                (TokenId(id), if id < 256 { vec![*byte] } else { Vec::new() })
            };
            let mixed: Vec<_> = bytes.iter().map(token).collect();
            let whole = model.parse_cut(&mixed, &[], false);
            prop_assert_eq!(&whole, &model.parse_cut(&mixed, &[false], false));
            prop_assert!(whole.calls.is_empty(), "{:?}", whole);
        }
    }
}

fn json_tags(as_tokens: bool) -> Model {
    let style = OutputStyle {
        tools: Some(ToolFamily::JsonTags),
        thinking: Some(ThinkingStyle::ThinkTags),
        answer: None,
    };
    Model::new(style, as_tokens)
}

const CALL: &str =
    "<tool_call>\n{\"name\": \"get_time\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>";

#[test]
fn letters_of_a_marker_are_text_where_it_is_a_token() {
    let model = json_tags(true);
    let bytes = CALL.bytes().map(|byte| (TokenId(u32::from(byte)), vec![byte]));
    let answer = model.parse_cut(&bytes.collect::<Vec<_>>(), &[], false);
    assert_eq!((answer.content.as_str(), answer.calls.len()), (CALL, 0));
    assert_eq!(json_tags(false).parse(CALL).calls.len(), 1);
}

#[test]
fn thinking_is_set_apart() {
    for as_tokens in [true, false] {
        let model = json_tags(as_tokens);
        let answer = model.parse("\n<think>\nHm.\n</think>\n\nYes.\n");
        assert_eq!((answer.reasoning.as_str(), answer.content.as_str()), ("Hm.", "Yes.\n"));
        let answer = model.parse(&format!("<think>Hm.</think>\n\n{CALL}"));
        assert_eq!((answer.reasoning.as_str(), answer.content.as_str()), ("Hm.", ""));
        assert_eq!(answer.calls.len(), 1);
        // The prompt may have opened it.
        let tokens = model.tokens.encode("Hm.\n</think>\n\nYes.");
        let answer = model.parse_cut(&tokens, &[], true);
        assert_eq!((answer.reasoning.as_str(), answer.content.as_str()), ("Hm.", "Yes."));
        let answer = model.parse("<thin");
        assert_eq!(answer.content, "<thin");
    }
    let format = &json_tags(true).format;
    assert!(format.prompt_opens_thinking("<|im_start|>assistant\n<think>\n"));
    assert!(!format.prompt_opens_thinking("<think> is said\n<|im_start|>assistant\n"));
    assert!(!format.prompt_opens_thinking("<|im_start|>assistant\n<think>\n\n</think>\n\n"));
}

#[test]
fn half_a_call_is_content_and_a_cut_one_stays_open() {
    let model = json_tags(true);
    let answer = model.parse("So: <tool_call>\n{\"name\": \"get_ti");
    assert_eq!(answer.content, "So:<tool_call>\n{\"name\": \"get_ti");
    assert_eq!((answer.calls.len(), answer.cut), (0, 0));
    let answer =
        model.parse("<tool_call>\n{\"name\": \"get_time\", \"arguments\": {\"city\": \"Ro");
    assert_eq!((answer.calls.len(), answer.cut, answer.content.as_str()), (0, 1, ""));
    // Only the closing marks are missing.
    let whole = CALL.strip_suffix("\n</tool_call>").unwrap();
    assert_eq!(model.parse(whole).calls.len(), 1);
}

#[test]
fn unknown_tools_and_broken_json_are_content() {
    let model = json_tags(true);
    let check = |text: &str| {
        let answer = model.parse(text);
        assert_eq!((answer.content.as_str(), answer.calls.len()), (text, 0));
    };
    check("<tool_call>\n{\"name\": \"rm\", \"arguments\": {}}\n</tool_call>");
    check("<tool_call>get_time</tool_call>");
    check("<tool_call>{\"title\": 3}</tool_call> and on");
    // A call whose arguments break off has begun; it never ends, and its text is not lost.
    let text = "<tool_call>{\"name\": \"get_time\", \"arguments\": {\"city\": oops}}</tool_call>";
    let answer = model.parse(text);
    assert_eq!((answer.cut, answer.calls.len(), answer.content.as_str()), (1, 0, text));
}

#[test]
fn without_tools_calls_are_text() {
    let model = json_tags(true);
    let options =
        ParserOptions { tools: Arc::new([]), in_thinking: false, one_call: false, nonce: 0 };
    let mut parser = ToolCallParser::new(Arc::clone(&model.format), options);
    let mut deltas = Vec::new();
    for (token, bytes) in model.tokens.encode(CALL) {
        deltas.extend(parser.push(token, &bytes));
    }
    deltas.extend(parser.finish());
    assert_eq!(collect(deltas).content, CALL);
}

#[test]
fn one_call_means_one() {
    let model = json_tags(true);
    let options = ParserOptions { tools: tools(), in_thinking: false, one_call: true, nonce: 0 };
    let mut parser = ToolCallParser::new(Arc::clone(&model.format), options);
    let mut deltas = Vec::new();
    for (token, bytes) in model.tokens.encode(&format!("{CALL}\n{CALL} more")) {
        deltas.extend(parser.push(token, &bytes));
    }
    deltas.extend(parser.finish());
    let answer = collect(deltas);
    assert_eq!((answer.calls.len(), answer.content.as_str()), (1, ""));
}

#[test]
fn other_spellings_of_the_same_call_are_understood() {
    let check = |family, text: &str, expected: &str| {
        let answer =
            Model::new(OutputStyle { tools: Some(family), ..OutputStyle::default() }, true)
                .parse(text);
        let calls: Vec<_> = answer.calls.iter().map(|(n, _, a)| format!("{n}{a}")).collect();
        assert_eq!(calls.join(" "), expected, "{text} {answer:?}");
        assert_eq!(answer.content, "", "{text}");
    };
    check(
        ToolFamily::LlamaJson,
        r#"<|python_tag|>{"type": "function", "name": "get_time", "parameters": {}}"#,
        "get_time{}",
    );
    check(
        ToolFamily::LlamaJson,
        r#"{"type":"function","function":{"name":"get_time","parameters":{"city":"x"}}}"#,
        r#"get_time{"city":"x"}"#,
    );
    check(
        ToolFamily::LlamaJson,
        r#"{"name":"get_time","parameters":{}}; {"name":"get_weather","parameters":{}}"#,
        "get_time{} get_weather{}",
    );
    check(
        ToolFamily::JsonTags,
        r#"<tool_call>{"arguments": {"city": "x"}, "name": "get_time"}"#,
        r#"get_time{"city": "x"}"#,
    );
    check(
        ToolFamily::JsonTags,
        r#"<tool_call>{"name": "get_time", "arguments": "{\"city\": \"x\"}"}</tool_call>"#,
        r#"get_time{"city": "x"}"#,
    );
    check(ToolFamily::JsonTags, r#"<tool_call>{"name": "get_time"}</tool_call>"#, "get_time{}");
    check(
        ToolFamily::QwenXml,
        "<function=get_time>\n<parameter=city>\nx\n</parameter>\n</function>",
        r#"get_time{"city": "x"}"#,
    );
    check(
        ToolFamily::MistralNames,
        r#"[TOOL_CALLS]get_time[ARGS]{"city": "x"}"#,
        r#"get_time{"city": "x"}"#,
    );
    check(
        ToolFamily::Glm4,
        "<tool_call>get_time<arg_key>city</arg_key><arg_value>x</arg_value></tool_call>",
        r#"get_time{"city": "x"}"#,
    );
    let list =
        r#"[{"name": "get_time", "arguments": {}}, {"name": "get_weather", "arguments": {}}]"#;
    check(ToolFamily::LlamaJson, list, "get_time{} get_weather{}");
    check(ToolFamily::LlamaPythonic, list, "get_time{} get_weather{}");
    check(
        ToolFamily::Lfm2,
        &format!("<|tool_call_start|>{list}<|tool_call_end|>"),
        "get_time{} get_weather{}",
    );
    check(
        ToolFamily::LlamaJson,
        r#"<|python_start|>{"name": "get_time", "parameters": {}}<|python_end|>"#,
        "get_time{}",
    );
    check(
        ToolFamily::Harmony,
        "<|channel|>analysis to=functions.get_time code<|message|>{}",
        "get_time{}",
    );
}

#[test]
fn harmony_channels_go_where_they_belong() {
    let style = OutputStyle {
        tools: Some(ToolFamily::Harmony),
        thinking: Some(ThinkingStyle::Channels),
        answer: None,
    };
    let model = Model::new(style, true);
    let answer = model.parse(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>\
         Wait.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
    );
    assert_eq!((answer.reasoning.as_str(), answer.content.as_str()), ("Hm.", "Wait.Yes."));
    assert_eq!(model.parse("Hello there").content, "Hello there");
}

/// What an answer comes to, with its markers as tokens and spelt out.
fn check_answer(style: OutputStyle, text: &str, reasoning: &str, content: &str, calls: &str) {
    for as_tokens in [true, false] {
        let model = Model::new(style, as_tokens);
        for cuts in [&[][..], &[false], &[false, true, false]] {
            let answer = model.parse_cut(&model.tokens.encode(text), cuts, false);
            assert_eq!(answer.reasoning, reasoning, "{text} {answer:?}");
            assert_eq!(answer.content, content, "{text} {answer:?}");
            let found: Vec<_> = answer.calls.iter().map(|(n, _, a)| format!("{n}{a}")).collect();
            assert_eq!(found.join(" "), calls, "{text} {answer:?}");
        }
    }
}

#[test]
fn gemma_writes_values_in_more_than_one_way() {
    let style = OutputStyle {
        tools: Some(ToolFamily::Gemma4),
        thinking: Some(ThinkingStyle::ThoughtChannel),
        answer: None,
    };
    check_answer(style, "<|channel>thought\nHm.\n<channel|>Yes.", "Hm.", "Yes.", "");
    check_answer(style, "<|channel>thought\n<channel|>Yes.", "", "Yes.", "");
    let call = |arguments: &str| format!("<|tool_call>call:get_time{arguments}<tool_call|>");
    let check = |arguments: &str, expected: &str| {
        check_answer(style, &call(arguments), "", "", &format!("get_time{expected}"));
    };
    check(
        "{city:<|\"|>a, \"b\"}<|\"|>,days:5,more:{a:[1,{b:<|\"|>x<|\"|>}]},tags:[]}",
        r#"{"city": "a, \"b\"}", "days": 5, "more": {"a": [1, {"b": "x"}]}, "tags": []}"#,
    );
    // Bare texts, and JSON.
    check("{city:New York,days: 5}", r#"{"city": "New York", "days": 5}"#);
    check("{city:5,exact:True}", r#"{"city": "5", "exact": true}"#);
    check(r#"{"city": "a\"b\n", "tags": ["x"]}"#, r#"{"city": "a\"b\n", "tags": ["x"]}"#);
    check("{}", "{}");
    check_answer(
        style,
        &format!("Look:\n{}{}", call("{}"), call("{days:1}")),
        "",
        "Look:",
        r#"get_time{} get_time{"days": 1}"#,
    );
    let broken = call("{city:<|\"|>x<|\"|> oops}");
    assert_eq!(Model::new(style, true).parse(&broken).content, broken);
}

#[test]
fn minimax_names_arguments_by_their_tags() {
    let style = OutputStyle {
        tools: Some(ToolFamily::MinimaxM3),
        thinking: Some(ThinkingStyle::MinimaxTags),
        answer: None,
    };
    let check = |text: &str, reasoning: &str, content: &str, calls: &str| {
        check_answer(style, &text.replace('~', "]<]minimax[>["), reasoning, content, calls);
    };
    check("<mm:think>Hm.</mm:think>Yes.", "Hm.", "Yes.", "");
    check("</mm:think>Yes.", "", "Yes.", "");
    check("Yes. </mm:think>", "", "Yes. </mm:think>", "");
    check(
        "</mm:think>Look.~<tool_call>\n~<invoke name=\"get_time\">~<city>Oslo~</city>~<tags>\
         ~<item>1~</item>~<item>~<a>x~</a>~</item>~</tags>~<days>5~</days>~</invoke>\n\
         ~<invoke name=\"get_weather\">~</invoke>\n~</tool_call>",
        "",
        "Look.",
        r#"get_time{"city": "Oslo", "tags": [1, {"a": "x"}], "days": 5} get_weather{}"#,
    );
    // Texts as they are, whatever they look like.
    check(
        "~<tool_call>~<invoke name=\"get_time\">~<city><p>\n\"a\"</p></city>~</city>\
         ~<note>null~</note>~<ratio>0.50~</ratio>~</invoke>~</tool_call>",
        "",
        "",
        r#"get_time{"city": "<p>\n\"a\"</p></city>", "note": null, "ratio": 0.50}"#,
    );
    // Marks and tags that models leave out.
    let call = r#"get_time{"city": "a", "days": 1}"#;
    for text in [
        "<tool_call>\n~<invoke name=\"get_time\">~<city>a</city>~<days>1</days>~</invoke></tool_call>",
        "~<tool_call>\n<invoke name=\"get_time\">\n<city>a</city>\n~<days>1~</days>\n</invoke>\n</tool_call>",
        "~<invoke name=\"get_time\">~<city>a~</city>~<days>1~</days>~</invoke>~</tool_call>",
        "~<tool_call>~<invoke name=\"get_time\">~<city>a~</city>~<days>1~</days>~</tool_call>",
        "~<tool_call>~<invoke name=\"get_time\">~<city>a~</city>~<days>1~</days></invoke>",
    ] {
        check(text, "", "", call);
    }
    // A call within thinking, where its marker is a token.
    let thought = "<mm:think>Hm. ~<tool_call>~<invoke name=\"get_time\">~</invoke>~</tool_call>";
    let answer = Model::new(style, true).parse(&thought.replace('~', "]<]minimax[>["));
    assert_eq!((answer.reasoning.as_str(), answer.calls.len()), ("Hm.", 1));
    let broken = "~<tool_call>~<invoke name=\"rm\">~<a>1~</a>~</invoke>~</tool_call>";
    let broken = broken.replace('~', "]<]minimax[>[");
    assert_eq!(Model::new(style, true).parse(&broken).content, broken);
    let format = Model::new(style, true).format;
    assert!(format.prompt_opens_thinking("]~b]ai\n<mm:think>"));
    assert!(!format.prompt_opens_thinking("]~b]ai\n</mm:think>"));
}

#[test]
fn what_stands_around_an_answer_is_not_part_of_it() {
    let style = |tools, thinking, answer| OutputStyle {
        tools: Some(tools),
        thinking: Some(thinking),
        answer: Some(answer),
    };
    let hunyuan =
        style(ToolFamily::ToolCallsJson, ThinkingStyle::ThinkTags, AnswerFrame::AnswerTags);
    let list = r#"[{"name": "get_time", "arguments": {}}]"#;
    check_answer(hunyuan, "<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>", "Hm.", "Yes.", "");
    check_answer(hunyuan, "See <answer>.", "", "See <answer>.", "");
    let call = format!("<think>\n\n</think>\n<tool_calls>{list}</tool_calls>");
    check_answer(hunyuan, &call, "", "", "get_time{}");
    let cohere =
        style(ToolFamily::CohereJson, ThinkingStyle::CohereTags, AnswerFrame::CohereResponse);
    let text = "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>";
    check_answer(cohere, text, "Hm.", "Yes.", "");
    let solar = style(ToolFamily::Solar, ThinkingStyle::SolarTurn, AnswerFrame::SolarTurns);
    let text = "<|think|>Hm.<|end|><|begin|>assistant<|content|>Yes.<|end|>";
    check_answer(solar, text, "Hm.", "Yes.", "");
    let hyperclova = style(
        ToolFamily::HyperclovaJson,
        ThinkingStyle::HyperclovaTurn,
        AnswerFrame::HyperclovaTurns,
    );
    check_answer(hyperclova, "\nYes.<|im_end|>", "", "Yes.", "");
    let thought = "/think\nHm.<|im_end|>\n<|im_start|>assistant";
    check_answer(hyperclova, &format!("{thought}\nYes.<|im_end|>"), "Hm.", "Yes.", "");
    let call = format!("{thought} -> tool/function_call\n{list}<|im_end|>");
    check_answer(hyperclova, &call, "Hm.", "", "get_time{}");
    let format = Model::new(hyperclova, true).format;
    assert!(format.prompt_opens_thinking("<|im_start|>assistant/think\n"));
    assert!(!format.prompt_opens_thinking("<|im_start|>assistant"));
}

#[test]
fn a_call_ends_thinking_where_its_marker_is_a_token() {
    let model = json_tags(true);
    let answer = model.parse(&format!("<think>Hm.\n{CALL}\nSo."));
    assert_eq!((answer.reasoning.as_str(), answer.content.as_str()), ("Hm.", "So."));
    assert_eq!(answer.calls.len(), 1);
    let answer = model.parse("<think>I may <tool_call> or not.</think>No.");
    assert_eq!(answer.reasoning, "I may<tool_call> or not.");
    assert_eq!((answer.content.as_str(), answer.calls.len()), ("No.", 0));
}

#[test]
fn what_follows_a_call_does_not_undo_it() {
    let check = |family, text: &str, content: &str| {
        let style = OutputStyle { tools: Some(family), ..OutputStyle::default() };
        let answer = Model::new(style, true).parse(text);
        assert_eq!((answer.calls.len(), answer.content.as_str()), (1, content), "{answer:?}");
    };
    let call = r#"{"name": "get_time", "arguments": {}}"#;
    check(ToolFamily::MistralJson, &format!("[TOOL_CALLS][{call}, oops"), ", oops");
    check(ToolFamily::LlamaPythonic, "[get_time(), oops", ", oops");
    check(ToolFamily::Olmo3, "<function_calls>\nget_time()\noops", "\noops");
    let lines = format!("<tool_calls>\n{call}\n{call}\n</tool_calls>");
    let style = OutputStyle { tools: Some(ToolFamily::ToolCallsJson), ..OutputStyle::default() };
    assert_eq!(Model::new(style, true).parse(&lines).calls.len(), 2);
}
