//! The models of a server: which there are, which are loaded, and what requests hold of each. A
//! server over one engine has one, which stays; a host's are loaded and unloaded while it runs.

mod loading;
mod shares;
mod swapping;
mod view;

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use shardpack_engine_api::EngineState;
use tokio::sync::watch;

use super::{
    closing::Closing,
    error::{ApiError, ErrorKind},
    events::ServerEvents,
    limits::ServerLimits,
    metrics::Metrics,
    model_host::{HostOptions, Machine, MemoryShare, ModelCard, ModelEntry, ModelHost},
    served_model::ServedModel,
};
use shares::Claim;
use swapping::Swap;
pub(super) use view::{ModelState, ModelView};

/// How long a client wants an idle model to stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KeepAlive {
    /// So long after its last request.
    For(Duration),
    /// For ever.
    Forever,
}

/// The models.
pub(super) struct Registry {
    rows: Mutex<Vec<Row>>,
    /// Told of every change that somebody may wait for.
    changed: watch::Sender<()>,
    host: Option<Host>,
    limits: ServerLimits,
    /// Held while room is made, so that two models do not count on the same memory.
    turn: tokio::sync::Mutex<()>,
    /// Told of models that come and go.
    events: Mutex<ServerEvents>,
}

struct Host {
    models: Arc<dyn ModelHost>,
    options: HostOptions,
    machines: Vec<Machine>,
}

/// A model.
struct Row {
    /// By which its host knows it.
    key: String,
    card: ModelCard,
    memory: Vec<MemoryShare>,
    is_pinned: bool,
    priority: u32,
    idle_timeout: Option<Duration>,
    /// What a client said last of its stay.
    keep_alive: Option<KeepAlive>,
    metrics: Arc<Metrics>,
    state: RowState,
    /// Present: another set takes the place of the one that is served.
    swap: Option<Swap>,
    /// Places of requests that the model answers.
    running: u32,
    /// Places of requests that wait for it to be loaded.
    waiting: u32,
    last_used: Instant,
}

/// The outcome of loading or unloading, once it is known.
type Done = watch::Receiver<Option<Result<(), ApiError>>>;

enum RowState {
    Unloaded,
    Loading {
        /// In a few words.
        progress: String,
        /// Whether its memory is counted.
        is_admitted: bool,
        done: Done,
    },
    Loaded(Arc<ServedModel>),
    Draining {
        served: Arc<ServedModel>,
        done: Done,
    },
    Failed(String),
}

/// What a request needs of its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    /// Its tokenizer and template.
    Text,
    /// Its engine, and one place for the request.
    Engine,
}

impl Need {
    const fn places(self) -> u32 {
        match self {
            Self::Text => 0,
            Self::Engine => 1,
        }
    }
}

/// A request's model.
pub(super) enum Found {
    /// It is there.
    Entered(Entered),
    /// It has to be loaded first.
    Waits(Waiting),
}

/// A loaded model that stays as long as this is held.
pub(super) struct Entered {
    pub(super) served: Arc<ServedModel>,
    /// The name by which the client knows it.
    pub(super) name: String,
    pub(super) share: Share,
}

/// A request's place while its model is being loaded.
pub(super) struct Waiting {
    name: String,
    need: Need,
    share: Share,
}

/// Places of a request among those of its model.
pub(super) struct Share {
    registry: Arc<Registry>,
    row: usize,
    places: u32,
    is_waiting: bool,
    /// What answers the request, which stays as long as this is held even where another set has taken
    /// its place.
    served: Option<Arc<ServedModel>>,
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut rows = self.registry.rows();
        let row = &mut rows[self.row];
        let held = if self.is_waiting { &mut row.waiting } else { &mut row.running };
        *held -= self.places;
        row.last_used = Instant::now();
        drop(rows);
        // Before those are told who wait for it to be let go.
        self.served = None;
        self.registry.tell();
    }
}

impl Share {
    /// Takes more places.
    pub(super) fn grow(&mut self, more: u32) -> Result<(), ApiError> {
        let mut rows = self.registry.rows();
        self.registry.check_places(&rows, self.row, more)?;
        rows[self.row].running += more;
        self.places += more;
        Ok(())
    }
}

impl Registry {
    /// One model, which is loaded and stays.
    pub(super) fn of_one(served: ServedModel) -> Self {
        let row = Row {
            key: served.name().to_owned(),
            card: served.card.clone(),
            memory: Vec::new(),
            is_pinned: true,
            priority: 1,
            idle_timeout: None,
            keep_alive: None,
            metrics: Arc::clone(&served.metrics),
            swap: None,
            running: 0,
            waiting: 0,
            last_used: Instant::now(),
            state: RowState::Loaded(Arc::new(served)),
        };
        let limits = match &row.state {
            RowState::Loaded(served) => served.limits,
            _ => ServerLimits::default(),
        };
        Self {
            rows: Mutex::new(vec![row]),
            changed: watch::Sender::new(()),
            host: None,
            limits,
            turn: tokio::sync::Mutex::default(),
            events: Mutex::default(),
        }
    }

