//! The wire format of a link: one frame per message. Knows bytes, not sockets or collectives.
//!
//! Version 1, all integers little-endian:
//!
//! | offset | bytes | field | allowed |
//! |---|---|---|---|
//! | 0 | 4 | magic | `SPCF` |
//! | 4 | 1 | version | 1 |
//! | 5 | 1 | operation | [`Op`]'s numbers |
//! | 6 | 2 | scope | 0: all ranks; 1: a subgroup, or two ranks |
//! | 8 | 4 | rank of the sender | checked against the link by the group |
//! | 12 | 4 | size of the payload in bytes | at most [`MAX_PAYLOAD_BYTES`] |
//! | 16 | 8 | epoch of the group | older ones are dropped by the group |
//! | 24 | 8 | sequence number of the exchange | counted by every rank of the scope in the same way; 0 for [`Op::Alive`] and [`Op::Abort`] |
//! | 32 | … | payload | `f32` little-endian for all-reduces, the caller's bytes otherwise |
//!
//! The payload of [`Op::Abort`] is the blamed rank (4 bytes, `0xffff_ffff` for none) and a
//! reason in UTF-8.

use std::fmt;

/// Size of a frame's header.
pub const HEADER_BYTES: usize = 32;

/// Largest payload. An all-gather of whole rows of logits is the largest message: 64 rows
/// of a vocabulary of 262,144 in `f32` are 64 MiB; four times that leaves room.
pub const MAX_PAYLOAD_BYTES: u32 = 256 << 20;

/// Largest payload of an abort, whose reason is a sentence.
pub(crate) const MAX_ABORT_BYTES: u32 = 1024;

const MAGIC: [u8; 4] = *b"SPCF";
const VERSION: u8 = 1;
const NO_RANK: u32 = u32::MAX;

/// What a frame is part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Op {
    /// All-reduce: a whole vector, from every rank to every rank.
    SumDirect = 1,
    /// All-reduce: a part of the vector, to the rank that reduces it (reduce-scatter).
    SumScatter = 2,
    /// All-reduce: a reduced part, from its rank to every rank (all-gather).
    SumGather = 3,
    /// The bytes of an all-gather.
    Gather = 4,
    /// The bytes of a broadcast.
    Broadcast = 5,
    /// A barrier.
    Barrier = 6,
    /// The group has ended.
    Abort = 7,
    /// A point-to-point message.
    Pass = 8,
    /// A rank is ready to receive an [`Op::Pass`].
    Ready = 9,
    /// A keep-alive: the sender is still computing. It belongs to no exchange.
    Alive = 10,
    /// All-reduce along a chain of neighbours: a partial sum upwards, a sum downwards.
    SumChain = 11,
    /// A measurement of the link between two ranks.
    Probe = 12,
}

impl Op {
    fn parse(number: u8) -> Option<Self> {
        [
            Self::SumDirect,
            Self::SumScatter,
            Self::SumGather,
            Self::Gather,
            Self::Broadcast,
            Self::Barrier,
            Self::Abort,
            Self::Pass,
            Self::Ready,
            Self::Alive,
            Self::SumChain,
            Self::Probe,
        ]
        .into_iter()
        .find(|op| *op as u8 == number)
    }

    const fn name(self) -> &'static str {
        match self {
            Self::SumDirect => "all-reduce (direct)",
            Self::SumScatter => "all-reduce (scatter)",
            Self::SumGather => "all-reduce (gather)",
            Self::Gather => "all-gather",
            Self::Broadcast => "broadcast",
            Self::Barrier => "barrier",
            Self::Abort => "abort",
            Self::Pass => "send",
            Self::Ready => "ready",
            Self::Alive => "keep-alive",
            Self::SumChain => "all-reduce (chain)",
            Self::Probe => "measurement",
        }
    }
}

