//! The rules of streams, each with the test that holds it; those without one elsewhere are here.
//!
//! | rule | test |
//! |---|---|
//! | headers of a stream | [`streams_are_neither_kept_nor_collected_on_their_way`] |
//! | chat: frames, one identity, the role once, `[DONE]`, usage last and alone | `stream_is_as_the_sdks_expect` |
//! | chat: calls by contiguous index, id and name once, arguments in pieces | `chat_streams_calls_by_index_with_one_id_each` |
//! | ids of calls are unique texts; nine letters and digits for Mistral | [`ids_of_calls_are_of_their_family`] |
//! | `tool_calls` ends an answer that calls, streamed and whole | [`answers_that_call_end_so_and_those_cut_off_with_length`] |
//! | a call that is cut off: `length`, and none | the same, `whole_chat_completions_hold_the_same` |
//! | thinking under both names, taken back in history, counted | [`thinking_is_apart_in_every_dialect`], `thinking_has_one_name` |
//! | cached tokens in every dialect | `chat_streams_calls…`, `messages_put_each_piece…`, `responses_give_each_piece…` |
//! | errors before the first byte have a status | `failure_before_the_first_token_has_a_status` |
//! | errors after it are an event, without a normal end | `failure_after_the_first_token_ends_the_stream_with_an_error`, `failing_streams_end_with_the_dialects_error` |
//! | a silent stream is kept alive, in its dialect's words | `comments_keep_a_silent_stream_alive`, [`silent_messages_are_kept_alive_by_pings`] |
//! | responses: every event in order, numbered | `responses_stream_has_every_event_in_order`, `responses_give_each_piece_its_item` |
//! | responses: `failed` and `incomplete` with their reasons | `responses_that_are_cut_off_are_incomplete`, [`a_prompt_without_room_fails_in_the_stream_of_responses_and_by_status_elsewhere`] |
//! | rate limits say "try again in" | `keys_beyond_their_limit_are_told_when_to_come_back` |
//! | messages: every event in order, blocks by index | `messages_stream_has_every_event_in_order`, `messages_put_each_piece_in_its_block` |
//! | messages: the service's words for its ends and its errors | `messages_end_as_their_clients_know_it`, `errors_have_the_shape_of_their_dialect` |
//! | messages: a changing header is left out, results of tools stay in order | `blocks_of_messages_become_turns` |
//! | characters are never broken, whatever the model says is no error | `stream_never_breaks_a_character`, `no_model_output_is_an_error_in_any_dialect` |

use std::io::{BufRead, BufReader};

use serde_json::{Value, json};
use shardpack_chat::model::ChatModel;
use shardpack_engine_api::FinishReason;
use shardpack_formats::{OutputStyle, ThinkingStyle, ToolFamily};

use super::{
    STOP, ServerLimits,
    scripted::{PATIENT, Scripted, Step, kjv, named_events, start, start_with},
};

const LENGTH: Step = Step::Finish(FinishReason::Length);
const CALL: &str =
    "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>";
const CUT: &str = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"city\": \"Ro";

