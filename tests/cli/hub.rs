//! A model by its name, from a hub on this machine.

use std::{
    collections::BTreeMap,
    fs,
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
use tempfile::tempdir;

use crate::{
    harness::{
        copy_folder, data, fail, files, kill, path, paused_command, shardpack, succeed, text,
    },
    running::{Running, ask},
};

const COMMIT: &str = "89abcdef0123456789abcdef0123456789abcdef";

/// A hub with one model, `org/model`.
struct Hub {
    address: String,
    weight_bytes: Arc<AtomicU64>,
    weight_requests: Arc<AtomicU64>,
}

impl Hub {
    fn start(model: &Path) -> Self {
        Self::of(files(model))
    }

    fn of(files: BTreeMap<String, Vec<u8>>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let files = Arc::new(Mutex::new(files));
        let weight_bytes = Arc::new(AtomicU64::new(0));
        let weight_requests = Arc::new(AtomicU64::new(0));
        let counts = [Arc::clone(&weight_bytes), Arc::clone(&weight_requests)];
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (files, counts) = (Arc::clone(&files), counts.clone());
                thread::spawn(move || serve(stream.unwrap(), &files, &counts));
            }
        });
        Self { address, weight_bytes, weight_requests }
    }

    fn command(&self, folder: &Path, args: &[&str]) -> Command {
        let mut command = shardpack();
        command.args(args).env("HF_ENDPOINT", &self.address).env("HF_HOME", folder.join("home"));
        for name in ["HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE"] {
            command.env_remove(name);
        }
        command
    }

    fn run(&self, folder: &Path, args: &[&str]) -> Output {
        let output = self.command(folder, args).output().unwrap();
        assert!(output.status.success(), "{args:?}\n{}", text(&output.stderr));
        output
    }

    /// Requests for weights since this was last asked.
    fn requests(&self) -> u64 {
        self.weight_requests.swap(0, Ordering::Relaxed)
    }
}

