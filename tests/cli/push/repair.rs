//! Damaged chunks of stored packages: replaced from other nodes or a set, by hand and by a server.

use super::{streams::proxy_each, *};
use crate::{
    harness::{convert, path, run, succeed, text},
    running::{Running, ask},
};

/// Chunks that are damaged in a store.
const DAMAGED: u64 = 50;

/// Turns one bit of a chunk of a file, at a place that its number decides.
fn damage(file: &Path, chunk: u64) {
    use std::os::unix::fs::FileExt as _;
    let opened = fs::OpenOptions::new().read(true).write(true).open(file).unwrap();
    let size_bytes = opened.metadata().unwrap().len();
    let range = shardpack_manifests::digest::chunk_range(size_bytes, chunk);
    let at = range.start + chunk.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (range.end - range.start);
    let mut byte = [0];
    opened.read_exact_at(&mut byte, at).unwrap();
    opened.write_all_at(&[byte[0] ^ 0x20], at).unwrap();
}

/// Numbers of `count` chunks among `chunks`, from a seed.
fn some_chunks(seed: u64, chunks: u64, count: u64) -> Vec<u64> {
    let mut all: Vec<u64> = (0..chunks).collect();
    let mut state = seed;
    for index in (1..all.len()).rev() {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        all.swap(index, (state >> 33) as usize % (index + 1));
    }
    all.truncate(count as usize);
    all
}

fn repaired(output: &std::process::Output, node: usize) -> Value {
    let report: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|_| panic!("{}", text(&output.stderr)));
    report["nodes"][node].clone()
}

#[test]
fn damaged_chunks_come_from_another_node_and_nothing_else_is_sent() {
    let folder = tempfile::tempdir().unwrap();
    let set = folder.path().join("set");
    let shared_bytes = 60 * CHUNK_BYTES + 4_321;
    let plan = SetPlan { own_bytes: 2 * CHUNK_BYTES + 5, shared_bytes, ..SetPlan::default() };
    let document = write_set(&set, &plan);
    let nodes = [0, 1].map(|rank| Running::node(&folder.path().join(format!("{rank}")), None));
    let addresses = nodes.each_ref().map(Running::address);
    succeed(&["push", path(&set), "--to", &addresses.join(",")]);
    let package =
        |rank: u32| folder.path().join(format!("{rank}/packages/{}", key(&document, rank)));
    let file = package(0).join(SHARED_FILE);
    let chunks = some_chunks(7, 61, DAMAGED);
    for chunk in &chunks {
        damage(&file, *chunk);
    }
    let bytes: u64 = chunks
        .iter()
        .map(|chunk| shardpack_manifests::digest::chunk_range(shared_bytes, *chunk))
        .map(|range| range.end - range.start)
        .sum();
    let told = run(&["cluster", "fsck", &addresses[0], "--json"]);
    let damaged = repaired(&told, 0)["packages"][0]["damaged"].as_array().unwrap().len();
    assert_eq!(damaged as u64, DAMAGED);

    let output = run(&["cluster", "repair", &addresses[0], &addresses[1], "--json"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report = repaired(&output, 0);
    let expected = json!({ "chunks": DAMAGED, "bytes": bytes });
    assert_eq!(report["repaired"], expected, "{report}");
    assert_eq!(report["sources"], json!({ &addresses[1]: expected }), "{report}");
    assert_eq!(repaired(&output, 1)["damaged_chunks"], 0);
    assert_clean(&package(0));

    // A rank's own weights are on no other node: they come from the set, or not at all.
    damage(&package(0).join(OWN_FILE), 2);
    fs::remove_file(package(0).join("config.json")).unwrap();
    let shared = fs::OpenOptions::new().write(true).open(&file).unwrap();
    shared.set_len(59 * CHUNK_BYTES + 1).unwrap();
    let output = run(&["cluster", "repair", &addresses[0], &addresses[1], "--json"]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stdout));
    let report = repaired(&output, 0);
    assert_eq!(report["repaired"]["chunks"], 3, "{report}");
    let remaining = report["remaining"].to_string();
    assert!(remaining.contains(OWN_FILE) && remaining.contains("chunk 2"), "{remaining}");
    assert!(text(&output.stderr).contains("--set"), "{}", text(&output.stderr));
    // A set that is damaged there too gives nothing.
    damage(&set.join("node-0").join(OWN_FILE), 2);
    let with_set = ["cluster", "repair", &addresses[0], "--set", path(&set), "--json"];
    let output = run(&with_set);
    assert_eq!(output.status.code(), Some(1));
    assert!(repaired(&output, 0)["remaining"].to_string().contains("damaged in"));
    damage(&set.join("node-0").join(OWN_FILE), 2);
    let output = run(&with_set);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(repaired(&output, 0)["sources"][path(&set)]["chunks"], 1);
    assert_clean(&package(0));
}

#[test]
fn chunk_is_served_and_replaced_only_if_it_is_what_the_manifest_says() {
    let scene = Scene::new(&SetPlan { ranks: 1, ..SetPlan::default() });
    let node = scene.node(0);
    assert!(scene.push(&[node.address], ALL).is_done());
    let package = key(&scene.set, 0);
    let file = node.package(&scene.set, 0).join(OWN_FILE);
    let manifest = fs::read(scene.set_dir().join("node-0/manifest.json")).unwrap();
    let manifest = Manifest::parse(&manifest).unwrap();
    let index = manifest.files.iter().position(|entry| entry.name == OWN_FILE).unwrap() as u32;
    let place = ChunkPlace { package, file: index, chunk: 1 };
    let connect = || NodeClient::connect(node.address, TIMEOUTS).unwrap();
    let right = connect().fetch(place).unwrap();
    let start = CHUNK_BYTES as usize;
    assert_eq!(right, fs::read(&file).unwrap()[start..2 * start]);
    assert_eq!(connect().put(place, right.clone()).unwrap(), PutOutcome::Intact);
    damage(&file, 1);
    let refused = connect().fetch(place).unwrap_err().to_string();
    assert!(refused.contains("chunk 1") && refused.contains("is damaged"), "{refused}");
    let mut wrong = right.clone();
    wrong[5] ^= 1;
    for bytes in [wrong, right[1..].to_vec(), Vec::new()] {
        let refused = connect().put(place, bytes).unwrap_err().to_string();
        assert!(refused.contains("is not replaced"), "{refused}");
    }
    let mut client = connect();
    assert_eq!(client.put(place, right.clone()).unwrap(), PutOutcome::Replaced);
    assert_eq!(client.put(place, right.clone()).unwrap(), PutOutcome::Intact);
    assert_eq!(client.fetch(place).unwrap(), right);
    assert_clean(&node.package(&scene.set, 0));
    let is_repair = |event: &&ReceiveEvent| matches!(event, ReceiveEvent::ChunkRepaired { .. });
    assert_eq!(node.events.lock().unwrap().iter().filter(is_repair).count(), 1);
    for (file, chunk) in [(index, 3), (99, 0), (u32::MAX, u32::MAX)] {
        let unknown = ChunkPlace { package, file, chunk };
        assert!(connect().fetch(unknown).unwrap_err().to_string().contains("has no chunk"));
    }
}

#[test]
fn server_repairs_a_damaged_package_and_comes_up_by_itself() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("set");
    let set = convert("kjv-4m", &output, &["--nodes", "2", "--bits", "8"]);
    let nodes = [0, 1].map(|rank| Running::node(&folder.path().join(format!("{rank}")), None));
    let addresses = nodes.each_ref().map(Running::address).join(",");
    succeed(&["push", path(&set), "--to", &addresses]);
    for rank in 0..2 {
        let packages = folder.path().join(format!("{rank}/packages"));
        let package = fs::read_dir(packages).unwrap().next().unwrap().unwrap().path();
        damage(&package.join(OWN_FILE), 0);
    }
    let server = Running::serve(&set, &["--nodes", &addresses]);
    assert_eq!(ask(&server.url(), "John 11:35"), "Jesus wept.");
    let said = succeed(&["cluster", "fsck", &nodes[0].address(), &nodes[1].address()]);
    assert!(!said.contains("damaged"), "{said}");
}

