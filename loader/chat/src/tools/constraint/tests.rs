//! Grammars against a model that writes at random: whatever it completes is valid, by the word of
//! another validator; what cannot be enforced is refused.

use std::{path::Path, time::Duration};

use serde_json::{Value, json};
use shardpack_formats::{AnswerFrame, OutputStyle};

mod numbers;

use super::*;
use crate::{
    conversation::{OutputDelta, OutputParser},
    tools::{ParserOptions, ToolCallParser, ToolSpec},
};

/// What the vocabulary has tokens for.
const MARKERS: [&str; 69] = [
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[CALL_ID]",
    "[ARGS]",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|end|>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "｜DSML｜",
    "<think>",
    "<seed:tool_call>",
    "</seed:tool_call>",
    "<tool_calls:opensource>",
    "</tool_calls:opensource>",
    "<tool_call:opensource>",
    "</tool_call:opensource>",
    "<tool_sep:opensource>",
    "<arg_key:opensource>",
    "</arg_key:opensource>",
    "<arg_value:opensource>",
    "</arg_value:opensource>",
    "<tool_calls>",
    "</tool_calls>",
    "<TOOLCALL>",
    "</TOOLCALL>",
    "<|tool_call|>",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    "<|im_start|>",
    "<|action_start|>",
    "<|plugin|>",
    "<|action_end|>",
    "<|tools_prefix|>",
    "<|tools_suffix|>",
    "<|begin|>",
    "<|tool_calls|>",
    "<|tool_call:begin|>",
    "<|tool_call:name|>",
    "<|tool_call:args|>",
    "<|tool_call:end|>",
    "<|calls|>",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "<function_calls>",
    "</function_calls>",
    "<|tool_call>",
    "<tool_call|>",
    "<|\"|>",
    "<|content|>",
    "]<]minimax[>[",
];

/// Bytes, then markers as added tokens, then the end of turn.
struct Model {
    format: Arc<OutputFormat>,
    grammars: Grammars,
    markers: Vec<&'static str>,
    stop: TokenId,
}

impl Model {
    fn new(style: OutputStyle, as_tokens: bool) -> Self {
        Self::of(style, as_tokens, |style, id| OutputFormat::new(style, id))
    }

    fn of(
        style: OutputStyle,
        as_tokens: bool,
        format: impl FnOnce(OutputStyle, &dyn Fn(&str) -> Option<TokenId>) -> OutputFormat,
    ) -> Self {
        let mut markers = if as_tokens { MARKERS.to_vec() } else { vec!["<|start|>"] };
        if as_tokens {
            markers.push("</think>");
        }
        let id = |name: &str| {
            let place = markers.iter().position(|marker| *marker == name)?;
            Some(TokenId(256 + place as u32))
        };
        let format = Arc::new(format(style, &id));
        let bytes = (0..=255).map(|byte| TokenText::Bytes(vec![byte]));
        let added = markers.iter().map(|name| TokenText::Added((*name).to_owned()));
        let end = [TokenText::Added("<|im_end|>".to_owned())];
        let mut grammars =
            Grammars::new(Arc::clone(&format), bytes.chain(added).chain(end)).unwrap();
        // Whether a grammar compiles is the same on a busy machine.
        grammars.compile_time = CompileTime { processor: NEVER, clock: NEVER };
        let stop = TokenId(256 + markers.len() as u32);
        Self { format, grammars, markers, stop }
    }

    fn family(family: ToolFamily, as_tokens: bool) -> Self {
        let thinking = match family {
            ToolFamily::Harmony => Some(ThinkingStyle::Channels),
            _ => None,
        };
        Self::new(OutputStyle { tools: Some(family), thinking, answer: answer(family) }, as_tokens)
    }

    fn vocab_size(&self) -> u32 {
        self.stop.0 + 1
    }

    fn bytes(&self, token: TokenId) -> Vec<u8> {
        if let Ok(byte) = u8::try_from(token.0) {
            return vec![byte];
        }
        let name = self.markers.get(token.0 as usize - 256);
        name.map_or(Vec::new(), |name| name.as_bytes().to_vec())
    }

    fn spec(&self, tools: &[(&str, Value)], required: bool) -> ConstraintSpec {
        let tools = tools.iter().map(|(name, schema)| ConstrainedTool {
            name: (*name).to_owned(),
            schema: schema.clone(),
        });
        ConstraintSpec {
            tools: tools.collect(),
            required,
            one_call: false,
            text: None,
            in_thinking: false,
            stop_tokens: vec![self.stop],
        }
    }
}

