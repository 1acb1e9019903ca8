//! A hub on this machine.

mod lfs;

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
    store: lfs::Store,
}

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
        ("200 OK", String::new(), lfs::upload_modes(&posted))
    } else if let Some((extra, body)) = lfs::answer(store, &first, &head, &posted) {
        ("200 OK", extra, body)
    } else if path == "/api/models/org/model/commit/main" {
        assert!(head.iter().any(|line| line.eq_ignore_ascii_case("authorization: bearer writer")));
        add_files(files, store, &posted);
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

/// Adds what a commit brings: small files in it, large ones from the store.
fn add_files(files: &mut BTreeMap<String, Vec<u8>>, store: &lfs::Store, posted: &[u8]) {
    for line in text(posted).lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        if line["key"] == "file" {
            let content = line["value"]["content"].as_str().unwrap();
            let name = line["value"]["path"].as_str().unwrap().to_owned();
            files.insert(name, Base64::decode_vec(content).unwrap());
        } else if line["key"] == "lfsFile" {
            let name = line["value"]["path"].as_str().unwrap().to_owned();
            files.insert(name, lfs::stored(store, line["value"]["oid"].as_str().unwrap()));
        }
    }
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
