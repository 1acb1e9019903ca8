//! The engine: knows token ids, not text.
//!
//! Every rank has one [`Engine`]. Rank 0 leads: it decides each step and broadcasts it as a plan;
//! all ranks carry the plan out and sample the same tokens. Requests and events are
//! `shardpack_engine_api`'s.
//!
//! Reading order: [`RankEngine`] (what drives an engine), [`Engine`], then `schedule` (continuous
//! batching on rank 0, with the KV memory counted by `pages` and draft tokens proposed by `draft`),
//! `plan` (what it broadcasts), `runner` (runs a plan on every rank), `sample`, and `prompt_rows` (log
//! probabilities of prompts, embeddings).

mod ahead;
mod constraints;
mod counted;
mod draft;
mod hello;
mod logits;
mod pages;
mod plan;
mod prompt_rows;
mod rank;
mod rows;
mod runner;
mod sample;
mod schedule;
mod step;

pub use counted::{CallCounter, Calls, CountedGroup, Counts};
pub use draft::DraftModelError;
pub use logits::{LocalModel, LocalSequence, LogitsError, logits, memory_group};
pub use rank::{HEARTBEAT, HEARTBEAT_TIMEOUT, RankEngine, StepOutcome};
pub use step::{Engine, EngineOptions, Speculate};

#[cfg(test)]
mod tests;
