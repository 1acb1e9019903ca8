//! Keys, limits, other origins, counters.

use std::{
    collections::BTreeSet,
    io::Read,
    sync::{Arc, Mutex},
};

use serde_json::{Value, json};
use shardpack_chat::ChatModel;

use super::{
    STOP, Scripted, ServerLimits, kjv,
    scripted::{PATIENT, Reply, Seen, Step, start, start_changed, wait_until},
};
use crate::{
    ApiKeys, KeyFile, KeyLimits, Scope, Server, ServerEvents, error::Shape, routes::ROUTES,
};

const BODY: &str = r#"{"messages":[{"role":"user","content":"a"}],"max_tokens":5}"#;

fn start_server(script: Vec<Step>, change: impl FnOnce(Server) -> Server) -> Scripted {
    start_changed(script, PATIENT, ChatModel::open(kjv()).unwrap(), change)
}

fn ask(server: &Scripted, key: &str, method: &str, path: &str) -> Reply {
    let head = if key.is_empty() { String::new() } else { format!("{key}\r\n") };
    let body = if method == "POST" { BODY } else { "" };
    Reply::read(server.send_with(&head, method, path, body))
}

#[test]
fn keys_open_their_scopes_in_every_dialect() {
    let mut file = KeyFile::default();
    let infer = file.add("me", BTreeSet::from([Scope::Infer]), KeyLimits::default()).unwrap();
    let metrics =
        file.add("prometheus", BTreeSet::from([Scope::Metrics]), KeyLimits::default()).unwrap();
    let server = start_server(vec![Step::Say("Jesus"), STOP], |server| {
        server.with_keys(ApiKeys::new(file).unwrap())
    });
    let bearer = |key: &str| format!("authorization: Bearer {key}");
    let check = |key: &str, method: &str, path: &str, status: u16| {
        let reply = ask(&server, key, method, path);
        assert_eq!(reply.status, status, "{key} {method} {path}: {}", reply.body);
        reply
    };
    let chat = "/v1/chat/completions";
    check(&bearer(&infer), "POST", chat, 200);
    check(&format!("x-api-key: {infer}"), "POST", "/v1/messages", 200);
    // As Azure's clients send it; an empty one counts for nothing.
    check(&format!("api-key: {infer}"), "POST", chat, 200);
    check(&format!("authorization: Bearer \r\nx-api-key: \r\napi-key: {infer}"), "POST", chat, 200);
    check("api-key: sp-wrong", "POST", chat, 401);
    check(&bearer(&metrics), "POST", chat, 403);
    check(&bearer(&metrics), "GET", "/metrics", 200);
    check(&bearer(&infer), "GET", "/metrics", 403);
    check("", "GET", "/health", 200);
    check("", "GET", "/v1/nothing", 401);
    let refused = check("", "POST", chat, 401);
    assert_eq!(refused.header("www-authenticate"), Some("bearer"));
    assert_eq!(refused.json()["error"]["code"], "invalid_api_key");
    let refused = check(&bearer("sp-wrong"), "POST", "/v1/messages", 401);
    assert_eq!(refused.json()["error"]["type"], "authentication_error");
}

