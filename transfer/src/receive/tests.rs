//! The store, its journal, and the port; whole pushes are end-to-end tests.

use std::{
    fs,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use shardpack_manifests::{Digest, Manifest};

use super::{journal::Journal, *};
use crate::package_set::{SetPlan, write_set};
use crate::protocol::{ChunkMap, PackageKey, Timeouts};
use crate::release::{Release, ReleasePackage, SignedRelease};

mod random_operations;
mod versions;

fn manifest() -> Manifest {
    let directory = tempfile::tempdir().unwrap();
    write_set(directory.path(), &SetPlan { ranks: 1, ..SetPlan::default() });
    Manifest::parse(&fs::read(directory.path().join("node-0/manifest.json")).unwrap()).unwrap()
}

#[test]
fn journal_gives_back_what_was_listed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("journal");
    let digest = Digest::of(b"manifest");
    assert_eq!(Journal::read(&path, digest).unwrap(), None);
    let mut held = ChunkMap::empty(&manifest());
    held.insert(2, 1);
    let mut journal = Journal::create(&path, digest, &held).unwrap();
    journal.append(&[(0, 0), (3, 1)]).unwrap();
    assert_eq!(Journal::read(&path, digest).unwrap(), Some(vec![(2, 1), (0, 0), (3, 1)]));
    assert_eq!(Journal::read(&path, Digest::of(b"other")).unwrap(), None);
}

#[test]
fn torn_or_zeroed_tail_of_a_journal_lists_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("journal");
    let digest = Digest::of(b"manifest");
    let mut journal = Journal::create(&path, digest, &ChunkMap::empty(&manifest())).unwrap();
    journal.append(&[(2, 0), (2, 1)]).unwrap();
    let whole = fs::read(&path).unwrap();
    let check = |bytes: &[u8], expected: Option<usize>| {
        fs::write(&path, bytes).unwrap();
        let found = Journal::read(&path, digest).unwrap().map(|chunks| chunks.len());
        assert_eq!(found, expected, "{} bytes", bytes.len());
    };
    for len in 0..whole.len() {
        check(&whole[..len], len.checked_sub(40).map(|records| records / 16));
    }
    check(&[&whole[..], &[0; 64]].concat(), Some(2));
    let mut flipped = whole.clone();
    flipped[44] ^= 1;
    check(&flipped, Some(0));
}

#[test]
fn store_is_used_by_one_process_at_a_time() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path()).unwrap();
    assert!(matches!(Store::open(root.path()), Err(StoreError::Locked { .. })));
    drop(store);
    Store::open(root.path()).unwrap();
}

#[test]
fn package_is_filled_by_one_connection_at_a_time() {
    let root = tempfile::tempdir().unwrap();
    let store = Arc::new(Store::open(root.path()).unwrap());
    let key = |rank| PackageKey { layout: Digest::of(b"layout"), rank };
    let first = store.claim(key(0), Duration::ZERO).unwrap();
    assert!(matches!(store.claim(key(0), Duration::ZERO), Err(StoreError::Busy { .. })));
    store.claim(key(1), Duration::ZERO).unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| store.claim(key(0), NEVER).map(drop));
        drop(first);
        waiting.join().unwrap().unwrap();
    });
}

/// A prepared package of its own set, put there as `cp -r` would.
fn put(root: &Path, plan: &SetPlan) -> PackageKey {
    let directory = tempfile::tempdir().unwrap();
    let set = write_set(directory.path(), &SetPlan { ranks: 1, ..plan.clone() });
    let key = PackageKey { layout: set.ids.layout, rank: 0 };
    fs::create_dir_all(root.join("packages")).unwrap();
    let to = root.join("packages").join(key.to_string());
    fs::rename(directory.path().join("node-0"), to).unwrap();
    key
}

fn small(seed: u64) -> SetPlan {
    SetPlan { own_bytes: 100, shared_bytes: 10, seed, ..SetPlan::default() }
}

#[test]
fn activation_keeps_the_one_before_for_each_model() {
    let root = tempfile::tempdir().unwrap();
    let keys: Vec<PackageKey> = (1..4).map(|seed| put(root.path(), &small(seed))).collect();
    let other = put(root.path(), &SetPlan { name: "other", ..small(9) });
    let store = Arc::new(Store::open(root.path()).unwrap());
    assert_eq!(store.packages().unwrap().len(), 4);
    assert_eq!(store.activate(keys[0]).unwrap(), None);
    assert_eq!(store.activate(keys[1]).unwrap(), Some(keys[0]));
    assert_eq!(store.activate(keys[1]).unwrap(), Some(keys[0]), "again changes nothing");
    assert_eq!(store.activate(keys[2]).unwrap(), Some(keys[1]));
    assert_eq!(store.activate(other).unwrap(), None);
    drop(store);
    let active = Store::open(root.path()).unwrap().active().unwrap();
    let tiny = &active.models["tiny"];
    assert_eq!((tiny.package(), tiny.previous()), (Some(keys[2]), Some(keys[1])));
    let other_model = &active.models["other"];
    assert_eq!((other_model.package(), other_model.previous()), (Some(other), None));
}

