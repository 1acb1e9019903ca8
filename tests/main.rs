//! End-to-end tests: one target, so one link. Real processes, files, sockets and kills.
#![expect(clippy::unwrap_used, reason = "a test that cannot set its scene has failed")]

mod adapter;
mod architecture;
mod bad_input;
mod convert;
mod demo;
mod dense;
mod eval;
mod exact;
mod experts;
mod fuzz_corpus;
mod harness;
#[cfg(feature = "hub")]
mod hub;
mod kill;
mod mlx;
mod package_set;
mod parity;
mod push;
mod reshard;
mod running;
mod serve;
mod signature;
mod sources;
mod tools;
mod verify;
