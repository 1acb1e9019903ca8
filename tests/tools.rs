//! Calls of tools over the whole way: a trained model at four bits on two ranks, asked as clients
//! ask.

use std::{fs, time::Duration};

use serde_json::{Value, json};
use tempfile::tempdir;

use crate::{
    harness::{convert, data},
    running::{Running, post},
};

fn cases() -> Value {
    serde_json::from_slice(&fs::read(data("kjv-4m/tools.json")).unwrap()).unwrap()
}

/// The events of a streamed answer.
fn stream(url: &str, body: &Value) -> Vec<Value> {
    let agent: ureq::Agent =
        ureq::Agent::config_builder().timeout_global(Some(Duration::from_mins(1))).build().into();
    let mut response = agent.post(url).send_json(body).unwrap();
    let text = response.body_mut().read_to_string().unwrap();
    let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
    data.filter(|data| *data != "[DONE]").map(|data| serde_json::from_str(data).unwrap()).collect()
}

/// What a chat answered: its text, and id, name and arguments of its calls.
#[derive(Debug, PartialEq)]
struct Said {
    text: String,
    calls: Vec<(String, String, Value)>,
    finish: String,
}

fn chat(url: &str, body: &Value) -> Said {
    let (status, answer) = post(url, body);
    assert_eq!(status, 200, "{answer}");
    let choice = &answer["choices"][0];
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let calls = choice["message"]["tool_calls"].as_array().cloned().unwrap_or_default();
    let call = |call: &Value| {
        let arguments = serde_json::from_str(call["function"]["arguments"].as_str().unwrap());
        (text(&call["id"]), text(&call["function"]["name"]), arguments.unwrap())
    };
    Said {
        text: text(&choice["message"]["content"]),
        calls: calls.iter().map(call).collect(),
        finish: text(&choice["finish_reason"]),
    }
}

fn chat_stream(url: &str, body: &Value) -> Said {
    let mut body = body.clone();
    body["stream"] = true.into();
    let mut said = Said { text: String::new(), calls: Vec::new(), finish: String::new() };
    let mut arguments: Vec<String> = Vec::new();
    for event in stream(url, &body) {
        let Some(choice) = event["choices"].get(0) else { continue };
        said.text.push_str(choice["delta"]["content"].as_str().unwrap_or_default());
        if let Some(finish) = choice["finish_reason"].as_str() {
            finish.clone_into(&mut said.finish);
        }
        for call in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
            let index = call["index"].as_u64().unwrap() as usize;
            if index == arguments.len() {
                let text = |value: &Value| value.as_str().unwrap().to_owned();
                said.calls.push((text(&call["id"]), text(&call["function"]["name"]), Value::Null));
                arguments.push(String::new());
            }
            let fragment = call["function"]["arguments"].as_str().unwrap_or_default();
            arguments[index].push_str(fragment);
        }
    }
    for (call, arguments) in said.calls.iter_mut().zip(arguments) {
        call.2 = serde_json::from_str(&arguments).unwrap();
    }
    said
}

#[test]
fn every_known_call_is_made_and_its_result_is_told() {
    let folder = tempdir().unwrap();
    let set = convert("kjv-4m", &folder.path().join("set"), &["--nodes", "2"]);
    let server = Running::serve(&set, &[]);
    let url = format!("{}/chat/completions", server.url());
    let known = cases();
    let (mut wrong, mut seen) = (Vec::new(), 0);
    for case in known["cases"].as_array().unwrap() {
        seen += 1;
        let question = json!({ "role": "user", "content": case["question"] });
        let body = json!({ "messages": [question], "tools": known["tools"], "temperature": 0, "max_tokens": 80 });
        let whole = chat(&url, &body);
        let streamed = chat_stream(&url, &body);
        let [(id, name, arguments)] = &whole.calls[..] else {
            wrong.push(format!("{case}: {whole:?}"));
            continue;
        };
        let expected = (&case["call"]["name"], &case["call"]["arguments"]);
        let is_right = |said: &Said| {
            said.finish == "tool_calls"
                && said.text.is_empty()
                && said.calls.len() == 1
                && (&Value::from(said.calls[0].1.as_str()), &said.calls[0].2) == expected
        };
        if !is_right(&whole) || !is_right(&streamed) || *id == streamed.calls[0].0 {
            wrong.push(format!("{case}: {whole:?} {streamed:?}"));
            continue;
        }
        let call = json!({ "id": id, "type": "function",
            "function": { "name": name, "arguments": arguments.to_string() } });
        let body = json!({ "tools": known["tools"], "temperature": 0, "max_tokens": 80, "messages": [
            question,
            { "role": "assistant", "content": null, "tool_calls": [call] },
            { "role": "tool", "tool_call_id": id, "content": case["result"] },
        ] });
        let told = chat(&url, &body);
        let city = case["call"]["arguments"]["city"].as_str().unwrap();
        if !told.text.contains(city) || told.finish != "stop" || told != chat_stream(&url, &body) {
            wrong.push(format!("{case}: {told:?}"));
        }
    }
    assert!(seen == 54 && wrong.is_empty(), "{} of {seen}: {wrong:#?}", wrong.len());
    assert_eq!(server.terminate(), Some(0));
}
