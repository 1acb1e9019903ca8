//! What requests took: counted by API key, model and hour, kept in a file, and told to the audit log. A
//! request is counted before its last bytes are sent, and a running one once a second, so that a server
//! that is killed loses at most the last second of what it was computing.

mod book;
mod energy;
mod journal;
mod record;

use std::{
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use serde_json::{Map, Value};
use tokio::time::{MissedTickBehavior, interval};

use super::{
    audit::{AuditError, AuditLog},
    tasks::blocking,
    tls::Report,
};
use book::{Book, Entry};
pub(super) use book::{Period, Sums, UsageRow};
use energy::Energy;
pub(super) use energy::MachinePower;
use journal::Journal;
pub use journal::UsageError;
pub(super) use record::{Opened, Record};

/// Interval at which running requests are counted and files are synced to disk.
const TICK: Duration = Duration::from_secs(1);

/// The usage and the audit log of a server.
pub struct Ledger {
    state: Mutex<State>,
    report: Report,
}

struct State {
    book: Book,
    energy: Energy,
    journal: Option<Journal>,
    audit: Option<AuditLog>,
    running: Vec<Weak<Record>>,
    /// Whether it was said that a file cannot be written.
    told: [bool; 2],
}

/// The ledger cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// Its file of usage.
    #[error(transparent)]
    Usage(#[from] UsageError),
    /// Its audit log.
    #[error(transparent)]
    Audit(#[from] AuditError),
}

impl Default for Ledger {
    fn default() -> Self {
        Self::of(Book::default(), None, None, Box::new(|_| ()))
    }
}

impl Ledger {
    /// Opens the file of usage and the audit log, those that are named. `report` is told when one can no
    /// longer be written.
    pub fn open(
        usage: Option<&Path>,
        audit: Option<&Path>,
        report: Report,
    ) -> Result<Self, LedgerError> {
        let mut book = Book::default();
        let journal = usage.map(|path| Journal::open(path, &mut book)).transpose()?;
        let audit = audit.map(AuditLog::open).transpose()?;
        Ok(Self::of(book, journal, audit, report))
    }

    fn of(book: Book, journal: Option<Journal>, audit: Option<AuditLog>, report: Report) -> Self {
        let (running, told, energy) = (Vec::new(), [false; 2], Energy::default());
        Self { state: Mutex::new(State { book, energy, journal, audit, running, told }), report }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds to the sums of a key and a model.
    fn add(&self, key: Option<&str>, model: Option<&str>, sums: Sums) {
        let entry = Entry {
            hour: this_hour(),
            key: key.map(str::to_owned),
            model: model.map(str::to_owned),
            sums,
        };
        let mut state = self.state();
        let State { book, energy, journal, told, .. } = &mut *state;
        if let Some(model) = model {
            energy.computed(key, model, sums);
        }
        if let Some(journal) = journal
            && let Err(error) = journal.append(&entry)
            && !std::mem::replace(&mut told[0], true)
        {
            (self.report)(&format!(
                "error: usage cannot be written and is counted in memory alone: {error}"
            ));
        }
        book.add(entry);
    }

    /// Writes a line of the audit log.
    fn audit(&self, fields: impl FnOnce() -> Map<String, Value>) {
        let mut state = self.state();
        let State { audit, told, .. } = &mut *state;
        let Some(audit) = audit else { return };
        if !audit.add(fields()) && !std::mem::replace(&mut told[1], true) {
            (self.report)(
                "error: the audit log cannot be written; the lines that are lost will be counted in it",
            );
        }
    }

    fn watch(&self, record: &Arc<Record>) {
        let mut state = self.state();
        state.running.retain(|record| record.strong_count() > 0);
        state.running.push(Arc::downgrade(record));
    }

    /// Whether there is an audit log.
    pub(super) fn has_audit(&self) -> bool {
        self.state().audit.is_some()
    }

    /// Opens the audit log anew, if its file was moved away.
    pub(super) fn reopen(&self) {
        let mut state = self.state();
        let Some(audit) = &mut state.audit else { return };
        match audit.reopen() {
            Ok(false) => {}
            Ok(true) => (self.report)("audit: the log goes on in a new file"),
            Err(error) => {
                (self.report)(&format!("error: audit: the old file is written on: {error}"));
            }
        }
    }

    /// Counts what running requests have taken up to now, and syncs the files to disk.
    fn tick(&self, machines: &[MachinePower]) {
        let running: Vec<Arc<Record>> =
            self.state().running.iter().filter_map(Weak::upgrade).collect();
        let is_running = !running.is_empty();
        for record in running {
            record.post();
        }
        let shares = self.state().energy.share(Instant::now(), machines, is_running);
        for ((key, model), energy_mj) in shares {
            let sums = Sums { energy_mj, ..Sums::default() };
            self.add(key.as_deref(), Some(&model), sums);
        }
        let mut state = self.state();
        let State { book, journal, audit, .. } = &mut *state;
        let compacted = journal.as_mut().map_or(Ok(()), |journal| journal.compact_if_long(book));
        let files =
            [journal.as_mut().and_then(Journal::dirty), audit.as_mut().and_then(AuditLog::dirty)];
        // Requests do not wait for the disk.
        drop(state);
        let synced = files.into_iter().flatten().try_for_each(|file| file.sync_data());
        if let Err(error) = compacted.and(synced) {
            (self.report)(&format!("warning: usage and audit log: {error}"));
        }
    }

    /// Ticks, forever.
    pub(super) async fn keep(
        self: Arc<Self>,
        machines: impl Fn() -> Vec<MachinePower> + Send + Sync + 'static,
    ) {
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let (own, powers) = (Arc::clone(&self), machines());
            let _ = blocking(move || own.tick(&powers)).await;
        }
    }

    /// The server ends.
    pub(super) fn close(&self) {
        if let Some(audit) = &mut self.state().audit {
            audit.event("closed", Value::Object(Map::new()));
        }
        self.tick(&[]);
    }

    /// The sums of a time, from `from` to before `to` in seconds since 1970; of one key where `only` names it.
    pub(super) fn rows(
        &self,
        from: u64,
        to: u64,
        period: Period,
        only: Option<&str>,
    ) -> Vec<UsageRow> {
        self.state().book.rows(from, to, period, only)
    }

    /// The sums of each key since the file of usage began.
    pub(super) fn by_key(&self) -> Vec<(Option<String>, Sums)> {
        self.state().book.by_key()
    }
}

/// Hours since 1970.
fn this_hour() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() / 3600)
}

#[cfg(test)]
mod tests;
