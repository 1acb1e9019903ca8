//! Several models behind one server: routes, loading, unloading, sharing.

use std::{
    collections::BTreeSet,
    io::Read,
    sync::{Arc, atomic::Ordering},
    thread,
    time::Duration,
};

use serde_json::{Value, json};
use shardpack_engine_api::EngineState;

use super::{
    ServerLimits,
    hosted::{Hosted, entry, start_hosted},
    scripted::{NEVER, PATIENT, Reply, Serving, read_until, wait_until},
};
use crate::{ApiKeys, HostOptions, KeyFile, KeyLimits, ModelEntry, Scope};

const ON_DEMAND: HostOptions = HostOptions { on_demand: true, load_timeout: NEVER };
const AT_START: HostOptions = HostOptions { on_demand: false, load_timeout: NEVER };

fn start(entries: Vec<ModelEntry>, limit: u64, options: HostOptions) -> (Serving, Arc<Hosted>) {
    start_hosted(entries, limit, options, PATIENT, |server| server)
}

fn state(server: &Serving, name: &str) -> String {
    server.get(&format!("/v1/models/{name}")).json()["state"].as_str().unwrap().to_owned()
}

fn await_state(server: &Serving, name: &str, expected: &str) {
    wait_until(&format!("{name} is {expected}"), || state(server, name) == expected);
}

fn await_submitted(host: &Hosted, count: u32) {
    wait_until("requests are with an engine", || host.submitted.load(Ordering::SeqCst) >= count);
}

fn chat(model: &str, stream: bool) -> Value {
    let messages = json!([{"role": "user", "content": "John 11:35"}]);
    json!({"model": model, "messages": messages, "stream": stream, "max_tokens": 99})
}

fn said(reply: &Reply) -> String {
    assert_eq!(reply.status, 200, "{}", reply.body);
    reply.json()["choices"][0]["message"]["content"].as_str().unwrap_or_default().to_owned()
}

#[test]
fn every_dialect_asks_the_model_that_it_names() {
    let (server, _) = start(vec![entry("alpha", 1), entry("beta", 1)], 2, AT_START);
    await_state(&server, "alpha", "loaded");
    await_state(&server, "beta", "loaded");
    let messages = json!([{"role": "user", "content": "a"}]);
    for name in ["alpha", "beta"] {
        let mut answers = vec![said(&server.post("/v1/chat/completions", &chat(name, false)))];
        for (path, pointer, body) in [
            ("/v1/completions", "/choices/0/text", json!({"prompt": "a"})),
            ("/v1/responses", "/output/0/content/0/text", json!({"input": "a"})),
            ("/v1/messages", "/content/0/text", json!({"messages": messages, "max_tokens": 9})),
            ("/api/chat", "/message/content", json!({"messages": messages, "stream": false})),
            ("/api/generate", "/response", json!({"prompt": "a", "stream": false})),
        ] {
            let mut body = body;
            body["model"] = format!("{name}-alias").into();
            let reply = server.post(path, &body);
            assert_eq!(reply.status, 200, "{path}: {}", reply.body);
            let found = reply.json();
            assert_eq!(found["model"], format!("{name}-alias"), "{path}");
            answers.push(found.pointer(pointer).unwrap().as_str().unwrap().to_owned());
        }
        assert_eq!(answers, vec![name; answers.len()]);
        for (path, body) in [
            ("/tokenize", json!({"prompt": "a"})),
            ("/detokenize", json!({"tokens": [65]})),
            ("/apply-template", json!({"messages": messages})),
            ("/v1/messages/count_tokens", json!({"messages": messages})),
        ] {
            let mut body = body;
            body["model"] = name.into();
            assert_eq!(server.post(path, &body).status, 200, "{path}");
            body["model"] = "gamma".into();
            let reply = server.post(path, &body);
            assert!(reply.status == 404 && reply.body.contains("gamma"), "{path}: {}", reply.body);
        }
        let props = server.get(&format!("/props?model={name}%2Dalias")).json();
        assert_eq!(props["model_alias"], name);
        assert_eq!(server.get(&format!("/tokenizer_info?model={name}")).status, 200);
    }
    // Without a name it is the first.
    let mut body = chat("", false);
    body.as_object_mut().unwrap().remove("model");
    assert_eq!(said(&server.post("/v1/chat/completions", &body)), "alpha");
    assert_eq!(server.get("/props").json()["model_alias"], "alpha");
    let (status, message) = server.post("/v1/chat/completions", &chat("gamma", false)).error();
    assert_eq!(status, 404);
    for name in ["model_not_found", "alpha", "alpha-alias", "beta"] {
        assert!(message.contains(name), "{message}");
    }
}

