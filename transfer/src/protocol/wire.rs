//! Frames over any stream, each within a deadline.

use std::{
    io::{self, Read, Write},
    time::{Duration, Instant},
};

use super::{
    frame::{self, FrameError},
    message::Message,
};

/// How long a side waits.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// For a connection to come about.
    pub connect: Duration,
    /// For the first byte of the next message. A busy node sends keep-alives more often.
    pub idle: Duration,
    /// For a whole frame to be read or written, once begun. Not renewed by a trickle of bytes.
    pub frame: Duration,
    /// For progress of a busy node, in bytes that it has read, copied or verified.
    pub progress: Duration,
}

impl Default for Timeouts {
    /// For a healthy network of any speed from 1 Mbit/s on: 4 MiB take 34 s there.
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(5),
            idle: Duration::from_secs(30),
            frame: Duration::from_mins(1),
            // A node waits half a minute for an earlier push that has fallen silent, and a slow
            // disk may take as long again to make durable what it has taken.
            progress: Duration::from_mins(2),
        }
    }
}

/// A frame was not read or written.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The bytes are no frame, or the stream ended.
    #[error(transparent)]
    Frame(FrameError),
    /// Writing failed.
    #[error("the connection failed")]
    Write(#[source] io::Error),
    /// The other side was too slow.
    #[error("nothing came within {} s", .0.as_secs_f32())]
    Idle(Duration),
    /// A frame was begun and not ended in time.
    #[error("a message took longer than {} s", .0.as_secs_f32())]
    Slow(Duration),
}

/// Reads and writes messages. `set_timeout` sets how long one read or write of the stream may
/// block; the deadlines are kept here.
pub struct Wire<S, T> {
    timed: Timed<S, T>,
    timeouts: Timeouts,
}

impl<S: Read + Write, T: Fn(&S, Duration) -> io::Result<()>> Wire<S, T> {
    /// Frames on `stream`.
    pub fn new(stream: S, set_timeout: T, timeouts: Timeouts) -> Self {
        Self { timed: Timed { stream, set_timeout, deadline: Instant::now() }, timeouts }
    }

    /// The stream.
    pub fn stream(&self) -> &S {
        &self.timed.stream
    }

    /// Sends one message.
    pub fn send(&mut self, message: &Message) -> Result<(), WireError> {
        self.timed.deadline = Instant::now() + self.timeouts.frame;
        frame::write(&mut self.timed, message).map_err(|error| {
            if is_timeout(&error) {
                WireError::Slow(self.timeouts.frame)
            } else {
                WireError::Write(error)
            }
        })
    }

    /// Receives one message.
    pub fn receive(&mut self) -> Result<Message, WireError> {
        let Timeouts { idle, frame, .. } = self.timeouts;
        self.timed.deadline = Instant::now() + idle;
        let mut begun = false;
        let message = frame::read(&mut self.timed, |timed| {
            begun = true;
            timed.deadline = Instant::now() + frame;
        });
        message.map_err(|error| match error {
            FrameError::Io(error) if is_timeout(&error) && begun => WireError::Slow(frame),
            FrameError::Io(error) if is_timeout(&error) => WireError::Idle(idle),
            other => WireError::Frame(other),
        })
    }
}

/// Gives each operation the time that is left until the deadline.
struct Timed<S, T> {
    stream: S,
    set_timeout: T,
    deadline: Instant,
}

impl<S, T: Fn(&S, Duration) -> io::Result<()>> Timed<S, T> {
    fn arm(&self) -> io::Result<()> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        (self.set_timeout)(&self.stream, left)
    }
}

impl<S: Read, T: Fn(&S, Duration) -> io::Result<()>> Read for Timed<S, T> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.arm()?;
        self.stream.read(buffer)
    }
}

impl<S: Write, T: Fn(&S, Duration) -> io::Result<()>> Write for Timed<S, T> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.arm()?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// A blocked read that runs out of time is `WouldBlock` on Unix.
fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock)
}
