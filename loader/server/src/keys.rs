//! API keys: scopes and rate limits. Keys are random, so a fast hash is as good as a slow one; the
//! key file holds only hashes.

mod api_keys;
mod slot;

use std::{collections::BTreeSet, num::NonZeroU32};

use serde::{Deserialize, Serialize};

pub use api_keys::ApiKeys;
pub(super) use api_keys::Reload;
pub(super) use slot::{Key, KeySlot};

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
    /// What the server and its models do, and nothing that computes: a key of this scope alone is
    /// read-only.
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

/// Who may use an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    /// Everybody.
    Public,
    /// Whoever has a key of any scope: it computes nothing and changes nothing.
    Watch,
    /// Keys of this scope.
    Scope(Scope),
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
    /// Bytes of request bodies in a minute.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub body_bytes_per_minute: Option<u64>,
    /// Milliseconds of a minute for compiling grammars.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grammar_ms_per_minute: Option<u32>,
}

/// A key as its file holds it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
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
    /// The models that it may use, each by one of its names; absent: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub models: Option<BTreeSet<String>>,
    /// Its share of a busy server beside other keys; absent: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<NonZeroU32>,
    /// Keys of one group share the prefix cache; absent: it has its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_prefix_cache: Option<String>,
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
        let name = name.to_owned();
        let (models, weight, share_prefix_cache) = (None, None, None);
        let entry = KeyEntry { name, blake3, scopes, limits, models, weight, share_prefix_cache };
        self.keys.push(entry);
        Ok(key)
    }

    /// The key of this name, to be changed.
    pub fn entry_mut(&mut self, name: &str) -> Option<&mut KeyEntry> {
        self.keys.iter_mut().find(|key| key.name == name)
    }

    /// Takes a key out; whether there was one.
    pub fn remove(&mut self, name: &str) -> bool {
        let before = self.keys.len();
        self.keys.retain(|key| key.name != name);
        self.keys.len() < before
    }
}

#[cfg(test)]
mod tests;