/// Repeatable randomness.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// One of the allowed tokens; what closes things is likelier, so that walks come to an end.
    fn choose(&mut self, mask: &TokenMask) -> TokenId {
        let weight = |token: u32| match u8::try_from(token) {
            Ok(b'"' | b'}' | b']' | b'<') => 60,
            Ok(b'a'..=b'z' | b'0'..=b'9') => 6,
            Ok(b' '..=b'~') => 2,
            Ok(_) => 1,
            Err(_) => 40,
        };
        let allowed: Vec<u32> =
            (0..mask.vocab_size()).filter(|token| mask.is_allowed(TokenId(*token))).collect();
        assert!(!allowed.is_empty(), "something may always follow");
        let total: u64 = allowed.iter().map(|token| weight(*token)).sum();
        let mut at = self.next() % total;
        for token in &allowed {
            if at < weight(*token) {
                return TokenId(*token);
            }
            at -= weight(*token);
        }
        unreachable!("the weights sum up to the total");
    }
}

/// Tokens of a random model, and whether it came to an end.
fn walk(
    model: &Model,
    constraint: &mut GrammarConstraint,
    random: &mut Random,
    max: usize,
) -> (Vec<TokenId>, bool) {
    let mut tokens = Vec::new();
    for _ in 0..max {
        if constraint.must_stop() {
            return (tokens, true);
        }
        let mut mask = TokenMask::all(model.vocab_size());
        constraint.mask(&mut mask).unwrap();
        let token = random.choose(&mask);
        constraint.accept(token).unwrap();
        if token == model.stop {
            return (tokens, true);
        }
        tokens.push(token);
    }
    (tokens, false)
}

/// Complete calls, whether one is cut, and the text.
fn parse(
    model: &Model,
    tools: &[(&str, Value)],
    tokens: &[TokenId],
) -> (Vec<(String, Value)>, String) {
    let specs: Vec<ToolSpec> = tools
        .iter()
        .map(|(name, schema)| ToolSpec {
            name: (*name).to_owned(),
            schema: schema.clone(),
            validator: None,
        })
        .collect();
    let options =
        ParserOptions { tools: specs.into(), in_thinking: false, one_call: false, nonce: 0 };
    let mut parser = ToolCallParser::new(Arc::clone(&model.format), options);
    let mut deltas = Vec::new();
    for token in tokens {
        deltas.extend(parser.push(*token, &model.bytes(*token)));
    }
    deltas.extend(parser.finish());
    let (mut calls, mut content) = (Vec::new(), String::new());
    let mut open = (String::new(), String::new());
    for delta in deltas {
        match delta {
            OutputDelta::Content(text) => content.push_str(&text),
            OutputDelta::Reasoning(_) => {}
            OutputDelta::ToolCallBegin { name, .. } => open = (name, String::new()),
            OutputDelta::ToolCallArguments { fragment, .. } => open.1.push_str(&fragment),
            OutputDelta::ToolCallEnd { .. } => {
                calls.push((open.0.clone(), serde_json::from_str(&open.1).unwrap()));
            }
        }
    }
    (calls, content)
}

fn judge(schema: &Value, value: &Value, context: &str) {
    let validator = jsonschema::validator_for(schema).unwrap();
    if let Err(error) = validator.validate(value) {
        panic!("{context}: {value} {error} {schema}");
    }
}

const FAMILIES: [ToolFamily; 30] = [
    ToolFamily::JsonTags,
    ToolFamily::LlamaJson,
    ToolFamily::LlamaPythonic,
    ToolFamily::MistralJson,
    ToolFamily::MistralNames,
    ToolFamily::QwenXml,
    ToolFamily::DeepseekV3,
    ToolFamily::DeepseekV31,
    ToolFamily::KimiK2,
    ToolFamily::Glm4,
    ToolFamily::Harmony,
    ToolFamily::MinimaxM2,
    ToolFamily::DeepseekV32,
    ToolFamily::SeedXml,
    ToolFamily::HunyuanXml,
    ToolFamily::DeepseekV4,
    ToolFamily::ToolCallsJson,
    ToolFamily::NemotronJson,
    ToolFamily::NemotronTags,
    ToolFamily::LongcatJson,
    ToolFamily::GraniteJson,
    ToolFamily::CohereJson,
    ToolFamily::HyperclovaJson,
    ToolFamily::InternlmJson,
    ToolFamily::ApertusJson,
    ToolFamily::Solar,
    ToolFamily::Lfm2,
    ToolFamily::Olmo3,
    ToolFamily::Gemma4,
    ToolFamily::MinimaxM3,
];

