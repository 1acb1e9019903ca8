//! Requests and answers over real sockets.

use std::{
    io::{BufRead, BufReader, Read},
    net::TcpListener,
    time::Duration,
};

use serde_json::{Value, json};
use shardpack_engine_api::{EngineState, FinishReason, Sampling, TokenId};

use super::*;

mod codex;
mod continuation;
mod dialects;
mod doors;
mod embeddings;
mod families;
mod hosted;
mod http2;
mod models;
mod ollama;
mod operation;
#[path = "../../../../tests/harness/ports.rs"]
mod ports;
mod pulls;
mod rules;
mod scripted;
mod tolerance;
use scripted::{PATIENT, Reply, Scripted, Seen, Step, kjv, start, start_with};

const STOP: Step = Step::Finish(FinishReason::Stop);
const VERSE: &str = "Jesus wept. \u{1f642}";

/// Takes out what differs from run to run and returns it.
fn take_identity(value: &mut Value) -> (String, u64) {
    let id = value["id"].take().as_str().unwrap().to_owned();
    let created = value["created"].take().as_u64().unwrap();
    assert!(id.starts_with("chatcmpl-") && created > 1_700_000_000, "{id} {created}");
    (id, created)
}

/// The events of a stream without identity, which is the same in all.
fn chunks(reply: &Reply) -> Vec<Value> {
    let events = reply.events();
    let parsed = events.iter().filter(|event| **event != "[DONE]");
    let mut chunks: Vec<Value> = parsed.map(|event| serde_json::from_str(event).unwrap()).collect();
    let with_id = chunks.iter_mut().filter(|chunk| chunk.get("id").is_some());
    let identities: Vec<_> = with_id.map(take_identity).collect();
    assert!(identities.windows(2).all(|pair| pair[0] == pair[1]), "{identities:?}");
    let id = reply.header("x-request-id").unwrap();
    assert_eq!(identities[0].0, format!("chatcmpl-{id}"));
    chunks
}

/// The text of a stream's chunks.
fn text(chunks: &[Value]) -> String {
    let delta = |chunk: &Value| chunk["choices"][0]["delta"]["content"].as_str().map(str::to_owned);
    chunks.iter().filter_map(delta).collect()
}