/// The ranks that take part in an exchange; each scope numbers its exchanges separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Scope {
    /// All ranks of the group.
    All = 0,
    /// A fixed subgroup, or two ranks.
    Subgroup = 1,
}

/// Why bytes are not a frame's header.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// It does not begin with the magic.
    #[error("not a frame (it begins with {0:02x?})")]
    Magic([u8; 4]),
    /// Another version of the format.
    #[error("a frame of the unsupported version {0}")]
    Version(u8),
    /// An operation that version 1 does not have.
    #[error("a frame with the unknown operation {0}")]
    Op(u8),
    /// A scope that version 1 does not have.
    #[error("a frame with the unknown scope {0}")]
    Scope(u16),
    /// The payload is larger than any message.
    #[error("a frame payload of {found} bytes exceeds the limit of {most}")]
    TooLarge {
        /// Size that the header states, in bytes.
        found: u32,
        /// The limit, in bytes.
        most: u32,
    },
    /// An abort without a blamed rank, or in something else than UTF-8.
    #[error("a malformed abort frame")]
    Abort,
}

/// A frame's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What the frame is part of.
    pub op: Op,
    /// The ranks that take part.
    pub scope: Scope,
    /// The sender.
    pub from: u32,
    /// Size of the payload.
    pub payload_bytes: u32,
    /// Generation of the group.
    pub epoch: u64,
    /// Number of the exchange within the epoch.
    pub sequence: u64,
}

impl Header {
    /// Parses a header.
    pub fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Self, FrameError> {
        let four = |at: usize| [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
        let eight = |at: usize| {
            let (low, high) = (u32::from_le_bytes(four(at)), u32::from_le_bytes(four(at + 4)));
            u64::from(high) << 32 | u64::from(low)
        };
        if four(0) != MAGIC {
            return Err(FrameError::Magic(four(0)));
        }
        if bytes[4] != VERSION {
            return Err(FrameError::Version(bytes[4]));
        }
        let op = Op::parse(bytes[5]).ok_or(FrameError::Op(bytes[5]))?;
        let scope = match u16::from_le_bytes([bytes[6], bytes[7]]) {
            0 => Scope::All,
            1 => Scope::Subgroup,
            other => return Err(FrameError::Scope(other)),
        };
        let payload_bytes = u32::from_le_bytes(four(12));
        let most = if op == Op::Abort { MAX_ABORT_BYTES } else { MAX_PAYLOAD_BYTES };
        if payload_bytes > most {
            return Err(FrameError::TooLarge { found: payload_bytes, most });
        }
        let from = u32::from_le_bytes(four(8));
        Ok(Self { op, scope, from, payload_bytes, epoch: eight(16), sequence: eight(24) })
    }

    /// The header's bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = VERSION;
        bytes[5] = self.op as u8;
        bytes[6..8].copy_from_slice(&(self.scope as u16).to_le_bytes());
        bytes[8..12].copy_from_slice(&self.from.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.payload_bytes.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.epoch.to_le_bytes());
        bytes[24..].copy_from_slice(&self.sequence.to_le_bytes());
        bytes
    }
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { op, scope, from, payload_bytes, epoch, sequence } = self;
        let op = op.name();
        let scope = match scope {
            Scope::All => "",
            Scope::Subgroup => " within a subgroup",
        };
        write!(f, "{op} {sequence}{scope} of epoch {epoch} from rank {from}, {payload_bytes} bytes")
    }
}

/// Why a group ends, as sent to the other ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// The rank that caused it, if there is one.
    pub blamed: Option<u32>,
    /// The reason, for people.
    pub reason: String,
}

impl Notice {
    /// Parses an abort's payload.
    pub fn parse(payload: &[u8]) -> Result<Self, FrameError> {
        let (blamed, reason) = payload.split_first_chunk::<4>().ok_or(FrameError::Abort)?;
        let blamed = Some(u32::from_le_bytes(*blamed)).filter(|rank| *rank != NO_RANK);
        let reason = str::from_utf8(reason).map_err(|_| FrameError::Abort)?.to_owned();
        Ok(Self { blamed, reason })
    }