/// What the family writes around its answers.
fn answer(family: ToolFamily) -> Option<AnswerFrame> {
    match family {
        ToolFamily::Solar => Some(AnswerFrame::SolarTurns),
        ToolFamily::HyperclovaJson => Some(AnswerFrame::HyperclovaTurns),
        ToolFamily::CohereJson => Some(AnswerFrame::CohereResponse),
        _ => None,
    }
}

/// What of a call's beginning makes a lazy grammar begin, as tokens or text.
fn opener(family: ToolFamily) -> &'static [&'static str] {
    match family {
        ToolFamily::JsonTags | ToolFamily::QwenXml | ToolFamily::Glm4 => &["<tool_call>"],
        ToolFamily::LlamaJson => &["{\"name\""],
        ToolFamily::LlamaPythonic => &["[get_time("],
        ToolFamily::MistralJson | ToolFamily::MistralNames => &["[TOOL_CALLS]"],
        ToolFamily::DeepseekV3 | ToolFamily::DeepseekV31 => &["<｜tool▁calls▁begin｜>"],
        ToolFamily::KimiK2 => &["<|tool_calls_section_begin|>"],
        ToolFamily::Harmony => &["<|channel|>", "commentary to=functions."],
        ToolFamily::MinimaxM2 => &["<minimax:tool_call>"],
        ToolFamily::DeepseekV32 | ToolFamily::DeepseekV4 => &["<", "｜DSML｜"],
        ToolFamily::SeedXml => &["<seed:tool_call>"],
        ToolFamily::HunyuanXml => &["<tool_calls:opensource>"],
        ToolFamily::ToolCallsJson => &["<tool_calls>"],
        ToolFamily::NemotronJson => &["<TOOLCALL>"],
        ToolFamily::NemotronTags => &["<toolcall>"],
        ToolFamily::LongcatJson => &["<longcat_tool_call>"],
        ToolFamily::GraniteJson => &["<|tool_call|>"],
        ToolFamily::CohereJson => &["<|START_ACTION|>"],
        ToolFamily::HyperclovaJson => &[" -> tool/function_call"],
        ToolFamily::InternlmJson => &["<|action_start|>"],
        ToolFamily::ApertusJson => &["<|tools_prefix|>"],
        ToolFamily::Solar => &["<|tool_calls|>"],
        ToolFamily::Lfm2 => &["<|tool_call_start|>"],
        ToolFamily::Olmo3 => &["<function_calls>"],
        ToolFamily::Gemma4 => &["<|tool_call>"],
        ToolFamily::MinimaxM3 => &["]<]minimax[>["],
    }
}