fn serve(
    mut stream: TcpStream,
    files: &Mutex<BTreeMap<String, Vec<u8>>>,
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
    let mut files = files.lock().unwrap();
    let range = head.iter().find_map(|line| {
        let line = line.to_ascii_lowercase();
        let (first, last) = line.strip_prefix("range: bytes=")?.split_once('-')?;
        Some((first.parse::<usize>().ok()?, last.parse::<usize>().ok()?))
    });
    let is_head = first.starts_with("HEAD ");
    let resolve = format!("/org/model/resolve/{COMMIT}/");
    let (status, extra, body) = if path == "/api/models/org/model/revision/main" {
        (
            "200 OK",
            String::new(),
            json!({ "id": "org/model", "sha": COMMIT }).to_string().into_bytes(),
        )
    } else if path.starts_with(&format!("/api/models/org/model/tree/{COMMIT}")) {
        let list: Vec<Value> = files.iter().map(|(name, bytes)| entry(name, bytes)).collect();
        ("200 OK", String::new(), Value::from(list).to_string().into_bytes())
    } else if path == "/api/repos/create" {
        ("200 OK", String::new(), json!({ "url": "org/model" }).to_string().into_bytes())
    } else if path == "/api/models/org/model/preupload/main" {
        let asked: Value = serde_json::from_slice(&posted).unwrap();
        let asked = asked["files"].as_array().unwrap().iter();
        let answer: Vec<Value> =
            asked.map(|file| json!({ "path": file["path"], "uploadMode": "regular" })).collect();
        ("200 OK", String::new(), json!({ "files": answer }).to_string().into_bytes())
    } else if path == "/api/models/org/model/commit/main" {
        assert!(head.iter().any(|line| line.eq_ignore_ascii_case("authorization: bearer writer")));
        for line in text(&posted).lines() {
            let line: Value = serde_json::from_str(line).unwrap();
            if line["key"] == "file" {
                let content = line["value"]["content"].as_str().unwrap();
                let name = line["value"]["path"].as_str().unwrap().to_owned();
                files.insert(name, Base64::decode_vec(content).unwrap());
            }
        }
        ("200 OK", String::new(), json!({ "commitOid": COMMIT }).to_string().into_bytes())
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

#[test]
fn a_killed_conversion_that_keeps_no_source_goes_on_to_identical_bytes() {
    let model = data("sources/bf16_sharded");
    let hub = Hub::start(&model);
    let folder = tempdir().unwrap();
    let convert = |output: &Path| -> Vec<String> {
        let args = ["convert", "org/model", "--no-keep-source", "--nodes", "2", "--threads", "1"];
        args.iter().map(|arg| (*arg).to_owned()).chain(["-o".into(), path(output).into()]).collect()
    };
    let undisturbed = folder.path().join("undisturbed");
    let args = convert(&undisturbed);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    hub.run(folder.path(), &args);
    let expected = files(&undisturbed);
    // One request for each file's header, and one for each file's only piece.
    assert_eq!(hub.requests(), 6);
    // The last tensor of all is in the third file: what is made of the others is done by then.
    for (point, taken_up, requests) in [
        ("convert:planned", false, 6),
        ("convert:tensor:0", false, 6),
        ("convert:tensor:24", true, 4),
        ("convert:hashing", true, 3),
        ("convert:publishing", false, 6),
    ] {
        let output = folder.path().join(point.replace(':', "-"));
        let args = convert(&output);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        kill(paused_command(point, hub.command(folder.path(), &args)));
        assert!(!output.exists(), "{point}: half a result has the final name");
        hub.requests();
        let said = text(&hub.run(folder.path(), &args).stderr);
        assert_eq!(said.contains("resuming after"), taken_up, "{point}: {said}");
        assert_eq!(hub.requests(), requests, "{point}: files that were verified stay away");
        assert!(files(&output) == expected, "{point}");
        let spool = folder.path().join(point.replace(':', "-") + ".source");
        assert!(!spool.exists(), "{point}: nothing is left of either run");
    }
}

#[test]
fn a_second_conversion_of_one_output_leaves_the_first_ones_pieces_alone() {
    let hub = Hub::start(&data("sources/bf16_sharded"));
    let folder = tempdir().unwrap();
    let output = folder.path().join("set");
    let args = ["convert", "org/model", "--no-keep-source", "-o", path(&output), "--threads", "1"];
    let first = paused_command("convert:finished:3", hub.command(folder.path(), &args));
    let pieces = || files(&folder.path().join("set.source"));
    let held = pieces();
    assert!(!held.is_empty());
    let second = hub.command(folder.path(), &args).output().unwrap();
    assert!(text(&second.stderr).contains("another conversion"), "{}", text(&second.stderr));
    assert!(pieces() == held);
    kill(first);
    hub.run(folder.path(), &args);
    assert!(!folder.path().join("set.source").exists());
}

#[test]
fn a_model_in_a_part_of_a_repository_converts_as_it_does_by_itself() {
    let folder = tempdir().unwrap();
    let alone = data("sources/bf16_sharded");
    let whole = folder.path().join("whole");
    copy_folder(&alone, &whole.join("parts/text_model"));
    // The tokenizer stands beside the whole, with what is not the text model's.
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::rename(whole.join("parts/text_model").join(name), whole.join(name)).unwrap();
    }
    fs::write(whole.join("model.safetensors"), "vision tower").unwrap();
    fs::write(whole.join("generation_config.json"), "{}").unwrap();
    let set = |name: &str| folder.path().join(name);
    succeed(&["convert", path(&alone), "-o", path(&set("alone"))]);
    let part = ["--subfolder", "parts/text_model"];
    let convert = |source: &str, name: &str, more: &[&str]| -> Vec<String> {
        let set = set(name);
        let args = ["convert", source, "-o", path(&set)];
        args.iter().chain(&part).chain(more).map(|arg| (*arg).to_owned()).collect()
    };
    let run = |args: Vec<String>, hub: Option<&Hub>| {
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        match hub {
            None => _ = succeed(&args),
            Some(hub) => _ = hub.run(folder.path(), &args),
        }
    };
    run(convert(path(&whole), "local", &[]), None);
    let expected = files(&set("alone"));
    assert!(files(&set("local")) == expected, "a folder's part");

    let hub = Hub::start(&whole);
    let without = hub.command(folder.path(), &["plan", "org/model"]).output().unwrap();
    let hint = "parts/text_model/ has one; name it with --subfolder parts/text_model";
    assert!(text(&without.stderr).contains(hint), "{}", text(&without.stderr));
    run(vec!["plan".into(), "org/model".into(), part[0].into(), part[1].into()], Some(&hub));
    run(convert("org/model", "kept", &[]), Some(&hub));
    run(convert("org/model", "passing", &["--no-keep-source"]), Some(&hub));
    let kept = files(&set("kept"));
    assert!(files(&set("passing")) == kept, "the same bytes on either way");
    let manifest: Value = serde_json::from_slice(&kept["node-0/manifest.json"]).unwrap();
    assert_eq!(manifest["source"]["subfolder"], part[1]);
    let alone: Value = serde_json::from_slice(&expected["node-0/manifest.json"]).unwrap();
    assert_eq!(manifest["ids"], alone["ids"], "tokenizer and weights are those of the part");
    // From the cache alone.
    let args = convert("org/model", "offline", &[]);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let offline = hub.command(folder.path(), &args).env("HF_HUB_OFFLINE", "1").output().unwrap();
    assert!(offline.status.success(), "{}", text(&offline.stderr));
    assert!(files(&set("offline")) == kept);

    let nowhere = set("nowhere");
    let args = ["convert", path(&whole), "-o", path(&nowhere), "--subfolder", "none"];
    assert!(fail(2, &args).contains("no such folder"));
}

#[test]
fn gguf_files_and_pickles_of_the_hub_convert_as_they_do_here() {
    let folder = tempdir().unwrap();
    let whole = folder.path().join("whole");
    let set = |name: &str| folder.path().join(name);
    fs::create_dir_all(whole.join("Q4")).unwrap();
    let gguf = data("sources/gguf_q8_0/model.gguf");
    for file in ["model-Q8_0.gguf", "Q4/other.gguf", "mmproj-F16.gguf"] {
        fs::copy(&gguf, whole.join(file)).unwrap();
    }
    // What such repositories have for the hub's own pages.
    fs::write(whole.join("config.json"), r#"{"model_type": "llama"}"#).unwrap();
    succeed(&["convert", path(&gguf), "-o", path(&set("here")), "--bits", "8"]);
    let hub = Hub::start(&whole);
    let ids = |name: &str| -> Value {
        let text = fs::read(set(name).join("set.json")).unwrap();
        serde_json::from_slice::<Value>(&text).unwrap()["ids"].clone()
    };
    for (name, file) in [("root", "model-Q8_0.gguf"), ("below", "Q4/other.gguf")] {
        let source = format!("org/model@main/{file}");
        hub.run(folder.path(), &["plan", &source]);
        hub.run(folder.path(), &["convert", &source, "-o", path(&set(name)), "--bits", "8"]);
        assert_eq!(ids(name), ids("here"), "{file}");
    }
    let refused = |args: &[&str], words: &[&str]| {
        let output = hub.command(folder.path(), args).output().unwrap();
        let said = text(&output.stderr);
        assert!(!output.status.success() && words.iter().all(|word| said.contains(word)), "{said}");
    };
    let none = set("none");
    let convert = ["convert", "org/model/missing.gguf", "-o", path(&none)];
    refused(&convert, &["no missing.gguf", "Q4/other.gguf, mmproj-F16.gguf, model-Q8_0.gguf"]);
    refused(&["plan", "org/model"], &["name one of them", "org", "model-Q8_0.gguf"]);
    let args = ["convert", "org/model/model-Q8_0.gguf", "-o", path(&none), "--no-keep-source"];
    refused(&args, &["--no-keep-source supports .safetensors only"]);

    let pickles = data("sources/pickle_bin");
    let hub = Hub::start(&pickles);
    let refused = hub.command(folder.path(), &["plan", "org/model"]).output().unwrap();
    assert!(text(&refused.stderr).contains("--allow-pickle"), "{}", text(&refused.stderr));
    succeed(&["convert", path(&pickles), "-o", path(&set("pickle")), "--allow-pickle"]);
    let allowed = set("allowed");
    hub.run(folder.path(), &["convert", "org/model", "-o", path(&allowed), "--allow-pickle"]);
    assert_eq!(ids("allowed"), ids("pickle"));
}

#[test]
fn a_model_is_converted_when_it_is_served_and_kept_by_name() {
    let folder = tempdir().unwrap();
    let hub = Hub::start(&data("kjv-4m"));
    let store = folder.path().join("models");
    let command = |args: &[&str]| {
        let mut command = hub.command(folder.path(), args);
        command.env("SHARDPACK_MODELS", &store);
        command
    };
    let run = |args: &[&str]| {
        let output = command(args).output().unwrap();
        (output.status.code(), text(&output.stdout).to_owned(), text(&output.stderr).to_owned())
    };
    let listen = ["--listen", "127.0.0.1:0", "--json", "--threads", "1"];
    let local = data("kjv-4m");
    for (model, bits) in [("org/model", "8"), (path(&local), "4")] {
        let args = [&["serve", model, "--bits", bits][..], &listen].concat();
        let server = Running::spawn(command(&args));
        assert_eq!(ask(&server.url(), "John 11:35"), "Jesus wept.", "{model}");
        assert_eq!(server.terminate(), Some(0));
    }
    // What is there is served again without the hub, also by its name.
    hub.requests();
    for args in [&["run", "org/model", "--bits", "8"][..], &["serve", "org--model-8bit"]] {
        let server = Running::spawn(command(&[args, &listen].concat()));
        assert_eq!(ask(&server.url(), "John 11:35"), "Jesus wept.");
        assert_eq!(server.terminate(), Some(0));
    }
    assert_eq!(hub.requests(), 0);

    let (code, listed, _) = run(&["list", "--json"]);
    let listed: Value = serde_json::from_str(&listed).unwrap();
    let models = listed["models"].as_array().unwrap();
    assert_eq!((code, models.len()), (Some(0), 2), "{listed}");
    assert_eq!(models[1]["name"], "org--model-8bit", "{listed}");
    assert_eq!((&models[1]["bits"], &models[1]["nodes"]), (&8.into(), &1.into()));
    let used: Value = serde_json::from_str(&run(&["du", "--json"]).1).unwrap();
    let sum: u64 = models.iter().map(|model| model["bytes"].as_u64().unwrap()).sum();
    assert_eq!(used["bytes"], sum);

    // Nothing is removed unless every name is one of the store's.
    let (code, _, said) = run(&["rm", "org--model-8bit", "../home"]);
    assert_eq!(code, Some(2));
    assert!(said.contains("no model of this name") && said.contains("shardpack list"), "{said}");
    assert!(store.join("org--model-8bit").exists() && folder.path().join("home").exists());
    assert_eq!(run(&["rm", "org--model-8bit"]).0, Some(0));
    assert!(!store.join("org--model-8bit").exists());

    let set = folder.path().join("set");
    succeed(&["convert", path(&local), "-o", path(&set)]);
    for (args, words) in [
        (["serve", path(&set), "--bits", "4"], "converted already"),
        (["serve", "nowhere", "--bits", "4"], "no such set, model or file"),
    ] {
        let (code, _, said) = run(&args);
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains(words), "{said}");
    }
}

#[test]
fn a_set_goes_to_the_hub_and_is_served_from_there() {
    let folder = tempdir().unwrap();
    let hub = Hub::of(BTreeMap::new());
    let set = folder.path().join("set");
    succeed(&["convert", path(&data("kjv-4m")), "-o", path(&set), "--nodes", "2"]);
    let push = ["push-hub", path(&set), "org/model", "--json"];
    let refused = hub.command(folder.path(), &push).output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
    assert!(text(&refused.stderr).contains("HF_TOKEN"), "{}", text(&refused.stderr));
    let pushed = hub.command(folder.path(), &push).env("HF_TOKEN", "writer").output().unwrap();
    assert!(pushed.status.success(), "{}", text(&pushed.stderr));
    let pushed: Value = serde_json::from_slice(&pushed.stdout).unwrap();
    assert_eq!(pushed["commit"], COMMIT);
    let store = folder.path().join("models");
    let serve = ["serve", "org/model", "--listen", "127.0.0.1:0", "--json", "--threads", "1"];
    let mut command = hub.command(folder.path(), &serve);
    command.env("SHARDPACK_MODELS", &store);
    let server = Running::spawn(command);
    assert_eq!(ask(&server.url(), "John 11:35"), "Jesus wept.");
    assert_eq!(server.terminate(), Some(0));
    assert!(!store.exists(), "a set is not converted");
    let cached = folder.path().join("home/hub/models--org--model/snapshots").join(COMMIT);
    assert!(files(&cached) == files(&set), "every file of the set");
    // Something else is refused before anything is sent.
    let other = hub.command(folder.path(), &["push-hub", path(folder.path()), "org/model"]);
    let other = { other }.env("HF_TOKEN", "writer").output().unwrap();
    assert_eq!(other.status.code(), Some(2), "{}", text(&other.stderr));
}
