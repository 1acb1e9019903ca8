//! The inner form, the same for every dialect: a conversation and how it is to be answered
//! ([`ChatRequest`]), and an answer in the making ([`OutputDelta`]s up to an end). Dialects parse to the
//! first and write the second; an [`OutputParser`] turns the model's tokens into pieces. No HTTP,
//! no tensors.

mod message;
mod output;
mod request;

pub use message::{Message, Role};
pub use output::{EndReason, OutputDelta, OutputParser, PlainText};
pub use request::{
    ChatRequest, Limits, Reasoning, ResponseFormat, SamplingRequest, Tool, ToolChoice, ToolKind,
};
