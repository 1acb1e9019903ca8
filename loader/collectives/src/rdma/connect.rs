//! How two ranks come to a link over RDMA: over their data channel, in turns. In each turn both
//! write one message and read one, so either may decline and no byte is left over: the channels then
//! carry a link over TCP.
//!
//! The turns: what each side has (nothing but questions to the devices so far); the queue pairs,
//! made once the peer is known to want them, since a failed attempt costs an Apple device what only
//! a reboot gives back; that they are connected and every receive is posted; that a first message
//! came through each. A cable on which something fails is left out, and without any the link is
//! declined. Ranks pair up in the same order, so that no two wait for each other.

use std::{
    io::{self, ErrorKind, Read as _, Write as _},
    net::UdpSocket,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use shardpack_identity::Channel;

use super::{
    device::{Device, DeviceError, Path},
    devices::Devices,
    lane::{Envelope, Lane, LaneError},
    link::{Lanes, RdmaLink, with_sources},
    offer::{Offer, OfferedPort, Queues, Shape, Turn, VERSION},
    pairing::{Ports, UsablePort, address, apart, paired, usable_ports},
    port::{Port, usable_gid},
    rules::{FRAME_BYTES, QueueShape, frames},
    slot::{Kind, MAX_LANES, SLOT_HEADER_BYTES},
};
use crate::{frame::HEADER_BYTES, group::Deadline};

/// How long a port without an IPv4 address is asked again: macOS gives a cable one late.
const ADDRESS_TIMEOUT: Duration = Duration::from_secs(2);

/// How long the first message may take: an emulated machine is slow.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);

/// How long a connect that met an unknown neighbour waits before its only repetition.
const NEIGHBOUR_TIMEOUT: Duration = Duration::from_millis(100);

/// EFAULT, and ETIMEDOUT of macOS and of Linux: how a device says that it does not know the hardware
/// address of its neighbour yet.
const UNKNOWN_NEIGHBOUR: [i32; 3] = [14, 60, 110];

const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Most frames of a small slot: 64 KiB, the longest vector that goes to every rank directly.
const MAX_SMALL_FRAMES: usize = 17;

/// Receives of a small lane: what a credit message's reserve needs, twice over.
const SMALL_SLOTS: usize = 30;

/// Frames of a large slot (256 KiB) and receives of a large lane. Both lanes of a cable have half of
/// the 1008 frames that one user measured as the most that a device keeps.
const LARGE_FRAMES: usize = 64;
const LARGE_SLOTS: usize = 7;

/// Two ranks of a group that is formed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    /// This side.
    pub rank: u32,
    /// The other one.
    pub peer: u32,
    /// Generation of the group.
    pub epoch: u64,
}

impl Shape {
    /// For a model whose hidden vector of one token has so many bytes: small slots hold one.
    #[must_use]
    pub fn for_vectors(bytes: usize) -> Self {
        let message = bytes.saturating_add(HEADER_BYTES + SLOT_HEADER_BYTES);
        let small = frames(message).clamp(1, MAX_SMALL_FRAMES);
        let shape = |frames, slots| QueueShape { slot_bytes: frames * FRAME_BYTES, slots, sges: 1 };
        Self { small: shape(small, SMALL_SLOTS), large: shape(LARGE_FRAMES, LARGE_SLOTS) }
    }

    fn numbers(&self) -> [u32; 4] {
        let Self { small, large } = self;
        [small.slot_bytes, small.slots, large.slot_bytes, large.slots].map(|it| it as u32)
    }
}

/// What this side has.
#[derive(Clone)]
pub enum Cables<'a> {
    /// Devices, whose ports may or may not be usable.
    Found(&'a Devices),
    /// None, for this reason.
    Without(String),
}

/// How the rendezvous ended.
pub enum Connected {
    /// With a link over RDMA.
    Rdma(RdmaLink),
    /// Without: one side declined. Both channels are as they were.
    Declined {
        /// Why, with the device and what to do.
        reason: String,
        /// For a link over TCP.
        data: Channel,
        /// As above.
        control: Channel,
    },
}

