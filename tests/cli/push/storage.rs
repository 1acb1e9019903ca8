//! What nodes store: removal of what nobody needs while pushes and ranks go on, checks, shared files.

use std::os::unix::fs::MetadataExt as _;

use tempfile::{TempDir, tempdir};

use super::*;
use crate::{
    harness::{convert, fail, kill, path, paused, run, succeed, text},
    running::{Running, ask, wait_until},
};

fn gc(node: &Running, options: &[&str]) -> Value {
    let address = node.address();
    let all = [&["cluster", "gc", &address, "--json"], options].concat();
    let report: Value = serde_json::from_str(&succeed(&all)).unwrap();
    report["nodes"][0].clone()
}

/// The reasons of what a report removed, or kept.
fn reasons(report: &Value, what: &str) -> Vec<String> {
    let entries = report[what].as_array().unwrap();
    let mut reasons: Vec<String> =
        entries.iter().map(|entry| entry["reason"].as_str().unwrap().to_owned()).collect();
    reasons.sort();
    reasons
}

/// Everything that is not needed, however young.
const ALL: [&str; 4] = ["--keep", "0", "--older-than", "0"];

fn packages(store: &Path) -> usize {
    fs::read_dir(store.join("packages")).unwrap().count()
}

#[test]
fn gc_removes_nothing_that_a_rank_or_a_push_or_a_release_needs() {
    let folder = tempdir().unwrap();
    let store = folder.path().join("store");
    let sets: Vec<PathBuf> = ["4", "6", "8"]
        .iter()
        .map(|bits| {
            let output = folder.path().join(format!("set-{bits}"));
            // One name: releases of one model.
            convert("kjv-4m", &output, &["--bits", bits, "--name", "kjv"])
        })
        .collect();
    // Its ranks end with their server.
    let options = ["--listen", "127.0.0.1:0", "--json", "--threads", "1", "--keep-ranks", "0"];
    let node =
        Running::start(&[&["node"], &options[..], &["--store", path(&store)]].concat(), None);
    let address = node.address();
    let push = |set: &Path| succeed(&["push", path(set), "--to", &address]);
    push(&sets[0]);
    let server = Running::serve(&sets[0], &["--nodes", &address]);
    assert_eq!(ask(&server.url(), "John 11:35"), "Jesus wept.");
    push(&sets[1]);
    // The release before is kept; with it, what runs.
    assert_eq!(reasons(&gc(&node, &[]), "removed"), [""; 0]);
    // A push of another is under way, with some of its chunks there.
    let file = "model-00001-of-00001.safetensors";
    let args = ["push", path(&sets[2]), "--to", &address, "--streams", "1"];
    let pushing = paused(&format!("push:chunk:0:{file}:0"), &args);
    let report = gc(&node, &ALL);
    assert_eq!(reasons(&report, "removed"), [""; 0], "{report}");
    assert_eq!(reasons(&report, "kept"), ["in_use", "push", "release"], "{report}");
    kill(pushing);
    // It was interrupted, and will be resumed within the day. Then it is there and not yet active.
    let pushing = paused("push:prepared:0", &args);
    let report = gc(&node, &["--keep", "0"]);
    assert_eq!(reasons(&report, "kept"), ["in_use", "release", "young"], "{report}");
    kill(pushing);
    push(&sets[2]);
    assert_eq!(ask(&server.url(), "John 11:35"), "Jesus wept.", "it is served all along");
    let dry = gc(&node, &[&ALL[..], &["--dry-run"]].concat());
    assert_eq!(reasons(&dry, "removed"), ["old_release"], "{dry}");
    assert_eq!(packages(&store), 3);
    let report = gc(&node, &ALL);
    assert_eq!(reasons(&report, "removed"), ["old_release"], "{report}");
    assert_eq!(report["freed_bytes"], dry["freed_bytes"]);
    assert!(report["freed_bytes"].as_u64().unwrap() > 1_000_000, "{report}");
    assert_eq!(packages(&store), 2);
    assert_eq!(ask(&server.url(), "John 11:35"), "Jesus wept.");
    drop(server);
    wait_until("the rank's package is in nobody's use", || {
        reasons(&gc(&node, &ALL), "removed") == ["never_activated"]
    });
    assert_eq!(packages(&store), 1);
    let server = Running::serve(&sets[2], &["--nodes", &address]);
    assert_eq!(ask(&server.url(), "John 11:35"), "Jesus wept.");
}

/// Sets of one model with a shared file, and a node.
fn two_releases() -> (TempDir, Vec<PackageSet>, Running) {
    let folder = tempdir().unwrap();
    let node = Running::node(&folder.path().join("store"), None);
    let sets = [1, 2].map(|seed| {
        let directory = folder.path().join(format!("set-{seed}"));
        let own_bytes = 2 * CHUNK_BYTES + 9;
        let plan = SetPlan { ranks: 1, seed, own_bytes, ..SetPlan::default() };
        let set = write_set(&directory, &plan);
        succeed(&["push", path(&directory), "--to", &node.address()]);
        set
    });
    (folder, sets.to_vec(), node)
}

