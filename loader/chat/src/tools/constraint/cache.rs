//! Grammars that were asked for before: compiled, or refused.

use std::{
    sync::Mutex,
    time::{Duration, Instant},
};

use llguidance::Matcher;

use super::GrammarError;

/// Grammars kept: some hundred KB each, and agents use the same tools all day.
const ENTRIES_MAX: usize = 32;

/// Refusals kept. They are small, and whoever repeats one is told at once.
const REFUSALS_MAX: usize = 256;

/// How long one is kept that took too long: the machine may have been busy.
const TIMEOUT_KEPT: Duration = Duration::from_mins(1);

/// The latest grammars, the most recently used one last.
#[derive(Default)]
pub(super) struct Cache(Mutex<Entries>);

#[derive(Default)]
struct Entries {
    compiled: Vec<(blake3::Hash, Matcher)>,
    refused: Vec<(blake3::Hash, GrammarError, Instant)>,
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
        let place = entries.compiled.iter().position(|(hash, _)| *hash == key)?;
        let entry = entries.compiled.remove(place);
        let matcher = entry.1.clone();
        entries.compiled.push(entry);
        Some(Ok(matcher))
    }

    /// Keeps what came of a grammar, unless that says nothing about it.
    pub(super) fn put(&self, key: &str, result: &Result<Matcher, GrammarError>) {
        let Ok(mut entries) = self.0.lock() else { return };
        let key = blake3::hash(key.as_bytes());
        match result {
            Ok(matcher) => {
                if entries.compiled.len() == ENTRIES_MAX {
                    entries.compiled.remove(0);
                }
                entries.compiled.push((key, matcher.clone()));
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
