//! Pushes between a real converter and real nodes, over loopback sockets and real files.

use std::{
    fs,
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use serde_json::{Value, json};
use shardpack_identity::Endpoint;
use shardpack_manifests::{
    CHUNK_BYTES, Manifest, PackageSet,
    verify::{TensorCheck, VerifyOptions, verify_package, verify_set},
};
use shardpack_transfer::protocol::{
    ChunkMap, ChunkPlace, Intent, Join, Message, Offer, PackageKey, PutOutcome, SendError,
    Timeouts, Wire,
};
use shardpack_transfer::push::{
    Activation, NodeError, NodeProgress, OpenSet, PushEvent, PushMode, PushOptions, PushReport,
    Retries, SharedFiles, Target, push,
};
use shardpack_transfer::receive::{
    Node, NodeClient, NodeOptions, ReceiveEvent, Shutdown, Store, bind,
};

use crate::{
    harness::files,
    package_set::{OWN_FILE, SHARED_FILE, SetPlan, write_set},
    ports::free_port,
    running::HANG,
    sets::kjv_for_two,
};

mod activation;
mod faults;
mod pull;
mod relay;
mod repair;
mod scrub;
mod storage;
mod streams;
mod tap;

/// Only a test that hangs waits that long.
const TIMEOUT: Duration = HANG;

/// Longer than any test: no node and no push is too slow for the other.
const TIMEOUTS: Timeouts = {
    let never = Duration::from_hours(1000);
    Timeouts { connect: never, idle: never, frame: never, progress: never }
};

const ALL: PushMode = PushMode::Send(Activation::WhenAllPrepared);

/// A node in this process, over a store that outlives it.
struct TestNode {
    root: PathBuf,
    address: SocketAddr,
    shutdown: Shutdown,
    events: Arc<Mutex<Vec<ReceiveEvent>>>,
    thread: Option<JoinHandle<()>>,
}

impl TestNode {
    fn start(root: &Path) -> Self {
        Self::start_with(root, TIMEOUTS, |_, _| {})
    }

    /// `hook` runs on the node's own thread at each event.
    fn start_with(
        root: &Path,
        timeouts: Timeouts,
        hook: impl Fn(&ReceiveEvent, &Shutdown) + Send + Sync + 'static,
    ) -> Self {
        let store = Arc::new(Store::open(root).unwrap());
        let listener = bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (shutdown, events) = (Shutdown::new(), Arc::new(Mutex::new(Vec::new())));
        let (heard, stop) = (Arc::clone(&events), shutdown.clone());
        let observer = Box::new(move |event: &ReceiveEvent| {
            heard.lock().unwrap().push(event.clone());
            hook(event, &stop);
        });
        let start_rank =
            Box::new(|package: &shardpack_transfer::receive::PackageDir, with: Value| {
                if with["fail"] == true {
                    return Err("no engine today".to_owned());
                }
                Ok(json!({"rank": package.key.rank, "with": with}))
            });
        let node = Node::new(store, NodeOptions { timeouts, observer, start_rank });
        let served = shutdown.clone();
        let thread = Some(thread::spawn(move || node.serve(&listener, &served).unwrap()));
        Self { root: root.to_owned(), address, shutdown, events, thread }
    }

    fn stored_chunks(&self) -> usize {
        let events = self.events.lock().unwrap();
        events.iter().filter(|event| matches!(event, ReceiveEvent::ChunkStored { .. })).count()
    }

    fn package(&self, set: &PackageSet, rank: u32) -> PathBuf {
        self.root.join("packages").join(key(set, rank).to_string())
    }
}

impl Drop for TestNode {
    fn drop(&mut self) {
        self.shutdown.stop();
        let result = self.thread.take().map(JoinHandle::join);
        if !thread::panicking() {
            result.unwrap().unwrap();
        }
    }
}

fn key(set: &PackageSet, rank: u32) -> PackageKey {
    PackageKey { layout: set.ids.layout, rank }
}

/// A set and stores for its nodes.
struct Scene {
    directory: tempfile::TempDir,
    set: PackageSet,
}

impl Scene {
    fn new(plan: &SetPlan) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let set = write_set(&directory.path().join("set"), plan);
        Self { directory, set }
    }

    fn opened(&self) -> OpenSet {
        OpenSet::open(&self.set_dir()).unwrap()
    }

    fn set_dir(&self) -> PathBuf {
        self.directory.path().join("set")
    }

    fn node(&self, number: u32) -> TestNode {
        TestNode::start(&self.store(number))
    }

    fn store(&self, number: u32) -> PathBuf {
        self.directory.path().join(format!("store-{number}"))
    }

    fn push(&self, addresses: &[SocketAddr], mode: PushMode) -> PushReport {
        push_set(&self.set_dir(), addresses, mode)
    }
}