/// Why a rendezvous failed: the peer does not answer, or not as it should. The channels are lost.
#[derive(Debug, thiserror::Error)]
pub enum RdmaError {
    /// The data channel failed.
    #[error("rank {peer} did not answer while both agreed on RDMA")]
    Peer {
        /// Who.
        peer: u32,
        /// What was seen.
        source: io::Error,
    },
    /// The peer sent another message than this turn has.
    #[error(
        "rank {peer} is out of step while both agree on RDMA: expected {expected}, found {found}"
    )]
    OutOfStep {
        /// Who.
        peer: u32,
        /// The turn.
        expected: &'static str,
        /// What came.
        found: String,
    },
    /// The control channel cannot be used.
    #[error("the control channel to rank {peer} cannot be used")]
    Control {
        /// Who.
        peer: u32,
        /// What was seen.
        source: io::Error,
    },
}

/// One cable: a port of this side and one of the peer.
struct Cable {
    device: Arc<Device>,
    port: Port,
    gid_index: u8,
    psn: u32,
    peer: OfferedPort,
}

/// A cable's lanes: small and large.
type CableLanes = Option<[Lane; 2]>;

struct Talk<'a> {
    pair: Pair,
    data: &'a Channel,
    deadline: Deadline,
}

impl Talk<'_> {
    /// One turn: the own message, and the peer's.
    fn turn(&self, mine: &Turn) -> Result<Turn, RdmaError> {
        self.exchange(mine).map_err(|source| RdmaError::Peer { peer: self.pair.peer, source })
    }

    fn exchange(&self, mine: &Turn) -> io::Result<Turn> {
        let mut data = self.data;
        data.begin();
        // A message fits the socket's buffer, which is empty.
        data.write_all(&mine.encode())?;
        let mut size = [0; 4];
        self.read(&mut size)?;
        let mut message = vec![0; Turn::parse_size(size)?];
        self.read(&mut message)?;
        Ok(Turn::parse(&message)?)
    }

    fn read(&self, mut into: &mut [u8]) -> io::Result<()> {
        while !into.is_empty() {
            let left = self.deadline.left();
            if left.is_zero() {
                return Err(ErrorKind::TimedOut.into());
            }
            self.data.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
            let mut data = self.data;
            match data.read(into) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => into = &mut into[count..],
                Err(error) => match error.kind() {
                    ErrorKind::Interrupted | ErrorKind::WouldBlock | ErrorKind::TimedOut => {}
                    _ => return Err(error),
                },
            }
        }
        Ok(())
    }

    fn out_of_step(&self, expected: &'static str, found: &Turn) -> RdmaError {
        RdmaError::OutOfStep { peer: self.pair.peer, expected, found: format!("{found:?}") }
    }

    /// A reason for people, with the pair.
    fn reason(&self, reason: &str) -> String {
        let Pair { rank, peer, .. } = self.pair;
        format!("no RDMA between rank {rank} and rank {peer}: {reason}")
    }

    /// Joins both sides' failures.
    fn failures(&self, mine: &str, theirs: &str) -> String {
        let Pair { rank, peer, .. } = self.pair;
        let side = |rank, text: &str| (!text.is_empty()).then(|| format!("rank {rank}: {text}"));
        let mut both: Vec<_> =
            [side(rank, mine), side(peer, theirs)].into_iter().flatten().collect();
        if peer < rank {
            both.reverse();
        }
        self.reason(&both.join("; "))
    }
}

/// What the turns came to.
enum Outcome {
    Lanes(Lanes, Vec<String>),
    Declined(String),
}

