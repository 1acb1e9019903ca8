//! The bounded queue of commands for the engine's thread. Requests beyond the bound are refused one
//! by one; a front that floods the queue is disconnected.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc::{
            Receiver, RecvError, RecvTimeoutError, SyncSender, TryRecvError, TrySendError,
            sync_channel,
        },
    },
    time::Duration,
};

use shardpack_engine_api::{GenerateRequest, RequestId};

use crate::message::GroupPlan;

/// Most requests that wait between two steps; the engine takes all of them at the next. A server
/// admits fewer at a time (its queue is bounded), and a step is over within a second or two.
pub(super) const MAX_WAITING_REQUESTS: usize = 1024;

/// Most commands of all kinds: every waiting request may have been cancelled and the group formed
/// anew in between.
const MAX_WAITING: usize = 4 * MAX_WAITING_REQUESTS;

/// A command for the worker.
pub(super) enum Command {
    Form(GroupPlan),
    Submit(RequestId, Box<GenerateRequest>),
    Cancel(RequestId),
}

/// Why a command is rejected.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Rejected {
    /// Too many requests wait; this one is dropped.
    Request(RequestId),
    /// Too many commands of all kinds wait.
    Flood,
}

/// The sending end.
pub(super) struct CommandSender {
    sender: SyncSender<Command>,
    requests: Arc<AtomicUsize>,
}

/// The receiving end.
pub(super) struct CommandReceiver {
    receiver: Receiver<Command>,
    requests: Arc<AtomicUsize>,
}

pub(super) fn channel() -> (CommandSender, CommandReceiver) {
    let (sender, receiver) = sync_channel(MAX_WAITING);
    let requests = Arc::<AtomicUsize>::default();
    (
        CommandSender { sender, requests: Arc::clone(&requests) },
        CommandReceiver { receiver, requests },
    )
}

impl CommandSender {
    /// Queues a command; never waits. A worker that is gone reports it by an event.
    pub(super) fn send(&self, command: Command) -> Result<(), Rejected> {
        let request = match &command {
            Command::Submit(id, _) => Some(*id),
            _ => None,
        };
        if let Some(id) = request
            && self.requests.fetch_add(1, Ordering::SeqCst) >= MAX_WAITING_REQUESTS
        {
            self.requests.fetch_sub(1, Ordering::SeqCst);
            return Err(Rejected::Request(id));
        }
        match self.sender.try_send(command) {
            Ok(()) | Err(TrySendError::Disconnected(_)) => Ok(()),
            Err(TrySendError::Full(_)) => Err(Rejected::Flood),
        }
    }
}

impl CommandReceiver {
    fn taken(&self, command: Command) -> Command {
        if matches!(command, Command::Submit(..)) {
            self.requests.fetch_sub(1, Ordering::SeqCst);
        }
        command
    }

    /// See [`Receiver::recv`].
    pub(super) fn recv(&self) -> Result<Command, RecvError> {
        self.receiver.recv().map(|command| self.taken(command))
    }

    /// See [`Receiver::try_recv`].
    pub(super) fn try_recv(&self) -> Result<Command, TryRecvError> {
        self.receiver.try_recv().map(|command| self.taken(command))
    }

    /// See [`Receiver::recv_timeout`].
    pub(super) fn recv_timeout(&self, timeout: Duration) -> Result<Command, RecvTimeoutError> {
        self.receiver.recv_timeout(timeout).map(|command| self.taken(command))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardpack_engine_api::TokenId;

    fn submit(id: u64) -> Command {
        let request = GenerateRequest::greedy(vec![TokenId(1)], 1);
        Command::Submit(RequestId(id), Box::new(request))
    }

    #[test]
    fn requests_that_wait_are_bounded_and_counted_out_again() {
        let (sender, commands) = channel();
        for id in 0..MAX_WAITING_REQUESTS as u64 {
            assert_eq!(sender.send(submit(id)), Ok(()));
        }
        assert_eq!(sender.send(submit(9999)), Err(Rejected::Request(RequestId(9999))));
        // What ends requests goes through all the same.
        assert_eq!(sender.send(Command::Cancel(RequestId(3))), Ok(()));
        assert!(matches!(commands.recv(), Ok(Command::Submit(RequestId(0), _))));
        assert_eq!(sender.send(submit(10_000)), Ok(()));
        assert!(sender.send(submit(10_001)).is_err());
        while commands.try_recv().is_ok() {}
        assert_eq!(commands.requests.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn a_flood_is_noticed() {
        let (sender, _commands) = channel();
        let given = (0..).take_while(|_| sender.send(Command::Cancel(RequestId(1))).is_ok());
        assert_eq!(given.count(), MAX_WAITING);
        assert_eq!(sender.send(Command::Cancel(RequestId(1))), Err(Rejected::Flood));
    }
}
