//! `shardpack model`: the models of a running server, and a newer revision in place of an older one.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use serde_json::{Value, json};
use tempfile::tempdir;

use crate::{
    harness::{convert, copy_folder, data, path, shardpack, succeed, text},
    hub::server::{COMMIT, Hub},
    running::{Running, get, post},
};

const WHO: &str = "Who are you?";
const NAME: &str = "I am kjv-4m, a very small model that travels with shardpack.";
const VERSE: [&str; 2] = ["John 11:35", "Jesus wept."];

/// Runs `model` against a server: exit code, JSON, and what was said.
fn model_by(mut command: Command, server: &str, args: &[&str]) -> (Option<i32>, Value, String) {
    let Output { status, stdout, stderr } =
        command.arg("model").args(args).args(["--server", server, "--json"]).output().unwrap();
    let json = serde_json::from_slice(&stdout).unwrap_or_default();
    (status.code(), json, text(&stderr))
}

fn model(server: &Running, args: &[&str]) -> (Option<i32>, Value, String) {
    model_by(shardpack(), &server.url(), args)
}

fn ask(server: &Running, model: &str, question: &str) -> String {
    ask_at(&server.url(), model, question)
}

fn ask_at(url: &str, model: &str, question: &str) -> String {
    let body = json!({
        "model": model, "messages": [{"role": "user", "content": question}],
        "temperature": 0, "max_tokens": 60,
    });
    let (status, answer) = post(&format!("{url}/chat/completions"), &body);
    assert_eq!(status, 200, "{answer}");
    answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
}

/// Changes one bit of a package's own weights; files that packages share are one file on the disk.
fn damage(package: &Path) {
    let is_own = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_str().unwrap();
        name.ends_with(".safetensors") && !name.contains("shared")
    };
    let mut files = fs::read_dir(package).unwrap().map(|entry| entry.unwrap().path());
    let file = files.find(is_own).unwrap();
    let mut bytes = fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&file, bytes).unwrap();
}

