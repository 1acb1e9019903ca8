//! The store of a hub's large files: Git LFS's batch API, with whole files and files in parts.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use shardpack_formats::hex;

/// Parts of large files, by the file's SHA-256.
pub(super) type Store = BTreeMap<String, BTreeMap<u64, Vec<u8>>>;

/// Bytes of a part of the larger files; smaller ones are sent whole.
const PART_BYTES: usize = 1_000_000;

/// Which of the files that are asked for go to the store.
pub(super) fn upload_modes(posted: &[u8]) -> Vec<u8> {
    let asked: Value = serde_json::from_slice(posted).unwrap();
    let modes: Vec<Value> = asked["files"]
        .as_array()
        .unwrap()
        .iter()
        .map(|file| {
            let is_large = file["path"].as_str().unwrap().ends_with(".safetensors");
            let mode = if is_large { "lfs" } else { "regular" };
            json!({ "path": file["path"], "uploadMode": mode })
        })
        .collect();
    json!({ "files": modes }).to_string().into_bytes()
}

/// Headers and body of the answer to a request of the store's.
pub(super) fn answer(
    store: &mut Store,
    first: &str,
    head: &[String],
    posted: &[u8],
) -> Option<(String, Vec<u8>)> {
    let path = first.split(' ').nth(1)?;
    if path == "/org/model.git/info/lfs/objects/batch" {
        let asked: Value = serde_json::from_slice(posted).unwrap();
        let host = header(head, "host");
        let objects = asked["objects"].as_array().unwrap().iter();
        let objects: Vec<Value> = objects.map(|object| object_of(object, &host, store)).collect();
        return Some((String::new(), json!({ "objects": objects }).to_string().into_bytes()));
    }
    let (oid, part) = path.strip_prefix("/lfs/")?.split_once('/')?;
    if let Ok(part) = part.parse() {
        assert!(first.starts_with("PUT "));
        store.entry(oid.to_owned()).or_default().insert(part, posted.to_vec());
        return Some((format!("ETag: \"{part}\"\r\n"), Vec::new()));
    }
    if part == "complete" {
        let done: Value = serde_json::from_slice(posted).unwrap();
        let parts = done["parts"].as_array().unwrap().iter();
        let numbers: Vec<u64> = parts
            .map(|part| {
                assert_eq!(part["etag"], format!("\"{}\"", part["partNumber"]));
                part["partNumber"].as_u64().unwrap()
            })
            .collect();
        assert!(numbers.iter().eq(store[oid].keys()), "every part, in order");
    } else {
        assert_eq!(part, "verify");
        let found: [u8; 32] = Sha256::digest(stored(store, oid)).into();
        assert_eq!(hex::encode(&found), oid, "what arrived is the file");
    }
    Some((String::new(), Vec::new()))
}

fn header(head: &[String], name: &str) -> String {
    let value = head.iter().find_map(|line| {
        let (found, value) = line.split_once(": ")?;
        found.eq_ignore_ascii_case(name).then(|| value.to_owned())
    });
    value.unwrap()
}

/// A file of the store, its parts joined.
pub(super) fn stored(store: &Store, oid: &str) -> Vec<u8> {
    store[oid].values().flatten().copied().collect()
}

/// Git LFS's answer for one file: nothing to do, one request, or a request for each part.
fn object_of(asked: &Value, host: &str, store: &Store) -> Value {
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
