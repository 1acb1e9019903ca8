//! API keys: scopes and rate limits. Keys are random, so a fast hash is as good as a slow one; the
//! key file holds only hashes.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use serde::{Deserialize, Serialize};

use super::error::{ApiError, ErrorKind};

/// Keys of one file: every request is compared with each of them.
const KEYS_MAX: usize = 10_000;
/// Bytes of a file of so many keys.
pub const KEY_FILE_BYTES_MAX: u64 = 8 << 20;
/// Before the random part, so that people and scanners recognise a key.
const PREFIX: &str = "sp-";
/// Random bytes of a key.
const KEY_BYTES: usize = 32;

/// What a key gives access to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// Generation, and everything that costs no more than that.
    Infer,
    /// The server's state.
    Admin,
    /// `/metrics`.
    Metrics,
}

impl Scope {
    /// Every scope.
    pub const ALL: [Self; 3] = [Self::Infer, Self::Admin, Self::Metrics];

    /// Its name in files and arguments.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Infer => "infer",
            Self::Admin => "admin",
            Self::Metrics => "metrics",
        }
    }
}

/// Rate limits of a key; absent: only the server's own limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyLimits {
    /// Requests per minute.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requests_per_minute: Option<u32>,
    /// Tokens in a minute, prompt and completion together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_per_minute: Option<u32>,
    /// Concurrent requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub concurrency: Option<u32>,
}

/// A key as its file holds it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyEntry {
    /// Name of its owner; unique.
    pub name: String,
    /// BLAKE3 of the key, in hex.
    pub blake3: String,
    /// Its scopes.
    pub scopes: BTreeSet<Scope>,
    /// Its rate limits.
    #[serde(default)]
    pub limits: KeyLimits,
}

/// A file of keys.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyFile {
    /// In order of creation.
    pub keys: Vec<KeyEntry>,
}

/// The file holds no usable keys.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// Not JSON of that shape.
    #[error("not a key file")]
    Json(#[from] serde_json::Error),
    /// A hash that is none.
    #[error("key {name:?}: expected 64 hexadecimal digits as its hash")]
    Hash {
        /// The key.
        name: String,
    },
    /// Two keys with one name.
    #[error("two keys are named {name:?}")]
    Twice {
        /// The name.
        name: String,
    },
    /// Too many.
    #[error("{0} keys in one file: at most {KEYS_MAX}")]
    TooMany(usize),
    /// No key is in the file.
    #[error("the key file holds no keys: every request would be refused")]
    Empty,
    /// The system gives no random bytes.
    #[error("cannot get random bytes from the system: {0}")]
    Random(getrandom::Error),
}

impl KeyFile {
    /// Parses a file.
    pub fn parse(bytes: &[u8]) -> Result<Self, KeyError> {
        let file: Self = serde_json::from_slice(bytes)?;
        if file.keys.len() > KEYS_MAX {
            return Err(KeyError::TooMany(file.keys.len()));
        }
        let mut names = BTreeSet::new();
        for key in &file.keys {
            if !names.insert(&key.name) {
                return Err(KeyError::Twice { name: key.name.clone() });
            }
            if blake3::Hash::from_hex(&key.blake3).is_err() {
                return Err(KeyError::Hash { name: key.name.clone() });
            }
        }
        Ok(file)
    }

    /// Makes a key and returns it: the file keeps its hash alone.
    pub fn add(
        &mut self,
        name: &str,
        scopes: BTreeSet<Scope>,
        limits: KeyLimits,
    ) -> Result<String, KeyError> {
        if self.keys.iter().any(|key| key.name == name) {
            return Err(KeyError::Twice { name: name.to_owned() });
        }
        let mut bytes = [0; KEY_BYTES];
        getrandom::fill(&mut bytes).map_err(KeyError::Random)?;
        let random = blake3::Hash::from_bytes(bytes);
        let key = format!("{PREFIX}{}", random.to_hex());
        let blake3 = blake3::hash(key.as_bytes()).to_hex().to_string();
        self.keys.push(KeyEntry { name: name.to_owned(), blake3, scopes, limits });
        Ok(key)
    }

    /// Takes a key out; whether there was one.
    pub fn remove(&mut self, name: &str) -> bool {
        let before = self.keys.len();
        self.keys.retain(|key| key.name != name);
        self.keys.len() < before
    }
}

/// The keys of a server.
#[derive(Debug)]
pub struct ApiKeys(Vec<Arc<Key>>);

