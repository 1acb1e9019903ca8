//! A group that counts what is asked of it: how many messages a step takes, and how long they
//! take.

use std::{
    ops::Range,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use shardpack_collectives::{Deadline, Group, GroupError};

/// Calls of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// How many.
    pub count: u64,
    /// Bytes that this rank brought.
    pub bytes: u64,
    /// Time spent in them, waiting included.
    pub time: Duration,
}

/// What a group was asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Sums.
    pub sums: Calls,
    /// Gathers.
    pub gathers: Calls,
    /// Broadcasts.
    pub broadcasts: Calls,
    /// What was given to the next stage's ranks, and taken from the previous one's.
    pub passes: Calls,
}

impl Counts {
    /// Time spent in all of them.
    #[must_use]
    pub fn time(&self) -> Duration {
        self.sums.time + self.gathers.time + self.broadcasts.time + self.passes.time
    }
}

/// One rank's end of a group, with counts.
pub struct CountedGroup<'a> {
    group: &'a dyn Group,
    counts: Mutex<Counts>,
}

impl<'a> CountedGroup<'a> {
    /// Counts from zero.
    #[must_use]
    pub fn new(group: &'a dyn Group) -> Self {
        Self { group, counts: Mutex::default() }
    }

    /// Counts since the last call.
    pub fn take(&self) -> Counts {
        std::mem::take(&mut *self.counts.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn count<T>(
        &self,
        kind: impl FnOnce(&mut Counts) -> &mut Calls,
        bytes: usize,
        call: impl FnOnce() -> T,
    ) -> T {
        let start = Instant::now();
        let result = call();
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let calls = kind(&mut counts);
        calls.count += 1;
        calls.bytes += bytes as u64;
        calls.time += start.elapsed();
        result
    }
}

impl Group for CountedGroup<'_> {
    fn rank(&self) -> u32 {
        self.group.rank()
    }

    fn size(&self) -> u32 {
        self.group.size()
    }

    fn epoch(&self) -> u64 {
        self.group.epoch()
    }

    fn all_reduce_sum(&self, values: &mut [f32], deadline: Deadline) -> Result<(), GroupError> {
        let bytes = size_of_val(values);
        let call = || self.group.all_reduce_sum(values, deadline);
        self.count(|counts| &mut counts.sums, bytes, call)
    }

    fn sum_among(
        &self,
        members: Range<u32>,
        values: &mut [f32],
        deadline: Deadline,
    ) -> Result<(), GroupError> {
        let bytes = size_of_val(values);
        let call = || self.group.sum_among(members, values, deadline);
        self.count(|counts| &mut counts.sums, bytes, call)
    }

    fn send(&self, to: u32, bytes: &[u8], deadline: Deadline) -> Result<(), GroupError> {
        let call = || self.group.send(to, bytes, deadline);
        self.count(|counts| &mut counts.passes, bytes.len(), call)
    }

    fn receive(
        &self,
        from: u32,
        bytes: &mut Vec<u8>,
        deadline: Deadline,
    ) -> Result<(), GroupError> {
        let call = || self.group.receive(from, bytes, deadline);
        self.count(|counts| &mut counts.passes, 0, call)
    }

    fn at_work(&self) -> Result<(), GroupError> {
        self.group.at_work()
    }

    fn all_gather(&self, mine: &[u8], deadline: Deadline) -> Result<Vec<Vec<u8>>, GroupError> {
        let call = || self.group.all_gather(mine, deadline);
        self.count(|counts| &mut counts.gathers, mine.len(), call)
    }

    fn broadcast(
        &self,
        root: u32,
        bytes: &mut Vec<u8>,
        deadline: Deadline,
    ) -> Result<(), GroupError> {
        let len = bytes.len();
        let call = || self.group.broadcast(root, bytes, deadline);
        self.count(|counts| &mut counts.broadcasts, len, call)
    }

    fn barrier(&self, deadline: Deadline) -> Result<(), GroupError> {
        self.group.barrier(deadline)
    }

    fn abort(&self, reason: &str) {
        self.group.abort(reason);
    }
}
