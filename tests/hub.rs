//! A model by its name, from a hub on this machine.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    process::Output,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use serde_json::{Value, json};
use sha1::Sha1;
use sha2::{Digest as _, Sha256};
use shardpack_formats::hex;
use tempfile::tempdir;

use crate::harness::{data, files, path, shardpack, succeed, text};

const COMMIT: &str = "89abcdef0123456789abcdef0123456789abcdef";

/// A hub with one model, `org/model`.
struct Hub {
    address: String,
    weight_bytes: Arc<AtomicU64>,
}

impl Hub {
    fn start(model: &Path) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let files = Arc::new(files(model));
        let weight_bytes = Arc::new(AtomicU64::new(0));
        let sent = Arc::clone(&weight_bytes);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (files, sent) = (Arc::clone(&files), Arc::clone(&sent));
                thread::spawn(move || serve(stream.unwrap(), &files, &sent));
            }
        });
        Self { address, weight_bytes }
    }

    fn run(&self, folder: &Path, args: &[&str]) -> Output {
        let mut command = shardpack();
        command.args(args).env("HF_ENDPOINT", &self.address).env("HF_HOME", folder.join("home"));
        for name in ["HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE"] {
            command.env_remove(name);
        }
        let output = command.output().unwrap();
        assert!(output.status.success(), "{args:?}\n{}", text(&output.stderr));
        output
    }
}

fn serve(mut stream: TcpStream, files: &BTreeMap<String, Vec<u8>>, sent: &AtomicU64) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
    let first = lines.next().unwrap_or_default();
    let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
    let head: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
    let range = head.iter().find_map(|line| {
        let line = line.to_ascii_lowercase();
        let (first, last) = line.strip_prefix("range: bytes=")?.split_once('-')?;
        Some((first.parse::<usize>().ok()?, last.parse::<usize>().ok()?))
    });
    let resolve = format!("/org/model/resolve/{COMMIT}/");
    let (status, extra, body) = if path == "/api/models/org/model/revision/main" {
        ("200 OK", String::new(), json!({ "sha": COMMIT }).to_string().into_bytes())
    } else if path.starts_with(&format!("/api/models/org/model/tree/{COMMIT}")) {
        let list: Vec<Value> = files.iter().map(|(name, bytes)| entry(name, bytes)).collect();
        ("200 OK", String::new(), Value::from(list).to_string().into_bytes())
    } else if let Some(file) = path.strip_prefix(&resolve).and_then(|name| files.get(name)) {
        let (first, last) = range.unwrap();
        if path.ends_with(".safetensors") {
            sent.fetch_add((last - first + 1) as u64, Ordering::Relaxed);
        }
        let range = format!("Content-Range: bytes {first}-{last}/{}\r\n", file.len());
        ("206 Partial Content", range, file[first..=last].to_vec())
    } else {
        ("404 Not Found", String::new(), Vec::new())
    };
    let head = format!(
        "HTTP/1.1 {status}\r\n{extra}Content-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    // A client that has gone away is none of our concern.
    let _ = stream.write_all(&[head.as_bytes(), &body].concat());
}

fn entry(name: &str, bytes: &[u8]) -> Value {
    let mut sha1 = Sha1::new_with_prefix(format!("blob {}\0", bytes.len()));
    sha1.update(bytes);
    let oid: [u8; 20] = sha1.finalize().into();
    let mut entry =
        json!({ "type": "file", "path": name, "size": bytes.len(), "oid": hex::encode(&oid) });
    if name.ends_with(".safetensors") {
        let sha256: [u8; 32] = Sha256::digest(bytes).into();
        entry["lfs"] = json!({ "oid": hex::encode(&sha256), "size": bytes.len() });
    }
    entry
}

#[test]
fn a_name_converts_as_its_folder_does_kept_or_not() {
    let folder = tempdir().unwrap();
    let model = data("sources/bf16_sharded");
    let hub = Hub::start(&model);
    let output = |name: &str| folder.path().join(name);
    let (local, kept, passing) = (output("local"), output("kept"), output("passing"));
    succeed(&["convert", path(&model), "-o", path(&local), "--nodes", "2"]);

    // A plan reads headers.
    hub.run(folder.path(), &["plan", "org/model", "--nodes", "2"]);
    let total: u64 = files(&model)
        .iter()
        .filter(|(name, _)| name.ends_with(".safetensors"))
        .map(|(_, bytes)| bytes.len() as u64)
        .sum();
    let cache = folder.path().join("home/hub/models--org--model");
    let cached = || {
        let blobs = fs::read_dir(cache.join("blobs")).unwrap();
        blobs.map(|blob| blob.unwrap().metadata().unwrap().len()).sum::<u64>()
    };
    assert!(cached() < total / 2, "no weights are in the cache");

    let args = ["convert", "org/model", "--nodes", "2", "-o"];
    hub.run(folder.path(), &[&args[..], &[path(&passing), "--no-keep-source"]].concat());
    assert!(cached() < total / 2, "no weights are in the cache");
    assert!(!output("passing.source").exists(), "and none beside the result");
    hub.run(folder.path(), &[&args[..], &[path(&kept)]].concat());
    assert!(cached() > total, "all files are in the cache");
    assert!(files(&kept) == files(&passing), "the same bytes on either way");

    let manifest = |set: &Path| -> Value {
        serde_json::from_slice(&fs::read(set.join("node-0/manifest.json")).unwrap()).unwrap()
    };
    let (local, kept) = (manifest(&local), manifest(&kept));
    assert_eq!(local["ids"], kept["ids"]);
    assert_eq!(local["tensors"], kept["tensors"]);
    assert_eq!(kept["source"]["repo"], "org/model");
    assert_eq!(kept["source"]["commit"], COMMIT);
    let sources = kept["source"]["files"].as_array().unwrap();
    for file in sources.iter().filter(|file| file["name"].as_str().unwrap().ends_with("tensors")) {
        let bytes = fs::read(model.join(file["name"].as_str().unwrap())).unwrap();
        let sha256: [u8; 32] = Sha256::digest(&bytes).into();
        assert_eq!(file["sha256"], hex::encode(&sha256).as_str());
    }
    assert!(hub.weight_bytes.load(Ordering::Relaxed) >= 2 * total);
}