fn swap(server: &Serving, model: &str, set: &str) -> Reply {
    server.post("/v1/models/swap", &json!({"model": model, "set": set}))
}

#[test]
fn another_set_takes_a_models_place_without_a_pause() {
    let (server, host) = start(vec![entry("alpha", 5), entry("beta", 5)], 15, AT_START);
    await_state(&server, "alpha", "loaded");
    await_state(&server, "beta", "loaded");
    host.took();
    host.answering.close();
    let ask = || said(&server.post("/v1/chat/completions", &chat("alpha-alias", false)));
    thread::scope(|scope| {
        let before = scope.spawn(ask);
        await_submitted(&host, 1);
        let swapped = scope.spawn(|| swap(&server, "alpha", "alpha@2"));
        wait_until("requests of the old set still run", || {
            server.get("/v1/models/alpha").json()["swap"] == "requests of the old set still run"
        });
        let after = scope.spawn(ask);
        await_submitted(&host, 2);
        assert_eq!(host.took(), ["+alpha@2"], "the old one stays for its request");
        let memory = server.get("/v1/models/beta").json()["memory"][0].clone();
        assert_eq!(memory["machine_taken_bytes"], 15, "both count");
        // Meanwhile it is neither unloaded nor replaced once more.
        for (path, body) in [
            ("unload", json!({"model": "alpha"})),
            ("swap", json!({"model": "alpha", "set": "alpha@3"})),
        ] {
            let (status, message) = server.post(&format!("/v1/models/{path}"), &body).error();
            assert!(status == 503 && message.contains("being replaced"), "{path}: {message}");
        }
        host.answering.open();
        assert_eq!(before.join().unwrap(), "alpha");
        assert_eq!(after.join().unwrap(), "alpha@2");
        let reply = swapped.join().unwrap();
        assert_eq!((reply.status, &reply.json()["state"]), (200, &json!("loaded")));
        assert_eq!(reply.json()["swap"], Value::Null);
    });
    assert_eq!(host.took(), ["-alpha", "xalpha"]);
    // The same again changes nothing.
    assert_eq!(swap(&server, "alpha", "alpha@2").status, 200);
    assert!(host.took().is_empty());
    // What cannot be loaded leaves the old one where it is.
    *host.fails.lock().unwrap() = Some("alpha@3");
    let (status, message) = swap(&server, "alpha", "alpha@3").error();
    assert!(status == 503 && message.contains("its package is broken"), "{message}");
    assert_eq!(swap(&server, "alpha", "gamma").error().0, 400);
    assert_eq!(ask(), "alpha@2");
    assert_eq!(host.took(), ["xalpha@3"]);
    // One that is not loaded has its new set when it is.
    assert_eq!(server.post("/v1/models/unload", &json!({"model": "beta"})).status, 200);
    assert_eq!(swap(&server, "beta", "beta@2").json()["state"], "unloaded");
    assert_eq!(server.post("/v1/models/load", &json!({"model": "beta"})).status, 200);
    assert_eq!(said(&server.post("/v1/chat/completions", &chat("beta", false))), "beta@2");
    assert_eq!(host.took(), ["-beta", "xbeta", "+beta@2"]);
}

