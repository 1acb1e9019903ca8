//! How ranks connect to each other: of two, the higher one connects, twice, and the lower one
//! accepts. All agree on epoch and identity before the first frame.

#[cfg(test)]
mod tests;

use std::{
    collections::VecDeque,
    fmt,
    io::{self, ErrorKind, Read, Write as _},
    net::TcpStream,
    sync::mpsc::{Receiver, RecvTimeoutError},
    thread,
    time::Duration,
};

use shardpack_collectives::{Deadline, Group as _, GroupError, Link, LinkedGroup, TcpLink};
use shardpack_identity::{
    Channel, Credentials, ExpectedPeer, HandshakeDeadline, HandshakeError, PeerKey, Role, Service,
    is_local,
};

use super::{
    acceptor::refuse,
    announce::Announcement,
    identity::Identity,
    message::{Opening, PeerReply, Way},
    wire::{self, MAX_OPENING_BYTES, WireError},
};

/// How long ranks may take to find each other; all are told at about the same time.
pub(super) const FORM_TIMEOUT: Duration = Duration::from_secs(10);

/// Between two looks at whether the group that is being formed is still wanted.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// How long one try to connect may take: longer than a lost packet takes to be sent again.
const CONNECT_TRY: Duration = Duration::from_millis(1500);

/// Most ranks of a group.
pub(super) const MAX_RANKS: u32 = 64;

/// Most connections of peers that wait until they are looked at, and as many again that have come
/// before their epoch: two of every rank, which is all that one forming can bring.
pub(super) const MAX_WAITING_PEERS: usize = 2 * MAX_RANKS as usize;

/// Why ranks did not come together.
#[derive(Debug, thiserror::Error)]
pub(super) enum FormError {
    #[error("the front named {found} ranks, and the package is of {expected}")]
    Ranks { expected: u32, found: usize },
    #[error("rank {rank} cannot be reached")]
    Connect { rank: u32, source: io::Error },
    #[error("rank {rank} cannot be connected to")]
    Handshake { rank: u32, source: HandshakeError },
    #[error("rank {rank} speaks {found}, and this rank {expected}")]
    Manner { rank: u32, found: &'static str, expected: &'static str },
    #[error("rank {rank} did not answer")]
    Reply { rank: u32, source: WireError },
    #[error("rank {rank} refused: {reason}")]
    Refused { rank: u32, reason: String },
    #[error("rank {rank} is another than the front said: {found}")]
    Mismatch { rank: u32, found: String },
    #[error("rank {rank} did not connect in time{refused}")]
    Missing { rank: u32, refused: Refused },
    #[error("a connection cannot be used")]
    Socket(#[from] io::Error),
    #[error("the connected ranks did not answer each other")]
    Group(#[from] GroupError),
    #[error("another group is being formed")]
    Superseded,
}

impl FormError {
    /// Whether the other side hung up without a word.
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

    /// Whose fault it is, if it is one's.
    pub(super) fn rank(&self) -> Option<u32> {
        match self {
            Self::Connect { rank, .. }
            | Self::Handshake { rank, .. }
            | Self::Manner { rank, .. }
            | Self::Reply { rank, .. }
            | Self::Refused { rank, .. }
            | Self::Mismatch { rank, .. }
            | Self::Missing { rank, .. } => Some(*rank),
            Self::Group(error) => blame(error.clone()).0,
            Self::Ranks { .. } | Self::Socket(_) | Self::Superseded => None,
        }
    }
}

/// Connections that came while ranks were awaited and were not theirs. They end nothing: whoever
/// has learned a rank's token could keep the group from forming otherwise.
#[derive(Debug, Default)]
pub(super) struct Refused {
    told: Vec<String>,
    more: u64,
}

/// Refused connections that an error tells of.
const MOST_TOLD: usize = 3;

impl Refused {
    fn add(&mut self, stream: &Channel, reason: &str) {
        if self.told.len() == MOST_TOLD {
            self.more += 1;
            return;
        }
        let from = stream.peer_addr().map_or_else(|_| "somebody".to_owned(), |it| it.to_string());
        self.told.push(format!("{from}: {reason}"));
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.told.is_empty() {
            return Ok(());
        }
        write!(f, "; refused meanwhile ({}", self.told.join("; "))?;
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
        GroupError::OutOfStep { rank, expected, found } => {
            (Some(rank), format!("it is out of step: expected {expected}, found {found}"))
        }
        GroupError::Aborted(reason) => (None, reason),
    }
}

/// A peer's connection whose opening has been read.
pub(super) struct PeerConnection {
    pub(super) opening: Opening,
    pub(super) stream: Channel,
}

/// Where peers' connections arrive, those for a later epoch included.
pub(super) struct Mailbox {
    receiver: Receiver<PeerConnection>,
    /// In the order in which they came.
    early: VecDeque<PeerConnection>,
}

type Streams = Vec<[Option<Channel>; 2]>;

/// How long to go on forming a group.
#[derive(Clone, Copy)]
struct Patience<'a> {
    deadline: Deadline,
    /// Whether another group is wanted by now.
    superseded: &'a dyn Fn() -> bool,
}

impl Patience<'_> {
    /// The time until the next look; none when there is nothing to wait for any more.
    fn slice(&self, most: Duration) -> Option<Duration> {
        let left = self.deadline.left().min(most);
        (!left.is_zero() && !(self.superseded)()).then_some(left)
    }

