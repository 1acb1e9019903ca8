//! The header of a slot: a link's message in a queue. Knows bytes, not queues.
//!
//! Version 1, all integers little-endian:
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 4 | magic `SPRD` |
//! | 4 | 1 | version, 1 |
//! | 5 | 1 | kind, [`Kind`]'s numbers |
//! | 6 | 2 | lane |
//! | 8 | 8 | epoch of the group |
//! | 16 | 8 | number of the message among the link's data messages; 0 for other kinds |
//! | 24 | 4 | number of the message on its lane |
//! | 28 | 4 | size of the payload in bytes |
//! | 32 | 4 × 8 | for each lane, the receives that the sender has posted so far (wrapping) |
//! | 64 | 8 | checksum of the payload |
//! | 72 | 8 | checksum of the header's bytes before it |
//! | 80 | … | payload, then bytes without meaning |
//!
//! A queue pair of UC acknowledges nothing: what is lost on the way is missing without a word, so
//! every message is numbered and checked.

/// Size of a slot's header.
pub(super) const SLOT_HEADER_BYTES: usize = 80;

/// Most lanes of a link.
pub(super) const MAX_LANES: usize = 8;

const CHECKED_BYTES: usize = 72;
const MAGIC: [u8; 4] = *b"SPRD";
const VERSION: u8 = 1;

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    /// A part of a frame.
    Data = 1,
    /// Only the counts of receives.
    Credit = 2,
    /// The first message of a lane, which proves that it carries messages.
    Probe = 3,
}

/// A slot's header, without its own checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlotHeader {
    pub(super) kind: Kind,
    pub(super) lane: u16,
    pub(super) epoch: u64,
    pub(super) sequence: u64,
    pub(super) lane_sequence: u32,
    pub(super) payload_bytes: u32,
    pub(super) posted: [u32; MAX_LANES],
    /// Of the payload.
    pub(super) checksum: u64,
}

/// Why a received slot is not a message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum SlotError {
    #[error("a message of {0} bytes has no header")]
    Truncated(usize),
    #[error("a message does not begin with a header (it begins with {0:02x?})")]
    Magic([u8; 4]),
    #[error("a message has version {0}, and this side has {VERSION}")]
    Version(u8),
    #[error("a message has the unknown kind {0}")]
    Kind(u8),
    #[error("a message states a payload of {stated} bytes, and {room} bytes came")]
    Size { stated: u32, room: usize },
    #[error("a message was damaged on the way: its checksum is {found:016x} and not {stated:016x}")]
    Checksum { stated: u64, found: u64 },
}

