//! Pushes over several connections to one node, some of which die or damage what they carry.

use std::sync::atomic::AtomicUsize;

use shardpack_transfer::push::{NodeReport, PushEvent};

use super::*;
use crate::{
    harness::{kill, path, paused, run, succeed},
    running::Running,
};

const STREAMS: usize = 3;

/// 16 chunks of weights, and three files of one chunk.
fn scene() -> Scene {
    Scene::new(&SetPlan { ranks: 1, own_bytes: 13 * CHUNK_BYTES + 12_345, ..SetPlan::default() })
}

const CHUNKS: u64 = 14 + 2 + 3;

/// Pushes over several streams; the report, and the streams that were lost with why.
fn spread(scene: &Scene, address: SocketAddr) -> (NodeReport, Vec<(usize, String)>) {
    let options = push_options(ALL, TIMEOUTS, 6, STREAMS);
    let targets = Target::in_rank_order(&[address.to_string()]);
    let lost = Mutex::new(Vec::new());
    let mut report = push(&scene.opened(), &targets, &options, &|event| {
        if let PushEvent::StreamLost { stream, error, .. } = event {
            lost.lock().unwrap().push((*stream, error.to_string()));
        }
    })
    .unwrap();
    (report.nodes.remove(0), lost.into_inner().unwrap())
}

fn assert_active(scene: &Scene, node: &TestNode, report: &NodeReport) {
    let error = report.error.as_ref().map(ToString::to_string);
    assert_eq!((report.progress, error), (NodeProgress::Activated, None));
    assert_clean(&node.package(&scene.set, 0));
    assert_eq!(fs::read_dir(node.root.join("staging")).unwrap().count(), 0);
}

/// As [`proxy`], for any number of connections, which `fault` is told apart by.
pub(super) fn proxy_each(
    to: SocketAddr,
    fault: impl Fn(usize, u64, &mut [u8]) -> bool + Send + Sync + 'static,
) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let fault = Arc::new(fault);
    thread::spawn(move || {
        for (number, near) in listener.incoming().enumerate() {
            let fault = Arc::clone(&fault);
            thread::spawn(move || carry(near.unwrap(), to, |at, bytes| fault(number, at, bytes)));
        }
    });
    address
}

#[test]
fn several_streams_carry_one_package() {
    let scene = scene();
    let node = scene.node(0);
    let (report, lost) = spread(&scene, node.address);
    assert_active(&scene, &node, &report);
    assert_eq!(lost, []);
    let traffic = report.traffic;
    assert_eq!((traffic.streams, traffic.sent_chunks), (STREAMS, CHUNKS));
    assert_eq!(traffic.sent_bytes, scene.set.packages[0].size_bytes);
    assert_eq!(node.stored_chunks() as u64, CHUNKS, "no chunk is stored twice");
    let events = node.events.lock().unwrap();
    let joined =
        events.iter().filter(|event| matches!(event, ReceiveEvent::StreamJoined { .. })).count();
    assert_eq!(joined, STREAMS - 1);
}

#[test]
fn stream_that_dies_alone_leaves_its_chunks_to_the_others() {
    // The one that has offered the package, and those that have joined.
    for dying in 0..STREAMS {
        let scene = scene();
        let node = scene.node(0);
        let carried: [AtomicU64; STREAMS] = Default::default();
        let cutting = proxy_each(node.address, move |number, _, bytes| {
            // Connections after these are of the activation.
            let Some(mine) = carried.get(number) else { return true };
            mine.fetch_add(bytes.len() as u64, Ordering::SeqCst);
            let all_at_it = || carried.iter().all(|it| it.load(Ordering::SeqCst) > CHUNK_BYTES / 4);
            number != dying || !all_at_it()
        });
        let (report, lost) = spread(&scene, cutting);
        assert_active(&scene, &node, &report);
        assert_eq!(lost.len(), 1, "{lost:?}");
        assert!(report.traffic.sent_chunks <= CHUNKS + 3, "{:?}", report.traffic);
        assert!(node.stored_chunks() as u64 <= CHUNKS + 2, "what was answered is not sent again");
    }
}

#[test]
fn stream_that_cannot_join_does_not_fail_the_push() {
    let scene = scene();
    let node = scene.node(0);
    // Greeted, and gone while it joins.
    let cutting = proxy_each(node.address, |number, at, bytes| {
        number != 1 || at + (bytes.len() as u64) < 100
    });
    let (report, lost) = spread(&scene, cutting);
    assert_active(&scene, &node, &report);
    assert_eq!((lost.len(), report.traffic.sent_chunks), (1, CHUNKS));
}

#[test]
fn stream_that_damages_a_chunk_ends_and_the_chunk_goes_over_another() {
    let scene = scene();
    let node = scene.node(0);
    let bent = proxy_each(node.address, |number, at, bytes| {
        if let Some(byte) = (CHUNK_BYTES / 2).checked_sub(at).filter(|_| number == 1)
            && let Some(byte) = bytes.get_mut(byte as usize)
        {
            *byte ^= 0x10;
        }
        true
    });
    let (report, lost) = spread(&scene, bent);
    assert_active(&scene, &node, &report);
    let [(_, why)] = lost.as_slice() else { panic!("one stream is lost: {lost:?}") };
    assert!(why.contains("was refused: its BLAKE3 is"), "{why}");
    let refused = |event: &&ReceiveEvent| matches!(event, ReceiveEvent::ChunkRefused { .. });
    assert_eq!(node.events.lock().unwrap().iter().filter(refused).count(), 1);
}

