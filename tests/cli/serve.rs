//! End to end: packages, nodes, ranks, server, answers.

use std::{collections::BTreeMap, fs};

use serde_json::json;
use tempfile::tempdir;

use crate::{
    harness::{convert, data, fail, kill, path, paused, succeed},
    running::{Running, ask, get, lives, post},
    sets::{kjv, kjv_for_two},
};

fn verses() -> BTreeMap<String, String> {
    serde_json::from_slice(&fs::read(data("kjv-4m/known.json")).unwrap()).unwrap()
}

#[test]
fn two_ranks_at_four_bits_say_every_known_verse() {
    let folder = tempdir().unwrap();
    let set = convert("kjv-4m", &folder.path().join("set"), &["--nodes", "2", "--name", "kjv"]);
    let server = Running::serve(&set, &[]);
    for (reference, words) in verses() {
        assert_eq!(ask(&server.url(), &reference), words, "{reference}");
    }
    let (status, models) = get(&format!("{}/models", server.url()));
    assert!(status == 200 && models.contains("\"kjv\""), "{models}");
    let (status, health) = get(&server.url().replace("/v1", "/health"));
    assert!(status == 200 && health.contains("\"ranks\":2"), "{health}");
    let ranks = server.children();
    assert_eq!(ranks.len(), 2, "one process per rank");
    assert_eq!(server.terminate(), Some(0));
    assert!(!ranks.into_iter().any(lives), "no rank outlives its front");
}

#[test]
fn any_number_of_ranks_and_bits_serves() {
    let folder = tempdir().unwrap();
    for (bits, nodes) in [("4", "1"), ("4", "8"), ("6", "3"), ("8", "2"), ("16", "2"), ("16", "1")]
    {
        let set = convert(
            "kjv-4m",
            &folder.path().join(format!("{bits}-{nodes}")),
            &["--bits", bits, "--nodes", nodes],
        );
        let server = Running::serve(&set, &["--threads", "1"]);
        assert_eq!(ask(&server.url(), "John 11:35"), "Jesus wept.", "{bits} bits on {nodes} ranks");
        assert_eq!(server.terminate(), Some(0));
    }
}

#[test]
fn pushed_packages_serve_from_running_nodes() {
    let folder = tempdir().unwrap();
    let set = kjv_for_two(&folder.path().join("set"));
    let nodes: Vec<Running> = (0..2)
        .map(|rank| Running::node(&folder.path().join(format!("store-{rank}")), None))
        .collect();
    let addresses = nodes.iter().map(Running::address).collect::<Vec<_>>().join(",");
    assert!(
        fail(2, &["serve", path(&set), "--nodes", &addresses, "--listen", "127.0.0.1:0"])
            .contains("not here")
    );
    succeed(&["push", path(&set), "--to", &addresses]);
    let server = Running::serve(&set, &["--nodes", &addresses]);
    assert_eq!(ask(&server.url(), "Genesis 1:3"), verses()["Genesis 1:3"]);
    assert_eq!(server.terminate(), Some(0));
    // The same nodes serve again.
    let server = Running::serve(&set, &["--nodes", &addresses]);
    assert_eq!(ask(&server.url(), "John 1:1"), verses()["John 1:1"]);
}

#[test]
fn requests_that_cannot_be_honoured_are_refused_by_name() {
    let folder = tempdir().unwrap();
    let set = kjv(&folder.path().join("set"));
    let server = Running::serve(&set, &[]);
    let url = format!("{}/chat/completions", server.url());
    let message = json!([{ "role": "user", "content": "John 3:16" }]);
    let (status, answer) = post(&url, &json!({ "messages": message, "n": 1000 }));
    assert!(status == 400 && answer["error"]["param"] == "n", "{answer}");
    let (status, answer) = post(&url, &json!({ "messages": message, "model": "gpt-9" }));
    assert!(
        status == 404 && answer["error"]["message"].as_str().unwrap().contains("gpt-9"),
        "{answer}"
    );
    let long = "verily ".repeat(5000);
    let (status, answer) =
        post(&url, &json!({ "messages": [{ "role": "user", "content": long }] }));
    assert!(status == 400 && answer["error"]["code"] == "context_length_exceeded", "{answer}");
}

#[test]
fn the_same_seed_gives_the_same_words() {
    let folder = tempdir().unwrap();
    let say = |nodes: &str| {
        let set =
            convert("kjv-4m", &folder.path().join(nodes), &["--nodes", nodes, "--bits", "16"]);
        let server = Running::serve(&set, &[]);
        let body = json!({ "messages": [{ "role": "user", "content": "Speak." }], "temperature": 0.9, "seed": 7, "max_tokens": 40 });
        let first = post(&format!("{}/chat/completions", server.url()), &body).1["choices"][0]["message"]["content"].clone();
        let second = post(&format!("{}/chat/completions", server.url()), &body).1["choices"][0]["message"]["content"].clone();
        assert_eq!(first, second);
        assert!(!first.as_str().unwrap().is_empty());
        first
    };
    assert_eq!(say("1"), say("2"), "at 16 bits, two ranks draw what one draws");
}