fn tools() -> Vec<(&'static str, Value)> {
    let first = json!({"type": "object", "required": ["city", "days"], "properties": {
        "city": {"type": "string"}, "unit": {"enum": ["c", "f"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9}, "exact": {"type": "boolean"}}});
    let second = json!({"type": "object", "properties": {
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
        "note": {"type": ["string", "null"]}, "code": {"type": "string", "maxLength": 4, "minLength": 1}},
        "$defs": {"tag": {"type": "object", "properties": {"a": {"type": "number"}},
            "required": ["a"], "additionalProperties": false}}});
    vec![("get_weather", first), ("get_time", second)]
}

fn check_calls(model: &Model, begun: &[TokenId], seed: u64) -> usize {
    let tools = tools();
    let required = begun.is_empty();
    let mut constraint = model.grammars.constraint(&model.spec(&tools, required)).unwrap();
    for token in begun {
        constraint.accept(*token).unwrap();
    }
    let family = model.format.style().tools;
    let (more, ended) = walk_calls(model, &mut constraint, &mut Random(seed), 600);
    let tokens: Vec<TokenId> = begun.iter().copied().chain(more).collect();
    let (calls, content) = parse(model, &tools, &tokens);
    let text: Vec<u8> = tokens.iter().flat_map(|token| model.bytes(*token)).collect();
    let text = String::from_utf8_lossy(&text).into_owned();
    for (name, arguments) in &calls {
        let schema = &tools.iter().find(|(own, _)| own == name).unwrap().1;
        judge(schema, arguments, &format!("{family:?} {text}"));
    }
    if ended && required {
        assert!(!calls.is_empty(), "{family:?} {text:?}");
        assert!(content.trim().is_empty(), "{family:?} {text:?}: {content:?}");
    }
    calls.len()
}

/// Like [`walk`], but free text ends the walk: a random model would go on for ever.
fn walk_calls(
    model: &Model,
    constraint: &mut GrammarConstraint,
    random: &mut Random,
    max: usize,
) -> (Vec<TokenId>, bool) {
    let mut tokens = Vec::new();
    for _ in 0..max {
        if constraint.must_stop() || matches!(constraint.phase, Phase::Free) {
            return (tokens, true);
        }
        let (more, ended) = walk(model, constraint, random, 1);
        tokens.extend(more);
        if ended {
            return (tokens, true);
        }
    }
    (tokens, false)
}

#[test]
fn every_completed_call_of_a_random_model_is_valid() {
    for family in FAMILIES {
        for as_tokens in [true, false] {
            if !as_tokens && family == ToolFamily::Harmony {
                // Its markers are always tokens.
                continue;
            }
            let model = Model::family(family, as_tokens);
            let id = |part: &str| -> Vec<TokenId> {
                match model.format.marker_token(part) {
                    Some(token) => vec![token],
                    None => part.bytes().map(|byte| TokenId(u32::from(byte))).collect(),
                }
            };
            let begun: Vec<TokenId> = opener(family).iter().flat_map(|part| id(part)).collect();
            let mut completed = [0, 0];
            // A random model seldom spells what ends a text of this family.
            let is_rare = !as_tokens && family == ToolFamily::MinimaxM3;
            for seed in 0..if is_rare { 24 } else { 12 } {
                completed[0] += check_calls(&model, &[], seed);
                completed[1] += check_calls(&model, &begun, seed);
            }
            assert!(completed[0] > 3 && completed[1] > 3, "{family:?} {as_tokens} {completed:?}");
        }
    }
}

#[test]
fn calls_in_the_generic_format_are_constrained_too() {
    for family in [ToolFamily::DeepseekV3, ToolFamily::LlamaJson] {
        let style = OutputStyle { tools: Some(family), ..OutputStyle::default() };
        let model = Model::of(style, true, |style, id| OutputFormat::with_generic_calls(style, id));
        let begun = [model.format.marker_token("<tool_call>").unwrap()];
        let completed: usize = (0..8).map(|seed| check_calls(&model, &begun, seed)).sum();
        assert!(completed > 3, "{family:?} {completed}");
    }
}

#[test]
fn sections_that_are_forgotten_are_constrained_too() {
    for (family, opener) in [
        (ToolFamily::KimiK2, "<|tool_call_begin|>"),
        (ToolFamily::DeepseekV31, "<｜tool▁call▁begin｜>"),
        (ToolFamily::Solar, "<|tool_call:begin|>"),
    ] {
        let model = Model::family(family, true);
        let begun = [model.format.marker_token(opener).unwrap()];
        let completed: usize = (0..8).map(|seed| check_calls(&model, &begun, seed)).sum();
        assert!(completed > 3, "{family:?} {completed}");
    }
}

#[test]
fn arguments_that_a_schema_does_not_name_are_typed_too() {
    let schema = json!({"type": "object", "additionalProperties": {"type": "integer"}});
    let tools = [("f", schema.clone())];
    for family in [
        ToolFamily::QwenXml,
        ToolFamily::SeedXml,
        ToolFamily::HunyuanXml,
        ToolFamily::Glm4,
        ToolFamily::MinimaxM2,
        ToolFamily::DeepseekV32,
        ToolFamily::Lfm2,
        ToolFamily::LlamaPythonic,
    ] {
        let model = Model::family(family, true);
        let spec = ConstraintSpec { one_call: true, ..model.spec(&tools, true) };
        let mut named = 0;
        for seed in 0..12 {
            let mut constraint = model.grammars.constraint(&spec).unwrap();
            let (tokens, _) = walk(&model, &mut constraint, &mut Random(seed), 400);
            for (_, arguments) in parse(&model, &tools, &tokens).0 {
                judge(&schema, &arguments, &format!("{family:?}"));
                named += arguments.as_object().unwrap().len();
            }
        }
        assert!(named > 0, "{family:?}");
    }
    let model = Model::family(ToolFamily::MinimaxM3, true);
    let refused = model.grammars.constraint(&model.spec(&tools, true)).map(drop).unwrap_err();
    assert!(refused.to_string().contains("additionalProperties"), "{refused}");
}

#[test]
fn bare_values_have_the_types_that_references_lead_to() {
    let code = || json!({"$ref": "#/$defs/code"});
    let schema = json!({"$ref": "#/$defs/all", "$defs": {"code": {"enum": ["1", "2"]},
        "all": {"type": "object", "properties": {"a": code(), "b": {"allOf": [code()]}},
            "required": ["a", "b"]}}});
    for family in [
        ToolFamily::QwenXml,
        ToolFamily::SeedXml,
        ToolFamily::HunyuanXml,
        ToolFamily::Glm4,
        ToolFamily::MinimaxM2,
        ToolFamily::MinimaxM3,
        ToolFamily::DeepseekV32,
    ] {
        let model = Model::family(family, true);
        let tools = [("f", schema.clone())];
        let spec = ConstraintSpec { one_call: true, ..model.spec(&tools, true) };
        let mut constraint = model.grammars.constraint(&spec).unwrap();
        let (tokens, ended) = walk(&model, &mut constraint, &mut Random(1), 400);
        let (calls, _) = parse(&model, &tools, &tokens);
        assert!(ended && calls.len() == 1, "{family:?} {calls:?}");
        judge(&schema, &calls[0].1, &format!("{family:?}"));
    }
}

#[test]
fn added_tokens_are_never_part_of_a_text() {
    let model = Model::family(ToolFamily::Harmony, true);
    let schema =
        json!({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]});
    let mut constraint = model.grammars.constraint(&model.spec(&[("f", schema)], true)).unwrap();
    let feed = |constraint: &mut GrammarConstraint, text: &str| {
        for byte in text.bytes() {
            constraint.accept(TokenId(u32::from(byte))).unwrap();
        }
    };
    let marker = |name: &str| model.format.marker_token(name).unwrap();
    constraint.accept(marker("<|channel|>")).unwrap();
    feed(&mut constraint, "commentary to=functions.f ");
    constraint.accept(marker("<|constrain|>")).unwrap();
    feed(&mut constraint, "json");
    constraint.accept(marker("<|message|>")).unwrap();
    feed(&mut constraint, "{\"a\": \"so ");
    let mut mask = TokenMask::all(model.vocab_size());
    constraint.mask(&mut mask).unwrap();
    assert!((256..model.vocab_size()).all(|token| !mask.is_allowed(TokenId(token))));
    assert!(mask.is_allowed(TokenId(u32::from(b'x'))));
}

