//! The log of what happened on a node or to a server: one JSON object a line in `events.jsonl`, which
//! outlives the process. A line that a crash has torn is skipped when the file is read, and closed before
//! the next one is written. Knows nothing of what is logged.

pub(super) mod time;

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Read as _, Seek as _, SeekFrom, Write as _},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, test_kill_process};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::progress::say;

/// Its name, in a store or in the cluster's folder.
pub(crate) const FILE: &str = "events.jsonl";

/// The file before; older ones are not kept.
const OLD_FILE: &str = "events.jsonl.1";

/// Size from which another file is begun: some 20,000 events, which is months of a quiet node.
const MAX_FILE_BYTES: u64 = 4 << 20;

/// Longest text of an event; some repeat what another machine said.
const MAX_TEXT_BYTES: usize = 4 << 10;

/// Most bytes of events in an answer; a frame has room for a megabyte.
const MAX_ANSWER_BYTES: usize = 512 << 10;

/// How long another process may hold the file; it writes a line.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// The operation's name.
pub(crate) const EVENTS: &str = "events";

/// What can happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EventKind {
    Started,
    Stopped,
    RankStarted,
    RankEnded,
    RankFailed,
    RankAdopted,
    PackageReceived,
    PackageActivated,
    PackageRolledBack,
    PackageRemoved,
    Damaged,
    Joined,
    Renewed,
    Left,
    Handover,
    Upgraded,
    UpgradeFailed,
    Refused,
    GroupFormed,
    GroupLost,
    GroupFailed,
}

impl EventKind {
    /// All of them.
    pub(crate) const ALL: [Self; 21] = [
        Self::Started,
        Self::Stopped,
        Self::RankStarted,
        Self::RankEnded,
        Self::RankFailed,
        Self::RankAdopted,
        Self::PackageReceived,
        Self::PackageActivated,
        Self::PackageRolledBack,
        Self::PackageRemoved,
        Self::Damaged,
        Self::Joined,
        Self::Renewed,
        Self::Left,
        Self::Handover,
        Self::Upgraded,
        Self::UpgradeFailed,
        Self::Refused,
        Self::GroupFormed,
        Self::GroupLost,
        Self::GroupFailed,
    ];

    /// As the log spells it.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Started => "started",
            Self::Stopped => "stopped",
            Self::RankStarted => "rank_started",
            Self::RankEnded => "rank_ended",
            Self::RankFailed => "rank_failed",
            Self::RankAdopted => "rank_adopted",
            Self::PackageReceived => "package_received",
            Self::PackageActivated => "package_activated",
            Self::PackageRolledBack => "package_rolled_back",
            Self::PackageRemoved => "package_removed",
            Self::Damaged => "damaged",
            Self::Joined => "joined",
            Self::Renewed => "renewed",
            Self::Left => "left",
            Self::Handover => "handover",
            Self::Upgraded => "upgraded",
            Self::UpgradeFailed => "upgrade_failed",
            Self::Refused => "refused",
            Self::GroupFormed => "group_formed",
            Self::GroupLost => "group_lost",
            Self::GroupFailed => "group_failed",
        }
    }
}

/// Kinds that are faults.
const FAULTS: [EventKind; 5] = [
    EventKind::RankFailed,
    EventKind::Damaged,
    EventKind::UpgradeFailed,
    EventKind::GroupLost,
    EventKind::GroupFailed,
];

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Event {
    /// UTC, to the millisecond.
    pub time: String,
    /// What kind; a reader may not know that of a newer program.
    pub kind: String,
    /// For people.
    pub text: String,
    /// For programs.
    #[serde(default)]
    pub fields: Value,
}

impl Event {
    /// When, in milliseconds since 1970.
    pub(crate) fn time_ms(&self) -> u64 {
        time::parse(&self.time).unwrap_or_default()
    }

    /// Whether it is a fault.
    pub(crate) fn is_fault(&self) -> bool {
        FAULTS.iter().any(|kind| kind.name() == self.kind)
            || self.fields["after_crash"].as_bool() == Some(true)
    }
}

/// Which events are asked for.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct EventsRequest {
    /// From this moment on, in milliseconds since 1970.
    #[serde(default)]
    pub since_ms: u64,
    /// Of these kinds; of all if there are none.
    #[serde(default)]
    pub kinds: Vec<String>,
}

/// The events of a log, the earliest first.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct EventsAnswer {
    pub events: Vec<Event>,
    /// Earlier ones that had no room.
    #[serde(default)]
    pub left_out: usize,
    /// The clock that their times are of, in milliseconds since 1970.
    pub clock_ms: u64,
}

/// A log that is written.
pub(crate) struct EventLog {
    folder: PathBuf,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    last_fault: Option<Event>,
    /// Whether it was said that nothing can be written.
    told: bool,
}

