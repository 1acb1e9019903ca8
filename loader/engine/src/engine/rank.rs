//! One rank's engine, as the loop that drives it sees it. Who talks to the front, and how the
//! group came to be, is not known here.

use std::time::Duration;

use shardpack_collectives::{Group, GroupError};
use shardpack_engine_api::{Event, GenerateRequest, RequestId};

/// How often an idle leader sends its followers a heartbeat.
pub const HEARTBEAT: Duration = Duration::from_secs(1);

/// How long a follower waits for the leader's next plan or heartbeat. Several heartbeats, so
/// that a busy machine is not taken for a dead one.
pub const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(5);

/// The outcome of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepOutcome {
    /// Some request went on; there may be more to do.
    Worked,
    /// Requests wait for something other than steps, such as a constraint that is compiled; nothing was
    /// sent to the followers. There may be a step soon.
    Waiting,
    /// There is no request; nothing was sent to the followers.
    Idle,
}

/// One rank's part of the engine; rank 0 leads and the others follow. One thread calls it.
///
/// A request is over when its [`Event::Finished`] or [`Event::Failed`] was given to `events`.
/// After a [`GroupError`] the group is gone: [`RankEngine::reset`] is called, then the same
/// engine gets another group of a higher epoch.
pub trait RankEngine: Send {
    /// Leader: takes a request; an invalid one fails by an event of the next step.
    fn submit(&mut self, id: RequestId, request: GenerateRequest);

    /// Leader: ends a request within one step; unknown ids are ignored.
    fn cancel(&mut self, id: RequestId);

    /// Leader: one step for all active requests, with its plan broadcast to the followers.
    fn lead(
        &mut self,
        group: &dyn Group,
        events: &mut dyn FnMut(Event),
    ) -> Result<StepOutcome, GroupError>;

    /// Leader, with nothing to do: sends the followers a heartbeat.
    fn heartbeat(&mut self, group: &dyn Group) -> Result<(), GroupError>;

    /// Follower: waits at most [`HEARTBEAT_TIMEOUT`] for one plan or heartbeat and carries it out.
    fn follow(&mut self, group: &dyn Group) -> Result<(), GroupError>;

    /// Leader: draft tokens that were run since the engine began, and those that were accepted.
    fn drafts(&self) -> [u64; 2] {
        [0; 2]
    }

    /// What the device said when it failed in a step: this process can compute no more, and another
    /// one is to take its place.
    fn device_failure(&self) -> Option<&str> {
        None
    }

    /// The group is gone: drops every request without an event, since the front has already
    /// failed them. Weights and prefix caches stay.
    fn reset(&mut self);
}