#[test]
fn a_read_only_key_watches_and_computes_nothing() {
    let mut file = KeyFile::default();
    let key = file.add("wall", BTreeSet::from([Scope::Metrics]), KeyLimits::default()).unwrap();
    let server = start_server(vec![Step::Say("Jesus"), STOP], |server| {
        server.with_keys(ApiKeys::new(file).unwrap())
    });
    let key = format!("authorization: Bearer {key}");
    for path in ["/stats", "/events", "/metrics", "/health", "/v1/models", "/v1/models/kjv-4m"] {
        let reply = ask(&server, &key, "GET", path);
        assert_eq!(reply.status, 200, "{path}: {}", reply.body);
    }
    let stats = ask(&server, &key, "GET", "/stats").json();
    assert_eq!((&stats["may_compute"], &stats["may_manage"]), (&json!(false), &json!(false)));
    assert_eq!(stats["keys"][0]["name"], "wall");
    assert_eq!(ask(&server, &key, "GET", "/v1/nothing").status, 404);
    let message = "the API key \"wall\" lacks the scope";
    let mut refused = 0;
    for route in ROUTES.iter().filter(|route| route.method != "GET") {
        let reply = ask(&server, &key, route.method, &route.path.replace("{id}", "x"));
        assert_eq!(reply.status, 403, "{} {}: {}", route.method, route.path, reply.body);
        let error = &reply.json()["error"];
        // Each dialect has the words where its clients look for them.
        let text = if route.shape == Shape::Ollama { error } else { &error["message"] };
        assert!(text.as_str().is_some_and(|it| it.starts_with(message)), "{}", reply.body);
        if route.shape != Shape::Ollama {
            assert_eq!(error["type"], "permission_error", "{}", reply.body);
        }
        refused += 1;
    }
    assert!(refused > 20, "{refused}");
    assert!(server.seen.try_recv().is_err(), "the engine was asked");
}

#[test]
fn a_key_that_may_only_administer_is_told_so() {
    let mut file = KeyFile::default();
    let key = file.add("ops", BTreeSet::from([Scope::Admin]), KeyLimits::default()).unwrap();
    let server = start_server(vec![STOP], |server| server.with_keys(ApiKeys::new(file).unwrap()));
    let key = format!("authorization: Bearer {key}");
    let stats = ask(&server, &key, "GET", "/stats").json();
    assert_eq!((&stats["may_compute"], &stats["may_manage"]), (&json!(false), &json!(true)));
    assert_eq!(ask(&server, &key, "GET", "/v1/models/kjv-4m").status, 200);
    assert_eq!(ask(&server, &key, "POST", "/v1/chat/completions").status, 403);
    // The body names no model: that is its fault, and not the key's.
    assert_eq!(ask(&server, &key, "POST", "/v1/models/load").status, 400);
    assert!(server.seen.try_recv().is_err(), "the engine was asked");
}

#[test]
fn events_are_told_to_those_whom_they_concern() {
    let mut file = KeyFile::default();
    let scopes = || BTreeSet::from([Scope::Infer]);
    let own = file.add("own", scopes(), KeyLimits::default()).unwrap();
    let other = file.add("other", scopes(), KeyLimits::default()).unwrap();
    file.entry_mut("other").unwrap().models = Some(BTreeSet::from(["another".to_owned()]));
    let wall = file.add("wall", BTreeSet::from([Scope::Metrics]), KeyLimits::default()).unwrap();
    let events = ServerEvents::default();
    let server = start_server(vec![STOP], |server| {
        server.with_events(events.clone()).with_keys(ApiKeys::new(file).unwrap())
    });
    events.add("group_lost", Some("kjv-4m"), "rank 1 was lost", json!({"rank": 1}));
    events.add("keys_reloaded", None, "keys.json read again", Value::Null);
    let ask = |key: &str, path: &str| {
        let reply = ask(&server, &format!("x-api-key: {key}"), "GET", path);
        assert_eq!(reply.status, 200, "{}", reply.body);
        let found = reply.json();
        assert_eq!(found["last"], 2);
        found["events"].as_array().unwrap().clone()
    };
    let kinds = |events: &[Value]| events.iter().map(|event| event["kind"].clone()).collect();
    let told = |key: &str| -> Vec<Value> { kinds(&ask(key, "/events")) };
    assert_eq!(told(&own), ["group_lost"]);
    assert_eq!(told(&other), [Value::Null; 0]);
    assert_eq!(told(&wall), ["group_lost", "keys_reloaded"]);
    let mut lost = ask(&own, "/events").remove(0);
    assert!(lost["time"].take().as_str().unwrap().ends_with('Z'));
    let expected = json!({
        "number": 1, "time": null, "kind": "group_lost", "model": "kjv-4m",
        "text": "rank 1 was lost", "fields": {"rank": 1},
    });
    assert_eq!(lost, expected);
    assert_eq!(ask(&wall, "/events?since=1").len(), 1);
    assert_eq!(ask(&wall, "/events?since=2").len(), 0);
    let wrong = server.send_with(&format!("x-api-key: {wall}\r\n"), "GET", "/events?since=x", "");
    let wrong = Reply::read(wrong);
    assert_eq!((wrong.status, &wrong.json()["error"]["param"]), (400, &json!("since")));
    assert_eq!(Reply::read(server.send_with("", "GET", "/stats", "")).status, 401);
}

