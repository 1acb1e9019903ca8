//! From a checkpoint to a package set: source, plan, quantize, cut, package.
//!
//! Reading order: [`source`] (what is there), [`plan`] (what will be written, from headers
//! alone), [`convert()`] (carrying the plan out), [`report`] (what it did to the weights),
//! [`push`] (each node gets its package). The package directory is the whole contract with the loader.
#![forbid(unsafe_code)]

mod convert;
mod cut;
mod package;
pub mod plan;
pub mod push;
pub mod recipe;
pub mod report;
pub mod source;
mod staging;

pub use convert::{ConvertError, ConvertEvent, Converted, Observer, PlanSummary, convert};
pub use package::WriteError;
pub use plan::{ConvertOptions, Nodes, Plan, PlanError, RankMemory};
pub use source::{Source, SourceError};
