//! Who gets in: pages of strangers, more connections than there are places, bodies of any size.

use std::{
    collections::BTreeSet,
    io::{ErrorKind, Read, Write},
    net::TcpStream,
    time::Duration,
};

use super::{
    STOP, Scripted, ServerLimits, kjv,
    scripted::{
        HANG, PATIENT, Reply, Step, read_until, start, start_changed, start_with, wait_until,
    },
};
use crate::{ApiKeys, KeyFile, KeyLimits, Scope, Server};
use shardpack_chat::ChatModel;

const CHAT: &str = "/v1/chat/completions";
const BODY: &str = r#"{"messages":[{"role":"user","content":"a"}],"max_tokens":5}"#;

/// A request of a client that says `host` and `head`.
fn asked(server: &Scripted, host: &str, head: &str, method: &str) -> Reply {
    let mut stream = TcpStream::connect(server.address).unwrap();
    let (path, body) = if method == "POST" { (CHAT, BODY) } else { ("/v1/models", "") };
    let size = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nhost: {host}\r\n{head}content-length: {size}\r\n\
         connection: close\r\n\r\n{body}"
    )
    .unwrap();
    Reply::read(stream)
}

fn changed(change: impl FnOnce(Server) -> Server) -> Scripted {
    let model = ChatModel::open(kjv()).unwrap();
    start_changed(vec![Step::Say("Jesus"), STOP], PATIENT, model, change)
}

#[test]
fn names_of_strangers_lead_nowhere_without_keys() {
    let server = changed(|server| server.with_hosts(vec!["llm.example.org".to_owned()]));
    let known = [
        "localhost:8080",
        "127.0.0.1:8080",
        "[::1]:8080",
        "192.168.1.11",
        "studio",
        "Studio.local",
        "host.docker.internal:8080",
        "llm.example.org",
        "LLM.example.org.:80",
    ];
    for host in known {
        assert_eq!(asked(&server, host, "", "POST").status, 200, "{host}");
        assert_eq!(asked(&server, host, "", "GET").status, 200, "{host}");
    }
    for host in ["evil.example", "127.0.0.1.evil.example", "llm.example.org.evil.example:8080"] {
        for method in ["GET", "POST"] {
            let reply = asked(&server, host, "", method);
            assert_eq!(reply.status, 403, "{method} {host}: {}", reply.body);
            assert!(reply.body.contains("host_not_allowed"), "{}", reply.body);
            assert!(reply.body.contains("--allow-host"), "{}", reply.body);
        }
    }
}

#[test]
fn a_host_that_can_be_read_in_two_ways_is_refused() {
    let server = changed(|server| server);
    for host in
        ["a/b", "x#", "a b", "evil%2ecom", "", "u@localhost", "localhost\r\nhost: evil.example"]
    {
        for method in ["GET", "POST"] {
            let reply = asked(&server, host, "", method);
            assert_eq!(reply.status, 400, "{method} {host:?}: {}", reply.body);
        }
    }
}

#[test]
fn pages_of_strangers_cannot_have_anything_computed() {
    let server = changed(|server| server.with_origins(vec!["https://chat.example.org".to_owned()]));
    let host = "127.0.0.1:8080";
    let json = "content-type: application/json\r\n";
    for origin in [
        "http://127.0.0.1:8080",
        "http://localhost:3000",
        "http://[::1]:5173",
        "https://chat.example.org",
        "vscode-webview://abc",
        "file://",
    ] {
        let head = format!("origin: {origin}\r\n{json}");
        let reply = asked(&server, host, &head, "POST");
        let told = reply.header("access-control-allow-origin");
        // CORS headers allow the page to ask and to read the answer.
        assert_eq!((reply.status, told), (200, Some(origin)), "{origin}");
        let wanted = "access-control-request-headers: authorization, content-type\r\n";
        let reply = asked(&server, host, &format!("{head}{wanted}"), "OPTIONS");
        let told = ["origin", "headers"]
            .map(|what| reply.header(&format!("access-control-allow-{what}")).map(str::to_owned));
        assert_eq!(reply.status, 204, "{origin}");
        assert_eq!(told, [origin, "authorization, content-type"].map(|it| Some(it.to_owned())));
    }
    for origin in ["https://evil.example", "null", "http://127.0.0.1.evil.example", "x"] {
        let head = format!("origin: {origin}\r\n{json}");
        let reply = asked(&server, host, &head, "POST");
        assert_eq!(reply.status, 403, "{origin}: {}", reply.body);
        assert!(reply.body.contains("origin_not_allowed"), "{}", reply.body);
        // It is answered, and no page can read it.
        let read = asked(&server, host, &head, "GET");
        assert_eq!((read.status, read.header("access-control-allow-origin")), (200, None));
    }
    let reply = asked(&server, host, "sec-fetch-site: cross-site\r\n", "POST");
    assert_eq!(reply.status, 403, "{}", reply.body);
    // A form of our own page is none of its requests.
    for kind in ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; a=b"] {
        let head = format!("origin: http://{host}\r\ncontent-type: {kind}\r\n");
        let reply = asked(&server, host, &head, "POST");
        assert_eq!(reply.status, 400, "{kind}: {}", reply.body);
        // `curl -d` sends one of these.
        let head = format!("content-type: {kind}\r\n");
        assert_eq!(asked(&server, host, &head, "POST").status, 200, "{kind}");
    }
}

#[test]
fn keys_are_enough_for_any_name_and_page() {
    let mut file = KeyFile::default();
    let key = file.add("me", BTreeSet::from([Scope::Infer]), KeyLimits::default()).unwrap();
    let server = changed(|server| server.with_keys(ApiKeys::new(file).unwrap()));
    let head = format!("origin: https://a.example\r\nauthorization: Bearer {key}\r\n");
    assert_eq!(asked(&server, "llm.example.org", &head, "POST").status, 200);
    assert_eq!(asked(&server, "llm.example.org", "", "POST").status, 401);
}