    /// What a failed wait came from.
    fn or_superseded(&self, error: FormError) -> FormError {
        if (self.superseded)() { FormError::Superseded } else { error }
    }
}

/// Reads from a channel as long as there is patience, however slowly bytes trickle in.
struct Patiently<'a>(&'a Channel, Patience<'a>);

impl Read for Patiently<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let Self(mut stream, patience) = *self;
        loop {
            let slice = patience.slice(LOOK_AGAIN).ok_or(ErrorKind::TimedOut)?;
            stream.set_read_timeout(Some(slice.max(Duration::from_millis(1))))?;
            match stream.read(into) {
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                result => return result,
            }
        }
    }
}

/// Who a rank is, and with what it proves it: inside TLS, or nothing in the clear.
pub(super) struct Me<'a> {
    pub(super) identity: &'a Identity,
    pub(super) credentials: Option<&'a Credentials>,
}

/// The group of `epoch`, with `peers` in rank order, which [`meet`] when all have it. Given up
/// as soon as it is `superseded`.
pub(super) fn form(
    Me { identity: me, credentials }: Me<'_>,
    epoch: u64,
    peers: &[Announcement],
    mailbox: &mut Mailbox,
    superseded: &dyn Fn() -> bool,
) -> Result<LinkedGroup, FormError> {
    let patience = Patience { deadline: Deadline::after(FORM_TIMEOUT), superseded };
    if peers.len() != me.ranks as usize || me.ranks > MAX_RANKS {
        return Err(FormError::Ranks { expected: me.ranks, found: peers.len() });
    }
    let mut streams: Streams = peers.iter().map(|_| [None, None]).collect();
    for (rank, peer) in (0..me.rank).zip(peers) {
        for way in [Way::Data, Way::Farewell] {
            let connected =
                persist(patience, || connect((me, credentials), epoch, rank, peer, way, patience))?;
            streams[rank as usize][way as usize] = Some(connected);
        }
    }
    accept(me, epoch, peers, &mut streams, mailbox, patience)?;
    let mut links: Vec<Option<Box<dyn Link>>> = Vec::new();
    for ways in streams {
        let [Some(data), Some(farewell)] = ways else {
            links.push(None);
            continue;
        };
        links.push(Some(Box::new(TcpLink::new(data, farewell)?)));
    }
    Ok(LinkedGroup::new(me.rank, epoch, links)?)
}

/// Waits until every rank has its end of the group.
pub(super) fn meet(group: &LinkedGroup) -> Result<(), FormError> {
    Ok(group.barrier(Deadline::after(FORM_TIMEOUT))?)
}

