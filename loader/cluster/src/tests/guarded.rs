//! Groups inside TLS, and members who are not whom the front named.

use std::{
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    path::Path,
    thread,
};

use shardpack_engine_api::FinishReason;
use shardpack_identity::{
    Channel, Credentials, EnrollmentState, ExpectedPeer, Guard, HandshakeDeadline, Home, Role,
    Service, credentials_of_node,
};

use super::fake::{Answer, End, LONG, handle, identity, load, patient, patient_rank, request};
use crate::{
    Announcement, LinkChoice, Node, RankOptions, Supervisor, Token,
    message::{FromRank, GroupPlan, Hello, PeerReply, StreamKind, ToRank},
    run_rank,
    wire::{self, MAX_MESSAGE_BYTES, Sender},
};

/// A cluster with nodes.
struct Members {
    _folder: tempfile::TempDir,
    controller: Credentials,
    nodes: Vec<Credentials>,
}

fn join(home: &mut Home, folder: &Path) -> Credentials {
    let guard = Guard::open(folder, LONG).unwrap();
    let EnrollmentState::Inviting { token, .. } = guard.enrollment() else {
        panic!("it has joined")
    };
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = listener.local_addr().unwrap().to_string();
    thread::scope(|scope| {
        scope.spawn(|| guard.receive(listener.accept().unwrap().0, &|| false).map(drop).unwrap());
        home.add(&address, &token, None).unwrap();
    });
    credentials_of_node(folder).unwrap().unwrap()
}

impl Members {
    fn new(size: u32) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut home = Home::init(&folder.path().join("cluster")).unwrap();
        let nodes =
            (0..size).map(|rank| join(&mut home, &folder.path().join(rank.to_string()))).collect();
        Self { controller: home.credentials().clone(), nodes, _folder: folder }
    }
}

fn start_rank((rank, size): (u32, u32), credentials: &Credentials) -> Announcement {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let (address, token) = (listener.local_addr().unwrap(), Token::generate().unwrap());
    let key = Some(credentials.key());
    let announcement = Announcement { address, token: token.clone(), key };
    let credentials = Some(credentials.clone());
    let options = RankOptions { credentials, ..patient_rank() };
    thread::spawn(move || run_rank(listener, token, identity(rank, size), options, load));
    announcement
}

fn node(announcement: &Announcement, controller: &Credentials) -> Node {
    Node {
        name: announcement.address.to_string(),
        announcement: announcement.clone(),
        credentials: Some(controller.clone()),
        process: None,
        restart: None,
        weights: None,
        repair: None,
    }
}

#[test]
fn ranks_sum_and_answer_inside_tls() {
    let members = Members::new(3);
    let ranks: Vec<Announcement> =
        (0..3).zip(&members.nodes).map(|(rank, node)| start_rank((rank, 3), node)).collect();
    let (handle, commands) = handle(3);
    let nodes = ranks.iter().map(|rank| node(rank, &members.controller)).collect();
    let supervisor = Supervisor::start(nodes, handle.clone(), commands, patient()).unwrap();
    supervisor.wait_until_ready(LONG).unwrap();
    let answers = [10, 5000].map(|first| Answer::submit(&handle, request(first, 40)));
    for (answer, first) in answers.into_iter().zip([10, 5000]) {
        let (tokens, end) = answer.finish();
        assert_eq!(tokens, (first + 1..=first + 40).collect::<Vec<u32>>());
        assert_eq!(end, End::Finished(FinishReason::Length));
    }
    // The end of the front ends a running request, through TLS too; no rank is killed for it.
    let answer = Answer::submit(&handle, request(7, u32::MAX));
    assert_eq!(answer.next_token(), 8);
    supervisor.stop();
    assert!(matches!(answer.finish().1, End::Failed { .. }));
}

#[test]
fn a_rank_in_the_clear_is_not_taken_for_a_member_nor_a_member_for_another() {
    let members = Members::new(2);
    let why = |announcement: &Announcement, credentials: Option<&Credentials>| {
        let (handle, commands) = handle(1);
        let node =
            Node { credentials: credentials.cloned(), ..node(announcement, &members.controller) };
        let supervisor = Supervisor::start(vec![node], handle, commands, patient()).unwrap();
        supervisor.wait_until_ready(LONG).unwrap_err().to_string()
    };
    let rank = start_rank((0, 1), &members.nodes[0]);
    let other = Announcement { key: Some(members.nodes[1].key()), ..rank.clone() };
    let found = why(&other, Some(&members.controller));
    assert!(found.contains("another node answers there"), "{found}");
    let found = why(&Announcement { key: None, ..rank.clone() }, Some(&members.controller));
    assert!(found.contains("does not use TLS"), "{found}");
    let found = why(&rank, None);
    assert!(found.contains("no cluster"), "{found}");
    // A node is no front.
    let found = why(&rank, Some(&members.nodes[1]));
    assert!(found.contains("does not have the required role"), "{found}");
}

