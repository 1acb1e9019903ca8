//! What the front wants of the engine's thread, until that has time for it. Few things wait at a
//! time: a front that asks for more is told so, request by request, and one that does not stop is
//! no front.

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

use crate::announce::Announcement;

/// Most requests that wait between two steps; the engine takes all of them at the next. A server
/// admits fewer at a time (its queue is bounded), and a step is over within a second or two.
pub(super) const MAX_WAITING_REQUESTS: usize = 1024;

/// Most orders of all kinds: every waiting request may have been cancelled and the group formed
/// anew in between.
const MAX_WAITING: usize = 4 * MAX_WAITING_REQUESTS;

/// What the worker is told to do.
pub(super) enum Order {
    Form { epoch: u64, peers: Vec<Announcement> },
    Submit(RequestId, Box<GenerateRequest>),
    Cancel(RequestId),
}

/// Why an order is not passed on.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NotTaken {
    /// Too many requests wait; this one is forgotten.
    Request(RequestId),
    /// Too much of everything.
    Flood,
}

/// The giving end.
pub(super) struct Orderer {
    sender: SyncSender<Order>,
    requests: Arc<AtomicUsize>,
}

/// The receiving end.
pub(super) struct Orders {
    receiver: Receiver<Order>,
    requests: Arc<AtomicUsize>,
}

pub(super) fn orders() -> (Orderer, Orders) {
    let (sender, receiver) = sync_channel(MAX_WAITING);
    let requests = Arc::<AtomicUsize>::default();
    (Orderer { sender, requests: Arc::clone(&requests) }, Orders { receiver, requests })
}

impl Orderer {
    /// Passes an order on; never waits. A worker that is gone has left its note elsewhere.
    pub(super) fn give(&self, order: Order) -> Result<(), NotTaken> {
        let request = match &order {
            Order::Submit(id, _) => Some(*id),
            _ => None,
        };
        if let Some(id) = request
            && self.requests.fetch_add(1, Ordering::SeqCst) >= MAX_WAITING_REQUESTS
        {
            self.requests.fetch_sub(1, Ordering::SeqCst);
            return Err(NotTaken::Request(id));
        }
        match self.sender.try_send(order) {
            Ok(()) | Err(TrySendError::Disconnected(_)) => Ok(()),
            Err(TrySendError::Full(_)) => Err(NotTaken::Flood),
        }
    }
}

impl Orders {
    fn taken(&self, order: Order) -> Order {
        if matches!(order, Order::Submit(..)) {
            self.requests.fetch_sub(1, Ordering::SeqCst);
        }
        order
    }

    /// See [`Receiver::recv`].
    pub(super) fn recv(&self) -> Result<Order, RecvError> {
        self.receiver.recv().map(|order| self.taken(order))
    }

    /// See [`Receiver::try_recv`].
    pub(super) fn try_recv(&self) -> Result<Order, TryRecvError> {
        self.receiver.try_recv().map(|order| self.taken(order))
    }

    /// See [`Receiver::recv_timeout`].
    pub(super) fn recv_timeout(&self, timeout: Duration) -> Result<Order, RecvTimeoutError> {
        self.receiver.recv_timeout(timeout).map(|order| self.taken(order))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardpack_engine_api::TokenId;

    fn submit(id: u64) -> Order {
        let request = GenerateRequest::greedy(vec![TokenId(1)], 1);
        Order::Submit(RequestId(id), Box::new(request))
    }

    #[test]
    fn requests_that_wait_are_bounded_and_counted_out_again() {
        let (orderer, orders) = orders();
        for id in 0..MAX_WAITING_REQUESTS as u64 {
            assert_eq!(orderer.give(submit(id)), Ok(()));
        }
        assert_eq!(orderer.give(submit(9999)), Err(NotTaken::Request(RequestId(9999))));
        // What ends requests goes through all the same.
        assert_eq!(orderer.give(Order::Cancel(RequestId(3))), Ok(()));
        assert!(matches!(orders.recv(), Ok(Order::Submit(RequestId(0), _))));
        assert_eq!(orderer.give(submit(10_000)), Ok(()));
        assert!(orderer.give(submit(10_001)).is_err());
        while orders.try_recv().is_ok() {}
        assert_eq!(orders.requests.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn a_flood_is_noticed() {
        let (orderer, _orders) = orders();
        let given = (0..).take_while(|_| orderer.give(Order::Cancel(RequestId(1))).is_ok());
        assert_eq!(given.count(), MAX_WAITING);
        assert_eq!(orderer.give(Order::Cancel(RequestId(1))), Err(NotTaken::Flood));
    }
}