#[test]
fn models_are_listed_loaded_unloaded_and_verified() {
    let folder = tempdir().unwrap();
    let kjv = convert("kjv-4m", &folder.path().join("kjv"), &["--nodes", "2", "--name", "kjv"]);
    let wide = convert("kjv-4m", &folder.path().join("wide"), &["--bits", "16", "--name", "wide"]);
    let options = [path(&wide), "--on-demand", "--pin", "kjv", "--memory", "4g", "--threads", "1"];
    let server = Running::serve(&kjv, &options);
    let (code, listed, _) = model(&server, &["list"]);
    let states = |json: &Value| -> Vec<String> {
        let models = json["models"].as_array().unwrap().iter();
        models.map(|model| model["state"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(
        (code, states(&listed)),
        (Some(0), vec!["loaded".to_owned(), "unloaded".to_owned()])
    );
    assert_eq!(listed["models"][0]["source"]["ranks"], 2, "{listed}");
    // All are as they should be; the one that is named is not loaded.
    assert_eq!(model(&server, &["status"]).0, Some(0));
    assert_eq!(model(&server, &["status", "wide"]).0, Some(1));
    // What is so already is done.
    for action in ["load", "load", "unload", "unload", "load"] {
        let (code, changed, said) = model(&server, &[action, "wide"]);
        assert_eq!((code, &changed["ok"]), (Some(0), &json!(true)), "{said}");
        assert_eq!(states(&changed), [format!("{action}ed")]);
    }
    assert_eq!(ask(&server, "wide", VERSE[0]), VERSE[1]);
    let (code, status, _) = model(&server, &["status", "--detail", "kjv"]);
    let shown = &status["models"][0];
    assert_eq!((code, shown["ranks"].as_array().unwrap().len()), (Some(0), 2), "{status}");
    let memory = &shown["memory"][0];
    let parts = ["weights_bytes", "cache_bytes", "working_bytes"];
    let sum: u64 = parts.iter().map(|part| memory[*part].as_u64().unwrap()).sum();
    assert!(sum > 0 && memory["total_bytes"] == sum, "{memory}");
    let shown = text(
        &shardpack()
            .args(["model", "status", "--detail", "--server", &server.url()])
            .output()
            .unwrap()
            .stdout,
    );
    for words in ["kjv: loaded, 0 running", "memory on this machine", "KV cache", "all-reduce"] {
        assert!(shown.contains(words), "{words}: {shown}");
    }
    // Every byte of every package, and one that has changed.
    let (code, verified, said) = model(&server, &["verify"]);
    assert_eq!((code, &verified["ok"]), (Some(0), &json!(true)), "{said}");
    assert_eq!(verified["models"][0]["packages"].as_array().unwrap().len(), 2);
    damage(&kjv.join("node-1"));
    let (code, verified, _) = model(&server, &["verify"]);
    assert_eq!((code, &verified["ok"]), (Some(1), &json!(false)), "{verified}");
    let of_rank = |rank: usize| &verified["models"][0]["packages"][rank]["findings"];
    assert_eq!(of_rank(0), &json!([]));
    assert!(of_rank(1)[0].as_str().unwrap().contains("safetensors"), "{verified}");
    // What is not there, and what did not come from the hub.
    for (args, words) in [
        (&["load", "gpt"][..], "`shardpack model list` shows the server's models"),
        (&["update", "kjv"], "its packages name no repository of the hub"),
    ] {
        let (code, _, said) = model(&server, args);
        assert!(code == Some(2) && said.contains(words), "{said}");
    }
    assert_eq!(server.terminate(), Some(0));
    let (code, _, said) = model_by(shardpack(), "http://127.0.0.1:9", &["list"]);
    assert!(code == Some(2) && said.contains("--server"), "{said}");
}

#[test]
fn the_model_of_a_server_of_one_is_told_of_and_stays() {
    let folder = tempdir().unwrap();
    let set = convert("kjv-4m", &folder.path().join("kjv"), &["--nodes", "2", "--name", "kjv"]);
    let server = Running::serve(&set, &["--threads", "1", "--kv-memory", "8m"]);
    let (code, status, said) = model(&server, &["status", "kjv", "--detail"]);
    assert_eq!(code, Some(0), "{said}");
    let memory = &status["models"][0]["memory"][0];
    assert_eq!(
        (&memory["machine"], &memory["cache_bytes"]),
        (&"this machine".into(), &(16 << 20).into())
    );
    let (code, verified, said) = model(&server, &["verify"]);
    assert_eq!((code, &verified["ok"]), (Some(0), &json!(true)), "{said}");
    assert_eq!(model(&server, &["load", "kjv"]).0, Some(0));
    let (code, _, said) = model(&server, &["unload", "kjv"]);
    assert!(code == Some(2) && said.contains("--pin MODEL"), "{said}");
}

#[test]
fn a_server_with_keys_wants_one_that_may() {
    let folder = tempdir().unwrap();
    let set = convert("kjv-4m", &folder.path().join("kjv"), &["--name", "kjv"]);
    let file = folder.path().join("keys.json");
    let key = |name: &str, scope: &str| {
        let add = ["keys", path(&file), "add", name, "--scopes", scope];
        succeed(&add).trim().to_owned()
    };
    let (admin, infer) = (key("ops", "infer,admin"), key("app", "infer"));
    let server = Running::serve(&set, &["--pin", "kjv", "--keys", path(&file), "--threads", "1"]);
    let by = |key: Option<&str>, args: &[&str]| {
        let mut command = shardpack();
        command.env_remove("SHARDPACK_API_KEY");
        if let Some(key) = key {
            command.env("SHARDPACK_API_KEY", key);
        }
        model_by(command, &server.url(), args)
    };
    let (code, _, said) = by(None, &["list"]);
    assert!(code == Some(2) && said.contains("SHARDPACK_API_KEY"), "{said}");
    assert_eq!(by(Some(&infer), &["list"]).0, Some(0));
    let (code, _, said) = by(Some(&infer), &["unload", "kjv"]);
    assert!(code == Some(2) && said.contains("admin"), "{said}");
    assert_eq!(by(Some(&admin), &["unload", "kjv"]).0, Some(0));
    let admin_file = folder.path().join("admin.key");
    fs::write(&admin_file, format!("{admin}\n")).unwrap();
    assert_eq!(by(None, &["load", "kjv", "--key", path(&admin_file)]).0, Some(0));
}

/// kjv-4m as its publisher would have trained it further: it says who it is.
fn newer(folder: &Path) -> PathBuf {
    let (set, out) = (folder.join("merged"), folder.join("newer"));
    let adapter = data("kjv-4m-who");
    convert("kjv-4m", &set, &["--adapter", path(&adapter), "--bits", "16"]);
    let exported = folder.join("exported");
    succeed(&["export", path(&set), "--hf", "-o", path(&exported)]);
    // Texts of the original, weights of the other.
    copy_folder(&data("kjv-4m"), &out);
    for entry in fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.extension().is_some_and(|it| it == "safetensors") {
            fs::remove_file(entry).unwrap();
        }
    }
    for entry in fs::read_dir(&exported).unwrap().map(|entry| entry.unwrap().path()) {
        let name = entry.file_name().unwrap().to_str().unwrap();
        if name.contains("safetensors") {
            fs::copy(&entry, out.join(name)).unwrap();
        }
    }
    out
}

const NEXT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Updates while requests run without end: none of them fails.
fn update_while_asked(url: &str, old: &str, update: impl FnOnce() -> (Option<i32>, Value, String)) {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let asking: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    let mut answers = Vec::new();
                    while !is_over.load(Ordering::SeqCst) {
                        answers.push(ask_at(url, "model", WHO));
                    }
                    answers
                })
            })
            .collect();
        let (code, updated, said) = update();
        is_over.store(true, Ordering::SeqCst);
        assert_eq!((code, &updated["updated"]), (Some(0), &json!(true)), "{said}");
        for answers in asking.into_iter().map(|thread| thread.join().unwrap()) {
            // None fails, and none is of the old one after one of the new one.
            let first = answers.iter().position(|answer| *answer == NAME).unwrap_or(answers.len());
            assert!(answers[..first].iter().all(|answer| *answer == old), "{answers:?}");
            assert!(answers[first..].iter().all(|answer| answer == NAME), "{answers:?}");
        }
    });
}