/// Options of a push that reports what breaks.
fn push_options(
    mode: PushMode,
    timeouts: Timeouts,
    window_chunks: usize,
    streams: usize,
) -> PushOptions {
    let retries = Retries::NONE;
    PushOptions {
        mode,
        timeouts,
        window_chunks,
        streams,
        retries,
        bytes_per_second: None,
        shared_files: SharedFiles::Relayed,
    }
}

fn push_set(set: &Path, addresses: &[SocketAddr], mode: PushMode) -> PushReport {
    let addresses: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    let options = push_options(mode, TIMEOUTS, 2, 1);
    push(&OpenSet::open(set).unwrap(), &Target::in_rank_order(&addresses), &options, &|_| {})
        .unwrap()
}

fn progress(report: &PushReport) -> Vec<NodeProgress> {
    report.nodes.iter().map(|node| node.progress).collect()
}

fn assert_clean(package: &Path) {
    let options = VerifyOptions { tensors: TensorCheck::Hash };
    let report = verify_package(package, None, options, &|_| {});
    let lines: Vec<String> = report.findings.iter().map(ToString::to_string).collect();
    assert_eq!(lines, [""; 0], "{}", package.display());
}

fn error_of(report: &PushReport, rank: usize) -> String {
    report.nodes[rank].error.as_ref().map(ToString::to_string).unwrap_or_default()
}

#[test]
fn every_node_gets_its_own_package_as_a_copy_would_give_it() {
    let scene = Scene::new(&SetPlan::default());
    fs::write(scene.set_dir().join("node-1/model.sig"), "a signature").unwrap();
    let nodes = [scene.node(0), scene.node(1)];
    let report = scene.push(&nodes.each_ref().map(|node| node.address), ALL);
    assert_eq!(progress(&report), [NodeProgress::Activated; 2], "{}", error_of(&report, 0));
    for (rank, node) in nodes.iter().enumerate() {
        let package = node.package(&scene.set, rank as u32);
        assert_clean(&package);
        let source = scene.set_dir().join(format!("node-{rank}"));
        let names = |path: &Path| {
            let mut names: Vec<_> =
                fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            names
        };
        assert_eq!(names(&package), names(&source));
        for name in names(&source) {
            assert_eq!(
                fs::read(package.join(&name)).unwrap(),
                fs::read(source.join(&name)).unwrap()
            );
        }
        assert_eq!(fs::read_dir(node.root.join("staging")).unwrap().count(), 0);
        let traffic = report.nodes[rank].traffic;
        let come = traffic.sent_bytes + traffic.relayed_bytes;
        assert_eq!(come, scene.set.packages[rank].size_bytes);
    }
}

#[test]
fn converted_set_verifies_and_arrives_whole() {
    let directory = tempfile::tempdir().unwrap();
    let set_dir = kjv_for_two(&directory.path().join("set"));
    let options = VerifyOptions { tensors: TensorCheck::Hash };
    let report = verify_set(&set_dir, options, &|_| {});
    let lines: Vec<String> = report.findings.iter().map(ToString::to_string).collect();
    assert_eq!(lines, [""; 0]);
    let nodes = [0, 1].map(|rank| TestNode::start(&directory.path().join(format!("store-{rank}"))));
    let pushed = push_set(&set_dir, &nodes.each_ref().map(|node| node.address), ALL);
    assert_eq!(progress(&pushed), [NodeProgress::Activated; 2], "{}", error_of(&pushed, 0));
    for (rank, node) in nodes.iter().enumerate() {
        let package = fs::read_dir(node.root.join("packages")).unwrap().next().unwrap().unwrap();
        assert_clean(&package.path());
        assert_eq!(files(&package.path()), files(&set_dir.join(format!("node-{rank}"))));
    }
}

