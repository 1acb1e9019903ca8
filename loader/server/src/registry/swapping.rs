//! Another set in place of the one that is served, under the same name and without a pause: it is loaded
//! beside it, new requests go to it, running ones end where they are, and then the old one is unloaded.
//! Goes on when the client that asked has left.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout_at},
};

use super::{Registry, Row, RowState, ServedModel, find, loading::Newcomer};
use crate::{
    admission::{Resident, Stay},
    closing::Closing,
    error::{ApiError, ErrorKind},
    model_host::{AddedModel, MemoryShare},
    tasks,
};

/// Interval at which the requests that a replaced model still answers are looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// Time in which requests end that were told to.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// A set that takes the place of another; once it has, what is left of the old one.
pub(super) struct Swap {
    /// What the set beside the one that is served takes: the new one, then the old one.
    pub(super) memory: Vec<MemoryShare>,
    /// In a few words.
    pub(super) progress: String,
    is_admitted: bool,
    /// The old one, as long as its last requests run.
    pub(super) replaced: Option<Arc<ServedModel>>,
}

impl Swap {
    fn new() -> Self {
        let progress = "opening the set".to_owned();
        Self { memory: Vec::new(), progress, is_admitted: false, replaced: None }
    }

    /// It is being loaded.
    pub(super) fn admitted(&mut self) {
        self.is_admitted = true;
        "starting".clone_into(&mut self.progress);
    }

    /// What it holds of the memory, if anything.
    pub(super) fn resident(&self, name: &str) -> Option<Resident> {
        let (name, memory) = (format!("{name} (update)"), self.memory.clone());
        self.is_admitted.then_some(Resident { name, memory, stay: Stay::Soon })
    }
}

/// What was served before.
struct Replaced {
    key: String,
    /// Absent: it was not loaded.
    served: Option<Arc<ServedModel>>,
}

impl Registry {
    /// Serves a model from another set of the host from now on; returns once the old one's memory is
    /// free. One that is not loaded is loaded from the new set when it is.
    pub(crate) async fn swap(
        self: &Arc<Self>,
        name: &str,
        set: String,
        mut stops: watch::Receiver<bool>,
    ) -> Result<(), ApiError> {
        self.host()?;
        let (sender, mut done) = watch::channel(None);
        let index = {
            let mut rows = self.rows();
            let (index, _) = find(&rows, Some(name))?;
            rows[index].check_swap()?;
            rows[index].swap = Some(Swap::new());
            index
        };
        let registry = Arc::clone(self);
        tasks::spawn(async move {
            let outcome = registry.swap_row(index, set).await;
            registry.rows()[index].swap = None;
            sender.send_replace(Some(outcome));
            registry.tell();
        });
        // The old one's requests have the drain time after the new one was loaded.
        let limit = 2 * self.load_timeout() + self.limits.drain_timeout + END_TIMEOUT;
        self.outcome(&mut done, &mut stops, Instant::now() + limit, name).await?
    }

    async fn swap_row(self: &Arc<Self>, index: usize, set: String) -> Result<(), ApiError> {
        let name = self.rows()[index].card.name().to_owned();
        let added = self.on_thread(move |host, _| host.add(&name, &set)).await;
        let invalid = |error: ApiError| ApiError::param("set", format!("set: {}", error.message));
        // It is served from this set already.
        let Some(added) = added.map_err(invalid)? else { return Ok(()) };
        if let Some(swap) = &mut self.rows()[index].swap {
            swap.memory.clone_from(&added.entry.memory);
            "waiting for memory".clone_into(&mut swap.progress);
        }
        let deadline = Instant::now() + self.load_timeout();
        match self.replace(index, &added, deadline).await {
            Ok(replaced) => {
                let model = self.rows()[index].card.name().to_owned();
                let text = format!("{model} is served from another set: {}", added.key);
                self.moved("model_swapped", &model, &text);
                self.retire(replaced).await
            }
            Err(error) => {
                let AddedModel { key, .. } = added;
                self.forget(key).await;
                Err(error)
            }
        }
    }

