//! What a rank may ask of its group. Every call is collective: all ranks make the same calls in
//! the same order with the same sizes, and every call ends by its deadline.
//!
//! A group may be cut into parts that do different work one after the other (pipeline stages):
//! then each part has sums of its own, and values pass from rank to rank. Those calls are made by
//! the ranks that they name, in an order that is the same for each two of them.

use std::{
    ops::Range,
    time::{Duration, Instant},
};

/// The moment by which a collective call must have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Deadline(Instant);

impl Deadline {
    /// A deadline `timeout` from now.
    #[must_use]
    pub fn after(timeout: Duration) -> Self {
        Self(Instant::now() + timeout)
    }

    /// Time left; zero when it has passed.
    #[must_use]
    pub fn left(self) -> Duration {
        self.0.saturating_duration_since(Instant::now())
    }

    /// The moment itself.
    #[must_use]
    pub const fn moment(self) -> Instant {
        self.0
    }

    /// A deadline at a moment.
    pub(crate) const fn at(moment: Instant) -> Self {
        Self(moment)
    }
}

/// Why a collective call failed. After any error the group is broken: the caller drops it and
/// forms a new one with the next epoch.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GroupError {
    /// Nothing came from a rank in time.
    #[error("rank {rank} did not answer within {} ms", .waited.as_millis())]
    Timeout {
        /// Who was waited for.
        rank: u32,
        /// How long.
        waited: Duration,
    },
    /// A rank's connection ended.
    #[error("rank {rank} is gone: {reason}")]
    Lost {
        /// Who.
        rank: u32,
        /// What was seen.
        reason: String,
    },
    /// A rank sent something else than this step needs: the ranks no longer agree.
    #[error("rank {rank} is out of step: expected {expected}, found {found}")]
    OutOfStep {
        /// Who.
        rank: u32,
        /// Operation, sequence number and size that were expected.
        expected: String,
        /// What came.
        found: String,
    },
    /// The group was ended on purpose, here or by another rank.
    #[error("the group was aborted: {0}")]
    Aborted(String),
}

/// The ranks that serve one model together.
pub trait Group: Send + Sync {
    /// This rank's index, `0..size`.
    fn rank(&self) -> u32;

    /// Number of ranks.
    fn size(&self) -> u32;

    /// Generation of this group; frames of an older one are dropped.
    fn epoch(&self) -> u64;

    /// Replaces `values` by the sum over ranks, added in rank order (rank 0 first), so that
    /// every rank holds the same bits whatever the timing.
    fn all_reduce_sum(&self, values: &mut [f32], deadline: Deadline) -> Result<(), GroupError>;

    /// Every rank's bytes in rank order; lengths may differ between ranks.
    fn all_gather(&self, mine: &[u8], deadline: Deadline) -> Result<Vec<Vec<u8>>, GroupError>;

    /// Rank `root`'s bytes on every rank; the others' `bytes` are replaced.
    fn broadcast(
        &self,
        root: u32,
        bytes: &mut Vec<u8>,
        deadline: Deadline,
    ) -> Result<(), GroupError>;

    /// Returns once every rank has called it.
    fn barrier(&self, deadline: Deadline) -> Result<(), GroupError>;

    /// As [`Group::all_reduce_sum`], over the ranks `members` alone, of which this is one. The
    /// parts of a group are fixed: a rank always sums among the same.
    fn sum_among(
        &self,
        members: Range<u32>,
        values: &mut [f32],
        deadline: Deadline,
    ) -> Result<(), GroupError> {
        let _ = (members, values, deadline);
        Err(without_parts())
    }

    /// Gives bytes to rank `to`, once it is there to [`Group::receive`] them: nothing is sent
    /// ahead of a rank that is still at work on what it got before.
    fn send(&self, to: u32, bytes: &[u8], deadline: Deadline) -> Result<(), GroupError> {
        let _ = (to, bytes, deadline);
        Err(without_parts())
    }

    /// Takes what rank `from` gives; `bytes` are replaced.
    fn receive(
        &self,
        from: u32,
        bytes: &mut Vec<u8>,
        deadline: Deadline,
    ) -> Result<(), GroupError> {
        let _ = (from, bytes, deadline);
        Err(without_parts())
    }

    /// Tells the other ranks that this one is at work, at most once a second: one that waits for
    /// it then waits as long as it would from now on. Without it, work between two calls would
    /// have to be shorter than every deadline.
    fn at_work(&self) -> Result<(), GroupError> {
        Ok(())
    }

    /// Ends the group: calls in progress and later ones fail with [`GroupError::Aborted`], here
    /// and, as far as it can be reached, on the other ranks.
    fn abort(&self, reason: &str);
}

/// What a group says that knows only calls of all ranks.
fn without_parts() -> GroupError {
    GroupError::Aborted("this kind of group has no parts".to_owned())
}