/// A dialect's address and its request.
fn requests() -> [(&'static str, Value); 3] {
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let messages = json!([{"role": "user", "content": "Weather?"}]);
    let function = json!({"name": "f", "parameters": schema});
    [
        (
            "/v1/chat/completions",
            json!({"messages": messages, "tools": [{"type": "function", "function": function}]}),
        ),
        (
            "/v1/responses",
            json!({"input": messages,
                "tools": [{"type": "function", "name": "f", "parameters": schema}]}),
        ),
        (
            "/v1/messages",
            json!({"messages": messages, "max_tokens": 50,
                "tools": [{"name": "f", "input_schema": schema}]}),
        ),
    ]
}

/// Why a whole answer ended, and how many complete calls it has.
fn end(found: &Value) -> (String, usize) {
    let calls = |items: &Value, complete: &dyn Fn(&Value) -> bool| {
        items.as_array().map_or(0, |items| items.iter().filter(|item| complete(item)).count())
    };
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    if let Some(choice) = found["choices"].get(0) {
        let complete = |call: &Value| {
            let arguments = call["function"]["arguments"].as_str().unwrap();
            serde_json::from_str::<Value>(arguments).is_ok()
        };
        let count = calls(&choice["message"]["tool_calls"], &complete);
        return (text(&choice["finish_reason"]), count);
    }
    if found["object"] == "response" {
        let complete =
            |item: &Value| item["type"] == "function_call" && item["status"] == "completed";
        return (text(&found["status"]), calls(&found["output"], &complete));
    }
    let complete = |block: &Value| block["type"] == "tool_use";
    (text(&found["stop_reason"]), calls(&found["content"], &complete))
}

#[test]
fn answers_that_call_end_so_and_those_cut_off_with_length() {
    let check = |script: Vec<Step>, ends: [&str; 3], count: usize| {
        let server = start(script);
        for ((path, mut body), expected) in requests().into_iter().zip(ends) {
            let reply = server.post(path, &body);
            assert_eq!(end(&reply.json()), (expected.to_owned(), count), "{}", reply.body);
            body["stream"] = true.into();
            let stream = server.post(path, &body);
            assert_eq!(stream.status, 200);
            let said = stream.body.contains(&format!("\"{expected}\""));
            assert!(said, "{path} streams {expected}: {}", stream.body);
            let other = if count == 0 { ENDS_OF_CALLS } else { ENDS_OF_CUT_ONES };
            assert!(!other.iter().any(|word| stream.body.contains(word)), "{}", stream.body);
        }
    };
    check(vec![Step::Say(CALL), STOP], ["tool_calls", "completed", "tool_use"], 1);
    check(vec![Step::Say(CUT), LENGTH], ["length", "incomplete", "max_tokens"], 0);
}

/// What streams say whose call is complete.
const ENDS_OF_CALLS: [&str; 3] =
    ["\"finish_reason\":\"tool_calls\"", "arguments.done", "\"stop_reason\":\"tool_use\""];
/// What streams say whose call was cut off.
const ENDS_OF_CUT_ONES: [&str; 3] =
    ["\"finish_reason\":\"length\"", "response.incomplete", "\"stop_reason\":\"max_tokens\""];

#[test]
fn streams_are_neither_kept_nor_collected_on_their_way() {
    let server = start(vec![Step::Say("Jesus wept."), STOP]);
    for (path, mut body) in requests() {
        body["stream"] = true.into();
        let reply = server.post(path, &body);
        assert_eq!(reply.header("content-type"), Some("text/event-stream"), "{path}");
        assert_eq!(reply.header("cache-control"), Some("no-cache"), "{path}");
        assert_eq!(reply.header("x-accel-buffering"), Some("no"), "{path}");
        assert!(reply.header("x-request-id").is_some(), "{path}");
    }
}

#[test]
fn a_prompt_without_room_fails_in_the_stream_of_responses_and_by_status_elsewhere() {
    let server = start(vec![STOP]);
    let long = "word ".repeat(5000);
    let body = json!({"input": long, "stream": true});
    let reply = server.post("/v1/responses", &body);
    assert_eq!(reply.status, 200, "{}", reply.body);
    assert!(reply.header("content-type").unwrap().starts_with("text/event-stream"));
    let events: Vec<Value> = reply
        .body
        .lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .map(|data| data.parse().unwrap())
        .collect();
    let kinds: Vec<&Value> = events.iter().map(|event| &event["type"]).collect();
    assert_eq!(kinds, ["response.created", "response.in_progress", "response.failed"]);
    let failed = &events[2]["response"];
    assert_eq!(failed["status"], "failed");
    assert_eq!(failed["error"]["code"], "context_length_exceeded");
    let whole = server.post("/v1/responses", &json!({"input": long}));
    let messages = json!([{"role": "user", "content": long}]);
    let chat = server.post("/v1/chat/completions", &json!({"messages": messages, "stream": true}));
    for reply in [whole, chat] {
        let (status, message) = reply.error();
        assert!(status == 400 && message.contains("context_length_exceeded"), "{message}");
    }
    assert!(server.seen.try_recv().is_err(), "nothing reached the engine");
}

#[test]
fn silent_messages_are_kept_alive_by_pings() {
    let limits = ServerLimits { keep_alive: std::time::Duration::from_millis(5), ..PATIENT };
    let model = ChatModel::open(kjv()).unwrap();
    let server = start_with(vec![Step::Gate, Step::Say("Jesus"), STOP], limits, model);
    let body = json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 5,
        "stream": true});
    let mut reader = BufReader::new(server.send("POST", "/v1/messages", &body.to_string()));
    let (mut pings, mut line) = (0, String::new());
    // The first stands at the beginning of every answer.
    while pings < 3 {
        line.clear();
        assert_ne!(reader.read_line(&mut line).unwrap(), 0, "the stream ended");
        pings += u32::from(line == "event: ping\n");
    }
    server.gate.send(()).unwrap();
    let rest: Vec<String> = reader.lines().map(Result::unwrap).collect();
    assert!(rest.iter().any(|line| line == "event: message_stop"), "{rest:?}");
}

