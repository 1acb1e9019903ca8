//! Messages on a stream: four bytes of length, little-endian, then that much JSON.

use std::{
    io::{self, ErrorKind, Read, Write as _},
    net::Shutdown,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use serde::{Serialize, de::DeserializeOwned};
use shardpack_collectives::Deadline;
use shardpack_identity::Channel;

/// Largest message: a prompt of two million tokens takes less.
pub(super) const MAX_MESSAGE_BYTES: u32 = 16 << 20;

/// Largest message from someone who has not shown the token yet.
pub(super) const MAX_HELLO_BYTES: u32 = 4 << 10;

/// How long a message may wait for room: the other side always reads, so longer means it hangs.
const SEND_TIMEOUT: Duration = Duration::from_secs(2);

/// Smallest socket timeout; zero would mean none.
const SHORTEST_TIMEOUT: Duration = Duration::from_millis(1);

/// Why a message did not pass.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The stream ended between two messages.
    #[error("the connection was closed")]
    Closed,
    /// The stream failed or ended within a message.
    #[error("the connection failed")]
    Io(#[from] io::Error),
    /// The message is larger than any may be.
    #[error("a message of {found} bytes, where {most} is the most")]
    TooLarge {
        /// Its size.
        found: u64,
        /// The limit.
        most: u32,
    },
    /// The bytes are not the message that was expected.
    #[error("not a message of this protocol")]
    Malformed(#[source] serde_json::Error),
}

/// A message's bytes with their length.
pub(super) fn encode(message: &impl Serialize) -> Result<Vec<u8>, WireError> {
    let mut bytes = vec![0; 4];
    serde_json::to_writer(&mut bytes, message).map_err(WireError::Malformed)?;
    let found = bytes.len() as u64 - 4;
    let size = u32::try_from(found).ok().filter(|size| *size <= MAX_MESSAGE_BYTES);
    let size = size.ok_or(WireError::TooLarge { found, most: MAX_MESSAGE_BYTES })?;
    bytes[..4].copy_from_slice(&size.to_le_bytes());
    Ok(bytes)
}

/// Reads one message. Memory grows with what arrives, not with what the length promises.
pub(super) fn read<T: DeserializeOwned>(from: &mut impl Read, most: u32) -> Result<T, WireError> {
    let mut size = [0; 4];
    let first = loop {
        match from.read(&mut size) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            count => break count?,
        }
    };
    if first == 0 {
        return Err(WireError::Closed);
    }
    from.read_exact(&mut size[first..])?;
    let size = u32::from_le_bytes(size);
    if size > most {
        return Err(WireError::TooLarge { found: size.into(), most });
    }
    let mut bytes = Vec::new();
    from.take(size.into()).read_to_end(&mut bytes)?;
    if bytes.len() != size as usize {
        return Err(io::Error::from(ErrorKind::UnexpectedEof).into());
    }
    serde_json::from_slice(&bytes).map_err(WireError::Malformed)
}

/// Reads from a channel until a deadline, however slowly bytes trickle in.
pub(super) struct Until<'a>(pub(super) &'a Channel, pub(super) Deadline);

impl Read for Until<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let left = self.1.left();
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        self.0.set_read_timeout(Some(left.max(SHORTEST_TIMEOUT)))?;
        let mut stream = self.0;
        stream.read(into)
    }
}

/// The writing half of a connection; threads share it.
pub(super) struct Sender(Mutex<Channel>);

impl Sender {
    pub(super) fn new(channel: impl Into<Channel>) -> io::Result<Self> {
        let channel = channel.into();
        channel.set_write_timeout(Some(SEND_TIMEOUT))?;
        Ok(Self(Mutex::new(channel)))
    }

    /// Sends a message; a connection on which that fails is closed, since it may hold half of
    /// it.
    pub(super) fn send(&self, message: &impl Serialize) -> Result<(), WireError> {
        let bytes = encode(message)?;
        let mut stream = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        stream.write_all(&bytes).map_err(|error| {
            // It may be closed already.
            let _ = stream.shutdown(Shutdown::Both);
            error.into()
        })
    }

    /// Closes the connection; whoever reads from it wakes.
    pub(super) fn close(&self) {
        let stream = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // It may be closed already.
        let _ = stream.shutdown(Shutdown::Both);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(bytes: &[u8]) -> Result<Vec<u32>, WireError> {
        read(&mut &*bytes, 64)
    }

    #[test]
    fn messages_round_trip() {
        let bytes = encode(&[1, 2, 3]).unwrap();
        assert_eq!(bytes, b"\x07\0\0\0[1,2,3]");
        assert_eq!(parse(&bytes).unwrap(), [1, 2, 3]);
        let two = [bytes.clone(), bytes].concat();
        let mut two = two.as_slice();
        assert_eq!(read::<Vec<u32>>(&mut two, 64).unwrap(), [1, 2, 3]);
        assert_eq!(read::<Vec<u32>>(&mut two, 64).unwrap(), [1, 2, 3]);
        assert!(matches!(read::<Vec<u32>>(&mut two, 64), Err(WireError::Closed)));
    }

    #[test]
    fn what_is_no_message_is_refused() {
        let check = |bytes: &[u8], expected: &str| {
            assert_eq!(parse(bytes).unwrap_err().to_string(), expected, "{bytes:02x?}");
        };
        check(b"", "the connection was closed");
        check(b"\x07\0", "the connection failed");
        check(b"\x07\0\0\0[1,2", "the connection failed");
        check(b"\x02\0\0\0{}", "not a message of this protocol");
        check(b"\x02\0\0\0\xff\xff", "not a message of this protocol");
        check(b"GET / HTTP/1.1", "a message of 542393671 bytes, where 64 is the most");
        check(b"\x41\0\0\0", "a message of 65 bytes, where 64 is the most");
    }

    #[test]
    fn oversized_messages_are_not_sent() {
        let large = "x".repeat(MAX_MESSAGE_BYTES as usize);
        assert!(matches!(encode(&large), Err(WireError::TooLarge { .. })));
    }
}
