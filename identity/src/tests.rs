//! Members, strangers and noise on real sockets.

mod joining;

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::mpsc,
    thread,
    time::Duration,
};

use crate::{
    Authority, Channel, Credentials, Endpoint, ExpectedPeer, HandshakeDeadline, HandshakeError,
    PeerKey, Role, Service, Validity, certificate::now,
};

/// Longer than any test may take; a wait that meets it has failed.
const LONG: Duration = Duration::from_mins(10);

const DAY: u64 = 24 * 60 * 60;

/// A cluster in memory.
struct Cluster(Authority);

impl Cluster {
    fn new(id: &str) -> Self {
        Self(Authority::generate(id).unwrap())
    }

    fn member_for(&self, role: Role, validity: Validity) -> Credentials {
        self.0.issue(role, validity).unwrap()
    }

    fn member(&self, role: Role) -> Credentials {
        self.member_for(role, Validity::from_now())
    }
}

/// Why a call is not answered.
fn refusal(endpoint: &Endpoint) -> String {
    let called = endpoint.connect(Service::Transfer, LONG);
    causes(&called.map(drop).expect_err("nobody lets it in"))
}

/// An error with all that led to it.
fn causes(error: &dyn std::error::Error) -> String {
    let text = error.to_string();
    match error.source().map(causes) {
        Some(cause) if cause != text => format!("{text}: {cause}"),
        _ => text,
    }
}

fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

type Handshakes<T> = (Result<Channel, HandshakeError>, T);

/// Runs a handshake; returns the results of both sides.
fn meet(
    caller: &Credentials,
    answerer: &Credentials,
    key: Option<PeerKey>,
) -> Handshakes<Result<Channel, HandshakeError>> {
    let (listener, address) = listener();
    thread::scope(|scope| {
        let answering = scope.spawn(move || {
            let (socket, _) = listener.accept().unwrap();
            let roles = [Role::Controller];
            Channel::answer(
                socket,
                answerer,
                &[Service::Transfer],
                &roles,
                HandshakeDeadline::after(LONG),
            )
        });
        let socket = TcpStream::connect(address).unwrap();
        let expected = ExpectedPeer { role: Role::Node, key };
        let service = Service::Transfer;
        let called =
            Channel::call(socket, caller, service, expected, HandshakeDeadline::after(LONG));
        (called, answering.join().unwrap())
    })
}

fn pair() -> (Channel, Channel) {
    let cluster = Cluster::new("a");
    let (controller, node) = (cluster.member(Role::Controller), cluster.member(Role::Node));
    let (called, answered) = meet(&controller, &node, Some(node.key()));
    (called.unwrap(), answered.unwrap())
}

fn told<T>(result: Result<T, HandshakeError>) -> String {
    match result {
        Ok(_) => "accepted".to_owned(),
        Err(error) => error.to_string(),
    }
}

#[test]
fn members_know_who_is_at_the_other_end() {
    let cluster = Cluster::new("a");
    let (controller, node) = (cluster.member(Role::Controller), cluster.member(Role::Node));
    let (called, answered) = meet(&controller, &node, None);
    let (called, answered) = (called.unwrap(), answered.unwrap());
    let (to, from) = (called.peer().unwrap(), answered.peer().unwrap());
    assert_eq!((to.role, to.key), (Some(Role::Node), node.key()));
    assert_eq!((from.role, from.key), (Some(Role::Controller), controller.key()));
    assert_eq!(answered.service(), Some(Service::Transfer));
}

