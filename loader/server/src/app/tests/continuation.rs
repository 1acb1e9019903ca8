//! Continuations: of an assistant turn (prefill), of an echoed prompt, of a stored response; and
//! tool calls whose schema is validated after generation.

use serde_json::{Value, json};
use shardpack_engine_api::PromptOutput;

use super::{
    STOP,
    dialects::prompt,
    scripted::{Reply, Scripted, Step, start},
};

const CHAT: &str = "/v1/chat/completions";

fn turns(last: &str) -> Value {
    json!([{"role": "user", "content": "John 11:35"}, {"role": "assistant", "content": last}])
}

#[test]
fn a_last_turn_of_the_models_own_goes_on() {
    let server = start(vec![Step::Say(" wept."), STOP]);
    let body = json!({"messages": turns("Jesus "), "max_tokens": 9});
    for stream in [false, true] {
        let mut body = body.clone();
        body["stream"] = stream.into();
        let reply = server.post("/v1/messages", &body);
        // A token of its own in a stream.
        assert!(reply.status == 200 && reply.body.contains("\" we"), "{}", reply.body);
        let prompt = prompt(&server);
        assert!(prompt.ends_with("<|im_start|>assistant\nJesus"), "{prompt}");
    }
    let body = json!({"messages": turns("Jesus"), "continue_final_message": true,
        "add_generation_prompt": false});
    let reply = server.post(CHAT, &body);
    assert_eq!(reply.json()["choices"][0]["message"]["content"], " wept.");
    assert_eq!(reply.header("x-shardpack-ignored-params"), None);
    assert!(prompt(&server).ends_with("assistant\nJesus"));
    // Chat completions begin a new turn unless told otherwise, and there must be one to go on with.
    server.post(CHAT, &json!({"messages": turns("Jesus")}));
    assert!(prompt(&server).ends_with("Jesus<|im_end|>\n<|im_start|>assistant\n"));
    let (status, message) = server.chat(r#""continue_final_message":true"#).error();
    assert!(status == 400 && message.contains("continue_final_message"), "{message}");
}

#[test]
fn completions_begin_with_their_prompt_where_asked() {
    let server = start(vec![Step::Say(" wept."), STOP]);
    let body = json!({"prompt": ["Jesus", "He"], "echo": true, "n": 2});
    let found = server.post("/v1/completions", &body).json();
    let texts: Vec<&str> =
        found["choices"].as_array().unwrap().iter().map(|c| c["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["Jesus wept.", "Jesus wept.", "He wept.", "He wept."]);
    assert_eq!(found["usage"]["completion_tokens"], 12);
    let body = json!({"prompt": "Jesus", "echo": true, "stream": true});
    let reply = server.post("/v1/completions", &body);
    let text: String = reply.events()[..reply.events().len() - 1]
        .iter()
        .map(|event| serde_json::from_str::<Value>(event).unwrap())
        .map(|event| event["choices"][0]["text"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(text, "Jesus wept.");
    // What stands before the answer is no answer: a failure still has its status.
    let server = start(vec![Step::Fail("rank 1 is gone", true)]);
    let body = json!({"prompt": "Jesus", "echo": true, "stream": true});
    assert_eq!(server.post("/v1/completions", &body).status, 503);
}

/// What lm-eval's `local-completions` sends for a loglikelihood, and reads of the answer.
#[test]
fn an_echoed_prompt_has_log_probabilities() {
    let server = start(vec![Step::Score(vec![-0.5, -0.125]), Step::Tokens(vec![7]), STOP]);
    let prompt = [vec![40, 41, 5], vec![42, 43, 44]];
    let body = json!({"model": "kjv-4m", "prompt": prompt, "temperature": 0, "max_tokens": 1,
        "logprobs": 1, "seed": 1234, "echo": true});
    let found = server.post("/v1/completions", &body).json();
    assert_eq!(found["choices"].as_array().unwrap().len(), 2);
    let logprobs = &found["choices"][0]["logprobs"];
    let tokens = logprobs["tokens"].as_array().unwrap();
    // The prompt's, and the answer's one.
    assert_eq!(logprobs["token_logprobs"], json!([null, -0.5, -0.125, -0.5]));
    let top = &logprobs["top_logprobs"];
    assert_eq!(top[0], Value::Null);
    // The likeliest token and the prompt's own.
    assert_eq!(
        top[1],
        json!({tokens[1].as_str().unwrap(): -0.5, tokens[2].as_str().unwrap(): -0.125})
    );
    assert_eq!(
        top[2],
        json!({tokens[2].as_str().unwrap(): -0.125}),
        "the prompt's is the likeliest"
    );
    let lengths: Vec<usize> =
        tokens.iter().map(|it| it.as_str().unwrap().chars().count()).collect();
    let offsets = lengths.iter().scan(0, |at, length| {
        *at += length;
        Some(*at - length)
    });
    assert_eq!(logprobs["text_offset"], offsets.collect::<Value>());
    assert_eq!(server.submitted().prompt_output, PromptOutput::Logprobs(1));
    server.submitted();
    // Streamed, the prompt comes first with all of them.
    let body = json!({"prompt": [40, 41, 5], "max_tokens": 0, "logprobs": 1, "echo": true, "stream": true});
    let reply = server.post("/v1/completions", &body);
    let first: Value = serde_json::from_str(reply.events()[0]).unwrap();
    assert_eq!(first["choices"][0]["logprobs"]["token_logprobs"], json!([null, -0.5, -0.125]));
    assert_eq!(server.submitted().max_tokens, 0);
    // Nothing after a prompt that is not echoed is no request.
    let body = json!({"prompt": [40], "max_tokens": 0, "logprobs": 1});
    assert_eq!(server.post("/v1/completions", &body).status, 400);
}

#[test]
fn the_tokenizer_describes_itself() {
    let server = start(vec![STOP]);
    let info = server.get("/tokenizer_info").json();
    assert_eq!(info["eos_token"], "<|im_end|>");
    assert!(info["chat_template"].as_str().unwrap().contains("<|im_start|>"));
    let body = json!({"prompt": "test", "add_special_tokens": false});
    assert!(server.post("/tokenize", &body).json()["tokens"].is_array());
}

fn respond(server: &Scripted, body: &Value) -> Value {
    let reply = server.post("/v1/responses", body);
    assert_eq!(reply.status, 200, "{}", reply.body);
    reply.json()
}

fn delete(server: &Scripted, path: &str) -> Reply {
    Reply::read(server.send("DELETE", path, ""))
}

#[test]
fn responses_go_on_from_earlier_ones() {
    let server = start(vec![Step::Say("Jesus wept."), STOP]);
    let first = respond(&server, &json!({"input": "One?", "instructions": "Be brief."}));
    assert!(prompt(&server).contains("Be brief."));
    let id = first["id"].as_str().unwrap();
    let second = respond(&server, &json!({"input": "Two?", "previous_response_id": id}));
    assert_eq!(second["previous_response_id"], id);
    let text = prompt(&server);
    let said = "user\nOne?<|im_end|>\n<|im_start|>assistant\nJesus wept.<|im_end|>\n<|im_start|>user\nTwo?";
    assert!(text.contains(said) && !text.contains("Be brief."), "{text}");
    // Streams are kept too, and a chain holds all that went before.
    let body = json!({"input": [{"role": "user", "content": "Three?"}], "stream": true,
        "previous_response_id": second["id"]});
    let streamed = server.post("/v1/responses", &body);
    assert!(streamed.body.contains("response.completed"), "{}", streamed.body);
    let text = prompt(&server);
    let places = ["One?", "Two?", "Three?"].map(|word| text.find(word).unwrap());
    assert!(places.is_sorted() && text.matches("Jesus wept.").count() == 2, "{text}");

    let path = format!("/v1/responses/{id}");
    assert_eq!(server.get(&path).json(), first);
    let deleted = delete(&server, &path);
    assert_eq!(deleted.json(), json!({"id": id, "object": "response", "deleted": true}));
    assert_eq!((server.get(&path).status, delete(&server, &path).status), (404, 404));
    let gone = server.post("/v1/responses", &json!({"input": "a", "previous_response_id": id}));
    let (status, message) = gone.error();
    assert!(status == 400 && message.contains("previous_response_not_found"), "{message}");
    // The later one holds what it went on from.
    respond(&server, &json!({"input": "a", "previous_response_id": second["id"]}));
}

#[test]
fn responses_that_are_not_to_be_stored_are_not() {
    let server = start(vec![Step::Say("Jesus wept."), STOP]);
    let found = respond(&server, &json!({"input": "One?", "store": false}));
    assert_eq!(found["store"], false);
    let id = found["id"].as_str().unwrap();
    assert_eq!(server.get(&format!("/v1/responses/{id}")).status, 404);
    assert_eq!(server.get("/v1/responses/a/b").status, 404);
}

#[test]
fn calls_and_their_results_are_kept_as_items() {
    let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>";
    let server = start(vec![Step::Say(call), STOP]);
    let tools = json!([{"type": "function", "name": "f", "parameters": {"type": "object"}}]);
    let first = respond(&server, &json!({"input": "Call f.", "tools": tools}));
    prompt(&server);
    let id = &first["output"][0]["call_id"];
    let result = json!([{"type": "function_call_output", "call_id": id, "output": "done"}]);
    let body = json!({"input": result, "tools": tools, "previous_response_id": first["id"]});
    respond(&server, &body);
    let text = prompt(&server);
    assert!(text.contains(call) && text.contains("<|im_start|>tool\ndone"), "{text}");
}

#[test]
fn a_schema_beyond_grammars_is_judged_or_refused_where_it_was_to_hold_from_the_start() {
    let call = |value: &str| {
        let arguments = json!({"a": [value, "x"]});
        format!("<tool_call>\n{}\n</tool_call>", json!({"name": "bad", "arguments": arguments}))
    };
    let unique = json!({"type": "object",
        "properties": {"a": {"type": "array", "uniqueItems": true}}});
    let circular = json!({"$defs": {"n": {"properties": {"n": {"$ref": "#/$defs/n"}},
        "contains": {}}}, "$ref": "#/$defs/n"});
    let tool = |name: &str, schema: &Value, strict: bool| {
        json!({"type": "function",
            "function": {"name": name, "parameters": schema, "strict": strict}})
    };
    let body = |tools: Value, choice: &str, stream: bool| {
        let messages = json!([{"role": "user", "content": "a"}]);
        json!({"messages": messages, "tools": tools, "tool_choice": choice, "stream": stream})
    };
    let good = tool("good", &json!({"type": "object"}), false);
    let both = json!([good, tool("bad", &unique, false)]);
    for (value, is_call) in [("y", true), ("x", false)] {
        let said = call(value).leak() as &'static str;
        let server = start(vec![Step::Say(said), STOP]);
        let reply = server.post(CHAT, &body(both.clone(), "auto", false));
        assert_eq!(reply.status, 200, "{}", reply.body);
        assert_eq!(reply.header("x-shardpack-ignored-params"), None);
        assert!(server.submitted().constraint.is_some(), "the other tools stay constrained");
        let reply = reply.json();
        let (choice, message) = (&reply["choices"][0], &reply["choices"][0]["message"]);
        if is_call {
            assert_eq!(choice["finish_reason"], "tool_calls");
            let arguments = message["tool_calls"][0]["function"]["arguments"].as_str().unwrap();
            assert_eq!(arguments.parse::<Value>().unwrap(), json!({"a": ["y", "x"]}));
        } else {
            assert_eq!(choice["finish_reason"], "stop");
            assert_eq!(message["tool_calls"], Value::Null);
            assert_eq!(message["content"], said, "no call, and nothing lost");
        }
        let streamed = server.post(CHAT, &body(both.clone(), "auto", true)).body;
        assert_eq!(streamed.contains("tool_calls\":["), is_call, "{streamed}");
    }
    let server = start(vec![STOP]);
    for (tools, choice, keyword) in [
        (json!([good, tool("bad", &unique, true)]), "auto", "uniqueItems"),
        (both, "required", "uniqueItems"),
    ] {
        let (status, message) = server.post(CHAT, &body(tools, choice, false)).error();
        let place = "tools[1].function.parameters";
        assert!(status == 400 && message.contains(place) && message.contains(keyword), "{message}");
    }
    // Advice of which nothing can be judged is left out and named.
    let advice = json!([good, tool("bad", &circular, false)]);
    let reply = server.post(CHAT, &body(advice, "auto", false));
    assert_eq!(reply.status, 200, "{}", reply.body);
    let unenforced = reply.header("x-shardpack-unenforced").unwrap();
    assert!(unenforced.starts_with("tools[1].function.parameters."), "{unenforced}");
    assert_eq!(server.get("/stats").json()["unenforced_schemas"], 1);
}
