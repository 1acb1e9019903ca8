//! Links over TCP, with or without TLS: one connection for data, one for control.
//!
//! Two ranks that both write a large frame before they read would wait for each other once the
//! sockets' buffers are full. So [`Link::send_now`] never waits, and the group finishes large
//! frames on a second thread while the first one reads. Small frames fit the buffers, which
//! saves the second thread where latency counts.
//!
//! A read first spins on the nonblocking socket for a moment, as waking a thread takes long, and
//! then blocks with the deadline as its timeout. Inside TLS all of this is the same: a channel
//! behaves as its socket does.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::Shutdown,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use shardpack_identity::Channel;

use super::{Link, LinkEnd, LinkError};
use crate::{
    frame::{FrameError, HEADER_BYTES, Header, Notice, Op},
    group::Deadline,
};

/// How long a reader spins before it blocks: what a blocked read costs to wake, several times
/// over, since ranks on cores of unequal speed wait longer for each other than a message takes.
/// A rank without work spins so once, and then sleeps.
pub(crate) const SPIN: Duration = Duration::from_micros(200);

/// Memory that a header alone may claim; the rest is claimed as bytes arrive.
const GROWTH_BYTES: usize = 1 << 20;

/// Timeout of an abort: its connection carries nothing else, so only a dead path is slow.
const ABORT_TIMEOUT: Duration = Duration::from_millis(100);

/// Smallest socket timeout; zero would mean none.
const SHORTEST_TIMEOUT: Duration = Duration::from_millis(1);

/// A link over two connections to the same rank.
pub struct TcpLink {
    data: Channel,
    control: Channel,
    blocking: AtomicBool,
    /// A second thread is finishing a frame, so the socket must stay blocking.
    sending: AtomicBool,
}

impl TcpLink {
    /// A link over two fresh connections to one rank, in the same roles on both sides.
    pub fn new(data: impl Into<Channel>, control: impl Into<Channel>) -> io::Result<Self> {
        let (data, control) = (data.into(), control.into());
        prepare(&data, &control)?;
        let (blocking, sending) = (AtomicBool::new(true), AtomicBool::new(false));
        Ok(Self { data, control, blocking, sending })
    }

    fn set_blocking(&self, blocking: bool) -> Result<(), LinkError> {
        if self.blocking.swap(blocking, Ordering::SeqCst) != blocking {
            self.data.socket().set_nonblocking(!blocking).map_err(|error| closed(&error))?;
        }
        Ok(())
    }

    fn read_full(&self, mut into: &mut [u8], deadline: Deadline) -> Result<(), LinkError> {
        let spin_end = Instant::now() + SPIN.min(deadline.left());
        while !into.is_empty() {
            match (&self.data).read(into) {
                Ok(0) => return Err(LinkError::Closed("it closed the connection".to_owned())),
                Ok(count) => into = &mut into[count..],
                // A part of a record: its rest has no more time than the whole.
                Err(error) if error.kind() == ErrorKind::Interrupted => {
                    if deadline.left().is_zero() {
                        return Err(LinkError::Timeout);
                    }
                }
                Err(error) if waits(&error) => {
                    if Instant::now() < spin_end {
                        thread::yield_now();
                        continue;
                    }
                    let left = deadline.left();
                    if left.is_zero() {
                        return Err(LinkError::Timeout);
                    }
                    let timeout = Some(left.max(SHORTEST_TIMEOUT));
                    self.data.set_read_timeout(timeout).map_err(|error| closed(&error))?;
                    self.set_blocking(true)?;
                }
                Err(error) => return Err(closed(&error)),
            }
        }
        Ok(())
    }

    fn write_rest(&self, mut rest: &[u8], deadline: Deadline) -> Result<(), LinkError> {
        while !rest.is_empty() {
            let left = deadline.left();
            if left.is_zero() {
                return Err(LinkError::Timeout);
            }
            self.set_blocking(true)?;
            let timeout = Some(left.max(SHORTEST_TIMEOUT));
            self.data.set_write_timeout(timeout).map_err(|error| closed(&error))?;
            match (&self.data).write(rest) {
                Ok(count) => rest = &rest[count..],
                Err(error) if error.kind() == ErrorKind::Interrupted || waits(&error) => {}
                Err(error) => return Err(closed(&error)),
            }
        }
        Ok(())
    }
}

