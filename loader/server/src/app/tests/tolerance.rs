//! What other programs send and other servers take: odd schemas, images in results, calls of custom
//! tools in chat completions.

use std::{fs, io::Write, net::TcpStream};

use flate2::{Compression, write::GzEncoder};
use ruzstd::encoding::{CompressionLevel, compress_to_vec};
use serde_json::{Value, json};
use shardpack_chat::model::ChatModel;
use shardpack_engine_api::TokenId;

use super::{
    STOP,
    dialects::prompt,
    scripted::{PATIENT, Reply, Serving, Step, kjv, start, start_with},
};

const CHAT: &str = "/v1/chat/completions";
const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";

fn body(more: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "a"}]});
    let Value::Object(more) = more else { panic!("members of a request") };
    for (key, value) in more {
        body[key] = value;
    }
    body
}

#[test]
fn an_odd_schema_disables_no_tool() {
    let check = |property: Value, left_out: Option<&str>| {
        let said = "<tool_call>\n{\"name\": \"good\", \"arguments\": {}}\n</tool_call>";
        let server = start(vec![Step::Say(said), STOP]);
        let schema = json!({"type": "object", "properties": {"to": property}});
        let tools = json!([
            {"type": "function", "function": {"name": "good", "parameters": {"type": "object"}}},
            {"type": "function", "function": {"name": "odd", "parameters": schema}},
        ]);
        let reply = server.post(CHAT, &body(json!({"tools": tools})));
        assert_eq!(reply.status, 200, "{property}: {}", reply.body);
        assert_eq!(reply.json()["choices"][0]["finish_reason"], "tool_calls", "{property}");
        let place = left_out.map(|path| format!("tools[1].function.parameters.properties.{path}"));
        assert_eq!(reply.header("x-shardpack-unenforced"), place.as_deref(), "{property}");
        assert!(server.submitted().constraint.is_some(), "{property}");
        // A client that asked for a guarantee is told what stands in its way.
        let Some(place) = place else { return };
        let mut strict = tools.clone();
        strict[1]["function"]["strict"] = true.into();
        for more in [
            json!({"tools": strict}),
            json!({"tools": tools, "tool_choice": "required"}),
            json!({"tools": tools,
                "tool_choice": {"type": "function", "function": {"name": "odd"}}}),
        ] {
            let (status, message) = server.post(CHAT, &body(more)).error();
            assert!(status == 400 && message.contains(&place), "{property}: {message}");
        }
    };
    let text = |pattern: &str| json!({"type": "string", "pattern": pattern});
    check(text("^(?!\\.)[a-z.]+@[a-z]+$"), Some("to.pattern"));
    check(text("(?<=a)b"), Some("to.pattern"));
    check(text("(a)\\1"), Some("to.pattern"));
    check(json!({"type": "any"}), Some("to.type"));
    check(json!({"type": ["string", "file"]}), Some("to.type"));
    check(json!({"$ref": "https://example.com/x.json"}), Some("to.$ref"));
    check(json!({"type": "STRING"}), None);
    check(json!({"type": "OBJECT", "properties": {"a": {"type": "Integer"}}}), None);
    check(json!({"type": "string", "nullable": true}), None);
    check(json!({"type": "string", "format": "unheard-of"}), None);
}

#[test]
fn the_schema_of_an_answer_is_advice_unless_it_is_strict() {
    let server = start(vec![Step::Say("{}"), STOP]);
    let schema = json!({"type": "object", "properties": {"zebra": {"type": "string"},
        "to": {"type": "string", "pattern": "(?=x)y"}}});
    let format = |strict: bool| {
        json!({"response_format": {"type": "json_schema",
            "json_schema": {"name": "n", "strict": strict, "schema": schema}}})
    };
    let taken = |more: Value, place: &str| {
        let reply = server.post(CHAT, &body(more));
        assert_eq!(reply.status, 200, "{}", reply.body);
        assert_eq!(reply.header("x-shardpack-unenforced"), Some(place));
        let constraint = server.submitted().constraint.unwrap().0;
        assert!(constraint.contains("zebra") && !constraint.contains("(?=x)"), "{constraint}");
    };
    taken(format(false), "response_format.properties.to.pattern");
    let beside = json!({"response_format": {"type": "json_object", "schema": schema}});
    taken(beside, "response_format.properties.to.pattern");
    taken(json!({"json_schema": schema}), "json_schema.properties.to.pattern");
    let (status, message) = server.post(CHAT, &body(format(true))).error();
    assert!(status == 400 && message.contains("pattern"), "{message}");
}