/// Whether the other side has closed a connection that does not block.
fn is_closed(stream: &mut TcpStream) -> bool {
    match stream.read(&mut [0; 16]) {
        Ok(0) => true,
        Ok(_) => panic!("nobody asked anything"),
        Err(error) => error.kind() == ErrorKind::ConnectionReset,
    }
}

#[test]
fn silent_and_trickling_connections_cost_an_honest_caller_nothing() {
    let limits = ServerLimits { connections: 32, ..PATIENT };
    let model = ChatModel::open(kjv()).unwrap();
    let script = vec![Step::Say("Jesus"), Step::Gate, Step::Say(" wept."), STOP];
    let server = start_with(script, limits, model);
    // Its request is under way when others come.
    let stream = server.send_chat(r#""stream":true"#);
    server.submitted();
    let mut others: Vec<TcpStream> = Vec::new();
    for number in 0..300 {
        let mut other = TcpStream::connect(server.address).unwrap();
        match number % 3 {
            0 => {
                let _ = other.write_all(b"POST /v1/chat/completions HTTP/1.1\r\nhost: loc");
            }
            // A body that does not come.
            1 => {
                let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n";
                let _ = write!(other, "{head}content-length: 4000\r\n\r\n{{");
            }
            _ => {}
        }
        others.push(other);
        // No deadline of theirs passes, so whoever is answered has the place of one that gave way.
        if number % 50 == 0 {
            assert_eq!(server.get("/health").status, 200);
        }
    }
    for other in &others {
        other.set_nonblocking(true).unwrap();
    }
    // The last ones may not have been accepted yet.
    wait_until("all but 32 of them gave way", || {
        others.iter_mut().map(is_closed).filter(|is_closed| !is_closed).count() <= 32
    });
    // What was under way goes on.
    server.gate.send(()).unwrap();
    let reply = Reply::read(stream);
    assert!(reply.events().contains(&"[DONE]"), "{}", reply.body);
}

#[test]
fn a_head_that_does_not_end_has_a_deadline() {
    let limits = ServerLimits { head_timeout: Duration::from_millis(200), ..PATIENT };
    let server = start_with(vec![STOP], limits, ChatModel::open(kjv()).unwrap());
    let mut trickling = TcpStream::connect(server.address).unwrap();
    trickling.write_all(b"GET /health HTTP/1.1\r\n").unwrap();
    let mut silent = TcpStream::connect(server.address).unwrap();
    // No other deadline passes.
    for stream in [&mut trickling, &mut silent] {
        stream.set_read_timeout(Some(HANG)).unwrap();
        match stream.read_to_end(&mut Vec::new()) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}"),
        }
    }
}

#[test]
fn a_body_that_says_that_it_is_too_large_is_refused_before_it_comes() {
    let server = start(vec![STOP]);
    let mut stream = TcpStream::connect(server.address).unwrap();
    stream.set_read_timeout(Some(HANG)).unwrap();
    write!(stream, "POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000000\r\n\r\n")
        .unwrap();
    stream.write_all(b"{\"prompt\": \"").unwrap();
    // The rest never comes, and no deadline passes.
    let reply = Reply::read(stream);
    assert_eq!(reply.status, 413, "{}", reply.body);
}

/// Sixteen requests with twice as many bytes as there is memory for, of which the first one comes. They are told
/// when they are read from.
fn send_large(server: &Scripted) -> Vec<TcpStream> {
    let head = format!(
        "host: localhost\r\nexpect: 100-continue\r\ncontent-length: {}",
        PATIENT.body_bytes
    );
    let send = |_| {
        let mut stream = TcpStream::connect(server.address).unwrap();
        write!(stream, "POST {CHAT} HTTP/1.1\r\n{head}\r\n\r\n{{").unwrap();
        stream.set_read_timeout(Some(HANG)).unwrap();
        stream
    };
    (0..16).map(send).collect()
}

#[test]
fn large_bodies_wait_for_one_another_and_small_ones_for_none() {
    let server = start(vec![Step::Say("a"), STOP]);
    let mut large = send_large(&server);
    let is_read_from = |stream: &TcpStream| {
        stream.set_nonblocking(true).unwrap();
        let said = stream.peek(&mut [0]);
        stream.set_nonblocking(false).unwrap();
        said.is_ok()
    };
    // Half of them hold all memory.
    wait_until("as many are read from as there is memory for", || {
        large.iter().filter(|stream| is_read_from(stream)).count() >= 8
    });
    assert_eq!(server.chat(r#""max_tokens":5"#).status, 200);
    // The others have their turn when these leave.
    large.retain(|stream| !is_read_from(stream));
    for stream in &mut large {
        read_until(stream, "HTTP/1.1 100 Continue", &mut String::new());
    }
}

#[test]
fn large_bodies_wait_no_longer_than_for_their_deadline() {
    let limits = ServerLimits { body_timeout: Duration::from_millis(100), ..PATIENT };
    let server = start_with(vec![STOP], limits, ChatModel::open(kjv()).unwrap());
    for stream in &mut send_large(&server) {
        // Whether it was read from or waited.
        let mut text = String::new();
        read_until(stream, "content-length", &mut text);
        let code = text.trim_start_matches("HTTP/1.1 100 Continue\r\n\r\n");
        assert!(["HTTP/1.1 408", "HTTP/1.1 503"].iter().any(|it| code.starts_with(it)), "{text}");
    }
}
