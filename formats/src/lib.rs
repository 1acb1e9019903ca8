//! What models are: their configurations, and the rules that turn a published checkpoint into
//! normalised tensors and a normalised architecture.
//!
//! Reading order: [`spec`] (what the engine computes), [`normalise`] (how it is found out),
//! [`rules`] and [`expr`] (the data behind that), [`config`] (what a package says of itself),
//! [`calibration`] (moments of what matrices read), [`sensitivity`] (what rounding each does to
//! answers), [`learned`] (scales that distillation has found), [`template`] (conversations as
//! text), [`tool_family`] (how calls are written), [`memory`] (sizes of the KV cache and of
//! steps). Files of weights are `shardpack_containers`', element types and quantized groups
//! `shardpack_quantize`'s. This crate does no network and writes no files.

#![forbid(unsafe_code)]

pub mod calibration;
pub mod chat;
pub mod config;
pub mod expr;
pub mod hex;
mod inert;
pub mod learned;
pub mod memory;
pub mod normalise;
pub mod python_json;
pub mod rope;
pub mod rules;
pub mod sensitivity;
pub mod spec;
pub mod template;
pub mod tool_family;

pub use calibration::Calibration;
pub use config::config_for_package;
pub use normalise::{Axis, Normalised, Published, SourceTensor, StoredAs, TensorPlan, resolve};
pub use rules::{OwnRules, Role, RulePack, ShardingRule};
pub use spec::{Mask, Spec};
pub use tool_family::{AnswerFrame, OutputStyle, ThinkingStyle, ToolFamily};
