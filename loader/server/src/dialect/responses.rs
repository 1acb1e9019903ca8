//! Responses of the `OpenAI` API. Each request brings its history, or names the stored response
//! that it continues.

mod compaction;
mod input;
mod references;
mod request;
mod writer;

pub(super) use request::{parse, parse_compact};
use writer::ClientTool;
pub(super) use writer::{Options, ResponsesWriter};
