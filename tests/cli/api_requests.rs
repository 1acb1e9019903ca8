//! Requests as clients send them and other servers take them, asked of a real model: each kind with
//! its further members. What is enforced holds in the answer; what is refused is named.

use std::{fs, path::Path};

use serde_json::{Value, json};
use tempfile::{TempDir, tempdir};

use crate::{
    harness::{convert, copy_folder, data, path, succeed},
    running::{Running, post},
};

const CHAT: &str = "/v1/chat/completions";
const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";
const WEATHER: &str = "What is the weather in London?";

/// A server of the trained model, with its own template or another one.
struct Server {
    running: Running,
    _folder: TempDir,
}

impl Server {
    fn start(template: Option<&str>) -> Self {
        let folder = tempdir().unwrap();
        let set = folder.path().join("set");
        if let Some(template) = template {
            let copy = folder.path().join("model");
            copy_folder(&data("kjv-4m"), &copy);
            let root = Path::new(env!("CARGO_MANIFEST_DIR"));
            let templates = root.join("loader/server/src/dialect/tests/agents/templates");
            fs::copy(templates.join(template), copy.join("chat_template.jinja")).unwrap();
            succeed(&["convert", path(&copy), "-o", path(&set), "--bits", "8"]);
        } else {
            convert("kjv-4m", &set, &["--bits", "8", "--name", "kjv"]);
        }
        let running = Running::serve(&set, &[]);
        Self { running, _folder: folder }
    }

    fn post(&self, address: &str, body: &Value) -> (u16, Value) {
        post(&self.running.url().replace("/v1", address), body)
    }

    /// The answer to a request that must be taken.
    fn taken(&self, address: &str, body: &Value) -> Value {
        let (status, answer) = self.post(address, body);
        assert_eq!(status, 200, "{address} {body}: {answer}");
        answer
    }
}

/// A request of one message, greedy and short, with further members.
fn chat(question: &str, more: &Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": question}], "temperature": 0,
        "max_tokens": 60});
    for (key, value) in more.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

fn content(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"].as_str().unwrap_or_default()
}

fn function(name: &str, properties: &Value) -> Value {
    let parameters = json!({"type": "object", "properties": properties});
    json!({"type": "function", "function": {"name": name, "parameters": parameters}})
}

fn weather() -> Value {
    function("get_weather", &json!({"city": {"type": "string"}}))
}

#[test]
fn grammars_of_llama_cpp_are_named_as_such() {
    let server = Server::start(None);
    let gbnf = "# comment\nroot ::= \"yes\" | \"no\"";
    for (name, more) in [
        ("grammar", json!({"grammar": gbnf})),
        ("grammar", json!({"grammar": "root::=item+\nitem ::= [a-z]"})),
        ("guided_grammar", json!({"guided_grammar": gbnf})),
        ("structured_outputs.grammar", json!({"structured_outputs": {"grammar": gbnf}})),
        ("response_format", json!({"response_format": {"type": "grammar", "grammar": gbnf}})),
    ] {
        let (status, answer) = server.post(CHAT, &chat("x", &more));
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(status == 400 && message.starts_with(name), "{more}: {answer}");
        assert!(message.contains("Lark") && message.contains("GBNF"), "{more}: {answer}");
    }
    let lark = json!({"grammar": "start: \"yes\" | \"no\""});
    assert!(["yes", "no"].contains(&content(&server.taken(CHAT, &chat("x", &lark)))));
}

#[test]
fn a_schema_holds_wherever_a_client_puts_it() {
    let server = Server::start(None);
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}},
        "required": ["a"]});
    let holds = |text: &str, at: &str| {
        let value: Value = serde_json::from_str(text).unwrap_or_else(|_| panic!("{at}: {text:?}"));
        let members = value.as_object().unwrap();
        let is_integer = members["a"].as_f64().is_some_and(|number| number.fract() == 0.0);
        assert!(members.len() == 1 && is_integer, "{at}: {text}");
    };
    for more in [
        json!({"response_format": {"type": "json_object", "schema": schema}}),
        json!({"json_schema": schema}),
        json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}),
        json!({"response_format": {"type": "json_schema", "schema": schema}}),
        json!({"guided_json": schema.to_string()}),
        json!({"structured_outputs": {"json": schema}}),
    ] {
        holds(content(&server.taken(CHAT, &chat("x", &more))), &more.to_string());
    }
    let format = json!({"type": "json_schema", "name": "n", "schema": schema});
    let answer = server.taken(RESPONSES, &json!({"input": "x", "text": {"format": format}}));
    holds(answer["output"][0]["content"][0]["text"].as_str().unwrap(), "responses");
    let body = chat("x", &json!({"output_config": {"format": format}}));
    let answer = server.taken(MESSAGES, &body);
    holds(answer["content"][0]["text"].as_str().unwrap(), "messages");
    let body = chat("x", &json!({"format": schema, "stream": false}));
    holds(server.taken("/api/chat", &body)["message"]["content"].as_str().unwrap(), "Ollama");
}