#[test]
fn unservable_sets_and_options_are_refused_in_one_line() {
    let folder = tempdir().unwrap();
    let set = |name: &str, options: &[&str]| convert("kjv-4m", &folder.path().join(name), options);
    let (two, other) = (set("two", &["--nodes", "2"]), set("three", &["--nodes", "3"]));
    let serve = |set: &std::path::Path, listen: &str, code| {
        fail(code, &["serve", path(set), "--listen", listen])
    };

    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    assert!(serve(&two, &address, 2).contains(&address), "a port in use");
    assert!(serve(&two, "0.0.0.0:0", 2).contains("other machines"), "beyond loopback");
    // The same by host and by port alone.
    let port = taken.local_addr().unwrap().port().to_string();
    assert!(fail(2, &["serve", path(&two), "--port", &port]).contains(&address), "a port in use");
    let error = fail(2, &["serve", path(&two), "--host", "0.0.0.0"]);
    assert!(error.contains("0.0.0.0:8080 can be reached"), "{error}");
    let error = fail(2, &["serve", path(&two), "--port", &port, "--listen", &address]);
    assert!(error.contains("cannot be used with"), "{error}");

    // A package of another rank: node-1 holds a second rank 0.
    let swapped = set("swapped", &["--nodes", "2"]);
    replace(&swapped.join("node-1"), &two.join("node-0"));
    let error = serve(&swapped, "127.0.0.1:0", 1);
    assert!(error.contains("rank 0"), "{error}");

    // A package of the same model from a set of another size.
    let mixed = set("mixed", &["--nodes", "2"]);
    replace(&mixed.join("node-1"), &other.join("node-1"));
    let error = serve(&mixed, "127.0.0.1:0", 1);
    assert!(error.contains("set") || error.contains("rank"), "{error}");

    // A changed tokenizer.
    let tampered = set("tampered", &["--nodes", "2"]);
    for package in ["node-0", "node-1"] {
        let file = tampered.join(package).join("tokenizer.json");
        let text = fs::read_to_string(&file).unwrap().replacen("Jesus", "Moses", 1);
        fs::write(file, text).unwrap();
    }
    let error = serve(&tampered, "127.0.0.1:0", 1);
    assert!(error.contains("tokenizer.json") && error.contains("changed"), "{error}");

    // A flipped bit in the weights of a rank.
    let damaged = set("damaged", &["--nodes", "2"]);
    let file = damaged.join("node-1/model-00001-of-00001.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let at = bytes.len() / 2;
    bytes[at] ^= 4;
    fs::write(&file, bytes).unwrap();
    let error = serve(&damaged, "127.0.0.1:0", 1);
    assert!(
        error.contains("model-00001-of-00001.safetensors") && error.contains("chunk 0"),
        "{error}"
    );
}

fn replace(package: &std::path::Path, by: &std::path::Path) {
    fs::remove_dir_all(package).unwrap();
    crate::harness::copy_folder(by, package);
}

#[test]
fn a_killed_push_resumes() {
    let folder = tempdir().unwrap();
    let set = kjv_for_two(&folder.path().join("set"));
    let file = "model-00001-of-00001.safetensors";
    for point in [
        format!("push:chunk:1:{file}:0"),
        "push:committing:0".into(),
        "push:prepared:1".into(),
        "push:activating:0".into(),
    ] {
        let nodes: Vec<Running> = (0..2)
            .map(|rank| {
                Running::node(
                    &folder.path().join(format!("{}-{rank}", point.replace(':', "-"))),
                    None,
                )
            })
            .collect();
        let addresses = nodes.iter().map(Running::address).collect::<Vec<_>>().join(",");
        let args = ["push", path(&set), "--to", &addresses];
        kill(paused(&point, &args));
        let report: serde_json::Value =
            serde_json::from_str(&succeed(&[args.as_slice(), &["--json"]].concat())).unwrap();
        assert!(
            report["nodes"].as_array().unwrap().iter().all(|node| node["state"] == "active"),
            "{point}: {report}"
        );
        verify_stores(folder.path(), &point.replace(':', "-"));
    }
}

#[test]
fn a_killed_node_resumes_its_push() {
    let folder = tempdir().unwrap();
    let set = convert("kjv-4m", &folder.path().join("set"), &["--nodes", "1"]);
    let file = "model-00001-of-00001.safetensors";
    for point in [
        format!("node:stored:{file}:0"),
        "node:verifying".into(),
        "node:prepared".into(),
        "node:activating".into(),
    ] {
        let name = point.replace(':', "-");
        let store = folder.path().join(format!("{name}-0"));
        let node = Running::node(&store, Some(&point));
        let address = node.address();
        let push = std::thread::spawn({
            let (set, address) = (path(&set).to_owned(), address.clone());
            move || crate::harness::run(&["push", &set, "--to", &address])
        });
        node.wait_for(&format!("paused at {point}"));
        node.kill();
        let output = push.join().unwrap();
        assert_eq!(output.status.code(), Some(2), "{point}: the push says that the node is gone");
        let node = Running::node(&store, None);
        succeed(&["push", path(&set), "--to", &node.address()]);
        verify_stores(folder.path(), &name);
    }
}

/// Verifies every package of the stores whose folders begin with `name`.
fn verify_stores(folder: &std::path::Path, name: &str) {
    let stores = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut verified = 0;
    for store in
        stores.filter(|store| store.file_name().unwrap().to_str().unwrap().starts_with(name))
    {
        for package in fs::read_dir(store.join("packages")).unwrap() {
            succeed(&["verify", path(&package.unwrap().path())]);
            verified += 1;
        }
    }
    assert!(verified > 0, "{name}: nothing was stored");
}
