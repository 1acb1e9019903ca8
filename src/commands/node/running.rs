//! The ranks that run on a node: whose they are, and what is left of them when they end.

use std::{
    collections::HashMap,
    io,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};

use shardpack_cluster::{Announcement, RankProcess};
use shardpack_transfer::receive::InUse;
use tempfile::TempDir;

use crate::{
    commands::{node_facts::RankRecord, ranks::FrontName},
    progress::say,
};

/// The ranks that run here, by package. Starting a package again ends its old process.
pub(super) type Running = Arc<Mutex<HashMap<String, RunningRank>>>;

/// A rank process of this node.
pub(super) struct RunningRank {
    /// For people.
    pub(super) name: String,
    /// Ends when it is dropped.
    pub(super) process: RankProcess,
    /// Where it listens, with its token.
    pub(super) announcement: Announcement,
    /// Who had it started; unknown of one that says nothing.
    pub(super) front: Option<FrontName>,
    /// Its place among the node's facts and events.
    pub(super) record: RankRecord,
    /// The files that it reads besides its package, or in place of it.
    pub(super) _files: Option<TempDir>,
    /// Keeps the package in the store while the rank runs; none of one that its front sent.
    pub(super) _package: Option<InUse>,
}

impl RunningRank {
    /// Whether `front` may have the rank started again. Two servers over the same nodes would otherwise
    /// end each other's ranks in turns.
    pub(super) fn check(&mut self, front: Option<&FrontName>) -> Result<(), String> {
        let is_allowed = front.is_some_and(|front| {
            front.takes_over || self.front.as_ref().is_some_and(|held| held.id.matches(&front.id))
        });
        // A rank ends soon after its front.
        if is_allowed || self.process.exit_within(END_TIMEOUT).is_some() {
            return Ok(());
        }
        let holder = self.front.as_ref().map_or("another program", |front| front.shown.as_str());
        Err(format!(
            "this rank is served by {holder}: stop that server, or take the rank from it with \
             `serve --take-over`"
        ))
    }
}

impl Drop for RunningRank {
    fn drop(&mut self) {
        self.record.ended(self.process.exit_within(Duration::ZERO));
    }
}

/// How long a rank is waited for whose front may have ended it.
const END_TIMEOUT: Duration = Duration::from_secs(2);

/// Between two looks at which ranks have ended.
const REAP_INTERVAL: Duration = Duration::from_secs(1);

/// Tells of ranks that have ended, on a thread of its own: a process that nobody asks about stays in the
/// system's table.
pub(super) fn reap(running: &Running) -> io::Result<()> {
    let running = Arc::downgrade(running);
    let look = move || {
        while let Some(running) = running.upgrade() {
            running.lock().unwrap_or_else(PoisonError::into_inner).retain(|_, rank| {
                let ended = rank.process.exit_within(Duration::ZERO);
                if let Some(status) = ended {
                    say(&format!("node: {} ended ({status})", rank.name));
                }
                ended.is_none()
            });
            drop(running);
            thread::sleep(REAP_INTERVAL);
        }
    };
    thread::Builder::new().name("reaper".to_owned()).spawn(look).map(drop)
}
