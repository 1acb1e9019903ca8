//! A hub on this machine: one small model, the API, files behind a redirect to a second host, and
//! faults.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};

use serde_json::{Value, json};
use sha1::{Digest as _, Sha1};
use sha2::Sha256;
use shardpack_formats::hex;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// What goes wrong with one file.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fault {
    /// The body ends too early, so many times; something arrives each time but the last.
    Truncate { times: u32 },
    /// The connection is reset in the middle of the body.
    Reset { times: u32 },
    /// The body stops in its middle, and the connection stays.
    Stall { times: u32 },
    /// The right size, another byte.
    WrongBytes { times: u32 },
    /// An error.
    Status { status: u16, times: u32, retry_after: Option<u64> },
    /// The whole file whatever was asked for.
    IgnoreRange,
    /// Another range than was asked for.
    WrongRange,
    /// To the second host, over a relative redirect.
    Redirect,
    /// To another machine in the clear.
    InsecureRedirect,
}

struct Shared {
    files: BTreeMap<String, Vec<u8>>,
    faults: Mutex<BTreeMap<String, (Fault, u32)>>,
    sent: AtomicU64,
    tokens: [AtomicU64; 2],
    stopped: AtomicBool,
    /// Whether who asks has accepted the terms of the gated model.
    let_in: AtomicBool,
    store: String,
}

/// The server; its threads end with the process.
pub(super) struct Server {
    shared: Arc<Shared>,
    address: String,
}

impl Server {
    pub(super) fn start() -> Self {
        let hub = TcpListener::bind("127.0.0.1:0").unwrap();
        // Another port is another host, as far as tokens are concerned.
        let store = TcpListener::bind("127.0.0.1:0").unwrap();
        let text = |text: &str| text.as_bytes().to_vec();
        let weights = |seed: u32, size: u32| -> Vec<u8> {
            (0..size)
                .map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 13) as u8)
                .collect()
        };
        let index =
            json!({ "weight_map": { "a": "model-1.safetensors", "b": "model-2.safetensors" } });
        let files = BTreeMap::from([
            ("README.md".to_owned(), text("# a model")),
            ("config.json".to_owned(), text(r#"{"model_type":"llama"}"#)),
            ("consolidated.safetensors".to_owned(), weights(3, 500)),
            ("figures/loss.png".to_owned(), weights(4, 500)),
            ("model-1.safetensors".to_owned(), weights(1, 300_000)),
            ("model-2.safetensors".to_owned(), weights(2, 9_000_000)),
            ("model.safetensors.index.json".to_owned(), text(&index.to_string())),
            ("original/model.safetensors".to_owned(), weights(5, 500)),
            ("tokenizer.json".to_owned(), text("{}")),
        ]);
        let shared = Arc::new(Shared {
            files,
            faults: Mutex::default(),
            sent: AtomicU64::new(0),
            tokens: [AtomicU64::new(0), AtomicU64::new(0)],
            stopped: AtomicBool::new(false),
            let_in: AtomicBool::new(false),
            store: format!("http://{}", store.local_addr().unwrap()),
        });
        let address = format!("http://{}", hub.local_addr().unwrap());
        for (listener, is_store) in [(hub, false), (store, true)] {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                for stream in listener.incoming() {
                    let shared = Arc::clone(&shared);
                    thread::spawn(move || serve(&shared, stream.unwrap(), is_store));
                }
            });
        }
        Self { shared, address }
    }

    pub(super) fn address(&self) -> String {
        self.address.clone()
    }

    pub(super) fn commit(&self) -> &'static str {
        assert!(!self.shared.files.is_empty());
        COMMIT
    }

    pub(super) fn fault(&self, file: &str, fault: Fault) {
        self.shared.faults.lock().unwrap().insert(file.to_owned(), (fault, 0));
    }

    pub(super) fn heal(&self) {
        self.shared.faults.lock().unwrap().clear();
    }

    /// Opens the gated model.
    pub(super) fn let_in(&self) {
        self.shared.let_in.store(true, Ordering::Relaxed);
    }

    pub(super) fn stop(&self) {
        self.shared.stopped.store(true, Ordering::Relaxed);
    }

    pub(super) fn bytes_sent(&self) -> u64 {
        self.shared.sent.load(Ordering::Relaxed)
    }

    /// Requests with a token that the hub and the second host have seen.
    pub(super) fn tokens_seen(&self) -> (u64, u64) {
        let [own, other] = &self.shared.tokens;
        (own.load(Ordering::Relaxed), other.load(Ordering::Relaxed))
    }

    pub(super) fn content(&self, name: &str) -> Vec<u8> {
        self.shared.files[name].clone()
    }

    pub(super) fn size(&self, name: &str) -> u64 {
        self.shared.files[name].len() as u64
    }

    /// The files that a conversion needs.
    pub(super) fn needed(&self) -> Vec<(String, Vec<u8>)> {
        let needed = |name: &&String| {
            !name.contains('/')
                && !name.starts_with("consolidated")
                && name.rsplit('.').next() != Some("md")
        };
        let names = self.shared.files.keys().filter(needed);
        names.map(|name| (name.clone(), self.content(name))).collect()
    }
}

