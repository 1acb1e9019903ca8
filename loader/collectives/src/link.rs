//! The way between two ranks: whole frames in order, and a second, quiet way on which either
//! side says that it is over. Knows nothing of groups and sums.
//!
//! The second way is why a lost or stuck rank is noticed at once: it is never behind a large
//! frame that is half sent, and a thread waits on it while the data way is read by the thread
//! that computes. RDMA, whose queue pairs do not tell that the other side died, needs it anyway.

mod memory;
mod tcp;

pub use memory::MemoryLink;
pub use tcp::TcpLink;

use crate::{
    frame::{FrameError, Header, Notice},
    group::Deadline,
};

/// Why a link did not do what was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    /// The deadline passed.
    #[error("nothing moved in time")]
    Timeout,
    /// It was closed, here or there.
    #[error("{0}")]
    Closed(String),
    /// What came is not a frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
}

/// How a link ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Farewell {
    /// The other side said why.
    Notice {
        /// Generation of the group that it spoke for.
        epoch: u64,
        /// Why.
        notice: Notice,
    },
    /// The other side is gone, or this one closed the link.
    Closed(String),
}

/// A way to one other rank. One thread sends and receives (a second one may finish sending),
/// another one watches, and any may abort or close.
pub trait Link: Send + Sync {
    /// Takes as much of `frame` as needs no waiting, and says how many bytes that was.
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

    /// Waits, without a deadline of its own, until the link ends: the other side takes leave or
    /// dies, or [`Link::close`] is called here.
    fn watch(&self) -> Farewell;

    /// Tells the other side that it is over (`frame` is a whole [`Notice::frame`]), then closes.
    fn abort(&self, frame: &[u8]);

    /// Ends the link: everything that waits on it, on both sides, wakes.
    fn close(&self);
}