#[test]
fn no_limit_and_no_stop_text_are_taken_in_every_dialect() {
    let server = Server::start(None);
    let verse = "John 11:35";
    let mut bodies =
        vec![(RESPONSES, json!({"input": verse, "max_output_tokens": -1, "temperature": 0}))];
    for (name, value) in [
        ("max_tokens", json!(-1)),
        ("max_completion_tokens", json!(-1)),
        ("n_predict", json!(-1)),
        ("max_tokens", Value::Null),
        ("stop", json!("")),
        ("stop", json!(["", "wept over"])),
    ] {
        let mut body = chat(verse, &json!({}));
        body["max_tokens"] = Value::Null;
        body[name] = value;
        bodies.push((CHAT, body));
    }
    bodies.push((MESSAGES, chat(verse, &json!({"stop_sequences": [""]}))));
    let options = json!({"num_predict": -1, "stop": [""], "temperature": 0});
    bodies.push(("/api/chat", chat(verse, &json!({"options": options, "stream": false}))));
    for (address, body) in bodies {
        let answer = server.taken(address, &body).to_string();
        assert!(answer.contains("Jesus wept."), "{address} {body}: {answer}");
    }
}

#[test]
fn an_odd_schema_of_one_tool_leaves_the_others_callable() {
    let server = Server::start(None);
    let text = |pattern: &str| json!({"type": "string", "pattern": pattern});
    for odd in [
        text("^(?!\\.)[a-z.]+@[a-z]+$"),
        text("(?<!a)b"),
        text("(a|b)\\1"),
        json!({"type": "any"}),
        json!({"type": ["string", "file"]}),
        json!({"type": "STRING", "nullable": true}),
        json!({"type": "OBJECT", "properties": {"a": {"type": "INTEGER"}}}),
        json!({"$ref": "https://example.com/x.json"}),
        json!({"$ref": "other.json#/$defs/x"}),
        json!({"type": "string", "enum": []}),
        json!({"anyOf": null, "type": "string"}),
    ] {
        let tools = json!([weather(), function("odd", &json!({"to": odd}))]);
        let answer = server.taken(CHAT, &chat(WEATHER, &json!({"tools": tools})));
        let call = &answer["choices"][0]["message"]["tool_calls"][0]["function"];
        assert_eq!(call["name"], "get_weather", "{odd}: {answer}");
    }
}

#[test]
fn tools_of_agents_are_called_in_their_own_forms() {
    let server = Server::start(None);
    let flat = json!({"type": "function", "name": "get_weather", "parameters": {"type": "object",
        "properties": {"city": {"type": "string"}}, "required": ["city"]}, "strict": false});
    let user = json!({"type": "message", "role": "user",
        "content": [{"type": "input_text", "text": WEATHER}]});
    let call = |body: &Value, kind: &str| -> Value {
        let answer = server.taken(RESPONSES, body);
        let items = answer["output"].as_array().unwrap();
        items.iter().find(|item| item["type"] == kind).unwrap_or(&Value::Null).clone()
    };
    let brought = json!({"input": [{"type": "additional_tools", "tools": [flat]}, user],
        "max_output_tokens": 80, "temperature": 0});
    assert_eq!(call(&brought, "function_call")["name"], "get_weather");
    let namespace = json!({"type": "namespace", "name": "mcp__weather", "tools": [flat]});
    let body = json!({"input": [user], "tools": [namespace], "tool_choice": "required",
        "max_output_tokens": 80, "temperature": 0});
    let found = call(&body, "function_call");
    assert_eq!(
        (&found["name"], &found["namespace"]),
        (&json!("get_weather"), &json!("mcp__weather"))
    );
    // Grammars and expressions of custom tools hold, required and by name.
    for (format, expected) in [
        (
            json!({"type": "grammar", "syntax": "lark", "definition": "start: \"*** \" /[a-z]{1,3}/"}),
            "*** ",
        ),
        (json!({"type": "grammar", "syntax": "regex", "definition": "\\+\\+[0-9]{2}"}), "++"),
    ] {
        for choice in [json!("required"), json!({"type": "custom", "name": "patch"})] {
            let tool = json!({"type": "custom", "name": "patch", "format": format});
            let body = json!({"input": [user], "tools": [tool], "tool_choice": choice,
                "max_output_tokens": 80, "temperature": 0});
            let found = call(&body, "custom_tool_call");
            let input = found["input"].as_str().unwrap_or_default();
            assert!(input.starts_with(expected), "{body}: {found}");
        }
    }
    let custom = json!([{"type": "custom", "custom": {"name": "patch"}}]);
    let body = chat("hi", &json!({"tools": custom, "tool_choice": "required"}));
    let answer = server.taken(CHAT, &body);
    let call = &answer["choices"][0]["message"]["tool_calls"][0];
    assert_eq!((&call["type"], &call["custom"]["name"]), (&json!("custom"), &json!("patch")));
    for probe in
        [json!({"input": []}), json!({"input": ""}), json!({"input": [], "instructions": "a"})]
    {
        let mut body = probe.clone();
        body["max_output_tokens"] = 1.into();
        server.taken(RESPONSES, &body);
    }
}

