//! A hub on this machine.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    process::{Command, Output},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use base64ct::{Base64, Encoding as _};
use serde_json::{Value, json};
use sha1::Sha1;
use sha2::{Digest as _, Sha256};
use shardpack_formats::hex;

use crate::harness::{files, shardpack, text};

pub(crate) const COMMIT: &str = "89abcdef0123456789abcdef0123456789abcdef";

/// A hub with one model, `org/model`.
pub(crate) struct Hub {
    address: String,
    repository: Arc<Mutex<Repository>>,
    pub(crate) weight_bytes: Arc<AtomicU64>,
    weight_requests: Arc<AtomicU64>,
}

/// What the repository holds, and the only commit that it has.
struct Repository {
    commit: String,
    files: BTreeMap<String, Vec<u8>>,
    /// Parts of large files that were sent to the store, by the file's SHA-256.
    store: BTreeMap<String, BTreeMap<u64, Vec<u8>>>,
}

/// Bytes of a part of the larger files of the store; smaller ones are sent whole.
const PART_BYTES: usize = 1_000_000;

impl Hub {
    pub(crate) fn start(model: &Path) -> Self {
        Self::of(files(model))
    }

    pub(crate) fn of(files: BTreeMap<String, Vec<u8>>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let repository = Repository { commit: COMMIT.to_owned(), files, store: BTreeMap::new() };
        let repository = Arc::new(Mutex::new(repository));
        let served = Arc::clone(&repository);
        let weight_bytes = Arc::new(AtomicU64::new(0));
        let weight_requests = Arc::new(AtomicU64::new(0));
        let counts = [Arc::clone(&weight_bytes), Arc::clone(&weight_requests)];
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (repository, counts) = (Arc::clone(&served), counts.clone());
                thread::spawn(move || serve(stream.unwrap(), &repository, &counts));
            }
        });
        Self { address, repository, weight_bytes, weight_requests }
    }

    /// The repository has another commit, with these files.
    pub(crate) fn publish(&self, model: &Path, commit: &str) {
        let repository =
            Repository { commit: commit.to_owned(), files: files(model), store: BTreeMap::new() };
        *self.repository.lock().unwrap() = repository;
    }

    pub(crate) fn command(&self, folder: &Path, args: &[&str]) -> Command {
        let mut command = shardpack();
        command.args(args).env("HF_ENDPOINT", &self.address).env("HF_HOME", folder.join("home"));
        for name in ["HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE"] {
            command.env_remove(name);
        }
        command
    }

    pub(crate) fn run(&self, folder: &Path, args: &[&str]) -> Output {
        let output = self.command(folder, args).output().unwrap();
        assert!(output.status.success(), "{args:?}\n{}", text(&output.stderr));
        output
    }

    /// Requests for weights since this was last asked.
    pub(crate) fn requests(&self) -> u64 {
        self.weight_requests.swap(0, Ordering::Relaxed)
    }
}

