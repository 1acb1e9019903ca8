//! The engine: packages in memory, one definition of each model over two backends, and the steps
//! that answer requests.
//!
//! Reading order: [`loading`] (a package's bytes, checked), [`backend`] (operations on a machine),
//! [`model`] (layers over a backend), [`engine`] (continuous batching, sampling, speculation),
//! [`mod@bench`] and [`eval`] (speed and quality), [`calibration`] (what matrices read),
//! [`distillation`] (scales tuned to the answers of the model at 16 bits), [`rank_engine`] (all of it on a backend that is chosen
//! at run time). Knows token ids, not text; no sockets of its own.
#![forbid(unsafe_code)]

pub mod backend;
pub mod bench;
pub mod calibration;
pub mod distillation;
pub mod engine;
pub mod eval;
pub mod loading;
pub mod model;
pub mod rank_engine;

#[cfg(test)]
mod testing;
