//! How ranks connect to each other: of two, the higher one connects, twice, and the lower one
//! accepts. All agree on epoch and identity before the first frame.

#[cfg(test)]
mod tests;

use std::{
    collections::VecDeque,
    fmt,
    io::{self, ErrorKind, Read, Write as _},
    net::{SocketAddr, TcpStream},
    sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError},
    thread,
    time::Duration,
};

use shardpack_collectives::{Deadline, Group as _, GroupError, Link, LinkedGroup, rdma::Pair};
use shardpack_identity::{
    Channel, Credentials, ExpectedPeer, HandshakeDeadline, HandshakeError, PeerKey, Role, Service,
    is_local, on_link_of,
};

use super::{
    acceptor::refuse,
    announce::Announcement,
    identity::Identity,
    links::{LinkFailure, LinkMaker},
    message::{GroupPlan, Hello, PeerReply, StreamKind},
    wire::{self, MAX_HELLO_BYTES, WireError},
};

/// How long ranks may take to find each other; the front starts all at about the same time.
pub(super) const FORM_TIMEOUT: Duration = Duration::from_secs(10);

/// Between two looks at whether the group that is being formed is still wanted.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// How long one try to connect may take: longer than a lost packet takes to be sent again.
const CONNECT_ATTEMPT_TIMEOUT: Duration = Duration::from_millis(1500);

/// Most ranks of a group.
pub(super) const MAX_RANKS: u32 = 64;

/// Most connections of peers that wait until they are looked at, and as many again that have come
/// before their epoch: two of every rank, which is all that one forming can bring.
pub(super) const MAX_WAITING_PEERS: usize = 2 * MAX_RANKS as usize;

/// Why a group could not be formed.
#[derive(Debug, thiserror::Error)]
pub(super) enum FormError {
    #[error("the front listed {found} ranks, but the package set has {expected}")]
    Ranks { expected: u32, found: usize },
    #[error("rank {rank} cannot be reached")]
    Connect { rank: u32, source: io::Error },
    #[error("rank {rank} cannot be connected to")]
    Handshake { rank: u32, source: HandshakeError },
    #[error("rank {rank} uses {found}, and this rank uses {expected}")]
    Encryption { rank: u32, found: &'static str, expected: &'static str },
    #[error("rank {rank} did not answer")]
    Reply { rank: u32, source: WireError },
    #[error("rank {rank} refused: {reason}")]
    Refused { rank: u32, reason: String },
    #[error("rank {rank} has another identity than the front listed: {found}")]
    Mismatch { rank: u32, found: String },
    #[error("rank {rank} did not connect in time{refused}")]
    Missing { rank: u32, refused: Refused },
    #[error(transparent)]
    Link(#[from] LinkFailure),
    #[error("a connection cannot be used")]
    Socket(#[from] io::Error),
    #[error("the connected ranks did not answer each other")]
    Group(#[from] GroupError),
    #[error("another group is being formed")]
    Superseded,
}

impl FormError {
    /// Whether the other side closed the connection without a message.
    fn is_hung_up(&self) -> bool {
        match self {
            Self::Handshake { source: HandshakeError::Closed, .. }
            | Self::Reply { source: WireError::Closed, .. } => true,
            Self::Reply { source: WireError::Io(error), .. } => {
                matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe)
            }
            _ => false,
        }
    }

    /// The rank that is at fault, if it is one.
    pub(super) fn rank(&self) -> Option<u32> {
        match self {
            Self::Connect { rank, .. }
            | Self::Handshake { rank, .. }
            | Self::Encryption { rank, .. }
            | Self::Reply { rank, .. }
            | Self::Refused { rank, .. }
            | Self::Mismatch { rank, .. }
            | Self::Missing { rank, .. } => Some(*rank),
            Self::Link(failure) => Some(failure.rank()),
            Self::Group(error) => blame(error.clone()).0,
            Self::Ranks { .. } | Self::Socket(_) | Self::Superseded => None,
        }
    }
}

/// Connections that were refused while the group formed. They do not fail it: otherwise anyone with
/// a rank's token could keep the group from forming.
#[derive(Debug, Default)]
pub(super) struct Refused {
    reported: Vec<String>,
    more: u64,
}

/// Refused connections that an error lists.
const MAX_REPORTED: usize = 3;

impl Refused {
    fn add(&mut self, stream: &Channel, reason: &str) {
        if self.reported.len() == MAX_REPORTED {
            self.more += 1;
            return;
        }
        let from = stream.peer_addr().map_or_else(|_| "somebody".to_owned(), |it| it.to_string());
        self.reported.push(format!("{from}: {reason}"));
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.reported.is_empty() {
            return Ok(());
        }
        write!(f, "; refused meanwhile ({}", self.reported.join("; "))?;
        if self.more > 0 {
            write!(f, "; and {} more", self.more)?;
        }
        f.write_str(")")
    }
}

/// The rank that a group error blames, if any, and what was seen of it.
pub(super) fn blame(error: GroupError) -> (Option<u32>, String) {
    match error {
        GroupError::Timeout { rank, waited } => {
            (Some(rank), format!("it did not answer within {} ms", waited.as_millis()))
        }
        GroupError::Lost { rank, reason } => (Some(rank), reason),
        GroupError::Link { rank, reason } => {
            (Some(rank), format!("the link to it failed: {reason}"))
        }
        GroupError::OutOfStep { rank, expected, found } => {
            (Some(rank), format!("it is out of step: expected {expected}, found {found}"))
        }
        GroupError::Aborted(reason) => (None, reason),
    }
}

/// A peer's connection whose hello has been read.
pub(super) struct PeerConnection {
    pub(super) hello: Hello,
    pub(super) stream: Channel,
}

/// Where peers' connections arrive, those for a later epoch included.
pub(super) struct Mailbox {
    receiver: Receiver<PeerConnection>,
    /// In the order in which they came.
    early: VecDeque<PeerConnection>,
}

type Streams = Vec<[Option<Channel>; 2]>;

/// The deadline of forming a group, which a newer group cuts short.
#[derive(Clone, Copy)]
struct FormDeadline<'a> {
    deadline: Deadline,
    /// Whether another group is wanted by now.
    superseded: &'a dyn Fn() -> bool,
}

impl FormDeadline<'_> {
    /// The time until the next poll; none when there is nothing to wait for any more.
    fn slice(&self, most: Duration) -> Option<Duration> {
        let left = self.deadline.left().min(most);
        (!left.is_zero() && !(self.superseded)()).then_some(left)
    }