fn serve(
    mut stream: TcpStream,
    repository: &Mutex<Repository>,
    [sent, requests]: &[Arc<AtomicU64>; 2],
) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut lines = reader.by_ref().lines().map_while(Result::ok);
    let first = lines.next().unwrap_or_default();
    let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
    let head: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
    let length = head.iter().find_map(|line| {
        line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse::<usize>().ok()
    });
    let mut posted = vec![0; length.unwrap_or(0)];
    reader.read_exact(&mut posted).unwrap();
    let mut repository = repository.lock().unwrap();
    let Repository { commit, files, store } = &mut *repository;
    let range = head.iter().find_map(|line| {
        let line = line.to_ascii_lowercase();
        let (first, last) = line.strip_prefix("range: bytes=")?.split_once('-')?;
        Some((first.parse::<usize>().ok()?, last.parse::<usize>().ok()?))
    });
    let is_head = first.starts_with("HEAD ");
    let resolve = format!("/org/model/resolve/{commit}/");
    let revision = "/api/models/org/model/revision/";
    let named = path.strip_prefix(revision).is_some_and(|it| it == "main" || it == commit);
    let (status, extra, body) = if named {
        (
            "200 OK",
            String::new(),
            json!({ "id": "org/model", "sha": commit }).to_string().into_bytes(),
        )
    } else if path.starts_with(&format!("/api/models/org/model/tree/{commit}")) {
        let list: Vec<Value> = files.iter().map(|(name, bytes)| entry(name, bytes)).collect();
        ("200 OK", String::new(), Value::from(list).to_string().into_bytes())
    } else if path == "/api/repos/create" {
        ("200 OK", String::new(), json!({ "url": "org/model" }).to_string().into_bytes())
    } else if path == "/api/models/org/model/preupload/main" {
        let asked: Value = serde_json::from_slice(&posted).unwrap();
        let asked = asked["files"].as_array().unwrap().iter();
        let answer: Vec<Value> = asked
            .map(|file| {
                let is_large = file["path"].as_str().unwrap().ends_with(".safetensors");
                let mode = if is_large { "lfs" } else { "regular" };
                json!({ "path": file["path"], "uploadMode": mode })
            })
            .collect();
        ("200 OK", String::new(), json!({ "files": answer }).to_string().into_bytes())
    } else if path == "/org/model.git/info/lfs/objects/batch" {
        let asked: Value = serde_json::from_slice(&posted).unwrap();
        let host = header(&head, "host");
        let objects = asked["objects"].as_array().unwrap().iter();
        let objects: Vec<Value> = objects.map(|object| object_of(object, &host, store)).collect();
        ("200 OK", String::new(), json!({ "objects": objects }).to_string().into_bytes())
    } else if let Some((oid, part)) = path.strip_prefix("/lfs/").and_then(|it| it.split_once('/')) {
        let tag = if let Ok(part) = part.parse() {
            assert!(first.starts_with("PUT "));
            store.entry(oid.to_owned()).or_default().insert(part, posted);
            format!("ETag: \"{part}\"\r\n")
        } else if part == "complete" {
            let done: Value = serde_json::from_slice(&posted).unwrap();
            let parts = done["parts"].as_array().unwrap().iter();
            let numbers: Vec<u64> = parts
                .map(|part| {
                    assert_eq!(part["etag"], format!("\"{}\"", part["partNumber"]));
                    part["partNumber"].as_u64().unwrap()
                })
                .collect();
            assert!(numbers.iter().eq(store[oid].keys()), "every part, in order");
            String::new()
        } else {
            assert_eq!(part, "verify");
            assert_eq!(hex::encode(&sha256(&stored(store, oid))), oid, "what arrived is the file");
            String::new()
        };
        ("200 OK", tag, Vec::new())
    } else if path == "/api/models/org/model/commit/main" {
        assert!(head.iter().any(|line| line.eq_ignore_ascii_case("authorization: bearer writer")));
        for line in text(&posted).lines() {
            let line: Value = serde_json::from_str(line).unwrap();
            if line["key"] == "file" {
                let content = line["value"]["content"].as_str().unwrap();
                let name = line["value"]["path"].as_str().unwrap().to_owned();
                files.insert(name, Base64::decode_vec(content).unwrap());
            } else if line["key"] == "lfsFile" {
                let name = line["value"]["path"].as_str().unwrap().to_owned();
                files.insert(name, stored(store, line["value"]["oid"].as_str().unwrap()));
            }
        }
        ("200 OK", String::new(), json!({ "commitOid": commit }).to_string().into_bytes())
    } else if let Some(file) = path.strip_prefix(&resolve).and_then(|name| files.get(name)) {
        let (first, last) = range.unwrap_or((0, file.len().saturating_sub(1)));
        if !is_head && path.ends_with(".safetensors") {
            sent.fetch_add((last - first + 1) as u64, Ordering::Relaxed);
            requests.fetch_add(1, Ordering::Relaxed);
        }
        let range = format!("Content-Range: bytes {first}-{last}/{}\r\n", file.len());
        let status = if is_head { "200 OK" } else { "206 Partial Content" };
        (status, if is_head { String::new() } else { range }, file[first..=last].to_vec())
    } else {
        ("404 Not Found", String::new(), Vec::new())
    };
    let head = format!(
        "HTTP/1.1 {status}\r\n{extra}Content-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    // A client that has gone away is none of our concern.
    let body = if is_head { &[][..] } else { &body };
    let _ = stream.write_all(&[head.as_bytes(), body].concat());
}

fn header(head: &[String], name: &str) -> String {
    let value = head.iter().find_map(|line| {
        let (found, value) = line.split_once(": ")?;
        found.eq_ignore_ascii_case(name).then(|| value.to_owned())
    });
    value.unwrap()
}

fn sha256(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

/// A file of the store, its parts joined.
fn stored(store: &BTreeMap<String, BTreeMap<u64, Vec<u8>>>, oid: &str) -> Vec<u8> {
    store[oid].values().flatten().copied().collect()
}

/// Git LFS's answer for one file: nothing to do, one request, or a request for each part.
fn object_of(asked: &Value, host: &str, store: &BTreeMap<String, BTreeMap<u64, Vec<u8>>>) -> Value {
    let (oid, size) = (asked["oid"].as_str().unwrap(), asked["size"].as_u64().unwrap() as usize);
    if store.contains_key(oid) {
        return json!({ "oid": oid, "size": size });
    }
    let url = |last: &str| format!("http://{host}/lfs/{oid}/{last}");
    let mut upload = json!({ "href": url("1") });
    if size > PART_BYTES {
        let mut header = json!({ "chunk_size": PART_BYTES.to_string() });
        for part in 1..=size.div_ceil(PART_BYTES) {
            header[format!("{part:05}")] = url(&part.to_string()).into();
        }
        upload = json!({ "href": url("complete"), "header": header });
    }
    json!({ "oid": oid, "size": size, "actions": {
        "upload": upload,
        "verify": { "href": url("verify") },
    }})
}

fn entry(name: &str, bytes: &[u8]) -> Value {
    let mut sha1 = Sha1::new_with_prefix(format!("blob {}\0", bytes.len()));
    sha1.update(bytes);
    let oid: [u8; 20] = sha1.finalize().into();
    let mut entry =
        json!({ "type": "file", "path": name, "size": bytes.len(), "oid": hex::encode(&oid) });
    if [".safetensors", ".gguf", ".bin"].iter().any(|ending| name.ends_with(ending)) {
        let sha256: [u8; 32] = Sha256::digest(bytes).into();
        entry["lfs"] = json!({ "oid": hex::encode(&sha256), "size": bytes.len() });
    }
    entry
}