#[test]
fn a_picture_that_no_one_reads_is_never_dropped_in_silence() {
    let server = Server::start(None);
    let picture = json!({"type": "base64", "media_type": "image/png", "data": "AAAA"});
    let turn = |content: Value| {
        json!({"max_tokens": 9, "messages": [{"role": "user", "content": "x"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "get", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": content}]}]})
    };
    let count = |content: Value| {
        let counted = server.taken("/v1/messages/count_tokens", &turn(content));
        counted["input_tokens"].as_u64().unwrap()
    };
    let image = json!({"type": "image", "source": picture});
    let (with, without) = (count(json!([image])), count(json!("")));
    assert!(with > without + 5, "a note stands for it: {with} and {without} tokens");
    for (address, body) in [
        (MESSAGES, json!({"max_tokens": 9, "messages": [{"role": "user", "content": [image]}]})),
        ("/api/chat", json!({"messages": [{"role": "user", "content": "a", "images": ["AAAA"]}]})),
        ("/api/generate", json!({"prompt": "a", "images": ["AAAA"]})),
    ] {
        let (status, answer) = server.post(address, &body);
        assert!(status == 400 && answer.to_string().contains("image"), "{address}: {answer}");
    }
}

#[test]
fn ollamas_clients_warm_up_without_an_answer() {
    let server = Server::start(None);
    for (address, more, reason) in [
        ("/api/generate", json!({"stream": false}), "load"),
        ("/api/generate", json!({"prompt": "", "keep_alive": "10m"}), "load"),
        ("/api/generate", json!({"keep_alive": 0}), "unload"),
        ("/api/chat", json!({"messages": [], "stream": false}), "load"),
        ("/api/chat", json!({"keep_alive": "0s"}), "unload"),
    ] {
        let mut body = json!({"model": "kjv"});
        for (key, value) in more.as_object().unwrap() {
            body[key] = value.clone();
        }
        let answer = server.taken(address, &body);
        assert_eq!((&answer["done_reason"], &answer["done"]), (&json!(reason), &json!(true)));
        assert!(answer.get("eval_count").is_none(), "{answer}");
    }
    // From the package's manifest.
    let shown = server.taken("/api/show", &json!({"model": "kjv"}));
    let info = &shown["model_info"];
    assert_eq!(info["general.parameter_count"], 4_196_608);
    assert_eq!(
        (&info["llama.block_count"], &info["llama.embedding_length"]),
        (&json!(4), &json!(256))
    );
    assert_eq!(shown["details"]["quantization_level"], "int8");
}

#[test]
fn conversations_that_a_template_refuses_are_answered() {
    let user = |text: &str| json!({"role": "user", "content": text});
    let system = |text: &str| json!({"role": "system", "content": text});
    let called = |id: &str, arguments: &str| {
        let function = json!({"name": "get", "arguments": arguments});
        json!({"role": "assistant", "content": null,
            "tool_calls": [{"id": id, "type": "function", "function": function}]})
    };
    let result = |id: &str| json!({"role": "tool", "tool_call_id": id, "content": "R"});
    let conversations = [
        json!([system("S1"), system("S2"), user("U1")]),
        json!([system("S1"), user("U1"), system("S2"), user("U2")]),
        json!([system("S1"), {"role": "developer", "content": "D"}, user("U1")]),
        json!([user("U1"), user("U2"), user("U3")]),
        json!([
            user("U1"),
            called("call_abcdefghijklmn", "{\"a\": 1}"),
            result("call_abcdefghijklmn")
        ]),
        json!([user("U1"), called("c", "{\"a\": "), result("c"), user("again")]),
        json!([user("U1"), called("c", "7"), result("c"), user("again")]),
        json!([{"role": "assistant", "content": "A"}, user("U1")]),
    ];
    for template in ["qwen35.jinja", "mistral_strict.jinja", "gemma2.jinja"] {
        let server = Server::start(Some(template));
        for messages in &conversations {
            let tools = json!([function("get", &json!({"a": {"type": "integer"}}))]);
            let body = json!({"messages": messages, "tools": tools, "max_tokens": 5});
            let (status, answer) = server.post(CHAT, &body);
            assert_eq!(status, 200, "{template} {messages}: {answer}");
        }
    }
}
