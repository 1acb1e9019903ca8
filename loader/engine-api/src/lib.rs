//! What a front needs to know of an engine, and nothing of how it computes.
//!
//! Reading order: [`GenerateRequest`] and [`Event`] (what is asked and answered), [`Constraint`]
//! (which tokens may come next), [`EngineHandle`] (commands in, events out). Server and cluster
//! know each other only through this crate.
#![forbid(unsafe_code)]

mod constraint;
mod handle;
mod request;

pub use constraint::{Constraint, ConstraintError, ConstraintFactory, ConstraintSource, TokenMask};
pub use handle::{
    Command, EngineHandle, EngineState, EngineStatus, EventSink, RankVitals, StatusWriter,
    SubmitError,
};
pub use request::{
    Event, FinishReason, GenerateRequest, MAX_LOGPROBS, MIN_LOGPROB, RequestId, Sampling, TokenId,
    TokenLogprobs, Usage,
};
