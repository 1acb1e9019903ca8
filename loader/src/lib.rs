//! From a package on disk to an answer: receive, open, model, engine, cluster, server.
//!
//! Imports go down only: server → cluster → engine → model → backend → kernels and
//! collectives. tokio and axum only below [`server`], [`cluster`] and [`receive`].
#![forbid(unsafe_code)]

pub mod engine;
pub mod receive;
pub mod server;

// Test support, shared with the end-to-end tests.
#[cfg(test)]
#[path = "../../tests/package_set.rs"]
mod package_set;
