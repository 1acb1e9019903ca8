//! What happened to the server and its models since it started, for `/events`: the latest of it, in
//! memory. Knows nothing of who may read it.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::SystemTime,
};

use serde_json::Value;

/// Events that are kept: a day of a server whose ranks come and go every few minutes.
const KEPT: usize = 512;
/// Longest text of an event; some repeat what another machine said.
const TEXT_BYTES_MAX: usize = 4 << 10;

/// Something that happened.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ServerEvent {
    /// Counts from 1.
    pub(super) number: u64,
    pub(super) time: SystemTime,
    /// As `cluster events` names it, where both know it.
    pub(super) kind: &'static str,
    /// The model's name; absent: the whole server's.
    pub(super) model: Option<String>,
    /// For people.
    pub(super) text: String,
    /// For programs.
    pub(super) fields: Value,
}

/// The events of a server; whoever holds a clone adds to the same.
#[derive(Clone, Default)]
pub struct ServerEvents(Arc<Mutex<Kept>>);

#[derive(Default)]
struct Kept {
    events: VecDeque<ServerEvent>,
    last: u64,
}

impl ServerEvents {
    /// Adds an event of a model, or of the whole server.
    pub fn add(&self, kind: &'static str, model: Option<&str>, text: &str, fields: Value) {
        let text = text[..text.floor_char_boundary(TEXT_BYTES_MAX)].to_owned();
        let (model, time) = (model.map(str::to_owned), SystemTime::now());
        let mut kept = self.kept();
        kept.last += 1;
        let number = kept.last;
        if kept.events.len() == KEPT {
            kept.events.pop_front();
        }
        kept.events.push_back(ServerEvent { number, time, kind, model, text, fields });
    }

    /// Number of the latest; 0 before the first.
    pub(super) fn last(&self) -> u64 {
        self.kept().last
    }

    /// Those after the event of a number, the earliest first.
    pub(super) fn after(&self, number: u64) -> Vec<ServerEvent> {
        self.kept().events.iter().filter(|event| event.number > number).cloned().collect()
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_events_are_kept_and_numbered() {
        let events = ServerEvents::default();
        assert_eq!((events.last(), events.after(0)), (0, Vec::new()));
        for count in 1..=KEPT as u64 + 3 {
            events.add("group_lost", Some("m"), &format!("{count}"), Value::Null);
        }
        let (last, all) = (events.last(), events.after(0));
        assert_eq!((last, all.len(), all[0].number), (KEPT as u64 + 3, KEPT, 4));
        assert_eq!(all[0].text, "4");
        let after: Vec<u64> = events.after(last - 2).iter().map(|event| event.number).collect();
        assert_eq!(after, [last - 1, last]);
        assert_eq!(events.after(last), []);
    }

    #[test]
    fn a_text_ends_between_characters() {
        let events = ServerEvents::default();
        events.add("group_lost", None, &"ä".repeat(TEXT_BYTES_MAX), Value::Null);
        events.add("group_lost", None, &format!("x{}", "ä".repeat(TEXT_BYTES_MAX)), Value::Null);
        let lengths: Vec<usize> = events.after(0).iter().map(|event| event.text.len()).collect();
        assert_eq!(lengths, [TEXT_BYTES_MAX, TEXT_BYTES_MAX - 1]);
    }
}
