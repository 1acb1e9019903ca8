//! Hostile packages through the program: `convert` and `serve` refuse what cannot be opened, and a
//! request that ends its sandbox is an error for nobody else.

use std::{
    fs,
    path::{Path, PathBuf},
    thread,
};

use serde_json::{Value, json};
use tempfile::tempdir;

use super::TRIGGER;
use crate::{
    harness::{copy_folder, data, fail, path, succeed},
    running::{Running, ask, lives, post, wait_until},
};

/// A copy of the small model with another text file.
fn source(folder: &Path, file: &str, text: &[u8]) -> PathBuf {
    let source = folder.join("model");
    copy_folder(&data("kjv-4m"), &source);
    fs::write(source.join(file), text).unwrap();
    source
}

fn converted(folder: &Path, source: &Path) -> PathBuf {
    let set = folder.join("set");
    succeed(&["convert", path(source), "-o", path(&set), "--name", "kjv"]);
    set
}

fn served(folder: &Path, set: &Path) -> Running {
    let answers = folder.join("answers.json");
    let script = json!({ "answers": [{ "text": "Jesus wept.", "repeat": 1000 }] });
    fs::write(&answers, script.to_string()).unwrap();
    Running::serve(set, &["--script", path(&answers)])
}

fn chat(url: &str, text: &str) -> (u16, Value) {
    let body = json!({ "messages": [{ "role": "user", "content": text }], "max_tokens": 3 });
    post(&format!("{url}/chat/completions"), &body)
}

/// Serves a model whose template does `hostile` when it is asked to, and expects the error `code` for
/// that request, and none for the others meanwhile and afterwards.
fn check(hostile: &str, code: &str, words: &str) {
    let folder = tempdir().unwrap();
    let template = fs::read_to_string(data("kjv-4m/chat_template.jinja")).unwrap();
    let template =
        format!("{{% if '{TRIGGER}' in messages[-1].content %}}{hostile}{{% endif %}}{template}");
    let source = source(folder.path(), "chat_template.jinja", template.as_bytes());
    let server = served(folder.path(), &converted(folder.path(), &source));
    let url = server.url();
    thread::scope(|scope| {
        let attack = scope.spawn(|| chat(&url, TRIGGER));
        while !attack.is_finished() {
            let (status, answer) = chat(&url, "John 11:35");
            assert_eq!(status, 200, "{answer}");
        }
        let (status, answer) = attack.join().unwrap();
        assert_eq!((status, &answer["error"]["code"]), (400, &code.into()), "{answer}");
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.contains(words), "{message}");
    });
    let body = json!({ "messages": [{ "role": "user", "content": TRIGGER }] });
    let root = url.trim_end_matches("/v1");
    let (status, answer) = post(&format!("{root}/apply-template"), &body);
    assert_eq!(status, 400, "{answer}");
    assert_eq!(chat(&url, "John 11:35").0, 200, "the model's next request");
    let sandboxes = server.sandboxes();
    assert!(!sandboxes.is_empty());
    assert_eq!(server.terminate(), Some(0));
    // They end when their connection does.
    wait_until("no sandbox outlives its server", || !sandboxes.iter().any(|id| lives(*id)));
}

#[test]
fn a_template_that_overflows_its_stack_fails_its_request_alone() {
    let nested = "{% set n = namespace(t=[]) %}{% for i in range(90000) %}{% set n.t = [n.t] %}{% endfor %}{{ n.t }}";
    check(nested, "template_failed", "overflowed its stack");
}

#[test]
fn a_template_that_takes_all_memory_fails_its_request_alone() {
    let doubled = "{% set n = namespace(t='aaaaaaaa') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t | length }}";
    check(doubled, "prompt_too_expensive", "ran out of memory");
}

#[test]
fn a_template_that_takes_too_long_fails_its_request_alone() {
    let slow = "{% set l = range(100000) | list %}{% set n = namespace(l=l + l + l + l) %}{% for i in range(100000) %}{% if (n.l | sort | first) == 1 %}a{% endif %}{% endfor %}";
    check(slow, "prompt_too_expensive", "took over 5 s");
}

#[test]
fn a_template_that_cannot_be_opened_is_refused_by_convert() {
    let folder = tempdir().unwrap();
    let hostile = format!("{{{{ {}true }}}}", "not ".repeat(200_000));
    let source = source(folder.path(), "chat_template.jinja", hostile.as_bytes());
    let set = folder.path().join("set");
    let error = fail(1, &["convert", path(&source), "-o", path(&set)]);
    assert!(error.contains("chat_template.jinja"), "{error}");
    assert!(error.contains("overflowed its stack when it was opened"), "{error}");
    assert!(!set.exists());
}

#[test]
fn a_tokenizer_that_cannot_be_opened_is_refused_by_serve() {
    let folder = tempdir().unwrap();
    let mut tokenizer: Value =
        serde_json::from_slice(&fs::read(data("kjv-4m/tokenizer.json")).unwrap()).unwrap();
    let doubling = json!({ "type": "Replace", "pattern": { "String": "a" }, "content": "aa" });
    tokenizer["normalizer"] = json!({ "type": "Sequence", "normalizers": vec![doubling; 40] });
    let token = json!({ "id": 2048, "content": "<a>", "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": true, "special": false });
    tokenizer["added_tokens"].as_array_mut().unwrap().push(token);
    let source = source(folder.path(), "tokenizer.json", tokenizer.to_string().as_bytes());
    let set = converted(folder.path(), &source);
    let error = fail(1, &["serve", path(&set), "--listen", "127.0.0.1:0", "--json"]);
    assert!(error.contains("when it was opened"), "{error}");
}

#[test]
fn a_sandbox_that_is_killed_is_replaced() {
    let folder = tempdir().unwrap();
    let server = served(folder.path(), &converted(folder.path(), &data("kjv-4m")));
    assert!(ask(&server.url(), "John 11:35").starts_with("Jesus wept."));
    let before = server.sandboxes();
    for id in &before {
        let killed = std::process::Command::new("kill").args(["-KILL", &id.to_string()]).status();
        assert!(killed.unwrap().success());
    }
    assert!(ask(&server.url(), "John 11:35").starts_with("Jesus wept."));
    assert_eq!(server.terminate(), Some(0));
}
