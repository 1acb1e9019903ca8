//! Identity and integrity of packages: digests, manifests, partitions, verification.
//!
//! Reading order: [`digest`] and [`canonical`] (how bytes and documents are named), [`manifest`]
//! and [`set`] (what a package and a package set say of themselves), [`layout`] (which rank
//! holds what), [`verify`] (do the bytes on disk agree), [`signature`] (who says so).
#![forbid(unsafe_code)]

pub mod canonical;
pub mod digest;
mod format1;
pub mod ids;
pub mod layout;
pub mod manifest;
pub mod partition;
pub mod set;
pub mod signature;
pub mod verify;

pub use digest::{CHUNK_BYTES, ChunkHasher, Digest};
pub use layout::{Layout, TensorShard};
pub use manifest::{Manifest, ManifestError};
pub use set::PackageSet;

// Test support is written as an outsider would write it.
#[cfg(test)]
extern crate self as shardpack_manifests;
#[cfg(test)]
#[path = "../../tests/package_set.rs"]
mod package_set;
