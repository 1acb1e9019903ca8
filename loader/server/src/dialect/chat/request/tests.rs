//! Bodies that are understood, and those that are refused.

use proptest::prelude::*;
use shardpack_chat::{
    conversation::{Limits, ResponseFormat, SamplingRequest, ToolChoice},
    json::Json,
};

use super::{parse as parse_body, *};
use crate::dialect::parse_object;
use crate::{
    dialect::{
        params::{MESSAGES_MAX, STOPS_MAX},
        tools::TOOLS_MAX,
    },
    error::ErrorKind,
};

fn parse(body: &[u8]) -> Result<ParsedRequest, ApiError> {
    parse_body(parse_object(body)?)
}

/// A request of one message with further members.
fn parse_with(members: &str) -> Result<ParsedRequest, ApiError> {
    let comma = if members.is_empty() { "" } else { "," };
    parse(format!(r#"{{"messages":[{{"role":"user","content":"a"}}]{comma}{members}}}"#).as_bytes())
}

fn accepted(members: &str) -> ParsedRequest {
    parse_with(members).unwrap_or_else(|error| panic!("{members}: {error:?}"))
}

#[test]
fn absent_and_null_are_the_same() {
    let call = accepted("");
    let nulls = accepted(
        r#""model":null,"temperature":null,"seed":null,"max_tokens":null,"stop":null,"n":null,
        "stream":null,"stream_options":null,"tools":null,"tool_choice":null,"logit_bias":null,
        "response_format":null,"chat_template_kwargs":null,"mystery":null"#,
    );
    assert_eq!(call.request, nulls.request);
    assert_eq!((call.stream, call.model), (false, None));
    assert!(matches!(
        call.writer_options,
        WriterOptions::Chat(Options { include_usage: false, .. })
    ));
    assert!(nulls.ignored.is_empty());
}

#[test]
fn predictions_are_texts() {
    let told = |members: &str| accepted(members).request.prediction;
    assert_eq!(told(""), None);
    let text = |content: &str| format!(r#""prediction":{{"type":"content","content":{content}}}"#);
    assert_eq!(told(&text("\"ab\"")).as_deref(), Some("ab"));
    let parts = r#"[{"type":"text","text":"a"},{"type":"text","text":"b"}]"#;
    assert_eq!(told(&text(parts)).as_deref(), Some("ab"));
    for wrong in [
        r#""prediction":"ab""#,
        r#""prediction":{"content":"ab"}"#,
        r#""prediction":{"type":"tokens","content":"ab"}"#,
        r#""prediction":{"type":"content"}"#,
        r#""prediction":{"type":"content","content":[{"type":"image"}]}"#,
    ] {
        let error = parse_with(wrong).unwrap_err();
        assert!(error.message.contains("prediction"), "{wrong}: {error:?}");
    }
}

#[test]
fn values_are_taken() {
    let call = accepted(
        r#""model":"m","temperature":0.5,"seed":7.0,"max_tokens":3,"max_completion_tokens":4,
        "stop":["a","b"],"stream":true,"stream_options":{"include_usage":true},
        "reasoning_effort":"low","chat_template_kwargs":{"z":1,"a":2}"#,
    );
    assert_eq!(call.model.as_deref(), Some("m"));
    let sampling =
        SamplingRequest { temperature: Some(0.5), seed: Some(7), ..SamplingRequest::default() };
    assert_eq!(call.request.sampling, sampling);
    let stop = vec!["a".to_owned(), "b".to_owned()];
    assert_eq!(call.request.limits, Limits { max_tokens: Some(4), stop, ..Limits::default() });
    assert!(
        call.stream
            && matches!(
                call.writer_options,
                WriterOptions::Chat(Options { include_usage: true, .. })
            )
    );
    let kwargs = serde_json::to_string(&call.request.template_kwargs).unwrap();
    assert_eq!(kwargs, r#"{"z":1,"a":2}"#);
    assert_eq!(call.request.reasoning.effort.as_deref(), Some("low"));
    assert_eq!(accepted(r#""stop":"x""#).request.limits.stop, ["x"]);
    assert_eq!(accepted(r#""max_tokens":99999999999"#).request.limits.max_tokens, Some(u32::MAX));
    assert_eq!(accepted(r#""max_tokens":-1"#).request.limits.max_tokens, None);
    assert!(accepted(r#""stop":["",""]"#).request.limits.stop.is_empty());
    assert_eq!(accepted(r#""repeat_penalty":1.5"#).request.sampling.repetition_penalty, Some(1.5));
    assert_eq!(accepted(r#""enable_thinking":false"#).request.reasoning.enabled, Some(false));
    let thinking = accepted(r#""thinking":{"type":"enabled","budget_tokens":9}"#).request.reasoning;
    assert_eq!((thinking.enabled, thinking.budget_tokens), (Some(true), Some(9)));
}

#[test]
fn values_that_change_nothing_are_accepted() {
    let call = accepted(
        r#""n":1,"top_p":1,"top_k":-1,"min_p":0.0,"presence_penalty":0,"frequency_penalty":-0.0,
        "repetition_penalty":1.0,"logprobs":false,"top_logprobs":0,"logit_bias":{},
        "response_format":{"type":"text"},"modalities":["text"],"parallel_tool_calls":true,
        "tool_choice":"auto","user":"u","metadata":{},"store":true"#,
    );
    assert!(call.ignored.is_empty(), "{:?}", call.ignored);
}

#[test]
fn what_cannot_be_honoured_is_refused_by_name() {
    let check = |members: &str, param: &str| {
        let error = parse_with(members).expect_err(members);
        assert_eq!((error.kind, error.param.as_deref()), (ErrorKind::Invalid, Some(param)));
        assert!(error.message.starts_with(param.split('[').next().unwrap()), "{error}");
    };
    check(r#""n":0"#, "n");
    check(r#""n":129"#, "n");
    check(r#""top_p":1.1"#, "top_p");
    check(r#""top_k":-2"#, "top_k");
    check(r#""min_p":1.1"#, "min_p");
    check(r#""presence_penalty":2.5"#, "presence_penalty");
    check(r#""frequency_penalty":"0""#, "frequency_penalty");
    check(r#""repetition_penalty":0"#, "repetition_penalty");
    check(r#""logprobs":3"#, "logprobs");
    check(r#""top_logprobs":5"#, "top_logprobs");
    check(r#""logit_bias":{"5":101}"#, "logit_bias.5");
    check(r#""logit_bias":{"x":1}"#, "logit_bias.x");
    check(r#""response_format":{"type":"json_schema"}"#, "response_format");
    check(r#""modalities":["audio"]"#, "modalities");
    check(r#""parallel_tool_calls":1"#, "parallel_tool_calls");
    check(r#""tool_choice":"required""#, "tool_choice");
    check(r#""tool_choice":{"type":"function"}"#, "tool_choice");
    check(r#""temperature":2.1"#, "temperature");
    check(r#""temperature":"0""#, "temperature");
    check(r#""seed":1.5"#, "seed");
    check(r#""seed":1e30"#, "seed");
    check(r#""max_tokens":0"#, "max_tokens");
    check(r#""stop":7"#, "stop");
    check(r#""stop":["a",7]"#, "stop[1]");
    check(r#""stream":1"#, "stream");
    check(r#""tools":{}"#, "tools");
    check(r#""tools":[7]"#, "tools[0]");
    check(r#""tools":[{"type":"function"}]"#, "tools[0].function.name");
    check(r#""chat_template_kwargs":{"messages":[]}"#, "chat_template_kwargs.messages");
    let stops: Vec<String> = (0..=STOPS_MAX).map(|n| format!(r#""{n}""#)).collect();
    check(&format!(r#""stop":[{}]"#, stops.join(",")), "stop");
    let tools = vec!["{}"; TOOLS_MAX + 1].join(",");
    check(&format!(r#""tools":[{tools}]"#), "tools");
}

#[test]
fn faults_of_messages_name_their_place() {
    let check = |messages: &str, param: &str| {
        let error = parse(format!(r#"{{"messages":{messages}}}"#).as_bytes()).unwrap_err();
        assert_eq!(error.param.as_deref(), Some(param), "{messages}");
    };
    check("[]", "messages");
    check("7", "messages");
    check(r#"[{"role":"user","content":"a"},{"role":"bot"}]"#, "messages[1].role");
    check(r#"[{"role":"user","content":[{"type":"image_url"}]}]"#, "messages[0].content[0].type");
    let many = vec![r#"{"role":"user","content":"a"}"#; MESSAGES_MAX + 1].join(",");
    check(&format!("[{many}]"), "messages");
}

#[test]
fn unknown_parameters_and_foreign_tools_are_remembered() {
    let call = accepted(
        r#""mystery":{"a":1},"tools":[{"type":"web_search"},{"type":"function","function":{"name":"f"}}]"#,
    );
    assert_eq!(call.ignored, ["tools[0]", "mystery"]);
    assert_eq!(call.request.tools.len(), 1);
    let none = accepted(r#""tools":[{"function":{"name":"f"}}],"tool_choice":"none""#);
    assert!(none.request.visible_tools().is_empty());
}

#[test]
fn choices_of_tools_have_every_form() {
    let check = |choice: &str, expected: ToolChoice| {
        let tools = r#""tools":[{"function":{"name":"f"}},{"type":"function","name":"g"}]"#;
        let call = accepted(&format!(r#"{tools},"tool_choice":{choice}"#));
        assert_eq!(call.request.tool_choice, expected, "{choice}");
    };
    check("null", ToolChoice::Auto);
    check(r#""required""#, ToolChoice::Required);
    let named = || ToolChoice::Named("g".to_owned());
    check(r#"{"type":"function","function":{"name":"g"}}"#, named());
    check(r#"{"type":"function","name":"g"}"#, named());
    check(
        r#"{"type":"allowed_tools","allowed_tools":{"mode":"required","tools":[{"type":"function","function":{"name":"f"}}]}}"#,
        ToolChoice::Allowed { names: vec!["f".to_owned()], required: true },
    );
}

#[test]
fn formats_of_answers_are_taken() {
    let schema = || Json::parse(br#"{"type":"object"}"#).unwrap();
    let check = |members: &str, expected: ResponseFormat| {
        assert_eq!(accepted(members).request.response_format, expected, "{members}");
    };
    check(r#""response_format":{"type":"json_object"}"#, ResponseFormat::JsonObject);
    check(
        r#""response_format":{"type":"json_schema","json_schema":{"name":"n","strict":true,"schema":{"type":"object"}}}"#,
        ResponseFormat::JsonSchema { schema: schema(), strict: true, param: "response_format" },
    );
    let advice = |param| ResponseFormat::JsonSchema { schema: schema(), strict: false, param };
    check(
        r#""response_format":{"type":"json_object","schema":{"type":"object"}}"#,
        advice("response_format"),
    );
    check(r#""json_schema":{"type":"object"}"#, advice("json_schema"));
    check(r#""guided_regex":"a+""#, ResponseFormat::Regex("a+".to_owned()));
    check(
        r#""structured_outputs":{"choice":["a","b"]}"#,
        ResponseFormat::Choice(vec!["a".to_owned(), "b".to_owned()]),
    );
}

#[test]
fn patterns_and_grammars_are_bounded_wherever_they_stand() {
    let check = |members: &str, text: &str, param: &str, bytes_max: usize| {
        let with = |text: String| {
            let text = serde_json::to_string(&text).unwrap();
            parse_with(&members.replace("TEXT", &text)).map(|_| ())
        };
        with(text.repeat(bytes_max / text.len())).unwrap();
        let error = with(text.repeat(bytes_max / text.len()) + text).unwrap_err();
        assert_eq!((error.kind, error.param.as_deref()), (ErrorKind::Invalid, Some(param)));
        let found = format!("at most {bytes_max} bytes, found {}", bytes_max + text.len());
        assert!(error.message.contains(&found), "{}", error.message);
    };
    let [pattern, grammar] = [64 << 10, 256 << 10];
    let format =
        |kind: &str, name: &str| format!(r#""response_format":{{"type":"{kind}","{name}":TEXT}}"#);
    check(&format("regex", "pattern"), "a", "response_format.pattern", pattern);
    check(&format("regex", "regex"), "a", "response_format.regex", pattern);
    check(&format("grammar", "grammar"), "a", "response_format.grammar", grammar);
    check(&format("lark", "grammar"), "a", "response_format.grammar", grammar);
    check(r#""guided_regex":TEXT"#, "a", "guided_regex", pattern);
    check(r#""guided_grammar":TEXT"#, "a", "guided_grammar", grammar);
    check(r#""grammar":TEXT"#, "a", "grammar", grammar);
    check(r#""structured_outputs":{"regex":TEXT}"#, "a", "regex", pattern);
    check(r#""structured_outputs":{"grammar":TEXT}"#, "a", "grammar", grammar);
    let texts = format!("[{}]", [r#""a""#; 4].join(",").replace('a', &"a".repeat(grammar / 4)));
    parse_with(&format!(r#""guided_choice":{texts}"#)).unwrap();
    let texts = texts.replacen('[', "[\"b\",", 1);
    let error = parse_with(&format!(r#""guided_choice":{texts}"#)).unwrap_err();
    assert_eq!(error.param.as_deref(), Some("guided_choice"));
}

/// Names that the parser knows, with values of any kind: nothing panics, faults are the client's.
#[test]
fn any_value_of_any_parameter_is_taken_or_refused() {
    let values = [
        "0",
        "-1",
        "1e300",
        "\"\"",
        "\"auto\"",
        "true",
        "[]",
        "[[]]",
        "[{}]",
        "{}",
        r#"{"type":{}}"#,
    ];
    let known = [
        "messages",
        "tools",
        "tool_choice",
        "chat_template_kwargs",
        "reasoning_effort",
        "temperature",
        "seed",
        "max_tokens",
        "stop",
        "model",
        "stream",
        "stream_options",
        "n",
        "top_p",
        "top_k",
        "logit_bias",
        "logprobs",
        "top_logprobs",
        "response_format",
        "structured_outputs",
        "reasoning",
        "stop_token_ids",
        "prediction",
    ];
    for name in known.into_iter().chain(UNSUPPORTED.map(|(name, _)| name)) {
        for value in values {
            if let Err(error) = parse_with(&format!(r#""{name}":{value}"#)) {
                assert_eq!(error.kind, ErrorKind::Invalid, "{name}: {value}");
            }
        }
    }
}

proptest! {
    #[test]
    fn damaged_bodies_are_the_clients_fault(place in 0usize..200, byte: u8) {
        let body = r#"{"messages":[{"role":"assistant","content":[{"type":"text","text":"a"}],"tool_calls":[{"id":"1","function":{"name":"f","arguments":"{}"}}]}],"stop":["a"],"seed":1.0}"#;
        let mut body = body.as_bytes().to_vec();
        let place = place % body.len();
        body[place] = byte;
        if let Err(error) = parse(&body) {
            prop_assert_eq!(error.kind, ErrorKind::Invalid);
        }
    }
}
