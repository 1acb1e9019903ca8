//! The engine: knows token ids, not text.

mod handle;
mod rank;
mod request;

pub use handle::{Command, EngineHandle, EngineState, EngineStatus, EventSink, SubmitError};
pub use rank::{HEARTBEAT, PATIENCE, RankEngine, StepOutcome};
pub use request::{Event, FinishReason, GenerateRequest, RequestId, Sampling, TokenId, Usage};