#[test]
fn a_set_takes_a_place_only_where_both_fit_into_memory() {
    let pinned = ModelEntry { is_pinned: true, ..entry("beta", 5) };
    let entries = vec![entry("alpha", 5), pinned, entry("gamma", 2)];
    let (server, host) = start(entries, 12, AT_START);
    for name in ["alpha", "beta", "gamma"] {
        await_state(&server, name, "loaded");
    }
    host.took();
    let (status, message) = swap(&server, "alpha", "alpha@2").error();
    assert_eq!(status, 503, "{message}");
    for words in ["needs 5 bytes", "2 bytes of 12 bytes", "'alpha' (5 bytes), 'beta' (5 bytes)"] {
        assert!(message.contains(words), "{words}: {message}");
    }
    assert_eq!(said(&server.post("/v1/chat/completions", &chat("alpha", false))), "alpha");
    assert_eq!(host.took(), ["xalpha@2"]);
    // Where an idle one's room suffices, that one leaves.
    assert_eq!(swap(&server, "gamma", "gamma@2").status, 200);
    assert_eq!(host.took(), ["-alpha", "+gamma@2", "-gamma", "xgamma"]);
}

#[test]
fn lists_show_the_state_of_every_model() {
    let entries = vec![entry("alpha", 5), ModelEntry { priority: 3, ..entry("beta", 7) }];
    let (server, _) = start(entries, 20, ON_DEMAND);
    assert_eq!(server.get("/readyz").status, 200, "requests load what they need");
    assert_eq!(said(&server.post("/v1/chat/completions", &chat("beta", false))), "beta");
    let list = server.get("/v1/models").json();
    let found: Vec<(&str, &str)> = list["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|it| (it["id"].as_str().unwrap(), it["state"].as_str().unwrap()))
        .collect();
    let expected = [
        ("alpha", "unloaded"),
        ("alpha-alias", "unloaded"),
        ("beta", "loaded"),
        ("beta-alias", "loaded"),
    ];
    assert_eq!(found, expected);
    let detail = server.get("/v1/models/beta").json();
    assert_eq!(detail["memory"][0]["total_bytes"], 7);
    assert_eq!(detail["memory"][0]["machine_limit_bytes"], 20);
    assert_eq!(detail["memory"][0]["machine_taken_bytes"], 7);
    assert_eq!((&detail["priority"], &detail["pinned"]), (&json!(3), &json!(false)));
    let of = |list: &Value, key: &str| -> Vec<String> {
        let texts = list.as_array().unwrap().iter().map(|it| it[key].as_str().unwrap().to_owned());
        texts.collect()
    };
    assert_eq!(of(&server.get("/api/tags").json()["models"], "name").len(), 4);
    assert_eq!(of(&server.get("/api/ps").json()["models"], "name"), ["beta"]);
    let studio = server.get("/api/v0/models").json();
    assert_eq!(of(&studio["data"], "state")[1..3], ["not-loaded", "loaded"]);
    // What is not loaded is described too.
    let shown = server.post("/api/show", &json!({"model": "alpha"})).json();
    assert_eq!(shown["capabilities"], json!(["completion", "tools"]));
    assert!(shown["template"].is_null() && shown["details"]["context_length"] == 4096);
    let health = server.get("/health").json();
    assert_eq!(health["models"], json!({"alpha": "unloaded", "beta": "loaded"}));
    let stats = server.get("/stats").json();
    assert_eq!(of(&stats["models"], "model"), ["alpha", "beta"]);
    assert_eq!(stats["models"][1]["nodes"][0]["name"], "node of beta");
    let metrics = server.get("/metrics").body;
    for line in [
        "shardpack_requests_total{model_name=\"alpha\"",
        "shardpack_engine_ready{model_name=\"alpha\"} 0\nshardpack_engine_ready{model_name=\"beta\"} 1\n",
        "shardpack_prompt_tokens_total{model_name=\"alpha\"} 0\n",
    ] {
        let is_missing = line.contains("requests_total");
        assert_eq!(metrics.contains(line), !is_missing, "{line}\n{metrics}");
    }
    assert_eq!(metrics.matches("# TYPE shardpack_prompt_tokens ").count(), 1);
    assert!(metrics.contains("shardpack_http_responses_total{path="), "{metrics}");
}

#[test]
fn what_no_request_loads_says_how_it_is_loaded() {
    let (server, host) = start(vec![entry("alpha", 1), entry("beta", 1)], 2, AT_START);
    await_state(&server, "alpha", "loaded");
    await_state(&server, "beta", "loaded");
    let reply = server.post("/v1/models/unload", &json!({"model": "beta-alias"}));
    assert_eq!((reply.status, &reply.json()["state"]), (200, &json!("unloaded")));
    for path in ["/v1/chat/completions", "/tokenize"] {
        let (status, message) = server.post(path, &chat("beta", true)).error();
        assert_eq!(status, 503);
        assert!(message.contains("model_not_loaded"), "{message}");
        assert!(message.contains("POST /v1/models/load"), "{message}");
        assert!(message.contains("--on-demand"), "{message}");
    }
    assert_eq!(said(&server.post("/v1/chat/completions", &chat("alpha", false))), "alpha");
    let reply = server.post("/v1/models/load", &json!({"model": "beta"}));
    assert_eq!((reply.status, &reply.json()["state"]), (200, &json!("loaded")));
    assert_eq!(said(&server.post("/v1/chat/completions", &chat("beta", false))), "beta");
    assert_eq!(server.post("/v1/models/load", &json!({"model": "gamma"})).status, 404);
    assert_eq!(server.post("/v1/models/load", &json!({})).status, 400);
    let mut took = host.took();
    took[..2].sort();
    assert_eq!(took, ["+alpha", "+beta", "-beta", "+beta"]);
}

#[test]
fn the_least_recently_used_model_leaves_for_the_one_that_is_asked_for() {
    let entries = vec![entry("alpha", 2), entry("beta", 2), entry("gamma", 2)];
    let (server, host) = start(entries, 4, ON_DEMAND);
    let ask = |name: &str| {
        assert_eq!(said(&server.post("/v1/chat/completions", &chat(name, false))), name);
    };
    ask("alpha");
    ask("beta");
    assert_eq!(host.took(), ["+alpha", "+beta"]);
    ask("alpha");
    ask("gamma");
    assert_eq!(host.took(), ["-beta", "+gamma"]);
    ask("beta");
    assert_eq!(host.took(), ["-alpha", "+beta"]);
    assert_eq!(state(&server, "alpha"), "unloaded");
    let timeouts = host.load_timeouts.lock().unwrap().clone();
    assert!(timeouts.iter().all(|left| *left > NEVER / 2), "what is left of theirs: {timeouts:?}");
}

#[test]
fn pinned_models_stay_and_refusals_have_numbers() {
    let pinned = ModelEntry {
        is_pinned: true,
        idle_timeout: Some(Duration::ZERO),
        ..entry("alpha", 3 << 20)
    };
    let (server, host) = start(vec![pinned, entry("beta", 2 << 20)], 4 << 20, ON_DEMAND);
    await_state(&server, "alpha", "loaded");
    for stream in [false, true] {
        let (status, message) = server.post("/v1/chat/completions", &chat("beta", stream)).error();
        assert_eq!(status, 503, "{message}");
        for part in [
            "insufficient_memory",
            "'beta' needs 2.0 MiB",
            "1.0 MiB of 4.0 MiB",
            "'alpha' (3.0 MiB)",
        ] {
            assert!(message.contains(part), "{part}: {message}");
        }
    }
    assert_eq!(host.took(), ["+alpha"]);
    // Whoever asks for it may have it unloaded.
    assert_eq!(server.post("/v1/models/unload", &json!({"model": "alpha"})).status, 200);
    assert_eq!(said(&server.post("/v1/chat/completions", &chat("beta", false))), "beta");
}

#[test]
fn streams_wait_for_their_model_with_comments() {
    let limits = ServerLimits { keep_alive: Duration::from_millis(5), ..PATIENT };
    let (server, host) =
        start_hosted(vec![entry("alpha", 1)], 1, ON_DEMAND, limits, |server| server);
    host.loading.close();
    let ask = |path: &str, body: &Value| server.send("POST", path, &body.to_string());
    let mut waiting = ask("/v1/chat/completions", &chat("alpha", true));
    let mut text = String::new();
    read_until(&mut waiting, ": keep-alive\n\n", &mut text);
    assert!(text.starts_with("HTTP/1.1 200") && !text.contains("data:"), "{text}");
    let detail = server.get("/v1/models/alpha").json();
    assert_eq!(detail["state"], "loading");
    assert_eq!(detail["state_detail"], "half of it");
    assert_eq!(detail["requests"], json!({"running": 0, "waiting": 1}));
    let whole = ask("/v1/chat/completions", &chat("alpha", false));
    let mut other = ask("/v1/messages", &chat("alpha", true));
    let lines = ask("/api/chat", &chat("alpha", true));
    let mut other_text = String::new();
    read_until(&mut other, ": keep-alive\n\n", &mut other_text);
    // It has begun too, without a comment.
    assert_eq!(lines.peek(&mut [0]).unwrap(), 1);
    host.loading.open();
    waiting.read_to_string(&mut text).unwrap();
    assert!(text.contains("\"content\":\"") && text.contains("[DONE]"), "{text}");
    assert_eq!(said(&Reply::read(whole)), "alpha");
    other.read_to_string(&mut other_text).unwrap();
    let other = Reply::parse(&other_text);
    assert!(other.body.starts_with(": keep-alive\n\n"), "{}", other.body);
    assert!(other.body.contains("event: message_stop"), "{}", other.body);
    let lines = Reply::read(lines);
    assert!(lines.body.lines().all(|line| line.starts_with('{')), "{}", lines.body);
    assert_eq!(host.took(), ["+alpha"]);
}

#[test]
fn failures_to_load_are_told_in_the_dialects_form_and_can_be_repeated() {
    let limits = ServerLimits { keep_alive: Duration::from_millis(5), ..PATIENT };
    let (server, host) =
        start_hosted(vec![entry("alpha", 1)], 1, ON_DEMAND, limits, |server| server);
    *host.fails.lock().unwrap() = Some("alpha");
    host.loading.close();
    let mut stream = server.send("POST", "/v1/messages", &chat("alpha", true).to_string());
    let whole = server.send("POST", "/v1/chat/completions", &chat("alpha", false).to_string());
    let mut text = String::new();
    read_until(&mut stream, ": keep-alive\n\n", &mut text);
    wait_until("both wait", || server.get("/v1/models/alpha").json()["requests"]["waiting"] == 2);
    host.loading.open();
    stream.read_to_string(&mut text).unwrap();
    let stream = Reply::parse(&text);
    assert_eq!(stream.status, 200, "it had begun");
    assert!(stream.body.contains("event: error"), "{}", stream.body);
    assert!(stream.body.contains("its package is broken"), "{}", stream.body);
    let (status, message) = Reply::read(whole).error();
    assert!(status == 503 && message.contains("load_failed"), "{message}");
    let detail = server.get("/v1/models/alpha").json();
    assert_eq!(detail["state"], "failed");
    assert_eq!(detail["state_detail"], "rank 0: its package is broken");
    *host.fails.lock().unwrap() = None;
    assert_eq!(said(&server.post("/v1/chat/completions", &chat("alpha", false))), "alpha");
}

#[test]
fn a_model_whose_engine_has_failed_is_loaded_again() {
    let (server, host) = start(vec![entry("alpha", 1)], 1, ON_DEMAND);
    assert_eq!(said(&server.post("/v1/chat/completions", &chat("alpha", false))), "alpha");
    host.engine("alpha").update_status(|status| {
        status.state = EngineState::Failed("rank 0 is gone".to_owned());
    });
    assert_eq!(state(&server, "alpha"), "failed");
    assert_eq!(said(&server.post("/v1/chat/completions", &chat("alpha", false))), "alpha");
    assert_eq!(host.took(), ["+alpha", "-alpha", "+alpha"]);
}

#[test]
fn waiting_has_an_end() {
    let options = HostOptions { load_timeout: Duration::from_millis(50), ..ON_DEMAND };
    let (server, host) = start(vec![entry("alpha", 1), entry("beta", 1)], 1, options);
    // A client may give up earlier than a model is there that has room.
    let load = |model: &str| {
        server.post("/v1/models/load", &json!({"model": model}));
        await_state(&server, model, "loaded");
    };
    load("alpha");
    // A request of alpha goes on for longer than one of beta may wait.
    host.answering.close();
    let running = server.send("POST", "/v1/chat/completions", &chat("alpha", false).to_string());
    await_submitted(&host, 1);
    let (status, message) = server.post("/v1/chat/completions", &chat("beta", false)).error();
    assert!(status == 503 && message.contains("within 0.05 s"), "{message}");
    await_state(&server, "beta", "unloaded");
    await_state(&server, "alpha", "loaded");
    host.answering.open();
    assert_eq!(said(&Reply::read(running)), "alpha", "nothing has cut it off");
    server.post("/v1/models/unload", &json!({"model": "alpha"}));
    await_state(&server, "alpha", "unloaded");
    load("beta");
    assert_eq!(said(&server.post("/v1/chat/completions", &chat("beta", false))), "beta");
    assert_eq!(host.took(), ["+alpha", "-alpha", "+beta"]);
}

#[test]
fn unloading_waits_for_running_requests_and_then_ends_them() {
    let unload = |drain_timeout: Duration| {
        let limits = ServerLimits { drain_timeout, ..PATIENT };
        let (server, host) =
            start_hosted(vec![entry("alpha", 1), entry("beta", 1)], 2, AT_START, limits, |it| it);
        await_state(&server, "alpha", "loaded");
        await_state(&server, "beta", "loaded");
        host.answering.close();
        let chat = chat("alpha", false).to_string();
        let running = server.send("POST", "/v1/chat/completions", &chat);
        await_submitted(&host, 1);
        let body = json!({"model": "alpha"}).to_string();
        let unloading = server.send("POST", "/v1/models/unload", &body);
        (server, host, running, unloading)
    };
    let (server, host, running, unloading) = unload(NEVER);
    await_state(&server, "alpha", "draining");
    let (status, message) = server.post("/v1/chat/completions", &chat("alpha", false)).error();
    assert!(status == 503 && message.contains("is being unloaded"), "{message}");
    host.answering.open();
    assert_eq!(said(&Reply::read(running)), "alpha", "it was waited for");
    assert_eq!(Reply::read(unloading).json()["state"], "unloaded");

    let (server, host, running, unloading) = unload(Duration::from_millis(1));
    let (status, message) = Reply::read(running).error();
    assert!(status == 503 && message.contains("model_unloading"), "{message}");
    assert_eq!(Reply::read(unloading).json()["state"], "unloaded");
    host.answering.open();
    assert_eq!(said(&server.post("/v1/chat/completions", &chat("beta", false))), "beta");
}

#[test]
fn idle_models_leave_and_ollamas_clients_say_when() {
    let idle = ModelEntry { idle_timeout: Some(Duration::from_millis(1)), ..entry("alpha", 1) };
    let gamma = ModelEntry { idle_timeout: idle.idle_timeout, ..entry("gamma", 1) };
    let (server, host) = start(vec![idle, entry("beta", 1), gamma], 3, ON_DEMAND);
    assert_eq!(said(&server.post("/v1/chat/completions", &chat("alpha", false))), "alpha");
    assert_eq!(said(&server.post("/v1/chat/completions", &chat("beta", false))), "beta");
    await_state(&server, "alpha", "unloaded");
    assert_eq!(state(&server, "beta"), "loaded", "it has no time-out");
    host.took();
    let reside = |model: &str, keep_alive: Value| {
        let body = json!({"model": model, "keep_alive": keep_alive});
        let reply = server.post("/api/generate", &body);
        assert_eq!(reply.status, 200, "{}", reply.body);
        reply.json()["done_reason"].as_str().unwrap().to_owned()
    };
    assert_eq!(reside("alpha", json!("1h")), "load");
    let running = server.get("/api/ps").json();
    assert_eq!(running["models"][0]["name"], "alpha");
    // Another one is looked at after it.
    assert_eq!(said(&server.post("/v1/chat/completions", &chat("gamma", false))), "gamma");
    await_state(&server, "gamma", "unloaded");
    assert_eq!(state(&server, "alpha"), "loaded", "an hour is longer than its own time-out");
    assert_eq!(reside("alpha", json!(0)), "unload");
    assert_eq!(state(&server, "alpha"), "unloaded");
    // With a prompt it answers first.
    let body = json!({"model": "beta", "prompt": "a", "keep_alive": 0, "stream": false});
    assert_eq!(server.post("/api/generate", &body).json()["response"], "beta");
    await_state(&server, "beta", "unloaded");
    assert_eq!(host.took(), ["+alpha", "+gamma", "-gamma", "-alpha", "-beta"]);
}

#[test]
fn only_keys_of_the_scope_admin_change_what_is_loaded() {
    let mut file = KeyFile::default();
    let infer = file.add("me", BTreeSet::from([Scope::Infer]), KeyLimits::default()).unwrap();
    let scopes = BTreeSet::from([Scope::Admin, Scope::Infer]);
    let admin = file.add("admin", scopes, KeyLimits::default()).unwrap();
    let limits = PATIENT;
    let (server, _) = start_hosted(vec![entry("alpha", 1)], 1, AT_START, limits, |server| {
        server.with_keys(ApiKeys::new(file).unwrap())
    });
    let post = |key: &str, path: &str, body: Value| {
        let head = format!("authorization: Bearer {key}\r\n");
        Reply::read(server.send_with(&head, "POST", path, &body.to_string())).status
    };
    let named = || json!({"model": "alpha"});
    let unload = || json!({"model": "alpha", "keep_alive": 0});
    assert_eq!(post(&infer, "/v1/models/load", named()), 403);
    assert_eq!(post(&infer, "/v1/models/unload", named()), 403);
    assert_eq!(post(&infer, "/api/generate", unload()), 403);
    assert_eq!(post(&admin, "/v1/models/load", named()), 200);
    assert_eq!(post(&infer, "/v1/chat/completions", chat("alpha", false)), 200);
    assert_eq!(post(&admin, "/api/generate", unload()), 200);
    assert_eq!(post(&infer, "/api/generate", named()), 403, "no request loads it");
    assert_eq!(post(&admin, "/api/generate", named()), 200);
}

#[test]
fn no_model_takes_the_places_of_another() {
    let limits = ServerLimits { active_requests: 4, ..PATIENT };
    let entries = vec![ModelEntry { priority: 3, ..entry("alpha", 1) }, entry("beta", 1)];
    let (server, host) = start_hosted(entries, 2, AT_START, limits, |server| server);
    await_state(&server, "alpha", "loaded");
    await_state(&server, "beta", "loaded");
    host.answering.close();
    let ask =
        |name: &str| server.send("POST", "/v1/chat/completions", &chat(name, false).to_string());
    let mut running = Vec::new();
    for count in 1..=3 {
        running.push(ask("alpha"));
        await_submitted(&host, count);
    }
    let (status, message) = Reply::read(ask("alpha")).error();
    assert!(status == 503 && message.contains("queue_full"), "{message}");
    assert!(message.contains("3 of the server's 4 places"), "{message}");
    let beta = ask("beta");
    await_submitted(&host, 4);
    host.answering.open();
    assert_eq!(said(&Reply::read(beta)), "beta");
    for reply in running {
        assert_eq!(said(&Reply::read(reply)), "alpha");
    }
}

/// Two models that do not fit together, asked for by many at once: each request is answered by its
/// model, however often they take turns.
#[test]
fn models_that_take_turns_answer_every_request() {
    let (server, host) = start(vec![entry("alpha", 2), entry("beta", 2)], 3, ON_DEMAND);
    let server = &server;
    thread::scope(|scope| {
        for client in 0..12 {
            scope.spawn(move || {
                for _ in 0..4 {
                    let name = if client % 2 == 0 { "alpha" } else { "beta" };
                    let reply = server.post("/v1/chat/completions", &chat(name, client % 3 == 0));
                    assert_eq!(reply.status, 200, "{}", reply.body);
                    assert!(
                        reply.body.contains(&format!("\"model\":\"{name}\"")),
                        "{}",
                        reply.body
                    );
                }
            });
        }
    });
    let took = host.took();
    assert!(took.len() >= 3, "{took:?}");
    let turns = took.windows(2).all(|pair| pair[0].starts_with('+') != pair[1].starts_with('+'));
    assert!(turns, "one at a time: {took:?}");
}

#[test]
fn a_server_of_one_model_neither_loads_nor_unloads() {
    let server = super::start(vec![]);
    let reply = server.post("/v1/models/unload", &json!({"model": "kjv-4m"}));
    assert!(reply.status == 400 && reply.body.contains("serves one model"), "{}", reply.body);
    assert_eq!(server.post("/v1/models/load", &json!({"model": "kjv-4m"})).status, 200);
    let detail = server.get("/v1/models/kjv-4m").json();
    assert_eq!(detail["state"], "loaded");
}