    /// The models of a host, none of them loaded yet.
    pub(super) fn of_host(
        host: Arc<dyn ModelHost>,
        options: HostOptions,
        limits: ServerLimits,
    ) -> Self {
        let row = |entry: ModelEntry| Row {
            metrics: Arc::new(Metrics::new(entry.card.name())),
            key: entry.card.name().to_owned(),
            swap: None,
            card: entry.card,
            memory: entry.memory,
            is_pinned: entry.is_pinned,
            priority: entry.priority.max(1),
            idle_timeout: entry.idle_timeout,
            keep_alive: None,
            running: 0,
            waiting: 0,
            last_used: Instant::now(),
            state: RowState::Unloaded,
        };
        let rows: Vec<Row> = host.models().into_iter().map(row).collect();
        assert!(!rows.is_empty(), "a host has a model");
        let machines = host.machines();
        Self {
            rows: Mutex::new(rows),
            changed: watch::Sender::new(()),
            host: Some(Host { models: host, options, machines }),
            limits,
            turn: tokio::sync::Mutex::default(),
            events: Mutex::default(),
        }
    }

    /// Changes the one model of a server that is not served yet.
    pub(super) fn change_only(&self, change: impl FnOnce(&mut ServedModel)) {
        let mut rows = self.rows();
        let row = &mut rows[0];
        let RowState::Loaded(served) = &mut row.state else { return };
        let served = Arc::get_mut(served).expect("not served yet");
        change(served);
        row.card = served.card.clone();
    }

    /// Tells of models that come and go there from now on.
    pub(super) fn set_events(&self, events: ServerEvents) {
        *self.events.lock().unwrap_or_else(PoisonError::into_inner) = events;
    }

    /// Tells that a model came or went.
    fn moved(&self, kind: &'static str, model: &str, text: &str) {
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        events.add(kind, Some(model), text, serde_json::Value::Null);
    }

    /// Says what the one model of a server takes of each machine.
    pub(super) fn set_memory(&self, memory: Vec<MemoryShare>) {
        self.rows()[0].memory = memory;
    }

    /// By which the host knows a model.
    pub(super) fn key_of(&self, name: &str) -> Result<String, ApiError> {
        let rows = self.rows();
        find(&rows, Some(name)).map(|(index, _)| rows[index].key.clone())
    }

    /// Whether models can be loaded and unloaded.
    pub(super) fn has_host(&self) -> bool {
        self.host.is_some()
    }

    /// Whether a request for a model that is not loaded loads it.
    pub(super) fn loads_on_demand(&self) -> bool {
        self.host.as_ref().is_some_and(|host| host.options.on_demand)
    }

    /// The one model of a server without a host.
    pub(super) fn only(&self) -> Option<Arc<ServedModel>> {
        if self.has_host() {
            return None;
        }
        match &self.rows()[0].state {
            RowState::Loaded(served) => Some(Arc::clone(served)),
            _ => None,
        }
    }

    /// Ends the running requests of every model.
    pub(super) fn close(&self) {
        for row in self.rows().iter() {
            if let RowState::Loaded(served) | RowState::Draining { served, .. } = &row.state {
                served.closing.send_replace(Closing::Shutdown);
            }
            if let Some(served) = row.swap.as_ref().and_then(|swap| swap.replaced.as_ref()) {
                served.closing.send_replace(Closing::Shutdown);
            }
        }
    }

    /// The names of every model, in the order of the list.
    pub(super) fn names(&self) -> Vec<Vec<String>> {
        self.rows().iter().map(|row| row.card.names.clone()).collect()
    }

    /// The name as it is known; without one it is the first model's.
    pub(super) fn known_name(&self, asked: Option<&str>) -> Result<String, ApiError> {
        find(&self.rows(), asked).map(|(_, name)| name)
    }

    /// The model that a request asks for. Does not wait.
    pub(super) fn find(
        self: &Arc<Self>,
        asked: Option<&str>,
        need: Need,
    ) -> Result<Found, ApiError> {
        let mut rows = self.rows();
        let (index, name) = find(&rows, asked)?;
        let may_wait = self.loads_on_demand();
        let places = need.places();
        let served = match &rows[index].state {
            RowState::Loaded(served) => match check_engine(served, need) {
                Ok(()) => Some(Arc::clone(served)),
                // It is loaded again.
                Err(error) if may_wait && error.code == Some(FAILED) => None,
                Err(error) => return Err(error),
            },
            _ if may_wait => None,
            state => return Err(not_loaded(&name, state)),
        };
        if places > 0 {
            self.check_places(&rows, index, places)?;
        }
        let row = &mut rows[index];
        let is_waiting = served.is_none();
        *(if is_waiting { &mut row.waiting } else { &mut row.running }) += places;
        let (registry, held) = (Arc::clone(self), served.clone());
        let share = Share { registry, row: index, places, is_waiting, served: held };
        Ok(match served {
            Some(served) => Found::Entered(Entered { served, name, share }),
            None => Found::Waits(Waiting { name, need, share }),
        })
    }

