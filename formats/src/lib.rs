//! What bytes mean: dtypes, the weight container, affine groups, model configurations and the
//! rules that turn a published checkpoint into normalised tensors and a normalised
//! architecture.
//!
//! Reading order: [`dtype`] and [`container`] (files), [`affine`] (quantized groups), [`spec`]
//! (what the engine computes). This crate does no network and writes no files.

pub mod affine;
pub mod container;
pub mod dtype;
pub mod hex;
pub mod mapped;
pub mod spec;

pub use affine::{AffineFormat, Rounding};
pub use dtype::Dtype;
pub use spec::Spec;
