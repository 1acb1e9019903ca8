//! Frames: a fixed header and a payload of bounded length.

use std::io::{self, Read, Write};

use super::message::Message;

/// First bytes of every frame.
const MAGIC: [u8; 4] = *b"SPTF";

/// Version of the frame layout and of every payload.
///
/// 1: first version.
pub const VERSION: u8 = 1;

/// Bytes of a frame's header.
pub const HEADER_BYTES: usize = 12;

/// Most bytes that are reserved for a payload before any of it has arrived: one chunk with its
/// place. A header that promises more gets memory only as bytes come in.
const FIRST_RESERVE_BYTES: usize = (4 << 20) + 64;

/// Bytes that are no frame of this protocol.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The stream ended between two frames.
    #[error("the connection was closed")]
    Closed,
    /// The stream ended inside a frame.
    #[error("the connection ended inside a frame")]
    Truncated,
    /// Something else is talking.
    #[error("not a frame of shardpack's transfer protocol")]
    Magic,
    /// TLS is talking: its refusal of what is no TLS.
    #[error(
        "it speaks TLS: it is in a cluster or waits to be taken into one; on the cluster's controlling machine, name it as a member (`shardpack cluster list`)"
    )]
    Tls,
    /// A later version is talking.
    #[error("frame version {found}, this program speaks {VERSION}")]
    Version {
        /// Its version.
        found: u8,
    },
    /// A message of no known type.
    #[error("message type {found} is unknown")]
    Kind {
        /// The type.
        found: u8,
    },
    /// A payload longer than its type may have.
    #[error("{found} bytes of message type {kind}, at most {limit} are allowed")]
    Length {
        /// The type.
        kind: u8,
        /// Its limit.
        limit: u32,
        /// Bytes announced.
        found: u32,
    },
    /// A payload that is not what its type says.
    #[error("message type {kind}: {problem}")]
    Payload {
        /// The type.
        kind: u8,
        /// What is wrong.
        problem: &'static str,
    },
    /// The stream failed.
    #[error("the connection failed")]
    Io(#[source] io::Error),
}

/// A parsed header.
///
/// | offset | bytes | field |
/// |---|---|---|
/// | 0 | 4 | magic `SPTF` |
/// | 4 | 1 | version, 1 |
/// | 5 | 1 | message type, see [`Message`] |
/// | 6 | 2 | reserved, zero |
/// | 8 | 4 | bytes of the payload, little-endian |
///
/// The payload follows. All integers are little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    kind: u8,
    payload_bytes: u32,
}

impl Header {
    fn parse(bytes: [u8; HEADER_BYTES]) -> Result<Self, FrameError> {
        let [m0, m1, m2, m3, version, kind, r0, r1, l0, l1, l2, l3] = bytes;
        if [m0, m1, m2, m3] != MAGIC {
            return Err(FrameError::Magic);
        }
        if version != VERSION {
            return Err(FrameError::Version { found: version });
        }
        if [r0, r1] != [0, 0] {
            return Err(FrameError::Payload { kind, problem: "reserved bytes are not zero" });
        }
        let payload_bytes = u32::from_le_bytes([l0, l1, l2, l3]);
        let limit = Message::payload_limit(kind).ok_or(FrameError::Kind { found: kind })?;
        if payload_bytes > limit {
            return Err(FrameError::Length { kind, limit, found: payload_bytes });
        }
        Ok(Self { kind, payload_bytes })
    }
}

/// The first byte of TLS's refusals (RFC 8446, section 5.1).
const TLS_ALERT: u8 = 21;

/// Reads one frame. `first` is called when its first byte has arrived.
pub fn read<R: Read>(stream: &mut R, first: impl FnOnce(&mut R)) -> Result<Message, FrameError> {
    let mut header = [0; HEADER_BYTES];
    let start = loop {
        match stream.read(&mut header[..1]) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => break other.map_err(FrameError::Io)?,
        }
    };
    if start == 0 {
        return Err(FrameError::Closed);
    }
    if header[0] == TLS_ALERT {
        // Said now: a refusal is shorter than a header.
        return Err(FrameError::Tls);
    }
    first(stream);
    stream.read_exact(&mut header[1..]).map_err(truncated)?;
    let Header { kind, payload_bytes } = Header::parse(header)?;
    let length = payload_bytes as usize;
    let mut payload = Vec::with_capacity(length.min(FIRST_RESERVE_BYTES));
    let found =
        stream.take(u64::from(payload_bytes)).read_to_end(&mut payload).map_err(truncated)?;
    if found != length {
        return Err(FrameError::Truncated);
    }
    Message::parse(kind, payload)
}

/// Writes one frame.
///
/// # Panics
/// When the message is longer than its type allows: its maker must have checked.
pub fn write(stream: &mut impl Write, message: &Message) -> io::Result<()> {
    let (mut head, bulk) = message.payload();
    let payload_bytes = (head.len() - HEADER_BYTES + bulk.len()) as u64;
    let kind = message.kind();
    let limit = Message::payload_limit(kind).expect("every kind of message has a limit");
    assert!(payload_bytes <= u64::from(limit), "message type {kind} of {payload_bytes} bytes");
    head[..4].copy_from_slice(&MAGIC);
    head[4] = VERSION;
    head[5] = kind;
    head[8..HEADER_BYTES].copy_from_slice(&(payload_bytes as u32).to_le_bytes());
    stream.write_all(&head)?;
    stream.write_all(bulk)?;
    stream.flush()
}

fn truncated(error: io::Error) -> FrameError {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => FrameError::Truncated,
        _ => FrameError::Io(error),
    }
}
