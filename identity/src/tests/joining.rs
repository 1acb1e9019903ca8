//! Joining a cluster, leaving it, and callers that try to without a token.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::TcpStream,
    path::Path,
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use super::{DAY, LONG, causes, listener, refusal};
use crate::{
    Authority, Channel, ConnectError, ConnectionOutcome, Endpoint, EnrollmentState, Guard,
    HandshakeDeadline, Home, HomeError, JoinToken, Member, PeerKey, Role, Service, Validity,
    certificate::{now, parse_key},
    credentials_of_node,
    message::{self, Bytes, Grant, Reply, Request},
};

/// A node's guard on a thread.
fn open_guard(folder: &Path, timeout: Duration) -> (String, JoinToken) {
    let guard = Guard::open(folder, timeout).unwrap();
    let EnrollmentState::Inviting { token, .. } = guard.enrollment() else {
        panic!("it has joined")
    };
    (serve(guard), token)
}

fn serve(guard: Guard) -> String {
    serve_shared(Arc::new(guard))
}

fn serve_shared(guard: Arc<Guard>) -> String {
    let (listener, address) = listener();
    thread::spawn(move || {
        for socket in listener.incoming() {
            let guard = Arc::clone(&guard);
            thread::spawn(move || guard.receive(socket.unwrap(), &|| false).map(drop));
        }
    });
    address.to_string()
}

#[test]
fn a_node_joins_once_and_is_known_from_then_on() {
    let folder = tempfile::tempdir().unwrap();
    let (here, there) = (folder.path().join("cluster"), folder.path().join("node"));
    let mut home = Home::init(&here).unwrap();
    assert!(matches!(Home::init(&here), Err(HomeError::Exists { .. })));
    let (address, token) = open_guard(&there, LONG);

    // Not yet: the cluster's own way finds no member.
    let early =
        Endpoint::member("n".into(), address.clone(), home.credentials().clone(), token.key);
    let error = refusal(&early);
    assert!(error.contains("has not joined a cluster"), "{error}");

    let member = home.add(&address, &token, Some("studio-1")).unwrap();
    assert_eq!((member.name.as_str(), member.address.as_str()), ("studio-1", address.as_str()));
    let found = Home::open(&here).unwrap();
    assert_eq!(found.members(), std::slice::from_ref(&member));
    for text in ["studio-1", &address] {
        let endpoint = found.endpoint(found.member(text).unwrap());
        let channel = endpoint.connect(Service::Transfer, LONG).unwrap();
        assert_eq!(channel.peer().unwrap().key, member.key);
    }
    let credentials = credentials_of_node(&there).unwrap().unwrap();
    assert_eq!(credentials.key(), member.key);

    // A token is used up, for others and for this cluster alike; but this one knows its own.
    let mut foreign = Home::init(&folder.path().join("other")).unwrap();
    let error = causes(&foreign.add(&address, &token, None).unwrap_err());
    assert!(error.contains("in a cluster already"), "{error}");
    home.forget("studio-1").unwrap();
    assert_eq!(home.add(&address, &token, None).unwrap().name, "node-1");

    let before = home.members()[0].expires;
    assert!(home.renew("node-1").unwrap().expires >= before);
    // The end: it invites again, with another token.
    home.dismiss("node-1").unwrap();
    let error = refusal(&early);
    assert!(error.contains("has not joined a cluster"), "{error}");
    assert!(!Guard::has_joined(&there));
    let error = causes(&foreign.add(&address, &token, None).unwrap_err());
    assert!(error.contains("token is wrong"), "{error}");
}

#[test]
fn tokens_that_are_wrong_late_or_anothers_join_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let mut home = Home::init(&folder.path().join("cluster")).unwrap();
    let (address, token) = open_guard(&folder.path().join("a"), LONG);
    let (other_address, other) = open_guard(&folder.path().join("b"), LONG);
    let mut add =
        |address: &str, token: &JoinToken| causes(&home.add(address, token, None).unwrap_err());
    // The token says which node it is of.
    let error = add(&other_address, &token);
    assert!(error.contains("another node answers there"), "{error}");
    let wrong = JoinToken { secret: other.secret.clone(), key: token.key };
    let error = add(&address, &wrong);
    assert!(error.contains("token is wrong"), "{error}");
    let (late_address, late) = open_guard(&folder.path().join("c"), Duration::ZERO);
    let error = add(&late_address, &late);
    assert!(error.contains("expired"), "{error}");
    let error = add("no-such-host.invalid:1", &token);
    assert!(error.contains("not a HOST:PORT address"), "{error}");
}

/// What a node answers to one request about its membership.
fn say(channel: &Channel, request: &Request) -> Reply {
    message::write(channel, request, Instant::now() + LONG).unwrap();
    message::read(channel, Instant::now() + LONG).unwrap()
}

