//! What listings show of the models.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use shardpack_engine_api::EngineState;

use super::{KeepAlive, Registry, Row, RowState};
use crate::{
    metrics::Metrics,
    model_host::{Machine, MemoryShare, ModelCard},
    served_model::ServedModel,
};

/// A model as it is now.
pub(crate) struct ModelView {
    pub(crate) card: ModelCard,
    /// Absent: not loaded.
    pub(crate) served: Option<Arc<ServedModel>>,
    pub(crate) state: ModelState,
    pub(crate) memory: Vec<MemoryShare>,
    pub(crate) is_pinned: bool,
    pub(crate) priority: u32,
    /// When an idle model is unloaded; absent: never.
    pub(crate) idle_timeout: Option<Duration>,
    /// Time since its last request, or since it was loaded.
    pub(crate) idle: Duration,
    pub(crate) running: u32,
    pub(crate) waiting: u32,
    pub(crate) metrics: Arc<Metrics>,
    /// How far it is with the set that takes its place, in a few words.
    pub(crate) swap: Option<String>,
}

/// The state of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ModelState {
    Unloaded,
    /// How far it is, in a few words.
    Loading(String),
    Loaded,
    /// A lost rank is being replaced; requests wait.
    Recovering(String),
    /// Its last requests run.
    Draining,
    /// Why.
    Failed(String),
}

impl ModelState {
    /// In a word.
    pub(crate) const fn name(&self) -> &'static str {
        match self {
            Self::Unloaded => "unloaded",
            Self::Loading(_) => "loading",
            Self::Loaded => "loaded",
            Self::Recovering(_) => "recovering",
            Self::Draining => "draining",
            Self::Failed(_) => "failed",
        }
    }

    /// What there is to say of it.
    pub(crate) fn detail(&self) -> Option<&str> {
        match self {
            Self::Loading(text) | Self::Recovering(text) | Self::Failed(text) => Some(text),
            Self::Unloaded | Self::Loaded | Self::Draining => None,
        }
    }
}

impl Registry {
    /// Every model, in the order of the list.
    pub(crate) fn views(&self) -> Vec<ModelView> {
        self.rows().iter().map(Row::view).collect()
    }

    /// What loaded models take of each machine, those that are being loaded or unloaded included.
    pub(crate) fn taken(&self) -> BTreeMap<String, u64> {
        let mut taken = BTreeMap::new();
        for resident in self.rows().iter().flat_map(Row::residents) {
            for share in resident.memory {
                *taken.entry(share.machine.clone()).or_default() += share.total_bytes();
            }
        }
        taken
    }

    /// The machines on which a host's models run.
    pub(crate) fn machines(&self) -> &[Machine] {
        self.host.as_ref().map_or(&[], |host| &host.machines)
    }
}

impl Row {
    fn view(&self) -> ModelView {
        let (state, served) = match &self.state {
            RowState::Unloaded => (ModelState::Unloaded, None),
            RowState::Loading { progress, .. } => (ModelState::Loading(progress.clone()), None),
            RowState::Loaded(served) => {
                let state = match served.engine.status().state {
                    EngineState::Ready => ModelState::Loaded,
                    EngineState::Recovering(text) => ModelState::Recovering(text),
                    EngineState::Starting(text) => ModelState::Loading(text),
                    EngineState::Failed(reason) => ModelState::Failed(reason),
                };
                (state, Some(Arc::clone(served)))
            }
            RowState::Draining { served, .. } => (ModelState::Draining, Some(Arc::clone(served))),
            RowState::Failed(reason) => (ModelState::Failed(reason.clone()), None),
        };
        ModelView {
            card: self.card.clone(),
            served,
            state,
            memory: self.memory.clone(),
            is_pinned: self.is_pinned,
            priority: self.priority,
            idle_timeout: self.stay(),
            idle: self.last_used.elapsed(),
            running: self.running,
            waiting: self.waiting,
            metrics: Arc::clone(&self.metrics),
            swap: self.swap.as_ref().map(|swap| swap.progress.clone()),
        }
    }

    /// How long it stays without requests; absent: for ever.
    pub(super) fn stay(&self) -> Option<Duration> {
        match self.keep_alive {
            _ if self.is_pinned => None,
            Some(KeepAlive::Forever) => None,
            Some(KeepAlive::For(time)) => Some(time),
            None => self.idle_timeout,
        }
    }
}
