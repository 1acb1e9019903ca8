//! The models of a server of several: each is a set whose ranks run on this machine or on nodes, in a group
//! of their own, started when it is loaded and ended when it is unloaded.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use shardpack_cluster::{Node, ServeError, Supervisor, SupervisorOptions};
use shardpack_engine_api::{EngineHandle, EngineState};
use shardpack_server::{
    AddedModel, CheckedPackage, HostError, LoadReport, Machine, ModelEntry, ModelHost,
    PackageCheck, ServerEvents, StartedModel,
};

use super::{
    LOOK_AGAIN,
    checks::Packages,
    events,
    hosted_set::{HostedSet, KvChoice},
    nodes::{self, RankPackages},
    open_text, placement,
};
use crate::{
    args::EngineChoice,
    commands::{ranks::FrontName, store},
    failure::Failure,
    progress::say,
};

/// For loads that are told to stop: ranks end within the supervisor's own limit.
const STOP_TIMEOUT: Duration = Duration::from_secs(15);

/// For ranks of nodes to be gone once their supervisor has ended them.
const END_TIMEOUT: Duration = Duration::from_secs(20);

/// Interval between two looks at them.
const END_INTERVAL: Duration = Duration::from_millis(200);

/// How the models of a server are run.
pub(super) struct HostOptions {
    pub(super) engine: EngineChoice,
    pub(super) threads: Option<usize>,
    pub(super) supervisor: SupervisorOptions,
    /// Whether ranks are taken from other servers.
    pub(super) takes_over: bool,
    /// Told what happens to the groups.
    pub(super) events: ServerEvents,
    /// Whether nodes are asked for their free memory before each load.
    pub(super) checks_memory: bool,
}

/// The sets, and the groups of ranks of those that are loaded.
pub(super) struct Host {
    /// As they were at the start.
    entries: Vec<ModelEntry>,
    /// By key.
    sets: Mutex<BTreeMap<String, Arc<HostedSet>>>,
    machines: Vec<Machine>,
    options: HostOptions,
    groups: Mutex<Groups>,
    is_stopping: AtomicBool,
}

/// What runs.
#[derive(Default)]
struct Groups {
    running: BTreeMap<String, Supervisor>,
    /// Loads that have not ended.
    loading: u32,
    /// Outcomes of the first load of each set.
    tried: BTreeMap<String, Result<(), String>>,
}

impl ModelHost for Host {
    fn models(&self) -> Vec<ModelEntry> {
        self.entries.clone()
    }

    fn machines(&self) -> Vec<Machine> {
        self.machines.clone()
    }

    fn load(
        &self,
        key: &str,
        timeout: Duration,
        report: LoadReport<'_>,
    ) -> Result<StartedModel, HostError> {
        self.groups().loading += 1;
        let started = self.set(key).and_then(|set| self.start(&set, timeout, report));
        let mut groups = self.groups();
        groups.loading -= 1;
        let outcome = started.as_ref().map(drop).map_err(ToString::to_string);
        match &outcome {
            Ok(()) => say(&format!("serve: {key} is loaded")),
            Err(error) => say(&format!("serve: {key} is not loaded: {error}")),
        }
        groups.tried.entry(key.to_owned()).or_insert(outcome);
        let (started, supervisor) = started?;
        groups.running.insert(key.to_owned(), supervisor);
        Ok(started)
    }

    fn unload(&self, key: &str) -> Result<(), HostError> {
        let supervisor = self.groups().running.remove(key);
        if let Some(supervisor) = supervisor {
            // Returns when no child is left.
            supervisor.stop();
            let set = self.set(key)?;
            await_end(&set)?;
            say(&format!("serve: {key} is unloaded"));
        }
        Ok(())
    }

