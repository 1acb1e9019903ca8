//! How packages reach nodes: the protocol without sockets, the sender, the receiver.
//!
//! Reading order: [`protocol`] (frames, messages, state
#![forbid(unsafe_code)]

mod error_chain;
mod limit;
pub mod protocol;
pub mod pull;
pub mod push;
pub mod receive;
pub mod release;
pub mod repair;
pub mod ticket;

#[cfg(test)]
#[path = "../../tests/package_set.rs"]
mod package_set;