#[test]
fn thinking_comes_before_a_required_call() {
    let style = OutputStyle {
        tools: Some(ToolFamily::JsonTags),
        thinking: Some(ThinkingStyle::ThinkTags),
        answer: None,
    };
    let model = Model::new(style, true);
    let allowed = |constraint: &mut GrammarConstraint, name: &str| {
        let mut mask = TokenMask::all(model.vocab_size());
        constraint.mask(&mut mask).unwrap();
        mask.is_allowed(model.format.marker_token(name).unwrap_or(model.stop))
    };
    let mut spec = model.spec(&tools(), true);
    let mut constraint = model.grammars.constraint(&spec).unwrap();
    assert!(allowed(&mut constraint, "<think>") && allowed(&mut constraint, "<tool_call>"));
    assert!(!allowed(&mut constraint, "stop"));
    constraint.accept(model.format.marker_token("<think>").unwrap()).unwrap();
    assert!(allowed(&mut constraint, "<tool_call>") && !allowed(&mut constraint, "stop"));
    constraint.accept(model.format.marker_token("</think>").unwrap()).unwrap();
    assert!(allowed(&mut constraint, "<tool_call>") && !allowed(&mut constraint, "<think>"));
    spec.in_thinking = true;
    let mut constraint = model.grammars.constraint(&spec).unwrap();
    constraint.accept(TokenId(65)).unwrap();
    constraint.accept(model.format.marker_token("</think>").unwrap()).unwrap();
    assert!(allowed(&mut constraint, "<tool_call>") && !allowed(&mut constraint, "<think>"));
}

fn text_spec(model: &Model, form: TextForm) -> ConstraintSpec {
    ConstraintSpec { text: Some(form), ..model.spec(&[], false) }
}

