//! Collectives between ranks (all-reduce, all-gather, broadcast, barrier, send and receive): one
//! trait, links over memory, TCP and RDMA.
//!
//! Reading order: [`Group`] (the operations), [`LinkedGroup`] (the implementation over [`Link`]s),
//! [`ObservedGroup`] (the decorator that counts or delays calls), [`frame`] (the wire format).

mod fate;
pub mod frame;
mod group;
mod link;
mod linked;
mod loopback;
mod observed;
pub mod rdma;
mod sum;

#[cfg(test)]
#[path = "../../../tests/harness/skip.rs"]
#[expect(dead_code, reason = "these tests need no MLX")]
mod skip;

pub use group::{Deadline, Group, GroupError};
pub use link::{Link, LinkEnd, LinkError, MemoryLink, TcpLink};
pub use linked::{LinkSpeed, LinkSpeeds, LinkedGroup, Topology};
pub use loopback::join_on_loopback;
pub use observed::{GroupCall, GroupObserver, GroupOp, ObservedGroup};
