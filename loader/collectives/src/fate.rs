//! How a group ends: the first cause wins, is told to every other rank, and wakes whoever waits.

use std::{
    sync::{
        Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use crate::{
    frame::Notice,
    group::GroupError,
    link::{Farewell, Link},
};

/// How long the computing thread, having seen a connection close, waits for the watching one to
/// say why. Both closed at the same moment, so more than a moment means that nobody knows.
const GRACE: Duration = Duration::from_millis(250);

/// What the computing thread, the watching threads and whoever aborts have in common.
pub(crate) struct Fate {
    rank: u32,
    epoch: u64,
    /// By rank; none for this rank itself.
    pub(crate) links: Vec<Option<Box<dyn Link>>>,
    cause: Mutex<Option<GroupError>>,
    sealed: AtomicBool,
    known: Condvar,
    /// Held while the others are told: whoever then closes the links waits, since a link that
    /// closes without a word puts the blame on this rank.
    telling: Mutex<()>,
}

impl Fate {
    pub(crate) fn new(rank: u32, epoch: u64, links: Vec<Option<Box<dyn Link>>>) -> Self {
        let (cause, known) = (Mutex::new(None), Condvar::new());
        let (sealed, telling) = (AtomicBool::new(false), Mutex::new(()));
        Self { rank, epoch, links, cause, sealed, known, telling }
    }

    /// Why the group has ended, if it has.
    pub(crate) fn cause(&self) -> Option<GroupError> {
        if !self.sealed.load(Ordering::Acquire) {
            return None;
        }
        self.cause.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Why the group has ended, where something is known to have happened just now.
    pub(crate) fn cause_soon(&self) -> Option<GroupError> {
        let cause = self.cause.lock().unwrap_or_else(PoisonError::into_inner);
        let (cause, _) = self
            .known
            .wait_timeout_while(cause, GRACE, |cause| cause.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        cause.clone()
    }

    /// Ends the group, unless it has ended: tells the other ranks and closes the links. Returns
    /// the first cause.
    pub(crate) fn end(&self, error: GroupError) -> GroupError {
        let notice = Notice { blamed: blamed(&error), reason: reason(&error) };
        let _telling = self.telling.lock().unwrap_or_else(PoisonError::into_inner);
        let (first, cause) = self.seal(error);
        if first {
            let frame = notice.frame(self.rank, self.epoch);
            self.links.iter().flatten().for_each(|link| link.abort(&frame));
        }
        cause
    }

    /// Ends the group without a word: the owner lets go of it.
    pub(crate) fn close(&self) {
        let _telling = self.telling.lock().unwrap_or_else(PoisonError::into_inner);
        self.seal(GroupError::Aborted("this rank left the group".to_owned()));
        self.links.iter().flatten().for_each(|link| link.close());
    }

    fn seal(&self, error: GroupError) -> (bool, GroupError) {
        let mut cause = self.cause.lock().unwrap_or_else(PoisonError::into_inner);
        let first = cause.is_none();
        let cause = cause.get_or_insert(error).clone();
        self.sealed.store(true, Ordering::Release);
        self.known.notify_all();
        (first, cause)
    }

    /// Waits for the end of the link to `rank`, and ends the group with it.
    pub(crate) fn watch(&self, rank: u32, link: &dyn Link) {
        let error = loop {
            match link.watch() {
                Farewell::Notice { epoch, .. } if epoch < self.epoch => {}
                Farewell::Notice { notice, .. } => break self.told(rank, notice),
                Farewell::Closed(reason) => break GroupError::Lost { rank, reason },
            }
        };
        self.end(error);
    }

    fn told(&self, by: u32, notice: Notice) -> GroupError {
        let Notice { blamed, reason } = notice;
        match blamed {
            Some(rank) if rank == self.rank => {
                GroupError::Aborted(format!("rank {by} gave this rank up: {reason}"))
            }
            Some(rank) => GroupError::Lost { rank, reason },
            None => GroupError::Aborted(reason),
        }
    }
}

fn blamed(error: &GroupError) -> Option<u32> {
    match error {
        GroupError::Timeout { rank, .. }
        | GroupError::Lost { rank, .. }
        | GroupError::OutOfStep { rank, .. } => Some(*rank),
        GroupError::Aborted(_) => None,
    }
}

/// What the other ranks are told; the blamed rank stands beside it.
fn reason(error: &GroupError) -> String {
    match error {
        GroupError::Timeout { waited, .. } => {
            format!("it did not answer within {} ms", waited.as_millis())
        }
        GroupError::Lost { reason, .. } | GroupError::Aborted(reason) => reason.clone(),
        GroupError::OutOfStep { expected, found, .. } => {
            format!("it is out of step: expected {expected}, found {found}")
        }
    }
}
