//! From a checkpoint to a package set: source, plan, quantize, shard, package.
//!
//! Reading order: [`source`] (what is there), [`plan`] (what will be written, from headers alone),
//! [`convert()`] (quantizes and writes what was planned), [`report`] (what it did to the weights),
//! [`reshard()`] (the same weights for another number of nodes), [`export()`] (for other programs),
//! [`store`] (models by name, converted when they are needed).
//! The package directory is the whole contract with the loader.
#![forbid(unsafe_code)]

mod adapter;
mod cancel;
mod checkpoint;
mod convert;
mod export;
#[cfg(feature = "hub")]
pub mod hub;
mod learned;
mod measured;
mod moments;
mod package;
pub mod plan;
pub mod recipe;
pub mod report;
mod reshard;
mod rounding;
pub mod rules;
mod shard;
mod shard_writer;
pub mod source;
mod staging;
pub mod store;
mod unsharded;

pub use adapter::AdapterError;
pub use cancel::Cancel;
pub use checkpoint::{Origin, Pickles, Subfolder};
pub use convert::{ConvertError, ConvertEvent, Converted, Observer, PlanSummary, convert};
pub use export::{ExportError, ExportForm, ExportOptions, Exported, export};
pub use learned::ScalesError;
pub use moments::MomentsError;
pub use package::WriteError;
pub use plan::{ConvertOptions, Nodes, Plan, PlanError, RankMemory};
pub use reshard::{
    ReshardError, ReshardEvent, ReshardObserver, ReshardOptions, Resharded, reshard,
};
pub use rounding::{Candidates, CandidatesError, Measured, Weights};
pub use source::{Source, SourceError};
pub use unsharded::{UnshardError, UnshardedModel};
