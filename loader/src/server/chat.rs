//! The `OpenAI` dialect of chat completions: requests in, leniently, to the inner form; answers
//! out, strictly.

mod fields;
mod request;
mod response;

pub(super) use request::{ChatCall, parse};
pub(super) use response::{Answer, Writer};