#[test]
fn strangers_get_nothing_from_a_rank_inside_tls() {
    let members = Members::new(2);
    let rank = start_rank((0, 2), &members.nodes[0]);
    // In the clear, with the right token.
    let socket = TcpStream::connect(rank.address).unwrap();
    socket.set_read_timeout(Some(LONG)).unwrap();
    let hello = Hello::control(rank.token.clone());
    Sender::new(socket.try_clone().unwrap()).unwrap().send(&hello).unwrap();
    let mut answer = Vec::new();
    let _ = (&socket).read_to_end(&mut answer);
    assert!(answer.len() < 50 && !String::from_utf8_lossy(&answer).contains("identity"));
    let call = |credentials: &Credentials| {
        let socket = TcpStream::connect(rank.address).unwrap();
        let expected = ExpectedPeer { role: Role::Node, key: rank.key };
        let deadline = HandshakeDeadline::after(LONG);
        Channel::call(socket, credentials, Service::Rank, expected, deadline).unwrap()
    };
    // A controller is no peer, and needs the token too.
    let mut channel = call(&members.controller);
    let (token, way) = (rank.token.clone(), StreamKind::Data);
    let peer = Hello::Peer { token, epoch: 1, identity: identity(1, 2), way };
    channel.write_all(&wire::encode(&peer).unwrap()).unwrap();
    let Ok(PeerReply::Refused(reason)) = wire::read(&mut channel, MAX_MESSAGE_BYTES) else {
        panic!("no refusal")
    };
    assert!(reason.contains("role"), "{reason}");
    let mut channel = call(&members.controller);
    let token = Token::generate().unwrap();
    let hello = Hello::control(token);
    channel.write_all(&wire::encode(&hello).unwrap()).unwrap();
    let Ok(FromRank::Refused(reason)) = wire::read(&mut channel, MAX_MESSAGE_BYTES) else {
        panic!("no refusal")
    };
    assert_eq!(reason, "the token is wrong");
}

/// Two ranks of these members form a group, which answers a request.
fn forms_and_answers(ranks: &[Announcement], members: &Members) {
    let (handle, commands) = handle(2);
    let nodes = ranks.iter().map(|rank| node(rank, &members.controller)).collect();
    let supervisor = Supervisor::start(nodes, handle.clone(), commands, patient()).unwrap();
    supervisor.wait_until_ready(LONG).unwrap();
    let (tokens, _) = Answer::submit(&handle, request(10, 2)).finish();
    assert_eq!(tokens, [11, 12]);
    supervisor.stop();
}

#[test]
fn idle_connections_in_every_slot_keep_no_group_from_forming() {
    let members = Members::new(2);
    let ranks: Vec<Announcement> =
        (0..2).zip(&members.nodes).map(|(rank, node)| start_rank((rank, 2), node)).collect();
    // More than there are places, and all of them silent.
    let silent: Vec<TcpStream> = ranks
        .iter()
        .flat_map(|rank| (0..100).map(|_| TcpStream::connect(rank.address).unwrap()))
        .collect();
    forms_and_answers(&ranks, &members);
    drop(silent);
}

/// An address that hangs up on so many callers and passes the others on to `rank`.
fn hangs_up_first(rank: &Announcement, times: usize) -> Announcement {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let (front, behind) = (listener.local_addr().unwrap(), rank.address);
    thread::spawn(move || {
        for (number, near) in listener.incoming().enumerate() {
            let near = near.unwrap();
            if number < times {
                continue;
            }
            let far = TcpStream::connect(behind).unwrap();
            for (mut from, mut to) in [(near.try_clone(), far.try_clone()), (Ok(far), Ok(near))]
                .map(|(a, b)| (a.unwrap(), b.unwrap()))
            {
                thread::spawn(move || {
                    let _ = std::io::copy(&mut from, &mut to);
                    let _ = to.shutdown(std::net::Shutdown::Write);
                });
            }
        }
    });
    Announcement { address: front, ..rank.clone() }
}

#[test]
fn a_rank_that_hangs_up_at_first_is_called_again() {
    let members = Members::new(2);
    let ranks: Vec<Announcement> = (0..2)
        .zip(&members.nodes)
        .map(|(rank, node)| hangs_up_first(&start_rank((rank, 2), node), 4))
        .collect();
    forms_and_answers(&ranks, &members);
}

#[test]
fn a_member_with_another_ranks_token_is_not_that_rank() {
    // Node 2 is of the cluster, but the front named node 1 as rank 1.
    let members = Members::new(3);
    let rank = start_rank((0, 2), &members.nodes[0]);
    let expected = Announcement { key: Some(members.nodes[1].key()), ..rank.clone() };
    let socket = TcpStream::connect(rank.address).unwrap();
    let (deadline, role) =
        (HandshakeDeadline::after(LONG), ExpectedPeer { role: Role::Node, key: rank.key });
    let front = Channel::call(socket, &members.controller, Service::Rank, role, deadline).unwrap();
    front.set_read_timeout(Some(LONG)).unwrap();
    let sender = Sender::new(front.clone()).unwrap();
    sender.send(&Hello::control(rank.token.clone())).unwrap();
    let form = ToRank::Form(GroupPlan {
        epoch: 1,
        peers: vec![rank.clone(), expected],
        links: LinkChoice::Tcp,
    });
    sender.send(&form).unwrap();
    let peer = |node: &Credentials, way: StreamKind| -> PeerReply {
        let socket = TcpStream::connect(rank.address).unwrap();
        let deadline = HandshakeDeadline::after(LONG);
        let mut peer = Channel::call(socket, node, Service::Rank, role, deadline).unwrap();
        peer.set_read_timeout(Some(LONG)).unwrap();
        let token = rank.token.clone();
        let hello = Hello::Peer { token, epoch: 1, identity: identity(1, 2), way };
        peer.write_all(&wire::encode(&hello).unwrap()).unwrap();
        wire::read(&mut peer, MAX_MESSAGE_BYTES).unwrap()
    };
    let PeerReply::Refused(reason) = peer(&members.nodes[2], StreamKind::Data) else {
        panic!("it was taken for rank 1")
    };
    assert!(reason.contains("another node's key"), "{reason}");
    // That ends nothing: the right one is still waited for.
    for way in [StreamKind::Data, StreamKind::Farewell] {
        assert!(matches!(peer(&members.nodes[1], way), PeerReply::Welcome(_)));
    }
}