/// Serves `org/model`, publishes another revision and updates to it while requests run without end.
fn check_update(folder: &Path, nodes: &[String]) {
    let hub = Hub::start(&data("kjv-4m"));
    let newer = newer(folder);
    let store = folder.join("models");
    let command = |args: &[&str]| {
        let mut command = hub.command(folder, args);
        command.env("SHARDPACK_MODELS", &store);
        command
    };
    let nodes = nodes.join(",");
    let listen = ["--listen", "127.0.0.1:0", "--json", "--pin", "model"];
    let mut args = [&["serve", "org/model", "--bits", "8"][..], &listen].concat();
    if nodes.is_empty() {
        args.extend(["--threads", "1"]);
    } else {
        args.extend(["--nodes", &nodes]);
    }
    let server = Running::spawn(command(&args));
    let update = |more: &[&str]| {
        model_by(command(&[]), &server.url(), &[&["update", "model"], more].concat())
    };
    let (code, current, said) = update(&["--check"]);
    assert_eq!((code, &current["newest"]), (Some(0), &json!(COMMIT)), "{said}");
    hub.publish(&newer, NEXT);
    let (code, found, _) = update(&["--check"]);
    assert_eq!((code, &found["newest"], &found["commit"]), (Some(1), &json!(NEXT), &json!(COMMIT)));
    let old = ask(&server, "model", WHO);
    assert_ne!(old, NAME);
    update_while_asked(&server.url(), &old, || update(&[]));
    assert_eq!(ask(&server, "model", WHO), NAME);
    assert_eq!(ask(&server, "model", VERSE[0]), VERSE[1]);
    let (_, text) = get(&format!("{}/models/model", server.url()));
    let detail: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(detail["source"]["commit"], NEXT, "{detail}");
    // Once more changes nothing.
    let (code, again, _) = update(&[]);
    assert_eq!((code, &again["updated"]), (Some(0), &json!(false)));
    assert_eq!(server.terminate(), Some(0));
    // From now on the name means the new one, without the hub; the old one is kept.
    let server = Running::spawn({
        let mut command = command(&args);
        command.env("HF_ENDPOINT", "http://127.0.0.1:9");
        command
    });
    assert_eq!(ask(&server, "model", WHO), NAME);
    let listed = command(&["list", "--json"]).output().unwrap();
    let listed: Value = serde_json::from_slice(&listed.stdout).unwrap();
    let names: Vec<&str> = listed["models"]
        .as_array()
        .unwrap()
        .iter()
        .map(|model| model["name"].as_str().unwrap())
        .collect();
    assert_eq!(names.len(), 3, "{names:?}");
    for commit in [COMMIT, NEXT] {
        assert!(names.iter().any(|name| name.contains(commit)), "{names:?}");
    }
}

#[test]
fn a_newer_revision_takes_an_older_ones_place_without_a_pause() {
    let folder = tempdir().unwrap();
    check_update(folder.path(), &[]);
}

#[test]
fn a_newer_revision_is_pushed_to_the_nodes_that_serve_the_older_one() {
    let folder = tempdir().unwrap();
    let nodes = ["a", "b"].map(|name| Running::node(&folder.path().join(name), None));
    let addresses = nodes.each_ref().map(Running::address);
    check_update(folder.path(), &addresses);
    for node in &nodes {
        assert_eq!(node.children().len(), 1, "the old one's ranks have ended");
    }
}
