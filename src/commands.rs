//! One module per command.

pub(crate) mod audit;
pub(crate) mod bench;
pub(crate) mod calibrate;
pub(crate) mod chat;
pub(crate) mod cluster;
pub(crate) mod convert;
pub(crate) mod demo;
pub(crate) mod doctor;
pub(crate) mod engine;
pub(crate) mod eval;
pub(crate) mod export;
pub(crate) mod front;
pub(crate) mod inspect;
pub(crate) mod keygen;
pub(crate) mod keys;
pub(crate) mod logits;
pub(crate) mod model;
pub(crate) mod node;
pub(crate) mod plan;
pub(crate) mod pull;
pub(crate) mod pull_hub;
pub(crate) mod push;
pub(crate) mod push_hub;
pub(crate) mod rank;
pub(crate) mod reshard;
pub(crate) mod self_test;
pub(crate) mod serve;
pub(crate) mod shell;
pub(crate) mod sign;
pub(crate) mod store;
pub(crate) mod text_worker;
pub(crate) mod usage;
pub(crate) mod verify;

mod cabling;
mod distillation;
mod draft;
mod events;
mod node_events;
mod node_facts;
mod node_operations;
mod package;
mod program;
mod ranks;
mod refusals;
mod rules;
mod server_client;
mod threads;

use std::process::ExitCode;

use crate::failure::Failure;

/// What a command ends with: an exit code, or a failure to report.
pub(crate) type Outcome = Result<ExitCode, Failure>;
