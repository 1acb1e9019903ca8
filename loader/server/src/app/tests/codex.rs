//! What Codex and its kin send to responses beyond functions: namespaces, tools that come with the
//! conversation, searches for tools, free text with a grammar, references to stored items.

use serde_json::{Value, json};

use super::{
    STOP,
    dialects::prompt,
    scripted::{Step, named_events, start},
};

const RESPONSES: &str = "/v1/responses";

fn function(name: &str) -> Value {
    json!({"type": "function", "name": name, "description": format!("About {name}."),
        "parameters": {"type": "object", "properties": {"p": {"type": "string"}}}})
}

fn namespace(name: &str, tools: &[&str]) -> Value {
    let tools: Vec<Value> = tools.iter().map(|tool| function(tool)).collect();
    json!({"type": "namespace", "name": name, "description": "Tools.", "tools": tools})
}

/// A model that calls a tool under this name.
fn calling(name: &str) -> Vec<Step> {
    let call = json!({"name": name, "arguments": {"p": "x"}});
    let text = format!("<tool_call>\n{call}\n</tool_call>");
    vec![Step::Say(text.leak()), STOP]
}

#[test]
fn calls_come_back_with_the_namespace_of_their_tool() {
    let check = |tools: Value, said: &str, expected: Value| {
        let server = start(calling(said));
        let body = json!({"input": "a", "tools": tools});
        let whole = server.post(RESPONSES, &body).json();
        let shown = prompt(&server);
        assert!(shown.contains(&format!("\"name\": \"{said}\"")), "{shown}");
        let call = &whole["output"][0];
        for (key, value) in expected.as_object().unwrap() {
            assert_eq!(call[key], *value, "{whole}");
        }
        let mut streamed = body.clone();
        streamed["stream"] = true.into();
        let events = named_events(&server.post(RESPONSES, &streamed));
        let done = events.iter().find(|(name, _)| name == "response.output_item.done");
        let item = &done.unwrap().1["item"];
        assert_eq!((&item["name"], &item["namespace"]), (&call["name"], &call["namespace"]));
    };
    let files = || namespace("mcp__files", &["read", "list"]);
    let called = |namespace: Value| {
        json!({"type": "function_call", "name": "read", "namespace": namespace,
            "arguments": "{\"p\":\"x\"}"})
    };
    check(json!([files()]), "read", called("mcp__files".into()));
    check(json!([function("read")]), "read", called(Value::Null));
    // Equal names are told apart, whichever the model calls.
    let both = || json!([files(), namespace("mcp__mail__", &["read"]), function("other")]);
    check(both(), "mcp__files__read", called("mcp__files".into()));
    check(both(), "mcp__mail__read", called("mcp__mail__".into()));
    check(json!([files(), function("read")]), "read", called(Value::Null));

    let server = start(vec![STOP]);
    let twice = json!([namespace("a", &["read"]), namespace("a", &["read"])]);
    let (status, message) = server.post(RESPONSES, &json!({"input": "a", "tools": twice})).error();
    assert!(status == 400 && message.contains("a__read"), "{message}");
}

