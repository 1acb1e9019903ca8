//! Starts ranks for fronts: of packages that the node has, and of packages that the front sends.

use std::{
    sync::{Arc, PoisonError},
    time::Duration,
};

use serde_json::Value;
use shardpack_mlx::distributed::Distributed;
use shardpack_transfer::{
    protocol::PackageKey,
    receive::{PackageDir, Store},
};
use tempfile::TempDir;

use super::running::{Running, RunningRank};
use crate::{
    args::{EngineChoice, NodeArgs},
    commands::{
        doctor,
        node_facts::RankBook,
        node_operations::Handler,
        ranks::{
            self, FrontName, Membership, PackageSource, RankEndpoint, RankParameters, STREAM_RANK,
            StartedRank, StreamRank, StreamedPackage,
        },
        threads,
    },
    leftovers,
};

/// How a node starts ranks.
pub(super) struct RankStarter {
    store: Arc<Store>,
    running: Running,
    book: Arc<RankBook>,
    threads: usize,
    engine: EngineChoice,
    endpoint: RankEndpoint,
    /// How long a rank keeps its weights when its front has gone.
    keep: Duration,
}

/// What a rank is started of.
enum Source<'a> {
    Stored(&'a PackageDir),
    /// In one of MLX's own groups, whose files are put into a folder.
    Member(&'a PackageDir, Distributed, TempDir),
    /// Its documents are put into a folder.
    Streamed(&'a StreamedPackage, TempDir),
}

impl RankStarter {
    /// As the node's arguments say.
    pub(super) fn new(
        args: &NodeArgs,
        store: Arc<Store>,
        running: Running,
        book: Arc<RankBook>,
        endpoint: RankEndpoint,
    ) -> Self {
        let (threads, engine) = (threads::count(args.threads), args.engine.clone());
        let keep = Duration::from_secs(args.keep_ranks);
        Self { store, running, book, threads, engine, endpoint, keep }
    }

    /// Starts the rank of a package of the store, or has the machine checked.
    pub(super) fn start(&self, package: &PackageDir, parameters: &Value) -> Result<Value, String> {
        let (front, distributed) = match parse_parameters(parameters)? {
            Some(RankParameters::Doctor { self_test }) => {
                return doctor::in_a_process(self_test).map_err(|error| format!("{error:#}"));
            }
            Some(RankParameters::Start { front, distributed }) => (Some(front), distributed),
            None => (None, None),
        };
        let source = match distributed {
            Some(distributed) => Source::Member(package, distributed, new_folder()?),
            None => Source::Stored(package),
        };
        self.run(package.key, source, front)
    }

    /// Answers what fronts ask for beyond the start of a stored package's rank.
    pub(super) fn handler(self: &Arc<Self>) -> Handler {
        let starter = Arc::clone(self);
        Box::new(move |name, parameters| starter.operate(name, parameters))
    }

    /// Starts the rank of a package that the front will send; `None` of another operation.
    fn operate(&self, name: &str, parameters: &Value) -> Option<Result<Value, String>> {
        if name != STREAM_RANK {
            return None;
        }
        Some((|| {
            let StreamRank { package, front } = serde_json::from_value(parameters.clone())
                .map_err(|error| format!("the front sent invalid parameters: {error}"))?;
            self.run(package.key(), Source::Streamed(&package, new_folder()?), Some(front))
        })())
    }

    /// Starts a rank, or gives the front one that kept its weights.
    fn run(
        &self,
        package: PackageKey,
        source: Source<'_>,
        front: Option<FrontName>,
    ) -> Result<Value, String> {
        let name = format!("rank {}", package.rank);
        let key = format!("{}-{}", package.layout, package.rank);
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(held) = running.get_mut(&key) {
            // One of MLX's own groups is joined at the start alone.
            let is_own = !matches!(source, Source::Member(..));
            if is_own && held.process.adopt() {
                held.record.adopted(front.as_ref());
                held.front = front;
                return serde_json::to_value(&held.announcement).map_err(|error| error.to_string());
            }
            held.check(front.as_ref())?;
        }
        running.remove(&key);
        // Before the rank opens it.
        let held = match &source {
            Source::Stored(package) | Source::Member(package, ..) => {
                Some(self.store.hold(package.key).map_err(|error| error.to_string())?)
            }
            Source::Streamed(..) => None,
        };
        let started = self.spawn(&name, package.rank, &source);
        let StartedRank { process, announcement } = started.map_err(|error| {
            let reason = format!("{error:#}");
            self.book.not_started(&name, package, &reason);
            reason
        })?;
        let answer = serde_json::to_value(&announcement).map_err(|error| error.to_string());
        let record = self.book.started(&name, package, &process, front.as_ref());
        let files = match source {
            Source::Stored(_) => None,
            Source::Member(_, _, files) | Source::Streamed(_, files) => Some(files),
        };
        let rank = RunningRank {
            name,
            process,
            announcement,
            front,
            record,
            _files: files,
            _package: held,
        };
        running.insert(key, rank);
        answer
    }

    fn spawn(&self, name: &str, rank: u32, source: &Source<'_>) -> anyhow::Result<StartedRank> {
        let Self { threads, engine, endpoint, keep, .. } = self;
        let start = |source, engine: &EngineChoice, member, keep| {
            ranks::start(name, source, *threads, engine, endpoint, member, keep)
        };
        match source {
            Source::Stored(package) => {
                start(PackageSource::Folder(&package.path), engine, None, *keep)
            }
            Source::Member(package, distributed, files) => {
                let engine = engine.over(distributed).map_err(anyhow::Error::msg)?;
                let member = Membership { distributed, rank, folder: files.path().to_owned() };
                // MLX's collectives would hang in it.
                let keep = Duration::ZERO;
                start(PackageSource::Folder(&package.path), &engine, Some(member), keep)
            }
            Source::Streamed(package, files) => {
                start(PackageSource::Front(files.path(), package), engine, None, *keep)
            }
        }
    }
}

/// What the names of ranks' folders begin with.
const FOLDERS: &str = "shardpack-rank-";

/// For a rank's documents; what ended nodes left is removed.
fn new_folder() -> Result<TempDir, String> {
    leftovers::sweep(&std::env::temp_dir(), FOLDERS);
    leftovers::folder(FOLDERS).map_err(|error| format!("no temporary folder: {error}"))
}

/// The front's parameters for a rank.
fn parse_parameters(parameters: &Value) -> Result<Option<RankParameters>, String> {
    let parsed: Option<RankParameters> = serde_json::from_value(parameters.clone())
        .map_err(|error| format!("the front sent invalid parameters: {error}"))?;
    if let Some(RankParameters::Start { distributed: Some(distributed), .. }) = &parsed {
        // Checked against its own number of ranks; MLX compares that with the package's.
        distributed.check(distributed.ranks()).map_err(|error| error.to_string())?;
    }
    Ok(parsed)
}
