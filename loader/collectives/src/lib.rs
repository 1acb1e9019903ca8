//! Sums between ranks: one trait, links over memory and TCP.
#![forbid(unsafe_code)]

mod group;

pub use group::{Deadline, Group, GroupError};
