//! A host of models whose engines echo their own name, for servers of several models.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicU32, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use shardpack_engine_api::{Command, EngineState, Event, FinishReason, Usage};

use super::super::*;
use super::scripted::{HANG, Serving, kjv};
use crate::{
    AddedModel, HostError, HostOptions, LoadReport, Machine, MemoryShare, ModelCard, ModelEntry,
    ModelHost, ModelInfo, StartedModel,
};

/// A gate that tests close and open.
#[derive(Default)]
pub(super) struct Gate {
    is_closed: Mutex<bool>,
    changed: Condvar,
}

impl Gate {
    pub(super) fn close(&self) {
        *self.is_closed.lock().unwrap() = true;
    }

    pub(super) fn open(&self) {
        *self.is_closed.lock().unwrap() = false;
        self.changed.notify_all();
    }

    fn pass(&self) {
        let closed = self.is_closed.lock().unwrap();
        let passed = self.changed.wait_timeout_while(closed, HANG, |closed| *closed).unwrap();
        assert!(!passed.1.timed_out(), "the gate was never opened");
    }
}

/// Models that all have the tokenizer of one, and answer every request with their name.
pub(super) struct Hosted {
    entries: Vec<ModelEntry>,
    limit_bytes: u64,
    /// What is loaded.
    engines: Mutex<BTreeMap<String, EngineHandle>>,
    /// Passed by every load before it ends.
    pub(super) loading: Gate,
    /// Passed by every answer before its last token.
    pub(super) answering: Gate,
    /// Loads and unloads, in their order.
    pub(super) log: Mutex<Vec<String>>,
    /// Loads of this model fail.
    pub(super) fails: Mutex<Option<&'static str>>,
    pub(super) submitted: AtomicU32,
    /// Times that loads were given.
    pub(super) load_timeouts: Mutex<Vec<Duration>>,
}

/// A model of the host: its name, the bytes that it takes, and changes of the usual entry.
pub(super) fn entry(name: &str, bytes: u64) -> ModelEntry {
    let model = ChatModel::open(kjv()).unwrap();
    let names = vec![name.to_owned(), format!("{name}-alias")];
    let info = ModelInfo { size_bytes: bytes, ..ModelInfo::default() };
    let memory = MemoryShare {
        machine: "this machine".to_owned(),
        weights_bytes: bytes,
        cache_bytes: 0,
        working_bytes: 0,
    };
    ModelEntry {
        card: ModelCard::of(&model, names, info),
        memory: vec![memory],
        is_pinned: false,
        priority: 1,
        idle_timeout: None,
    }
}

/// A server of these models, on a machine with so much memory.
pub(super) fn start_hosted(
    entries: Vec<ModelEntry>,
    limit_bytes: u64,
    options: HostOptions,
    limits: ServerLimits,
    change: impl FnOnce(Server) -> Server,
) -> (Serving, Arc<Hosted>) {
    let host = Arc::new(Hosted {
        entries,
        limit_bytes,
        engines: Mutex::default(),
        loading: Gate::default(),
        answering: Gate::default(),
        log: Mutex::default(),
        fails: Mutex::default(),
        submitted: AtomicU32::new(0),
        load_timeouts: Mutex::default(),
    });
    let server = Server::of_host(Arc::new(Arc::clone(&host)), options, limits);
    (Serving::start(change(server)), host)
}

impl Hosted {
    /// What was done since the last call.
    pub(super) fn took(&self) -> Vec<String> {
        std::mem::take(&mut *self.log.lock().unwrap())
    }

    pub(super) fn engine(&self, name: &str) -> EngineHandle {
        self.engines.lock().unwrap()[name].clone()
    }

    fn play(self: Arc<Self>, name: &str, commands: mpsc::Receiver<Command>) {
        let tokens = ChatModel::open(kjv()).unwrap().encode(name).unwrap();
        let host = self;
        for command in commands {
            let Command::Submit { id, events, .. } = command else { continue };
            host.submitted.fetch_add(1, Ordering::SeqCst);
            let (host, tokens) = (Arc::clone(&host), tokens.clone());
            thread::spawn(move || {
                for (index, &token) in tokens.iter().enumerate() {
                    if index + 1 == tokens.len() {
                        host.answering.pass();
                    }
                    events(Event::Token { request: id, token, logprobs: None });
                }
                let usage = Usage::default();
                events(Event::Finished { request: id, reason: FinishReason::Stop, usage });
            });
        }
    }
}

impl ModelHost for Arc<Hosted> {
    fn models(&self) -> Vec<ModelEntry> {
        self.entries.clone()
    }

    fn machines(&self) -> Vec<Machine> {
        vec![Machine { name: "this machine".to_owned(), limit_bytes: self.limit_bytes }]
    }

    fn load(
        &self,
        name: &str,
        timeout: Duration,
        report: LoadReport<'_>,
    ) -> Result<StartedModel, HostError> {
        self.load_timeouts.lock().unwrap().push(timeout);
        report("half of it");
        self.loading.pass();
        if *self.fails.lock().unwrap() == Some(name) {
            return Err(HostError("rank 0: its package is broken".to_owned()));
        }
        let (engine, commands) = EngineHandle::new(1);
        engine.update_status(|status| status.state = EngineState::Ready);
        let (host, played) = (Arc::clone(self), name.to_owned());
        thread::spawn(move || host.play(&played, commands));
        let earlier = self.engines.lock().unwrap().insert(name.to_owned(), engine.clone());
        assert!(earlier.is_none(), "{name} is loaded twice");
        self.log.lock().unwrap().push(format!("+{name}"));
        let nodes = vec![format!("node of {name}")];
        Ok(StartedModel { model: ChatModel::open(kjv()).unwrap(), engine, nodes })
    }

    fn unload(&self, name: &str) -> Result<(), HostError> {
        let engine = self.engines.lock().unwrap().remove(name);
        assert!(engine.is_some(), "{name} was loaded");
        self.log.lock().unwrap().push(format!("-{name}"));
        Ok(())
    }

    /// A set is called MODEL@VERSION, which is its key too.
    fn add(&self, name: &str, set: &str) -> Result<Option<AddedModel>, HostError> {
        if self.engines.lock().unwrap().contains_key(set) {
            return Ok(None);
        }
        if !set.starts_with(&format!("{name}@")) {
            return Err(HostError(format!("{set}: no such set")));
        }
        let served = self.entries.iter().find(|entry| entry.card.name() == name).unwrap();
        Ok(Some(AddedModel { key: set.to_owned(), entry: served.clone() }))
    }

    fn forget(&self, key: &str) {
        assert!(!self.engines.lock().unwrap().contains_key(key), "{key} is loaded");
        self.log.lock().unwrap().push(format!("x{key}"));
    }
}