#[test]
fn history_and_choice_name_tools_as_the_client_does() {
    let server = start(calling("mail__read"));
    let body = json!({
        "input": [
            {"role": "user", "content": "a"},
            {"type": "function_call", "call_id": "c1", "name": "read", "namespace": "mail", "arguments": "{\"p\": \"y\"}"},
            {"type": "function_call_output", "call_id": "c1", "output": "nothing"},
        ],
        "tools": [namespace("files", &["read"]), namespace("mail", &["read"])],
        "tool_choice": {"type": "function", "name": "read", "namespace": "mail"},
    });
    let found = server.post(RESPONSES, &body).json();
    assert_eq!(found["output"][0]["namespace"], "mail", "{found}");
    let shown = prompt(&server);
    assert!(shown.contains(r#"{"name": "mail__read", "arguments": {"p": "y"}}"#), "{shown}");
}

#[test]
fn tools_that_the_conversation_brings_can_be_called() {
    let brought = |item: Value| {
        let server = start(calling("weather"));
        let body = json!({
            "input": [item, {"role": "user", "content": "a"}],
            "tools": [{"type": "tool_search", "execution": "client",
                "parameters": {"type": "object", "properties": {"query": {"type": "string"}}}}],
        });
        let reply = server.post(RESPONSES, &body);
        assert_eq!(reply.header("x-shardpack-ignored-params"), None);
        let found = reply.json();
        assert_eq!(found["output"][0]["name"], "weather", "{found}");
        (found["output"][0]["namespace"].clone(), prompt(&server))
    };
    let (_, shown) = brought(json!({"type": "additional_tools", "role": "developer",
        "tools": [function("weather")]}));
    assert!(shown.contains("About weather."), "{shown}");
    let (found, shown) = brought(json!({"type": "tool_search_output", "call_id": "s1",
        "execution": "client", "status": "completed", "tools": [namespace("sky", &["weather"])]}));
    assert_eq!(found, "sky");
    assert!(shown.contains("These tools can be called now: weather"), "{shown}");
}

#[test]
fn a_search_for_tools_is_the_clients_to_run() {
    let call = "<tool_call>\n{\"name\": \"tool_search\", \"arguments\": {\"query\": \"sky\"}}\n</tool_call>";
    let server = start(vec![Step::Say(call), STOP]);
    let search = json!({"type": "tool_search", "execution": "client", "description": "Finds."});
    let body = json!({"input": "a", "tools": [search]});
    let found = server.post(RESPONSES, &body).json();
    let item = &found["output"][0];
    assert_eq!((&item["type"], &item["execution"]), (&json!("tool_search_call"), &json!("client")));
    assert_eq!(item["arguments"], json!({"query": "sky"}));
    let replayed =
        json!({"input": [{"role": "user", "content": "a"}, item], "tools": body["tools"]});
    assert_eq!(server.post(RESPONSES, &replayed).status, 200);
}

#[test]
fn free_text_follows_the_grammar_of_its_tool() {
    let server = start(vec![STOP]);
    let tool = |format: Value| json!([{"type": "custom", "name": "patch", "format": format}]);
    let constraint = |format: Value, choice: &str| {
        let body = json!({"input": "a", "tools": tool(format), "tool_choice": choice});
        let reply = server.post(RESPONSES, &body);
        assert_eq!(reply.status, 200, "{}", reply.body);
        let unenforced = reply.header("x-shardpack-unenforced").map(str::to_owned);
        (server.submitted().constraint.unwrap().0, unenforced)
    };
    for choice in ["auto", "required"] {
        let lark = json!({"type": "grammar", "syntax": "lark", "definition": "start: \"zebra\" /.*/ \"\\n\""});
        let (found, unenforced) = constraint(lark, choice);
        assert!(found.contains("zebra") && unenforced.is_none(), "{found} {unenforced:?}");
        let regex = json!({"type": "grammar", "syntax": "regex", "definition": "zebra[0-9]+"});
        let (found, unenforced) = constraint(regex, choice);
        assert!(found.contains("zebra[0-9]+") && unenforced.is_none(), "{found}");
        for (syntax, definition) in
            [("regex", "(?!zebra)a"), ("lark", "start: missing"), ("lark", "start: %json {}")]
        {
            let odd = json!({"type": "grammar", "syntax": syntax, "definition": definition});
            let (_, unenforced) = constraint(odd, choice);
            assert_eq!(unenforced.as_deref(), Some("tools[0].format"), "{definition}");
        }
    }
}

#[test]
fn references_stand_for_items_of_stored_responses() {
    let server = start(vec![Step::Say("Jesus wept."), STOP]);
    let first = server.post(RESPONSES, &json!({"input": "John 11:35"})).json();
    server.submitted();
    let id = first["output"][0]["id"].as_str().unwrap();
    let asked = |items: Value| {
        let mut input = vec![json!({"role": "user", "content": "John 11:35"})];
        input.extend(items.as_array().unwrap().clone());
        input.push(json!({"role": "user", "content": "Again"}));
        server.post(RESPONSES, &json!({"input": input}))
    };
    let reply = asked(json!([{"type": "item_reference", "id": id}]));
    assert_eq!(reply.status, 200, "{}", reply.body);
    let shown = prompt(&server);
    assert!(shown.contains("assistant\nJesus wept."), "{shown}");
    // Thinking that is gone is no loss; an answer that is gone is.
    let reply = asked(json!([{"type": "item_reference", "id": "rs_gone_0"}]));
    assert_eq!(reply.header("x-shardpack-ignored-params"), Some("input[1]"));
    let (status, message) = asked(json!([{"type": "item_reference", "id": "msg_gone_0"}])).error();
    assert!(status == 400 && message.contains("msg_gone_0"), "{message}");
}

#[test]
fn an_empty_input_is_answered() {
    let server = start(vec![STOP]);
    for input in [json!([]), json!(""), Value::Null] {
        let reply = server.post(RESPONSES, &json!({"input": input}));
        assert_eq!(reply.status, 200, "{}", reply.body);
    }
}

#[test]
fn a_trigger_makes_one_item_that_later_requests_continue() {
    let server = start(vec![Step::Say(" Job wept. "), STOP]);
    let body = json!({
        "input": [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "Job."},
            {"type": "compaction_trigger"}],
        "tools": [function("weather")], "tool_choice": "required",
    });
    let whole = server.post(RESPONSES, &body).json();
    let request = server.submitted();
    assert!(request.constraint.is_none(), "a summary is text");
    let model = shardpack_chat::model::ChatModel::open(super::scripted::kjv()).unwrap();
    let asked = model.encode("Summarize this conversation").unwrap();
    assert!(request.prompt.windows(asked.len()).any(|part| part == asked));
    let item = whole["output"][0].clone();
    assert_eq!(
        (whole["output"].as_array().unwrap().len(), &item["type"]),
        (1, &json!("compaction"))
    );
    let sealed = item["encrypted_content"].as_str().unwrap();
    assert!(!sealed.contains("Job"), "{sealed}");

    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let events = named_events(&server.post(RESPONSES, &streamed));
    let _ = server.submitted();
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        names[2..],
        ["response.output_item.added", "response.output_item.done", "response.completed"]
    );
    assert_eq!(events[3].1["item"]["encrypted_content"], sealed);

    let continued = |body: Value| {
        let reply = server.post(RESPONSES, &body);
        assert_eq!(reply.header("x-shardpack-ignored-params"), None, "{}", reply.body);
        prompt(&server)
    };
    let expected = "<|im_start|>user\nThe conversation before this was replaced by this summary of it:\n\
                    Job wept.<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n";
    let user = json!({"role": "user", "content": "and?"});
    let shown = continued(json!({"input": [item, user]}));
    assert!(shown.starts_with(expected), "{shown}");
    // The summary alone is stored.
    let shown = continued(json!({"previous_response_id": whole["id"], "input": [user]}));
    assert!(shown.starts_with(expected), "{shown}");

    let foreign = json!({"type": "compaction", "encrypted_content": "gAAAA"});
    let reply = server.post(RESPONSES, &json!({"input": [foreign, user]}));
    assert_eq!(reply.header("x-shardpack-ignored-params"), Some("input[0]"));
    let early = json!({"input": [{"type": "compaction_trigger"}, user]});
    let (status, message) = server.post(RESPONSES, &early).error();
    assert!(
        status == 400 && message.contains("input[0]: expected compaction_trigger as the last"),
        "{message}"
    );
}

