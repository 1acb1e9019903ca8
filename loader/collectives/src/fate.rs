//! How a group ends: the first cause wins, is sent to every other rank, and wakes every waiting
//! thread.

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
    link::{Link, LinkEnd},
};

/// After a data connection closes, the computing thread waits this long for the watching thread to
/// receive the reason. Both connections close at the same moment, so a short wait is enough.
const GRACE: Duration = Duration::from_millis(250);

/// State shared by the computing thread, the watching threads and callers of abort.
pub(crate) struct Fate {
    rank: u32,
    epoch: u64,
    /// By rank; none for this rank itself.
    pub(crate) links: Vec<Option<Box<dyn Link>>>,
    cause: Mutex<Option<GroupError>>,
    sealed: AtomicBool,
    known: Condvar,
    /// Held while the other ranks are notified, so that the links are closed only after that: a link
    /// that closes without a notice blames this rank.
    telling: Mutex<()>,
}

/// The result of ending a group.
struct Sealed {
    /// Whether this call ended it.
    is_first: bool,
    /// The first cause.
    cause: GroupError,
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

    /// Why the group has ended; waits up to [`GRACE`] for the cause.
    pub(crate) fn cause_soon(&self) -> Option<GroupError> {
        let cause = self.cause.lock().unwrap_or_else(PoisonError::into_inner);
        let (cause, _) = self
            .known
            .wait_timeout_while(cause, GRACE, |cause| cause.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        cause.clone()
    }

    /// Ends the group, unless it has ended: notifies the other ranks and closes the links. Returns
    /// the first cause.
    pub(crate) fn end(&self, error: GroupError) -> GroupError {
        let notice = Notice { blamed: blamed(&error), reason: reason(&error) };
        let _telling = self.telling.lock().unwrap_or_else(PoisonError::into_inner);
        let Sealed { is_first, cause } = self.seal(error);
        if is_first {
            let frame = notice.frame(self.rank, self.epoch);
            self.links.iter().flatten().for_each(|link| link.abort(&frame));
        }
        cause
    }

    /// Ends the group without a notice, when its owner drops it.
    pub(crate) fn close(&self) {
        let _telling = self.telling.lock().unwrap_or_else(PoisonError::into_inner);
        self.seal(GroupError::Aborted("this rank left the group".to_owned()));
        self.links.iter().flatten().for_each(|link| link.close());
    }

    fn seal(&self, error: GroupError) -> Sealed {
        let mut cause = self.cause.lock().unwrap_or_else(PoisonError::into_inner);
        let is_first = cause.is_none();
        let cause = cause.get_or_insert(error).clone();
        self.sealed.store(true, Ordering::Release);
        self.known.notify_all();
        Sealed { is_first, cause }
    }

    /// Waits for the end of the link to `rank`, and ends the group with it.
    pub(crate) fn watch(&self, rank: u32, link: &dyn Link) {
        let error = loop {
            match link.watch() {
                LinkEnd::Notice { epoch, .. } if epoch < self.epoch => {}
                LinkEnd::Notice { notice, .. } => break self.error_of(rank, notice),
                LinkEnd::Closed(reason) => break GroupError::Lost { rank, reason },
            }
        };
        self.end(error);
    }

    fn error_of(&self, by: u32, notice: Notice) -> GroupError {
        let Notice { blamed, reason } = notice;
        match blamed {
            Some(rank) if rank == self.rank => {
                GroupError::Aborted(format!("rank {by} reported this rank as lost: {reason}"))
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
        | GroupError::Link { rank, .. }
        | GroupError::OutOfStep { rank, .. } => Some(*rank),
        GroupError::Aborted(_) => None,
    }
}

/// The reason sent to the other ranks, next to the blamed rank.
fn reason(error: &GroupError) -> String {
    match error {
        GroupError::Timeout { waited, .. } => {
            format!("it did not answer within {} ms", waited.as_millis())
        }
        GroupError::Lost { reason, .. } | GroupError::Aborted(reason) => reason.clone(),
        GroupError::Link { reason, .. } => format!("the link to it failed: {reason}"),
        GroupError::OutOfStep { expected, found, .. } => {
            format!("it is out of step: expected {expected}, found {found}")
        }
    }
}