    /// Whether a model has `count` places for requests left.
    fn check_places(&self, rows: &[Row], index: usize, count: u32) -> Result<(), ApiError> {
        let places = self.limits.active_requests;
        let claims: Vec<(usize, Claim)> = rows
            .iter()
            .enumerate()
            .filter(|(other, row)| *other == index || row.claims())
            .map(|(other, row)| (other, row.claim()))
            .collect();
        let own = claims.iter().position(|(other, _)| *other == index).unwrap_or_default();
        let claims: Vec<Claim> = claims.into_iter().map(|(_, claim)| claim).collect();
        if shares::may_take(places, &claims, own, count) {
            return Ok(());
        }
        let used: u32 = claims.iter().map(|claim| claim.used).sum();
        let message = if claims.len() == 1 || used.saturating_add(count) > places {
            format!("the server is busy with {places} requests")
        } else {
            format!(
                "model '{}' has {} of the server's {places} places, and the rest is kept for the \
                 other loaded models",
                rows[index].card.name(),
                claims[own].used,
            )
        };
        Err(ApiError::new(ErrorKind::Unavailable, message).with_code("queue_full"))
    }

    fn rows(&self) -> MutexGuard<'_, Vec<Row>> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self) {
        if self.has_host() {
            self.changed.send_replace(());
        }
    }
}

impl Row {
    /// Whether places are kept for it.
    fn claims(&self) -> bool {
        self.running + self.waiting > 0
            || !matches!(self.state, RowState::Unloaded | RowState::Failed(_))
    }

    fn claim(&self) -> Claim {
        Claim { weight: self.priority, used: self.running + self.waiting }
    }
}

/// The code of an engine that has failed.
const FAILED: &str = "failed";

/// The row of a name and the name as it is known; without a name it is the first.
fn find(rows: &[Row], asked: Option<&str>) -> Result<(usize, String), ApiError> {
    let Some(asked) = asked else { return Ok((0, rows[0].card.name().to_owned())) };
    let is_named = |row: &Row| row.card.names.iter().any(|name| name == asked);
    rows.iter().position(is_named).map(|index| (index, asked.to_owned())).ok_or_else(|| {
        let names: Vec<&String> = rows.iter().flat_map(|row| &row.card.names).collect();
        // Ollama's words, which clients look for.
        let message = format!("model '{asked}' not found: expected one of {names:?}");
        let error = ApiError::new(ErrorKind::NotFound, message).with_code("model_not_found");
        ApiError { param: Some("model".to_owned()), ..error }
    })
}

/// Whether a model's engine takes requests now.
pub(super) fn check_engine(served: &ServedModel, need: Need) -> Result<(), ApiError> {
    if need == Need::Text {
        return Ok(());
    }
    let unavailable = |message| ApiError::new(ErrorKind::Unavailable, message);
    match served.engine.status().state {
        // Requests wait until the group has formed again.
        EngineState::Ready | EngineState::Recovering(_) => Ok(()),
        EngineState::Starting(reason) => {
            Err(unavailable(format!("the model is starting: {reason}")).with_code("starting"))
        }
        EngineState::Failed(reason) => {
            Err(unavailable(format!("the engine has failed: {reason}")).with_code(FAILED))
        }
    }
}

/// The error for a model that no request loads.
fn not_loaded(name: &str, state: &RowState) -> ApiError {
    let how = format!(
        "load it with POST /v1/models/load {{\"model\": \"{name}\"}}, or serve with --on-demand"
    );
    let (what, code) = match state {
        RowState::Loading { progress, .. } => {
            (format!("model '{name}' is being loaded: {progress}"), "starting")
        }
        RowState::Draining { .. } => {
            (format!("model '{name}' is being unloaded; {how}"), "model_not_loaded")
        }
        RowState::Failed(reason) => {
            (format!("model '{name}' could not be loaded: {reason}; {how}"), "model_not_loaded")
        }
        RowState::Loaded(_) | RowState::Unloaded => {
            (format!("model '{name}' is known but not loaded: {how}"), "model_not_loaded")
        }
    };
    let error = ApiError::new(ErrorKind::Unavailable, what).with_code(code);
    ApiError { param: Some("model".to_owned()), ..error }
}