/// A request to join with another node's secret.
fn guess(token: &JoinToken) -> Request {
    let nothing = || Bytes(Vec::new());
    let (cluster, name) = ("c".to_owned(), "n".to_owned());
    let grant = Grant { cluster, name, authority: nothing(), certificate: nothing(), expires: 0 };
    Request::Join { secret: token.secret.clone(), grant }
}

#[test]
fn wrong_guesses_wait_and_keep_nobody_from_joining() {
    let folder = tempfile::tempdir().unwrap();
    let mut home = Home::init(&folder.path().join("cluster")).unwrap();
    let (address, token) = open_guard(&folder.path().join("a"), LONG);
    let (_, other) = open_guard(&folder.path().join("b"), LONG);
    let guessing: Vec<Channel> = (0..20)
        .map(|_| {
            let socket = TcpStream::connect(&address).unwrap();
            let channel =
                Channel::call_stranger(socket, token.key, HandshakeDeadline::after(LONG)).unwrap();
            message::write(&channel, &guess(&other), Instant::now() + LONG).unwrap();
            channel
        })
        .collect();
    // Twenty wrong guesses are being considered, and the right one is taken all the same.
    home.add(&address, &token, None).unwrap();
    for channel in guessing {
        let reply = message::read(&channel, Instant::now() + LONG).unwrap();
        let Reply::Refused(reason) = reply else { panic!("a wrong token was taken") };
        assert!(
            reason.contains("token is wrong") || reason.contains("since this connection began"),
            "{reason}"
        );
    }
}

#[test]
fn a_guess_is_answered_late_unless_its_place_is_lost() {
    let folder = tempfile::tempdir().unwrap();
    let guard = Guard::open(&folder.path().join("node"), LONG).unwrap();
    let EnrollmentState::Inviting { token, .. } = guard.enrollment() else {
        panic!("it has joined")
    };
    let (_, other) = open_guard(&folder.path().join("b"), LONG);
    let (listener, address) = listener();
    let considered = |loses: bool| -> Duration {
        let lost = AtomicBool::new(false);
        thread::scope(|scope| {
            let (guard, listener, lost) = (&guard, &listener, &lost);
            let receiving = scope.spawn(move || {
                let socket = listener.accept().unwrap().0;
                guard.receive(socket, &|| lost.load(Ordering::SeqCst)).map(drop).unwrap();
                Instant::now()
            });
            let socket = TcpStream::connect(address).unwrap();
            let channel =
                Channel::call_stranger(socket, token.key, HandshakeDeadline::after(LONG)).unwrap();
            // The handshake is done: from here on it is about the request.
            lost.store(loses, Ordering::SeqCst);
            let sent = Instant::now();
            let Reply::Refused(reason) = say(&channel, &guess(&other)) else { panic!("taken") };
            assert!(reason.contains("token is wrong"), "{reason}");
            receiving.join().unwrap().saturating_duration_since(sent)
        })
    };
    assert!(considered(false) >= crate::guard::WRONG_TOKEN_DELAY);
    considered(true);
}

#[test]
fn a_call_that_was_let_in_by_one_cluster_says_nothing_in_another() {
    let folder = tempfile::tempdir().unwrap();
    let there = folder.path().join("node");
    let mut old = Home::init(&folder.path().join("old")).unwrap();
    let mut new = Home::init(&folder.path().join("new")).unwrap();
    let guard = Arc::new(Guard::open(&there, LONG).unwrap());
    let invited = |guard: &Guard| match guard.enrollment() {
        EnrollmentState::Inviting { token, .. } => token,
        EnrollmentState::Joined(_) => panic!("it has joined"),
    };
    let address = serve_shared(Arc::clone(&guard));
    old.add(&address, &invited(&guard), Some("n")).unwrap();
    let member = |home: &Home| home.endpoint(home.member("n").unwrap());
    // Two calls by the old cluster's controller, let in and silent.
    let waiting = [(); 2].map(|()| member(&old).connect(Service::Member, LONG).unwrap());
    old.dismiss("n").unwrap();
    let late = member(&old).connect(Service::Member, LONG).map(drop).unwrap_err();
    assert!(causes(&late).contains("has not joined"), "{}", causes(&late));
    new.add(&address, &invited(&guard), Some("n")).unwrap();
    // A certificate by the old authority, which bears the new cluster's id.
    let forged =
        Grant { cluster: new.cluster().to_owned(), ..old.grant(old.member("n").unwrap()).unwrap() };
    for (channel, request) in waiting.iter().zip([Request::Renew(forged.clone()), Request::Leave]) {
        let Reply::Refused(reason) = say(channel, &request) else { panic!("it was obeyed") };
        assert!(reason.contains("since this connection began"), "{reason}");
    }
    // Nor does the right controller make it another cluster's by renewing.
    let channel = member(&new).connect(Service::Member, LONG).unwrap();
    let Reply::Refused(reason) = say(&channel, &Request::Renew(forged)) else { panic!("taken") };
    assert!(reason.contains("does not accept another cluster's certificate"), "{reason}");
    new.renew("n").unwrap();
    let EnrollmentState::Joined(joined) = guard.enrollment() else { panic!("it has left") };
    assert_eq!(joined.cluster, new.cluster());
}

