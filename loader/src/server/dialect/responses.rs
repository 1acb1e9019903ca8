//! Responses of the `OpenAI` API, without a store: each request brings its whole history.

mod input;
mod request;
mod writer;

pub(super) use request::{parse, parse_fields};
pub(super) use writer::{Options, ResponsesWriter};