/// Sets the sockets' options for a link: whoever watches the control channel waits for its end.
pub(crate) fn prepare(data: &Channel, control: &Channel) -> io::Result<()> {
    for channel in [data, control] {
        channel.socket().set_nodelay(true)?;
        channel.socket().set_nonblocking(false)?;
    }
    control.set_read_timeout(None)?;
    control.set_write_timeout(Some(ABORT_TIMEOUT))
}

/// A nonblocking call that would block, or a blocking one whose timeout passed.
fn waits(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

fn closed(error: &io::Error) -> LinkError {
    LinkError::Closed(error.to_string())
}

impl Link for TcpLink {
    fn send_now(&self, frame: &[u8]) -> Result<usize, LinkError> {
        self.set_blocking(false)?;
        self.data.begin();
        let mut sent = 0;
        while sent < frame.len() {
            match (&self.data).write(&frame[sent..]) {
                Ok(count) => sent += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if waits(&error) => break,
                Err(error) => return Err(closed(&error)),
            }
        }
        Ok(sent)
    }

    fn send_rest(&self, rest: &[u8], deadline: Deadline) -> Result<(), LinkError> {
        self.sending.store(true, Ordering::SeqCst);
        let result = self.write_rest(rest, deadline);
        self.sending.store(false, Ordering::SeqCst);
        result
    }

    fn receive_header(&self, frame: &mut Vec<u8>, deadline: Deadline) -> Result<Header, LinkError> {
        if !self.sending.load(Ordering::SeqCst) {
            self.set_blocking(false)?;
        }
        if frame.len() < HEADER_BYTES {
            frame.resize(HEADER_BYTES, 0);
        }
        let header = frame.first_chunk_mut::<HEADER_BYTES>();
        let header = header.expect("the buffer was grown to a header above");
        self.read_full(header, deadline)?;
        Ok(Header::parse(header)?)
    }

    fn receive_payload(
        &self,
        header: &Header,
        frame: &mut Vec<u8>,
        deadline: Deadline,
    ) -> Result<(), LinkError> {
        let end = HEADER_BYTES + header.payload_bytes as usize;
        let mut have = HEADER_BYTES;
        frame.truncate(end);
        while have < end {
            let next = end.min(frame.len().max(have + GROWTH_BYTES));
            frame.resize(next, 0);
            self.read_full(&mut frame[have..next], deadline)?;
            have = next;
        }
        Ok(())
    }

    fn watch(&self) -> LinkEnd {
        read_notice(&mut &self.control).unwrap_or_else(|error| LinkEnd::Closed(error.to_string()))
    }

    fn abort(&self, frame: &[u8]) {
        // A rank that cannot be notified sees the connection close.
        let _ = (&self.control).write_all(frame);
        self.close();
    }

    fn close(&self) {
        for stream in [&self.control, &self.data] {
            // It may be closed from the other side already.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for TcpLink {
    fn drop(&mut self) {
        self.close();
    }
}

/// Waits for the end of a link on its control channel.
pub(crate) fn read_notice(from: &mut impl Read) -> Result<LinkEnd, LinkError> {
    let mut header = [0; HEADER_BYTES];
    read_exact(from, &mut header)?;
    let header = Header::parse(&header)?;
    if header.op != Op::Abort {
        return Err(FrameError::Op(header.op as u8).into());
    }
    let mut payload = vec![0; header.payload_bytes as usize];
    read_exact(from, &mut payload)?;
    Ok(LinkEnd::Notice { epoch: header.epoch, notice: Notice::parse(&payload)? })
}

fn read_exact(from: &mut impl Read, into: &mut [u8]) -> Result<(), LinkError> {
    from.read_exact(into).map_err(|error| match error.kind() {
        ErrorKind::UnexpectedEof => LinkError::Closed("it closed the connection".to_owned()),
        _ => closed(&error),
    })
}