struct Request {
    path: String,
    range: Option<(usize, usize)>,
    token: bool,
    /// Only the head of the answer is wanted.
    is_head: bool,
}

fn read_request(stream: &TcpStream) -> Option<Request> {
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next()?.ok()?;
    let path = first.split(' ').nth(1)?.to_owned();
    let is_head = first.starts_with("HEAD ");
    let mut request = Request { path, range: None, token: false, is_head };
    for line in lines {
        let line = line.ok()?;
        if line.is_empty() {
            return Some(request);
        }
        let lower = line.to_ascii_lowercase();
        if let Some(range) = lower.strip_prefix("range: bytes=") {
            let (first, last) = range.split_once('-')?;
            request.range = Some((first.parse().ok()?, last.parse().ok()?));
        }
        request.token |= lower == "authorization: bearer secret";
    }
    None
}

/// One request per connection.
fn serve(shared: &Shared, stream: TcpStream, is_store: bool) {
    if shared.stopped.load(Ordering::Relaxed) {
        return;
    }
    let Some(request) = read_request(&stream) else { return };
    if request.token {
        shared.tokens[usize::from(is_store)].fetch_add(1, Ordering::Relaxed);
    }
    let mut reply = Reply { shared, stream, is_head: request.is_head };
    let path = request.path.split('?').next().unwrap_or_default();
    let query = request.path.split('?').nth(1).unwrap_or_default();
    match path.strip_prefix("/api/models/") {
        Some(api) => reply.api(api, query),
        None => match path.split("/resolve/").collect::<Vec<_>>()[..] {
            ["/org/model" | "/org/gated" | "/store", rest] => {
                let file = rest.split_once('/').map_or("", |(_, file)| file);
                reply.file(file, &request, is_store);
            }
            _ => reply.send("404 Not Found", &[], b""),
        },
    }
}

struct Reply<'a> {
    shared: &'a Shared,
    stream: TcpStream,
    is_head: bool,
}