/// Comes to a link with the peer, which does the same. Fails only if the peer does not answer.
pub fn connect(
    pair: Pair,
    shape: &Shape,
    cables: &Cables<'_>,
    (data, control): (Channel, Channel),
    deadline: Deadline,
) -> Result<Connected, RdmaError> {
    let failed = |source| RdmaError::Peer { peer: pair.peer, source };
    data.socket().set_nonblocking(false).map_err(failed)?;
    data.set_write_timeout(Some(deadline.left().max(POLL_INTERVAL))).map_err(failed)?;
    let talk = Talk { pair, data: &data, deadline };
    let outcome = talk.agree(shape, cables)?;
    data.set_read_timeout(None).map_err(failed)?;
    data.set_write_timeout(None).map_err(failed)?;
    match outcome {
        Outcome::Lanes(lanes, names) => RdmaLink::new(lanes, (data, control), names)
            .map(Connected::Rdma)
            .map_err(|source| RdmaError::Control { peer: pair.peer, source }),
        Outcome::Declined(reason) => Ok(Connected::Declined { reason, data, control }),
    }
}

impl Talk<'_> {
    fn agree(&self, shape: &Shape, cables: &Cables<'_>) -> Result<Outcome, RdmaError> {
        let (mine, ports) = self.own_offer(shape, cables);
        let theirs = match (self.turn(&mine)?, mine) {
            (Turn::Declined(theirs), Turn::Declined(mine)) => {
                return Ok(Outcome::Declined(self.failures(&mine, &theirs)));
            }
            (Turn::Declined(theirs), _) => {
                return Ok(Outcome::Declined(self.failures("", &theirs)));
            }
            (Turn::Offer(_), Turn::Declined(mine)) => {
                return Ok(Outcome::Declined(self.failures(&mine, "")));
            }
            (Turn::Offer(theirs), Turn::Offer(mine)) => match self.compare(&mine, &theirs)? {
                Some(reason) => return Ok(Outcome::Declined(self.reason(&reason))),
                None => theirs,
            },
            (found, _) => return Err(self.out_of_step("an offer", &found)),
        };
        let cables = self.pair_up(&ports, &theirs.ports);
        if cables.is_empty() {
            return Ok(Outcome::Declined(self.reason(&apart(&theirs.ports))));
        }
        self.join(shape, &cables)
    }

    /// What this side has, and its ports.
    fn own_offer(&self, shape: &Shape, cables: &Cables<'_>) -> (Turn, Vec<UsablePort>) {
        let devices = match cables {
            Cables::Without(reason) => return (Turn::Declined(reason.clone()), Vec::new()),
            Cables::Found(devices) => devices,
        };
        let end = Instant::now() + ADDRESS_TIMEOUT.min(self.deadline.left() / 4);
        // They are looked at once more after the end, however late this thread wakes up.
        let mut is_over = false;
        let Ports { usable: ports, remedies, .. } = loop {
            let ports = usable_ports(devices);
            let may_come = ports.usable.is_empty() && ports.lack_an_address;
            if !may_come || is_over {
                break ports;
            }
            thread::sleep(POLL_INTERVAL * 50);
            is_over = Instant::now() > end;
        };
        if ports.is_empty() {
            let reason = if devices.names().is_empty() {
                "it has no RDMA device (on macOS: `rdma_ctl enable` in Recovery)".to_owned()
            } else {
                remedies.join("; ")
            };
            return (Turn::Declined(reason), Vec::new());
        }
        let Pair { rank, peer, epoch } = self.pair;
        let offered = ports.iter().map(|(.., offered)| offered.clone()).collect();
        let shape = shape.numbers();
        let offer = Offer { version: VERSION, rank, peer, epoch, shape, ports: offered };
        (Turn::Offer(offer), ports)
    }

    /// Why two offers do not fit; both sides find the same.
    fn compare(&self, mine: &Offer, theirs: &Offer) -> Result<Option<String>, RdmaError> {
        if mine.version != theirs.version {
            let (mine, theirs) = (mine.version, theirs.version);
            return Ok(Some(format!(
                "this side has version {mine} of the rendezvous and the other one {theirs}; \
                 install the same version on both"
            )));
        }
        let Pair { rank, peer, epoch } = self.pair;
        if (theirs.rank, theirs.peer, theirs.epoch) != (peer, rank, epoch) {
            return Err(self.out_of_step("the pair's offer", &Turn::Offer(theirs.clone())));
        }
        if mine.shape != theirs.shape {
            return Ok(Some(format!(
                "this side wants slots {:?} and the other one {:?}",
                mine.shape, theirs.shape
            )));
        }
        Ok(None)
    }

    /// The cables, in the same order on both sides: that of the lower rank's devices.
    fn pair_up(&self, mine: &[UsablePort], theirs: &[OfferedPort]) -> Vec<Cable> {
        let own: Vec<_> = mine.iter().map(|(.., offered)| offered.clone()).collect();
        let pairs = if self.pair.rank < self.pair.peer {
            paired(&own, theirs)
        } else {
            paired(theirs, &own).into_iter().map(|(low, high)| (high, low)).collect()
        };
        let cable = |(own, peer): (usize, usize)| {
            let (device, port, _) = &mine[own];
            let (gid_index, _) = usable_gid(port)?;
            let (device, port, peer) = (Arc::clone(device), port.clone(), theirs[peer].clone());
            Some(Cable { device, port, gid_index, psn: fresh_psn(), peer })
        };
        pairs.into_iter().filter_map(cable).collect()
    }

    /// Makes, connects and proves the lanes of every cable.
    fn join(&self, shape: &Shape, cables: &[Cable]) -> Result<Outcome, RdmaError> {
        let mut failures = Vec::new();
        let mut lanes: Vec<CableLanes> = Vec::new();
        cables.iter().for_each(Cable::greet);
        for (number, cable) in (0_u16..).zip(cables) {
            let make = |class, shape| Lane::new(&cable.device, 2 * number + class, shape);
            let made = make(0, shape.small).and_then(|it| Ok([it, make(1, shape.large)?]));
            lanes.push(kept(made, &mut failures));
        }
        let queues = lanes.iter().zip(cables).map(|(lanes, cable)| {
            let lanes = lanes.as_ref()?;
            let classes = [0, 1].map(|class| (lanes[class].queue_number(), cable.psn_of(class)));
            Some(Queues { lid: cable.port.lid, classes })
        });
        let mine = failures.join("; ");
        let turn = Turn::Queues(queues.collect(), mine.clone());
        let theirs = match self.turn(&turn)? {
            Turn::Queues(theirs, failures) if theirs.len() == cables.len() => {
                drop_lanes(&mut lanes, |cable| theirs[cable].is_some());
                if lanes.iter().all(Option::is_none) {
                    return Ok(Outcome::Declined(self.failures(&mine, &failures)));
                }
                theirs
            }
            found => return Err(self.out_of_step("queue pairs", &found)),
        };

        for ((slot, cable), theirs) in lanes.iter_mut().zip(cables).zip(theirs) {
            let (Some(lanes), Some(theirs)) = (&mut *slot, theirs) else { continue };
            if kept(cable.connect(lanes, &theirs), &mut failures).is_none() {
                *slot = None;
            }
        }
        if let Some(declined) = self.confirm(&mut lanes, &failures)? {
            return Ok(declined);
        }
        self.probe(&mut lanes, cables, &mut failures);
        if let Some(declined) = self.confirm(&mut lanes, &failures)? {
            return Ok(declined);
        }

        let mut small = None;
        let (mut large, mut names) = (Vec::new(), Vec::new());
        for (lanes, cable) in lanes.into_iter().zip(cables) {
            let Some([of_small, of_large]) = lanes else { continue };
            small.get_or_insert(of_small);
            large.push(of_large);
            names.push(cable.device.name().to_owned());
        }
        let lanes = small.into_iter().chain(large).collect();
        Ok(Outcome::Lanes(Lanes::new(lanes, self.pair.epoch), names))
    }

    /// Drops the cables that do not work on both sides; declines if none does.
    fn confirm(
        &self,
        lanes: &mut [CableLanes],
        failures: &[String],
    ) -> Result<Option<Outcome>, RdmaError> {
        let works = (0..).zip(&*lanes).filter(|(_, lanes)| lanes.is_some());
        let mask = works.fold(0_u8, |mask, (cable, _)| mask | 1 << cable);
        let failures = failures.join("; ");
        match self.turn(&Turn::Cables(mask, failures.clone()))? {
            Turn::Cables(theirs, their_failures) => {
                drop_lanes(lanes, |cable| theirs & (1 << cable) != 0);
                Ok(lanes
                    .iter()
                    .all(Option::is_none)
                    .then(|| Outcome::Declined(self.failures(&failures, &their_failures))))
            }
            found => Err(self.out_of_step("the cables that work", &found)),
        }
    }

    /// Sends a first message on every lane and waits for the peer's.
    fn probe(&self, lanes: &mut [CableLanes], cables: &[Cable], failures: &mut Vec<String>) {
        let end = Instant::now() + PROBE_TIMEOUT.min(self.deadline.left() / 2);
        let epoch = self.pair.epoch;
        let payload: Vec<u8> = (0..=u8::MAX).collect();
        let envelope = Envelope { kind: Kind::Probe, epoch, sequence: 0, posted: [0; MAX_LANES] };
        for lanes in lanes.iter_mut() {
            let Some(both) = lanes else { continue };
            let sent = both.iter_mut().try_for_each(|lane| lane.send(envelope, &payload));
            if kept(sent, failures).is_none() {
                *lanes = None;
            }
        }
        for (lanes, cable) in lanes.iter_mut().zip(cables) {
            let Some(both) = lanes else { continue };
            let proved = both.iter_mut().try_for_each(|lane| {
                loop {
                    if lane.poll(epoch).map_err(|error| with_sources(&error))?.has_probe {
                        return Ok(());
                    }
                    if Instant::now() > end {
                        let name = cable.device.name();
                        return Err(format!(
                            "{name}: no message came through the cable to {}; check that both ends \
                             are the same cable's",
                            cable.peer.name
                        ));
                    }
                    thread::sleep(POLL_INTERVAL);
                }
            });
            if let Err(failure) = proved {
                failures.push(failure);
                *lanes = None;
            }
        }
    }
}