impl SlotHeader {
    /// The header's bytes.
    pub(super) fn encode(&self) -> [u8; SLOT_HEADER_BYTES] {
        let mut bytes = [0; SLOT_HEADER_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = VERSION;
        bytes[5] = self.kind as u8;
        bytes[6..8].copy_from_slice(&self.lane.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.epoch.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.lane_sequence.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.payload_bytes.to_le_bytes());
        for (four, count) in bytes[32..64].as_chunks_mut().0.iter_mut().zip(self.posted) {
            *four = count.to_le_bytes();
        }
        bytes[64..CHECKED_BYTES].copy_from_slice(&self.checksum.to_le_bytes());
        let checksum = checksum(&bytes[..CHECKED_BYTES]);
        bytes[CHECKED_BYTES..].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Parses a header, behind which `room` bytes came.
    pub(super) fn parse(bytes: &[u8; SLOT_HEADER_BYTES], room: usize) -> Result<Self, SlotError> {
        let two = |at: usize| [bytes[at], bytes[at + 1]];
        let four = |at: usize| [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
        let eight = |at: usize| {
            let (low, high) = (u32::from_le_bytes(four(at)), u32::from_le_bytes(four(at + 4)));
            u64::from(high) << 32 | u64::from(low)
        };
        if four(0) != MAGIC {
            return Err(SlotError::Magic(four(0)));
        }
        if bytes[4] != VERSION {
            return Err(SlotError::Version(bytes[4]));
        }
        let (stated, found) = (eight(CHECKED_BYTES), checksum(&bytes[..CHECKED_BYTES]));
        if stated != found {
            return Err(SlotError::Checksum { stated, found });
        }
        let kind = match bytes[5] {
            1 => Kind::Data,
            2 => Kind::Credit,
            3 => Kind::Probe,
            other => return Err(SlotError::Kind(other)),
        };
        let payload_bytes = u32::from_le_bytes(four(28));
        if payload_bytes as usize > room {
            return Err(SlotError::Size { stated: payload_bytes, room });
        }
        Ok(Self {
            kind,
            lane: u16::from_le_bytes(two(6)),
            epoch: eight(8),
            sequence: eight(16),
            lane_sequence: u32::from_le_bytes(four(24)),
            payload_bytes,
            posted: std::array::from_fn(|lane| u32::from_le_bytes(four(32 + 4 * lane))),
            checksum: eight(64),
        })
    }
}

/// Compares the checksum in a header with that of the payload that came.
pub(super) fn verify(stated: u64, payload: &[u8]) -> Result<(), SlotError> {
    let found = checksum(payload);
    if stated == found { Ok(()) } else { Err(SlotError::Checksum { stated, found }) }
}

/// Odd, so that a product with it can be undone; the bits of the golden ratio.
const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

/// A checksum against damage, not against intent: every step can be undone, so a change of one
/// word always changes the result. Four words at a time, as fast as memory is read.
pub(super) fn checksum(bytes: &[u8]) -> u64 {
    let mut states = [1_u64, 2, 3, 4].map(|seed| seed.wrapping_mul(FACTOR));
    let (blocks, rest) = bytes.as_chunks::<32>();
    for block in blocks {
        for (state, word) in states.iter_mut().zip(block.as_chunks().0) {
            *state = step(*state, u64::from_le_bytes(*word));
        }
    }
    for (state, part) in states.iter_mut().zip(rest.chunks(8)) {
        let mut word = [0; 8];
        word[..part.len()].copy_from_slice(part);
        *state = step(*state, u64::from_le_bytes(word));
    }
    states.into_iter().fold(bytes.len() as u64, step)
}

const fn step(state: u64, word: u64) -> u64 {
    (state ^ word).wrapping_mul(FACTOR).rotate_left(29)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header(payload: &[u8]) -> SlotHeader {
        SlotHeader {
            kind: Kind::Data,
            lane: 0x0102,
            epoch: 0x1112_1314_1516_1718,
            sequence: 0x2122_2324_2526_2728,
            lane_sequence: 0x3132_3334,
            payload_bytes: payload.len() as u32,
            posted: [1, 2, 3, 4, 5, 6, 7, 0x4142_4344],
            checksum: checksum(payload),
        }
    }

    #[test]
    fn header_stands_as_the_table_says() {
        let bytes = header(b"abc").encode();
        assert_eq!(&bytes[..8], b"SPRD\x01\x01\x02\x01");
        assert_eq!(bytes[24..32], [0x34, 0x33, 0x32, 0x31, 3, 0, 0, 0]);
        assert_eq!(bytes[60..64], [0x44, 0x43, 0x42, 0x41]);
        assert_eq!(SlotHeader::parse(&bytes, 3), Ok(header(b"abc")));
        assert_eq!(SlotHeader::parse(&bytes, 2), Err(SlotError::Size { stated: 3, room: 2 }));
    }

    fn check(header: &[u8; SLOT_HEADER_BYTES], payload: &[u8]) -> Result<(), SlotError> {
        verify(SlotHeader::parse(header, payload.len())?.checksum, payload)
    }

    proptest! {
        #[test]
        fn any_change_of_a_byte_is_found(
            payload in proptest::collection::vec(any::<u8>(), 0..200),
            at in any::<usize>(),
            change in 1..=255_u8,
        ) {
            let encoded = header(&payload).encode();
            prop_assert_eq!(check(&encoded, &payload), Ok(()));
            let mut whole = [encoded.as_slice(), &payload].concat();
            let at = at % whole.len();
            whole[at] ^= change;
            let (changed, payload) = whole.split_first_chunk().unwrap();
            prop_assert!(check(changed, payload).is_err());
        }

        #[test]
        fn any_bytes_parse_or_are_refused(
            bytes in any::<[u8; SLOT_HEADER_BYTES]>(),
            room in 0..9_usize,
        ) {
            let mut bytes = bytes;
            bytes[..5].copy_from_slice(b"SPRD\x01");
            let sum = checksum(&bytes[..CHECKED_BYTES]);
            bytes[CHECKED_BYTES..].copy_from_slice(&sum.to_le_bytes());
            if let Ok(header) = SlotHeader::parse(&bytes, room) {
                prop_assert!(header.payload_bytes as usize <= room);
                prop_assert_eq!(header.encode(), bytes);
            }
        }
    }
}