#[test]
fn only_prepared_packages_are_activated() {
    let root = tempfile::tempdir().unwrap();
    let store = Arc::new(Store::open(root.path()).unwrap());
    let key = PackageKey { layout: Digest::of(b"layout"), rank: 0 };
    assert!(matches!(store.activate(key), Err(StoreError::Unknown { .. })));
    assert!(store.active().unwrap().models.is_empty());
    fs::write(root.path().join("active.json"), r#"{"format":3,"models":{}}"#).unwrap();
    let error = store.active().unwrap_err();
    assert!(matches!(error, StoreError::Record { .. }));
    assert!(error.to_string().contains("fsck"), "{error}");
}

#[test]
fn record_of_the_version_before_opens_and_is_carried_over() {
    let root = tempfile::tempdir().unwrap();
    let keys: Vec<PackageKey> = (1..4).map(|seed| put(root.path(), &small(seed))).collect();
    let path = root.path().join("active.json");
    let [current, previous] = [keys[1], keys[0]];
    let old = format!(
        r#"{{"format":1,"models":{{"tiny":{{"current":"{current}","previous":"{previous}"}}}}}}"#
    );
    fs::write(&path, old).unwrap();
    let store = Arc::new(Store::open(root.path()).unwrap());
    let active = store.active().unwrap();
    let tiny = &active.models["tiny"];
    assert_eq!((tiny.package(), tiny.previous()), (Some(current), Some(previous)));
    let signed = record(&store, keys[2], 2);
    store.prepare_release(0, signed.clone(), ReleaseOrder::Newer).unwrap();
    assert_eq!(store.commit_release("tiny", signed.digest()).unwrap(), Some(current));
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.contains(r#""format":2"#), "{text}");
    let history = &store.active().unwrap().models["tiny"].history;
    assert_eq!(history.iter().map(|it| it.package).collect::<Vec<_>>(), [current, previous]);
}

/// A record of a release of this one-node package.
fn record(store: &Store, key: PackageKey, number: u64) -> SignedRelease {
    let package = store.package(key).unwrap();
    let model = model_name(&package.read_manifest().unwrap());
    let manifest = package.manifest_digest().unwrap();
    let packages = vec![ReleasePackage { package: key, manifest }];
    let release = Release::new(model, number, None, key.layout, packages);
    SignedRelease::sign(release, None).unwrap()
}

#[test]
fn release_is_pending_until_it_is_committed_and_an_older_one_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let keys: Vec<PackageKey> = (1..4).map(|seed| put(root.path(), &small(seed))).collect();
    let store = Arc::new(Store::open(root.path()).unwrap());
    let current = || store.active().unwrap().models.get("tiny").and_then(ActiveModel::package);
    let records: Vec<SignedRelease> =
        (0..3).map(|index| record(&store, keys[index], 5 + index as u64)).collect();
    let prepare = |index: usize, order| store.prepare_release(0, records[index].clone(), order);
    let commit = |index: usize| store.commit_release("tiny", records[index].digest());
    let abort = |index: usize| store.abort_release("tiny", records[index].digest());
    let refused = |result: Result<_, StoreError>, expected: &str| {
        let error = result.unwrap_err();
        assert_eq!(error.code(), crate::protocol::FailureCode::Refused);
        assert!(error.to_string().contains(expected), "{error}");
    };
    refused(commit(0).map(drop), "not pending");
    assert!(!abort(0).unwrap(), "there is nothing to drop");
    assert_eq!(prepare(0, ReleaseOrder::Newer).unwrap(), ReleaseState::Pending);
    assert_eq!(current(), None);
    assert_eq!((commit(0).unwrap(), current()), (None, Some(keys[0])));
    assert_eq!(commit(0).unwrap(), None, "again changes nothing");
    assert_eq!(prepare(0, ReleaseOrder::Newer).unwrap(), ReleaseState::Current);
    refused(abort(0).map(drop), "current here");
    prepare(1, ReleaseOrder::Newer).unwrap();
    assert_eq!((abort(1).unwrap(), current()), (true, Some(keys[0])));
    refused(commit(1).map(drop), "not pending");
    prepare(2, ReleaseOrder::Newer).unwrap();
    assert_eq!((commit(2).unwrap(), current()), (Some(keys[0]), Some(keys[2])));
    refused(prepare(1, ReleaseOrder::Newer).map(drop), "--allow-rollback");
    prepare(1, ReleaseOrder::Any).unwrap();
    assert_eq!((commit(1).unwrap(), current()), (Some(keys[2]), Some(keys[1])));
    // A package that is not the release's, under its key.
    let path = root.path().join("packages").join(keys[0].to_string()).join("manifest.json");
    fs::write(&path, fs::read_to_string(&path).unwrap() + "\n").unwrap();
    let error = prepare(0, ReleaseOrder::Any).unwrap_err();
    assert!(matches!(error, StoreError::OtherManifest { .. }), "{error}");
}

#[test]
fn only_loopback_is_served() {
    let check = |address: &str| {
        let error = bind(address).unwrap_err();
        assert!(error.to_string().contains("mutual TLS"), "{error}");
    };
    ["0.0.0.0:0", "[::]:0", "192.0.2.1:80", "[::ffff:192.0.2.1]:80"].into_iter().for_each(check);
    assert!(matches!(bind("nowhere"), Err(ServeError::Address { .. })));
    bind("127.0.0.1:0").unwrap();
    let root = tempfile::tempdir().unwrap();
    let node = Node::new(Arc::new(Store::open(root.path()).unwrap()), options(TIMEOUTS).0);
    let open = TcpListener::bind("0.0.0.0:0").unwrap();
    assert!(matches!(node.serve(&open, &Shutdown::new()), Err(ServeError::NotLoopback { .. })));
}

/// Longer than any test: who waits is woken by what the test is about.
const NEVER: Duration = Duration::from_hours(1000);

const TIMEOUTS: Timeouts = Timeouts { connect: NEVER, idle: NEVER, frame: NEVER, progress: NEVER };

type Events = Arc<Mutex<Vec<ReceiveEvent>>>;

fn options(timeouts: Timeouts) -> (NodeOptions, Events) {
    let events = Events::default();
    let heard = Arc::clone(&events);
    let observer = Box::new(move |event: &ReceiveEvent| heard.lock().unwrap().push(event.clone()));
    (NodeOptions { timeouts, observer, start_rank: Box::new(|_, _| Ok(true.into())) }, events)
}

/// Sends `bytes` to a fresh node and returns what comes back, and why the node hung up.
fn talk(bytes: &[u8], timeouts: Timeouts) -> (Vec<u8>, String) {
    let root = tempfile::tempdir().unwrap();
    let (options, events) = options(timeouts);
    let node = Node::new(Arc::new(Store::open(root.path()).unwrap()), options);
    let (listener, shutdown) = (bind("127.0.0.1:0").unwrap(), Shutdown::new());
    let address = listener.local_addr().unwrap();
    let mut answer = Vec::new();
    thread::scope(|scope| {
        scope.spawn(|| node.serve(&listener, &shutdown).unwrap());
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_mins(10))).unwrap();
        stream.write_all(bytes).unwrap();
        stream.read_to_end(&mut answer).unwrap();
        drop(stream);
        let ended = || {
            let events = events.lock().unwrap();
            events.iter().any(|event| matches!(event, ReceiveEvent::Disconnected { .. }))
        };
        while !ended() {
            thread::yield_now();
        }
        shutdown.stop();
    });
    let events = events.lock().unwrap();
    let problem = events.iter().find_map(|event| match event {
        ReceiveEvent::Disconnected { problem, .. } => problem.clone(),
        _ => None,
    });
    (answer, problem.unwrap_or_default())
}

#[test]
fn strangers_are_told_and_hung_up_on() {
    let (answer, problem) = talk(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", TIMEOUTS);
    assert_eq!(problem, "not a frame of shardpack's transfer protocol");
    assert!(String::from_utf8_lossy(&answer).contains(&problem), "the stranger hears it too");
    let (_, problem) = talk(b"SPTF\x01\x07\0\0\0\0\0\0", TIMEOUTS);
    assert_eq!(problem, "message type 7 does not belong here");
}

#[test]
fn silent_or_dawdling_peer_is_hung_up_on() {
    let brief = Duration::from_millis(50);
    let (_, problem) = talk(b"", Timeouts { idle: brief, ..TIMEOUTS });
    assert_eq!(problem, "nothing came within 0.05 s");
    let (_, problem) = talk(b"SPTF", Timeouts { frame: brief, ..TIMEOUTS });
    assert_eq!(problem, "a message took longer than 0.05 s");
}