impl EventLog {
    /// The log in `folder`, which is made if it is not there.
    pub(crate) fn open(folder: &Path) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let events = read(folder, &EventsRequest::default());
        let last_fault = events.into_iter().rfind(Event::is_fault);
        let state = Mutex::new(State { last_fault, told: false });
        Ok(Self { folder: folder.to_owned(), state })
    }

    /// Says that `what` has started in this process, and whether its last run ended without a word.
    pub(crate) fn started(&self, what: &str, mut fields: Value) {
        let events = read(&self.folder, &EventsRequest::default());
        let of_lives = [EventKind::Started, EventKind::Stopped].map(EventKind::name);
        let last = events
            .iter()
            .rfind(|event| of_lives.contains(&event.kind.as_str()) && event.fields["of"] == what);
        let crashed = last.is_some_and(|event| {
            event.kind == EventKind::Started.name() && !lives(&event.fields["pid"])
        });
        fields["of"] = what.into();
        fields["pid"] = std::process::id().into();
        fields["after_crash"] = crashed.into();
        let text = if crashed {
            format!("{what} started; its last run was killed, crashed or lost its power")
        } else {
            format!("{what} started")
        };
        self.add(EventKind::Started, text, fields);
    }

    /// Says that `what` has stopped as it was told to.
    pub(crate) fn stopped(&self, what: &str) {
        self.add(EventKind::Stopped, format!("{what} stopped"), json!({ "of": what }));
    }

    /// Adds an event. One that cannot be written is said, the first time, and ends nothing.
    pub(crate) fn add(&self, kind: EventKind, text: impl Into<String>, fields: Value) {
        let mut text: String = text.into();
        text.truncate(text.floor_char_boundary(MAX_TEXT_BYTES));
        let time = time::rfc3339(time::now_ms());
        let event = Event { time, kind: kind.name().to_owned(), text, fields };
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = append(&self.folder, &event)
            && !state.told
        {
            state.told = true;
            let file = self.folder.join(FILE);
            say(&format!("warning: {}: events cannot be written: {error}", file.display()));
        }
        if event.is_fault() {
            state.last_fault = Some(event);
        }
    }

    /// The latest event that is a fault.
    pub(crate) fn last_fault(&self) -> Option<Event> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).last_fault.clone()
    }

    /// Answers the operation.
    pub(crate) fn answer(&self, parameters: Value) -> Result<Value, String> {
        let request = serde_json::from_value(parameters)
            .map_err(|error| format!("the parameters of {EVENTS} cannot be read: {error}"))?;
        Ok(json!(answer(&self.folder, &request)))
    }
}

/// Whether another process has this number; several servers share a log.
fn lives(process: &Value) -> bool {
    let number = process.as_i64().and_then(|number| i32::try_from(number).ok());
    let process = number.and_then(Pid::from_raw);
    let is_other = number != i32::try_from(std::process::id()).ok();
    is_other && process.is_some_and(|process| test_kill_process(process).is_ok())
}

/// The events of the log in `folder`, the latest as far as there is room.
pub(crate) fn answer(folder: &Path, request: &EventsRequest) -> EventsAnswer {
    let mut events = read(folder, request);
    let mut room = MAX_ANSWER_BYTES;
    let fits = |event: &&Event| {
        let bytes = json!(event).to_string().len() + 1;
        let fits = bytes <= room;
        room = room.saturating_sub(bytes);
        fits
    };
    let left_out = events.len() - events.iter().rev().take_while(fits).count();
    events.drain(..left_out);
    EventsAnswer { events, left_out, clock_ms: time::now_ms() }
}

/// The events of the files in `folder`; lines that are none are skipped, and a file that is not there has
/// none.
fn read(folder: &Path, request: &EventsRequest) -> Vec<Event> {
    let mut events = Vec::new();
    for name in [OLD_FILE, FILE] {
        let Ok(bytes) = fs::read(folder.join(name)) else { continue };
        let lines = bytes.split(|byte| *byte == b'\n');
        let parsed = lines.filter_map(|line| serde_json::from_slice::<Event>(line).ok());
        events.extend(parsed.filter(|event| {
            let wanted = request.kinds.is_empty() || request.kinds.contains(&event.kind);
            wanted && event.time_ms() >= request.since_ms
        }));
    }
    events
}

/// Writes a line at the end of the file, durably.
fn append(folder: &Path, event: &Event) -> io::Result<()> {
    let (mut file, is_locked) = open_locked(folder)?;
    let mut line = json!(event).to_string();
    line.push('\n');
    if is_locked && file.metadata()?.len() + line.len() as u64 > MAX_FILE_BYTES {
        // Whoever waits for the lock of the old file finds that it has another name now.
        fs::rename(folder.join(FILE), folder.join(OLD_FILE))?;
        file = open(folder)?;
        File::open(folder)?.sync_all()?;
    }
    let length = file.metadata()?.len();
    if length > 0 {
        let mut last = [0];
        file.seek(SeekFrom::Start(length - 1))?;
        file.read_exact(&mut last)?;
        if last != *b"\n" {
            line.insert(0, '\n');
        }
    }
    // One call, so that lines of other processes do not come in between.
    file.write_all(line.as_bytes())?;
    file.sync_data()
}

