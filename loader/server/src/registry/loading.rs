//! Loading and unloading, while the server runs. Both go on when the client that asked has left.

use std::{sync::Arc, thread, time::Duration};

use shardpack_engine_api::EngineState;
use tokio::{
    sync::{oneshot, watch},
    time::{Instant, sleep, timeout_at},
};

use super::{
    Done, Entered, Host, KeepAlive, Registry, Row, RowState, ServedModel, Waiting, check_engine,
    find,
};
use crate::{
    admission::{Admission, Resident, Stay, admit},
    closing::{Closing, draining},
    error::{ApiError, ErrorKind},
    model_host::{HostError, ModelCard, ModelHost, StartedModel},
    tasks,
};

/// Interval at which idle models are looked for.
const IDLE_INTERVAL: Duration = Duration::from_millis(250);
/// Time in which requests end that were told to.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// Whether running requests are ended when a model does not get idle in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Patience {
    /// They are.
    EndRequests,
    /// They are not, and the model stays.
    GiveUp,
}

/// What comes into memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Newcomer {
    /// A model that is not loaded.
    Model,
    /// The set that takes the place of the one that is served.
    Successor,
}

/// What a model's requests wait for.
enum Step {
    Ready(Arc<ServedModel>),
    Loading(Done),
    Unloading(Done),
}

impl Registry {
    /// Waits until a model is loaded; loads it where nobody does. `stops` turns true when the server
    /// shuts down.
    pub(crate) async fn enter(
        self: &Arc<Self>,
        mut waiting: Waiting,
        mut stops: watch::Receiver<bool>,
    ) -> Result<Entered, ApiError> {
        let deadline = Instant::now() + self.load_timeout();
        loop {
            let (mut done, is_loading) = match self.step(&mut waiting)? {
                Step::Ready(served) => {
                    let Waiting { name, share, .. } = waiting;
                    return Ok(Entered { served, name, share });
                }
                Step::Loading(done) => (done, true),
                Step::Unloading(done) => (done, false),
            };
            let outcome = self.outcome(&mut done, &mut stops, deadline, &waiting.name).await?;
            // One that could not be unloaded may still answer.
            if is_loading {
                outcome?;
            }
        }
    }

    /// Loads a model, and returns once it answers.
    pub(crate) async fn load(
        self: &Arc<Self>,
        name: &str,
        mut stops: watch::Receiver<bool>,
    ) -> Result<(), ApiError> {
        let deadline = Instant::now() + self.load_timeout();
        loop {
            let (mut done, is_loading) = {
                let mut rows = self.rows();
                let (index, _) = find(&rows, Some(name))?;
                match &rows[index].state {
                    RowState::Loaded(served) if !has_failed(served) => return Ok(()),
                    RowState::Draining { done, .. } => (done.clone(), false),
                    _ => (self.begin_loading(&mut rows, index)?, true),
                }
            };
            let outcome = self.outcome(&mut done, &mut stops, deadline, name).await?;
            if is_loading {
                return outcome;
            }
        }
    }

    /// Unloads a model once its running requests have ended, which they get the server's drain
    /// time for; returns when its memory is free.
    pub(crate) async fn unload(
        self: &Arc<Self>,
        name: &str,
        mut stops: watch::Receiver<bool>,
    ) -> Result<(), ApiError> {
        self.host()?;
        let deadline = Instant::now() + self.load_timeout();
        let mut done = {
            let mut rows = self.rows();
            let (index, _) = find(&rows, Some(name))?;
            rows[index].check_swap()?;
            match &rows[index].state {
                RowState::Unloaded => return Ok(()),
                RowState::Failed(_) => {
                    rows[index].state = RowState::Unloaded;
                    return Ok(());
                }
                RowState::Draining { done, .. } => done.clone(),
                RowState::Loading { .. } => {
                    let message = format!("model '{name}' is being loaded: unload it afterwards");
                    let error = ApiError::new(ErrorKind::Unavailable, message);
                    return Err(error.with_code("starting"));
                }
                RowState::Loaded(_) => {
                    let until = Instant::now() + self.limits.drain_timeout;
                    self.begin_unloading(&mut rows, index, until, Patience::EndRequests)
                }
            }
        };
        self.outcome(&mut done, &mut stops, deadline, name).await?
    }

    /// Notes how long a client wants a model to stay.
    pub(crate) fn keep_alive(&self, name: &str, keep_alive: KeepAlive) {
        let mut rows = self.rows();
        if let Ok((index, _)) = find(&rows, Some(name)) {
            rows[index].keep_alive = Some(keep_alive);
        }
    }