#[test]
fn whoever_is_not_who_it_should_be_is_told_why() {
    let (ours, theirs) = (Cluster::new("a"), Cluster::new("b"));
    let controller = ours.member(Role::Controller);
    let node = ours.member(Role::Node);
    let check = |caller: &Credentials, answerer: &Credentials, key, expected: [&str; 2]| {
        let (called, answered) = meet(caller, answerer, key);
        let (called, answered) = (told(called), told(answered));
        assert!(called.contains(expected[0]), "caller: {called}");
        assert!(answered.contains(expected[1]), "answerer: {answered}");
    };
    // A node in a controller's place, and a controller in a node's.
    check(
        &ours.member(Role::Node),
        &node,
        None,
        ["refused this machine's role", "not a controller's"],
    );
    check(&controller, &ours.member(Role::Controller), None, ["not a node's", "refused"]);
    // Another node of the same cluster.
    check(
        &controller,
        &ours.member(Role::Node),
        Some(node.key()),
        ["another node answers there", "refused"],
    );
    // Another cluster, and one that only bears the same id.
    check(
        &theirs.member(Role::Controller),
        &node,
        None,
        ["another cluster", "refused this machine's certificate because it is of another cluster"],
    );
    check(
        &Cluster::new("a").member(Role::Controller),
        &node,
        None,
        ["another cluster", "because it is of another cluster"],
    );
    // Clocks.
    let past = Validity { from: now() - 9 * DAY, until: now() - DAY };
    let future = Validity { from: now() + DAY, until: now() + 9 * DAY };
    let since = format!("no longer valid since {}", crate::date(past.until));
    check(&controller, &ours.member_for(Role::Node, past), None, [&since, "compare the clocks"]);
    check(
        &controller,
        &ours.member_for(Role::Node, future),
        None,
        ["clocks of the two machines", "compare the clocks"],
    );
    check(
        &ours.member_for(Role::Controller, past),
        &node,
        None,
        ["compare the clocks", "no longer valid since"],
    );
}

/// An answerer that a caller sends these bytes to.
fn answer_noise(bytes: &[u8], timeout: Duration) -> String {
    let node = Cluster::new("a").member(Role::Node);
    let (listener, address) = listener();
    let mut socket = TcpStream::connect(address).unwrap();
    socket.write_all(bytes).unwrap();
    let (answered, _) = listener.accept().unwrap();
    let (services, roles) = ([Service::Transfer], [Role::Controller]);
    let answer =
        Channel::answer(answered, &node, &services, &roles, HandshakeDeadline::after(timeout));
    told(answer)
}

#[test]
fn noise_and_silence_end_a_handshake_within_its_limits() {
    let reason = answer_noise(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", LONG);
    assert!(reason.contains("does not speak TLS"), "{reason}");
    let reason = answer_noise(b"SPXF\x01\x00\x00\x00\x00\x00\x00\x00", LONG);
    assert!(reason.contains("does not speak TLS"), "{reason}");
    for half in [&b""[..], b"\x16\x03\x01", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"] {
        let reason = answer_noise(half, Duration::from_millis(60));
        assert!(reason.contains("in time"), "{reason}");
    }
    // A hello that never ends.
    let mut endless = Vec::new();
    for record in 0..12 {
        endless.extend_from_slice(b"\x16\x03\x01\x10\x00");
        let begins: &[u8] = if record == 0 { b"\x01\x00\xff\xff\x03\x03" } else { b"" };
        endless.extend_from_slice(begins);
        endless.resize(endless.len() + 4096 - begins.len(), 7);
    }
    let reason = answer_noise(&endless, LONG);
    assert!(reason != "accepted" && !reason.contains("in time"), "{reason}");
}

#[test]
fn a_caller_of_something_else_is_told_so() {
    let cluster = Cluster::new("a");
    let controller = cluster.member(Role::Controller);
    for answer in [&b"SPXF a frame in the clear"[..], b"HTTP/1.1 400 Bad Request\r\n\r\n"] {
        let (listener, address) = listener();
        let answering = thread::spawn(move || {
            let (mut socket, _) = listener.accept().unwrap();
            let mut hello = [0; 16];
            socket.read_exact(&mut hello).unwrap();
            socket.write_all(answer).unwrap();
            socket
        });
        let endpoint =
            Endpoint::member("n".into(), address.to_string(), controller.clone(), controller.key());
        let error = refusal(&endpoint);
        assert!(error.contains("does not speak TLS"), "{error}");
        drop(answering.join());
    }
}

#[test]
fn both_directions_carry_much_at_once() {
    let (one, other) = pair();
    let bytes: Vec<u8> = (0..5_000_000_u32).map(|it| ((it * 31) >> 7) as u8).collect();
    thread::scope(|scope| {
        for end in [&one, &other] {
            let bytes = &bytes;
            scope.spawn(move || (&mut &*end).write_all(bytes).unwrap());
            scope.spawn(move || {
                let mut found = vec![0; bytes.len()];
                (&mut &*end).read_exact(&mut found).unwrap();
                assert!(found == *bytes);
            });
        }
    });
    one.shutdown(std::net::Shutdown::Both).unwrap();
    assert_eq!((&mut &other).read(&mut [0]).unwrap(), 0);
}

#[test]
fn a_nonblocking_write_is_repeated_and_nothing_is_lost_or_doubled() {
    /// More than the system keeps for a connection, of which nothing is read before it is full.
    const BYTES: u32 = 24_000_000;
    let (one, other) = pair();
    one.socket().set_nonblocking(true).unwrap();
    let bytes: Vec<u8> = (0..BYTES).map(|it| ((it * 17) >> 5) as u8).collect();
    let (full, is_full) = mpsc::sync_channel(1);
    let reader = thread::spawn(move || {
        is_full.recv().expect("the socket's buffer is full at some time");
        let mut found = vec![0; BYTES as usize];
        (&mut &other).read_exact(&mut found).unwrap();
        (found, other)
    });
    let mut sent = 0;
    while sent < bytes.len() {
        match (&mut &one).write(&bytes[sent..]) {
            Ok(count) => sent += count,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
                // Said more often than it is heard.
                let _ = full.try_send(());
                thread::yield_now();
            }
        }
    }
    drop(full);
    assert!(reader.join().unwrap().0 == bytes);
}