    fn add(&self, name: &str, set: &str) -> Result<Option<AddedModel>, HostError> {
        let served = self.served(name)?;
        let store = store::store().map_err(|error| HostError(format!("{error:#}")))?;
        let found = store.find(set).map_err(|error| told(store::failure(error)))?;
        let stored = found.ok_or_else(|| {
            let folder = store.folder().display();
            HostError(format!("no set {set} in the store {folder}, which is this server's"))
        })?;
        let kv = KvChoice::of(&self.options.engine);
        let idle_timeout = served.entry.idle_timeout;
        let mut added = HostedSet::open(&stored.folder, kv, idle_timeout).map_err(told)?;
        let layout = added.manifests[0].ids.layout;
        if layout == served.manifests[0].ids.layout {
            return Ok(None);
        }
        if !served.places.is_empty() {
            let (packages, nodes) = (added.manifests.len(), served.places.len());
            if packages != nodes {
                let words =
                    format!("{set} has {packages} packages, and '{name}' is on {nodes} nodes");
                return Err(HostError(format!("{words}: convert it for {nodes} nodes")));
            }
            added.place(served.places.clone());
        }
        added.entry.card.names.clone_from(&served.entry.card.names);
        let (key, entry) = (format!("{name}@{}", layout.short()), added.entry.clone());
        self.sets().insert(key.clone(), Arc::new(added));
        Ok(Some(AddedModel { key, entry }))
    }

    fn forget(&self, key: &str) {
        self.sets().remove(key);
    }
}

impl PackageCheck for Host {
    fn check(&self, key: &str) -> Result<Vec<CheckedPackage>, HostError> {
        let set = self.set(key)?;
        let packages = Packages { folders: set.folders.clone(), remote: set.remote() };
        packages.read().map_err(|error| HostError(format!("{error:#}")))
    }
}

impl Host {
    /// Of these sets, none of them loaded.
    pub(super) fn new(sets: Vec<HostedSet>, machines: Vec<Machine>, options: HostOptions) -> Self {
        let entries = sets.iter().map(|set| set.entry.clone()).collect();
        let by_key = |set: HostedSet| (set.entry.card.name().to_owned(), Arc::new(set));
        let sets = Mutex::new(sets.into_iter().map(by_key).collect());
        let (groups, is_stopping) = (Mutex::default(), AtomicBool::new(false));
        Self { entries, sets, machines, options, groups, is_stopping }
    }

    /// How the first loads of these sets ended; absent while one of them has not.
    pub(super) fn first_loads(&self, names: &[String]) -> Option<Vec<(String, String)>> {
        let groups = self.groups();
        let outcomes: Option<Vec<_>> =
            names.iter().map(|name| Some((name, groups.tried.get(name)?))).collect();
        let failed = |(name, outcome): (&String, &Result<(), String>)| {
            outcome.as_ref().err().map(|error| (name.clone(), error.clone()))
        };
        Some(outcomes?.into_iter().filter_map(failed).collect())
    }

    /// Ends every group, and what is being loaded.
    pub(super) fn stop(&self) {
        self.is_stopping.store(true, Ordering::SeqCst);
        let begun = Instant::now();
        while self.groups().loading > 0 && begun.elapsed() < STOP_TIMEOUT {
            thread::sleep(LOOK_AGAIN);
        }
        let running = std::mem::take(&mut self.groups().running);
        // All at once: each waits for its ranks.
        thread::scope(|scope| {
            for supervisor in running.into_values() {
                scope.spawn(|| supervisor.stop());
            }
        });
    }

    fn groups(&self) -> MutexGuard<'_, Groups> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sets(&self) -> MutexGuard<'_, BTreeMap<String, Arc<HostedSet>>> {
        self.sets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, key: &str) -> Result<Arc<HostedSet>, HostError> {
        let set = self.sets().get(key).cloned();
        set.ok_or_else(|| HostError(format!("{key}: no such set")))
    }

    /// The set of a model; there is one as long as no other takes its place.
    fn served(&self, name: &str) -> Result<Arc<HostedSet>, HostError> {
        let sets = self.sets();
        let found = sets.values().find(|set| set.entry.card.name() == name).cloned();
        found.ok_or_else(|| HostError(format!("{name}: no such model")))
    }