impl ApiKeys {
    /// The keys of a file; there must be one.
    pub fn new(file: KeyFile) -> Result<Self, KeyError> {
        if file.keys.is_empty() {
            return Err(KeyError::Empty);
        }
        let key = |entry: KeyEntry| {
            let hash = blake3::Hash::from_hex(&entry.blake3);
            let hash = hash.map_err(|_| KeyError::Hash { name: entry.name.clone() })?;
            Ok(Arc::new(Key { hash, entry, spent: Mutex::new(Spent::new(Instant::now())) }))
        };
        file.keys.into_iter().map(key).collect::<Result<_, _>>().map(Self)
    }

    /// The key that was sent, if it is known and has `scope`.
    pub(super) fn check(&self, sent: Option<&str>, scope: Scope) -> Result<Arc<Key>, ApiError> {
        let unknown = |message: &str| {
            ApiError::new(ErrorKind::Unauthenticated, message).with_code("invalid_api_key")
        };
        let sent = sent.ok_or_else(|| {
            unknown("this server needs an API key: send it as Authorization: Bearer KEY")
        })?;
        let hash = blake3::hash(sent.as_bytes());
        // Every key is looked at, and hashes compare in constant time: time tells nothing.
        let found =
            self.0.iter().fold(None, |found, key| if key.hash == hash { Some(key) } else { found });
        let key = found.ok_or_else(|| unknown("unknown API key"))?;
        key.demand(scope)?;
        Ok(key.clone())
    }
}

/// A known key and its usage.
#[derive(Debug)]
pub(super) struct Key {
    hash: blake3::Hash,
    entry: KeyEntry,
    spent: Mutex<Spent>,
}

/// Token buckets that refill evenly and hold a minute's worth at most. The one of tokens may be
/// overdrawn, since the cost of a completion is known at its end.
#[derive(Debug)]
struct Spent {
    at: Instant,
    /// Minutes' worth of requests and tokens that are left, 1 when full.
    requests: f64,
    tokens: f64,
    running: u32,
}

impl Spent {
    const fn new(at: Instant) -> Self {
        Self { at, requests: 1.0, tokens: 1.0, running: 0 }
    }

    fn refill(&mut self, now: Instant) {
        let minutes = now.saturating_duration_since(self.at).as_secs_f64() / 60.0;
        self.at = now;
        self.requests = (self.requests + minutes).min(1.0);
        self.tokens = (self.tokens + minutes).min(1.0);
    }
}

impl Key {
    /// Refuses what needs a scope that this key lacks.
    pub(super) fn demand(&self, scope: Scope) -> Result<(), ApiError> {
        if self.entry.scopes.contains(&scope) {
            return Ok(());
        }
        let message = format!("the API key {:?} lacks the scope {}", self.entry.name, scope.name());
        Err(ApiError::new(ErrorKind::Forbidden, message).with_code("missing_scope"))
    }

    /// Whose it is.
    pub(super) fn name(&self) -> &str {
        &self.entry.name
    }

    fn spent(&self) -> std::sync::MutexGuard<'_, Spent> {
        self.spent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a slot for a request, or returns the rate-limit error with the time to wait.
    pub(super) fn begin(self: &Arc<Self>, now: Instant) -> Result<KeySlot, ApiError> {
        let limits = self.entry.limits;
        let mut spent = self.spent();
        spent.refill(now);
        if let Some(most) = limits.concurrency.filter(|&most| spent.running >= most) {
            return Err(limited(&format!("{most} requests at once"), None));
        }
        if let Some(most) = limits.requests_per_minute {
            let one = 1.0 / f64::from(most.max(1));
            // Rounding must not cost anybody a request.
            if spent.requests + 1e-9 < one {
                let wait = (one - spent.requests) * 60_000.0;
                return Err(limited(&format!("{most} requests a minute"), Some(wait)));
            }
            spent.requests -= one;
        }
        if let Some(most) = limits.tokens_per_minute.filter(|_| spent.tokens <= 0.0) {
            let wait = -spent.tokens * 60_000.0 + 1.0;
            return Err(limited(&format!("{most} tokens a minute"), Some(wait)));
        }
        spent.running += 1;
        Ok(KeySlot(self.clone()))
    }
}

fn limited(limit: &str, wait_ms: Option<f64>) -> ApiError {
    let wait_ms = wait_ms.map_or(1000, |wait| wait.ceil().clamp(1.0, 3_600_000.0) as u64);
    let seconds = wait_ms as f64 / 1000.0;
    // Clients read the time out of the sentence.
    let message = format!(
        "rate limit of {limit} reached for this API key: please try again in {seconds:.3}s"
    );
    let error = ApiError::new(ErrorKind::RateLimited, message).with_code("rate_limit_exceeded");
    ApiError { retry_after_ms: Some(wait_ms), ..error }
}

