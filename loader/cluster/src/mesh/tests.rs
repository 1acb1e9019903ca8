//! Which connections are admitted to a group that is being formed, and how others are refused.

use std::{
    net::{SocketAddr, TcpListener},
    sync::mpsc,
};

use super::*;
use crate::{PROTOCOL, token::Token};

/// Only a test that hangs waits that long.
const LONG: Duration = Duration::from_mins(10);

fn identity(rank: u32) -> Identity {
    Identity {
        model_id: "m".repeat(64),
        layout_id: "l".repeat(64),
        rank,
        ranks: 3,
        engine_version: "0.1.0".to_owned(),
        protocol: PROTOCOL,
    }
}

/// Connections to rank 0 of three, as its acceptor would pass them on.
struct Rank0 {
    listener: TcpListener,
    token: Token,
    peers: Vec<Announcement>,
}

impl Rank0 {
    fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let token = Token::generate().unwrap();
        let address: SocketAddr = listener.local_addr().unwrap();
        let peer = Announcement { address, token: token.clone(), key: None };
        Self { listener, token, peers: vec![peer; 3] }
    }

    fn connection(
        &self,
        identity: Identity,
        epoch: u64,
        way: StreamKind,
    ) -> (PeerConnection, Channel) {
        let near = TcpStream::connect(self.peers[0].address).unwrap();
        let stream = self.listener.accept().unwrap().0.into();
        let hello = Hello::Peer { token: self.token.clone(), epoch, identity, way };
        (PeerConnection { hello, stream }, near.into())
    }
}

fn reply(from: &mut Channel) -> PeerReply {
    from.set_read_timeout(Some(LONG)).unwrap();
    wire::read(from, MAX_HELLO_BYTES).unwrap()
}

fn is_welcome(from: &mut Channel) -> bool {
    matches!(reply(from), PeerReply::Welcome(_))
}

#[test]
fn refused_connections_do_not_end_the_forming_and_are_listed_when_it_fails() {
    let rank_0 = Rank0::new();
    let (sender, receiver) = mpsc::channel();
    let mut ends = Vec::new();
    let mut connect_as = |identity, epoch, way| {
        let (connection, end) = rank_0.connection(identity, epoch, way);
        sender.send(connection).unwrap();
        ends.push(end);
    };
    connect_as(Identity { engine_version: "9.9.9".to_owned(), ..identity(1) }, 5, StreamKind::Data);
    connect_as(identity(1), 5, StreamKind::Data);
    connect_as(identity(1), 5, StreamKind::Data);
    connect_as(identity(0), 5, StreamKind::Data);
    connect_as(identity(9), 5, StreamKind::Data);
    connect_as(identity(2), 5, StreamKind::Farewell);
    connect_as(identity(2), 5, StreamKind::Data);
    // Of another epoch; neither here nor there.
    connect_as(identity(1), 4, StreamKind::Farewell);
    let mut mailbox = Mailbox::new(receiver);
    let mut streams: Streams = (0..3).map(|_| [None, None]).collect();
    let deadline = Deadline::after(Duration::ZERO);
    let limit = FormDeadline { deadline, superseded: &|| false };
    let error =
        accept(&identity(0), 5, &rank_0.peers, &mut streams, &mut mailbox, limit).unwrap_err();
    assert_eq!(error.rank(), Some(1));
    let text = error.to_string();
    assert!(text.starts_with("rank 1 did not connect in time; refused meanwhile ("), "{text}");
    assert!(text.contains("engine version 9.9.9") && text.contains("already"), "{text}");
    assert!(text.contains("127.0.0.1:") && text.ends_with("; and 1 more)"), "{text}");
    let welcome: Vec<bool> = ends[..7].iter_mut().map(is_welcome).collect();
    assert_eq!(welcome, [false, true, false, false, false, true, true]);
    // The one that was missing comes, and the group is whole.
    let (connection, mut end) = rank_0.connection(identity(1), 5, StreamKind::Farewell);
    sender.send(connection).unwrap();
    let deadline = Deadline::after(LONG);
    let limit = FormDeadline { deadline, superseded: &|| false };
    accept(&identity(0), 5, &rank_0.peers, &mut streams, &mut mailbox, limit).unwrap();
    assert!(is_welcome(&mut end));
}

#[test]
fn early_connections_are_bounded_and_the_oldest_make_room() {
    let rank_0 = Rank0::new();
    let (sender, receiver) = mpsc::channel();
    let mut mailbox = Mailbox::new(receiver);
    let mut ends = Vec::new();
    for epoch in 0..MAX_WAITING_PEERS as u64 + 10 {
        let (connection, end) = rank_0.connection(identity(1), 100 + epoch, StreamKind::Data);
        sender.send(connection).unwrap();
        ends.push(end);
    }
    let deadline = Deadline::after(Duration::ZERO);
    let limit = FormDeadline { deadline, superseded: &|| false };
    assert!(mailbox.next(1, limit).is_none());
    assert_eq!(mailbox.early.len(), MAX_WAITING_PEERS);
    assert_eq!(mailbox.early.front().unwrap().epoch(), 110);
    let limit = FormDeadline { deadline: Deadline::after(LONG), superseded: &|| false };
    assert_eq!(mailbox.next(120, limit).unwrap().epoch(), 120);
}

#[test]
fn closed_connections_are_retried_until_the_deadline() {
    let tries = std::cell::Cell::new(0);
    let hung_up = || FormError::Reply { rank: 0, source: WireError::Closed };
    let long = Deadline::after(LONG);
    let limit = FormDeadline { deadline: long, superseded: &|| false };
    let rank_0 = Rank0::new();
    let connected = retry_hang_ups(limit, || {
        tries.set(tries.get() + 1);
        if tries.get() < 4 {
            return Err(hung_up());
        }
        Ok(TcpStream::connect(rank_0.peers[0].address)?.into())
    });
    assert!(connected.is_ok() && tries.get() == 4);
    // But nobody who does not listen any more.
    let refused = || io::Error::from(ErrorKind::ConnectionRefused);
    let gone = retry_hang_ups(limit, || Err(FormError::Connect { rank: 0, source: refused() }));
    assert!(matches!(gone, Err(FormError::Connect { .. })));
    tries.set(0);
    let short = FormDeadline { deadline: Deadline::after(Duration::ZERO), ..limit };
    let too_late = retry_hang_ups(short, || {
        tries.set(tries.get() + 1);
        Err(hung_up())
    });
    assert!(too_late.is_err() && tries.get() == 1);
}