    /// Begins to load what is to be there from the start, and unloads what is idle for too long;
    /// ends with the server.
    pub(crate) async fn tend(self: Arc<Self>) {
        let Some(host) = &self.host else { return };
        {
            let mut rows = self.rows();
            for index in 0..rows.len() {
                if rows[index].is_pinned || !host.options.on_demand {
                    // Its outcome is in the list.
                    let _ = self.begin_loading(&mut rows, index);
                }
            }
        }
        loop {
            sleep(IDLE_INTERVAL).await;
            let mut rows = self.rows();
            for index in 0..rows.len() {
                if rows[index].is_overdue() {
                    let until = Instant::now() + self.limits.drain_timeout;
                    let _ = self.begin_unloading(&mut rows, index, until, Patience::GiveUp);
                }
            }
        }
    }

    pub(super) fn host(&self) -> Result<&Host, ApiError> {
        self.host.as_ref().ok_or_else(|| {
            let message = "this server serves one model, which stays loaded: serve several sets, \
                           or with --on-demand";
            ApiError::new(ErrorKind::Invalid, message)
        })
    }

    pub(super) fn load_timeout(&self) -> Duration {
        self.host.as_ref().map_or(Duration::ZERO, |host| host.options.load_timeout)
    }

    /// What a waiting request does next.
    fn step(self: &Arc<Self>, waiting: &mut Waiting) -> Result<Step, ApiError> {
        let mut rows = self.rows();
        let index = waiting.share.row;
        match &rows[index].state {
            RowState::Loaded(served) if !has_failed(served) => {
                check_engine(served, waiting.need)?;
                let served = Arc::clone(served);
                let row = &mut rows[index];
                if std::mem::take(&mut waiting.share.is_waiting) {
                    row.waiting -= waiting.share.places;
                    row.running += waiting.share.places;
                }
                waiting.share.served = Some(Arc::clone(&served));
                drop(rows);
                self.tell();
                Ok(Step::Ready(served))
            }
            RowState::Draining { done, .. } => Ok(Step::Unloading(done.clone())),
            _ => self.begin_loading(&mut rows, index).map(Step::Loading),
        }
    }

    /// Waits for an outcome, until the deadline or the end of the server.
    pub(super) async fn outcome(
        &self,
        done: &mut Done,
        stops: &mut watch::Receiver<bool>,
        deadline: Instant,
        name: &str,
    ) -> Result<Result<(), ApiError>, ApiError> {
        let known = async {
            let known = done.wait_for(Option::is_some).await;
            known.ok().and_then(|outcome| outcome.clone())
        };
        let stopped = async {
            if stops.wait_for(|stops| *stops).await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            biased;
            () = stopped => Err(draining()),
            outcome = timeout_at(deadline, known) => match outcome {
                Ok(Some(outcome)) => Ok(outcome),
                // Whoever was at it ends only with the server.
                Ok(None) => Err(draining()),
                Err(_) => Err(self.late(name)),
            },
        }
    }

    pub(super) fn late(&self, name: &str) -> ApiError {
        let seconds = self.load_timeout().as_secs_f64();
        let rows = self.rows();
        let row = find(&rows, Some(name)).ok().map(|(index, _)| &rows[index]);
        let progress = match row.map(|row| &row.state) {
            Some(RowState::Loading { progress, .. }) => progress.as_str(),
            Some(RowState::Draining { .. }) => "requests of the model still run",
            _ => "no room yet",
        };
        let message = format!("model '{name}' was not there within {seconds} s: {progress}");
        ApiError::new(ErrorKind::Unavailable, message).with_code("starting")
    }

    /// Begins to load a model that is not loaded, unless somebody is at it.
    fn begin_loading(self: &Arc<Self>, rows: &mut [Row], index: usize) -> Result<Done, ApiError> {
        self.host()?;
        let row = &mut rows[index];
        let has_remains = match &row.state {
            RowState::Loading { done, .. } => return Ok(done.clone()),
            // An engine that has failed.
            RowState::Loaded(_) => true,
            _ => false,
        };
        let (sender, done) = watch::channel(None);
        row.state = RowState::Loading {
            progress: "waiting for memory".to_owned(),
            is_admitted: false,
            done: done.clone(),
        };
        let registry = Arc::clone(self);
        tasks::spawn(async move {
            let loaded = registry.load_row(index, has_remains).await;
            let mut rows = registry.rows();
            let row = &mut rows[index];
            row.last_used = std::time::Instant::now();
            let (state, outcome) = match loaded {
                Ok(served) => (RowState::Loaded(Arc::new(served)), Ok(())),
                Err((error, true)) => (RowState::Failed(error.message.clone()), Err(error)),
                Err((error, false)) => (RowState::Unloaded, Err(error)),
            };
            row.state = state;
            let name = row.card.name().to_owned();
            drop(rows);
            match &outcome {
                Ok(()) => registry.moved("model_loaded", &name, &format!("{name} is loaded")),
                Err(error) => {
                    let text = format!("{name} could not be loaded: {}", error.message);
                    registry.moved("model_failed", &name, &text);
                }
            }
            sender.send_replace(Some(outcome));
            registry.tell();
        });
        Ok(done)
    }

