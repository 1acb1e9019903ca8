//! Compiled grammars that were asked for before.

use std::sync::Mutex;

use llguidance::Matcher;

/// Grammars kept: some hundred KB each, and agents use the same tools all day.
const ENTRIES_MAX: usize = 32;

/// The latest grammars, the most recently used one last.
#[derive(Default)]
pub(super) struct Cache(Mutex<Vec<(blake3::Hash, Matcher)>>);

impl Cache {
    /// A matcher at the beginning of this grammar.
    pub(super) fn get(&self, key: &str) -> Option<Matcher> {
        let mut entries = self.0.lock().ok()?;
        let key = blake3::hash(key.as_bytes());
        let place = entries.iter().position(|(hash, _)| *hash == key)?;
        let entry = entries.remove(place);
        let matcher = entry.1.clone();
        entries.push(entry);
        Some(matcher)
    }

    pub(super) fn put(&self, key: &str, matcher: Matcher) {
        let Ok(mut entries) = self.0.lock() else { return };
        if entries.len() == ENTRIES_MAX {
            entries.remove(0);
        }
        entries.push((blake3::hash(key.as_bytes()), matcher));
    }
}
