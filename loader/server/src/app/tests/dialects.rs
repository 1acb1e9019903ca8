//! Every dialect over real sockets: requests as clients send them, answers as they parse them.

use serde_json::{Value, json};
use shardpack_engine_api::FinishReason;

use super::{
    STOP,
    scripted::{Seen, Step, named_events, start},
};

const LENGTH: Step = Step::Finish(FinishReason::Length);

fn user(text: &str) -> Value {
    json!([{"role": "user", "content": text}])
}

fn names(events: &[(String, Value)]) -> Vec<&str> {
    events.iter().map(|(name, _)| name.as_str()).collect()
}

#[test]
fn completions_continue_texts_and_tokens() {
    let server = start(vec![Step::Say(" wept."), STOP]);
    let reply = server.post("/v1/completions", &json!({"prompt": ["Jesus", [5, 6]], "n": 2}));
    let found = reply.json();
    assert_eq!((reply.status, &found["object"]), (200, &json!("text_completion")));
    let choices = found["choices"].as_array().unwrap();
    let indices: Vec<u64> = choices.iter().map(|c| c["index"].as_u64().unwrap()).collect();
    assert_eq!(indices, [0, 1, 2, 3]);
    assert!(choices.iter().all(|c| c["text"] == " wept." && c["finish_reason"] == "stop"));
    assert_eq!(found["usage"]["completion_tokens"], 12);
    let seeds: Vec<u64> = (0..4).map(|_| server.submitted().sampling.seed).collect();
    assert!(seeds[0] == seeds[2] && seeds[0] != seeds[1], "answers differ, prompts do not");

    let reply = server.post(
        "/v1/completions",
        &json!({"prompt": "Jesus", "stream": true, "stream_options": {"include_usage": true}}),
    );
    assert_eq!(server.submitted().max_tokens, 16);
    let events = reply.events();
    let (done, events) = events.split_last().unwrap();
    assert_eq!(*done, "[DONE]");
    let events: Vec<Value> =
        events.iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    let text: String = events
        .iter()
        .filter_map(|event| event["choices"][0]["text"].as_str().map(str::to_owned))
        .collect();
    assert_eq!(text, " wept.");
    assert_eq!(events[events.len() - 2]["choices"][0]["finish_reason"], "stop");
    assert_eq!(events[events.len() - 1]["choices"], json!([]));
}

#[test]
fn several_answers_stream_by_their_index() {
    let server = start(vec![Step::Say("Jesus wept."), STOP]);
    let reply = server.chat(r#""stream":true,"n":3"#);
    let events = reply.events();
    let mut texts = vec![String::new(); 3];
    let mut ends = 0;
    for event in events.iter().filter(|event| **event != "[DONE]") {
        let event: Value = serde_json::from_str(event).unwrap();
        let choice = &event["choices"][0];
        let index = choice["index"].as_u64().unwrap() as usize;
        texts[index].push_str(choice["delta"]["content"].as_str().unwrap_or_default());
        ends += u32::from(choice["finish_reason"] == "stop");
    }
    assert_eq!((texts, ends), (vec!["Jesus wept.".to_owned(); 3], 3));
}

#[test]
fn responses_stream_has_every_event_in_order() {
    let server = start(vec![Step::Say("Jesus wept."), STOP]);
    let body = json!({"input": "John 11:35", "stream": true, "temperature": 0});
    let reply = server.post("/v1/responses", &body);
    assert_eq!(reply.header("content-type"), Some("text/event-stream"));
    let events = named_events(&reply);
    let mut found = names(&events);
    found.dedup();
    assert_eq!(
        found,
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
    for (number, (name, event)) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], number);
        assert_eq!(event["type"], *name);
    }
    let (_, completed) = events.last().unwrap();
    let response = &completed["response"];
    assert_eq!(response["status"], "completed");
    assert_eq!(response["output"][0]["content"][0]["text"], "Jesus wept.");
    assert_eq!(response["usage"]["output_tokens"], 6);
    let (_, added) = &events[2];
    assert_eq!(added["item"]["id"], response["output"][0]["id"]);

    let whole = server.post("/v1/responses", &json!({"input": user("John 11:35")})).json();
    assert_eq!(whole["output"][0]["content"][0]["text"], "Jesus wept.");
    assert_eq!((&whole["object"], &whole["store"]), (&json!("response"), &json!(true)));
}

