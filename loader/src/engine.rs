//! The engine: knows token ids, not text.
//!
//! Every rank has one [`Engine`]. Rank 0 leads: it decides each step and broadcasts it as a plan;
//! all ranks carry the plan out and sample the same tokens. Reading order: [`GenerateRequest`]
//! and [`Event`] (what is asked and answered), [`EngineHandle`] (the front's end),
//! [`RankEngine`] (what drives an engine), [`Engine`], then `schedule` (what rank 0 decides, with
//! the memory counted by `pages` and the next tokens guessed by `draft`), `plan` (what it
//! broadcasts), `runner` (what every rank does) and `sample`.

mod constraint;
mod counted;
mod draft;
mod handle;
mod hello;
mod logits;
mod pages;
mod plan;
mod rank;
mod request;
mod runner;
mod sample;
mod schedule;
mod step;

pub use constraint::{Constraint, ConstraintError, ConstraintFactory, ConstraintSource, TokenMask};
pub use counted::{CallCounter, Calls, CountedGroup, Counts};
pub use draft::DraftModelError;
pub use handle::{
    Command, EngineHandle, EngineState, EngineStatus, EventSink, RankVitals, StatusWriter,
    SubmitError,
};
pub use logits::{LocalModel, LocalSequence, LogitsError, logits, memory_group};
pub use rank::{HEARTBEAT, HEARTBEAT_TIMEOUT, RankEngine, StepOutcome};
pub use request::{
    Event, FinishReason, GenerateRequest, MAX_LOGPROBS, MIN_LOGPROB, RequestId, Sampling, TokenId,
    TokenLogprobs, Usage,
};
pub use step::{Engine, EngineOptions, Speculate};

#[cfg(test)]
mod tests;