/// Tries again where the other side hung up: it does so to make room for others when strangers
/// fill its door. A process that has ended does not answer at all, and is not tried again.
fn persist(
    patience: Patience<'_>,
    connect: impl Fn() -> Result<Channel, FormError>,
) -> Result<Channel, FormError> {
    loop {
        match connect() {
            Err(error) if error.is_hung_up() => {
                let Some(slice) = patience.slice(LOOK_AGAIN) else { return Err(error) };
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
    way: Way,
    patience: Patience<'_>,
) -> Result<Channel, FormError> {
    let socket = reach(peer, patience)
        .map_err(|source| patience.or_superseded(FormError::Connect { rank, source }))?;
    socket.set_nodelay(true)?;
    let stream = match (credentials, peer.key) {
        (None, None) if is_local(peer.address.ip()) => Channel::from(socket),
        (Some(credentials), Some(key)) => {
            let is_cancelled = || patience.slice(LOOK_AGAIN).is_none();
            let at = patience.deadline.moment();
            let limit = HandshakeDeadline { at, is_cancelled: &is_cancelled };
            let expected = ExpectedPeer { role: Role::Node, key: Some(key) };
            Channel::call(socket, credentials, Service::Rank, expected, limit)
                .map_err(|source| patience.or_superseded(FormError::Handshake { rank, source }))?
        }
        (_, None) => {
            return Err(FormError::Manner { rank, found: "in the clear", expected: "TLS" });
        }
        (None, Some(_)) => {
            return Err(FormError::Manner { rank, found: "TLS", expected: "in the clear" });
        }
    };
    let (token, identity) = (peer.token.clone(), me.clone());
    let opening = Opening::Peer { token, epoch, identity, way };
    let failed = |source| patience.or_superseded(FormError::Reply { rank, source });
    write(&stream, &opening).map_err(failed)?;
    let reply = wire::read(&mut Patiently(&stream, patience), MAX_OPENING_BYTES);
    match reply.map_err(failed)? {
        PeerReply::Welcome(identity) => match check(me, rank, &identity) {
            Ok(()) => Ok(stream),
            Err(found) => Err(FormError::Mismatch { rank, found }),
        },
        PeerReply::Refused(reason) => Err(FormError::Refused { rank, reason }),
    }
}

fn reach(peer: &Announcement, patience: Patience<'_>) -> io::Result<TcpStream> {
    loop {
        let slice = patience.slice(CONNECT_TRY).ok_or(ErrorKind::TimedOut)?;
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

/// Whether `found` is rank `rank` of my group; what it is otherwise.
fn check(me: &Identity, rank: u32, found: &Identity) -> Result<(), String> {
    let expected = Identity { rank, ..me.clone() };
    if *found == expected {
        return Ok(());
    }
    let Identity { model_id, layout_id, rank: number, ranks, engine_version, protocol } = found;
    Err(format!(
        "rank {number} of {ranks}, model {model_id:.12}, layout {layout_id:.12}, engine version \
         {engine_version:.12}, protocol version {protocol}"
    ))
}

/// Waits until every higher rank has connected both ways. Others are refused and end nothing.
fn accept(
    me: &Identity,
    epoch: u64,
    peers: &[Announcement],
    streams: &mut Streams,
    mailbox: &mut Mailbox,
    patience: Patience<'_>,
) -> Result<(), FormError> {
    let first = me.rank as usize + 1;
    let mut refused = Refused::default();
    loop {
        let missing = |ways: &[Option<Channel>; 2]| ways.iter().any(Option::is_none);
        let Some(index) = streams[first..].iter().position(missing) else { return Ok(()) };
        let rank = (first + index) as u32;
        let Some(PeerConnection { opening, stream }) = mailbox.next(epoch, patience) else {
            return Err(patience.or_superseded(FormError::Missing { rank, refused }));
        };
        let place = place_of(me, &opening, stream.peer().map(|peer| peer.key), peers, streams);
        match place {
            Ok(place) => match write(&stream, &PeerReply::Welcome(me.clone())) {
                Ok(()) => *place = Some(stream),
                Err(_) => refused.add(&stream, "it hung up when it was answered"),
            },
            Err(reason) => {
                refuse(&stream, &opening, &format!("it does not belong to this group: {reason}"));
                refused.add(&stream, &reason);
            }
        }
    }
}

/// Where the connection of a higher rank belongs; why it does not belong anywhere otherwise.
fn place_of<'a>(
    me: &Identity,
    opening: &Opening,
    key: Option<PeerKey>,
    peers: &[Announcement],
    streams: &'a mut Streams,
) -> Result<&'a mut Option<Channel>, String> {
    let Opening::Peer { identity, way, .. } = opening else {
        return Err("it is no rank".to_owned());
    };
    let rank = identity.rank;
    check(me, rank, identity).map_err(|found| format!("it is {found}"))?;
    let Some(ways) = streams.get_mut(rank as usize).filter(|_| rank > me.rank) else {
        return Err(format!("rank {rank} has no place above rank {}", me.rank));
    };
    // A member with another's token is not that other.
    if peers.get(rank as usize).and_then(|peer| peer.key) != key {
        return Err(format!("it called itself rank {rank}, with another node's key"));
    }
    match &mut ways[*way as usize] {
        place @ None => Ok(place),
        Some(_) => Err(format!("rank {rank} has connected already")),
    }
}

impl Mailbox {
    pub(super) fn new(receiver: Receiver<PeerConnection>) -> Self {
        Self { receiver, early: VecDeque::new() }
    }

    /// The next connection for `epoch`; older ones are dropped, later ones kept for their time.
    fn next(&mut self, epoch: u64, patience: Patience<'_>) -> Option<PeerConnection> {
        self.early.retain(|it| it.epoch() >= epoch);
        if let Some(index) = self.early.iter().position(|it| it.epoch() == epoch) {
            return self.early.remove(index);
        }
        loop {
            let next = match self.receiver.recv_timeout(patience.slice(LOOK_AGAIN)?) {
                Ok(next) => next,
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) => return None,
            };
            match next.epoch().cmp(&epoch) {
                std::cmp::Ordering::Less => {}
                std::cmp::Ordering::Equal => return Some(next),
                std::cmp::Ordering::Greater => {
                    // The oldest makes room: those who hold on to their places came early.
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
        match self.opening {
            Opening::Peer { epoch, .. } => epoch,
            Opening::Control { .. } => 0,
        }
    }
}
