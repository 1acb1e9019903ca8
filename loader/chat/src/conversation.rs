//! Request and output of a chat model, the same for every dialect: [`ChatRequest`] (messages,
//! tools, sampling, limits) and [`OutputDelta`]s up to an [`EndReason`]. Dialects parse to the
//! first and write the second; an [`OutputParser`] turns the model's tokens into deltas. No HTTP,
//! no tensors.

mod message;
mod output;
mod request;

pub(crate) use message::ArgumentsForm;
pub use message::{Message, Role};
pub use output::{EndReason, OutputDelta, OutputParser, PlainText};
pub use request::{
    ChatRequest, Limits, NamespacedName, Reasoning, ReasoningOption, ResponseFormat,
    SamplingRequest, Tool, ToolChoice, ToolFormat, ToolKind,
};
