//! What bytes mean: the weight container, other people's files, model configurations and the rules
//! that turn a published checkpoint into normalised tensors and a normalised architecture.
//!
//! Reading order: [`container`] (files), [`calibration`] (moments of what matrices read),
//! [`sensitivity`] (what rounding each does to answers), [`learned`] (scales that distillation has
//! found), [`spec`] (what the engine computes), [`stored`] (quantized checkpoints as sources),
//! [`gguf`] (llama.cpp's files), [`pickle`] (torch's), [`normalise`] (how it is found out),
//! [`rules`] and [`expr`] (the data behind that), [`template`] (conversations as text),
//! [`tokenizer`] (other programs' as `tokenizer.json`), [`tool_family`] (how calls are written),
//! [`memory`] (sizes of the KV cache and of steps). Element types and quantized groups are
//! `shardpack_quantize`'s. This crate does no network and writes no files.

#![forbid(unsafe_code)]

pub mod calibration;
pub mod chat;
pub mod config;
pub mod container;
pub mod expr;
pub mod gguf;
pub mod hex;
pub mod imatrix;
mod inert;
pub mod learned;
pub mod memory;
mod neutral;
pub mod normalise;
pub mod pickle;
pub mod python_json;
pub mod rope;
pub mod rules;
pub mod sensitivity;
pub mod spec;
pub mod stored;
pub mod template;
pub mod tokenizer;
pub mod tool_family;

pub use calibration::Calibration;
pub use config::config_for_package;
pub use imatrix::Importance;
pub use normalise::{Axis, Normalised, Published, SourceTensor, StoredAs, TensorPlan, resolve};
pub use rules::{OwnRules, Role, RulePack, ShardingRule};
pub use spec::{Mask, Spec};
pub use tool_family::{AnswerFrame, OutputStyle, ThinkingStyle, ToolFamily};