#[test]
fn keys_beyond_their_limit_are_told_when_to_come_back() {
    let mut file = KeyFile::default();
    let limits = KeyLimits { requests_per_minute: Some(1), ..KeyLimits::default() };
    let key = file.add("me", BTreeSet::from([Scope::Infer]), limits).unwrap();
    let server = start_server(vec![STOP], |server| server.with_keys(ApiKeys::new(file).unwrap()));
    let key = format!("authorization: Bearer {key}");
    assert_eq!(ask(&server, &key, "POST", "/v1/chat/completions").status, 200);
    let reply = ask(&server, &key, "POST", "/v1/chat/completions");
    assert_eq!(reply.status, 429);
    assert_eq!(reply.header("x-should-retry"), Some("true"));
    let seconds: u64 = reply.header("retry-after").unwrap().parse().unwrap();
    let millis: u64 = reply.header("retry-after-ms").unwrap().parse().unwrap();
    assert!((1..=60).contains(&seconds) && millis <= seconds * 1000, "{seconds} {millis}");
    assert!(reply.body.contains("please try again in "), "{}", reply.body);
    let reply = ask(&server, &key, "POST", "/v1/messages");
    assert_eq!(reply.json()["error"]["type"], "rate_limit_error");
}

#[test]
fn other_origins_may_ask_only_where_they_are_named() {
    let origin = "origin: https://chat.example";
    let closed = start(vec![STOP]);
    let reply = ask(&closed, origin, "POST", "/v1/chat/completions");
    assert_eq!(reply.header("access-control-allow-origin"), None);
    assert_eq!(ask(&closed, origin, "OPTIONS", "/v1/chat/completions").status, 405);
    let open = start_server(vec![STOP], |server| {
        server.with_origins(vec!["https://chat.example".to_owned()])
    });
    let reply = ask(&open, origin, "OPTIONS", "/v1/chat/completions");
    assert_eq!(reply.status, 204);
    assert_eq!(reply.header("access-control-allow-origin"), Some("https://chat.example"));
    let named = format!("{origin}\r\naccess-control-request-headers: x-stainless-os, api-key");
    let reply = ask(&open, &named, "OPTIONS", "/v1/chat/completions");
    let allowed = reply.header("access-control-allow-headers");
    assert_eq!(allowed, Some("x-stainless-os, api-key"), "the headers of SDKs");
    let reply = ask(&open, origin, "POST", "/v1/chat/completions");
    assert!(reply.header("access-control-expose-headers").unwrap().contains("x-request-id"));
    let reply = ask(&open, "origin: https://evil.example", "GET", "/health");
    assert_eq!(reply.header("access-control-allow-origin"), None);
}

#[test]
fn addresses_tell_their_methods_and_answer_heads() {
    let server = start(vec![STOP]);
    let check = |path: &str, methods: &str| {
        let reply = ask(&server, "", "OPTIONS", path);
        assert_eq!((reply.status, reply.header("allow")), (204, Some(methods)), "{path}");
    };
    check("/v1/chat/completions", "post, options");
    check("/v1/models", "get, head, options");
    check("/v1/responses/resp_1", "get, head, delete, options");
    assert_eq!(ask(&server, "", "OPTIONS", "/v1/nothing").status, 404);
    for path in ["/", "/health", "/v1/models", "/v1/models/kjv-4m", "/api/version", "/api/tags"] {
        let reply = ask(&server, "", "HEAD", path);
        assert_eq!((reply.status, reply.body.as_str()), (200, ""), "{path}");
    }
}