    fn start(
        &self,
        set: &HostedSet,
        timeout: Duration,
        report: LoadReport<'_>,
    ) -> Result<(StartedModel, Supervisor), HostError> {
        let begun = Instant::now();
        let model = open_text(&set.folders[0], &set.manifests[0]).map_err(told)?;
        let nodes = self.ranks(set)?;
        let names = nodes.iter().map(|node| node.name.clone()).collect();
        let (handle, commands) = EngineHandle::new(set.folders.len() as u32);
        let options = SupervisorOptions {
            load_timeout: timeout,
            events: events::sink(&self.options.events, set.entry.card.name(), None),
            ..self.options.supervisor.clone()
        };
        let supervisor = Supervisor::start(nodes, handle.clone(), commands, options)
            .map_err(|error| HostError(format!("the ranks cannot be supervised: {error}")))?;
        let ready = self.await_ready(&supervisor, &handle, begun, timeout, report);
        if let Err(error) = ready {
            supervisor.stop();
            // What is to be told is why it did not start.
            let _ = await_end(set);
            return Err(error);
        }
        Ok((StartedModel { model, engine: handle, nodes: names }, supervisor))
    }

    /// Starts the ranks of a set, which load from then on.
    fn ranks(&self, set: &HostedSet) -> Result<Vec<Node>, HostError> {
        let HostOptions { engine, threads, takes_over, checks_memory, .. } = &self.options;
        if set.places.is_empty() {
            return nodes::local(&set.folders, *threads, engine, None).map_err(told);
        }
        if *checks_memory {
            placement::check_free(set.entry.card.name(), set).map_err(HostError)?;
        }
        let packages = RankPackages::Stored { set: Some(&set.path) };
        nodes::remote(set.remote(), &packages, None, *takes_over).map_err(told)
    }

    fn await_ready(
        &self,
        supervisor: &Supervisor,
        handle: &EngineHandle,
        begun: Instant,
        timeout: Duration,
        report: LoadReport<'_>,
    ) -> Result<(), HostError> {
        loop {
            match supervisor.wait_until_ready(LOOK_AGAIN) {
                Ok(()) => return Ok(()),
                Err(ServeError::Slow { .. }) if self.is_stopping.load(Ordering::SeqCst) => {
                    return Err(HostError("the server is shutting down".to_owned()));
                }
                Err(ServeError::Slow { .. }) if begun.elapsed() >= timeout => {
                    let seconds = timeout.as_secs();
                    return Err(HostError(format!("loading took more than {seconds} s")));
                }
                Err(ServeError::Slow { .. }) => {}
                Err(error) => return Err(HostError(error.to_string())),
            }
            if let EngineState::Starting(text) = handle.status().state {
                report(&text);
            }
        }
    }
}

/// Waits until nodes have no rank of a set any more that this process had started: then its memory is free.
/// One that cannot be asked ends its ranks by itself.
fn await_end(set: &HostedSet) -> Result<(), HostError> {
    let (keys, own) = (set.keys(), FrontName::shown_here());
    let begun = Instant::now();
    for place in &set.places {
        loop {
            let Ok(facts) = placement::facts(&place.node) else { break };
            let mut ranks = facts.ranks.into_iter();
            let left = ranks.find(|rank| {
                keys.contains(&rank.package) && rank.served_by.as_deref() == Some(own.as_str())
            });
            let Some(rank) = left else { break };
            if begun.elapsed() > END_TIMEOUT {
                let (node, name, seconds) = (&place.node, rank.name, END_TIMEOUT.as_secs());
                return Err(HostError(format!(
                    "node {node}: {name} (process {}) has not ended within {seconds} s, and its memory is not free: end it there",
                    rank.pid
                )));
            }
            thread::sleep(END_INTERVAL);
        }
    }
    Ok(())
}

fn told(failure: Failure) -> HostError {
    HostError(format!("{:#}", failure.into_error()))
}
