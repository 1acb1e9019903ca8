//! What happens to a group, for a log.

use std::{fmt, sync::Arc, time::Duration};

/// An event of a group's life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GroupEvent {
    /// The ranks serve together.
    Formed {
        /// The group's epoch.
        epoch: u64,
        /// How many.
        ranks: u32,
        /// Since the loss that it recovers from.
        after: Option<Duration>,
        /// Requests that go on in it.
        resumed: usize,
    },
    /// The group has lost a rank, or an attempt to form it again has.
    Lost {
        /// Epoch of the last group.
        epoch: u64,
        /// The rank, where it is known.
        rank: Option<u32>,
        /// Its node, where it is known.
        node: Option<String>,
        /// Why.
        reason: String,
        /// What is done about it.
        doing: String,
        /// Requests that wait.
        waiting: usize,
    },
    /// It is given up.
    Failed {
        /// Why.
        reason: String,
    },
}

type Take = dyn Fn(&GroupEvent) + Send + Sync;

/// Takes the events of a group, on the supervisor's thread, which waits for its return.
#[derive(Clone, Default)]
pub struct GroupEventSink(Option<Arc<Take>>);

impl GroupEventSink {
    /// Calls `take` with every event.
    pub fn new(take: impl Fn(&GroupEvent) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(take)))
    }

    pub(super) fn tell(&self, event: &GroupEvent) {
        if let Some(take) = &self.0 {
            take(event);
        }
    }
}

impl fmt::Debug for GroupEventSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("GroupEventSink").field(&self.0.is_some()).finish()
    }
}
