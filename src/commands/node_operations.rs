//! What a node does beyond its store when a controller asks for it by name: a list of handlers, of which
//! the first that knows the name answers.

use std::{io, path::Path, sync::Arc};

use serde_json::Value;
use shardpack_transfer::receive::OperateHook;

use super::{
    events::{EVENTS, EventLog},
    node_facts::{FACTS, Facts, KvFacts, RankBook},
};
use crate::args::EngineChoice;

/// Carries out an operation, or `None` of one that it does not know.
pub(crate) type Handler = Box<dyn Fn(&str, &Value) -> Option<Result<Value, String>> + Send + Sync>;

/// The hook of a node that asks `handlers` in turn.
pub(crate) fn hook(handlers: Vec<Handler>) -> OperateHook {
    Box::new(move |name, parameters| handlers.iter().find_map(|handler| handler(name, &parameters)))
}

/// What a node sees of itself.
pub(crate) struct Observed {
    pub log: Arc<EventLog>,
    pub ranks: Arc<RankBook>,
    facts: Facts,
}

impl Observed {
    /// Of the node over `store`, whose ranks run with `engine`.
    pub(crate) fn start(store: &Path, engine: &EngineChoice) -> io::Result<Self> {
        let log = Arc::new(EventLog::open(store)?);
        let ranks = Arc::new(RankBook::new(Arc::clone(&log)));
        let kv = KvFacts::of(engine);
        let facts = Facts::new(store, kv, Arc::clone(&ranks), Arc::clone(&log))?;
        Ok(Self { log, ranks, facts })
    }

    /// Tells its facts and events.
    pub(crate) fn handler(self) -> Handler {
        let Self { log, facts, .. } = self;
        Box::new(move |name, parameters| match name {
            FACTS => Some(Ok(facts.answer())),
            EVENTS => Some(log.answer(parameters.clone())),
            _ => None,
        })
    }
}
