//! The keys of a running server. Their file is read again when it changes or on a signal; what cannot be
//! used leaves the present keys in use.

use std::{
    fmt::Write as _,
    fs::{self, File},
    io::{self, Read as _},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant, SystemTime},
};

use serde_json::{Value, json};
use tokio::time::sleep;

use super::{Access, KEY_FILE_BYTES_MAX, Key, KeyError, KeyFile, slot::Spent};
use crate::{
    error::{ApiError, ErrorKind},
    events::ServerEvents,
    tasks::blocking,
    tls::Report,
};

/// Interval at which the file is checked for changes.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Modification time, size and inode of the file when it was last read.
type Seen = Option<(SystemTime, u64, u64)>;

/// The keys of a server.
pub struct ApiKeys {
    state: Mutex<State>,
    file: Option<Watched>,
    events: ServerEvents,
}

/// The file that they are of.
struct Watched {
    path: PathBuf,
    report: Report,
}

struct State {
    keys: Arc<[Arc<Key>]>,
    seen: Seen,
    /// Why the file could not be read when it was last read again.
    failed: Option<String>,
}

/// The file of keys cannot be read again.
#[derive(Debug, thiserror::Error)]
enum ReloadError {
    #[error("cannot be read: {0}")]
    Read(#[from] io::Error),
    #[error("over {KEY_FILE_BYTES_MAX} bytes")]
    TooLarge,
    #[error(transparent)]
    Keys(#[from] KeyError),
}

/// Whether an unchanged file is read again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reload {
    IfChanged,
    Always,
}

impl ApiKeys {
    /// The keys of a file; there must be one.
    pub fn new(file: KeyFile) -> Result<Self, KeyError> {
        let keys = keys_of(file, &[])?;
        let state = Mutex::new(State { keys, seen: None, failed: None });
        Ok(Self { state, file: None, events: ServerEvents::default() })
    }

    /// Reads the file of these keys again while the server runs, when it changes or on a signal;
    /// `report` is told what came of it.
    #[must_use]
    pub fn watching(self, path: &Path, report: Report) -> Self {
        Self { file: Some(Watched { path: path.to_owned(), report }), ..self }
    }

