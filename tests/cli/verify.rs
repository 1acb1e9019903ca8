//! `verify` finds what is wrong and says where.

use std::{fs, path::Path};

use serde_json::Value;
use tempfile::tempdir;

use crate::{
    harness::{convert, path, run, succeed, text},
    sets::kjv_for_two,
};

const OWN: &str = "model-00001-of-00001.safetensors";

/// Damages a set, verifies it (and the damaged package), and expects these words.
fn check(damage: impl Fn(&Path), words: &[&str]) {
    let folder = tempdir().unwrap();
    let set = kjv_for_two(&folder.path().join("set"));
    let package = set.join("node-1");
    damage(&package);
    for target in [&set, &package] {
        let output = run(&["verify", path(target)]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        for word in words {
            assert!(said.contains(word), "expected {word:?} in: {said}");
        }
        let json: Value =
            serde_json::from_str(&text(&run(&["verify", path(target), "--json"]).stdout)).unwrap();
        assert!(json["ok"] == false && !json["findings"].as_array().unwrap().is_empty(), "{json}");
    }
    // The other package is as it was.
    succeed(&["verify", path(&set.join("node-0"))]);
}

#[test]
fn an_undamaged_set_verifies() {
    let folder = tempdir().unwrap();
    let set = convert("kjv-4m", &folder.path().join("set"), &["--nodes", "3"]);
    assert!(succeed(&["verify", path(&set)]).contains("verified: 3 packages"));
    assert!(succeed(&["verify", path(&set.join("node-2"))]).contains("verified: 1 packages"));
}

#[test]
fn a_flipped_bit_is_reported_with_file_chunk_bytes_and_tensor() {
    let flip = |package: &Path| {
        let file = package.join(OWN);
        let mut bytes = fs::read(&file).unwrap();
        let at = bytes.len() - 10;
        bytes[at] ^= 1;
        fs::write(file, bytes).unwrap();
    };
    check(flip, &[OWN, "chunk 0", "bytes 0", "lm_head.biases"]);
}

#[test]
fn missing_short_extra_and_unreadable_files_are_reported() {
    check(
        |package| fs::remove_file(package.join("tokenizer.json")).unwrap(),
        &["tokenizer.json", "missing"],
    );
    check(
        |package| fs::write(package.join("config.json"), "{}").unwrap(),
        &["config.json", "bytes"],
    );
    check(|package| fs::write(package.join("notes.txt"), "x").unwrap(), &["notes.txt"]);
    let unreadable = |package: &Path| {
        fs::remove_file(package.join("tokenizer.json")).unwrap();
        fs::create_dir(package.join("tokenizer.json")).unwrap();
    };
    check(unreadable, &["tokenizer.json"]);
    check(|package| fs::remove_file(package.join("manifest.json")).unwrap(), &["manifest.json"]);
}

#[test]
fn a_changed_manifest_is_reported() {
    let change = |package: &Path| {
        let file = package.join("manifest.json");
        let text = fs::read_to_string(&file).unwrap().replacen("\"rank\":1", "\"rank\":0", 1);
        fs::write(file, text).unwrap();
    };
    let folder = tempdir().unwrap();
    let set = kjv_for_two(&folder.path().join("set"));
    change(&set.join("node-1"));
    let output = run(&["verify", path(&set)]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("manifest.json"), "{}", text(&output.stderr));
}
