//! `serve --stream`: packages go from the set into the memory of the nodes' ranks, not to their disks.

use std::{fs, path::Path};

use serde_json::Value;

use crate::{
    cluster::{Scene, TLS},
    harness::{fail, path},
    recovery::lose,
    running::{Running, ask},
    sets::kjv_for_two,
};

/// Bytes of the files below a folder.
fn bytes_below(folder: &Path) -> u64 {
    let size = |entry: fs::DirEntry| match entry.file_type().unwrap() {
        kind if kind.is_dir() => bytes_below(&entry.path()),
        _ => entry.metadata().unwrap().len(),
    };
    fs::read_dir(folder).unwrap().map(|entry| size(entry.unwrap())).sum()
}

#[test]
fn nodes_without_packages_serve_and_lose_ranks_inside_tls() {
    let scene = Scene::new();
    let set = kjv_for_two(&scene.store("set"));
    let nodes = scene.pair(&TLS);
    let options = [&["--nodes", "a,b", "--stream"], &scene.choice()[..]].concat();
    let server = Running::serve(&set, &options);
    assert_eq!(ask(&server.url(), "John 11:35"), "Jesus wept.");
    // Of a constraint, for which rank 0 reads the tokenizer that was sent to it.
    let body = serde_json::json!({
        "messages": [{ "role": "user", "content": "John 11:35" }],
        "temperature": 0, "max_tokens": 40,
        "response_format": { "type": "json_schema", "json_schema": { "name": "n", "schema": {
            "type": "object", "properties": { "n": { "enum": [35] } },
            "required": ["n"], "additionalProperties": false } } },
    });
    let url = format!("{}/chat/completions", server.url());
    let (status, answer) = crate::running::post(&url, &body);
    assert_eq!(status, 200, "{answer}");
    let content = answer["choices"][0]["message"]["content"].as_str().unwrap();
    assert_eq!(serde_json::from_str::<Value>(content).unwrap()["n"], 35);
    // A rank that is lost is sent its package again.
    for node in &nodes {
        let ranks = node.children();
        assert_eq!(ranks.len(), 1, "one rank on each node");
        lose(&server, ranks[0]);
    }
    for name in ["a", "b"] {
        let stored = bytes_below(&scene.store(name));
        assert!(stored < 100_000, "node {name} stores {stored} bytes");
    }
    assert_eq!(server.terminate(), Some(0));
    let listing = scene.cluster(&["status"]);
    assert!(listing["members"][0]["active"].as_object().unwrap().is_empty(), "{listing}");
}

#[test]
fn a_set_that_is_damaged_at_its_source_is_named_and_not_served() {
    let scene = Scene::new();
    let set = kjv_for_two(&scene.store("set"));
    let nodes = [Running::node(&scene.store("a"), None), Running::node(&scene.store("b"), None)];
    let to = nodes.each_ref().map(Running::address).join(",");
    let weights = set.join("node-1/model-00001-of-00001.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&weights, bytes).unwrap();
    let serve = ["serve", path(&set), "--nodes", &to, "--stream", "--listen", "127.0.0.1:0"];
    let error = fail(1, &serve);
    assert!(error.contains("rank 1") && error.contains("the package is damaged"), "{error}");
    assert!(error.contains(r#"file "model-00001-of-00001.safetensors""#), "{error}");
    // Nothing is left that would hold the nodes.
    let whole = kjv_for_two(&scene.store("whole"));
    let server = Running::serve(&whole, &["--nodes", &to, "--stream"]);
    assert_eq!(ask(&server.url(), "John 11:35"), "Jesus wept.");
    assert_eq!(server.terminate(), Some(0));
}

#[test]
fn streaming_needs_nodes() {
    let folder = tempfile::tempdir().unwrap();
    let set = kjv_for_two(&folder.path().join("set"));
    let error = fail(2, &["serve", path(&set), "--stream"]);
    assert!(error.contains("required arguments were not provided"), "{error}");
}