    /// Loads a model; an error says whether the model itself is at fault.
    async fn load_row(
        self: &Arc<Self>,
        index: usize,
        has_remains: bool,
    ) -> Result<ServedModel, (ApiError, bool)> {
        let deadline = Instant::now() + self.load_timeout();
        let key = self.rows()[index].key.clone();
        if has_remains {
            let key = key.clone();
            let ended = self.on_thread(move |host, _| host.unload(&key)).await;
            ended.map_err(|error| (error, true))?;
        }
        let room = self.make_room(index, Newcomer::Model, deadline).await;
        room.map_err(|error| (error, false))?;
        let left = deadline.saturating_duration_since(Instant::now());
        let started = self
            .on_thread(move |host, registry| {
                host.load(&key, left, &|text| registry.report(index, text))
            })
            .await;
        let started = started.map_err(|error| (error, true))?;
        let card = self.rows()[index].card.clone();
        Ok(self.served(index, card, started))
    }

    /// A model that has been loaded, as its requests find it.
    pub(super) fn served(
        &self,
        index: usize,
        card: ModelCard,
        StartedModel { model, engine, nodes }: StartedModel,
    ) -> ServedModel {
        let metrics = Arc::clone(&self.rows()[index].metrics);
        let (limits, closing) = (self.limits, watch::Sender::default());
        ServedModel { model, engine, card, nodes, metrics, limits, closing }
    }

    fn report(&self, index: usize, text: &str) {
        if let RowState::Loading { progress, .. } = &mut self.rows()[index].state {
            text.clone_into(progress);
        }
    }

    /// Makes room for a model, or for the set that takes its place, and counts its memory from then on.
    pub(super) async fn make_room(
        self: &Arc<Self>,
        index: usize,
        newcomer: Newcomer,
        deadline: Instant,
    ) -> Result<(), ApiError> {
        let name = self.rows()[index].card.name().to_owned();
        let late = |_| self.late(&name);
        let _turn = timeout_at(deadline, self.turn.lock()).await.map_err(late)?;
        let mut changed = self.changed.subscribe();
        loop {
            changed.borrow_and_update();
            let leaving = {
                let mut rows = self.rows();
                match self.admission(&rows, index, newcomer)? {
                    Admission::Fits => {
                        rows[index].admit(newcomer);
                        return Ok(());
                    }
                    // One after the other: meanwhile another may have become idle.
                    Admission::After(names) => {
                        let leaving = names.first().map(|name| find(&rows, Some(name)));
                        leaving.transpose()?.map(|(leaving, _)| {
                            self.begin_unloading(&mut rows, leaving, deadline, Patience::GiveUp)
                        })
                    }
                    Admission::Later => None,
                }
            };
            let moved = async {
                match leaving {
                    Some(mut done) => {
                        // What it failed of shows in the next look at the numbers.
                        let _ = done.wait_for(Option::is_some).await;
                    }
                    None => {
                        let _ = changed.changed().await;
                    }
                }
            };
            timeout_at(deadline, moved).await.map_err(late)?;
        }
    }

    fn admission(
        &self,
        rows: &[Row],
        index: usize,
        newcomer: Newcomer,
    ) -> Result<Admission, ApiError> {
        let residents: Vec<Resident> = rows
            .iter()
            .enumerate()
            .filter(|(other, _)| *other != index || newcomer == Newcomer::Successor)
            .flat_map(|(_, row)| row.residents())
            .collect();
        let row = &rows[index];
        let memory = match (&row.swap, newcomer) {
            (Some(swap), Newcomer::Successor) => &swap.memory,
            _ => &row.memory,
        };
        admit(row.card.name(), memory, self.machines(), &residents).map_err(|error| {
            let error = ApiError::new(ErrorKind::Unavailable, error.to_string());
            error.with_code("insufficient_memory")
        })
    }