#[test]
fn identical_files_are_stored_once_and_removal_of_one_package_leaves_them_to_the_other() {
    let (folder, sets, node) = two_releases();
    let packages = folder.path().join("store/packages");
    let file = |set: &PackageSet| packages.join(key(set, 0).to_string()).join(SHARED_FILE);
    let inode = |set: &PackageSet| fs::metadata(file(set)).unwrap().ino();
    assert_eq!(inode(&sets[0]), inode(&sets[1]), "one file with two names");
    let mut client = NodeClient::connect(Endpoint::plain(node.address()), TIMEOUTS).unwrap();
    let listing = client.list().unwrap();
    let shared = fs::metadata(file(&sets[0])).unwrap().len();
    for package in listing["packages"].as_array().unwrap() {
        // config.json and empty.txt are the same too.
        let told = package["shared_bytes"].as_u64().unwrap();
        assert!((shared..shared + 100).contains(&told), "{listing}");
        assert!(package["size_bytes"].as_u64().unwrap() > told + 2 * CHUNK_BYTES, "{listing}");
    }
    let report = gc(&node, &["--keep", "0"]);
    assert_eq!(reasons(&report, "removed"), ["old_release"]);
    let removed = report["removed"][0]["size_bytes"].as_u64().unwrap();
    let freed = report["freed_bytes"].as_u64().unwrap();
    assert!(freed + shared <= removed && freed > 2 * CHUNK_BYTES, "{report}");
    assert_clean(&packages.join(key(&sets[1], 0).to_string()));
    assert!(!packages.join(key(&sets[0], 0).to_string()).exists());
    succeed(&["cluster", "fsck", &node.address()]);
}

#[test]
fn fsck_names_the_damaged_chunk_and_a_push_repairs_it() {
    let (folder, sets, node) = two_releases();
    let address = node.address();
    let said = succeed(&["cluster", "fsck", &address]);
    assert!(said.contains("ok") && !said.contains("damaged"), "{said}");
    let package = folder.path().join("store/packages").join(key(&sets[1], 0).to_string());
    let file = package.join(OWN_FILE);
    let mut bytes = fs::read(&file).unwrap();
    bytes[CHUNK_BYTES as usize + 5] ^= 4;
    fs::write(&file, bytes).unwrap();
    fs::create_dir(folder.path().join("store/staging/notes")).unwrap();
    let output = run(&["cluster", "fsck", &address]);
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    assert!(said.contains(OWN_FILE) && said.contains("chunk 1"), "{said}");
    assert!(said.contains("staging/notes: not of this store"), "{said}");
    let json: Value =
        serde_json::from_slice(&run(&["cluster", "fsck", &address, "--json"]).stdout).unwrap();
    assert_eq!(json["ok"], false, "{json}");
    // The manifest is as it was, so the push verifies the package, and sends the chunk.
    let set = folder.path().join("set-2");
    succeed(&["push", path(&set), "--to", &address]);
    let said = succeed(&["cluster", "fsck", &address]);
    assert!(!said.contains("damaged"), "{said}");
}

#[test]
fn damaged_record_of_releases_is_told_and_rebuilt() {
    let (folder, sets, node) = two_releases();
    let address = node.address();
    let record = folder.path().join("store/active.json");
    fs::write(&record, "{\"format\":2,\"models\":{\"tiny\":").unwrap();
    // It hides nothing else, and nothing is removed on its word.
    let mut client = NodeClient::connect(Endpoint::plain(&address), TIMEOUTS).unwrap();
    let listing = client.list().unwrap();
    assert_eq!(listing["packages"].as_array().unwrap().len(), 2, "{listing}");
    let problem = listing["problem"].as_str().unwrap();
    assert!(problem.contains("active.json") && problem.contains("fsck"), "{problem}");
    assert!(fail(2, &["cluster", "gc", &address]).contains("--rebuild"));
    let output = run(&["cluster", "fsck", &address]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("--rebuild"), "{}", text(&output.stderr));
    let output = run(&["cluster", "fsck", &address, "--rebuild"]);
    let said = text(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("of tiny there are several packages"), "{said}");
    assert!(folder.path().join("store/active.json.damaged-0").exists());
    succeed(&["push", path(&folder.path().join("set-2")), "--to", &address]);
    let json: Value = serde_json::from_slice(&fs::read(&record).unwrap()).unwrap();
    let expected = key(&sets[1], 0).to_string();
    assert_eq!(json["models"]["tiny"]["current"]["package"], expected, "{json}");
}