#[test]
fn second_push_of_the_same_set_sends_nothing() {
    let scene = Scene::new(&SetPlan { ranks: 1, ..SetPlan::default() });
    let node = scene.node(0);
    assert!(scene.push(&[node.address], ALL).is_done());
    let dry = scene.push(&[node.address], PushMode::DryRun);
    assert_eq!(
        (dry.nodes[0].traffic.missing_bytes, dry.nodes[0].progress),
        (0, NodeProgress::Asked)
    );
    let again = scene.push(&[node.address], ALL);
    assert_eq!(progress(&again), [NodeProgress::Activated]);
    assert_eq!(again.nodes[0].traffic.sent_chunks, 0);
}

#[test]
fn dry_run_says_what_is_missing_and_changes_nothing() {
    let scene = Scene::new(&SetPlan { ranks: 1, ..SetPlan::default() });
    let node = scene.node(0);
    let report = scene.push(&[node.address], PushMode::DryRun);
    let traffic = report.nodes[0].traffic;
    assert_eq!(traffic.missing_bytes, scene.set.packages[0].size_bytes);
    assert_eq!((traffic.missing_chunks, traffic.sent_chunks, traffic.held_bytes), (8, 0, 0));
    assert!(traffic.free_bytes > 0);
    for folder in ["packages", "staging"] {
        assert_eq!(fs::read_dir(node.root.join(folder)).unwrap().count(), 0, "{folder}");
    }
}

#[test]
fn one_failing_node_stops_neither_the_others_nor_is_anything_activated() {
    let scene = Scene::new(&SetPlan::default());
    let node = scene.node(1);
    // Nobody listens.
    let closed = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let report = scene.push(&[closed, node.address], ALL);
    assert_eq!(progress(&report), [NodeProgress::NotPrepared, NodeProgress::Prepared]);
    assert!(matches!(report.nodes[0].error, Some(NodeError::Connect(_))));
    assert!(!node.root.join("active.json").exists());
    let asked = scene.push(&[closed, node.address], PushMode::Send(Activation::WhatIsPrepared));
    assert_eq!(progress(&asked), [NodeProgress::NotPrepared, NodeProgress::Activated]);
    assert!(node.root.join("active.json").exists());
}

#[test]
fn part_of_a_set_is_pushed_by_rank_and_not_activated_by_itself() {
    let scene = Scene::new(&SetPlan::default());
    let node = scene.node(1);
    let targets = [Target { rank: 1, node: node.address.into() }];
    let options = push_options(ALL, TIMEOUTS, 2, 1);
    let report = push(&scene.opened(), &targets, &options, &|_| {}).unwrap();
    assert_eq!(progress(&report), [NodeProgress::Prepared]);
    assert_clean(&node.package(&scene.set, 1));
}

#[test]
fn node_killed_at_any_chunk_takes_up_where_it_was() {
    let plan = SetPlan { ranks: 1, ..SetPlan::default() };
    for kill_at in [1, 3, 6, 8] {
        let scene = Scene::new(&plan);
        let stored = AtomicU64::new(0);
        let node = TestNode::start_with(&scene.store(0), TIMEOUTS, move |event, shutdown| {
            if matches!(event, ReceiveEvent::ChunkStored { .. })
                && stored.fetch_add(1, Ordering::SeqCst) + 1 == kill_at
            {
                shutdown.stop();
            }
        });
        let first = scene.push(&[node.address], ALL);
        assert_eq!(progress(&first), [NodeProgress::NotPrepared], "killed at {kill_at}");
        drop(node);
        let node = scene.node(0);
        let second = scene.push(&[node.address], ALL);
        assert_eq!(progress(&second), [NodeProgress::Activated], "{}", error_of(&second, 0));
        assert_clean(&node.package(&scene.set, 0));
        assert_eq!(second.nodes[0].traffic.sent_chunks, 8 - kill_at, "killed at {kill_at}");
    }
}

/// Passes a connection on to `to`, byte for byte, but lets `fault` change what the controller
/// sends, given the offset of its first byte; `false` cuts the connection.
fn proxy(
    to: SocketAddr,
    fault: impl Fn(u64, &mut [u8]) -> bool + Send + Sync + 'static,
) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        let (near, _) = listener.accept().unwrap();
        carry(near, to, fault);
    });
    address
}

