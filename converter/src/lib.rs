//! From a checkpoint to a package set: source, plan, quantize, cut, package.
//!
//! Reading order: [`source`] (what is there), [`plan`] (what will be written, from headers
//! alone), [`convert()`] (carrying the plan out), [`report`] (what it did to the weights),
//! [`reshard()`] (the same weights for another number of nodes), [`export()`] (for other people's
//! programs). The package directory is the whole contract with the loader.
#![forbid(unsafe_code)]

mod adapter;
mod checkpoint;
mod convert;
mod shard;
mod export;
#[cfg(feature = "hub")]
pub mod hub;
mod unsharded;
mod package;
mod shard_writer;
pub mod plan;
pub mod recipe;
pub mod report;
mod reshard;
pub mod rules;
pub mod source;
mod staging;

pub use adapter::AdapterError;
pub use checkpoint::{Origin, Pickles, Subfolder};
pub use convert::{ConvertError, ConvertEvent, Converted, Observer, PlanSummary, convert};
pub use export::{ExportError, ExportForm, ExportOptions, Exported, export};
pub use unsharded::{JoinError, Joined};
pub use package::WriteError;
pub use plan::{ConvertOptions, Nodes, Plan, PlanError, RankMemory};
pub use reshard::{
    ReshardError, ReshardEvent, ReshardObserver, ReshardOptions, Resharded, reshard,
};
pub use source::{Source, SourceError};
