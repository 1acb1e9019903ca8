//! A model that is loaded: its text side, its engine, and what its requests share.

use std::{sync::Arc, time::Duration};

use shardpack_chat::model::ChatModel;
use shardpack_engine_api::EngineHandle;
use tokio::sync::watch;

use super::{closing::Closing, limits::ServerLimits, metrics::Metrics, model_host::ModelCard};

/// A loaded model.
pub(super) struct ServedModel {
    pub(super) model: ChatModel,
    pub(super) engine: EngineHandle,
    /// What clients are told of it.
    pub(super) card: ModelCard,
    /// Names of the nodes, in rank order.
    pub(super) nodes: Vec<String>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) limits: ServerLimits,
    /// Says when its running requests must end.
    pub(super) closing: watch::Sender<Closing>,
}

impl ServedModel {
    /// The name that is reported.
    pub(super) fn name(&self) -> &str {
        self.card.name()
    }

    /// Longest time of a request in the engine.
    pub(super) fn timeout_ms(&self) -> Option<u64> {
        let timeout: Duration = self.limits.request_timeout;
        u64::try_from(timeout.as_millis()).ok()
    }
}
