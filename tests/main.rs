//! End-to-end tests: one target, so one link. Real processes, files, sockets and kills.
#![expect(clippy::unwrap_used, reason = "a test that cannot set its scene has failed")]

mod adapter;
mod architecture;
mod bad_input;
mod cluster;
mod company;
mod compressed;
mod convert;
mod demo;
mod dense;
mod doctor;
mod eval;
mod exact;
mod experts;
mod exports;
mod features;
mod fused;
mod fuzz_corpus;
mod gpt_oss;
mod harness;
#[cfg(feature = "hub")]
mod hub;
mod hybrids;
mod kill;
mod memory;
mod mlx;
mod more_families;
mod package_set;
mod parity;
mod push;
mod recovery;
mod reshard;
mod rules;
mod running;
mod scripted;
mod serve;
mod signature;
mod sources;
mod sparse;
mod speculation;
mod stages;
mod stats;
mod streams;
mod tools;
mod verify;
mod wrapped;
