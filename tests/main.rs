//! End-to-end tests: one target, so one link.
#![allow(clippy::unwrap_used, reason = "a panic is how a test says no")]

mod architecture;
mod package_set;
mod push;