#[test]
fn a_record_that_trickles_in_does_not_hold_its_reader() {
    let cluster = Cluster::new("a");
    let (controller, node) = (cluster.member(Role::Controller), cluster.member(Role::Node));
    let (listener, address) = listener();
    // Passes on what the caller sends, after the handshake byte by byte.
    let (front, front_address) = self::listener();
    thread::spawn(move || {
        let (near, _) = front.accept().unwrap();
        let far = TcpStream::connect(address).unwrap();
        let (mut from, mut to) = (far.try_clone().unwrap(), near.try_clone().unwrap());
        thread::spawn(move || std::io::copy(&mut from, &mut to));
        let (mut near, mut far) = (near, far);
        let (mut buffer, mut total) = ([0; 4096], 0);
        while let Ok(count @ 1..) = near.read(&mut buffer) {
            let slow = total > 0 && count > 2000;
            for bytes in buffer[..count].chunks(if slow { 1 } else { count }) {
                if far.write_all(bytes).is_err() {
                    return;
                }
            }
            total += count;
        }
    });
    let node_key = node.key();
    let answering = thread::spawn(move || {
        let (socket, _) = listener.accept().unwrap();
        let (services, roles) = ([Service::Transfer], [Role::Controller]);
        Channel::answer(socket, &node, &services, &roles, HandshakeDeadline::after(LONG)).unwrap()
    });
    let socket = TcpStream::connect(front_address).unwrap();
    let expected = ExpectedPeer { role: Role::Node, key: Some(node_key) };
    let caller = Channel::call(
        socket,
        &controller,
        Service::Transfer,
        expected,
        HandshakeDeadline::after(LONG),
    );
    let (caller, answerer) = (caller.unwrap(), answering.join().unwrap());
    (&mut &caller).write_all(&[7; 3000]).unwrap();
    let mut looks = 0;
    let count = loop {
        match (&mut &answerer).read(&mut [0; 4000]) {
            Err(error) if error.kind() == ErrorKind::Interrupted => looks += 1,
            result => break result.unwrap(),
        }
    };
    assert_eq!(count, 3000);
    assert!(looks > 0, "the reader was held until the record was whole");
}
