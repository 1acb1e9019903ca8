//! Messages of the Anthropic API.

mod request;
mod writer;

pub(super) use request::parse;
pub(super) use writer::{MessagesWriter, Options};