#[test]
fn images_in_results_become_a_note_and_those_of_a_user_are_refused() {
    let server = start(vec![STOP]);
    let note = "this model reads text only";
    let url = "data:image/png;base64,AA";
    let called =
        json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}});
    let part =
        json!([{"type": "text", "text": "seen"}, {"type": "image_url", "image_url": {"url": url}}]);
    let source = json!({"type": "base64", "media_type": "image/png", "data": "AA"});
    let block = json!([{"type": "image", "source": source}]);
    let results = [
        (
            CHAT,
            json!({"messages": [{"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "c", "content": part}]}),
        ),
        (
            "/v1/responses",
            json!({"input": [{"role": "user", "content": "a"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c",
                "output": [{"type": "input_image", "image_url": url}]}]}),
        ),
        (
            "/v1/messages",
            json!({"max_tokens": 9, "messages": [{"role": "user", "content": "a"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": block}]}]}),
        ),
        (
            "/api/chat",
            json!({"messages": [{"role": "user", "content": "a"},
            {"role": "tool", "tool_name": "f", "content": "seen", "images": ["AA"]}]}),
        ),
    ];
    for (path, body) in results {
        let reply = server.post(path, &body);
        assert_eq!(reply.status, 200, "{path}: {}", reply.body);
        let shown = prompt(&server);
        assert!(shown.contains(note), "{path}: {shown}");
    }
    let asked = [
        (CHAT, json!({"messages": [{"role": "user", "content": part}]})),
        (
            "/v1/responses",
            json!({"input": [{"role": "user",
            "content": [{"type": "input_image", "image_url": url}]}]}),
        ),
        (
            "/v1/messages",
            json!({"max_tokens": 9, "messages": [{"role": "user", "content": block}]}),
        ),
        ("/api/chat", json!({"messages": [{"role": "user", "content": "a", "images": ["AA"]}]})),
    ];
    for (path, body) in asked {
        let reply = server.post(path, &body);
        assert_eq!(reply.status, 400, "{path}");
        assert!(reply.body.contains("image"), "{path}: {}", reply.body);
    }
}

#[test]
fn custom_tools_of_chat_completions_come_back_as_custom() {
    let said =
        "<tool_call>\n{\"name\": \"patch\", \"arguments\": {\"input\": \"a\\\"b\"}}\n</tool_call>";
    let server = start(vec![Step::Say(said), STOP]);
    let tools = json!([{"type": "custom", "custom": {"name": "patch", "description": "Patches."}}]);
    let found = server.post(CHAT, &body(json!({"tools": tools}))).json();
    let message = &found["choices"][0]["message"];
    let call = &message["tool_calls"][0];
    assert_eq!(call["type"], "custom");
    assert_eq!(call["custom"], json!({"name": "patch", "input": "a\"b"}));
    server.submitted();
    let messages = json!([{"role": "user", "content": "a"}, message,
        {"role": "tool", "tool_call_id": call["id"], "content": "patched"}]);
    let reply = server.post(CHAT, &json!({"messages": messages, "tools": tools}));
    assert_eq!(reply.status, 200, "{}", reply.body);
    let shown = prompt(&server);
    assert!(shown.contains(r#""arguments": {"input": "a\"b"}"#), "{shown}");
}

#[test]
fn a_forced_call_is_one_where_the_template_shows_no_tools() {
    let folder = tempfile::tempdir().unwrap();
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(kjv().join(file), folder.path().join(file)).unwrap();
    }
    let plain = "{% for message in messages %}{{ message.content }}{% endfor %}";
    fs::write(folder.path().join("chat_template.jinja"), plain).unwrap();
    let check = |folder: &std::path::Path, choice: &str, count: usize| {
        let said = "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>\n\
            <tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>";
        let model = ChatModel::open(folder).unwrap();
        let server = start_with(vec![Step::Say(said), STOP], PATIENT, model);
        let tools = json!([{"type": "function", "function": {"name": "f"}}]);
        let reply = server.post(CHAT, &body(json!({"tools": tools, "tool_choice": choice})));
        let calls = &reply.json()["choices"][0]["message"]["tool_calls"];
        assert_eq!(calls.as_array().map(Vec::len), Some(count), "{choice}: {}", reply.body);
    };
    check(folder.path(), "required", 1);
    check(folder.path(), "auto", 2);
    check(kjv(), "required", 2);
}

#[test]
fn a_tool_that_a_search_found_is_named_in_the_result() {
    let server = start(vec![STOP]);
    let reference = json!([{"type": "tool_reference", "tool_name": "mcp__weather__get"}]);
    let search = json!({"type": "tool_use", "id": "c", "name": "ToolSearch", "input": {}});
    let result = json!({"type": "tool_result", "tool_use_id": "c", "content": reference});
    let tools = json!([
        {"name": "ToolSearch", "input_schema": {"type": "object"}},
        {"name": "mcp__weather__get", "input_schema": {"type": "object"}, "defer_loading": true},
    ]);
    let messages = json!([{"role": "user", "content": "a"},
        {"role": "assistant", "content": [search]}, {"role": "user", "content": [result]}]);
    let asked = json!({"max_tokens": 9, "messages": messages, "tools": tools});
    assert_eq!(server.post("/v1/messages", &asked).status, 200);
    let shown = prompt(&server);
    assert!(shown.contains("The tool mcp__weather__get can be called now."), "{shown}");
}

#[test]
fn objects_of_tools_are_closed_unless_they_are_strict_or_say_otherwise() {
    let server = start(vec![Step::Say("Jesus wept."), STOP]);
    let check = |strict: bool, more: Value, closed: bool| {
        let mut schema = json!({"type": "object", "properties": {"zebra": {"type": "string"}}});
        for (key, value) in more.as_object().unwrap() {
            schema[key] = value.clone();
        }
        let function = json!({"name": "f", "parameters": schema, "strict": strict});
        let tools = json!([{"type": "function", "function": function}]);
        let reply = server.post(CHAT, &body(json!({"tools": tools})));
        assert_eq!(reply.status, 200, "{}", reply.body);
        assert_eq!(reply.header("x-shardpack-unenforced"), None);
        let constraint = server.submitted().constraint.unwrap().0;
        let found = constraint.contains(r#""additionalProperties":false"#);
        assert_eq!(found, closed, "{strict} {more}: {constraint}");
    };
    check(false, json!({}), true);
    check(false, json!({"required": ["zebra"]}), true);
    check(false, json!({"additionalProperties": true}), false);
    check(false, json!({"required": ["other"]}), false);
    check(true, json!({}), false);
}

#[test]
fn reasoning_that_a_model_cannot_do_is_named() {
    let server = start(vec![Step::Say("Jesus wept."), STOP]);
    let user = json!([{"role": "user", "content": "a"}]);
    let check = |path: &str, more: Value, ignored: Option<&str>| {
        let mut asked = body(more);
        asked["max_tokens"] = 9.into();
        if path == RESPONSES {
            asked = json!({"input": user, "reasoning": asked["reasoning"]});
        }
        if path == "/api/chat" {
            asked.as_object_mut().unwrap().remove("max_tokens");
        }
        let reply = server.post(path, &asked);
        assert_eq!(reply.status, 200, "{path} {asked}: {}", reply.body);
        assert_eq!(reply.header("x-shardpack-ignored-params"), ignored, "{path} {asked}");
    };
    check(CHAT, json!({"reasoning_effort": "low"}), Some("reasoning_effort"));
    check(CHAT, json!({"reasoning_effort": "none"}), None);
    check(CHAT, json!({"enable_thinking": true}), Some("enable_thinking"));
    check(CHAT, json!({"enable_thinking": false}), None);
    let thinking = json!({"type": "enabled", "budget_tokens": 64});
    check(CHAT, json!({"thinking": thinking}), Some("enable_thinking, thinking.budget_tokens"));
    check(RESPONSES, json!({"reasoning": {"effort": "high"}}), Some("reasoning.effort"));
    let effort = json!({"output_config": {"effort": "high"}});
    check(MESSAGES, effort, Some("output_config.effort"));
    check(MESSAGES, json!({"thinking": thinking}), Some("thinking, thinking.budget_tokens"));
    check("/api/chat", json!({"think": true}), Some("think"));
    check("/api/chat", json!({"think": "low"}), Some("think"));
    check("/api/chat", json!({"think": false}), None);
}

/// Posts a body in a coding.
fn post_coded(server: &Serving, path: &str, coding: &str, body: &[u8]) -> Reply {
    let mut stream = TcpStream::connect(server.address).unwrap();
    let length = body.len();
    write!(
        stream,
        "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-encoding: {coding}\r\ncontent-length: {length}\r\n\r\n"
    )
    .unwrap();
    stream.write_all(body).unwrap();
    Reply::read(stream)
}

#[test]
fn compressed_bodies_are_read_on_every_route_within_the_limit() {
    let server = start(vec![Step::Say("a"), STOP]);
    let text = body(json!({"max_tokens": 5})).to_string();
    let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
    gzip.write_all(text.as_bytes()).unwrap();
    let gzip = gzip.finish().unwrap();
    let zstd = |text: &[u8]| compress_to_vec(text, CompressionLevel::Fastest);
    for (coding, body) in [("gzip", gzip), ("zstd", zstd(text.as_bytes()))] {
        let reply = post_coded(&server, CHAT, coding, &body);
        assert_eq!(reply.status, 200, "{coding}: {}", reply.body);
        assert_eq!(prompt(&server), "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n");
    }
    let tokens = post_coded(&server, "/tokenize", "zstd", &zstd(br#"{"prompt": "a"}"#));
    assert_eq!(tokens.json()["count"], 1);
    let shown = post_coded(&server, "/api/show", "zstd", &zstd(br#"{"model": "kjv-4m"}"#));
    assert_eq!(shown.status, 200, "{}", shown.body);

    let refused = post_coded(&server, CHAT, "br", b"whatever");
    assert_eq!(refused.header("accept-encoding"), Some("gzip, deflate, zstd"));
    let (status, message) = refused.error();
    assert!(status == 415 && message.contains("br"), "{message}");
    let large = format!("{{\"prompt\": \"{}\"}}", "a".repeat(PATIENT.body_bytes));
    let (status, message) = post_coded(&server, CHAT, "zstd", &zstd(large.as_bytes())).error();
    assert!(status == 413 && message.contains("decompressed"), "{message}");
}

#[test]
fn texts_begin_with_the_token_that_the_tokenizer_puts_first() {
    let folder = tempfile::tempdir().unwrap();
    for file in ["config.json", "tokenizer.json", "chat_template.jinja"] {
        fs::copy(kjv().join(file), folder.path().join(file)).unwrap();
    }
    let config = json!({"bos_token": "<|endoftext|>", "add_bos_token": true});
    fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    let model = || ChatModel::open(folder.path()).unwrap();
    let plain = model().encode("In the beginning").unwrap();
    let server = start_with(vec![Step::Say("a"), STOP], PATIENT, model());
    let submitted = |path: &str, body: Value| {
        let reply = server.post(path, &body);
        assert_eq!(reply.status, 200, "{}", reply.body);
        (server.submitted().prompt, reply.json())
    };
    let with_first = [&[TokenId(0)][..], &plain].concat();
    let text = "In the beginning";
    let (prompt, answer) = submitted("/v1/completions", json!({"prompt": text, "echo": true}));
    assert_eq!(prompt, with_first);
    assert_eq!(answer["choices"][0]["text"], "In the beginninga");
    let begun = format!("<|endoftext|>{text}");
    assert_eq!(submitted("/v1/completions", json!({"prompt": begun})).0, with_first);
    let ids: Vec<u32> = plain.iter().map(|token| token.0).collect();
    assert_eq!(submitted("/v1/completions", json!({"prompt": ids})).0, plain);
    let raw = json!({"prompt": text, "raw": true, "stream": false});
    assert_eq!(submitted("/api/generate", raw).0, with_first);
    let (prompt, _) = submitted(CHAT, body(json!({})));
    assert_ne!(prompt[0], TokenId(0), "the template writes what it wants");

    let count = |body: Value| server.post("/tokenize", &body).json()["count"].clone();
    for (body, more) in [
        (json!({"prompt": text}), 1),
        (json!({"prompt": text, "add_special_tokens": false}), 0),
        (json!({"content": text}), 0),
        (json!({"content": text, "add_special": true}), 1),
    ] {
        assert_eq!(count(body.clone()), plain.len() + more, "{body}");
    }
    let messages = json!([{"role": "user", "content": "a"}]);
    let chat = count(json!({"messages": messages}));
    let more = count(json!({"messages": messages, "add_special_tokens": true}));
    assert_eq!(more.as_u64().unwrap(), chat.as_u64().unwrap() + 1);
}