    /// Loads what was added beside what is served, if that is loaded, and puts it in its place.
    async fn replace(
        self: &Arc<Self>,
        index: usize,
        added: &AddedModel,
        deadline: Instant,
    ) -> Result<Replaced, ApiError> {
        let mut successor = None;
        loop {
            let moving = {
                let mut rows = self.rows();
                let row = &mut rows[index];
                match &row.state {
                    RowState::Loading { done, .. } | RowState::Draining { done, .. } => {
                        Some(done.clone())
                    }
                    RowState::Loaded(_) if successor.is_none() => None,
                    _ => return Ok(row.hand_over(added, successor)),
                }
            };
            let Some(mut done) = moving else {
                successor = Some(self.load_beside(index, added, deadline).await?);
                continue;
            };
            // How it ends shows in the next look.
            if timeout_at(deadline, done.wait_for(Option::is_some)).await.is_err() {
                if successor.take().is_some() {
                    self.unload_key(added.key.clone()).await?;
                }
                let name = self.rows()[index].card.name().to_owned();
                return Err(self.late(&name));
            }
        }
    }

    async fn load_beside(
        self: &Arc<Self>,
        index: usize,
        added: &AddedModel,
        deadline: Instant,
    ) -> Result<Arc<ServedModel>, ApiError> {
        self.make_room(index, Newcomer::Successor, deadline).await?;
        let (key, left) = (added.key.clone(), deadline.saturating_duration_since(Instant::now()));
        let load = self.on_thread(move |host, registry| {
            host.load(&key, left, &|text| {
                if let Some(swap) = &mut registry.rows()[index].swap {
                    text.clone_into(&mut swap.progress);
                }
            })
        });
        let started = load.await?;
        Ok(Arc::new(self.served(index, added.entry.card.clone(), started)))
    }

    /// Unloads what was replaced once its running requests have ended, which they get the server's drain
    /// time for.
    async fn retire(self: &Arc<Self>, replaced: Replaced) -> Result<(), ApiError> {
        let Replaced { key, served } = replaced;
        if let Some(served) = served {
            if !is_let_go(&served, self.limits.drain_timeout).await {
                served.closing.send_replace(Closing::Unload);
                // A request that does not end in time has an engine that is gone.
                is_let_go(&served, END_TIMEOUT).await;
            }
            drop(served);
            self.unload_key(key.clone()).await?;
        }
        self.forget(key).await;
        Ok(())
    }

    async fn unload_key(self: &Arc<Self>, key: String) -> Result<(), ApiError> {
        self.on_thread(move |host, _| host.unload(&key)).await
    }

    async fn forget(self: &Arc<Self>, key: String) {
        let forgotten = self.on_thread(move |host, _| {
            host.forget(&key);
            Ok(())
        });
        // It takes some memory of the front's own at most.
        let _ = forgotten.await;
    }
}

/// Those that hold a replaced model beside its requests: the row, and who waits for them.
const HOLDERS: usize = 2;

/// Waits until no request holds a replaced model; whether none does.
async fn is_let_go(served: &Arc<ServedModel>, timeout: Duration) -> bool {
    let until = Instant::now() + timeout;
    while Arc::strong_count(served) > HOLDERS {
        if Instant::now() >= until {
            return false;
        }
        sleep(LOOK_INTERVAL).await;
    }
    true
}

impl Row {
    /// Refuses what cannot be while a set is being replaced.
    pub(super) fn check_swap(&self) -> Result<(), ApiError> {
        let Some(swap) = &self.swap else { return Ok(()) };
        let message = format!(
            "model '{}' is being replaced by another set ({}): try again when it is done",
            self.card.name(),
            swap.progress
        );
        Err(ApiError::new(ErrorKind::Unavailable, message).with_code("starting"))
    }

    /// Serves what was added from now on: what was loaded of it, else nothing yet.
    fn hand_over(&mut self, added: &AddedModel, successor: Option<Arc<ServedModel>>) -> Replaced {
        let AddedModel { key, entry } = added;
        let key = std::mem::replace(&mut self.key, key.clone());
        let memory = std::mem::replace(&mut self.memory, entry.memory.clone());
        self.card = entry.card.clone();
        let state = successor.map_or(RowState::Unloaded, RowState::Loaded);
        let served = match std::mem::replace(&mut self.state, state) {
            RowState::Loaded(served) => Some(served),
            _ => None,
        };
        if let Some(swap) = &mut self.swap {
            "requests of the old set still run".clone_into(&mut swap.progress);
            swap.memory = memory;
            swap.is_admitted = served.is_some();
            swap.replaced.clone_from(&served);
        }
        self.last_used = std::time::Instant::now();
        Replaced { key, served }
    }
}