/// Passes one connection on, as [`proxy`] does.
fn carry(mut near: TcpStream, to: SocketAddr, fault: impl Fn(u64, &mut [u8]) -> bool) {
    let mut far = TcpStream::connect(to).unwrap();
    let (mut back_from, mut back_to) = (far.try_clone().unwrap(), near.try_clone().unwrap());
    thread::spawn(move || {
        let _ = std::io::copy(&mut back_from, &mut back_to);
        let _ = back_to.shutdown(std::net::Shutdown::Both);
    });
    let (mut buffer, mut offset) = (vec![0; 64 << 10], 0);
    while let Ok(len @ 1..) = near.read(&mut buffer) {
        if !fault(offset, &mut buffer[..len]) || far.write_all(&buffer[..len]).is_err() {
            break;
        }
        offset += len as u64;
    }
    let _ = far.shutdown(std::net::Shutdown::Both);
    let _ = near.shutdown(std::net::Shutdown::Both);
}

#[test]
fn chunk_damaged_on_its_way_is_refused_by_name_and_the_rest_is_kept() {
    let scene = Scene::new(&SetPlan { ranks: 1, ..SetPlan::default() });
    let node = scene.node(0);
    // Past the offer and the first chunk of the weights.
    let target = CHUNK_BYTES + 500_000;
    let bent = proxy(node.address, move |offset, bytes| {
        if let Some(byte) = target.checked_sub(offset).and_then(|at| bytes.get_mut(at as usize)) {
            *byte ^= 0x10;
        }
        true
    });
    let report = scene.push(&[bent], ALL);
    let Some(NodeError::Send(SendError::ChunkRefused { file, chunk, .. })) = &report.nodes[0].error
    else {
        panic!("expected a refusal, found {:?}", report.nodes[0].error);
    };
    assert_eq!((file.as_str(), *chunk), (OWN_FILE, 1));
    let kept = node.stored_chunks() as u64;
    let again = scene.push(&[node.address], ALL);
    assert_eq!(progress(&again), [NodeProgress::Activated], "{}", error_of(&again, 0));
    assert!(kept >= 2, "what came before was kept");
    assert!(again.nodes[0].traffic.sent_chunks <= 8 - 2);
    assert_clean(&node.package(&scene.set, 0));
}

#[test]
fn connection_cut_anywhere_leaves_a_push_that_can_go_on() {
    let scene = Scene::new(&SetPlan { ranks: 1, ..SetPlan::default() });
    let node = scene.node(0);
    let total = scene.set.packages[0].size_bytes;
    let mut sent = 0;
    let cuts = [3, 200, CHUNK_BYTES / 2, 2 * CHUNK_BYTES + 9_000, 3 * CHUNK_BYTES + 1];
    for cut in cuts {
        let cutting = proxy(node.address, move |offset, bytes| offset + (bytes.len() as u64) < cut);
        let report = scene.push(&[cutting], ALL);
        sent += report.nodes[0].traffic.sent_bytes;
        assert!(!report.is_done(), "cut at {cut}");
    }
    let last = scene.push(&[node.address], ALL);
    assert_eq!(progress(&last), [NodeProgress::Activated], "{}", error_of(&last, 0));
    assert_eq!(node.stored_chunks(), 8, "no chunk is stored twice");
    let in_vain = sent + last.nodes[0].traffic.sent_bytes - total;
    assert!(in_vain <= cuts.len() as u64 * 2 * CHUNK_BYTES, "{in_vain} bytes were sent in vain");
    assert_clean(&node.package(&scene.set, 0));
}

#[test]
fn damage_in_the_set_itself_is_told_from_damage_on_the_way() {
    let scene = Scene::new(&SetPlan { ranks: 1, ..SetPlan::default() });
    let path = scene.set_dir().join("node-0").join(SHARED_FILE);
    let mut bytes = fs::read(&path).unwrap();
    bytes[5] ^= 1;
    fs::write(&path, bytes).unwrap();
    let node = scene.node(0);
    let report = scene.push(&[node.address], ALL);
    assert_eq!(
        error_of(&report, 0),
        format!(
            "{SHARED_FILE}: chunk 0 is damaged in the set itself; run `shardpack verify` on the set"
        )
    );
}

