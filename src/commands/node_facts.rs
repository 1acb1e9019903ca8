//! What a node says of itself when a controller asks (operation `facts`): program, machine, store, ranks,
//! the last fault. Answers at once: whatever takes time is looked at beforehand, and no lock is waited for
//! that is held while a rank starts. Knows nothing of sockets.

mod machine;
mod ranks;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::events::{Event, EventLog, time};
use crate::args::EngineChoice;
pub(crate) use machine::MachineFacts;
use machine::Watch;
pub(crate) use ranks::{RankBook, RankFacts, RankRecord};

/// The operation's name.
pub(crate) const FACTS: &str = "facts";

/// What a node answers.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct NodeFacts {
    /// Version of the program.
    pub version: String,
    /// Hash of the sources that it was built from.
    pub build: String,
    /// Its process.
    pub pid: u32,
    /// How long the node has run.
    pub uptime_seconds: u64,
    /// Its clock, in milliseconds since 1970.
    pub clock_ms: u64,
    /// The machine.
    pub machine: MachineFacts,
    /// Bytes that can still be written to the store's file system, and its size.
    pub disk_free_bytes: Option<u64>,
    pub disk_total_bytes: Option<u64>,
    /// How ranks hold keys and values here. Absent from nodes of earlier versions.
    #[serde(default)]
    pub kv: Option<KvFacts>,
    /// The ranks that run here.
    pub ranks: Vec<RankFacts>,
    /// The latest event that is a fault, since the node's log began.
    #[serde(default)]
    pub last_fault: Option<Event>,
}

/// The KV cache of each rank that a node starts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KvFacts {
    /// As `--kv-type` spells it.
    pub kv_type: String,
    /// Bytes; enough for one sequence of the model's longest context when absent.
    pub memory_bytes: Option<u64>,
}

impl KvFacts {
    /// What was chosen with an engine.
    pub(crate) fn of(engine: &EngineChoice) -> Self {
        let kv_type = engine.kv_type.unwrap_or_default().name().to_owned();
        Self { kv_type, memory_bytes: engine.kv_memory.map(|size| size.0) }
    }
}

/// Gathers the facts of a node.
pub(crate) struct Facts {
    store: PathBuf,
    begun: Instant,
    watch: Watch,
    kv: KvFacts,
    ranks: Arc<RankBook>,
    log: Arc<EventLog>,
}

impl Facts {
    /// Of the node over `store`, whose ranks are in `ranks` and hold keys and values as `kv` says.
    pub(crate) fn new(
        store: &Path,
        kv: KvFacts,
        ranks: Arc<RankBook>,
        log: Arc<EventLog>,
    ) -> std::io::Result<Self> {
        let (store, begun, watch) = (store.to_owned(), Instant::now(), Watch::start()?);
        Ok(Self { store, begun, watch, kv, ranks, log })
    }

    /// Answers the operation.
    pub(crate) fn answer(&self) -> Value {
        let disk = rustix::fs::statvfs(&self.store).ok();
        let of_disk = |blocks: u64, size: u64| blocks.saturating_mul(size);
        json!(NodeFacts {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            build: env!("BUILD_HASH").to_owned(),
            pid: std::process::id(),
            uptime_seconds: self.begun.elapsed().as_secs(),
            clock_ms: time::now_ms(),
            machine: self.watch.read(),
            disk_free_bytes: disk.as_ref().map(|disk| of_disk(disk.f_bavail, disk.f_frsize)),
            disk_total_bytes: disk.as_ref().map(|disk| of_disk(disk.f_blocks, disk.f_frsize)),
            kv: Some(self.kv.clone()),
            ranks: self.ranks.facts(),
            last_fault: self.log.last_fault(),
        })
    }
}
