//! Sums between ranks: one trait, links over memory and TCP.
//!
//! Reading order: [`Group`] (what a rank may ask), [`LinkedGroup`] (how it is done over
//! [`Link`]s), [`frame`] (what stands on a link).
#![forbid(unsafe_code)]

mod fate;
pub mod frame;
mod group;
mod link;
mod linked;
mod loopback;
mod sum;

pub use group::{Deadline, Group, GroupError};
pub use link::{Farewell, Link, LinkError, MemoryLink, TcpLink};
pub use linked::LinkedGroup;
pub use loopback::join_on_loopback;