/// A number that follows from a state, which it changes.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *state >> 33
}

/// Connections that are cut and bits that are turned at random offsets: a hundred faults, or twenty for
/// each of `SHARDPACK_KILLS`.
#[test]
fn push_goes_on_by_itself_after_any_fault_and_sends_again_at_most_what_was_in_flight() {
    let kills: u64 = std::env::var("SHARDPACK_KILLS").map_or(5, |kills| kills.parse().unwrap());
    let scene = Scene::new(&SetPlan { ranks: 1, ..SetPlan::default() });
    let manifest = fs::read(scene.set_dir().join("node-0/manifest.json")).unwrap();
    let held = ChunkMap::empty(&Manifest::parse(&manifest).unwrap());
    let chunks = held.missing().count() as u64;
    let size_bytes = scene.set.packages[0].size_bytes;
    let (mut faults, mut pushes) = (0, 0);
    while faults < 20 * kills {
        pushes += 1;
        // Each of the first connections has a fault of its own.
        let met = Arc::new(AtomicU64::new(0));
        let store = scene.directory.path().join(format!("store-of-{pushes}"));
        let node = TestNode::start(&store);
        let (seen, mut state) = (Arc::clone(&met), pushes * 0x9e37_79b9);
        let kinds: Vec<(u64, u64)> =
            (0..4).map(|_| (next(&mut state) % 3, next(&mut state) % size_bytes)).collect();
        let address = proxy_each(node.address, move |number, at, bytes| {
            let Some((kind, offset)) = kinds.get(number) else { return true };
            let Some(inside) = offset.checked_sub(at).filter(|it| *it < bytes.len() as u64) else {
                return true;
            };
            seen.fetch_add(1, Ordering::SeqCst);
            if *kind == 0 {
                bytes[inside as usize] ^= 1;
            }
            *kind == 0
        });
        let quick =
            Retries { attempts: 8, first_pause: Duration::from_millis(2), ..Retries::USUAL };
        let options = PushOptions { retries: quick, ..push_options(ALL, TIMEOUTS, 2, 1) };
        let targets = Target::in_rank_order(&[address.to_string()]);
        let report = push(&scene.opened(), &targets, &options, &|_| {}).unwrap();
        let met = met.load(Ordering::SeqCst);
        faults += met.max(1);
        // A fault in the first words, or in those of the activation, is for the next push.
        let again = if report.is_done() { report } else { scene.push(&[node.address], ALL) };
        assert_eq!(progress(&again), [NodeProgress::Activated], "{}", error_of(&again, 0));
        assert_clean(&node.package(&scene.set, 0));
        let sent = again.nodes[0].traffic.sent_chunks;
        assert!(sent <= chunks + met * 2, "push {pushes}: {sent} chunks, {met} faults");
        assert!(node.stored_chunks() as u64 <= chunks, "push {pushes}: a chunk was stored twice");
        drop(node);
        fs::remove_dir_all(store).unwrap();
    }
}
