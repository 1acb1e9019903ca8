//! Collectives between ranks (all-reduce, all-gather, broadcast, barrier, send and receive): one
//! trait, links over memory and TCP.
//!
//! Reading order: [`Group`] (the operations), [`LinkedGroup`] (the implementation over [`Link`]s),
//! [`ObservedGroup`] (the decorator that counts or delays calls), [`frame`] (the wire format).
#![forbid(unsafe_code)]

mod fate;
pub mod frame;
mod group;
mod link;
mod linked;
mod loopback;
mod observed;
mod sum;

pub use group::{Deadline, Group, GroupError};
pub use link::{Link, LinkEnd, LinkError, MemoryLink, TcpLink};
pub use linked::LinkedGroup;
pub use loopback::join_on_loopback;
pub use observed::{GroupCall, GroupObserver, GroupOp, ObservedGroup};