#[test]
fn responses_that_are_cut_off_are_incomplete() {
    let server = start(vec![Step::Say("Jesus"), LENGTH]);
    let body = json!({"input": "a", "stream": true, "max_output_tokens": 3});
    let events = named_events(&server.post("/v1/responses", &body));
    let (name, event) = events.last().unwrap();
    assert_eq!(name, "response.incomplete");
    assert_eq!(event["response"]["incomplete_details"]["reason"], "max_output_tokens");
    let server = start(vec![Step::Say("Jesus"), Step::Fail("rank 1 is gone", true)]);
    let events = named_events(&server.post("/v1/responses", &body));
    let (name, event) = events.last().unwrap();
    assert_eq!(name, "response.failed");
    assert_eq!(event["response"]["error"]["message"], "rank 1 is gone");
}

#[test]
fn items_of_responses_become_turns() {
    let server = start(vec![STOP]);
    let body = json!({
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Weather in Rome?"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{\"city\": \"Rome\"}"},
            {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
            {"type": "web_search_call", "id": "w"},
        ],
        "tools": [{"type": "function", "name": "get_weather", "parameters": {"type": "object"}},
                  {"type": "web_search"}],
    });
    let reply = server.post("/v1/responses", &body);
    assert_eq!(reply.status, 200, "{}", reply.body);
    assert_eq!(reply.header("x-shardpack-ignored-params"), Some("input[4], tools[1]"));
    let text = prompt(&server);
    assert!(text.contains(r#"{"name": "get_weather", "arguments": {"city": "Rome"}}"#), "{text}");
    assert!(text.contains("<|im_start|>tool\nsunny") && text.contains("Be brief."), "{text}");

    let stored = server.post("/v1/responses", &json!({"input": "a", "previous_response_id": "r"}));
    let (status, message) = stored.error();
    assert!(status == 400 && message.contains("previous_response_id"), "{message}");
}

/// The prompt that the engine saw last, as text with its markers.
pub(super) fn prompt(server: &super::scripted::Scripted) -> String {
    let Seen::Submitted(request) = server.seen() else { panic!("expected a submission") };
    let model = super::ChatModel::open(super::kjv()).unwrap();
    let bytes: Vec<u8> =
        request.prompt.iter().flat_map(|&token| model.vocabulary().token_bytes(token)).collect();
    String::from_utf8(bytes).unwrap()
}

#[test]
fn one_editor_sends_responses_to_the_route_of_chat() {
    let server = start(vec![Step::Say("Jesus wept."), STOP]);
    let body = json!({"input": user("John 11:35"), "stream": true, "tools": [{"type": "custom", "name": "patch"}]});
    let reply = server.post("/v1/chat/completions", &body);
    let events = reply.events();
    let first: Value = serde_json::from_str(events[0]).unwrap();
    assert_eq!(first["object"], "chat.completion.chunk");
    assert!(prompt(&server).contains("patch"));
}

#[test]
fn messages_stream_has_every_event_in_order() {
    let server = start(vec![Step::Say("Jesus wept."), STOP]);
    let body = json!({"messages": user("John 11:35"), "max_tokens": 9, "stream": true});
    let reply = server.post("/v1/messages?beta=true", &body);
    assert_eq!(reply.status, 200, "{}", reply.body);
    assert!(reply.header("request-id").is_some());
    let events = named_events(&reply);
    let mut found = names(&events);
    found.dedup();
    assert_eq!(
        found,
        [
            "message_start",
            "ping",
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
    );
    assert!(events.iter().all(|(name, event)| event["type"] == *name));
    let message = &events[0].1["message"];
    assert!(message["usage"]["input_tokens"].as_u64().unwrap() > 0);
    assert_eq!(message["content"], json!([]));
    let delta = &events[events.len() - 2].1;
    assert_eq!(delta["delta"], json!({"stop_reason": "end_turn", "stop_sequence": null}));
    assert_eq!(delta["usage"]["output_tokens"], 6);
    let text: String = events
        .iter()
        .filter_map(|(_, event)| event["delta"]["text"].as_str().map(str::to_owned))
        .collect();
    assert_eq!(text, "Jesus wept.");
}

#[test]
fn messages_end_as_their_clients_know_it() {
    let check = |script: Vec<Step>, reason: &str, sequence: Value| {
        let server = start(script);
        let body = json!({
            "messages": user("a"), "max_tokens": 9, "stop_sequences": ["zzz", "wept"],
        });
        let found = server.post("/v1/messages", &body).json();
        assert_eq!(found["stop_reason"], reason);
        assert_eq!(found["stop_sequence"], sequence);
        assert_eq!((&found["type"], &found["role"]), (&json!("message"), &json!("assistant")));
        found
    };
    check(vec![Step::Say("Jesus"), STOP], "end_turn", Value::Null);
    check(vec![Step::Say("Jesus"), LENGTH], "max_tokens", Value::Null);
    let found =
        check(vec![Step::Say("Jesus wept."), Step::AwaitCancel], "stop_sequence", "wept".into());
    assert_eq!(found["content"][0]["text"], "Jesus ");
}

#[test]
fn blocks_of_messages_become_turns() {
    let server = start(vec![STOP]);
    let body = json!({
        "max_tokens": 5,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cch=1234"},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        ],
        "messages": [
            {"role": "user", "content": "Weather in Rome?"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Rome"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "text", "text": "And?"},
            ]},
        ],
        "tools": [{"name": "get_weather", "input_schema": {"type": "object"}},
                  {"type": "web_search_20250305", "name": "web_search"}],
        "context_management": {"edits": []},
    });
    let reply = server.post("/v1/messages", &body);
    assert_eq!(reply.status, 200, "{}", reply.body);
    assert_eq!(reply.header("x-shardpack-ignored-params"), Some("tools[1], context_management"));
    let text = prompt(&server);
    assert!(!text.contains("billing") && text.contains("Be brief."), "{text}");
    let call = r#"I look.<tool_call>
{"name": "get_weather", "arguments": {"city": "Rome"}}
</tool_call>"#;
    assert!(text.contains(call), "{text}");
    let (result, after) = (text.find("tool\nsunny").unwrap(), text.find("user\nAnd?").unwrap());
    assert!(result < after, "{text}");

    let counted = server.post("/v1/messages/count_tokens", &body);
    let mut counted_body = body;
    counted_body.as_object_mut().unwrap().remove("max_tokens");
    let without = server.post("/v1/messages/count_tokens", &counted_body);
    assert_eq!(counted.json(), without.json());
    assert!(counted.json()["input_tokens"].as_u64().unwrap() > 50);
}

#[test]
fn errors_have_the_shape_of_their_dialect() {
    let server = start(vec![STOP]);
    let check = |path: &str, body: &Value, status: u16, kind: &str, words: &str| {
        let reply = server.post(path, body);
        let found = reply.json();
        assert_eq!(reply.status, status, "{path}: {found}");
        let message = if kind.is_empty() {
            found["error"].as_str().unwrap()
        } else {
            assert_eq!(found["error"]["type"], kind, "{found}");
            found["error"]["message"].as_str().unwrap()
        };
        assert!(message.contains(words), "{path}: {message}");
    };
    let invalid = "invalid_request_error";
    let long = user(&"word ".repeat(5000));
    check("/v1/messages", &json!({"messages": user("a")}), 400, invalid, "max_tokens");
    let body = json!({"messages": long, "max_tokens": 5});
    check("/v1/messages", &body, 400, invalid, "prompt is too long: ");
    let body = json!({"messages": user("a"), "max_tokens": 5, "model": "claude-9"});
    check("/v1/messages", &body, 404, "not_found_error", "claude-9");
    check("/v1/messages/nothing", &json!({}), 404, "not_found_error", "unknown path");
    check("/v1/responses", &json!({"input": 7}), 400, invalid, "input");
    check("/v1/completions", &json!({}), 400, invalid, "prompt");
    check("/v1/completions", &json!({"prompt": [4_000_000]}), 400, invalid, "vocabulary");
    check("/api/chat", &json!({"messages": [7]}), 400, "", "messages");
    check("/api/show", &json!({"model": "llama"}), 404, "", "llama");
    let reply = server.post("/v1/messages", &json!({}));
    assert_eq!(reply.json()["type"], "error");

    let server = start(vec![Step::Fail("rank 1 is gone", true)]);
    let reply = server.post("/v1/messages", &json!({"messages": user("a"), "max_tokens": 5}));
    assert_eq!((reply.status, &reply.json()["error"]["type"]), (529, &json!("overloaded_error")));
    assert_eq!(reply.header("x-should-retry"), Some("true"));
}

#[test]
fn failing_streams_end_with_the_dialects_error() {
    let server = start(vec![Step::Say("Jesus"), Step::Fail("rank 1 is gone", true)]);
    let body = json!({"messages": user("a"), "max_tokens": 5, "stream": true});
    let reply = server.post("/v1/messages", &body);
    let events = named_events(&reply);
    let (name, event) = events.last().unwrap();
    assert_eq!((name.as_str(), &event["type"]), ("error", &json!("error")));
    assert_eq!(event["error"]["message"], "rank 1 is gone");
    let reply = server.post("/api/chat", &json!({"messages": user("a")}));
    let last: Value = serde_json::from_str(reply.body.lines().last().unwrap()).unwrap();
    assert_eq!(last, json!({"error": "rank 1 is gone"}));
}

#[test]
fn ollama_answers_in_lines() {
    let server = start(vec![Step::Say("Jesus wept."), STOP]);
    let body = json!({
        "model": "kjv-4m:latest", "messages": user("John 11:35"),
        "options": {"num_predict": 7, "temperature": 0, "repeat_penalty": 1.0, "num_ctx": 100},
    });
    let reply = server.post("/api/chat", &body);
    assert_eq!(reply.header("content-type"), Some("application/x-ndjson"));
    let lines: Vec<Value> =
        reply.body.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (last, deltas) = lines.split_last().unwrap();
    let text: String =
        deltas.iter().map(|line| line["message"]["content"].as_str().unwrap()).collect();
    assert_eq!(text, "Jesus wept.");
    assert!(deltas.iter().all(|line| line["done"] == false));
    assert_eq!((&last["done"], &last["done_reason"]), (&json!(true), &json!("stop")));
    assert_eq!((&last["eval_count"], &last["prompt_eval_count"]), (&json!(6), &json!(15)));
    assert_eq!(server.submitted().max_tokens, 7);

    let body = json!({"prompt": "John 11:35", "stream": false});
    assert_eq!(server.post("/api/generate", &body).json()["response"], "Jesus wept.");
    assert_eq!(server.get("/api/tags").json()["models"][0]["name"], "kjv-4m");
    assert_eq!(server.get("/api/ps").json()["models"][0]["context_length"], 4096);
    assert!(server.get("/api/version").json()["version"].is_string());
    let shown = server.post("/api/show", &json!({"model": "kjv-4m"})).json();
    assert_eq!(shown["capabilities"], json!(["completion", "tools"]));
}

#[test]
fn text_becomes_tokens_and_back() {
    let server = start(vec![]);
    let text = "In the beginning \u{1f642}";
    let tokens = server.post("/tokenize", &json!({"content": text})).json();
    assert_eq!(tokens["count"], tokens["tokens"].as_array().unwrap().len());
    let back = server.post("/detokenize", &json!({"tokens": tokens["tokens"]})).json();
    assert_eq!(back["content"], text);
    let body = json!({"messages": user("John 11:35")});
    let rendered = server.post("/apply-template", &body).json();
    assert_eq!(
        rendered["prompt"],
        "<|im_start|>user\nJohn 11:35<|im_end|>\n<|im_start|>assistant\n"
    );
    assert_eq!(server.post("/tokenize", &body).json()["count"], 15);
    assert_eq!(server.post("/detokenize", &json!({"tokens": ["x"]})).status, 400);
}

/// Random tokens in every dialect, whole and streamed: answers, never errors.
#[test]
fn no_model_output_is_an_error_in_any_dialect() {
    let mut tokens: Vec<u32> = (0..2048).rev().collect();
    tokens.extend([2048, u32::MAX, 200, 201, 202]);
    let server = start(vec![Step::Tokens(tokens), LENGTH]);
    for path in [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/api/chat",
        "/api/generate",
    ] {
        for stream in [false, true] {
            let body = json!({
                "messages": user("a"), "prompt": "a", "max_tokens": 4000, "stream": stream,
                "tools": [],
            });
            let mut body = body;
            if path == "/v1/responses" {
                body = json!({"input": "a", "stream": stream});
            }
            let reply = server.post(path, &body);
            assert_eq!(reply.status, 200, "{path}: {}", reply.body);
            assert!(
                !reply.body.contains("\"error\":{") && reply.body.contains("<tool_call>"),
                "{path}"
            );
        }
    }
}