/// A running request of a key.
#[derive(Debug)]
pub(super) struct KeySlot(Arc<Key>);

impl KeySlot {
    /// Counts tokens.
    pub(super) fn spend(&self, tokens: u32) {
        if let Some(most) = self.0.entry.limits.tokens_per_minute {
            self.0.spent().tokens -= f64::from(tokens) / f64::from(most.max(1));
        }
    }
}

impl Drop for KeySlot {
    fn drop(&mut self) {
        let mut spent = self.0.spent();
        spent.running = spent.running.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use std::{error::Error, time::Duration};

    use super::*;

    fn keys(limits: KeyLimits) -> (ApiKeys, String) {
        let mut file = KeyFile::default();
        let key = file.add("me", BTreeSet::from([Scope::Infer]), limits).unwrap();
        let text = serde_json::to_string(&file).unwrap();
        assert!(!text.contains(&key), "the key itself is not in the file");
        (ApiKeys::new(KeyFile::parse(text.as_bytes()).unwrap()).unwrap(), key)
    }

    #[test]
    fn only_known_keys_open_and_only_their_scopes() {
        let (keys, key) = keys(KeyLimits::default());
        let kind = |sent: Option<&str>, scope| keys.check(sent, scope).map_err(|error| error.kind);
        assert_eq!(kind(Some(&key), Scope::Infer).unwrap().name(), "me");
        assert_eq!(kind(Some(&key), Scope::Admin).unwrap_err(), ErrorKind::Forbidden);
        assert_eq!(kind(None, Scope::Infer).unwrap_err(), ErrorKind::Unauthenticated);
        for wrong in ["", "sp-", &key[1..], &key.to_uppercase()] {
            let error = kind(Some(wrong), Scope::Infer).unwrap_err();
            assert_eq!(error, ErrorKind::Unauthenticated, "{wrong}");
        }
    }

    #[test]
    fn requests_of_a_minute_are_spread_over_it() {
        let limits = KeyLimits { requests_per_minute: Some(2), ..KeyLimits::default() };
        let (keys, key) = keys(limits);
        let key = keys.check(Some(&key), Scope::Infer).unwrap();
        let now = Instant::now();
        assert!(key.begin(now).is_ok() && key.begin(now).is_ok());
        let error = key.begin(now).unwrap_err();
        assert_eq!((error.kind, error.retry_after_ms), (ErrorKind::RateLimited, Some(30_000)));
        assert!(key.begin(now + Duration::from_secs(29)).is_err());
        assert!(key.begin(now + Duration::from_secs(31)).is_ok());
    }

    #[test]
    fn tokens_are_paid_back_before_the_next_request() {
        let limits = KeyLimits { tokens_per_minute: Some(60), ..KeyLimits::default() };
        let (keys, key) = keys(limits);
        let key = keys.check(Some(&key), Scope::Infer).unwrap();
        let now = Instant::now();
        key.begin(now).unwrap().spend(90);
        let error = key.begin(now).unwrap_err();
        assert_eq!(error.retry_after_ms, Some(30_001));
        assert!(key.begin(now + Duration::from_secs(31)).is_ok());
    }

    #[test]
    fn slots_are_released() {
        let limits = KeyLimits { concurrency: Some(1), ..KeyLimits::default() };
        let (keys, key) = keys(limits);
        let key = keys.check(Some(&key), Scope::Infer).unwrap();
        let now = Instant::now();
        let slot = key.begin(now).unwrap();
        assert!(key.begin(now).is_err());
        drop(slot);
        assert!(key.begin(now).is_ok());
    }

    #[test]
    fn files_that_hold_no_keys_are_refused() {
        let check = |text: &str, words: &str| {
            let error = KeyFile::parse(text.as_bytes()).unwrap_err();
            let reason = error.source().map(ToString::to_string).unwrap_or_default();
            let error = format!("{error}: {reason}");
            assert!(error.contains(words), "{text}: {error}");
        };
        check("{", "not a key file");
        check(r#"{"keys":[{"name":"a","blake3":"00","scopes":[]}]}"#, "64 hex");
        check(r#"{"keys":[{"name":"a","blake3":"00","scopes":["root"]}]}"#, "root");
        assert!(matches!(ApiKeys::new(KeyFile::default()), Err(KeyError::Empty)));
    }
}
