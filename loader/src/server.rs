//! The HTTP front: text in, text out, over an engine that knows only token ids.
//!
//! A request's way: a dialect (`dialect`) parses it to the inner form (`inner`), the model's
//! `template` renders it, its tokenizer (`text`) encodes it, the engine continues it, and the
//! dialect writes the pieces of the answer (`stream`). Whatever the model says, the status is
//! not a 5xx.

mod app;
#[allow(dead_code, reason = "the whole inner form is here before all of its readers are")]
mod dialect;
mod error;
mod generation;
#[allow(dead_code, reason = "the whole inner form is here before all of its readers are")]
mod inner;
#[allow(dead_code, reason = "the whole inner form is here before all of its readers are")]
mod json;
mod model;
mod output;
mod serve;
mod stream;
mod template;
#[allow(dead_code, reason = "the whole inner form is here before all of its readers are")]
mod text;
mod tokens;

pub use app::{Server, ServerLimits};
pub use model::{ChatModel, OpenModelError};
pub use serve::{Stop, run, serve, termination, termination_or, wait_for_termination};
pub use template::TemplateError;
pub use text::{DecodingError, VocabularyError};
pub use tokens::{TokenizeError, tokenize};