impl Reply<'_> {
    fn head(&mut self, status: &str, headers: &[(&str, String)]) {
        let mut text = format!("HTTP/1.1 {status}\r\nConnection: close\r\n");
        for (name, value) in headers {
            text.extend([*name, ": ", value.as_str(), "\r\n"]);
        }
        text += "\r\n";
        // A client that has gone away is none of our concern.
        let _ = self.stream.write_all(text.as_bytes());
    }

    fn send(&mut self, status: &str, headers: &[(&str, String)], body: &[u8]) {
        let length = ("Content-Length", body.len().to_string());
        self.head(status, &[headers, &[length]].concat());
        self.body(body);
    }

    fn body(&mut self, body: &[u8]) {
        if self.is_head {
            return;
        }
        self.shared.sent.fetch_add(body.len() as u64, Ordering::Relaxed);
        let _ = self.stream.write_all(body);
    }

    fn json(&mut self, headers: &[(&str, String)], value: &Value) {
        self.send("200 OK", headers, value.to_string().as_bytes());
    }

    fn api(&mut self, path: &str, query: &str) {
        let code = |code: &str| [("X-Error-Code", code.to_owned())];
        let entries = |names: &[&str]| -> Value {
            names.iter().map(|name| self.entry(name)).collect::<Vec<_>>().into()
        };
        match path {
            "org/gated/revision/main" if !self.shared.let_in.load(Ordering::Relaxed) => {
                self.send("403 Forbidden", &code("GatedRepo"), b"");
            }
            "org/missing/revision/main" => {
                self.send("401 Unauthorized", &code("RepoNotFound"), b"");
            }
            "org/model/revision/nowhere" => {
                self.send("404 Not Found", &code("RevisionNotFound"), b"");
            }
            "org/model/revision/main"
            | "org/model/revision/release%2F1"
            | "org/gated/revision/main"
            | "org/empty/revision/main"
            | "org/pickles/revision/main" => self.json(&[], &json!({ "id": "x", "sha": COMMIT })),
            "org/empty/tree/0123456789abcdef0123456789abcdef01234567" => {
                let list = entries(&["README.md"]);
                self.json(&[], &list);
            }
            "org/pickles/tree/0123456789abcdef0123456789abcdef01234567" => {
                let mut list = entries(&["config.json", "tokenizer.json"]);
                list[1]["path"] = "pytorch_model.bin".into();
                self.json(&[], &list);
            }
            "org/model/tree/0123456789abcdef0123456789abcdef01234567"
            | "org/gated/tree/0123456789abcdef0123456789abcdef01234567" => {
                let names: Vec<&str> = self.shared.files.keys().map(String::as_str).collect();
                let (first, second) = names.split_at(4);
                if query.contains("cursor") {
                    let list = entries(second);
                    self.json(&[], &list);
                } else {
                    let list = entries(first);
                    let host = self.stream.local_addr().unwrap();
                    let next = format!(
                        "<http://{host}/api/models/{path}?recursive=true&cursor=2>; rel=\"next\""
                    );
                    self.json(&[("Link", next)], &list);
                }
            }
            _ => self.send("404 Not Found", &code("RepoNotFound"), b""),
        }
    }

    fn entry(&self, name: &str) -> Value {
        let bytes = &self.shared.files[name];
        let mut entry = json!({ "type": "file", "path": name, "size": bytes.len() });
        if matches!(name.rsplit('.').next(), Some("safetensors" | "png")) {
            let sha256: [u8; 32] = Sha256::digest(bytes).into();
            entry["oid"] = "00112233445566778899aabbccddeeff00112233".into();
            entry["lfs"] =
                json!({ "oid": hex::encode(&sha256), "size": bytes.len(), "pointerSize": 134 });
        } else {
            let mut sha1 = Sha1::new_with_prefix(format!("blob {}\0", bytes.len()));
            sha1.update(bytes);
            let oid: [u8; 20] = sha1.finalize().into();
            entry["oid"] = hex::encode(&oid).into();
        }
        entry
    }

    /// The fault of a file, if it is to happen now.
    fn fault(&self, file: &str) -> Option<(Fault, u32)> {
        let mut faults = self.shared.faults.lock().unwrap();
        let (fault, count) = faults.get_mut(file)?;
        let is_of_body =
            !matches!(fault, Fault::Status { .. } | Fault::Redirect | Fault::InsecureRedirect);
        if self.is_head && is_of_body {
            return None;
        }
        *count += 1;
        let times = match fault {
            Fault::Truncate { times }
            | Fault::Reset { times }
            | Fault::Stall { times }
            | Fault::WrongBytes { times }
            | Fault::Status { times, .. } => *times,
            _ => u32::MAX,
        };
        (*count <= times).then_some((*fault, *count))
    }

    fn file(&mut self, name: &str, request: &Request, is_store: bool) {
        let shared = self.shared;
        let Some(content) = shared.files.get(name) else {
            return self.send(
                "404 Not Found",
                &[("X-Error-Code", "EntryNotFound".to_owned())],
                b"",
            );
        };
        let (first, last) = request.range.unwrap_or((0, content.len() - 1));
        let last = last.min(content.len() - 1);
        let mut body = content[first..=last].to_vec();
        let mut range = format!("bytes {first}-{last}/{}", content.len());
        let redirect = |to: String| [("Location", to)];
        match self.fault(name) {
            None => {}
            // Stores redirect within themselves, too.
            Some((Fault::Redirect, _)) if is_store && !request.path.contains("hop=2") => {
                return self.send("302 Found", &redirect(format!("{}&hop=2", request.path)), b"");
            }
            Some((Fault::Redirect, _)) if is_store => {}
            Some((Fault::Redirect, count)) => {
                // First a relative one, as for another spelling of the name, then to the store.
                let path = &request.path;
                let to = if count % 2 == 1 {
                    path.clone()
                } else {
                    format!("{}/store/resolve/x/{name}?signature=1", shared.store)
                };
                return self.send("302 Found", &redirect(to), b"");
            }
            Some((Fault::InsecureRedirect, _)) => {
                let to = "http://192.0.2.1/file".to_owned();
                return self.send("302 Found", &redirect(to), b"");
            }
            Some((Fault::Status { status, retry_after, .. }, _)) => {
                let after = retry_after.map(|seconds| ("Retry-After", seconds.to_string()));
                let after: Vec<_> = after.into_iter().collect();
                return self.send(&format!("{status} Later"), &after, b"an error page");
            }
            Some((Fault::IgnoreRange, _)) => return self.send("200 OK", &[], content),
            Some((Fault::WrongRange, _)) => {
                range = format!("bytes 0-9/{}", content.len());
                body = content[..10].to_vec();
            }
            Some((Fault::WrongBytes { .. }, _)) => body[0] ^= 0x40,
            Some((Fault::Stall { .. }, _)) => {
                let length = ("Content-Length", body.len().to_string());
                self.head("206 Partial Content", &[("Content-Range", range), length]);
                self.body(&body[..body.len() / 3]);
                // Until the client hangs up.
                let _ = self.stream.read(&mut [0]);
                return;
            }
            Some((Fault::Truncate { .. } | Fault::Reset { .. }, count)) => {
                let length = ("Content-Length", body.len().to_string());
                self.head("206 Partial Content", &[("Content-Range", range), length]);
                // Every other time nothing arrives at all.
                let kept = if count == 1 { body.len() / 3 } else { 0 };
                self.body(&body[..kept]);
                let _ = self.stream.shutdown(Shutdown::Both);
                return;
            }
        }
        if request.range.is_none() {
            return self.send("200 OK", &[], &body);
        }
        self.send("206 Partial Content", &[("Content-Range", range)], &body);
    }
}