#[test]
fn next_version_sends_only_what_changed_and_keeps_the_one_before() {
    let plan = SetPlan { ranks: 1, ..SetPlan::default() };
    let (first, second) = (Scene::new(&plan), Scene::new(&SetPlan { seed: 7, ..plan.clone() }));
    let node = first.node(0);
    assert!(first.push(&[node.address], ALL).is_done());
    let dry = second.push(&[node.address], PushMode::DryRun).nodes[0].traffic;
    let report = second.push(&[node.address], ALL);
    assert_eq!(progress(&report), [NodeProgress::Activated], "{}", error_of(&report, 0));
    let traffic = report.nodes[0].traffic;
    // The replicated weights, config.json and empty.txt are the same.
    assert_eq!(traffic.reused_bytes, plan.shared_bytes + 3);
    assert_eq!(traffic.sent_bytes, plan.own_bytes + 5_000);
    assert_eq!((dry.missing_bytes, dry.reused_bytes), (traffic.sent_bytes, traffic.reused_bytes));
    let mut client = NodeClient::connect(node.address, TIMEOUTS).unwrap();
    let key_of = |set: &PackageSet| json!({"layout": set.ids.layout, "rank": 0});
    let active = client.list().unwrap()["active"]["tiny"].clone();
    let expected = json!({
        "current": key_of(&second.set),
        "previous": key_of(&first.set),
        "release": 2,
        "previous_release": 1,
    });
    assert_eq!(active, expected);
    // Back again.
    assert_eq!(client.activate(key(&first.set, 0)).unwrap(), Some(key(&second.set, 0)));
    assert_clean(&node.package(&first.set, 0));
}

#[test]
fn damaged_package_on_a_node_is_repaired_without_touching_what_shares_its_bytes() {
    let plan = SetPlan { ranks: 1, ..SetPlan::default() };
    let scene = Scene::new(&plan);
    let node = scene.node(0);
    assert!(scene.push(&[node.address], ALL).is_done());
    let path = node.package(&scene.set, 0).join(OWN_FILE);
    let mut bytes = fs::read(&path).unwrap();
    bytes[CHUNK_BYTES as usize + 3] ^= 1;
    fs::write(&path, bytes).unwrap();
    let report = scene.push(&[node.address], ALL);
    assert_eq!(progress(&report), [NodeProgress::Activated], "{}", error_of(&report, 0));
    assert_eq!(report.nodes[0].traffic.sent_chunks, 1, "only the damaged chunk is sent");
    assert_clean(&node.package(&scene.set, 0));
}

#[test]
fn chunk_damaged_while_staged_is_found_at_the_commit_and_sent_again() {
    let scene = Scene::new(&SetPlan { ranks: 1, ..SetPlan::default() });
    let root = scene.store(0);
    let staged = root.join("staging").join(key(&scene.set, 0).to_string()).join("package");
    let spoilt = staged.join(OWN_FILE);
    let once = AtomicU64::new(0);
    let node = TestNode::start_with(&root, TIMEOUTS, move |event, _| {
        if matches!(event, ReceiveEvent::Verifying { .. })
            && once.fetch_add(1, Ordering::SeqCst) == 0
        {
            let mut bytes = fs::read(&spoilt).unwrap();
            bytes[9] ^= 1;
            fs::write(&spoilt, bytes).unwrap();
        }
    });
    let first = scene.push(&[node.address], ALL);
    assert!(
        error_of(&first, 0).contains("chunk 0 (bytes 0..4194304) changed"),
        "{}",
        error_of(&first, 0)
    );
    assert!(!node.package(&scene.set, 0).exists(), "what is not verified is not listed");
    let second = scene.push(&[node.address], ALL);
    assert_eq!(progress(&second), [NodeProgress::Activated], "{}", error_of(&second, 0));
    assert_eq!(second.nodes[0].traffic.sent_chunks, 1);
}

#[test]
fn rank_is_started_on_request_from_a_prepared_package() {
    let scene = Scene::new(&SetPlan { ranks: 1, ..SetPlan::default() });
    let node = scene.node(0);
    let connect = || NodeClient::connect(node.address, TIMEOUTS).unwrap();
    let package = key(&scene.set, 0);
    let early = connect().start_rank(package, &json!({})).unwrap_err().to_string();
    assert!(early.contains("is not here"), "{early}");
    assert!(scene.push(&[node.address], ALL).is_done());
    let answer = connect().start_rank(package, &json!({"token": "t"})).unwrap();
    assert_eq!(answer, json!({"rank": 0, "with": {"token": "t"}}));
    let failed = connect().start_rank(package, &json!({"fail": true})).unwrap_err().to_string();
    assert!(failed.contains("no engine today"), "{failed}");
}