#[test]
fn what_is_done_is_counted_under_both_names() {
    let server = start(vec![Step::Say("Jesus wept."), STOP]);
    assert_eq!(ask(&server, "", "POST", "/v1/chat/completions").status, 200);
    assert_eq!(server.chat(r#""mystery":1,"stop":7"#).status, 400);
    let text = ask(&server, "", "GET", "/metrics").body;
    for line in [
        r#"shardpack_generation_tokens_total{model_name="kjv-4m"} 6"#,
        r#"vllm:generation_tokens_total{model_name="kjv-4m"} 6"#,
        r#"vllm:prompt_tokens_total{model_name="kjv-4m"} "#,
        r#"vllm:num_requests_running{model_name="kjv-4m"} 0"#,
        r#"vllm:num_requests_waiting{model_name="kjv-4m"} 0"#,
        r#"vllm:request_success_total{finished_reason="stop",model_name="kjv-4m"} 1"#,
        r#"vllm:time_to_first_token_seconds_count{model_name="kjv-4m"} 1"#,
        r#"shardpack_engine_ready{model_name="kjv-4m"} 1"#,
    ] {
        let swapped = line.replace(
            r#"finished_reason="stop",model_name="kjv-4m""#,
            r#"model_name="kjv-4m",finished_reason="stop""#,
        );
        assert!(text.contains(line) || text.contains(&swapped), "{line}\n{text}");
    }
    assert!(text.contains("/v1/chat/completions") && text.ends_with("# EOF\n"), "{text}");
}

#[test]
fn log_tells_who_and_how_long_and_nothing_of_what_was_said() {
    let lines = Arc::new(Mutex::new(Vec::<String>::new()));
    let sink = lines.clone();
    let server = start_server(vec![Step::Say("Jesus wept."), STOP], |server| {
        server.with_log(Box::new(move |line| sink.lock().unwrap().push(line.to_owned())))
    });
    server.chat("");
    let lines = lines.lock().unwrap();
    let line: serde_json::Value = serde_json::from_str(&lines[0]).unwrap();
    assert_eq!((&line["status"], &line["route"]), (&json!(200), &json!("/v1/chat/completions")));
    assert!(!lines[0].contains("John") && !lines[0].contains("wept"), "{}", lines[0]);
}

#[test]
fn readiness_follows_the_engine() {
    let server = start(vec![]);
    assert_eq!(ask(&server, "", "GET", "/readyz").status, 200);
    server.engine.update_status(|status| {
        status.state = shardpack_engine_api::EngineState::Failed("rank 1 is gone".to_owned());
    });
    let reply = ask(&server, "", "GET", "/readyz");
    assert_eq!((reply.status, reply.header("retry-after")), (503, Some("2")));
    assert_eq!(ask(&server, "", "GET", "/livez").status, 200);
}

/// More clients than slots: every one ends in an answer or is told when to come back, and
/// nothing is left behind.
#[test]
fn crowd_is_answered_or_turned_away() {
    let limits = ServerLimits { active_requests: 8, ..PATIENT };
    let model = ChatModel::open(kjv()).unwrap();
    let server = start_changed(vec![Step::Say("Jesus wept."), STOP], limits, model, |s| s);
    let connections: Vec<_> = (0..60).map(|_| server.send_chat(r#""stream":true"#)).collect();
    let (mut answered, mut refused) = (0, 0);
    for connection in connections {
        let reply = Reply::read(connection);
        match reply.status {
            200 => {
                assert!(reply.body.ends_with("data: [DONE]\n\n"));
                answered += 1;
            }
            503 => {
                assert_eq!(reply.header("retry-after"), Some("2"));
                refused += 1;
            }
            other => panic!("{other}: {}", reply.body),
        }
    }
    assert_eq!(answered + refused, 60);
    assert!(answered >= 8, "{answered}");
    assert_idle(&server);
}

#[test]
fn nodes_are_shown_with_what_they_say_of_themselves() {
    let server = start(vec![]);
    let nodes = |server: &Scripted| ask(server, "", "GET", "/stats").json()["nodes"].clone();
    let bare = json!([{"rank": 0, "name": "rank 0"}, {"rank": 1, "name": "rank 1"}]);
    assert_eq!(nodes(&server), bare);
    let said = |step_us| shardpack_engine_api::RankVitals {
        memory_bytes: Some(1 << 30),
        step_us,
        sums_us: step_us.map(|step| step / 10),
        power_mw: Some(38_500),
        temperature_mc: Some(61_250),
        ..Default::default()
    };
    server.engine.update_status(|status| {
        status.hear(1, said(Some(12_500)));
        // A second without steps does not forget how long they were; a rank too many is none.
        status.hear(1, said(None));
        status.hear(7, said(None));
    });
    let second = json!({"rank": 1, "name": "rank 1", "memory_bytes": 1 << 30, "step_ms": 12.5,
        "allreduce_ms": 1.25, "power_watts": 38.5, "temperature_celsius": 61.25});
    assert_eq!(nodes(&server)[1], second);
    let metrics = ask(&server, "", "GET", "/metrics").body;
    for (name, value) in [
        ("memory_bytes", "1073741824.0"),
        ("step_seconds", "0.0125"),
        ("allreduce_seconds", "0.00125"),
        ("power_watts", "38.5"),
        ("temperature_celsius", "61.25"),
    ] {
        let line = format!("shardpack_rank_{name}{{");
        let line: Vec<&str> = metrics.lines().filter(|text| text.starts_with(&line)).collect();
        assert_eq!(line.len(), 1, "{name}: rank 0 has said nothing: {metrics}");
        assert!(line[0].contains("rank=\"1\"") && line[0].ends_with(value), "{line:?}");
    }
}

#[test]
fn drafts_are_counted_on_when_a_rank_begins_anew() {
    let server = start(vec![]);
    let says = |drafted, accepted| {
        let vitals = shardpack_engine_api::RankVitals {
            drafted_tokens: Some(drafted),
            accepted_tokens: Some(accepted),
            ..Default::default()
        };
        server.engine.update_status(|status| status.hear(0, vitals));
    };
    let counted = || {
        let metrics = ask(&server, "", "GET", "/metrics").body;
        let value = |name: &str| {
            let line = metrics.lines().find(|line| line.starts_with(&format!("{name}_total{{")));
            line.and_then(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).unwrap()
        };
        for (own, other) in [("draft", "draft"), ("accepted_draft", "accepted")] {
            let other = format!("vllm:spec_decode_num_{other}_tokens");
            assert_eq!(value(&format!("shardpack_{own}_tokens")), value(&other));
        }
        [value("shardpack_draft_tokens"), value("shardpack_accepted_draft_tokens")]
    };
    assert_eq!(counted(), [0, 0]);
    says(9, 4);
    let stats = ask(&server, "", "GET", "/stats").json();
    assert_eq!(stats["drafts"], json!({"run": 9, "accepted": 4}));
    assert_eq!(counted(), [9, 4]);
    says(12, 4);
    assert_eq!(counted(), [12, 4]);
    // Its process was started again.
    says(2, 1);
    assert_eq!(counted(), [14, 5]);
}

/// Every slot is free and nothing counts as running.
fn assert_idle(server: &Scripted) {
    wait_until("no request is left behind", || {
        let stats = ask(server, "", "GET", "/stats").json();
        stats["requests"]["running"] == 0 && stats["requests"]["waiting"] == 0
    });
}

#[test]
fn places_of_clients_that_leave_are_free_again() {
    let limits = ServerLimits { active_requests: 1, ..PATIENT };
    let model = ChatModel::open(kjv()).unwrap();
    let script = vec![Step::Say("Jesus"), Step::AwaitCancel];
    let server = start_changed(script, limits, model, |server| server);
    for _ in 0..5 {
        let mut connection = server.send_chat(r#""stream":true"#);
        server.submitted();
        connection.read_exact(&mut [0; 64]).unwrap();
        drop(connection);
        assert_eq!(server.seen(), Seen::Cancelled);
        assert_idle(&server);
    }
}
