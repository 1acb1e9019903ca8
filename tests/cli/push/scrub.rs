//! Stored packages that are read again by their node, slowly.

use std::time::Duration;

use super::*;
use crate::{
    harness::{path, run, succeed},
    running::Running,
};

/// A node that reads a package again a second after it was read, at `rate`.
fn node(store: &Path, rate: &str) -> Running {
    let scrub = ["--scrub-interval", "1", "--scrub-rate", rate];
    let listen = ["node", "--listen", "127.0.0.1:0", "--json", "--store", path(store)];
    Running::start(&[&listen[..], &scrub].concat(), None)
}

#[test]
fn damage_on_a_disk_is_found_without_anybody_asking_and_told_to_whoever_looks() {
    let folder = tempfile::tempdir().unwrap();
    let (set, store) = (folder.path().join("set"), folder.path().join("0"));
    let document = write_set(&set, &SetPlan { ranks: 1, ..SetPlan::default() });
    let node = node(&store, "1G");
    let address = node.address();
    succeed(&["push", path(&set), "--to", &address]);
    let health = || run(&["cluster", "health", &address, "--json"]);
    assert_eq!(health().status.code(), Some(0));
    let package = store.join("packages").join(key(&document, 0).to_string());
    let file = package.join(SHARED_FILE);
    let mut bytes = fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    fs::write(&file, &bytes).unwrap();
    node.wait_for("is damaged on the disk: ");
    // Read again, it is told again, with what to do.
    node.wait_for("`shardpack cluster repair` replaces what is damaged");
    let events = succeed(&["cluster", "events", &address, "--json"]);
    assert!(events.contains("damaged on the disk") && events.contains(SHARED_FILE), "{events}");
    succeed(&["cluster", "repair", &address, "--set", path(&set)]);
    assert!(fs::read(&file).unwrap() != bytes, "it is repaired");
    assert_eq!(node.terminate(), Some(0));
    let noted = fs::read_to_string(store.join("scrub.json")).unwrap();
    assert!(noted.contains(&key(&document, 0).to_string()), "{noted}");
}

#[test]
fn reading_again_ends_with_the_node() {
    let folder = tempfile::tempdir().unwrap();
    let (set, store) = (folder.path().join("set"), folder.path().join("0"));
    // Hours' worth: whoever waited for its end would wait longer than any test does.
    let plan =
        SetPlan { ranks: 1, own_bytes: 5_000_000, shared_bytes: 5_000_000, ..SetPlan::default() };
    write_set(&set, &plan);
    let node = node(&store, "1K");
    succeed(&["push", path(&set), "--to", &node.address()]);
    // It looks for what it has not read for a second, every second.
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(node.terminate(), Some(0));
    assert!(!store.join("scrub.json").exists(), "it was not read to its end");
}
