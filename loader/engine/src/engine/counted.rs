//! Counts the collective calls of a group: how many a step makes, their bytes and their time.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use shardpack_collectives::{Group, GroupCall, GroupObserver, GroupOp, ObservedGroup};

/// Calls of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// How many.
    pub count: u64,
    /// Bytes of this rank's own data.
    pub bytes: u64,
    /// Time spent in them, waiting included.
    pub time: Duration,
}

/// Collective calls by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// All-reduces.
    pub all_reduces: Calls,
    /// All-gathers.
    pub all_gathers: Calls,
    /// Broadcasts.
    pub broadcasts: Calls,
    /// Sends to the next pipeline stage, and receives from the previous one.
    pub transfers: Calls,
}

impl Counts {
    /// Time spent in all of them.
    #[must_use]
    pub fn time(&self) -> Duration {
        self.all_reduces.time + self.all_gathers.time + self.broadcasts.time + self.transfers.time
    }
}

impl Counts {
    fn of(&mut self, op: GroupOp) -> Option<&mut Calls> {
        match op {
            GroupOp::AllReduce => Some(&mut self.all_reduces),
            GroupOp::AllGather => Some(&mut self.all_gathers),
            GroupOp::Broadcast => Some(&mut self.broadcasts),
            GroupOp::Send | GroupOp::Receive => Some(&mut self.transfers),
            GroupOp::Barrier => None,
        }
    }
}

/// A group whose calls are counted.
pub type CountedGroup<'a> = ObservedGroup<&'a dyn Group, CallCounter>;

/// Counts the calls of a group, from zero.
#[derive(Debug, Default)]
pub struct CallCounter(Mutex<Counts>);

impl CallCounter {
    /// Counts since the last call.
    pub fn take(&self) -> Counts {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl GroupObserver for CallCounter {
    fn observe<T>(&self, call: GroupCall, run: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = run();
        let time = start.elapsed();
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(calls) = counts.of(call.op) {
            calls.count += 1;
            calls.bytes += call.size_bytes as u64;
            calls.time += time;
        }
        result
    }
}