    /// The whole abort frame.
    #[must_use]
    pub fn frame(&self, from: u32, epoch: u64) -> Vec<u8> {
        let room = MAX_ABORT_BYTES as usize - 4;
        let reason = &self.reason[..self.reason.floor_char_boundary(room)];
        let payload_bytes = 4 + reason.len() as u32;
        let (op, scope) = (Op::Abort, Scope::All);
        let header = Header { op, scope, from, payload_bytes, epoch, sequence: 0 };
        let mut frame = header.encode().to_vec();
        frame.extend_from_slice(&self.blamed.unwrap_or(NO_RANK).to_le_bytes());
        frame.extend_from_slice(reason.as_bytes());
        frame
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HEADER: Header = Header {
        op: Op::Gather,
        scope: Scope::All,
        from: 3,
        payload_bytes: 0x0102_0304,
        epoch: 0x1112_1314_1516_1718,
        sequence: 0x2122_2324_2526_2728,
    };

    fn check_refused(at: usize, byte: u8, expected: &FrameError) {
        let mut bytes = HEADER.encode();
        bytes[at] = byte;
        assert_eq!(&Header::parse(&bytes).unwrap_err(), expected);
    }

    #[test]
    fn header_stands_as_the_table_says() {
        let bytes = HEADER.encode();
        assert_eq!(&bytes[..8], b"SPCF\x01\x04\0\0");
        assert_eq!(bytes[8..16], [3, 0, 0, 0, 4, 3, 2, 1]);
        assert_eq!(bytes[16..24], [0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11]);
        assert_eq!(Header::parse(&bytes), Ok(HEADER));
    }

    #[test]
    fn foreign_headers_are_refused() {
        check_refused(0, b'X', &FrameError::Magic(*b"XPCF"));
        check_refused(4, 2, &FrameError::Version(2));
        check_refused(5, 0, &FrameError::Op(0));
        check_refused(5, 13, &FrameError::Op(13));
        check_refused(6, 2, &FrameError::Scope(2));
        check_refused(7, 1, &FrameError::Scope(256));
        let most = MAX_PAYLOAD_BYTES;
        check_refused(15, 0xff, &FrameError::TooLarge { found: 0xff02_0304, most });
        let found = HEADER.payload_bytes;
        check_refused(5, 7, &FrameError::TooLarge { found, most: MAX_ABORT_BYTES });
    }

    #[test]
    fn notices_round_trip_and_long_reasons_are_truncated_between_characters() {
        for blamed in [None, Some(0), Some(7)] {
            let notice = Notice { blamed, reason: "é".repeat(2000) };
            let frame = notice.frame(1, 9);
            let header = Header::parse(frame[..HEADER_BYTES].try_into().unwrap()).unwrap();
            assert_eq!(header.payload_bytes as usize, frame.len() - HEADER_BYTES);
            let parsed = Notice::parse(&frame[HEADER_BYTES..]).unwrap();
            assert_eq!(parsed, Notice { blamed, reason: "é".repeat(510) });
        }
        assert_eq!(Notice::parse(&[1, 2, 3]), Err(FrameError::Abort));
        assert_eq!(Notice::parse(&[0, 0, 0, 0, 0xff]), Err(FrameError::Abort));
    }

    proptest! {
        #[test]
        fn whatever_parses_encodes_to_the_same_bytes(bytes in any::<[u8; HEADER_BYTES]>()) {
            let mut bytes = bytes;
            bytes[..8].copy_from_slice(b"SPCF\x01\x02\0\0");
            if let Ok(header) = Header::parse(&bytes) {
                prop_assert_eq!(header.encode(), bytes);
            } else {
                prop_assert!(bytes[15] >= 0x10);
            }
        }
    }
}
