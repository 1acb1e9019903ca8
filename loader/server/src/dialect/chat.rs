//! Chat completions of the `OpenAI` API.

mod request;
mod response;

pub(super) use request::parse;
pub(super) use response::{ChatWriter, Options, Usage, finish_reason};
