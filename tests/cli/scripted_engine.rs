//! `serve --engine scripted FILE`, and what a server is told before it listens: no model is needed.

use std::fs;

use serde_json::json;
use tempfile::tempdir;

use crate::{
    harness::{convert, fail, path},
    running::{Running, ask, get, post},
};

const WEATHER: &str =
    "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>";

#[test]
fn a_file_of_answers_is_served_without_a_model() {
    let folder = tempdir().unwrap();
    let file = folder.path().join("answers.json");
    let answers = json!({ "answers": [
        { "when": "Weather", "text": WEATHER },
        { "when": "sunny", "text": "It is sunny in Rome, 21 °C." },
        { "when": "Why", "text": "<think>Hm.</think>So." },
        { "text": "Hello." },
    ] });
    fs::write(&file, answers.to_string()).unwrap();
    let server = Running::start(
        &["serve", "--engine", "scripted", path(&file), "--listen", "127.0.0.1:0", "--json"],
        None,
    );
    assert_eq!(server.json["serving"], "scripted");
    assert_eq!(ask(&server.url(), "Hi"), "Hello.");
    let tool = json!({ "type": "function", "function": { "name": "get_weather",
        "parameters": { "type": "object", "properties": { "city": { "type": "string" } } } } });
    let mut messages = vec![json!({ "role": "user", "content": "Weather?" })];
    let url = format!("{}/chat/completions", server.url());
    let (status, answer) = post(&url, &json!({ "messages": messages, "tools": [tool] }));
    let message = &answer["choices"][0]["message"];
    assert_eq!(
        (status, &message["tool_calls"][0]["function"]["name"]),
        (200, &"get_weather".into())
    );
    messages.push(message.clone());
    let id = &message["tool_calls"][0]["id"];
    messages.push(json!({ "role": "tool", "tool_call_id": id, "content": "sunny" }));
    let (_, answer) = post(&url, &json!({ "messages": messages, "tools": [tool] }));
    assert_eq!(answer["choices"][0]["message"]["content"], "It is sunny in Rome, 21 °C.");
    let asked = json!({ "messages": [{ "role": "user", "content": "Why?" }] });
    let (_, answer) = post(&url, &asked);
    let message = &answer["choices"][0]["message"];
    let found = [&message["reasoning_content"], &message["content"]];
    assert_eq!(found, ["Hm.", "So."], "thinking is set apart");
    assert_eq!(server.terminate(), Some(0));

    // The file may name a set, whose words it then has.
    convert("kjv-4m", &folder.path().join("set"), &["--name", "kjv"]);
    let named = json!({ "set": "set", "answers": [{ "text": "Jesus wept." }] });
    fs::write(&file, named.to_string()).unwrap();
    let server = Running::start(
        &["serve", "--engine", "scripted", path(&file), "--listen", "127.0.0.1:0", "--json"],
        None,
    );
    assert_eq!(server.json["serving"], "kjv");
    assert_eq!(ask(&server.url(), "John 11:35"), "Jesus wept.");
    assert!(get(&server.url().replace("/v1", "/health")).1.contains("\"kjv\""));
}

#[test]
fn impossible_server_options_are_refused_before_it_listens() {
    let folder = tempdir().unwrap();
    let file = folder.path().join("answers.json");
    fs::write(&file, r#"{"answers": [{"text": "Hello."}]}"#).unwrap();
    let serve = |code: i32, more: &[&str]| {
        fail(code, &[&["serve", "--engine", "scripted", path(&file)], more].concat())
    };
    let open = serve(2, &["--listen", "0.0.0.0:0"]);
    assert!(open.contains("can be reached from other machines"), "{open}");
    let missing = folder.path().join("cert.pem");
    let tls = serve(1, &["--tls-cert", path(&missing), "--tls-key", path(&file)]);
    assert!(tls.contains("cert.pem: cannot be read"), "{tls}");
    let swapped = serve(1, &["--tls-cert", path(&file), "--tls-key", path(&file)]);
    assert!(swapped.contains("answers.json: holds no certificate"), "{swapped}");
    fs::write(&file, "{").unwrap();
    assert!(serve(1, &[]).contains("answers.json"));
    let folder = serve_folder(folder.path());
    assert!(folder.contains("not a file of answers"), "{folder}");
    let elsewhere = fail(2, &["demo", "--engine", "scripted"]);
    assert!(elsewhere.contains("serve --engine scripted FILE"), "{elsewhere}");
}

fn serve_folder(folder: &std::path::Path) -> String {
    fail(2, &["serve", "--engine", "scripted", path(folder)])
}