fn open(folder: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).append(true).create(true).open(folder.join(FILE))
}

/// The file, locked if no other process has held it for too long.
fn open_locked(folder: &Path) -> io::Result<(File, bool)> {
    let deadline = Instant::now() + LOCK_TIMEOUT;
    loop {
        let file = open(folder)?;
        match file.try_lock() {
            Ok(()) => {
                let named = fs::metadata(folder.join(FILE));
                let own = file.metadata()?;
                if named.is_ok_and(|named| (named.dev(), named.ino()) == (own.dev(), own.ino())) {
                    return Ok((file, true));
                }
            }
            Err(TryLockError::Error(error)) => return Err(error),
            Err(TryLockError::WouldBlock) => thread::sleep(Duration::from_millis(2)),
        }
        if Instant::now() >= deadline {
            return Ok((file, false));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(folder: &Path) -> Vec<String> {
        read(folder, &EventsRequest::default()).into_iter().map(|event| event.text).collect()
    }

    #[test]
    fn a_torn_line_is_skipped_and_costs_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let log = EventLog::open(folder.path()).unwrap();
        log.add(EventKind::Joined, "one", json!({ "a": 1 }));
        let whole = fs::read(folder.path().join(FILE)).unwrap();
        // One that lacks no more than its end of line is whole.
        for length in 0..whole.len() - 1 {
            let torn = [&whole[..], &whole[..length]].concat();
            fs::write(folder.path().join(FILE), torn).unwrap();
            assert_eq!(texts(folder.path()), ["one"], "{length}");
            log.add(EventKind::Joined, "two", Value::Null);
            assert_eq!(texts(folder.path()), ["one", "two"], "{length}");
        }
    }

    #[test]
    fn the_file_stays_small_and_one_old_one_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(FILE), vec![b'\n'; MAX_FILE_BYTES as usize - 10]).unwrap();
        let log = EventLog::open(folder.path()).unwrap();
        log.add(EventKind::RankFailed, "over", Value::Null);
        assert_eq!(fs::metadata(folder.path().join(OLD_FILE)).unwrap().len(), MAX_FILE_BYTES - 10);
        assert_eq!(texts(folder.path()), ["over"]);
        // A later run knows the fault.
        let log = EventLog::open(folder.path()).unwrap();
        assert_eq!(log.last_fault().unwrap().text, "over");
    }

    #[test]
    fn many_writers_lose_no_line() {
        let folder = tempfile::tempdir().unwrap();
        thread::scope(|scope| {
            for writer in 0..4 {
                let folder = folder.path();
                scope.spawn(move || {
                    let log = EventLog::open(folder).unwrap();
                    (0..20).for_each(|n| {
                        log.add(EventKind::Refused, format!("{writer}-{n}"), json!({}));
                    });
                });
            }
        });
        assert_eq!(texts(folder.path()).len(), 80);
    }

    #[test]
    fn a_run_without_an_end_is_told_by_the_next_one() {
        let folder = tempfile::tempdir().unwrap();
        let log = EventLog::open(folder.path()).unwrap();
        log.started("node", json!({}));
        log.add(EventKind::Refused, "x", json!({}));
        log.started("node", json!({}));
        log.stopped("node");
        log.started("node", json!({}));
        let events = read(folder.path(), &EventsRequest::default());
        let crashed = |event: &Event| event.fields["after_crash"].as_bool();
        let crashed: Vec<_> = events.iter().filter_map(crashed).collect();
        assert_eq!(crashed, [false, true, false]);
    }

    #[test]
    fn the_latest_events_are_answered_where_not_all_have_room() {
        let folder = tempfile::tempdir().unwrap();
        let event = Event {
            time: time::rfc3339(5),
            kind: "refused".to_owned(),
            text: "x".repeat(1000),
            fields: Value::Null,
        };
        let line = json!(event).to_string() + "\n";
        fs::write(folder.path().join(FILE), line.repeat(600)).unwrap();
        let found = answer(folder.path(), &EventsRequest::default());
        assert_eq!(found.events.len() + found.left_out, 600);
        assert!(found.left_out > 0 && json!(found).to_string().len() < 1 << 20);
        let none = EventsRequest { since_ms: 6, kinds: Vec::new() };
        assert_eq!(answer(folder.path(), &none).events, []);
        let other = EventsRequest { since_ms: 0, kinds: vec!["left".to_owned()] };
        assert_eq!(answer(folder.path(), &other).events, []);
    }
}
