//! API keys of several people: what each may use, what each has used, and the log of it.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::TcpStream,
    path::{Path, PathBuf},
    process::Command,
    thread,
};

use serde_json::{Value, json};
use tempfile::tempdir;

use crate::{
    harness::{convert, fail, path, shardpack, succeed},
    running::{HANG, Running, wait_until},
};

#[cfg(target_os = "linux")]
use crate::running::lives;

fn agent() -> ureq::Agent {
    ureq::Agent::config_builder()
        .http_status_as_error(false)
        .timeout_global(Some(HANG))
        .build()
        .into()
}

fn get(url: &str, key: &str, route: &str) -> (u16, Value) {
    let url = url.replace("/v1", route);
    let request = agent().get(&url).header("authorization", format!("Bearer {key}"));
    let mut response = request.call().unwrap();
    (response.status().as_u16(), serde_json::from_reader(response.body_mut().as_reader()).unwrap())
}

fn body(stream: bool, tokens: u32) -> Value {
    json!({
        "messages": [{ "role": "user", "content": "John 3:16" }],
        "temperature": 0, "max_tokens": tokens, "stream": stream, "ignore_eos": true,
    })
}

fn ask(url: &str, key: &str, body: &Value) -> (u16, Value) {
    let url = format!("{url}/chat/completions");
    let request = agent().post(&url).header("authorization", format!("Bearer {key}"));
    let mut response = request.content_type("application/json").send(body.to_string()).unwrap();
    (response.status().as_u16(), serde_json::from_reader(response.body_mut().as_reader()).unwrap())
}

/// Begins a stream and reads its first bytes.
fn begin_stream(url: &str, key: &str, tokens: u32) -> TcpStream {
    let address = url.replace("http://", "").replace("/v1", "");
    let mut connection = TcpStream::connect(address).unwrap();
    connection.set_read_timeout(Some(HANG)).unwrap();
    let body = body(true, tokens).to_string();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    connection.write_all((head + &body).as_bytes()).unwrap();
    let mut seen = Vec::new();
    while !String::from_utf8_lossy(&seen).contains("data: ") {
        let mut byte = [0; 64];
        let count = connection.read(&mut byte).unwrap();
        assert!(count > 0, "the stream ended");
        seen.extend_from_slice(&byte[..count]);
    }
    connection
}

fn signal(server: u32, name: &str) {
    let pid = server.to_string();
    assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
}

struct Scene {
    _folder: tempfile::TempDir,
    set: PathBuf,
    keys: PathBuf,
    usage: PathBuf,
    audit: PathBuf,
}

impl Scene {
    fn new() -> Self {
        let folder = tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let set = convert("kjv-4m", &at("set"), &["--name", "kjv"]);
        let (keys, usage, audit) = (at("keys.json"), at("usage.jsonl"), at("audit.jsonl"));
        Self { _folder: folder, set, keys, usage, audit }
    }

    fn key(&self, name: &str, options: &[&str]) -> String {
        let mut args = vec!["keys", path(&self.keys), "add", name];
        args.extend(options);
        succeed(&args).trim().to_owned()
    }

    fn serve(&self) -> Running {
        let options = [
            "--keys",
            path(&self.keys),
            "--usage",
            path(&self.usage),
            "--audit",
            path(&self.audit),
            "--threads",
            "1",
            "--alias",
            "gpt-4",
        ];
        Running::serve(&self.set, &options)
    }
}

/// The sums of a key, as the server tells an administrator.
fn usage_of(url: &str, admin: &str, key: &str) -> [u64; 4] {
    let (status, usage) = get(url, admin, "/v1/usage");
    assert_eq!(status, 200, "{usage}");
    let rows = usage["data"].as_array().unwrap().iter().filter(|row| row["key"] == key);
    rows.fold([0; 4], |mut sums, row| {
        let names = ["requests", "prompt_tokens", "cached_tokens", "completion_tokens"];
        for (sum, name) in sums.iter_mut().zip(names) {
            *sum += row[name].as_u64().unwrap();
        }
        sums
    })
}

