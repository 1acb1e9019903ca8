//! Files that several nodes of a push get: they leave the controller once and go from node to node, whatever
//! becomes of the nodes and the links between them.

use shardpack_identity::{
    Channel, ExpectedPeer, HandshakeDeadline, Home, Role, Service, credentials_of_node,
};
use shardpack_transfer::ticket::{SignedTicket, Ticket, TicketFile};

use super::{
    tap::{CHUNK, COMMIT, FETCHED, Fate, HEADER_BYTES, Place, Tap, Way},
    *,
};
use crate::{
    harness::{path, run, succeed, text},
    running::Running,
};

const RANKS: usize = 4;

/// Bytes of config.json and tokenizer.json, which all packages have too.
const TEXT_BYTES: u64 = 3 + 5_000;

fn plan(ranks: u32) -> SetPlan {
    let (own_bytes, shared_bytes) = (CHUNK_BYTES + 12_345, 5 * CHUNK_BYTES + 77);
    SetPlan { ranks, own_bytes, shared_bytes, ..SetPlan::default() }
}

/// Whether the controller has heard what the node holds: it has said what comes next.
fn is_planned(tap: &Tap) -> bool {
    tap.counts.frames(Way::In, CHUNK) + tap.counts.frames(Way::In, COMMIT) > 0
}

/// Taps that are opened one after the other, each when the node before has said what it holds: nodes fetch
/// from one another in rank order.
fn in_order(taps: Vec<Tap>) -> Vec<Arc<Tap>> {
    let taps: Vec<Arc<Tap>> = taps.into_iter().map(|tap| Arc::new(tap.hold())).collect();
    taps[0].open();
    let opening = taps.clone();
    thread::spawn(move || {
        for pair in opening.windows(2) {
            while !is_planned(&pair[0]) {
                thread::sleep(Duration::from_millis(2));
            }
            pair[1].open();
        }
    });
    taps
}

/// Taps of which one is opened when the nodes behind all others have said what they hold.
fn last(taps: Vec<Tap>, late: usize) -> Vec<Arc<Tap>> {
    let hold = |(number, tap): (usize, Tap)| if number == late { tap.hold() } else { tap };
    let taps: Vec<Arc<Tap>> = taps.into_iter().enumerate().map(hold).map(Arc::new).collect();
    let opening = taps.clone();
    thread::spawn(move || {
        let is_known = |(number, tap): (usize, &Arc<Tap>)| number == late || is_planned(tap);
        while !opening.iter().enumerate().all(is_known) {
            thread::sleep(Duration::from_millis(2));
        }
        opening[late].open();
    });
    taps
}

fn addresses(taps: &[Arc<Tap>]) -> String {
    taps.iter().map(|tap| tap.address.to_string()).collect::<Vec<_>>().join(",")
}

/// Bytes of chunks that the controller sent to a node.
fn sent_bytes(tap: &Tap) -> u64 {
    let (bytes, frames) =
        (tap.counts.payload_bytes(Way::In, CHUNK), tap.counts.frames(Way::In, CHUNK));
    bytes - 8 * frames
}

/// Bytes of chunks that other nodes fetched from a node.
fn given_bytes(tap: &Tap) -> u64 {
    tap.counts.payload_bytes(Way::Out, FETCHED)
}

fn report(output: &std::process::Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", text(&output.stderr)))
}

fn package(scene: &Scene, rank: u32) -> PathBuf {
    scene.store(rank).join("packages").join(key(&scene.set, rank).to_string())
}

