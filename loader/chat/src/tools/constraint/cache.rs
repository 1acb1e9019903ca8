//! Grammars that were asked for before: compiled, or refused.

use std::{
    sync::Mutex,
    time::{Duration, Instant},
};

use llguidance::Matcher;

use super::GrammarError;

/// Grammars kept: agents use the same tools all day.
const ENTRIES_MAX: usize = 32;
/// Bytes of the grammars kept, as they were when they were compiled: those of agents' tools have 1 to
/// 6 MB each.
const BYTES_MAX: usize = 64 << 20;

/// Refusals kept. They are small, and whoever repeats one is told at once.
const REFUSALS_MAX: usize = 256;

/// How long one is kept that took too long: the machine may have been busy.
const TIMEOUT_KEPT: Duration = Duration::from_mins(1);

/// The latest grammars.
pub(super) struct Cache(Mutex<Entries>);

struct Entries {
    compiled: Latest<Matcher>,
    refused: Vec<(blake3::Hash, GrammarError, Instant)>,
}

/// A matcher at the beginning of its grammar, and what it takes in memory.
#[derive(Clone)]
pub(super) struct Compiled {
    pub(super) matcher: Matcher,
    pub(super) size_bytes: usize,
}

/// Values by hash within limits, the most recently used one last.
struct Latest<T> {
    entries: Vec<(blake3::Hash, T, usize)>,
    entries_max: usize,
    bytes_max: usize,
}

impl<T: Clone> Latest<T> {
    const fn new(entries_max: usize, bytes_max: usize) -> Self {
        Self { entries: Vec::new(), entries_max, bytes_max }
    }

    fn get(&mut self, key: &blake3::Hash) -> Option<T> {
        let place = self.entries.iter().position(|(hash, ..)| hash == key)?;
        let entry = self.entries.remove(place);
        let value = entry.1.clone();
        self.entries.push(entry);
        Some(value)
    }

    /// Keeps a value, and drops the longest unused until it fits; one that alone is too large is not
    /// kept.
    fn put(&mut self, key: blake3::Hash, value: T, size_bytes: usize) {
        self.entries.retain(|(hash, ..)| *hash != key);
        if size_bytes > self.bytes_max {
            return;
        }
        while self.entries.len() >= self.entries_max
            || self.size_bytes() + size_bytes > self.bytes_max
        {
            self.entries.remove(0);
        }
        self.entries.push((key, value, size_bytes));
    }

    fn size_bytes(&self) -> usize {
        self.entries.iter().map(|(_, _, size_bytes)| size_bytes).sum()
    }
}

impl Default for Cache {
    fn default() -> Self {
        let compiled = Latest::new(ENTRIES_MAX, BYTES_MAX);
        Self(Mutex::new(Entries { compiled, refused: Vec::new() }))
    }
}

impl Cache {
    /// A matcher at the beginning of this grammar, or why there is none.
    pub(super) fn get(&self, key: &str) -> Option<Result<Matcher, GrammarError>> {
        let mut entries = self.0.lock().ok()?;
        let key = blake3::hash(key.as_bytes());
        let old = |error: &GrammarError, since: &Instant| {
            *error == GrammarError::Timeout && since.elapsed() > TIMEOUT_KEPT
        };
        entries.refused.retain(|(_, error, since)| !old(error, since));
        if let Some(place) = entries.refused.iter().position(|(hash, ..)| *hash == key) {
            let entry = entries.refused.remove(place);
            let error = entry.1.clone();
            entries.refused.push(entry);
            return Some(Err(error));
        }
        entries.compiled.get(&key).map(Ok)
    }

    /// Keeps what came of a grammar, unless that says nothing about it.
    pub(super) fn put(&self, key: &str, result: &Result<Compiled, GrammarError>) {
        let Ok(mut entries) = self.0.lock() else { return };
        let key = blake3::hash(key.as_bytes());
        match result {
            Ok(Compiled { matcher, size_bytes }) => {
                entries.compiled.put(key, matcher.clone(), *size_bytes);
            }
            Err(GrammarError::Busy | GrammarError::Uncompiled) => {}
            Err(error) => {
                if entries.refused.len() == REFUSALS_MAX {
                    entries.refused.remove(0);
                }
                entries.refused.push((key, error.clone(), Instant::now()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_unused_go_where_entries_or_bytes_are_too_many() {
        let key = |name: &str| blake3::hash(name.as_bytes());
        let check = |latest: &Latest<u32>, names: &[&str], size_bytes: usize| {
            let hashes: Vec<_> = latest.entries.iter().map(|(hash, ..)| *hash).collect();
            assert_eq!(hashes, names.iter().map(|name| key(name)).collect::<Vec<_>>());
            assert_eq!(latest.size_bytes(), size_bytes);
        };
        let mut latest = Latest::new(3, 100);
        latest.put(key("a"), 1, 40);
        latest.put(key("b"), 2, 40);
        assert_eq!(latest.get(&key("a")), Some(1));
        check(&latest, &["b", "a"], 80);
        latest.put(key("c"), 3, 30);
        check(&latest, &["a", "c"], 70);
        latest.put(key("d"), 4, 1);
        latest.put(key("e"), 5, 1);
        check(&latest, &["c", "d", "e"], 32);
        latest.put(key("f"), 6, 100);
        check(&latest, &["f"], 100);
        // It would push out all others and fit no better.
        latest.put(key("g"), 7, 101);
        check(&latest, &["f"], 100);
        assert_eq!(latest.get(&key("g")), None);
        latest.put(key("f"), 8, 50);
        check(&latest, &["f"], 50);
        assert_eq!(latest.get(&key("f")), Some(8));
    }
}