    /// The error of a failed wait.
    fn or_superseded(&self, error: FormError) -> FormError {
        if (self.superseded)() { FormError::Superseded } else { error }
    }
}

/// Reads from a channel until the deadline, however slowly bytes arrive.
struct DeadlineReader<'a>(&'a Channel, FormDeadline<'a>);

impl Read for DeadlineReader<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let Self(mut stream, limit) = *self;
        loop {
            let slice = limit.slice(POLL_INTERVAL).ok_or(ErrorKind::TimedOut)?;
            stream.set_read_timeout(Some(slice.max(Duration::from_millis(1))))?;
            match stream.read(into) {
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                result => return result,
            }
        }
    }
}

/// This rank's identity and its TLS credentials; none without TLS.
pub(super) struct LocalRank<'a> {
    pub(super) identity: &'a Identity,
    pub(super) credentials: Option<&'a Credentials>,
    /// Where it listens.
    pub(super) address: SocketAddr,
}

/// Forms the group that is planned; [`rendezvous`] completes it. Stops as soon as it is
/// `superseded`.
pub(super) fn form(
    LocalRank { identity: me, credentials, address }: LocalRank<'_>,
    plan: &GroupPlan,
    mailbox: &mut Mailbox,
    maker: &mut LinkMaker,
    (timeout, superseded): (Duration, &dyn Fn() -> bool),
) -> Result<LinkedGroup, FormError> {
    let limit = FormDeadline { deadline: Deadline::after(timeout), superseded };
    let (epoch, peers) = (plan.epoch, plan.peers.as_slice());
    if peers.len() != me.ranks as usize || me.ranks > MAX_RANKS {
        return Err(FormError::Ranks { expected: me.ranks, found: peers.len() });
    }
    let mut streams: Streams = peers.iter().map(|_| [None, None]).collect();
    for (rank, peer) in (0..me.rank).zip(peers) {
        // The front has told its own way to the link.
        let peer = &Announcement { address: on_link_of(peer.address, address), ..peer.clone() };
        for way in [StreamKind::Data, StreamKind::Farewell] {
            let connected = retry_hang_ups(limit, || {
                connect((me, credentials), epoch, rank, peer, way, limit)
            })?;
            streams[rank as usize][way as usize] = Some(connected);
        }
    }
    accept(me, epoch, peers, &mut streams, mailbox, limit)?;
    maker.begin();
    let mut links: Vec<Option<Box<dyn Link>>> = Vec::new();
    for (peer, ways) in (0..).zip(streams) {
        let [Some(data), Some(farewell)] = ways else {
            links.push(None);
            continue;
        };
        let pair = Pair { rank: me.rank, peer, epoch };
        let link = maker.link(pair, plan, (data, farewell), limit.deadline);
        links.push(Some(link.map_err(|error| limit.or_superseded(error.into()))?));
    }
    Ok(LinkedGroup::new(me.rank, epoch, links)?)
}

