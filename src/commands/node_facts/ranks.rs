//! The ranks that run on a node, as its facts and its event log tell of them. The book has a lock of its
//! own: the node holds that of its processes while one starts.

use std::{
    collections::BTreeMap,
    process::ExitStatus,
    sync::{Arc, Mutex, PoisonError},
};

use serde::{Deserialize, Serialize};
use serde_json::json;
use shardpack_cluster::{FrontState, FrontWatch, RankProcess};
use shardpack_transfer::protocol::PackageKey;

use super::machine::memory_of;
use crate::commands::{
    events::{EventKind, EventLog, time},
    ranks::FrontName,
};

/// A rank that runs on a node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RankFacts {
    /// For people.
    pub name: String,
    pub package: PackageKey,
    pub pid: u32,
    pub memory_bytes: Option<u64>,
    /// Milliseconds since 1970.
    pub since_ms: u64,
    pub front: FrontState,
    /// Who had it started, for people; unknown of one that does not say.
    pub served_by: Option<String>,
}

/// The ranks of a node.
pub(crate) struct RankBook {
    log: Arc<EventLog>,
    entries: Mutex<BTreeMap<u32, Entry>>,
}

struct Entry {
    facts: RankFacts,
    watch: FrontWatch,
}

impl RankBook {
    /// An empty one, whose events go to `log`.
    pub(crate) fn new(log: Arc<EventLog>) -> Self {
        Self { log, entries: Mutex::default() }
    }

    /// A rank was started; it stays in the book until the record is dropped.
    pub(crate) fn started(
        self: &Arc<Self>,
        name: &str,
        package: PackageKey,
        process: &RankProcess,
        front: Option<&FrontName>,
    ) -> RankRecord {
        let facts = RankFacts {
            name: name.to_owned(),
            package,
            pid: process.id(),
            memory_bytes: None,
            since_ms: time::now_ms(),
            front: FrontState::Awaited,
            served_by: front.map(|front| front.shown.clone()),
        };
        let by = facts.served_by.as_ref().map_or_else(String::new, |by| format!(" for {by}"));
        self.log.add(
            EventKind::RankStarted,
            format!("{name} of layout {} started{by}", package.layout.short()),
            json!({ "rank": package.rank, "layout": package.layout, "pid": facts.pid }),
        );
        let record = RankRecord { book: Arc::clone(self), pid: facts.pid };
        let entry = Entry { facts, watch: process.watch() };
        self.lock().insert(record.pid, entry);
        record
    }

    /// A rank did not come up.
    pub(crate) fn not_started(&self, name: &str, package: PackageKey, reason: &str) {
        self.log.add(
            EventKind::RankFailed,
            format!("{name} of layout {} did not start: {reason}", package.layout.short()),
            json!({ "rank": package.rank, "layout": package.layout }),
        );
    }

    /// The ranks, by process.
    pub(crate) fn facts(&self) -> Vec<RankFacts> {
        let now = |entry: &Entry| RankFacts { front: entry.watch.state(), ..entry.facts.clone() };
        let mut facts: Vec<RankFacts> = self.lock().values().map(now).collect();
        for rank in &mut facts {
            rank.memory_bytes = memory_of(rank.pid);
        }
        facts
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<u32, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A rank's place in the book.
pub(crate) struct RankRecord {
    book: Arc<RankBook>,
    pid: u32,
}

impl RankRecord {
    /// Another front has the rank now.
    pub(crate) fn adopted(&self, front: Option<&FrontName>) {
        let shown = front.map(|front| front.shown.clone());
        let mut entries = self.book.lock();
        let Some(entry) = entries.get_mut(&self.pid) else { return };
        entry.facts.served_by.clone_from(&shown);
        let (name, rank) = (entry.facts.name.clone(), entry.facts.package.rank);
        drop(entries);
        let by = shown.unwrap_or_else(|| "a server".to_owned());
        self.book.log.add(
            EventKind::RankAdopted,
            format!("{name} kept its weights and serves {by} now"),
            json!({ "rank": rank, "pid": self.pid }),
        );
    }

    /// The rank is of this node no more: it has ended in this way, or this node ends it.
    pub(crate) fn ended(&self, status: Option<ExitStatus>) {
        let Some(entry) = self.book.lock().remove(&self.pid) else { return };
        let RankFacts { name, package, .. } = entry.facts;
        let fields = json!({
            "rank": package.rank,
            "layout": package.layout,
            "pid": self.pid,
            "status": status.map(|status| status.to_string()),
        });
        let (kind, text) = match status {
            Some(status) if !status.success() => {
                (EventKind::RankFailed, format!("{name} ended by itself ({status})"))
            }
            Some(status) => (EventKind::RankEnded, format!("{name} ended ({status})")),
            None => (EventKind::RankEnded, format!("{name} was ended by the node")),
        };
        self.book.log.add(kind, text, fields);
    }
}
