//! A link between two ranks: a data channel for whole frames in order, and a control channel for the
//! notice that the group has ended. Knows nothing of groups and collectives.
//!
//! The control channel is why a lost or stuck rank is noticed at once: a notice never waits behind a
//! large frame that is half sent, and a thread of its own watches the channel while the computing
//! thread reads the data channel. RDMA needs a control channel anyway, since a queue pair does not
//! report that the peer has died.

mod memory;
mod tcp;

pub use memory::MemoryLink;
pub use tcp::TcpLink;
pub(crate) use tcp::{SPIN, prepare, read_notice};

use crate::{
    frame::{FrameError, Header, Notice},
    group::Deadline,
};

/// Why an operation on a link failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    /// The deadline passed.
    #[error("the link made no progress before the deadline")]
    Timeout,
    /// The link was closed, by this side or the other.
    #[error("{0}")]
    Closed(String),
    /// The transport itself lost or damaged something, or refused to go on.
    #[error("{0}")]
    Broken(String),
    /// The received bytes are not a frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
}

/// How a link ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkEnd {
    /// The other side sent the reason.
    Notice {
        /// Generation of the group that it concerns.
        epoch: u64,
        /// Why.
        notice: Notice,
    },
    /// The link was closed without a notice.
    Closed(String),
}

/// A link to one other rank. One thread sends and receives (a second one may finish sending),
/// another one watches, and any may abort or close.
pub trait Link: Send + Sync {
    /// Sends as much of `frame` as possible without blocking; returns the number of bytes.
    fn send_now(&self, frame: &[u8]) -> Result<usize, LinkError>;

    /// Sends what [`Link::send_now`] left of a frame; waits for room.
    fn send_rest(&self, rest: &[u8], deadline: Deadline) -> Result<(), LinkError>;

    /// Waits for a frame and returns its header; `frame` holds at least the header's bytes
    /// then, and is otherwise to be left alone until [`Link::receive_payload`].
    fn receive_header(&self, frame: &mut Vec<u8>, deadline: Deadline) -> Result<Header, LinkError>;

    /// Completes `frame`: header and payload, nothing else. Memory grows with what arrives, not
    /// with what the header promises.
    fn receive_payload(
        &self,
        header: &Header,
        frame: &mut Vec<u8>,
        deadline: Deadline,
    ) -> Result<(), LinkError>;

    /// Waits without a deadline until the link ends: the other side aborts, closes or dies, or
    /// [`Link::close`] is called here.
    fn watch(&self) -> LinkEnd;

    /// Sends the other side a notice (`frame` is a whole [`Notice::frame`]), then closes.
    fn abort(&self, frame: &[u8]);

    /// Closes the link and wakes everything that waits on it, on both sides.
    fn close(&self);
}
