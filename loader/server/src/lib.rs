//! The HTTP server: text in, text out, over an engine that knows only token ids.
//!
//! A request's data path: a dialect (`dialect`) parses it to `shardpack_chat::conversation`, the
//! model's chat template renders it, its tokenizer encodes it, the engine continues it, and the
//! dialect writes the output deltas (`stream`). No output of the model causes a 5xx.

#![forbid(unsafe_code)]

mod admission;
mod app;
mod audit;
mod background;
mod batch;
mod closing;
mod connections;
mod dates;
mod dialect;
mod door;
mod error;
mod events;
mod fair;
mod generation;
mod http2;
mod keys;
mod ledger;
mod limits;
mod metrics;
mod model_host;
mod model_info;
mod model_store;
mod openapi;
mod registry;
mod response_store;
mod routes;
mod scripted;
mod serve;
mod served_model;
mod stream;
mod tasks;
mod tenant;
mod tls;
mod usage;

pub use admission::{NoRoom, check_room};
pub use app::{LogSink, Server, ServiceEvent};
pub use audit::{AuditError, AuditFault, AuditSummary, verify_audit};
pub use events::ServerEvents;
pub use keys::{ApiKeys, KEY_FILE_BYTES_MAX, KeyEntry, KeyError, KeyFile, KeyLimits, Scope};
pub use ledger::{Ledger, LedgerError, UsageError};
pub use limits::ServerLimits;
pub use model_host::{
    AddedModel, CheckedPackage, HostError, HostOptions, LoadReport, Machine, MemoryShare,
    ModelCard, ModelEntry, ModelHost, PackageCheck, StartedModel,
};
pub use model_info::ModelInfo;
pub use model_store::{ModelStore, ModelStoreError, PullReport, PullStatus};
pub use scripted::{Script, ScriptError};
pub use serve::{Ended, Stop, run, wait_for_termination};
pub use tls::{Report, Tls, TlsError};
