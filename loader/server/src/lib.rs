//! The HTTP server: text in, text out, over an engine that knows only token ids.
//!
//! A request's data path: a dialect (`dialect`) parses it to `shardpack_chat::conversation`, the
//! model's chat template renders it, its tokenizer encodes it, the engine continues it, and the
//! dialect writes the output deltas (`stream`). No output of the model causes a 5xx.

#![forbid(unsafe_code)]

mod app;
mod batch;
mod dialect;
mod error;
mod generation;
mod keys;
mod metrics;
mod model_info;
mod model_store;
mod openapi;
mod response_store;
mod routes;
mod scripted;
mod serve;
mod stream;
mod tls;
mod usage;

pub use app::{LogSink, Server, ServerLimits};
pub use keys::{ApiKeys, KEY_FILE_BYTES_MAX, KeyEntry, KeyError, KeyFile, KeyLimits, Scope};
pub use model_info::ModelInfo;
pub use model_store::{ModelStore, ModelStoreError, PullReport, PullStatus};
pub use scripted::{Script, ScriptError};
pub use serve::{Stop, run, serve, termination, termination_or, wait_for_termination};
pub use tls::{Report, Tls, TlsError};