fn styled(style: OutputStyle, script: Vec<Step>) -> Scripted {
    let model = ChatModel::open(kjv()).unwrap().with_style(Some(style));
    start_with(script, PATIENT, model)
}

#[test]
fn thinking_is_apart_in_every_dialect() {
    let style = OutputStyle {
        tools: Some(ToolFamily::JsonTags),
        thinking: Some(ThinkingStyle::ThinkTags),
        answer: None,
    };
    let script = vec![Step::Say("<think>Rome it is.</think>It is sunny."), STOP];
    let server = styled(style, script);
    let [(chat, body), (responses, input), (messages, blocks)] = requests();
    let found = server.post(chat, &body).json();
    let message = &found["choices"][0]["message"];
    assert_eq!(
        (&message["content"], &message["reasoning_content"]),
        (&json!("It is sunny."), &json!("Rome it is."))
    );
    assert_eq!(message["reasoning"], message["reasoning_content"], "under both names");
    let details = &found["usage"]["completion_tokens_details"];
    assert!(details["reasoning_tokens"].as_u64().unwrap() > 2, "{details}");
    let found = server.post(responses, &input).json();
    assert_eq!(found["output"][0]["content"][0]["text"], "Rome it is.");
    assert_eq!(found["output"][1]["content"][0]["text"], "It is sunny.");
    let mut streamed = blocks.clone();
    streamed["stream"] = true.into();
    let events = named_events(&server.post(messages, &streamed));
    let of = |kind: &str, key: &str| -> String {
        let deltas = events.iter().filter(|(_, event)| event["delta"]["type"] == kind);
        deltas.map(|(_, event)| event["delta"][key].as_str().unwrap()).collect()
    };
    assert_eq!(of("thinking_delta", "thinking"), "Rome it is.");
    assert_eq!(of("text_delta", "text"), "It is sunny.");
    assert!(!of("signature_delta", "signature").is_empty());
}

#[test]
fn ids_of_calls_are_of_their_family() {
    let ids = |style: ToolFamily, text: &'static str| -> Vec<String> {
        let style = OutputStyle { tools: Some(style), ..OutputStyle::default() };
        let server = styled(style, vec![Step::Say(text), STOP]);
        let [(chat, body), ..] = requests();
        let found = server.post(chat, &body).json();
        let calls = found["choices"][0]["message"]["tool_calls"].as_array().unwrap().clone();
        calls.iter().map(|call| call["id"].as_str().unwrap().to_owned()).collect()
    };
    let mistral = ids(
        ToolFamily::MistralJson,
        "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {}}, {\"name\": \"f\", \"arguments\": {}}]",
    );
    assert!(mistral.len() == 2 && mistral[0] != mistral[1], "{mistral:?}");
    let is_plain = |id: &String| id.len() == 9 && id.bytes().all(|b| b.is_ascii_alphanumeric());
    assert!(mistral.iter().all(is_plain), "{mistral:?}");
    let tags = ids(ToolFamily::JsonTags, CALL);
    assert!(tags[0].starts_with("call_"), "{tags:?}");
}