#[test]
fn texts_have_the_form_that_was_asked_for() {
    let model = Model::new(OutputStyle::default(), true);
    let check = |form: TextForm, holds: &dyn Fn(&str) -> bool| {
        for seed in 0..20 {
            let mut constraint =
                model.grammars.constraint(&text_spec(&model, form.clone())).unwrap();
            let (tokens, ended) = walk(&model, &mut constraint, &mut Random(seed), 400);
            let text: Vec<u8> = tokens.iter().flat_map(|token| model.bytes(*token)).collect();
            let text = String::from_utf8_lossy(&text).into_owned();
            assert!(!ended || holds(&text), "{form:?} {text:?}");
        }
    };
    let is_object = |text: &str| {
        let value = serde_json::from_str::<Value>(text);
        // A random model may write a number beyond all floats.
        value.map_or_else(|error| error.to_string().contains("number"), |value| value.is_object())
    };
    check(TextForm::Schema(json!({"type": "object"})), &is_object);
    check(TextForm::Regex("[0-9]{3}-[a-z]+".to_owned()), &|text| {
        text.len() > 4 && text.as_bytes()[3] == b'-'
    });
    check(TextForm::Choice(vec!["yes".to_owned(), "no \"way\"".to_owned()]), &|text| {
        ["yes", "no \"way\""].contains(&text)
    });
    check(TextForm::Grammar("start: \"a\" b\nb: /[0-9]/".to_owned()), &|text| {
        text.len() == 2 && text.starts_with('a')
    });
    let refused =
        |form| model.grammars.constraint(&text_spec(&model, form)).map(|_| ()).unwrap_err();
    assert!(matches!(
        refused(TextForm::Regex("(".to_owned())),
        GrammarError::Grammar(_) | GrammarError::Schema(_)
    ));
    refused(TextForm::Grammar("nothing".to_owned()));
    refused(TextForm::Schema(json!({"$ref": "#/$defs/none"})));
}

