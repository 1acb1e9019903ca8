//! Packages that come back from nodes: as they were written, whatever interrupts it.

use super::{
    tap::{FETCHED, Fate, HEADER_BYTES, Place, Tap, Way},
    *,
};
use crate::{
    harness::{fail, kill, path, paused, run, succeed, text},
    running::Running,
};

fn report(output: &str) -> Value {
    serde_json::from_str(output).unwrap()
}

#[test]
fn pulled_set_is_the_one_that_was_pushed() {
    let scene = Scene::new(&SetPlan::default());
    fs::write(scene.set_dir().join("node-1/model.sig"), "a signature").unwrap();
    let nodes = [0, 1].map(|rank| Running::node(&scene.store(rank), None));
    let to = nodes.each_ref().map(Running::address).join(",");
    let early = run(&["pull", &to, "-o", path(&scene.directory.path().join("early"))]);
    assert_eq!(early.status.code(), Some(2));
    assert!(text(&early.stderr).contains("no current release"), "{}", text(&early.stderr));
    succeed(&["push", path(&scene.set_dir()), "--to", &to]);
    // In any order of the nodes.
    let from = [nodes[1].address(), nodes[0].address()].join(",");
    let output = scene.directory.path().join("output");
    let pull = ["pull", &from, "-o", path(&output), "--json"];
    let first = report(&succeed(&pull));
    assert_eq!((&first["ok"], &first["is_set"]), (&json!(true), &json!(true)), "{first}");
    assert_eq!(files(&output), files(&scene.set_dir()), "every byte, set.json too");
    succeed(&["verify", path(&output)]);
    let fetched = |report: &Value| {
        let bytes = |package: &Value| package["fetched_bytes"].as_u64().unwrap();
        report["packages"].as_array().unwrap().iter().map(bytes).sum::<u64>()
    };
    let all: u64 = scene.set.packages.iter().map(|package| package.size_bytes).sum();
    assert_eq!(fetched(&first), all);
    assert_eq!(fetched(&report(&succeed(&pull))), 0, "what is there is not fetched again");

    // One rank alone is a package and no set; what is in its place is left alone.
    let single = scene.directory.path().join("single");
    let address = nodes[1].address();
    let pull = ["pull", &address, "-o", path(&single), "--model", "tiny"];
    succeed(&pull);
    assert_clean(&single.join("node-1"));
    assert!(!single.join("set.json").exists() && !single.join(".pull").exists());
    fs::write(single.join("node-1/config.json"), "{ }").unwrap();
    let said = fail(2, &pull);
    assert!(said.contains("is not this package") && said.contains("config.json"), "{said}");
    assert_eq!(fs::read(single.join("node-1/config.json")).unwrap(), b"{ }");
    // By its key, without a release.
    let package = key(&scene.set, 1).to_string();
    let by_key = scene.directory.path().join("by-key");
    succeed(&["pull", &address, "-o", path(&by_key), "--package", &package]);
    assert_eq!(files(&by_key.join("node-1")), files(&scene.set_dir().join("node-1")));
}

#[test]
fn interrupted_pull_goes_on_where_it_was_and_believes_no_byte() {
    let plan = SetPlan { ranks: 1, own_bytes: 40 * CHUNK_BYTES + 5, ..SetPlan::default() };
    let scene = Scene::new(&plan);
    let node = Running::node(&scene.store(0), None);
    succeed(&["push", path(&scene.set_dir()), "--to", &node.address()]);
    let output = scene.directory.path().join("output");
    let all = scene.set.packages[0].size_bytes;
    let address = node.address();
    let pull = ["pull", &address, "-o", path(&output), "--json"];
    // A bent chunk is refused, and what came before is kept.
    let given = Arc::new(AtomicU64::new(0));
    let bent = Tap::with(&address, move |place: Place| {
        let is_chunk = (place.way, place.kind) == (Way::Out, FETCHED) && place.at >= HEADER_BYTES;
        let before = if is_chunk { given.fetch_add(1, Ordering::SeqCst) } else { 0 };
        if before == 9 * CHUNK_BYTES { Fate::Bent(1) } else { Fate::Passes }
    });
    let through = bent.address.to_string();
    let said = fail(2, &["pull", &through, "-o", path(&output)]);
    assert!(said.contains("other bytes came than those of"), "{said}");
    assert!(!output.join("node-0").exists(), "half a package has no name");
    // Killed at the end, when all is here and not yet verified.
    kill(paused("pull:verifying:0", &pull));
    assert!(!output.join("node-0").exists());
    let last = report(&succeed(&pull));
    let package = &last["packages"][0];
    assert_eq!(package["fetched_bytes"], 0, "{package}");
    assert_eq!(files(&output), files(&scene.set_dir()));

    // Damage on the node is told by name and not fetched.
    let stored = scene.store(0).join("packages").join(key(&scene.set, 0).to_string());
    let mut bytes = fs::read(stored.join(OWN_FILE)).unwrap();
    bytes[CHUNK_BYTES as usize + 3] ^= 1;
    fs::write(stored.join(OWN_FILE), bytes).unwrap();
    let other = scene.directory.path().join("other");
    let said = fail(2, &["pull", &address, "-o", path(&other)]);
    assert!(said.contains("chunk 1") && said.contains("cluster repair"), "{said}");
    let set = path(&scene.set_dir()).to_owned();
    succeed(&["cluster", "repair", &address, "--set", &set]);
    let pull = ["pull", &address, "-o", path(&other), "--json"];
    let repaired = report(&succeed(&pull));
    let fetched = repaired["packages"][0]["fetched_bytes"].as_u64().unwrap();
    assert!(fetched < all, "what came before the damaged chunk is not fetched again: {fetched}");
    assert_eq!(files(&other), files(&scene.set_dir()));
}
