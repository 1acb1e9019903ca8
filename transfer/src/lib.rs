//! How packages reach nodes: the protocol without sockets, the sender, the receiver.
//!
//! Reading order: [`protocol`] (frames, messages, state machines), [`push`] (the controller's
//! side), [`receive`] (the node's side and its store).
#![forbid(unsafe_code)]

pub mod protocol;
pub mod push;
pub mod receive;

#[cfg(test)]
#[path = "../../tests/package_set.rs"]
mod package_set;