    /// Begins to unload a loaded model.
    fn begin_unloading(
        self: &Arc<Self>,
        rows: &mut [Row],
        index: usize,
        until: Instant,
        patience: Patience,
    ) -> Done {
        let (sender, done) = watch::channel(None);
        let row = &mut rows[index];
        let served = match &row.state {
            RowState::Loaded(served) => Arc::clone(served),
            RowState::Draining { done, .. } => return done.clone(),
            _ => {
                sender.send_replace(Some(Ok(())));
                return done;
            }
        };
        row.state = RowState::Draining { served: Arc::clone(&served), done: done.clone() };
        let (name, key) = (row.card.name().to_owned(), row.key.clone());
        let registry = Arc::clone(self);
        tasks::spawn(async move {
            let is_idle = registry.drain(index, &served, until, patience).await;
            let (state, outcome) = if is_idle {
                match registry.on_thread(move |host, _| host.unload(&key)).await {
                    Ok(()) => {
                        registry.moved("model_unloaded", &name, &format!("{name} is unloaded"));
                        (RowState::Unloaded, Ok(()))
                    }
                    Err(error) => (RowState::Failed(error.message.clone()), Err(error)),
                }
            } else {
                let error = registry.late(&name);
                (RowState::Loaded(served), Err(error))
            };
            let mut rows = registry.rows();
            rows[index].keep_alive = None;
            rows[index].state = state;
            drop(rows);
            sender.send_replace(Some(outcome));
            registry.tell();
        });
        done
    }

    /// Waits until no request of a model runs; whether none does.
    async fn drain(
        &self,
        index: usize,
        served: &ServedModel,
        until: Instant,
        patience: Patience,
    ) -> bool {
        let mut changed = self.changed.subscribe();
        let idle = async |changed: &mut watch::Receiver<()>, until| {
            let none = async {
                loop {
                    changed.borrow_and_update();
                    if self.rows()[index].running == 0 {
                        return;
                    }
                    let _ = changed.changed().await;
                }
            };
            timeout_at(until, none).await.is_ok()
        };
        if idle(&mut changed, until).await {
            return true;
        }
        if patience == Patience::GiveUp {
            return false;
        }
        served.closing.send_replace(Closing::Unload);
        // A request that does not end in time has an engine that is gone.
        idle(&mut changed, Instant::now() + END_TIMEOUT).await;
        true
    }

    /// Runs a host's work, which takes seconds to minutes, on a thread of its own.
    pub(super) async fn on_thread<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&dyn ModelHost, &Self) -> Result<T, HostError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let host = Arc::clone(&self.host()?.models);
        let registry = Arc::clone(self);
        let (sender, result) = oneshot::channel();
        let work: Box<dyn FnOnce() + Send> = Box::new(move || {
            // Whoever waits for it is gone only with the server.
            let _ = sender.send(work(host.as_ref(), &registry));
        });
        let internal = |message: String| ApiError::new(ErrorKind::Internal, message);
        thread::Builder::new()
            .name("models".to_owned())
            .spawn(work)
            .map_err(|error| internal(format!("cannot start a thread: {error}")))?;
        let result = result.await;
        let result = result.map_err(|_| internal("the model's host has panicked".to_owned()))?;
        result.map_err(|HostError(text)| {
            ApiError::new(ErrorKind::Unavailable, text).with_code("load_failed")
        })
    }
}

/// Whether a model's engine has failed for good.
fn has_failed(served: &ServedModel) -> bool {
    matches!(served.engine.status().state, EngineState::Failed(_))
}

impl Row {
    /// Counts a newcomer's memory from now on.
    fn admit(&mut self, newcomer: Newcomer) {
        match (newcomer, &mut self.state, &mut self.swap) {
            (Newcomer::Successor, _, Some(swap)) => swap.admitted(),
            (_, RowState::Loading { is_admitted, progress, .. }, _) => {
                *is_admitted = true;
                "starting".clone_into(progress);
            }
            _ => {}
        }
    }

    /// What it and the set that takes its place hold of the memory.
    pub(super) fn residents(&self) -> impl Iterator<Item = Resident> {
        let beside = self.swap.as_ref().and_then(|swap| swap.resident(self.card.name()));
        self.resident().into_iter().chain(beside)
    }

    /// What it holds of the memory, if anything.
    fn resident(&self) -> Option<Resident> {
        let stay = match &self.state {
            RowState::Unloaded
            | RowState::Failed(_)
            | RowState::Loading { is_admitted: false, .. } => return None,
            // What takes its place is loaded beside it.
            _ if self.is_pinned || self.swap.is_some() => Stay::Pinned,
            // Requests that waited for it are about to run.
            RowState::Loaded(_) if self.waiting == 0 => {
                Stay::MayLeave { is_busy: self.running > 0, last_used: self.last_used }
            }
            _ => Stay::Soon,
        };
        let (name, memory) = (self.card.name().to_owned(), self.memory.clone());
        Some(Resident { name, memory, stay })
    }

    /// Whether it has been idle for longer than it is to stay.
    fn is_overdue(&self) -> bool {
        matches!(self.state, RowState::Loaded(_))
            && self.swap.is_none()
            && self.running == 0
            && self.waiting == 0
            && self.stay().is_some_and(|stay| self.last_used.elapsed() >= stay)
    }
}