#[test]
fn shared_files_leave_the_source_once_and_go_on_from_node_to_node() {
    let plan = plan(RANKS as u32);
    let scene = Scene::new(&plan);
    let nodes: Vec<Running> =
        (0..RANKS).map(|rank| Running::node(&scene.store(rank as u32), None)).collect();
    let taps = in_order(nodes.iter().map(|node| Tap::new(&node.address())).collect());
    let to = addresses(&taps);
    let output = run(&["push", path(&scene.set_dir()), "--to", &to, "--json"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let shared_bytes = plan.shared_bytes + TEXT_BYTES;
    let own_bytes = plan.own_bytes;
    let sent: Vec<u64> = taps.iter().map(|tap| sent_bytes(tap)).collect();
    assert_eq!(sent, [own_bytes + shared_bytes, own_bytes, own_bytes, own_bytes]);
    let given: Vec<u64> = taps.iter().map(|tap| given_bytes(tap)).collect();
    assert_eq!(given, [shared_bytes, shared_bytes, shared_bytes, 0], "a chain");
    let report = report(&output);
    assert_eq!(report["sent_bytes"], sent.iter().sum::<u64>(), "{report}");
    assert_eq!(report["relayed_bytes"], 3 * shared_bytes, "{report}");
    for rank in 0..RANKS as u32 {
        assert_eq!(report["nodes"][rank as usize]["state"], "active");
        assert_clean(&package(&scene, rank));
    }

    // Asked not to, the controller sends all of it.
    let fresh: Vec<Running> =
        (10..12).map(|number| Running::node(&scene.store(number), None)).collect();
    let two = Scene::new(&SetPlan { ranks: 2, ..plan });
    let to = fresh.iter().map(Running::address).collect::<Vec<_>>().join(",");
    let set = two.set_dir();
    let args = ["push", path(&set), "--to", &to, "--json", "--no-relay"];
    let report: Value = serde_json::from_str(&succeed(&args)).unwrap();
    assert_eq!(report["relayed_bytes"], 0, "{report}");
    assert_eq!(report["sent_bytes"], 2 * (own_bytes + shared_bytes), "{report}");
}

#[test]
fn node_killed_while_it_relays_costs_the_others_nothing() {
    let plan = plan(RANKS as u32);
    let scene = Scene::new(&plan);
    let point = format!("node:stored:{SHARED_FILE}:2");
    let mut nodes: Vec<Running> = (0..RANKS)
        .map(|rank| Running::node(&scene.store(rank as u32), (rank == 1).then_some(&point[..])))
        .collect();
    let taps = in_order(nodes.iter().map(|node| Tap::new(&node.address())).collect());
    let (set, to) = (scene.set_dir(), addresses(&taps));
    let pushing =
        thread::spawn(move || run(&["push", path(&set), "--to", &to, "--json", "--retries", "0"]));
    nodes[1].wait_for(&format!("paused at {point}"));
    nodes.remove(1).kill();
    let output = pushing.join().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    let report = report(&output);
    let states: Vec<&str> =
        (0..RANKS).map(|rank| report["nodes"][rank]["state"].as_str().unwrap()).collect();
    assert_eq!(states, ["prepared", "not prepared", "prepared", "prepared"], "{report}");
    for rank in [0, 2, 3] {
        assert_clean(&package(&scene, rank));
    }
    // What node 2 had not got from the lost one came from the controller, and went on from there.
    let shared = sent_bytes(&taps[2]) - plan.own_bytes;
    assert!((1..=plan.shared_bytes + TEXT_BYTES).contains(&shared), "{shared}");
    assert_eq!(sent_bytes(&taps[3]), plan.own_bytes);
    // It comes again and the push ends.
    nodes.insert(1, Running::node(&scene.store(1), None));
    let taps: Vec<Tap> = nodes.iter().map(|node| Tap::new(&node.address())).collect();
    let taps = last(taps, 1);
    let to = addresses(&taps);
    let again = succeed(&["push", path(&scene.set_dir()), "--to", &to, "--json"]);
    let again: Value = serde_json::from_str(&again).unwrap();
    assert_eq!(again["ok"], true, "{again}");
    // The shared file is on other nodes.
    assert!(again["sent_bytes"].as_u64().unwrap() <= plan.own_bytes, "{again}");
    assert_clean(&package(&scene, 1));
}

#[test]
fn node_that_gives_wrong_bytes_or_hangs_up_is_not_believed_and_not_needed() {
    let plan = plan(2);
    let shared_bytes = plan.shared_bytes + TEXT_BYTES;
    let bend = |place: Place| {
        let hit = place.kind == FETCHED && place.way == Way::Out && place.at == HEADER_BYTES + 99;
        if hit { Fate::Bent(3) } else { Fate::Passes }
    };
    // Past the two small files and one chunk.
    let given = Arc::new(AtomicU64::new(0));
    let cut = move |place: Place| {
        if place.kind != FETCHED || place.at < HEADER_BYTES {
            return Fate::Passes;
        }
        let before = given.fetch_add(1, Ordering::SeqCst);
        if before > CHUNK_BYTES + 50_000 { Fate::Cut } else { Fate::Passes }
    };
    let check = |first: fn(&str, Box<Fault>) -> Tap, fault: Box<Fault>, said: &str| {
        let scene = Scene::new(&plan);
        let nodes = [0, 1].map(|rank| Running::node(&scene.store(rank), None));
        let taps = vec![first(&nodes[0].address(), fault), Tap::new(&nodes[1].address())];
        let taps = in_order(taps);
        let to = addresses(&taps);
        let output = run(&["push", path(&scene.set_dir()), "--to", &to, "--json"]);
        let errors = text(&output.stderr);
        assert!(output.status.success(), "{errors}");
        assert!(errors.contains("did not relay everything") && errors.contains(said), "{errors}");
        for rank in [0, 1] {
            assert_clean(&package(&scene, rank));
        }
        let report = report(&output);
        let relayed_bytes = report["nodes"][1]["relayed_bytes"].as_u64().unwrap();
        assert!(relayed_bytes < shared_bytes, "{report}");
        let sent = sent_bytes(&taps[1]);
        assert_eq!(sent + relayed_bytes, plan.own_bytes + shared_bytes, "nothing came twice");
        relayed_bytes
    };
    let tap: fn(&str, Box<Fault>) -> Tap = |node, fault| Tap::with(node, fault);
    // config.json is shorter and comes through.
    let said = format!("other bytes came than those of {SHARED_FILE}, chunk 0");
    assert_eq!(check(tap, Box::new(bend), &said), 3);
    assert!(check(tap, Box::new(cut), "the connection ended") > 0);
}

type Fault = dyn Fn(Place) -> Fate + Send + Sync;

#[test]
#[expect(clippy::too_many_lines, reason = "one door, and all that may knock at it")]
fn members_relay_for_their_controller_and_for_nobody_else() {
    let scene = Scene::new(&plan(2));
    let home = scene.directory.path().join("cluster");
    let choice = ["--cluster", path(&home)];
    succeed(&["cluster", "init", "--cluster", path(&home)]);
    let nodes = [0, 1].map(|rank| {
        let store = scene.store(rank);
        let listen = ["node", "--tls", "--listen", "127.0.0.1:0", "--json", "--store"];
        let node = Running::start(&[&listen[..], &[path(&store)]].concat(), None);
        let token = node.json["join"]["token"].as_str().unwrap();
        let name = ["a", "b"][rank as usize];
        let add = ["cluster", "add", &node.address(), "--token", token, "--name", name];
        succeed(&[&add[..], &choice].concat());
        node
    });
    let set = scene.set_dir();
    let push = ["push", path(&set), "--to", "a,b", "--json"];
    let report: Value = serde_json::from_str(&succeed(&[&push[..], &choice].concat())).unwrap();
    let shared_bytes = plan(2).shared_bytes + TEXT_BYTES;
    assert_eq!(report["relayed_bytes"], shared_bytes, "{report}");

    // Node b with its own key at node a's door.
    let home = Home::open(&home).unwrap();
    let of = |rank: u32| credentials_of_node(&scene.store(rank).join("identity")).unwrap().unwrap();
    let (a, b) = (of(0), of(1));
    let call = |service| {
        let socket = TcpStream::connect(nodes[0].address()).unwrap();
        let expected = ExpectedPeer { role: Role::Node, key: Some(a.key()) };
        Channel::call(socket, &b, service, expected, HandshakeDeadline::after(TIMEOUT))
    };
    let refused = call(Service::Transfer).map(drop).unwrap_err().to_string();
    assert!(refused.contains("refused this machine's role"), "{refused}");
    let manifest = fs::read(scene.set_dir().join("node-0/manifest.json")).unwrap();
    let manifest = Manifest::parse(&manifest).unwrap();
    let file = manifest.files.iter().position(|file| file.name == OWN_FILE).unwrap();
    let entry = &manifest.files[file];
    let package = key(&scene.set, 0);
    let ticket = |file: usize, to| {
        let entry = &manifest.files[file];
        let file = TicketFile { file: file as u32, blake3: entry.blake3, size: entry.size };
        Ticket::new(package, vec![file], Some(a.key()), Some(to))
    };
    let ask = |messages: &[Message]| {
        let set_timeout = |channel: &Channel, t| channel.set_read_timeout(Some(t));
        let mut wire = Wire::new(call(Service::Relay).unwrap(), set_timeout, TIMEOUTS);
        let mut last = Message::List;
        for message in [&[Message::hello()][..], messages].concat() {
            wire.send(&message).unwrap();
            last = wire.receive().unwrap();
        }
        last
    };
    let show = |ticket: SignedTicket| {
        let parameters = json!({ "ticket": ticket }).to_string();
        let name = "relay.open".to_owned();
        Message::Operate(shardpack_transfer::protocol::Operation { name, parameters })
    };
    let fetch = Message::Fetch(ChunkPlace { package, file: file as u32, chunk: 0 });
    let fails = |messages: &[Message], why: &str| {
        let Message::Failed(failure) = ask(messages) else { panic!("{why}: not refused") };
        assert!(failure.message.contains(why), "{}", failure.message);
    };
    let only = "a node may fetch what a ticket names, and nothing else";
    fails(&[Message::List], only);
    fails(std::slice::from_ref(&fetch), only);
    let sign = |ticket, by| SignedTicket::sign(ticket, by).unwrap();
    let controller = Some(home.credentials());
    fails(&[show(sign(ticket(file, b.key()), None))], "not signed");
    fails(&[show(sign(ticket(file, b.key()), Some(&b)))], "signature is refused");
    fails(&[show(sign(ticket(file, a.key()), controller))], "for other nodes");
    let another = show(sign(ticket(0, b.key()), controller));
    fails(&[another, fetch.clone()], "the ticket does not name chunk 0");
    // A ticket for another file than the one in its place.
    let mut wrong = ticket(file, b.key());
    wrong.files[0].blake3 = manifest.files[0].blake3;
    fails(&[show(sign(wrong, controller)), fetch.clone()], "has no chunk 0");
    let good = show(sign(ticket(file, b.key()), controller));
    fails(&[good.clone(), Message::List], only);
    let Message::Fetched(bytes) = ask(&[good, fetch]) else { panic!("not served") };
    assert_eq!(shardpack_manifests::digest::chunk_value(&bytes, entry.size, 0), entry.chunks[0]);
}

#[test]
fn second_push_sends_less_than_a_thousandth() {
    let scene = Scene::new(&SetPlan::default());
    let nodes = [0, 1].map(|rank| Running::node(&scene.store(rank), None));
    let push = || {
        let taps: Vec<Arc<Tap>> =
            nodes.iter().map(|node| Arc::new(Tap::new(&node.address()))).collect();
        let to = addresses(&taps);
        succeed(&["push", path(&scene.set_dir()), "--to", &to, "--json"]);
        let bytes = |way| taps.iter().map(|tap| tap.counts.bytes(way)).sum::<u64>();
        bytes(Way::In) + bytes(Way::Out)
    };
    let set_bytes: u64 = scene.set.packages.iter().map(|package| package.size_bytes).sum();
    let first = push();
    assert!(first > set_bytes, "{first} of {set_bytes} bytes");
    let second = push();
    assert!(second * 1000 < set_bytes, "{second} of {set_bytes} bytes, documents and all");
}