#[test]
fn a_compacted_history_is_the_users_messages_and_a_summary() {
    let server = start(vec![Step::Say("Job wept."), STOP]);
    let user = json!({"role": "user", "content": "who?"});
    let body =
        json!({"input": [user, {"role": "assistant", "content": "Job."}], "model": "kjv-4m"});
    let found = server.post("/v1/responses/compact", &body).json();
    assert_eq!(found["object"], "response.compaction");
    let output = found["output"].as_array().unwrap();
    assert_eq!(output.len(), 2, "{found}");
    assert_eq!(output[0], json!({"role": "user", "content": "who?", "type": "message"}));
    assert_eq!(output[1]["type"], "compaction");
    let silent = start(vec![STOP]);
    let (status, message) = silent.post("/v1/responses/compact", &body).error();
    assert!(status == 500 && message.contains("no summary"), "{message}");
}

#[test]
fn calls_of_the_apis_own_shell_are_calls_with_results() {
    let server = start(vec![STOP]);
    let body = json!({"input": [
        {"role": "user", "content": "a"},
        {"type": "local_shell_call", "call_id": "c1", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "c1", "output": "files"},
        {"type": "shell_call", "call_id": "c2", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "c2", "output": [{"stdout": "more"}]},
    ]});
    let reply = server.post(RESPONSES, &body);
    assert_eq!(reply.header("x-shardpack-ignored-params"), None, "{}", reply.body);
    let shown = prompt(&server);
    for part in ["\"local_shell\"", "[\"ls\"]", "files", "{\"stdout\":\"more\"}"] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
}

#[test]
fn inputs_are_counted_and_listed() {
    let server = start(vec![Step::Say("b"), STOP]);
    let input = json!([{"role": "user", "content": "a"}, {"role": "user", "content": "c"}]);
    let counted = server.post("/v1/responses/input_tokens", &json!({"input": input})).json();
    assert_eq!(counted["object"], "response.input_tokens");
    let made = server.post(RESPONSES, &json!({"input": input})).json();
    assert_eq!(counted["input_tokens"], made["usage"]["input_tokens"]);
    let path = format!("/v1/responses/{}", made["id"].as_str().unwrap());
    let texts = |query: &str| -> (Vec<Value>, Value) {
        let list = server.get(&format!("{path}/input_items{query}")).json();
        let data = list["data"].as_array().unwrap();
        assert_eq!(list["first_id"], data[0]["id"], "{list}");
        (data.iter().map(|item| item["content"].clone()).collect(), list["has_more"].clone())
    };
    assert_eq!(texts(""), (vec!["c".into(), "a".into()], false.into()));
    assert_eq!(texts("?order=asc&limit=1"), (vec!["a".into()], true.into()));
    let first = server.get(&format!("{path}/input_items")).json()["first_id"].clone();
    assert_eq!(texts(&format!("?after={}", first.as_str().unwrap())).0, ["a"]);
    assert_eq!(server.get(&format!("{path}/input_items?limit=0")).status, 400);
    assert_eq!(server.get("/v1/responses/resp_x/input_items").status, 404);
    let (status, message) = server.post(&format!("{path}/cancel"), &json!({})).error();
    assert!(status == 400 && message.contains("background"), "{message}");
}