#[test]
fn all_streams_lost_leave_a_push_that_can_go_on() {
    let scene = scene();
    let node = scene.node(0);
    let left = AtomicUsize::new(5 * CHUNK_BYTES as usize);
    let cutting = proxy_each(node.address, move |_, _, bytes| {
        left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(bytes.len()))
            .is_ok()
    });
    let (report, _) = spread(&scene, cutting);
    assert!(matches!(report.error, Some(NodeError::Wire(_))), "{:?}", report.error);
    let (again, lost) = spread(&scene, node.address);
    assert_active(&scene, &node, &again);
    assert_eq!(lost, []);
    let first = CHUNKS - again.traffic.sent_chunks;
    // Of the weights; three files are small.
    assert!((1..=5 + 3).contains(&first), "{first} chunks came through");
    assert_eq!(node.stored_chunks() as u64, CHUNKS, "no chunk is stored twice");
}

#[test]
fn node_that_ends_with_several_streams_takes_up_where_it_was() {
    for kill_at in [2, 9, CHUNKS] {
        let scene = scene();
        let stored = AtomicU64::new(0);
        let node = TestNode::start_with(&scene.store(0), TIMEOUTS, move |event, shutdown| {
            if matches!(event, ReceiveEvent::ChunkStored { .. })
                && stored.fetch_add(1, Ordering::SeqCst) + 1 == kill_at
            {
                shutdown.stop();
            }
        });
        let (first, _) = spread(&scene, node.address);
        assert_eq!(first.progress, NodeProgress::NotPrepared, "killed at {kill_at}");
        let events = Arc::clone(&node.events);
        drop(node);
        let was_stored = |event: &&ReceiveEvent| matches!(event, ReceiveEvent::ChunkStored { .. });
        let stored = events.lock().unwrap().iter().filter(was_stored).count() as u64;
        let node = scene.node(0);
        let (second, _) = spread(&scene, node.address);
        assert_active(&scene, &node, &second);
        assert_eq!(second.traffic.sent_chunks, CHUNKS - stored, "killed at {kill_at}");
    }
}

#[test]
fn stream_without_a_push_is_refused() {
    let scene = scene();
    let node = scene.node(0);
    let connect = || {
        let stream = TcpStream::connect(node.address).unwrap();
        let set_timeout = |stream: &TcpStream, t| stream.set_read_timeout(Some(t));
        let mut wire = Wire::new(stream, set_timeout, TIMEOUTS);
        wire.send(&Message::hello()).unwrap();
        wire.receive().unwrap();
        wire
    };
    let read = |name: &str| fs::read(scene.set_dir().join(name)).unwrap();
    let (bytes, set) = (read("node-0/manifest.json"), read("set.json"));
    let join = Join::of(&Manifest::parse(&bytes).unwrap(), &bytes);
    let refused = |join: Join| {
        let mut wire = connect();
        wire.send(&Message::Join(join)).unwrap();
        let Message::Failed(failure) = wire.receive().unwrap() else { panic!("not refused") };
        assert!(failure.message.contains("not under way"), "{}", failure.message);
    };
    refused(join);
    let mut first = connect();
    let offer = Offer { intent: Intent::Send, manifest: bytes, set, signature: Vec::new() };
    first.send(&Message::Offer(offer)).unwrap();
    assert!(matches!(first.receive().unwrap(), Message::Status { .. }));
    refused(Join { manifest: shardpack_manifests::Digest::of(b"another"), ..join });
    let mut second = connect();
    second.send(&Message::Join(join)).unwrap();
    assert_eq!(second.receive().unwrap(), Message::Joined);
    // It may say the commit, but not before every chunk is there.
    second.send(&Message::Commit).unwrap();
    let Message::Failed(failure) = second.receive().unwrap() else { panic!("not refused") };
    assert!(failure.message.contains("bytes are missing"), "{}", failure.message);
}

#[test]
fn killed_processes_with_several_streams_go_on() {
    let scene = scene();
    let (set, store) = (scene.set_dir(), scene.store(7));
    let push = |address: &str| {
        ["push", path(&set), "--to", address, "--streams", "3", "--retries", "0", "--json"]
            .map(str::to_owned)
    };
    let sent = |output: &str| -> (u64, u64) {
        let report: Value = serde_json::from_str(output).unwrap();
        let node = &report["nodes"][0];
        assert_eq!(node["state"], "active", "{report}");
        (node["sent_chunks"].as_u64().unwrap(), node["streams"].as_u64().unwrap())
    };
    // The controller dies. What its streams had stored is not sent again.
    let node = Running::node(&store, None);
    let args = push(&node.address());
    let args = args.each_ref().map(String::as_str);
    kill(paused(&format!("push:chunk:0:{OWN_FILE}:6"), &args));
    let (chunks, streams) = sent(&succeed(&args));
    assert!(chunks <= CHUNKS - 7, "{chunks} chunks were sent again");
    assert!((1..=3).contains(&streams), "{streams} streams");
    assert_clean(&store.join("packages").join(key(&scene.set, 0).to_string()));
    // The node dies. What it had listed by then is not sent again; it lists some at a time.
    let store = scene.store(8);
    let point = format!("node:stored:{OWN_FILE}:12");
    let node = Running::node(&store, Some(&point));
    let killed = thread::spawn({
        let args = push(&node.address());
        move || run(&args.each_ref().map(String::as_str))
    });
    node.wait_for(&format!("paused at {point}"));
    node.kill();
    assert_eq!(killed.join().unwrap().status.code(), Some(2));
    let node = Running::node(&store, None);
    let args = push(&node.address());
    sent(&succeed(&args.each_ref().map(String::as_str)));
    assert_clean(&store.join("packages").join(key(&scene.set, 0).to_string()));
}
