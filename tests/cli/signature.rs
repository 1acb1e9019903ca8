//! Keys, signatures, and `verify --key`.

use std::{fs, path::Path};

use serde_json::Value;
use tempfile::{TempDir, tempdir};

use crate::harness::{convert, fail, files, path, run, succeed, text};

/// A signed set for two nodes in `set`, with its keys `signer` and `signer.pub`.
fn scene() -> TempDir {
    let folder = tempdir().unwrap();
    let (set, key) = (folder.path().join("set"), folder.path().join("signer"));
    convert("kjv-4m", &set, &["--nodes", "2"]);
    succeed(&["keygen", "-o", path(&key)]);
    assert!(succeed(&["sign", path(&set), "--key", path(&key)]).contains("signed: 2 packages"));
    folder
}

/// What `verify --key` finds wrong.
fn findings(target: &Path, key: &Path) -> Vec<String> {
    let output = run(&["verify", path(target), "--key", path(key), "--json"]);
    let json: Value = serde_json::from_str(&text(&output.stdout)).unwrap();
    let findings: Vec<String> = serde_json::from_value(json["findings"].clone()).unwrap();
    assert_eq!(output.status.code(), Some(i32::from(!findings.is_empty())), "{json}");
    assert_eq!(json["signed"], findings.is_empty(), "{json}");
    findings
}

#[test]
fn a_signed_set_verifies_with_its_key_and_no_other() {
    let folder = scene();
    let (set, key) = (folder.path().join("set"), folder.path().join("signer.pub"));
    assert!(findings(&set, &key).is_empty());
    assert!(findings(&set.join("node-1"), &key).is_empty());
    assert!(succeed(&["verify", path(&set), "--key", path(&key)]).contains("signed with key"));
    succeed(&["verify", path(&set)]);
    let other = folder.path().join("other");
    succeed(&["keygen", "-o", path(&other)]);
    let found = findings(&set, &other.with_extension("pub"));
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found[1].contains("node-1: model.sig: made with another key"), "{found:?}");
}

#[test]
fn a_changed_byte_a_lost_file_and_a_lost_signature_are_found() {
    let check = |damage: &dyn Fn(&Path), word: &str| {
        let folder = scene();
        let (set, key) = (folder.path().join("set"), folder.path().join("signer.pub"));
        damage(&set.join("node-1"));
        let found = findings(&set, &key);
        assert!(found.iter().any(|finding| finding.contains(word)), "{word:?} in {found:?}");
        assert!(found.iter().all(|finding| finding.contains("node-1")), "{found:?}");
    };
    let flip = |package: &Path| {
        let file = package.join("model-00001-of-00001.safetensors");
        let mut bytes = fs::read(&file).unwrap();
        bytes[100_000] ^= 1;
        fs::write(file, bytes).unwrap();
    };
    check(&flip, "model-00001-of-00001.safetensors: changed since it was signed");
    let remove =
        |name: &'static str| move |package: &Path| fs::remove_file(package.join(name)).unwrap();
    check(&remove("config.json"), "config.json: signed, but missing");
    check(&remove("model.sig"), "model.sig: missing");
}

#[test]
fn signing_again_changes_nothing() {
    let folder = scene();
    let (set, key) = (folder.path().join("set"), folder.path().join("signer"));
    let before = files(&set);
    assert!(before.contains_key("node-0/model.sig"));
    succeed(&["sign", path(&set), "--key", path(&key)]);
    assert!(files(&set) == before);
}

#[test]
fn damaged_packages_are_not_signed_and_keys_are_not_mixed_up() {
    let folder = scene();
    let (set, key) = (folder.path().join("set"), folder.path().join("signer"));
    let said = fail(2, &["sign", path(&set), "--key", path(&key.with_extension("pub"))]);
    assert!(said.contains("not a private key"), "{said}");
    let said = fail(2, &["verify", path(&set), "--key", path(&key)]);
    assert!(said.contains("not a public key"), "{said}");
    let said = fail(2, &["keygen", "-o", path(&key)]);
    assert!(said.contains("cannot be written"), "{said}");
    fs::write(set.join("node-0/config.json"), "{}").unwrap();
    let said = fail(1, &["sign", path(&set), "--key", path(&key)]);
    assert!(said.contains("node-0") && said.contains("config.json: 2 bytes"), "{said}");
}

#[test]
fn a_conversion_signs_what_it_writes() {
    let folder = tempdir().unwrap();
    let (set, key) = (folder.path().join("set"), folder.path().join("signer"));
    succeed(&["keygen", "-o", path(&key)]);
    let public = folder.path().join("signer.pub");
    convert("kjv-4m", &set, &["--nodes", "2", "--sign", path(&key)]);
    assert!(findings(&set, &public).is_empty());
    // The bytes are those that signing afterwards gives.
    let signature = |set: &Path| fs::read(set.join("node-1/model.sig")).unwrap();
    let other = folder.path().join("other");
    convert("kjv-4m", &other, &["--nodes", "2"]);
    succeed(&["sign", path(&other), "--key", path(&key)]);
    assert!(signature(&set) == signature(&other));
    // A key that cannot be read is found before anything is written.
    let third = folder.path().join("third");
    let source = crate::harness::data("kjv-4m");
    let missing = folder.path().join("missing");
    let args = ["convert", path(&source), "-o", path(&third), "--sign", path(&missing)];
    assert!(fail(2, &args).contains("missing"));
    assert!(!third.exists());
}
