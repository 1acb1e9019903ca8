//! Goes on with a push to a node whose connection broke: what the node has stored is not sent again.

use std::{
    thread,
    time::{Duration, Instant},
};

use super::{
    NodeError, NodeReport, PushEvent, PushMode, PushObserver, PushOptions, Target, Traffic,
    open::{OpenSet, Package},
    relay::Relays,
    send,
};
use crate::{limit::Limit, protocol::SendError};

/// How a push goes on after a connection broke. A node that was not reached at all is not tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retries {
    /// Attempts in a row without a chunk that the node did not have before, the first not counted.
    pub attempts: u32,
    /// Pause before the first; it doubles from one to the next.
    pub first_pause: Duration,
    /// Time without such a chunk after which no further attempt begins.
    pub deadline: Duration,
}

impl Retries {
    /// None: whatever breaks is reported.
    pub const NONE: Self =
        Self { attempts: 0, first_pause: Duration::ZERO, deadline: Duration::ZERO };

    /// Pauses of half a second to four.
    pub const USUAL: Self = Self {
        attempts: 4,
        first_pause: Duration::from_millis(500),
        deadline: Duration::from_mins(2),
    };

    /// The pause before an attempt, counted from 0.
    fn pause(&self, attempt: u32) -> Duration {
        self.first_pause.saturating_mul(1_u32.checked_shl(attempt).unwrap_or(u32::MAX))
    }
}

/// The push of one package.
#[derive(Clone, Copy)]
pub(super) struct NodeJob<'a> {
    pub(super) set: &'a OpenSet,
    pub(super) package: &'a Package,
    pub(super) target: &'a Target,
    /// Position among the targets.
    pub(super) number: usize,
    pub(super) options: &'a PushOptions,
    pub(super) limit: Option<&'a Limit>,
    pub(super) relays: &'a Relays<'a>,
    pub(super) observer: PushObserver<'a>,
}

/// Pushes one package, as often as it takes.
pub(super) fn send_with_retries(job: &NodeJob) -> NodeReport {
    let NodeJob { target, options, observer, .. } = *job;
    let start = Instant::now();
    let mut total: Option<Traffic> = None;
    let (mut best_bytes, mut since, mut attempt) = (u64::MAX, start, 0);
    let mut is_first = true;
    loop {
        let mut report = send::send(job, is_first);
        if report.error.is_some() {
            job.relays.lost(job.number);
            is_first = false;
        }
        let now = report.traffic;
        // Nothing was answered unless the node said how much room it has.
        let is_offered = now.free_bytes > 0;
        if is_offered && now.missing_bytes < best_bytes {
            (best_bytes, since, attempt) = (now.missing_bytes, Instant::now(), 0);
        }
        let traffic = total.map_or(now, |total| total.and(&now, is_offered));
        let seconds = start.elapsed().as_secs_f64();
        report.traffic = Traffic { seconds, ..traffic };
        // A node that never answered is most often a wrong address.
        let is_known = best_bytes < u64::MAX;
        let retries = options.retries;
        let goes_on = is_known
            && matches!(options.mode, PushMode::Send(_))
            && report.error.as_ref().is_some_and(is_passing)
            && attempt < retries.attempts
            && since.elapsed() < retries.deadline;
        let Some(error) = report.error.as_ref().filter(|_| goes_on) else {
            if let Some(error) = &report.error {
                observer(&PushEvent::Failed { rank: target.rank, error });
            }
            return report;
        };
        let pause = retries.pause(attempt);
        observer(&PushEvent::Retrying { rank: target.rank, error, pause });
        thread::sleep(pause);
        attempt += 1;
        total = Some(traffic);
    }
}

/// Whether an error may be another one, or none, on a new connection.
fn is_passing(error: &NodeError) -> bool {
    matches!(
        error,
        NodeError::Connect(_)
            | NodeError::Wire(_)
            | NodeError::Send(SendError::NotJoined(_) | SendError::ChunkRefused { .. })
    )
}

impl Traffic {
    /// What this attempt and the next come to.
    fn and(self, next: &Self, is_offered: bool) -> Self {
        Self {
            sent_bytes: self.sent_bytes + next.sent_bytes,
            sent_chunks: self.sent_chunks + next.sent_chunks,
            relayed_bytes: self.relayed_bytes + next.relayed_bytes,
            relayed_chunks: self.relayed_chunks + next.relayed_chunks,
            streams: self.streams.max(next.streams),
            free_bytes: if is_offered { next.free_bytes } else { self.free_bytes },
            ..self
        }
    }
}