impl Cable {
    fn psn_of(&self, class: usize) -> u32 {
        (self.psn + class as u32) & 0x00ff_ffff
    }

    /// Makes the system find out the neighbour's hardware address, which a queue pair needs: any
    /// datagram does, and nobody need receive it.
    fn greet(&self) {
        let (own, peer) = (usable_gid(&self.port), address(&self.peer));
        let (Some((_, own)), Some(peer)) = (own, peer) else { return };
        // Best effort: if the address is not found, connecting says so.
        let _ = UdpSocket::bind((own, 0)).and_then(|socket| socket.send_to(&[], (peer, 9)));
    }

    fn connect(&self, lanes: &mut [Lane; 2], theirs: &Queues) -> Result<(), DeviceError> {
        let mtu = self.port.mtu.min(u32::from(self.peer.mtu));
        for (class, lane) in lanes.iter_mut().enumerate() {
            let to = theirs.address(class, self.peer.gid);
            let path = Path { to, gid_index: self.gid_index, mtu, own_psn: self.psn_of(class) };
            match lane.connect(&path) {
                Err(DeviceError::Call { source, .. })
                    if source.raw_os_error().is_some_and(|it| UNKNOWN_NEIGHBOUR.contains(&it)) =>
                {
                    thread::sleep(NEIGHBOUR_TIMEOUT);
                    lane.connect(&path)?;
                }
                result => result?,
            }
        }
        Ok(())
    }
}

/// What came of a cable; what failed is listed.
fn kept<T, E: Into<LaneError>>(result: Result<T, E>, failures: &mut Vec<String>) -> Option<T> {
    result.map_err(|error| failures.push(with_sources(&error.into()))).ok()
}

fn drop_lanes(lanes: &mut [CableLanes], works: impl Fn(usize) -> bool) {
    for (cable, lanes) in lanes.iter_mut().enumerate() {
        if !works(cable) {
            *lanes = None;
        }
    }
}

/// A number for the first packet, other than those of the groups before: late packets of those are
/// not taken for new ones.
fn fresh_psn() -> u32 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(1, |now| now.subsec_nanos() ^ (now.as_secs() as u32) << 8) & 0x00ff_ffff
}
