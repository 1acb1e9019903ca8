//! What two ranks tell each other before they have a link over RDMA, as bytes on their data channel.
//! Knows bytes, not devices. Every count and text that comes is bounded.
//!
//! Version 1. A message is its size in 4 bytes and as many bytes; all integers little-endian, a text
//! is its size in 2 bytes and UTF-8. The first byte names the message:
//!
//! | byte | message | fields |
//! |---|---|---|
//! | 0 | declined | text: the reason |
//! | 1 | offer | version (2), rank, peer (4 each), epoch (8), slot bytes and slots of both classes (4 each), number of ports (1), and of each: name (text), GID (16), MTU (1) |
//! | 2 | queues | number of cables (1), and of each: 0, or 1 with LID (2) and, for both classes, queue pair and packet number (4 each); text: what failed |
//! | 3 | cables | bit mask of cables that work so far (1); text: what failed |

use std::io;

use super::{device::Address, rules::QueueShape};

/// Largest message: 16 ports with long names are half of it.
pub(super) const MAX_MESSAGE_BYTES: u32 = 4096;

/// Most ports that a side offers.
pub(super) const MAX_PORTS: usize = 16;

/// Most cables between two machines: as many as a Mac has Thunderbolt controllers, and no more than
/// a link has lanes for.
pub(super) const MAX_CABLES: usize = 4;

/// Longest text.
pub(super) const MAX_TEXT_BYTES: usize = 1024;

pub(super) const VERSION: u16 = 1;

/// Slots of a link, which both sides have alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub(super) small: QueueShape,
    pub(super) large: QueueShape,
}

/// A port that a link may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OfferedPort {
    pub(super) name: String,
    pub(super) gid: [u8; 16],
    pub(super) mtu: u8,
}

/// What a side is and has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Offer {
    pub(super) version: u16,
    pub(super) rank: u32,
    pub(super) peer: u32,
    pub(super) epoch: u64,
    /// Slot bytes and slots of both classes.
    pub(super) shape: [u32; 4],
    pub(super) ports: Vec<OfferedPort>,
}

/// The queue pairs of one cable; their GID was in the offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Queues {
    pub(super) lid: u16,
    /// Number and first packet number of both classes.
    pub(super) classes: [(u32, u32); 2],
}

impl Queues {
    /// The address of a class, at the GID of the offered port.
    pub(super) const fn address(&self, class: usize, gid: [u8; 16]) -> Address {
        let (number, psn) = self.classes[class];
        Address { gid, lid: self.lid, number, psn }
    }
}

/// A message of the rendezvous.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    Declined(String),
    Offer(Offer),
    Queues(Vec<Option<Queues>>, String),
    Cables(u8, String),
}

/// Why bytes are not a message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum TurnError {
    #[error("a message of {0} bytes, and at most {MAX_MESSAGE_BYTES} are allowed")]
    Size(u32),
    #[error("an unknown message {0}")]
    Kind(u8),
    #[error("a message ends too early")]
    Truncated,
    #[error("a message has {0} bytes too many")]
    Rest(usize),
    #[error("{found} {what}, and at most {most} are allowed")]
    TooMany { what: &'static str, found: usize, most: usize },
    #[error("a text that is not UTF-8")]
    Text,
    #[error("a flag of {0}")]
    Flag(u8),
}

impl From<TurnError> for io::Error {
    fn from(error: TurnError) -> Self {
        Self::new(io::ErrorKind::InvalidData, error)
    }
}

fn put_text(into: &mut Vec<u8>, text: &str) {
    let text = &text[..text.floor_char_boundary(MAX_TEXT_BYTES)];
    into.extend((text.len() as u16).to_le_bytes());
    into.extend(text.as_bytes());
}

impl Turn {
    /// The message with its size before it.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; 4];
        match self {
            Self::Declined(reason) => {
                bytes.push(0);
                put_text(&mut bytes, reason);
            }
            Self::Offer(offer) => {
                bytes.push(1);
                bytes.extend(offer.version.to_le_bytes());
                bytes.extend(offer.rank.to_le_bytes());
                bytes.extend(offer.peer.to_le_bytes());
                bytes.extend(offer.epoch.to_le_bytes());
                offer.shape.iter().for_each(|it| bytes.extend(it.to_le_bytes()));
                bytes.push(offer.ports.len() as u8);
                for OfferedPort { name, gid, mtu } in &offer.ports {
                    // A device's name has at most 64 bytes.
                    put_text(&mut bytes, &name[..name.floor_char_boundary(64)]);
                    bytes.extend(gid);
                    bytes.push(*mtu);
                }
            }
            Self::Queues(cables, failures) => {
                bytes.extend([2, cables.len() as u8]);
                for cable in cables {
                    bytes.push(u8::from(cable.is_some()));
                    let Some(Queues { lid, classes }) = cable else { continue };
                    bytes.extend(lid.to_le_bytes());
                    for (number, psn) in classes {
                        bytes.extend(number.to_le_bytes());
                        bytes.extend(psn.to_le_bytes());
                    }
                }
                put_text(&mut bytes, failures);
            }
            Self::Cables(mask, failures) => {
                bytes.extend([3, *mask]);
                put_text(&mut bytes, failures);
            }
        }
        let size = bytes.len() as u32 - 4;
        bytes[..4].copy_from_slice(&size.to_le_bytes());
        bytes
    }

    /// The size that comes before a message.
    pub(super) fn parse_size(bytes: [u8; 4]) -> Result<usize, TurnError> {
        let size = u32::from_le_bytes(bytes);
        if size > MAX_MESSAGE_BYTES { Err(TurnError::Size(size)) } else { Ok(size as usize) }
    }

    /// Parses a message without its size.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, TurnError> {
        let mut from = Fields(bytes);
        let turn = match from.u8()? {
            0 => Self::Declined(from.text()?),
            1 => Self::Offer(from.offer()?),
            2 => {
                let count = from.count("cables", MAX_CABLES)?;
                let cables = (0..count).map(|_| from.queues()).collect::<Result<_, _>>()?;
                Self::Queues(cables, from.text()?)
            }
            3 => Self::Cables(from.u8()?, from.text()?),
            other => return Err(TurnError::Kind(other)),
        };
        match from.0.len() {
            0 => Ok(turn),
            rest => Err(TurnError::Rest(rest)),
        }
    }
}

