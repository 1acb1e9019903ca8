//! A client with one stream beside others that want much: another key's many streams, a long prompt, fresh
//! grammars.
//!
//! Here it is the order in which requests end that counts, which is the same on a busy machine. `just fairness` measures
//! speeds and gaps, on a machine with nothing else to do. In steps of the engine they are proved where it shares them.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::{
    harness::{path, succeed},
    running::{HANG, Running, wait_until},
    sets::kjv,
};

/// The case of a client with many streams.
const STREAMS: &str = "64 streams";

/// The case of several clients with one short answer after the other.
const WITHOUT_GRAMMARS: &str = "no grammars";

/// The least part of all tokens that one stream has beside 64 of another client: twice that of a row in a batch of 32,
/// which it would have if streams were all alike.
const SHARE_MIN: f64 = 0.06;

/// The least part of its speed alone that the quiet stream keeps beside anything else.
const PART_MIN: f64 = 0.85;

/// The longest gap between two tokens of it.
const GAP_MAX: Duration = Duration::from_millis(250);

/// How long it is measured.
const MEASURED: Duration = Duration::from_secs(12);

/// A server with clients.
struct Scene {
    _folder: tempfile::TempDir,
    server: Running,
    clients: Clients,
}

/// Where the server is, and the keys of its clients.
struct Clients {
    address: String,
    keys: Vec<String>,
}

impl Scene {
    fn new(clients: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("keys.json");
        let add = |name: usize| {
            succeed(&["keys", path(&file), "add", &name.to_string()]).trim().to_owned()
        };
        let keys = (0..clients).map(add).collect();
        let set = match std::env::var_os("SHARDPACK_FAIRNESS_SET") {
            Some(set) => PathBuf::from(set),
            None => kjv(&folder.path().join("set")),
        };
        let options = ["--keys", path(&file), "--threads", "2"];
        let server = Running::serve(&set, &options);
        let address = server.url();
        let address = address.trim_start_matches("http://").trim_end_matches("/v1").to_owned();
        Self { server, clients: Clients { address, keys }, _folder: folder }
    }
}

impl Clients {
    fn post(&self, client: usize, body: &Value) -> Answer {
        Answer::ask(&self.address, &self.keys[client], body)
    }
}

/// An answer on its way.
struct Answer {
    lines: BufReader<TcpStream>,
    status: u16,
}

impl Answer {
    fn ask(address: &str, key: &str, body: &Value) -> Self {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(HANG)).unwrap();
        stream.set_nodelay(true).unwrap();
        let body = body.to_string();
        write!(
            stream,
            "POST /v1/chat/completions HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {key}\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        let mut lines = BufReader::new(stream);
        let mut first = String::new();
        lines.read_line(&mut first).unwrap();
        let status = first.split(' ').nth(1).and_then(|code| code.parse().ok());
        Self { lines, status: status.unwrap_or_else(|| panic!("{first:?}")) }
    }

    /// The next event of the stream; none after its end.
    fn event(&mut self) -> Option<Value> {
        loop {
            let mut line = String::new();
            if self.lines.read_line(&mut line).unwrap() == 0 {
                return None;
            }
            if let Some(data) = line.strip_prefix("data: ") {
                return serde_json::from_str(data).ok();
            }
        }
    }

    fn rest(mut self) -> String {
        let mut text = String::new();
        // One that is ended with the server is of no interest.
        let _ = self.lines.read_to_string(&mut text);
        text
    }
}

fn stream(content: &str, max_tokens: u32) -> Value {
    json!({
        "messages": [{ "role": "user", "content": content }], "stream": true, "ignore_eos": true,
        "max_tokens": max_tokens, "temperature": 1, "seed": 7,
        "stream_options": { "include_usage": true },
    })
}

/// What a client with one stream after the other saw.
#[derive(Clone, Copy, Debug)]
struct Seen {
    tokens_per_second: f64,
    longest_gap: Duration,
    first_token: Duration,
    /// Events with tokens.
    events: u64,
}