#[test]
fn members_that_are_added_at_once_have_names_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let here = folder.path().join("cluster");
    Home::init(&here).unwrap();
    let guards: Vec<(String, JoinToken)> =
        (0..6).map(|n| open_guard(&folder.path().join(n.to_string()), LONG)).collect();
    let barrier = Barrier::new(guards.len());
    // Each as a process of its own would: with what it read before the others had begun.
    let add = |(address, token): &(String, JoinToken), name: Option<&str>| {
        let mut home = Home::open(&here).unwrap();
        barrier.wait();
        home.add(address, token, name).map(|member| member.name)
    };
    let at_once = |guards: &[(String, JoinToken)], name| -> Vec<Result<String, HomeError>> {
        thread::scope(|scope| {
            let running: Vec<_> =
                guards.iter().map(|guard| scope.spawn(move || add(guard, name))).collect();
            running.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    };
    let named = at_once(&guards, Some("studio"));
    assert_eq!(named.iter().filter(|name| name.is_ok()).count(), 1, "{named:?}");
    for error in named.iter().filter_map(|name| name.as_ref().err()) {
        assert!(matches!(error, HomeError::Taken { taken } if taken == "studio"), "{error}");
    }
    // Those who were refused have not joined: their tokens still hold.
    let mut left: Vec<(String, JoinToken)> = guards.clone();
    left.retain(|(address, _)| Home::open(&here).unwrap().member(address).is_none());
    assert_eq!(left.len(), 5);
    left.push(open_guard(&folder.path().join("last"), LONG));
    let mut names: Vec<String> = at_once(&left, None).into_iter().map(Result::unwrap).collect();
    names.sort();
    assert_eq!(names, ["node-1", "node-2", "node-3", "node-4", "node-5", "node-6"]);
    assert_eq!(Home::open(&here).unwrap().members().len(), 7);
}

#[test]
fn a_node_that_is_started_again_is_still_a_member_until_it_is_reset() {
    let folder = tempfile::tempdir().unwrap();
    let there = folder.path().join("node");
    let mut home = Home::init(&folder.path().join("cluster")).unwrap();
    let (address, token) = open_guard(&there, LONG);
    home.add(&address, &token, Some("n")).unwrap();
    let again = Guard::open(&there, LONG).unwrap();
    let EnrollmentState::Joined(joined) = again.enrollment() else { panic!("it has not joined") };
    assert_eq!((joined.cluster.as_str(), joined.name.as_str()), (home.cluster(), "n"));
    Guard::reset(&there).unwrap();
    let (_, fresh) = open_guard(&there, LONG);
    assert_ne!(fresh.key, token.key);
}

#[test]
fn requests_about_membership_that_are_noise_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let guard = Guard::open(&folder.path().join("node"), LONG).unwrap();
    let EnrollmentState::Inviting { token, .. } = guard.enrollment() else {
        panic!("it has joined")
    };
    let (listener, address) = listener();
    let noises: [&[u8]; 5] = [
        b"\xff\xff\xff\xff",
        b"\x02\0\0\0{}",
        b"\x07\0\0\0\"leave\"",
        b"\x03\0\0\0abc",
        b"\0\0\0\0",
    ];
    thread::scope(|scope| {
        let guard = &guard;
        scope.spawn(move || {
            for _ in noises {
                let visit = guard.receive(listener.accept().unwrap().0, &|| false).unwrap();
                assert!(matches!(visit, ConnectionOutcome::Refused(_)));
            }
        });
        for noise in noises {
            let socket = TcpStream::connect(address).unwrap();
            let channel =
                Channel::call_stranger(socket, token.key, HandshakeDeadline::after(LONG)).unwrap();
            (&mut &channel).write_all(noise).unwrap();
            let mut answer = String::new();
            (&mut &channel).read_to_string(&mut answer).unwrap();
            assert!(answer.contains("refused"), "{answer}");
        }
    });
    assert!(!Guard::has_joined(guard.folder()));
}

