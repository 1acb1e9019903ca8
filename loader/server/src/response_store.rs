//! Response store of the responses API: what `previous_response_id` and `GET /v1/responses/{id}`
//! find. In memory, bounded in bytes, entries and age; the oldest are evicted first.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use shardpack_chat::json::Json;

/// Most bytes of all entries: some hundred long conversations.
const BYTES_MAX: usize = 64 << 20;
/// Most entries: a lookup is a linear search.
const ENTRIES_MAX: usize = 4096;
/// How long a response is stored.
const LIFETIME: Duration = Duration::from_hours(6);

/// The store.
#[derive(Debug, Default)]
pub(super) struct ResponseStore(Mutex<Entries>);

#[derive(Debug, Default)]
struct Entries {
    /// The oldest first.
    list: VecDeque<Entry>,
    bytes: usize,
}

#[derive(Debug)]
struct Entry {
    id: String,
    /// Name of the API key that created it; other keys do not find it.
    owner: Option<String>,
    body: Arc<str>,
    items: Arc<[Json]>,
    inputs: usize,
    bytes: usize,
    until: Instant,
}

/// A response to store.
#[derive(Debug)]
pub(super) struct StoredResponse {
    /// The response's id.
    pub(super) id: String,
    /// The response as its client got it.
    pub(super) body: String,
    /// Its input and output, as items of an `input`.
    pub(super) items: Vec<Json>,
    /// How many of them are its input.
    pub(super) inputs: usize,
}

impl Entries {
    fn drop_oldest(&mut self) {
        if let Some(entry) = self.list.pop_front() {
            self.bytes -= entry.bytes;
        }
    }

    /// Entries are in the order in which they expire.
    fn expire(&mut self, now: Instant) {
        while self.list.front().is_some_and(|entry| entry.until <= now) {
            self.drop_oldest();
        }
    }

    fn position(&self, id: &str, owner: Option<&str>) -> Option<usize> {
        self.list.iter().position(|entry| entry.id == id && entry.owner.as_deref() == owner)
    }
}

impl ResponseStore {
    fn entries(&self, now: Instant) -> std::sync::MutexGuard<'_, Entries> {
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        entries.expire(now);
        entries
    }

    /// Stores a response, unless it is larger than the whole store.
    pub(super) fn put(&self, response: StoredResponse, owner: Option<String>, now: Instant) {
        let items = response.items.iter().map(Json::size_bytes).sum::<usize>();
        let bytes = response.body.len() + items + response.id.len();
        if bytes > BYTES_MAX {
            return;
        }
        let mut entries = self.entries(now);
        while entries.bytes + bytes > BYTES_MAX || entries.list.len() == ENTRIES_MAX {
            entries.drop_oldest();
        }
        entries.bytes += bytes;
        let StoredResponse { id, body, items, inputs } = response;
        let (body, items, until) = (body.into(), items.into(), now + LIFETIME);
        entries.list.push_back(Entry { id, owner, body, items, inputs, bytes, until });
    }

    /// A response as its client got it.
    pub(super) fn body(&self, id: &str, owner: Option<&str>, now: Instant) -> Option<Arc<str>> {
        let entries = self.entries(now);
        let position = entries.position(id, owner)?;
        Some(Arc::clone(&entries.list[position].body))
    }

    /// Its input and output items.
    pub(super) fn items(&self, id: &str, owner: Option<&str>, now: Instant) -> Option<Arc<[Json]>> {
        let entries = self.entries(now);
        let position = entries.position(id, owner)?;
        Some(Arc::clone(&entries.list[position].items))
    }

    /// Its input items, oldest first.
    pub(super) fn inputs(&self, id: &str, owner: Option<&str>, now: Instant) -> Option<Vec<Json>> {
        let entries = self.entries(now);
        let entry = &entries.list[entries.position(id, owner)?];
        Some(entry.items[..entry.inputs.min(entry.items.len())].to_vec())
    }

    /// Deletes a response; returns whether there was one.
    pub(super) fn remove(&self, id: &str, owner: Option<&str>, now: Instant) -> bool {
        let mut entries = self.entries(now);
        let Some(position) = entries.position(id, owner) else { return false };
        let removed = entries.list.remove(position).map_or(0, |entry| entry.bytes);
        entries.bytes -= removed;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn response(id: &str, bytes: usize) -> StoredResponse {
        StoredResponse {
            id: id.to_owned(),
            body: "x".repeat(bytes),
            items: vec!["a".into()],
            inputs: 1,
        }
    }

    #[test]
    fn only_its_owner_finds_a_response_until_it_is_too_old() {
        let store = ResponseStore::default();
        let begin = Instant::now();
        store.put(response("r1", 3), Some("me".to_owned()), begin);
        assert_eq!(store.body("r1", Some("me"), begin).as_deref(), Some("xxx"));
        assert_eq!(store.items("r1", Some("me"), begin).unwrap().len(), 1);
        assert_eq!(store.body("r1", Some("you"), begin), None);
        assert_eq!(store.body("r1", None, begin), None);
        assert!(!store.remove("r1", None, begin));
        assert_eq!(store.body("r1", Some("me"), begin + LIFETIME), None);
        store.put(response("r2", 3), None, begin);
        assert!(store.remove("r2", None, begin) && !store.remove("r2", None, begin));
        assert_eq!(store.0.lock().unwrap().bytes, 0);
    }

    #[test]
    fn the_oldest_make_room() {
        let store = ResponseStore::default();
        let now = Instant::now();
        for number in 0..5 {
            store.put(response(&format!("r{number}"), BYTES_MAX / 4), None, now);
        }
        let found = |id| store.body(id, None, now).is_some();
        assert!(!found("r1") && found("r2") && found("r4"));
        store.put(response("huge", BYTES_MAX), None, now);
        assert!(!found("huge") && found("r4"));
        for number in 0..=ENTRIES_MAX {
            store.put(response(&format!("s{number}"), 1), None, now);
        }
        assert!(store.0.lock().unwrap().list.len() == ENTRIES_MAX && !found("s0"));
    }
}