#[test]
fn whole_answer_is_a_completion() {
    let server = start(vec![Step::Say(VERSE), STOP]);
    let reply = server.chat(r#""model":"kjv-4m","temperature":0,"seed":-1,"max_tokens":99"#);
    let mut found = reply.json();
    take_identity(&mut found);
    let expected = json!({
        "id": null, "created": null, "object": "chat.completion", "model": "kjv-4m",
        "choices": [{
            "index": 0,
            "message": {"role": "assistant", "content": VERSE, "refusal": null},
            "logprobs": null,
            "finish_reason": "stop",
        }],
        "usage": {
            "prompt_tokens": 15, "completion_tokens": 11, "total_tokens": 26,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0,
                "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0},
        },
    });
    assert_eq!((reply.status, found), (200, expected));
    assert_eq!(reply.header("x-shardpack-seed"), Some("18446744073709551615"));
    assert_eq!(reply.header("x-shardpack-ignored-params"), None);

    let model = ChatModel::open(kjv()).unwrap();
    let text = "<|im_start|>user\nJohn 11:35<|im_end|>\n<|im_start|>assistant\n";
    let request = server.submitted();
    assert_eq!(request.prompt, model.encode(text).unwrap());
    assert_eq!(request.stop_tokens, [TokenId(2)]);
    assert_eq!(request.sampling, Sampling { seed: u64::MAX, ..Sampling::GREEDY });
    assert_eq!(request.max_tokens, 99);
}

#[test]
fn defaults_are_the_models() {
    let server = start(vec![STOP]);
    let reply = server.chat("");
    let request = server.submitted();
    let sampling = &request.sampling;
    let found = [sampling.temperature, sampling.top_p, sampling.min_p];
    assert_eq!(found.map(f32::to_bits), [0.8_f32, 0.95, 0.05].map(f32::to_bits));
    assert_eq!(sampling.top_k, 40);
    let props = server.get("/props").json();
    let shown = &props["default_generation_settings"]["params"];
    let found = ["temperature", "top_k", "top_p", "min_p"].map(|name| shown[name].to_string());
    assert_eq!(found, ["0.8", "40", "0.95", "0.05"]);
    assert_eq!(props["sampling_from"], "llama.cpp");
    assert_eq!(request.max_tokens as usize, 4096 - request.prompt.len());
    assert_eq!(reply.header("x-shardpack-seed"), Some(request.sampling.seed.to_string().as_str()));
    assert_eq!(reply.json()["model"], "kjv-4m");
    assert_eq!(reply.json()["choices"][0]["message"]["content"], "");

    assert_eq!(
        server.chat(r#""model":"org/alias","max_completion_tokens":5000"#).json()["model"],
        "org/alias"
    );
    assert_eq!(server.submitted().max_tokens, request.max_tokens);
}

#[test]
fn stream_is_as_the_sdks_expect() {
    let server = start(vec![Step::Say("Jesus wept."), Step::Finish(FinishReason::Length)]);
    let reply = server.chat(r#""stream":true,"stream_options":{"include_usage":true}"#);
    let chunk = |delta: Value, reason: Option<&str>| {
        json!({
            "id": null, "created": null, "object": "chat.completion.chunk", "model": "kjv-4m",
            "choices": [{"index": 0, "delta": delta, "logprobs": null, "finish_reason": reason}],
        })
    };
    let found = chunks(&reply);
    let (last, deltas) = found.split_last().unwrap();
    let (end, deltas) = deltas.split_last().unwrap();
    assert_eq!(reply.status, 200);
    assert_eq!(deltas[0], chunk(json!({"role": "assistant", "content": ""}), None));
    for delta in &deltas[1..] {
        let text = delta["choices"][0]["delta"]["content"].clone();
        assert_eq!(*delta, chunk(json!({"content": text}), None));
    }
    assert_eq!(text(&found), "Jesus wept.");
    assert_eq!(*end, chunk(json!({}), Some("length")));
    let usage = json!({
        "prompt_tokens": 15, "completion_tokens": 6, "total_tokens": 21,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0,
                "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0},
    });
    assert_eq!(
        *last,
        json!({
            "id": null, "created": null, "object": "chat.completion.chunk", "model": "kjv-4m",
            "choices": [], "usage": usage,
        })
    );
    assert_eq!(reply.events().last(), Some(&"[DONE]"));
    let without = server.chat(r#""stream":true"#);
    assert_eq!(chunks(&without), found[..found.len() - 1]);
}

#[test]
fn stream_never_breaks_a_character() {
    let server = start(vec![Step::Say("\u{1f642}日本"), STOP]);
    let found = chunks(&server.chat(r#""stream":true"#));
    assert_eq!(text(&found), "\u{1f642}日本");
    assert!(!text(&found).contains('\u{fffd}'));
}

#[test]
fn no_model_output_is_an_error() {
    let mut tokens: Vec<u32> = (0..2048).rev().collect();
    tokens.extend([2048, u32::MAX, 200, 201, 202]);
    let server = start(vec![Step::Tokens(tokens), Step::Finish(FinishReason::Length)]);
    let whole = server.chat("");
    let stream = server.chat(r#""stream":true"#);
    assert_eq!((whole.status, stream.status), (200, 200));
    let content = whole.json()["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    assert_eq!(content, text(&chunks(&stream)));
    assert!(content.contains("<tool_call>") && !content.contains("<|im_"), "{content}");
}

#[test]
fn stop_text_ends_the_answer_and_the_request() {
    let server = start(vec![Step::Say("one two stop three"), Step::AwaitCancel]);
    for stream in [false, true] {
        let reply = server.chat(&format!(r#""stop":["zzz"," stop"],"stream":{stream}"#));
        let content = if stream {
            let found = chunks(&reply);
            assert_eq!(found.last().unwrap()["choices"][0]["finish_reason"], "stop");
            text(&found)
        } else {
            assert_eq!(reply.json()["choices"][0]["finish_reason"], "stop");
            reply.json()["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
        };
        assert_eq!(content, "one two", "stream: {stream}");
        server.submitted();
        assert_eq!(server.seen(), Seen::Cancelled);
    }
    let unfinished = start(vec![Step::Say("one st"), STOP]);
    let reply = unfinished.chat(r#""stop":"stop""#);
    assert_eq!(reply.json()["choices"][0]["message"]["content"], "one st");
}

#[test]
fn failure_before_the_first_token_has_a_status() {
    let server = start(vec![Step::Fail("rank 1 is gone", true)]);
    for members in ["", r#""stream":true"#] {
        let reply = server.chat(members);
        assert_eq!(reply.error(), (503, r#""generation_failed" null "rank 1 is gone""#.into()));
        assert_eq!(reply.header("x-should-retry"), Some("true"));
        assert_eq!(reply.header("retry-after"), Some("2"));
    }
    let server = start(vec![Step::Fail("no memory for so long a prompt", false)]);
    let reply = server.chat("");
    assert_eq!((reply.status, reply.header("x-should-retry")), (400, Some("false")));
}

#[test]
fn failure_after_the_first_token_ends_the_stream_with_an_error() {
    let server = start(vec![Step::Say("Jesus"), Step::Gate, Step::Fail("rank 1 is gone", true)]);
    server.gate.send(()).unwrap();
    let reply = server.chat(r#""stream":true"#);
    let found = chunks(&reply);
    assert_eq!((reply.status, text(&found).as_str()), (200, "Jesus"));
    assert_eq!(found.last().unwrap()["error"]["message"], "rank 1 is gone");
    assert!(!reply.body.contains("[DONE]"));
}

#[test]
fn engine_that_vanishes_is_unavailable() {
    let server = start(vec![Step::Say("Jesus")]);
    assert_eq!(server.chat("").error().0, 503);
    let found = chunks(&server.chat(r#""stream":true"#));
    assert_eq!(found.last().unwrap()["error"]["code"], "engine_stopped");
}

#[test]
fn silent_engine_is_given_up_after_the_deadline() {
    let limits = ServerLimits { event_timeout: Duration::from_millis(20), ..PATIENT };
    let model = ChatModel::open(kjv()).unwrap();
    let server = start_with(vec![Step::Say("Jesus"), Step::AwaitCancel], limits, model);
    assert_eq!(server.chat("").error().0, 504);
    server.submitted();
    assert_eq!(server.seen(), Seen::Cancelled);
}

#[test]
fn client_that_leaves_cancels_its_request() {
    let script = vec![Step::Say("Jesus"), Step::AwaitCancel];
    let server = start(script);
    for members in ["", r#""stream":true"#] {
        let mut connection = server.send_chat(members);
        server.submitted();
        if !members.is_empty() {
            connection.read_exact(&mut [0; 64]).unwrap();
        }
        drop(connection);
        assert_eq!(server.seen(), Seen::Cancelled, "{members}");
    }
}

#[test]
fn comments_keep_a_silent_stream_alive() {
    let limits = ServerLimits { keep_alive: Duration::from_millis(5), ..PATIENT };
    let model = ChatModel::open(kjv()).unwrap();
    let server = start_with(vec![Step::Gate, Step::Say("Jesus"), STOP], limits, model);
    let mut reader = BufReader::new(server.send_chat(r#""stream":true"#));
    let mut line = String::new();
    while line != ": keep-alive\n" {
        line.clear();
        assert_ne!(reader.read_line(&mut line).unwrap(), 0, "the stream ended");
    }
    server.gate.send(()).unwrap();
    let mut rest = String::new();
    reader.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("us\"") && rest.contains("[DONE]"), "{rest}");
}

#[test]
fn health_tells_the_state() {
    let server = start(vec![]);
    let check = |state: EngineState, status: u16, name: &str, reason: Value| {
        server.engine.update_status(|status| status.state = state);
        let reply = server.get("/health");
        let expected = json!({
            "state": name, "reason": reason, "model": "kjv-4m", "ranks": 2, "active_requests": 0,
        });
        assert_eq!((reply.status, reply.json()), (status, expected));
        let chat = server.send("POST", "/v1/chat/completions", "{}");
        assert_eq!(Reply::read(chat).status, if status == 200 { 400 } else { 503 }, "{name}");
    };
    check(
        EngineState::Starting("rank 1: 3 of 9 GB".into()),
        503,
        "starting",
        "rank 1: 3 of 9 GB".into(),
    );
    check(EngineState::Ready, 200, "ready", Value::Null);
    check(EngineState::Failed("rank 0 is gone".into()), 503, "failed", "rank 0 is gone".into());
}

#[test]
fn models_are_listed_and_found() {
    let server = start(vec![]);
    let list = server.get("/v1/models").json();
    let ids: Vec<&str> =
        list["data"].as_array().unwrap().iter().map(|m| m["id"].as_str().unwrap()).collect();
    assert_eq!((list["object"].as_str(), ids), (Some("list"), vec!["kjv-4m", "org/alias"]));
    assert_eq!(list["data"][0]["max_model_len"], 4096);
    assert_eq!(server.get("/v1/models/org/alias").json()["id"], "org/alias");
    assert_eq!(server.get("/v1/models/org%2Falias").json()["object"], "model");
    assert_eq!(server.get("/v1/models/gpt-4").error().0, 404);
}

#[test]
fn errors_have_the_shape_of_the_api() {
    let server = start(vec![STOP]);
    let check = |method: &str, path: &str, body: &str, status: u16, words: &str| {
        let (found, message) = Reply::read(server.send(method, path, body)).error();
        assert!(found == status && message.contains(words), "{method} {path}: {found} {message}");
    };
    let chat = "/v1/chat/completions";
    check("GET", "/v1/nothing", "", 404, "/v1/nothing");
    check("GET", chat, "", 405, "method GET is not allowed");
    check("POST", chat, "{", 400, "not JSON");
    check("POST", chat, "[]", 400, "an array");
    check("POST", chat, "{}", 400, r#""messages""#);
    let (status, message) = server.chat(r#""model":"gpt-4""#).error();
    assert_eq!(status, 404);
    assert!(message.contains("model_not_found") && message.contains("kjv-4m"), "{message}");
    let long =
        format!(r#"{{"messages":[{{"role":"user","content":"{}"}}]}}"#, "word ".repeat(5000));
    check("POST", chat, &long, 400, r#""context_length_exceeded" "messages""#);
    let huge = " ".repeat(PATIENT.body_bytes + 1);
    check("POST", chat, &huge, 413, "bytes");
    assert!(server.seen.try_recv().is_err(), "nothing reached the engine");
}

#[test]
fn ignored_parameters_are_reported() {
    let server = start(vec![STOP]);
    let reply =
        server.chat(r#""mystery":1,"user":"me","x,\u00e9\n":2,"tools":[{"type":"web_search"}]"#);
    assert_eq!(reply.status, 200);
    assert_eq!(reply.header("x-shardpack-ignored-params"), Some("tools[0], mystery, x???"));
}

#[test]
fn tools_reach_the_template_in_their_order() {
    let server = start(vec![STOP]);
    let tools =
        r#""tools":[{"type":"function","function":{"parameters":{"type":"object"},"name":"f"}}]"#;
    server.chat(tools);
    let model = ChatModel::open(kjv()).unwrap();
    let mut detokenizer = shardpack_chat::text::Detokenizer::new(model.vocabulary().clone());
    let prompt: String =
        server.submitted().prompt.into_iter().map(|token| detokenizer.push(token)).collect();
    let line =
        r#"{"type": "function", "function": {"parameters": {"type": "object"}, "name": "f"}}"#;
    assert!(prompt.contains(line), "{prompt}");
    server.chat(&format!(r#"{tools},"tool_choice":"none""#));
    assert!(server.submitted().prompt.len() < 20);
}

#[test]
fn model_without_template_refuses_chat() {
    let folder = tempfile::tempdir().unwrap();
    for file in ["tokenizer.json", "config.json"] {
        std::fs::copy(kjv().join(file), folder.path().join(file)).unwrap();
    }
    let model = ChatModel::open(folder.path()).unwrap();
    let server = start_with(vec![STOP], PATIENT, model);
    let (status, message) = server.chat("").error();
    assert!(status == 400 && message.contains("no chat template"), "{message}");
}

#[test]
fn more_requests_than_the_limit_are_turned_away() {
    let limits = ServerLimits { active_requests: 1, ..PATIENT };
    let model = ChatModel::open(kjv()).unwrap();
    let server = start_with(vec![Step::Gate, STOP], limits, model);
    let first = server.send_chat("");
    server.submitted();
    let second = server.chat("");
    assert_eq!(second.error().0, 503);
    assert!(second.body.contains("queue_full"));
    server.gate.send(()).unwrap();
    assert_eq!(Reply::read(first).status, 200);
}

/// A server that was asked to stop while it answers, and the connection that waits for the answer.
fn stopping(drain_timeout: Duration) -> (Scripted, std::net::TcpStream) {
    let limits = ServerLimits { drain_timeout, ..PATIENT };
    let model = ChatModel::open(kjv()).unwrap();
    let script = vec![Step::Say("Jesus"), Step::Gate, Step::Say(" wept."), STOP];
    // Nobody else listens there afterwards.
    let listener = TcpListener::bind(("127.0.0.1", ports::free_port())).unwrap();
    let mut server = scripted::start_at(listener, script, limits, model, |server| server);
    let connection = server.send_chat(r#""stream":true"#);
    server.submitted();
    // Its answer has begun.
    assert_eq!(connection.peek(&mut [0]).unwrap(), 1);
    server.stop.take().unwrap().send(()).unwrap();
    (server, connection)
}

#[test]
fn running_answers_are_finished_before_the_port_closes() {
    let (mut server, connection) = stopping(scripted::NEVER);
    while server.get("/health").status == 200 {}
    assert_eq!(server.get("/health").json()["state"], "draining");
    let refused = server.chat("");
    assert!(refused.status == 503 && refused.body.contains("draining"));
    server.gate.send(()).unwrap();
    let reply = Reply::read(connection);
    assert_eq!(text(&chunks(&reply)), "Jesus wept.");
    assert!(reply.body.contains("[DONE]"));
    server.join();
    assert!(std::net::TcpStream::connect(server.address).is_err());
}

#[test]
fn answers_that_outlast_the_drain_end_with_an_error() {
    let (mut server, connection) = stopping(Duration::from_millis(20));
    let reply = Reply::read(connection);
    let last = reply.body.trim_end().rsplit("\n\n").next().unwrap();
    assert!(last.contains("draining") && !reply.body.contains("[DONE]"), "{}", reply.body);
    server.join();
}

#[test]
fn idle_server_stops_at_once() {
    let mut server = start(vec![]);
    let _idle = std::net::TcpStream::connect(server.address).unwrap();
    assert_eq!(server.get("/health").status, 200);
    server.stop();
}