#[test]
fn full_disk_is_reported_before_the_first_byte() {
    let scene = Scene::new(&SetPlan { ranks: 1, ..SetPlan::default() });
    let store = Arc::new(Store::open(&scene.store(0)).unwrap().with_reserve(u64::MAX));
    let listener = bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let node = Node::new(
        store,
        NodeOptions {
            timeouts: TIMEOUTS,
            observer: Box::new(|_| {}),
            start_rank: Box::new(|_, _| Err(String::new())),
        },
    );
    let shutdown = Shutdown::new();
    thread::scope(|scope| {
        scope.spawn(|| node.serve(&listener, &shutdown).unwrap());
        let report = scene.push(&[address], ALL);
        shutdown.stop();
        assert!(error_of(&report, 0).contains("are free"), "{}", error_of(&report, 0));
        assert_eq!(report.nodes[0].traffic.sent_bytes, 0);
    });
}

#[test]
fn targets_must_fit_the_set() {
    let scene = Scene::new(&SetPlan::default());
    let check = |targets: &[(u32, &str)], expected: &str| {
        let targets: Vec<Target> = targets
            .iter()
            .map(|(rank, address)| Target { rank: *rank, node: Endpoint::plain(*address) })
            .collect();
        let options = push_options(ALL, TIMEOUTS, 2, 1);
        let error = push(&scene.opened(), &targets, &options, &|_| {}).unwrap_err();
        assert_eq!(error.to_string(), expected);
    };
    check(&[], "no node was given for any of the 2 packages");
    check(&[(2, "a:1")], "a:1 is to get rank 2, but the set has ranks 0 to 1");
    check(&[(0, "a:1"), (0, "b:1")], "rank 0 is given to two nodes");
    check(&[(0, "a:1"), (1, "a:1")], "a:1 is given twice");
    fs::remove_file(scene.set_dir().join("node-1").join(OWN_FILE)).unwrap();
    let path = scene.set_dir().join("node-1");
    check(&[(1, "a:1")], &format!("{} cannot be pushed", path.display()));
}

#[test]
fn nothing_leaves_this_machine_unprotected() {
    let scene = Scene::new(&SetPlan { ranks: 1, ..SetPlan::default() });
    let report = scene.push(&["192.0.2.1:9".parse().unwrap()], ALL);
    assert!(error_of(&report, 0).contains("mutual TLS"), "{}", error_of(&report, 0));
}

#[test]
fn silent_node_is_given_up_in_time() {
    let scene = Scene::new(&SetPlan { ranks: 1, ..SetPlan::default() });
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let targets = [Target { rank: 0, node: silent.local_addr().unwrap().into() }];
    let timeouts = Timeouts { idle: Duration::from_millis(50), ..TIMEOUTS };
    let options = push_options(ALL, timeouts, 2, 1);
    let report = push(&scene.opened(), &targets, &options, &|_| {}).unwrap();
    let Some(NodeError::Wire(error)) = &report.nodes[0].error else {
        panic!("expected a timeout, found {:?}", report.nodes[0].error);
    };
    assert_eq!(error.to_string(), "nothing came within 0.05 s");
}

