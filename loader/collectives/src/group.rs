//! The operations of a rank group. Every call is collective: all ranks make the same calls in the
//! same order with the same sizes, and every call ends by its deadline.
//!
//! With pipeline stages a group is divided into subgroups: each stage has its own all-reduce, and
//! hidden states are sent from rank to rank. Only the ranks that such a call names make it, in the
//! same order on both sides.

use std::{
    ops::Range,
    time::{Duration, Instant},
};

use half::bf16;

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
    /// A rank sent nothing before the deadline.
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
    /// The link to a rank lost or damaged something; the rank itself may be well.
    #[error("the link to rank {rank} failed: {reason}")]
    Link {
        /// Who is at its other end.
        rank: u32,
        /// What was seen.
        reason: String,
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

    /// Deterministic all-reduce: replaces `values` by the sum over ranks. Partial sums are added
    /// in rank order (rank 0 first), so every rank holds the same bits whatever the timing.
    fn all_reduce_sum(&self, values: &mut [f32], deadline: Deadline) -> Result<(), GroupError>;

    /// All-gather: every rank's bytes in rank order; lengths may differ between ranks.
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

    /// All-reduce over the subgroup `members`, which contains this rank. Subgroups are fixed: a
    /// rank always calls this with the same members.
    fn sum_among(
        &self,
        members: Range<u32>,
        values: &mut [f32],
        deadline: Deadline,
    ) -> Result<(), GroupError> {
        let _ = (members, values, deadline);
        Err(no_subgroups())
    }

    /// The same for values in bfloat16: half the bytes between ranks. Partial
    /// sums are added in f32 in rank order, and rounded once.
    fn sum_bf16_among(
        &self,
        members: Range<u32>,
        values: &mut [bf16],
        deadline: Deadline,
    ) -> Result<(), GroupError> {
        let _ = (members, values, deadline);
        Err(no_subgroups())
    }

    /// Sends bytes to rank `to`, once that rank has called [`Group::receive`]: a rank that is still
    /// computing is not sent anything ahead of time.
    fn send(&self, to: u32, bytes: &[u8], deadline: Deadline) -> Result<(), GroupError> {
        let _ = (to, bytes, deadline);
        Err(no_subgroups())
    }

    /// Receives what rank `from` sends; `bytes` are replaced.
    fn receive(
        &self,
        from: u32,
        bytes: &mut Vec<u8>,
        deadline: Deadline,
    ) -> Result<(), GroupError> {
        let _ = (from, bytes, deadline);
        Err(no_subgroups())
    }

    /// Sends a keep-alive to the other ranks, at most one a second: a rank that waits for this one
    /// restarts its timeout when it receives it. Without keep-alives, the work between two calls
    /// would have to be shorter than every deadline.
    fn keep_alive(&self) -> Result<(), GroupError> {
        Ok(())
    }

    /// Ends the group: calls in progress and later ones fail with [`GroupError::Aborted`], here
    /// and, as far as it can be reached, on the other ranks.
    fn abort(&self, reason: &str);
}

/// The error of a group that implements only the collectives of all ranks.
fn no_subgroups() -> GroupError {
    GroupError::Aborted("this group does not support subgroups, send and receive".to_owned())
}