/// Waits until every rank has its end of the group, and measures its links.
pub(super) fn rendezvous(group: &LinkedGroup, timeout: Duration) -> Result<(), FormError> {
    let deadline = Deadline::after(timeout);
    group.barrier(deadline)?;
    Ok(group.measure(deadline)?)
}

/// Retries where the other side closed the connection: it does so to free a slot when unknown
/// clients hold them all. A process that has ended does not answer at all, and is not tried again.
fn retry_hang_ups(
    limit: FormDeadline<'_>,
    connect: impl Fn() -> Result<Channel, FormError>,
) -> Result<Channel, FormError> {
    loop {
        match connect() {
            Err(error) if error.is_hung_up() => {
                let Some(slice) = limit.slice(POLL_INTERVAL) else { return Err(error) };
                thread::sleep(slice);
            }
            result => return result,
        }
    }
}

fn connect(
    (me, credentials): (&Identity, Option<&Credentials>),
    epoch: u64,
    rank: u32,
    peer: &Announcement,
    way: StreamKind,
    limit: FormDeadline<'_>,
) -> Result<Channel, FormError> {
    let socket = reach(peer, limit)
        .map_err(|source| limit.or_superseded(FormError::Connect { rank, source }))?;
    socket.set_nodelay(true)?;
    let stream = match (credentials, peer.key) {
        (None, None) if is_local(peer.address.ip()) => Channel::from(socket),
        (Some(credentials), Some(key)) => {
            let is_cancelled = || limit.slice(POLL_INTERVAL).is_none();
            let at = limit.deadline.moment();
            let handshake = HandshakeDeadline { at, is_cancelled: &is_cancelled };
            let expected = ExpectedPeer { role: Role::Node, key: Some(key) };
            Channel::call(socket, credentials, Service::Rank, expected, handshake)
                .map_err(|source| limit.or_superseded(FormError::Handshake { rank, source }))?
        }
        (_, None) => {
            return Err(FormError::Encryption { rank, found: "no TLS", expected: "TLS" });
        }
        (None, Some(_)) => {
            return Err(FormError::Encryption { rank, found: "TLS", expected: "no TLS" });
        }
    };
    let (token, identity) = (peer.token.clone(), me.clone());
    let hello = Hello::Peer { token, epoch, identity, way };
    let failed = |source| limit.or_superseded(FormError::Reply { rank, source });
    write(&stream, &hello).map_err(failed)?;
    let reply = wire::read(&mut DeadlineReader(&stream, limit), MAX_HELLO_BYTES);
    match reply.map_err(failed)? {
        PeerReply::Welcome(identity) => match check(me, rank, &identity) {
            Ok(()) => Ok(stream),
            Err(found) => Err(FormError::Mismatch { rank, found }),
        },
        PeerReply::Refused(reason) => Err(FormError::Refused { rank, reason }),
    }
}

fn reach(peer: &Announcement, limit: FormDeadline<'_>) -> io::Result<TcpStream> {
    loop {
        let slice = limit.slice(CONNECT_ATTEMPT_TIMEOUT).ok_or(ErrorKind::TimedOut)?;
        match TcpStream::connect_timeout(&peer.address, slice) {
            Err(error) if error.kind() == ErrorKind::TimedOut => {}
            result => return result,
        }
    }
}

fn write(mut stream: &Channel, message: &impl serde::Serialize) -> Result<(), WireError> {
    // A fresh socket has room for a message this small.
    Ok(stream.write_all(&wire::encode(message)?)?)
}