/// A node that greets, answers the offer with `held` if there is any, and from then on only says
/// that it is at work.
fn busy_for_ever(listener: &TcpListener, held: Option<Vec<u8>>) {
    let (stream, _) = listener.accept().unwrap();
    let set_timeout = |stream: &TcpStream, t| stream.set_read_timeout(Some(t));
    let mut wire = Wire::new(stream, set_timeout, TIMEOUTS);
    assert!(matches!(wire.receive().unwrap(), Message::Hello { .. }));
    wire.send(&Message::hello()).unwrap();
    assert!(matches!(wire.receive().unwrap(), Message::Offer(_)));
    if let Some(held) = held {
        wire.send(&Message::Status { free_bytes: 0, reused_bytes: 0, held }).unwrap();
        assert_eq!(wire.receive().unwrap(), Message::Commit);
    }
    // Until the other side has had enough.
    while wire.send(&Message::Working { done_bytes: 7, total_bytes: 10 }).is_ok() {
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn node_that_works_for_ever_is_given_up_and_named() {
    let scene = Scene::new(&SetPlan { ranks: 1, ..SetPlan::default() });
    let manifest = fs::read(scene.set_dir().join("node-0/manifest.json")).unwrap();
    let mut held = ChunkMap::empty(&Manifest::parse(&manifest).unwrap());
    for (file, chunk, _) in held.clone().missing() {
        held.insert(file, chunk);
    }
    // In answer to the offer, and to the commit.
    for held in [None, Some(held.to_bytes())] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let node: Endpoint = listener.local_addr().unwrap().into();
        let node = thread::scope(|scope| {
            scope.spawn(|| busy_for_ever(&listener, held));
            let timeouts = Timeouts { progress: Duration::from_millis(300), ..TIMEOUTS };
            let options = push_options(ALL, timeouts, 2, 1);
            let targets = [Target { rank: 0, node }];
            let mut report = push(&scene.opened(), &targets, &options, &|_| {}).unwrap();
            report.nodes.remove(0)
        });
        assert_eq!(node.progress, NodeProgress::NotPrepared);
        assert_eq!(node.target.node.address(), listener.local_addr().unwrap().to_string());
        let error = node.error.unwrap();
        assert!(matches!(error, NodeError::Stalled { done_bytes: 7, total_bytes: 10, .. }));
        let text = error.to_string();
        assert!(text.contains("stayed at 7 of 10 bytes for 0.3 s"), "{text}");
    }
}

#[test]
fn push_waits_for_an_earlier_one_to_end() {
    let scene = Scene::new(&SetPlan { ranks: 1, ..SetPlan::default() });
    let node = scene.node(0);
    let stream = TcpStream::connect(node.address).unwrap();
    let mut earlier =
        Wire::new(stream, |stream: &TcpStream, t| stream.set_read_timeout(Some(t)), TIMEOUTS);
    earlier.send(&Message::hello()).unwrap();
    earlier.receive().unwrap();
    let read = |name: &str| fs::read(scene.set_dir().join(name)).unwrap();
    let (manifest, set) = (read("node-0/manifest.json"), read("set.json"));
    let offer = Offer { intent: Intent::Send, manifest, set, signature: Vec::new() };
    earlier.send(&Message::Offer(offer)).unwrap();
    assert!(matches!(earlier.receive().unwrap(), Message::Status { .. }));
    // It ends when the node says that the second one waits; one that falls silent is hung up on, as tests of the node
    // show.
    let earlier = Mutex::new(Some(earlier));
    let targets = Target::in_rank_order(&[node.address.to_string()]);
    let options = push_options(ALL, TIMEOUTS, 2, 1);
    let report = push(&scene.opened(), &targets, &options, &|event| {
        if matches!(event, PushEvent::Working { .. }) {
            earlier.lock().unwrap().take();
        }
    })
    .unwrap();
    assert!(earlier.lock().unwrap().is_none(), "the second one waited");
    assert_eq!(progress(&report), [NodeProgress::Activated], "{}", error_of(&report, 0));
}

#[test]
fn observer_hears_every_step_in_order() {
    let scene = Scene::new(&SetPlan { ranks: 1, ..SetPlan::default() });
    let node = scene.node(0);
    let heard = Mutex::new(Vec::new());
    let targets = Target::in_rank_order(&[node.address.to_string()]);
    let options = push_options(ALL, TIMEOUTS, 1, 1);
    push(&scene.opened(), &targets, &options, &|event| {
        let name = format!("{event:?}");
        heard.lock().unwrap().push(name.split(' ').next().unwrap().to_owned());
    })
    .unwrap();
    let mut heard = heard.into_inner().unwrap();
    let chunks = heard.iter().filter(|name| *name == "ChunkAcknowledged").count();
    assert_eq!(chunks, 8);
    heard.retain(|name| !name.starts_with("Chunk") && name != "Working");
    let expected = [
        "Connected",
        "Offered",
        "Committing",
        "Prepared",
        "PreparingRelease",
        "ReleasePending",
        "Activating",
        "Activated",
    ];
    assert_eq!(heard, expected);
}
