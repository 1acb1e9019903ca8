//! What verification finds, and how it says so.

use std::{
    fs::{self, OpenOptions},
    os::unix::fs::{FileExt, symlink},
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
};

use super::*;
use crate::{
    CHUNK_BYTES, PackageSet,
    package_set::{OWN_FILE, SHARED_FILE, SetPlan, write_set},
    set::SET_FILE,
};

const CHUNKS: VerifyOptions = VerifyOptions { tensors: TensorCheck::Skip };

fn set() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    write_set(directory.path(), &SetPlan::default());
    directory
}

fn lines(report: &Report) -> Vec<String> {
    report.findings.iter().map(ToString::to_string).collect()
}

/// Damages a fresh set and expects exactly these findings.
fn check(damage: impl Fn(&Path), expected: &[&str]) {
    let directory = set();
    damage(directory.path());
    let report = verify_set(directory.path(), CHUNKS, &|_| {});
    let found = lines(&report);
    assert_eq!(found.len(), expected.len(), "{found:#?}");
    for (found, expected) in found.iter().zip(expected) {
        assert!(found.contains(expected), "expected {expected:?} in {found:?}");
    }
}

fn flip(path: &Path, offset: u64) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 1], offset).unwrap();
}

fn resize(path: &Path, size_bytes: u64) {
    OpenOptions::new().write(true).open(path).unwrap().set_len(size_bytes).unwrap();
}

#[test]
fn whole_set_is_clean_and_every_byte_is_read_once() {
    let directory = set();
    let (planned, read) = (AtomicU64::new(0), AtomicU64::new(0));
    let report = verify_set(directory.path(), CHUNKS, &|event| match event {
        VerifyEvent::Planned { size_bytes } => planned.store(size_bytes, Ordering::Relaxed),
        VerifyEvent::Read { size_bytes } => {
            read.fetch_add(size_bytes, Ordering::Relaxed);
        }
    });
    assert!(report.is_clean(), "{:#?}", lines(&report));
    let plan = SetPlan::default();
    let expected = 2 * (plan.own_bytes + plan.shared_bytes + 3 + 5_000);
    assert_eq!(report.read_bytes, expected);
    assert_eq!((planned.into_inner(), read.into_inner()), (expected, expected));
    assert_eq!((report.packages, report.files, report.chunks), (2, 10, 2 * (3 + 2 + 3)));
}

#[test]
fn flipped_byte_names_file_chunk_range_and_tensors() {
    let own = |set: &Path| set.join("node-1").join(OWN_FILE);
    check(
        |set| flip(&own(set), 0),
        &[&format!("node-1: {OWN_FILE}: chunk 0 (bytes 0..4194304) changed, part of layers.0.w")],
    );
    check(
        |set| flip(&own(set), CHUNK_BYTES),
        &["bytes 4194304..8388608) changed, part of layers.0.w"],
    );
    check(
        |set| {
            flip(&own(set), CHUNK_BYTES);
            flip(&own(set), 2 * CHUNK_BYTES - 1);
        },
        &["bytes 4194304..8388608) changed, part of layers.0.w, layers.1.w"],
    );
    check(|set| flip(&own(set), 2 * CHUNK_BYTES + 12_344), &["chunk 2 (bytes 8388608..8400953)"]);
    // A byte of the header is in no tensor.
    check(
        |set| flip(&set.join("node-1").join(SHARED_FILE), 9),
        &["chunk 0 (bytes 0..4194304) changed"],
    );
    check(|set| flip(&set.join("node-0/config.json"), 1), &["config.json: chunk 0 (bytes 0..3)"]);
}

#[test]
fn every_problem_is_reported_not_only_the_first() {
    check(
        |set| {
            flip(&set.join("node-0").join(OWN_FILE), 1);
            flip(&set.join("node-0").join(OWN_FILE), CHUNK_BYTES + 1);
            fs::remove_file(set.join("node-0/tokenizer.json")).unwrap();
            fs::write(set.join("node-1/notes.txt"), "x").unwrap();
            resize(&set.join("node-1").join(SHARED_FILE), 10);
        },
        &[
            "node-0: tokenizer.json: missing",
            "node-0: model-00001-of-00001.safetensors: chunk 0",
            "node-0: model-00001-of-00001.safetensors: chunk 1",
            "node-1: model-shared-00001-of-00001.safetensors: 10 bytes, expected 4194381",
            "node-1: notes.txt: not listed",
        ],
    );
}

#[test]
fn lengths_and_strangers_are_told_apart() {
    let own = |set: &Path| set.join("node-0").join(OWN_FILE);
    check(|set| resize(&own(set), 8_400_954), &["8400954 bytes, expected 8400953"]);
    check(|set| resize(&own(set), 0), &[": 0 bytes, expected"]);
    check(|set| fs::create_dir(set.join("node-0/deep")).unwrap(), &["deep: not listed"]);
    check(|set| fs::write(set.join("node-0/.DS_Store"), "x").unwrap(), &[]);
    check(|set| fs::write(set.join("node-0/model.sig"), "x").unwrap(), &[]);
    check(|set| fs::remove_dir_all(set.join("node-1")).unwrap(), &["node-1: directory missing"]);
}