/// Streams for so long.
fn watch(clients: &Clients, time: Duration) -> Seen {
    let begun = Instant::now();
    let (mut tokens, mut events, mut streaming) = (0, 0, Duration::ZERO);
    let [mut longest_gap, mut first_token] = [Duration::ZERO; 2];
    while begun.elapsed() < time {
        let asked = Instant::now();
        let mut answer = clients.post(0, &stream("Jesus wept.", 600));
        assert_eq!(answer.status, 200);
        let mut last: Option<Instant> = None;
        while let Some(event) = answer.event() {
            let now = Instant::now();
            if let Some(count) = event["usage"]["completion_tokens"].as_u64() {
                tokens += count;
                continue;
            }
            match last {
                None => first_token = first_token.max(asked.elapsed()),
                Some(last) => {
                    longest_gap = longest_gap.max(now - last);
                    streaming += now - last;
                }
            }
            last = Some(now);
            events += 1;
        }
    }
    let tokens_per_second = tokens as f64 / streaming.as_secs_f64();
    Seen { tokens_per_second, longest_gap, first_token, events }
}

/// A client, and what it asks for, request by request.
type Request = (usize, Box<dyn Fn(u64) -> Value + Send>);

/// What others do meanwhile: each thread one request after the other.
#[derive(Clone, Default)]
struct Others {
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicU64>,
    events: Arc<AtomicU64>,
}

