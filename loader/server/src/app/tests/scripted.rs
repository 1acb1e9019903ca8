//! A server on a real socket over an engine that plays a script.

use std::{
    collections::VecDeque,
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    ops::{Deref, DerefMut},
    path::Path,
    sync::mpsc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use serde_json::Value;
use shardpack_chat::prompt::TextMarks;
use shardpack_engine_api::{
    Command, EngineState, Event, FinishReason, GenerateRequest, RequestId, TokenId, TokenLogprobs,
    Usage,
};
use tokio::sync::oneshot;

use super::super::*;

/// Only a test that hangs waits that long.
pub(super) const HANG: Duration = Duration::from_mins(10);

/// No deadline ends anything, so that what a test sees has the cause that the test names.
pub(super) const PATIENT: ServerLimits = ServerLimits {
    body_bytes: 8 << 20,
    connections: 8192,
    head_timeout: NEVER,
    active_requests: 256,
    body_timeout: NEVER,
    event_timeout: NEVER,
    request_timeout: NEVER,
    keep_alive: NEVER,
    write_timeout: NEVER,
    drain_timeout: NEVER,
};

/// Longer than any test.
pub(super) const NEVER: Duration = Duration::from_hours(1000);

/// What the engine does with a request, in order.
#[derive(Clone, Debug)]
pub(super) enum Step {
    /// Tokens of a text.
    Say(&'static str),
    /// These tokens.
    Tokens(Vec<u32>),
    /// Log probabilities of the prompt from its second token on, each with one alternative.
    Score(Vec<f32>),
    /// An embedding.
    Embed(Vec<f32>),
    /// Nothing, until the test opens the gate.
    Gate,
    /// Nothing, until the request is cancelled.
    AwaitCancel,
    /// The end.
    Finish(FinishReason),
    /// A failure, and whether it may pass.
    Fail(&'static str, bool),
}

/// What the engine saw.
#[derive(Debug, PartialEq)]
pub(super) enum Seen {
    Submitted(Box<GenerateRequest>),
    Cancelled,
}

pub(super) struct Scripted {
    pub(super) engine: EngineHandle,
    pub(super) seen: mpsc::Receiver<Seen>,
    pub(super) gate: mpsc::Sender<()>,
    serving: Serving,
}

/// A server on a socket of its own; it stops when this is dropped.
pub(super) struct Serving {
    pub(super) address: SocketAddr,
    pub(super) stop: Option<oneshot::Sender<()>>,
    server: Option<JoinHandle<()>>,
}

impl Serving {
    pub(super) fn start(server: Server) -> Self {
        Self::start_at(TcpListener::bind("127.0.0.1:0").unwrap(), server)
    }

    pub(super) fn start_at(listener: TcpListener, server: Server) -> Self {
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel();
        let server = thread::spawn(move || {
            let stopped = async {
                let _ = stopped.await;
            };
            crate::serve::run_until(listener, server, stopped).unwrap();
        });
        Self { address, stop: Some(stop), server: Some(server) }
    }
}

impl Deref for Scripted {
    type Target = Serving;

    fn deref(&self) -> &Serving {
        &self.serving
    }
}

impl DerefMut for Scripted {
    fn deref_mut(&mut self) -> &mut Serving {
        &mut self.serving
    }
}

pub(super) fn kjv() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/kjv-4m"))
}

/// A server over an engine that plays the same steps for every request.
pub(super) fn start(script: Vec<Step>) -> Scripted {
    start_with(script, PATIENT, ChatModel::open(kjv()).unwrap())
}

pub(super) fn start_with(script: Vec<Step>, limits: ServerLimits, model: ChatModel) -> Scripted {
    start_changed(script, limits, model, |server| server)
}

pub(super) fn start_changed(
    script: Vec<Step>,
    limits: ServerLimits,
    model: ChatModel,
    change: impl FnOnce(Server) -> Server,
) -> Scripted {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    start_at(listener, script, limits, model, change)
}

/// The same at a socket that a client may have reached before.
pub(super) fn start_at(
    listener: TcpListener,
    script: Vec<Step>,
    limits: ServerLimits,
    model: ChatModel,
    change: impl FnOnce(Server) -> Server,
) -> Scripted {
    let (engine, commands) = EngineHandle::new(2);
    engine.update_status(|status| status.state = EngineState::Ready);
    let (seen_sender, seen) = mpsc::channel();
    let (gate, gate_receiver) = mpsc::channel();
    let prompts = Arc::clone(model.prompts());
    thread::spawn(move || {
        let mut waiting = VecDeque::new();
        while let Some(command) = waiting.pop_front().or_else(|| commands.recv().ok()) {
            let Command::Submit { id, request, events } = command else { continue };
            let usage = Usage::default();
            let wanted = request.logprobs;
            let _ = seen_sender.send(Seen::Submitted(request));
            for step in script.clone() {
                let tokens = match step {
                    Step::Say(text) => prompts.encode(text, TextMarks::None).unwrap(),
                    Step::Tokens(ids) => ids.into_iter().map(TokenId).collect(),
                    Step::Score(found) => {
                        let top = vec![(TokenId(5), -0.125)];
                        let found = found.into_iter();
                        let found =
                            found.map(|logprob| TokenLogprobs { logprob, top: top.clone() });
                        let logprobs = found.collect();
                        events(Event::PromptLogprobs { request: id, first: 1, logprobs });
                        continue;
                    }
                    Step::Embed(values) => {
                        events(Event::Embedding { request: id, values });
                        continue;
                    }
                    Step::Gate => {
                        let _ = gate_receiver.recv();
                        continue;
                    }
                    Step::AwaitCancel => {
                        await_cancel(id, &commands, &mut waiting);
                        let _ = seen_sender.send(Seen::Cancelled);
                        continue;
                    }
                    Step::Finish(reason) => {
                        events(Event::Finished { request: id, reason, usage });
                        continue;
                    }
                    Step::Fail(message, retryable) => {
                        let message = message.to_owned();
                        events(Event::Failed { request: id, message, retryable });
                        continue;
                    }
                };
                for token in tokens {
                    let logprobs = wanted.map(|top| TokenLogprobs {
                        logprob: -0.5,
                        top: vec![(token, -0.5); top as usize],
                    });
                    events(Event::Token { request: id, token, logprobs });
                }
            }
        }
    });
    let names = vec!["kjv-4m".to_owned(), "org/alias".to_owned()];
    let server = change(Server::new(model, engine.clone(), names, limits));
    Scripted { engine, seen, gate, serving: Serving::start_at(listener, server) }
}

fn await_cancel(
    id: RequestId,
    commands: &mpsc::Receiver<Command>,
    waiting: &mut VecDeque<Command>,
) {
    loop {
        match commands.recv() {
            Ok(Command::Cancel(cancelled)) if cancelled == id => return,
            Ok(command) => waiting.push_back(command),
            Err(_) => return,
        }
    }
}

/// Sends a request with further header lines, and leaves the connection open.
pub(super) fn send(
    address: SocketAddr,
    head: &str,
    method: &str,
    path: &str,
    body: &str,
) -> TcpStream {
    let mut connection = TcpStream::connect(address).unwrap();
    connection.set_read_timeout(Some(HANG)).unwrap();
    let length = body.len();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\
         content-type: application/json\r\n{head}content-length: {length}\r\n\r\n{body}"
    );
    connection.write_all(request.as_bytes()).unwrap();
    connection
}

impl Scripted {
    pub(super) fn seen(&self) -> Seen {
        self.seen.recv_timeout(HANG).expect("the engine sees something soon")
    }

    pub(super) fn submitted(&self) -> GenerateRequest {
        match self.seen() {
            Seen::Submitted(request) => *request,
            Seen::Cancelled => panic!("expected a submission"),
        }
    }
}

impl Serving {
    /// Sends a request and leaves the connection open, nothing read.
    pub(super) fn send(&self, method: &str, path: &str, body: &str) -> TcpStream {
        self.send_with("", method, path, body)
    }

    /// The same with further header lines.
    pub(super) fn send_with(&self, head: &str, method: &str, path: &str, body: &str) -> TcpStream {
        send(self.address, head, method, path, body)
    }

    pub(super) fn post(&self, path: &str, body: &Value) -> Reply {
        Reply::read(self.send("POST", path, &body.to_string()))
    }

    pub(super) fn get(&self, path: &str) -> Reply {
        Reply::read(self.send("GET", path, ""))
    }

    pub(super) fn chat(&self, members: &str) -> Reply {
        Reply::read(self.send_chat(members))
    }

    /// A request of one message, with further members of the body.
    pub(super) fn send_chat(&self, members: &str) -> TcpStream {
        let messages = r#""messages":[{"role":"user","content":"John 11:35"}]"#;
        let comma = if members.is_empty() { "" } else { "," };
        self.send("POST", "/v1/chat/completions", &format!("{{{messages}{comma}{members}}}"))
    }

    /// Asks the server to stop and waits until it has.
    pub(super) fn stop(&mut self) {
        self.stop.take().map(|stop| stop.send(()));
        self.join();
    }

    pub(super) fn join(&mut self) {
        if let Some(server) = self.server.take() {
            server.join().unwrap();
        }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.stop.take().map(|stop| stop.send(()));
    }
}

/// Waits for what nothing announces.
pub(super) fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < HANG, "never: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Reads until what has come contains `words`, and appends it to `text`.
pub(super) fn read_until(connection: &mut TcpStream, words: &str, text: &mut String) {
    let mut piece = [0; 512];
    while !text.contains(words) {
        let count = connection.read(&mut piece).unwrap();
        assert!(count > 0, "{words:?} never came: {text}");
        text.push_str(std::str::from_utf8(&piece[..count]).unwrap());
    }
}

/// A response as it came.
pub(super) struct Reply {
    pub(super) status: u16,
    head: String,
    pub(super) body: String,
}

impl Reply {
    pub(super) fn read(mut connection: TcpStream) -> Self {
        let mut bytes = Vec::new();
        connection.read_to_end(&mut bytes).unwrap();
        Self::parse(std::str::from_utf8(&bytes).unwrap())
    }

    /// A response of which all has come.
    pub(super) fn parse(text: &str) -> Self {
        let (head, body) = text.split_once("\r\n\r\n").expect("a response has a head");
        let head = head.to_ascii_lowercase();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let chunked = head.contains("transfer-encoding: chunked");
        let body = if chunked { unchunk(body) } else { body.to_owned() };
        Self { status, head, body }
    }

    pub(super) fn header(&self, name: &str) -> Option<&str> {
        let prefix = format!("{name}: ");
        self.head.lines().find_map(|line| line.strip_prefix(&prefix))
    }

    pub(super) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    /// The status and the error's code, param and message.
    pub(super) fn error(&self) -> (u16, String) {
        let error = &self.json()["error"];
        (self.status, format!("{} {} {}", error["code"], error["param"], error["message"]))
    }

    /// Payloads of the events, checked for form.
    pub(super) fn events(&self) -> Vec<&str> {
        assert_eq!(self.header("content-type"), Some("text/event-stream"));
        assert_eq!(self.header("cache-control"), Some("no-cache"));
        let frames = self.body.strip_suffix("\n\n").expect("frames end with an empty line");
        let frames = frames.split("\n\n").filter(|frame| !frame.starts_with(':'));
        frames.map(|frame| frame.strip_prefix("data: ").expect(frame)).collect()
    }
}

/// Events of a stream that names them: name and payload.
pub(super) fn named_events(reply: &Reply) -> Vec<(String, Value)> {
    let frames = reply.body.strip_suffix("\n\n").expect("frames end with an empty line");
    let parse = |frame: &str| {
        let (name, data) = frame.split_once('\n').expect("a frame has two lines");
        let name = name.strip_prefix("event: ").expect("a frame has a name").to_owned();
        let data = data.strip_prefix("data: ").expect("a frame has data");
        (name, serde_json::from_str(data).unwrap())
    };
    frames.split("\n\n").map(parse).collect()
}

fn unchunk(mut body: &str) -> String {
    let mut text = String::new();
    while let Some((length, rest)) = body.split_once("\r\n") {
        let length = usize::from_str_radix(length, 16).unwrap();
        text.push_str(&rest[..length]);
        body = &rest[length + 2..];
    }
    text
}