#[test]
fn links_and_special_files_are_refused() {
    let swap = |set: &Path, file: &str| {
        fs::rename(set.join("node-0").join(file), set.join("elsewhere")).unwrap();
        symlink(set.join("elsewhere"), set.join("node-0").join(file)).unwrap();
    };
    check(|set| swap(set, OWN_FILE), &["a link, expected a regular file"]);
    check(|set| swap(set, "manifest.json"), &["manifest.json: a link"]);
    check(
        |set| symlink("config.json", set.join("node-0/model.sig")).unwrap(),
        &["model.sig: a link"],
    );
    check(
        |set| {
            fs::rename(set.join("node-0"), set.join("moved")).unwrap();
            symlink("moved", set.join("node-0")).unwrap();
        },
        &["node-0: a link"],
    );
    check(
        |set| {
            fs::remove_file(set.join("node-0/config.json")).unwrap();
            fs::create_dir(set.join("node-0/config.json")).unwrap();
        },
        &["config.json: a directory"],
    );
    check(
        |set| {
            let path = set.join("node-0/config.json");
            fs::remove_file(&path).unwrap();
            std::os::unix::net::UnixListener::bind(&path).unwrap();
        },
        &["config.json: a socket"],
    );
}

#[test]
fn manifest_must_parse_and_be_the_sets() {
    let write = |name: &'static str, text: &'static str| {
        move |set: &Path| fs::write(set.join(name), text).unwrap()
    };
    check(write("node-0/manifest.json", "{}"), &["node-0: manifest.json: digest"]);
    check(
        |set| fs::remove_file(set.join("node-0/manifest.json")).unwrap(),
        &["manifest.json: missing"],
    );
    check(write("set.json", "{"), &["set.json: cannot be used"]);
    check(|set| fs::remove_file(set.join("set.json")).unwrap(), &["set.json: missing"]);
    let directory = set();
    fs::write(directory.path().join("node-0/manifest.json"), "[]").unwrap();
    let report = verify_package(&directory.path().join("node-0"), None, CHUNKS, &|_| {});
    assert_eq!(lines(&report), ["node-0: manifest.json: cannot be used"]);
}

/// Rewrites `set.json` after a change to it.
fn edit_set(directory: &Path, edit: impl Fn(&mut PackageSet)) {
    let path = directory.join(SET_FILE);
    let mut set = PackageSet::parse(&fs::read(&path).unwrap()).unwrap();
    edit(&mut set);
    fs::write(path, serde_json::to_vec(&set).unwrap()).unwrap();
}

#[test]
fn packages_that_do_not_belong_together_are_found() {
    check(
        |set| edit_set(set, |set| set.packages.swap(0, 1)),
        &["node-1: rank: expected 0, found 1", "node-0: rank: expected 1, found 0"],
    );
    check(
        |set| edit_set(set, |set| drop(set.packages.pop())),
        &["node-0: ranks: expected 1, found 2"],
    );
    check(
        |set| edit_set(set, |set| set.ids.weights = Digest::of(b"other")),
        &["node-0: weights id: expected", "node-1: weights id: expected"],
    );
    check(
        |set| edit_set(set, |set| set.packages[1].size_bytes += 1),
        &["node-1: size in bytes: expected"],
    );
    // A package of another set with the same shape, entered under its own digest.
    check(
        |set| {
            let other = tempfile::tempdir().unwrap();
            let written = write_set(other.path(), &SetPlan { seed: 9, ..SetPlan::default() });
            fs::remove_dir_all(set.join("node-1")).unwrap();
            fs::rename(other.path().join("node-1"), set.join("node-1")).unwrap();
            edit_set(set, |set| set.packages[1] = written.packages[1].clone());
        },
        &["node-1: weights id", "node-1: model id", "node-1: layout id"],
    );
}

/// Rewrites a package's manifest after a change to it.
fn edit_manifest(package: &Path, edit: impl Fn(&mut Manifest)) {
    let path = package.join("manifest.json");
    let mut manifest = Manifest::parse(&fs::read(&path).unwrap()).unwrap();
    edit(&mut manifest);
    fs::write(path, serde_json::to_vec(&manifest).unwrap()).unwrap();
}

#[test]
fn ids_that_do_not_follow_from_the_manifest_are_found() {
    let directory = set();
    let package = directory.path().join("node-0");
    edit_manifest(&package, |manifest| manifest.ids.layout = Digest::of(b"other"));
    let report = verify_package(&package, None, CHUNKS, &|_| {});
    assert!(lines(&report)[0].contains("layout id: "), "{:?}", lines(&report));
    edit_manifest(&package, |manifest| manifest.ids.model = Digest::of(b"other"));
    let report = verify_package(&package, None, CHUNKS, &|_| {});
    assert_eq!(report.findings.len(), 2, "{:?}", lines(&report));
}

#[test]
fn tensor_with_a_wrong_digest_is_found_on_request() {
    let directory = set();
    let package = directory.path().join("node-0");
    edit_manifest(&package, |manifest| manifest.tensors[1].blake3 = Digest::of(b"other"));
    assert!(verify_package(&package, None, CHUNKS, &|_| {}).is_clean());
    let tensors = VerifyOptions { tensors: TensorCheck::Hash };
    let report = verify_package(&package, None, tensors, &|_| {});
    let expected = format!(
        "node-0: {OWN_FILE}: tensor \"layers.1.w\" (bytes 4200476..8400953) does not have its digest"
    );
    assert_eq!(lines(&report), [expected]);
    let plan = SetPlan::default();
    assert_eq!(report.read_bytes, 2 * (plan.own_bytes + plan.shared_bytes) + 5_003);
}
