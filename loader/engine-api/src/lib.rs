//! The interface between a server and an engine, without how the engine computes.
//!
//! Reading order: [`GenerateRequest`] and [`Event`] (request and response), [`Constraint`]
//! (which tokens are allowed next), [`EngineHandle`] (commands in, events out),
//! [`LinkReport`] (how ranks are linked). Server and cluster
//! know each other only through this crate.
#![forbid(unsafe_code)]

mod constraint;
mod handle;
mod links;
mod request;
mod tenant;
mod token;

pub use constraint::{Constraint, ConstraintError, ConstraintFactory, ConstraintSource, TokenMask};
pub use handle::{
    Command, EngineHandle, EngineState, EngineStatus, EventSink, RankVitals, StatusWriter,
    SubmitError,
};
pub use links::{LinkReport, Transport};
pub use request::{
    Event, FinishReason, GenerateRequest, MAX_LOGPROBS, MIN_LOGPROB, PromptOutput, RequestId,
    Sampling, TokenLogprobs, Usage,
};
pub use tenant::Tenant;
pub use token::TokenId;