/// Sums of the lines of an audit log about a key.
fn audited(file: &Path, key: &str) -> [u64; 4] {
    let text = fs::read_to_string(file).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter(|line| line["key"] == key && line["prompt_tokens"] != 0).fold(
        [0; 4],
        |mut sums, line| {
            sums[0] += 1;
            let names = ["prompt_tokens", "cached_tokens", "completion_tokens"];
            for (sum, name) in sums[1..].iter_mut().zip(names) {
                *sum += line[name].as_u64().unwrap();
            }
            sums
        },
    )
}

/// What responses said of themselves.
fn said(answers: &[Value]) -> [u64; 4] {
    let sum = |of: &dyn Fn(&Value) -> u64| answers.iter().map(|answer| of(&answer["usage"])).sum();
    [
        answers.len() as u64,
        sum(&|usage| usage["prompt_tokens"].as_u64().unwrap()),
        sum(&|usage| usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()),
        sum(&|usage| usage["completion_tokens"].as_u64().unwrap()),
    ]
}

/// How many requests each of two keys sends.
fn requests() -> u32 {
    std::env::var("SHARDPACK_TENANT_REQUESTS").ok().map_or(100, |count| count.parse().unwrap())
}

#[test]
fn usage_equals_what_responses_said_over_aborted_streams_and_a_kill() {
    let scene = Scene::new();
    let [a, b, c] = ["a", "b", "c"].map(|name| scene.key(name, &[]));
    let admin = scene.key("admin", &["--scopes", "infer,admin"]);
    let mut server = scene.serve();
    let (mut answers_a, mut answers_b) = (Vec::new(), Vec::new());
    let (rounds, aborted) = (requests().div_ceil(50), 10);
    for round in 1..=u64::from(rounds) {
        let url = server.url();
        thread::scope(|scope| {
            let url = url.as_str();
            let many = move |key: &str| -> Vec<Value> {
                let one = |tokens: u32| {
                    let (status, answer) = ask(url, key, &body(false, tokens % 7 + 1));
                    assert_eq!(status, 200, "{answer}");
                    answer
                };
                (0..50).map(one).collect()
            };
            let others = scope.spawn({
                let b = b.as_str();
                move || many(b)
            });
            for _ in 0..aborted {
                drop(begin_stream(url, &c, 3000));
            }
            answers_a.extend(many(&a));
            answers_b.extend(others.join().unwrap());
        });
        wait_until("streams that were left are counted", || {
            usage_of(&server.url(), &admin, "c")[0] == aborted * round
        });
        let before = ["a", "b"].map(|key| usage_of(&server.url(), &admin, key));
        assert_eq!(before, [said(&answers_a), said(&answers_b)], "round {round}");
        // A request runs while the server is killed.
        let running = begin_stream(&server.url(), &admin, 3000);
        server.kill();
        drop(running);
        server = scene.serve();
        let after = ["a", "b"].map(|key| usage_of(&server.url(), &admin, key));
        assert_eq!(before, after, "a kill loses nothing of what was answered");
        assert_eq!(["a", "b"].map(|key| audited(&scene.audit, key)), before, "round {round}");
    }
    let [requests, prompt, _, completion] = usage_of(&server.url(), &admin, "c");
    let prompt_tokens = answers_a[0]["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!((requests, prompt), (aborted * u64::from(rounds), prompt_tokens * requests));
    assert!(completion >= requests, "what was computed counts: {completion}");
    let (_, own) = get(&server.url(), &a, "/v1/usage?by=day");
    assert!(own["data"].as_array().unwrap().iter().all(|row| row["key"] == "a"), "{own}");
    let mut command = shardpack();
    command.args(["usage", "--csv", "--server", &server.url()]).env("SHARDPACK_API_KEY", &b);
    let csv = String::from_utf8(command.output().unwrap().stdout).unwrap();
    let [requests, prompt, cached, completion] = said(&answers_b);
    assert!(csv.contains(&format!(",b,kjv,{requests},0,{prompt},{cached},{completion},")), "{csv}");

    assert_eq!(server.terminate(), Some(0));
    let audit = path(&scene.audit);
    assert!(succeed(&["audit", "verify", audit]).contains("unchanged"));
    let text = fs::read_to_string(&scene.audit).unwrap();
    assert!(!text.contains("John"), "no prompt is in it");
    let tampered = text.replacen("\"completion_tokens\":7", "\"completion_tokens\":1", 1);
    assert_ne!(tampered, text);
    let line = text.lines().zip(tampered.lines()).position(|(old, new)| old != new).unwrap() + 2;
    fs::write(&scene.audit, tampered).unwrap();
    let error = fail(1, &["audit", "verify", audit]);
    assert!(error.contains(&format!("line {line}:")) && error.contains("was changed"), "{error}");
}

/// The cached tokens of an answer to a long prompt.
fn ask_long(server: &Running, key: &str, prompt: usize) -> u64 {
    let mut body = body(false, 1);
    let text = format!("{prompt} {}", "And God said, Let there be light. ".repeat(60));
    body["messages"][0]["content"] = json!(text);
    let (status, answer) = ask(&server.url(), key, &body);
    assert_eq!(status, 200, "{answer}");
    said(&[answer])[2]
}

#[test]
fn what_one_key_asked_no_other_can_tell() {
    let scene = Scene::new();
    let [own, other] = ["own", "other"].map(|name| scene.key(name, &[]));
    let [one, two] = ["one", "two"].map(|name| scene.key(name, &["--share-prefix-cache", "team"]));
    let server = scene.serve();
    for prompt in 0..3 {
        let asked = |key: &str| ask_long(&server, key, prompt);
        // The first asks what nobody has asked, the second what the first one did. What is not cached is computed, so its
        // time is that of a prompt that nobody asked.
        assert_eq!((asked(&own), asked(&other)), (0, 0), "a hit tells that it was asked before");
        assert!(asked(&own) > 0, "one's own prompt is kept");
        assert_eq!(asked(&one), 0, "nor for those that share with one another");
        assert!(asked(&two) > 0, "these two share");
    }
}

/// A key made with `--read-only` sees what the server does, and computes nothing.
fn check_read_only(url: &str, wall: &str) {
    let (status, refused) = ask(url, wall, &body(false, 1));
    assert_eq!((status, &refused["error"]["code"]), (403, &json!("missing_scope")), "{refused}");
    assert_eq!(get(url, wall, "/v1/models").0, 200);
    let (status, stats) = get(url, wall, "/stats");
    assert_eq!((status, &stats["may_compute"]), (200, &json!(false)), "{stats}");
    let (status, happened) = get(url, wall, "/events");
    assert_eq!((status, &happened["events"][0]["kind"]), (200, &json!("group_formed")));
    assert_eq!(happened["last"], stats["last_event"]);
}

#[test]
fn keys_are_read_again_by_change_and_by_signal() {
    let scene = Scene::new();
    let admin = scene.key("admin", &["--scopes", "infer,admin"]);
    let limited = scene.key("limited", &["--body-bytes-per-minute", "400", "--weight", "3"]);
    let other = scene.key("other", &["--models", "another"]);
    let wall = scene.key("wall", &["--read-only"]);
    let keys = path(&scene.keys);
    let server = scene.serve();
    let short = body(false, 1);
    assert_eq!(ask(&server.url(), &limited, &short).0, 200);
    wait_until("bytes are used up", || ask(&server.url(), &limited, &short).0 == 429);
    let (status, answer) = ask(
        &server.url(),
        &other,
        &json!({ "model": "kjv", "messages": [{ "role": "user", "content": "a" }] }),
    );
    assert_eq!(status, 404, "{answer}");
    assert!(!answer["error"]["message"].as_str().unwrap().contains("[\"kjv"), "{answer}");
    assert_eq!(get(&server.url(), &other, "/v1/models").1["data"], json!([]));
    assert_eq!(get(&server.url(), &other, "/v1/models/gpt-4").0, 404);
    let (_, stats) = get(&server.url(), &admin, "/stats");
    let of_limited = stats["keys"].as_array().unwrap().iter().find(|key| key["name"] == "limited");
    let of_limited = of_limited.unwrap();
    assert_eq!((&of_limited["weight"], &of_limited["running"]), (&json!(3), &json!(0)));
    assert!(of_limited["left"]["body_bytes"].as_u64().unwrap() < 400, "{stats}");
    assert!(get(&server.url(), &limited, "/stats").1.get("keys").is_none(), "for administrators");
    check_read_only(&server.url(), &wall);

    // By a change of the file; an alias opens the model.
    succeed(&["keys", keys, "set", "other", "--models", "gpt-4"]);
    wait_until("the change is noticed", || ask(&server.url(), &other, &short).0 == 200);
    succeed(&["keys", keys, "remove", "limited"]);
    wait_until("the removal is noticed", || ask(&server.url(), &limited, &short).0 == 401);
    let (_, happened) = get(&server.url(), &wall, "/events?since=1");
    let read_again = happened["events"].as_array().unwrap().iter();
    let read_again = read_again.filter(|event| event["kind"] == "keys_reloaded").count();
    assert_eq!(read_again, 2, "{happened}");
    // A broken file leaves the keys in use.
    let whole = fs::read(&scene.keys).unwrap();
    fs::write(&scene.keys, "{").unwrap();
    server.wait_for("error: keys: cannot reload, the keys in use stay");
    assert_eq!(ask(&server.url(), &other, &short).0, 200);
    let (_, stats) = get(&server.url(), &admin, "/stats");
    assert!(stats["keys_reload_failed"].as_str().unwrap().contains("not a key file"), "{stats}");
    fs::write(&scene.keys, whole).unwrap();
    wait_until("the whole file is noticed", || {
        get(&server.url(), &admin, "/stats").1["keys_reload_failed"].is_null()
    });
    // By a signal, which opens the audit log anew too.
    let old = scene.audit.with_extension("1");
    fs::rename(&scene.audit, &old).unwrap();
    signal(server.process(), "-HUP");
    server.wait_for("audit: the log goes on in a new file");
    assert_eq!(ask(&server.url(), &other, &short).0, 200);
    assert_eq!(server.terminate(), Some(0));
    succeed(&["audit", "verify", path(&old), path(&scene.audit)]);
}

#[cfg(target_os = "linux")]
#[test]
fn a_service_manager_is_told_and_a_second_signal_ends_at_once() {
    use std::os::{linux::net::SocketAddrExt as _, unix::net};
    let scene = Scene::new();
    let key = scene.key("a", &[]);
    let name = format!("shardpack-test-{}", std::process::id());
    let address = net::SocketAddr::from_abstract_name(&name).unwrap();
    let socket = net::UnixDatagram::bind_addr(&address).unwrap();
    socket.set_read_timeout(Some(HANG)).unwrap();
    let mut command = shardpack();
    command.args(["serve", path(&scene.set), "--listen", "127.0.0.1:0", "--json"]);
    command.args(["--keys", path(&scene.keys), "--threads", "1", "--drain-timeout", "600"]);
    command.env("NOTIFY_SOCKET", format!("@{name}")).env("WATCHDOG_USEC", "100000");
    let mut server = Running::spawn(command);
    let hear = |wanted: &str| {
        let deadline = std::time::Instant::now() + HANG;
        loop {
            let mut bytes = [0; 256];
            let count = socket.recv(&mut bytes).unwrap();
            if &bytes[..count] == wanted.as_bytes() {
                return;
            }
            assert!(std::time::Instant::now() < deadline, "never said {wanted}");
        }
    };
    hear("READY=1");
    hear("WATCHDOG=1");
    signal(server.process(), "-HUP");
    hear("RELOADING=1");
    hear("READY=1");
    let ranks = server.children();
    let stream = begin_stream(&server.url(), &key, 3900);
    signal(server.process(), "-TERM");
    hear("STOPPING=1");
    signal(server.process(), "-TERM");
    assert_eq!(server.exit_code(), Some(143));
    assert!(!ranks.into_iter().any(lives), "no rank outlives its front");
    drop(stream);
}