/// What is left of a message.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], TurnError> {
        let (array, rest) = self.0.split_first_chunk().ok_or(TurnError::Truncated)?;
        self.0 = rest;
        Ok(*array)
    }

    fn u8(&mut self) -> Result<u8, TurnError> {
        Ok(self.array::<1>()?[0])
    }

    fn u16(&mut self) -> Result<u16, TurnError> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    fn u32(&mut self) -> Result<u32, TurnError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn bytes(&mut self, count: usize) -> Result<&'a [u8], TurnError> {
        let (bytes, rest) = self.0.split_at_checked(count).ok_or(TurnError::Truncated)?;
        self.0 = rest;
        Ok(bytes)
    }

    fn count(&mut self, what: &'static str, most: usize) -> Result<usize, TurnError> {
        let found = usize::from(self.u8()?);
        if found > most { Err(TurnError::TooMany { what, found, most }) } else { Ok(found) }
    }

    fn text(&mut self) -> Result<String, TurnError> {
        let found = usize::from(self.u16()?);
        if found > MAX_TEXT_BYTES {
            return Err(TurnError::TooMany { what: "bytes of text", found, most: MAX_TEXT_BYTES });
        }
        let text = str::from_utf8(self.bytes(found)?).map_err(|_| TurnError::Text)?;
        Ok(text.to_owned())
    }

    fn offer(&mut self) -> Result<Offer, TurnError> {
        let (version, rank, peer) = (self.u16()?, self.u32()?, self.u32()?);
        let epoch = u64::from_le_bytes(self.array()?);
        let shape = [self.u32()?, self.u32()?, self.u32()?, self.u32()?];
        let count = self.count("ports", MAX_PORTS)?;
        let port = |_| Ok(OfferedPort { name: self.text()?, gid: self.array()?, mtu: self.u8()? });
        let ports = (0..count).map(port).collect::<Result<_, _>>()?;
        Ok(Offer { version, rank, peer, epoch, shape, ports })
    }

    fn queues(&mut self) -> Result<Option<Queues>, TurnError> {
        match self.u8()? {
            0 => Ok(None),
            1 => {
                let lid = self.u16()?;
                let mut class = || Ok((self.u32()?, self.u32()?));
                Ok(Some(Queues { lid, classes: [class()?, class()?] }))
            }
            other => Err(TurnError::Flag(other)),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn turns() -> Vec<Turn> {
        let port = OfferedPort { name: "rdma_en2".to_owned(), gid: [7; 16], mtu: 5 };
        let offer = Offer {
            version: VERSION,
            rank: 1,
            peer: 0,
            epoch: 9,
            shape: [4096, 32, 1 << 18, 8],
            ports: vec![port; MAX_PORTS],
        };
        let queues = Queues { lid: 3, classes: [(1, 2), (3, 4)] };
        vec![
            Turn::Declined("é".repeat(MAX_TEXT_BYTES / 2)),
            Turn::Offer(offer),
            Turn::Queues(vec![Some(queues), None], "rdma_en3: busy".to_owned()),
            Turn::Cables(5, String::new()),
        ]
    }

    #[test]
    fn messages_round_trip_within_their_bounds() {
        for turn in turns() {
            let bytes = turn.encode();
            let (size, message) = bytes.split_first_chunk().unwrap();
            assert_eq!(Turn::parse_size(*size), Ok(message.len()));
            assert_eq!(Turn::parse(message), Ok(turn));
            for end in 0..message.len() {
                assert_eq!(Turn::parse(&message[..end]), Err(TurnError::Truncated));
            }
            let long = [message, b"x"].concat();
            assert_eq!(Turn::parse(&long), Err(TurnError::Rest(1)));
        }
        assert_eq!(Turn::parse_size(4097_u32.to_le_bytes()), Err(TurnError::Size(4097)));
        assert_eq!(Turn::parse(&[9]), Err(TurnError::Kind(9)));
        let many = TurnError::TooMany { what: "cables", found: 5, most: MAX_CABLES };
        assert_eq!(Turn::parse(&[2, 5]), Err(many));
    }

    proptest! {
        #[test]
        fn whatever_parses_encodes_to_the_same_bytes(
            kind in 0..5_u8,
            rest in proptest::collection::vec(any::<u8>(), 0..300),
        ) {
            let bytes = [&[kind][..], &rest].concat();
            if let Ok(turn) = Turn::parse(&bytes) {
                prop_assert_eq!(&turn.encode()[4..], bytes);
            }
        }

        #[test]
        fn a_changed_message_parses_or_is_refused(
            which in 0..4_usize,
            at in any::<usize>(),
            byte in any::<u8>(),
        ) {
            let mut bytes = turns()[which].encode().split_off(4);
            let at = at % bytes.len();
            bytes[at] = byte;
            if let Ok(Turn::Offer(offer)) = Turn::parse(&bytes) {
                prop_assert!(offer.ports.len() <= MAX_PORTS);
            }
        }
    }
}