#[test]
fn keys_that_others_can_read_are_not_used() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().unwrap();
    let here = folder.path().join("cluster");
    Home::init(&here).unwrap();
    for file in ["authority.key", "controller.key"] {
        let path = here.join(file);
        let mode = |mode| fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        mode(0o644);
        let error = Home::open(&here).map(drop).map_err(|error| causes(&error)).unwrap_err();
        assert!(error.contains(file) && error.contains("chmod 600"), "{error}");
        mode(0o600);
    }
    Home::open(&here).unwrap();
    let error = Home::open(folder.path()).map(drop).unwrap_err();
    assert!(matches!(error, HomeError::Missing { .. }));
}

#[test]
fn nothing_leaves_this_machine_in_the_clear() {
    let error = Endpoint::plain("192.0.2.1:9").connect(Service::Transfer, LONG).map(drop);
    assert!(matches!(error, Err(ConnectError::NotLoopback { .. })));
}

#[test]
fn a_certificate_that_has_ended_is_renewed_all_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let (here, there) = (folder.path().join("cluster"), folder.path().join("node"));
    let mut home = Home::init(&here).unwrap();
    let (address, token) = open_guard(&there, LONG);
    home.add(&address, &token, Some("n")).unwrap();
    // As the node's file would be two years later.
    let path = there.join("membership.json");
    let mut membership: serde_json::Value =
        serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let key = parse_key(&fs::read(here.join("authority.key")).unwrap()).unwrap();
    let past = Validity { from: now() - 9 * DAY, until: now() - DAY };
    let ended = Authority::new(home.cluster().to_owned(), key);
    let ended = ended.sign(Role::Node, "n", token.key, past).unwrap();
    membership["certificate"] = serde_json::to_value(Bytes(ended.to_vec())).unwrap();
    fs::write(&path, membership.to_string()).unwrap();
    let later = serve(Guard::open(&there, LONG).unwrap());
    home.relocate("n", &later).unwrap_err();
    let mut document: serde_json::Value =
        serde_json::from_slice(&fs::read(here.join("cluster.json")).unwrap()).unwrap();
    document["members"][0]["address"] = later.as_str().into();
    fs::write(here.join("cluster.json"), document.to_string()).unwrap();

    let mut home = Home::open(&here).unwrap();
    let connect = |home: &Home| {
        let endpoint = home.endpoint(home.member("n").unwrap());
        endpoint.connect(Service::Transfer, LONG).map(drop).map_err(|error| causes(&error))
    };
    let error = connect(&home).unwrap_err();
    assert!(error.contains("no longer valid since") && error.contains("cluster renew"), "{error}");
    home.renew("n").unwrap();
    connect(&home).unwrap();
}

#[test]
fn certificates_of_a_clock_that_was_ahead_are_made_anew() {
    let folder = tempfile::tempdir().unwrap();
    let here = folder.path().join("cluster");
    let home = Home::init(&here).unwrap();
    // As a controller leaves them whose clock is two years ahead.
    let authority = parse_key(&fs::read(here.join("authority.key")).unwrap()).unwrap();
    let own = parse_key(&fs::read(here.join("controller.key")).unwrap()).unwrap();
    let ahead = now() + 2 * 365 * DAY;
    let validity = Validity { from: ahead - DAY, until: ahead + 730 * DAY };
    let authority = Authority::new(home.cluster().to_owned(), authority);
    let key = PeerKey::of_pair(&own);
    let early = authority.sign(Role::Controller, "controller", key, validity).unwrap();
    let path = here.join("cluster.json");
    let mut document: serde_json::Value =
        serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    document["controller"] = serde_json::to_value(Bytes(early.to_vec())).unwrap();
    document["expires"] = validity.until.into();
    fs::write(&path, document.to_string()).unwrap();

    let mut home = Home::open(&here).unwrap();
    let (address, token) = open_guard(&folder.path().join("node"), LONG);
    let member = home.add(&address, &token, Some("n")).unwrap();
    assert!(!member.wants_renewal());
    let endpoint = home.endpoint(&member);
    endpoint.connect(Service::Transfer, LONG).map(drop).map_err(|error| causes(&error)).unwrap();
    let early = Member { expires: validity.until, ..member };
    assert!(early.wants_renewal());
}

#[test]
fn a_member_that_moves_is_found_again_by_its_key() {
    let folder = tempfile::tempdir().unwrap();
    let mut home = Home::init(&folder.path().join("cluster")).unwrap();
    let there = folder.path().join("node");
    let (address, token) = open_guard(&there, LONG);
    home.add(&address, &token, Some("n")).unwrap();
    let (elsewhere, _) = open_guard(&folder.path().join("other"), LONG);
    let error = causes(&home.relocate("n", &elsewhere).unwrap_err());
    assert!(error.contains("has not joined"), "{error}");
    let moved = serve(Guard::open(&there, LONG).unwrap());
    assert_eq!(home.relocate("n", &moved).unwrap().address, moved);
    assert_eq!(home.members()[0].address, moved);
}