/// Schemas of our own, of the kinds that go wrong easily.
fn own_schemas() -> Vec<Value> {
    vec![
        json!({"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}),
        json!({"oneOf": [{"type": "string"}, {"type": "integer"}]}),
        json!({"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}},
            "dependencies": {"a": ["b"]}, "additionalProperties": false}),
        json!({"type": "object", "if": {"properties": {"k": {"const": true}}, "required": ["k"]},
            "then": {"required": ["x"]}, "properties": {"k": {"type": "boolean"}, "x": {"type": "integer"}}}),
        json!({"not": {"type": "string"}}),
        json!({"type": "object", "not": {"required": ["a", "b"]},
            "properties": {"a": {"type": "null"}, "b": {"type": "null"}}}),
        json!({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "minItems": 2, "items": false}),
        json!({"type": "number", "multipleOf": 0.5, "minimum": -3, "exclusiveMaximum": 7}),
        json!({"type": "integer", "multipleOf": 7, "minimum": 10, "maximum": 80}),
        json!({"type": "object", "patternProperties": {"^x_": {"type": "integer"}}, "additionalProperties": false}),
        json!({"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}, "additionalProperties": {"type": "null"}}),
        json!({"type": "string", "format": "date"}),
        json!({"type": "string", "pattern": "^[A-Z]{2}[0-9]+$", "maxLength": 6}),
        json!({"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}},
            {"required": ["a"], "properties": {"a": {"minimum": 3}}}]}),
        json!({"enum": [1, "two", null, {"a": [true]}]}),
        json!({"type": ["integer", "null"]}),
        json!({"type": "integer", "minimum": 9_007_199_254_740_993_i64, "maximum": 9_007_199_254_741_000_i64}),
        json!({"type": "integer", "exclusiveMinimum": 9_223_372_036_854_770_000_i64, "maximum": i64::MAX}),
        json!({"type": "integer", "minimum": i64::MIN, "exclusiveMaximum": -9_223_372_036_854_770_000_i64}),
        json!({"type": "number", "minimum": 1, "maximum": u64::MAX}),
        json!({"enum": [1_i64 << 60, -(1_i64 << 61)]}),
        json!({"$defs": {"a[b]/c": {"type": "boolean"}, "n": {"$anchor": "nn", "type": "null"}},
            "type": "array", "minItems": 2, "prefixItems": [{"$ref": "#/$defs/a%5Bb%5D~1c"}, {"$ref": "#nn"}]}),
        json!({"$defs": {"n": {"type": "object", "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]}},
            "required": ["next"]}}, "$ref": "#/$defs/n"}),
    ]
}

/// Refused, or judged over random walks: how many texts were completed and judged.
fn check_schema(
    model: &Model,
    name: &str,
    schema: &Value,
    walks: u64,
) -> Result<usize, GrammarError> {
    let spec = text_spec(model, TextForm::Schema(schema.clone()));
    let Ok(validator) = jsonschema::validator_for(schema) else { return Ok(0) };
    let mut judged = 0;
    for seed in 0..walks {
        let mut constraint = model.grammars.constraint(&spec)?;
        let (tokens, ended) = walk(model, &mut constraint, &mut Random(seed), 500);
        if !ended {
            continue;
        }
        let text: Vec<u8> = tokens.iter().flat_map(|token| model.bytes(*token)).collect();
        let text = String::from_utf8(text).unwrap();
        // Numbers beyond all floats are no JSON to most readers.
        let Ok(value) = serde_json::from_str::<Value>(&text) else { continue };
        if let Err(error) = validator.validate(&value) {
            panic!("{name}: {text} {error} {schema}");
        }
        judged += 1;
    }
    Ok(judged)
}

#[test]
fn schemas_hold_for_whatever_a_random_model_completes() {
    let model = Model::new(OutputStyle::default(), true);
    for schema in own_schemas() {
        let judged = check_schema(&model, "own", &schema, 24).unwrap();
        assert!(judged > 0, "no text was completed: {schema}");
    }
}

#[test]
#[expect(clippy::print_stderr, reason = "says what was refused")]
fn at_most_one_in_twenty_published_schemas_is_refused() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .map(|folder| folder.join("tests/data/schemas/schemas.jsonl"))
        .find(|file| file.exists())
        .expect("the repository holds a sample of schemas");
    let model = Model::new(OutputStyle::default(), true);
    let text = std::fs::read_to_string(file).unwrap();
    let (mut all, mut judged, mut refused) = (0, 0, Vec::new());
    for line in text.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        let name = line["name"].as_str().unwrap();
        all += 1;
        match check_schema(&model, name, &line["schema"], 3) {
            Ok(texts) => judged += texts,
            Err(error) => refused.push(format!("{name}: {error}")),
        }
    }
    eprintln!("{} of {all} refused, {judged} texts judged\n{}", refused.len(), refused.join("\n"));
    assert_eq!(all, 285);
    assert!(judged > 500, "{judged} texts are valid by the word of another validator");
    assert!(refused.len() * 20 <= all, "{} of {all}: {refused:#?}", refused.len());
}

/// Longer than any test.
const NEVER: Duration = Duration::from_hours(1000);

#[test]
fn hostile_schemas_are_refused_or_enforced() {
    let mut model = Model::new(OutputStyle::default(), true);
    let compile = |model: &Model, schema: Value| {
        let spec = text_spec(model, TextForm::Schema(schema));
        model.grammars.constraint(&spec)
    };
    let wide: Vec<Value> = (0..400)
        .map(|n| {
            json!({"anyOf": [{"properties": {n.to_string(): {"type": "string"}}},
            {"type": "null"}, {"type": "object"}]})
        })
        .collect();
    // What compiles is enforced: a text is not complete before it is as long as it must be.
    for (schema, opening, may_end) in [
        (json!({"type": "string", "pattern": "(a{1,1000}){1,1000}"}), b'"', true),
        (json!({"type": "string", "minLength": 1_000_000_000_u64}), b'"', false),
        (
            json!({"type": "array", "items": {"type": "string"}, "minItems": 1_000_000_000_u64}),
            b'[',
            false,
        ),
    ] {
        let mut constraint = compile(&model, schema.clone()).unwrap();
        let (tokens, ended) = walk(&model, &mut constraint, &mut Random(1), 20);
        let text: Vec<u8> = tokens.iter().flat_map(|token| model.bytes(*token)).collect();
        assert_eq!(text[0], opening, "{schema}: {text:?}");
        assert!(may_end || !ended, "{schema}: {text:?}");
    }
    // What takes as long as it is let is ended by its processor time, whatever the clock says.
    model.grammars.compile_time.processor = COMPILE_TIMEOUT;
    let refused = compile(&model, json!({ "allOf": wide })).map(drop).unwrap_err();
    assert!(matches!(refused, GrammarError::Schema(_) | GrammarError::Timeout), "{refused}");
}