impl Others {
    fn begin<'scope, 'env>(
        scope: &'scope thread::Scope<'scope, 'env>,
        clients: &'env Clients,
        requests: Vec<Request>,
    ) -> Self {
        let others = Self::default();
        for (client, body) in requests {
            let Self { stop, answered, events } = others.clone();
            scope.spawn(move || {
                for number in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let mut answer = clients.post(client, &body(number));
                    if answer.status != 200 {
                        let status = answer.status;
                        panic!("{status}: {}", answer.rest());
                    }
                    while !stop.load(Ordering::Relaxed) && answer.event().is_some() {
                        events.fetch_add(1, Ordering::Relaxed);
                    }
                    answered.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        others
    }
}

/// Ends the others with the test, however it ends.
struct Stopping(Arc<AtomicBool>);

impl Drop for Stopping {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A schema of its own for each number.
fn schema(client: usize, number: u64, properties: usize) -> Value {
    let member = |index: usize| {
        let kind = match index % 3 {
            0 => json!({ "type": "string", "maxLength": 20 + index % 7 }),
            1 => json!({ "type": "integer" }),
            _ => json!({ "type": "array", "items": { "type": "number" } }),
        };
        (format!("member_{client}_{number}_{index}"), kind)
    };
    let members: serde_json::Map<String, Value> = (0..properties).map(member).collect();
    let required: Vec<&String> = members.keys().collect();
    json!({ "type": "object", "required": required, "properties": members,
            "additionalProperties": false })
}

/// Whether the quiet stream is as fast as the bounds say, or has its share of the tokens, while others ask for this.
#[expect(clippy::print_stderr, reason = "the figures are for people")]
fn keeps_its_part(scene: &Scene, name: &str, requests: Vec<Request>) -> bool {
    // The machine may have other things to do, now more and now less of them.
    let before = watch(&scene.clients, MEASURED / 2);
    let (seen, answered, events) = thread::scope(|scope| {
        let others = Others::begin(scope, &scene.clients, requests);
        let seen = watch(&scene.clients, MEASURED);
        others.stop.store(true, Ordering::Relaxed);
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        (seen, read(&others.answered), read(&others.events))
    });
    let share = seen.events as f64 / (seen.events + events) as f64;
    let after = watch(&scene.clients, MEASURED / 2);
    let alone = f64::midpoint(before.tokens_per_second, after.tokens_per_second);
    let part = seen.tokens_per_second / alone;
    eprintln!(
        "{name}: {part:.2} of {alone:.0} tokens/s; longest gap {:.0?}, first token {:.0?} at the \
         latest; {share:.2} of all tokens; {answered} requests of others done",
        seen.longest_gap, seen.first_token
    );
    // How fast the quiet stream is beside many streams is a matter of the processors, which also read and write the
    // others' answers. How the engine shares its steps is not.
    let kept = if name == STREAMS { share >= SHARE_MIN } else { part >= PART_MIN };
    kept && seen.longest_gap <= GAP_MAX
}

/// 64 streams of another client, each of so many tokens.
fn streams(max_tokens: u32) -> Vec<Request> {
    let one = |index: u32| -> Request {
        (1, Box::new(move |_| stream(&format!("John {index}:1"), max_tokens)))
    };
    (0..64).map(one).collect()
}

fn prompts() -> Vec<Request> {
    let long = |number: u64| format!("{number} {}", "And it came to pass. ".repeat(550));
    vec![(1, Box::new(move |number| stream(&long(number), 1)))]
}

/// A new schema of so many members with every request.
fn grammars(properties: usize) -> Vec<Request> {
    let one = |client: usize| -> Request {
        let body = move |number| {
            let mut body = stream("John 11:35", 60);
            body["ignore_eos"] = false.into();
            body["response_format"] = json!({ "type": "json_schema", "json_schema": {
                "name": "n", "strict": true, "schema": schema(client, number, properties) } });
            body
        };
        (client, Box::new(body))
    };
    (1..5).map(one).collect()
}

/// What the same clients cost without any schema.
fn short() -> Vec<Request> {
    let one = |client: usize| -> Request {
        (client, Box::new(move |number| stream(&format!("John {client}:{number}"), 60)))
    };
    (1..5).map(one).collect()
}

/// One answer of the quiet client's to its end.
fn answer(clients: &Clients, tokens: u32) {
    let mut answer = clients.post(0, &stream("Jesus wept.", tokens));
    assert_eq!(answer.status, 200);
    let last = std::iter::from_fn(|| answer.event()).last().unwrap();
    assert_eq!(last["usage"]["completion_tokens"], tokens, "{last}");
}

#[test]
fn a_quiet_stream_waits_for_none_of_anothers_many() {
    let scene = Scene::new(2);
    thread::scope(|scope| {
        // Twice as many as run at the same time, and each hundreds of times as long as the quiet one's.
        let others = Others::begin(scope, &scene.clients, streams(3900));
        let _stopping = Stopping(Arc::clone(&others.stop));
        wait_until("as many run as there is room for", || {
            others.events.load(Ordering::Relaxed) > 1000
        });
        for _ in 0..3 {
            answer(&scene.clients, 8);
        }
        let ended = others.answered.load(Ordering::Relaxed);
        assert_eq!(ended, 0, "streams of the other client ended first");
    });
    assert_eq!(scene.server.terminate(), Some(0));
}

#[test]
fn streams_prompts_and_grammars_of_others_are_answered_beside_a_stream() {
    let scene = Scene::new(6);
    for requests in [prompts(), grammars(100)] {
        thread::scope(|scope| {
            let others = Others::begin(scope, &scene.clients, requests);
            let _stopping = Stopping(Arc::clone(&others.stop));
            // Whoever is starved here never ends.
            answer(&scene.clients, 200);
            wait_until("others are answered", || others.answered.load(Ordering::Relaxed) > 0);
        });
    }
    assert_eq!(scene.server.terminate(), Some(0));
}

/// Figures of a machine with nothing else to do: `just fairness`.
#[test]
fn a_quiet_stream_keeps_its_speed_whatever_others_ask_for() {
    // Only one of the cases, by its name, or all.
    let Ok(only) = std::env::var("SHARDPACK_FAIRNESS") else { return };
    let scene = Scene::new(6);
    watch(&scene.clients, Duration::from_millis(200));
    let cases: [(&str, &dyn Fn() -> Vec<Request>); 4] = [
        (STREAMS, &|| streams(400)),
        ("long prompts", &prompts),
        ("grammars", &|| grammars(1500)),
        (WITHOUT_GRAMMARS, &short),
    ];
    let mut failed = Vec::new();
    for (name, requests) in cases.into_iter().filter(|(name, _)| name.contains(&only)) {
        // The last is for comparison.
        if !keeps_its_part(&scene, name, requests()) && name != WITHOUT_GRAMMARS {
            failed.push(name);
        }
    }
    assert!(failed.is_empty(), "the quiet stream is held up by {failed:?}");
    assert_eq!(scene.server.terminate(), Some(0));
}