/// Checks that `found` is rank `rank` of my group; otherwise describes it.
fn check(me: &Identity, rank: u32, found: &Identity) -> Result<(), String> {
    let expected = Identity { rank, ..me.clone() };
    if *found == expected {
        return Ok(());
    }
    let Identity { model_id, layout_id, rank: number, ranks, engine_version, protocol } = found;
    Err(format!(
        "rank {number} of {ranks}, model {model_id:.12}, layout {layout_id:.12}, engine version \
         {engine_version}, protocol version {protocol}"
    ))
}

/// Waits until every higher rank has connected both ways. Others are refused and end nothing.
fn accept(
    me: &Identity,
    epoch: u64,
    peers: &[Announcement],
    streams: &mut Streams,
    mailbox: &mut Mailbox,
    limit: FormDeadline<'_>,
) -> Result<(), FormError> {
    let first = me.rank as usize + 1;
    let mut refused = Refused::default();
    loop {
        let missing = |ways: &[Option<Channel>; 2]| ways.iter().any(Option::is_none);
        let Some(index) = streams[first..].iter().position(missing) else { return Ok(()) };
        let rank = (first + index) as u32;
        let Some(PeerConnection { hello, stream }) = mailbox.next(epoch, limit) else {
            return Err(limit.or_superseded(FormError::Missing { rank, refused }));
        };
        let place = slot_of(me, &hello, stream.peer().map(|peer| peer.key), peers, streams);
        match place {
            Ok(place) => match write(&stream, &PeerReply::Welcome(me.clone())) {
                Ok(()) => *place = Some(stream),
                Err(_) => refused.add(&stream, "it closed the connection"),
            },
            Err(reason) => {
                refuse(&stream, &hello, &format!("it does not belong to this group: {reason}"));
                refused.add(&stream, &reason);
            }
        }
    }
}

/// The slot of a higher rank's connection, or why it has none.
fn slot_of<'a>(
    me: &Identity,
    hello: &Hello,
    key: Option<PeerKey>,
    peers: &[Announcement],
    streams: &'a mut Streams,
) -> Result<&'a mut Option<Channel>, String> {
    let Hello::Peer { identity, way, .. } = hello else {
        return Err("it is not a rank".to_owned());
    };
    let rank = identity.rank;
    check(me, rank, identity).map_err(|found| format!("it is {found}"))?;
    let Some(ways) = streams.get_mut(rank as usize).filter(|_| rank > me.rank) else {
        return Err(format!("rank {rank} does not connect to rank {}", me.rank));
    };
    // A node with another node's token is not that node.
    if peers.get(rank as usize).and_then(|peer| peer.key) != key {
        return Err(format!("it claims to be rank {rank} with another node's key"));
    }
    match &mut ways[*way as usize] {
        place @ None => Ok(place),
        Some(_) => Err(format!("rank {rank} is already connected")),
    }
}

impl Mailbox {
    pub(super) fn new(receiver: Receiver<PeerConnection>) -> Self {
        Self { receiver, early: VecDeque::new() }
    }

    /// The next connection for `epoch`; older ones are dropped, later ones kept for their time.
    fn next(&mut self, epoch: u64, limit: FormDeadline<'_>) -> Option<PeerConnection> {
        self.early.retain(|it| it.epoch() >= epoch);
        if let Some(index) = self.early.iter().position(|it| it.epoch() == epoch) {
            return self.early.remove(index);
        }
        loop {
            let next = match self.receiver.try_recv() {
                Ok(next) => next,
                Err(TryRecvError::Disconnected) => return None,
                // What has come counts, even where the deadline passed meanwhile.
                Err(TryRecvError::Empty) => {
                    match self.receiver.recv_timeout(limit.slice(POLL_INTERVAL)?) {
                        Ok(next) => next,
                        Err(RecvTimeoutError::Timeout) => continue,
                        Err(RecvTimeoutError::Disconnected) => return None,
                    }
                }
            };
            match next.epoch().cmp(&epoch) {
                std::cmp::Ordering::Less => {}
                std::cmp::Ordering::Equal => return Some(next),
                std::cmp::Ordering::Greater => {
                    // The oldest makes room: connections that are held on purpose came early.
                    if self.early.len() >= MAX_WAITING_PEERS {
                        self.early.pop_front();
                    }
                    self.early.push_back(next);
                }
            }
        }
    }
}

impl PeerConnection {
    fn epoch(&self) -> u64 {
        match self.hello {
            Hello::Peer { epoch, .. } => epoch,
            Hello::Control { .. } | Hello::Weights { .. } => 0,
        }
    }
}