    /// Adds to these events when its file is read again.
    pub(crate) fn with_events(self, events: ServerEvents) -> Self {
        Self { events, ..self }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The keys as they are now.
    pub(crate) fn all(&self) -> Arc<[Arc<Key>]> {
        Arc::clone(&self.state().keys)
    }

    /// Why the file could not be read when it was last read again.
    pub(crate) fn reload_failed(&self) -> Option<String> {
        self.state().failed.clone()
    }

    /// The key that was sent, if it is known and has `access`.
    pub(crate) fn check(&self, sent: Option<&str>, access: Access) -> Result<Arc<Key>, ApiError> {
        let unknown = |message: &str| {
            ApiError::new(ErrorKind::Unauthenticated, message).with_code("invalid_api_key")
        };
        let sent = sent.ok_or_else(|| {
            unknown("this server needs an API key: send it as Authorization: Bearer KEY")
        })?;
        let hash = blake3::hash(sent.as_bytes());
        // Every key is looked at, and hashes compare in constant time: time tells nothing.
        let keys = self.all();
        let found =
            keys.iter().fold(None, |found, key| if key.hash == hash { Some(key) } else { found });
        let key = found.ok_or_else(|| unknown("unknown API key"))?;
        key.demand_access(access)?;
        Ok(key.clone())
    }

    /// Reads the file again.
    pub(crate) fn reload(&self, reload: Reload) {
        let Some(Watched { path, report }) = &self.file else { return };
        // Before it is read: a change meanwhile causes another reading.
        let seen = look(path);
        let (known, before, failed_before) = {
            let state = self.state();
            (state.seen, Arc::clone(&state.keys), state.failed.clone())
        };
        if reload == Reload::IfChanged && seen == known {
            return;
        }
        let read = read(path, &before);
        let mut state = self.state();
        // A bad file is reported once, not at every look.
        state.seen = seen;
        match read {
            Ok(keys) => {
                (state.keys, state.failed) = (Arc::clone(&keys), None);
                drop(state);
                let change = change(&before, &keys);
                if reload == Reload::Always || failed_before.is_some() || change.is_some() {
                    let (count, change) = (keys.len(), change.unwrap_or_default());
                    let text = format!("{} read again: {count} keys{change}", path.display());
                    report(&format!("keys: {text}"));
                    self.events.add("keys_reloaded", None, &text, json!({"keys": count}));
                }
            }
            Err(error) => {
                let text = format!("{}: {}", path.display(), with_causes(&error));
                state.failed = Some(text.clone());
                drop(state);
                let text = format!("cannot reload, the keys in use stay: {text}");
                report(&format!("error: keys: {text}"));
                self.events.add("keys_refused", None, &text, Value::Null);
            }
        }
    }

    /// Watches the file for changes, forever.
    pub(crate) async fn watch(self: Arc<Self>) {
        loop {
            sleep(LOOK_AGAIN).await;
            let own = Arc::clone(&self);
            // Files may lie on a slow disk.
            let _ = blocking(move || own.reload(Reload::IfChanged)).await;
        }
    }
}

/// The keys of a file. Those that were there before, by name and hash, have spent what they had.
fn keys_of(file: KeyFile, before: &[Arc<Key>]) -> Result<Arc<[Arc<Key>]>, KeyError> {
    if file.keys.is_empty() {
        return Err(KeyError::Empty);
    }
    let key = |entry: super::KeyEntry| {
        let hash = blake3::Hash::from_hex(&entry.blake3);
        let hash = hash.map_err(|_| KeyError::Hash { name: entry.name.clone() })?;
        let known = before.iter().find(|key| key.hash == hash && key.entry.name == entry.name);
        let spent = known.map_or_else(
            || Arc::new(Mutex::new(Spent::new(Instant::now()))),
            |known| Arc::clone(&known.spent),
        );
        Ok(Arc::new(Key { hash, entry, spent }))
    };
    file.keys.into_iter().map(key).collect()
}

fn read(path: &Path, before: &[Arc<Key>]) -> Result<Arc<[Arc<Key>]>, ReloadError> {
    let mut bytes = Vec::new();
    File::open(path)?.take(KEY_FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > KEY_FILE_BYTES_MAX {
        return Err(ReloadError::TooLarge);
    }
    Ok(keys_of(KeyFile::parse(&bytes)?, before)?)
}

fn look(path: &Path) -> Seen {
    let metadata = fs::metadata(path).ok()?;
    #[cfg(unix)]
    let inode = std::os::unix::fs::MetadataExt::ino(&metadata);
    #[cfg(not(unix))]
    let inode = 0;
    Some((metadata.modified().ok()?, metadata.len(), inode))
}

/// What became of the keys, in a few words; nothing if they are as before.
fn change(before: &[Arc<Key>], after: &[Arc<Key>]) -> Option<String> {
    let same =
        |one: &Key, other: &Key| one.hash == other.hash && one.entry.name == other.entry.name;
    let lacks = |keys: &[Arc<Key>], key: &Key| !keys.iter().any(|it| same(it, key));
    let added = after.iter().filter(|key| lacks(before, key)).count();
    let removed = before.iter().filter(|key| lacks(after, key)).count();
    let is_changed =
        |key: &&Arc<Key>| before.iter().any(|it| same(it, key) && it.entry != key.entry);
    let changed = after.iter().filter(is_changed).count();
    let parts = [(added, "added"), (removed, "removed"), (changed, "changed")];
    let mut text = String::new();
    for (count, what) in parts.into_iter().filter(|(count, _)| *count > 0) {
        // Writing to a string cannot fail.
        let _ = write!(text, ", {count} {what}");
    }
    (!text.is_empty()).then_some(text)
}

fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(": ");
        text.push_str(&error.to_string());
        source = error.source();
    }
    text
}
