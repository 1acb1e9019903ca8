//! The one decorator of [`Group`]: forwards every call to another group, each inside a hook that
//! can count, time or delay it. A method added to [`Group`] is forwarded here and nowhere else.

use std::ops::{Deref, Range};

use half::bf16;

use crate::group::{Deadline, Group, GroupError};

/// The operation of a [`GroupCall`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupOp {
    /// [`Group::all_reduce_sum`] and [`Group::sum_among`].
    AllReduce,
    /// [`Group::all_gather`].
    AllGather,
    /// [`Group::broadcast`].
    Broadcast,
    /// [`Group::barrier`].
    Barrier,
    /// [`Group::send`].
    Send,
    /// [`Group::receive`].
    Receive,
}

/// A collective call as an observer sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupCall {
    /// The operation.
    pub op: GroupOp,
    /// Size of this rank's own data in bytes; 0 for a barrier and for what is received.
    pub size_bytes: usize,
}

/// What happens around every collective call of an [`ObservedGroup`].
pub trait GroupObserver: Send + Sync {
    /// Runs the call, exactly once, and returns its result.
    fn observe<T>(&self, call: GroupCall, run: impl FnOnce() -> T) -> T;
}

/// A group that passes every call to another one, through an observer.
#[derive(Debug)]
pub struct ObservedGroup<G, O> {
    inner: G,
    observer: O,
}

impl<G, O: GroupObserver> ObservedGroup<G, O> {
    /// Decorates `inner`, a reference or an `Arc`, with a new observer.
    #[must_use]
    pub fn new(inner: G) -> Self
    where
        O: Default,
    {
        Self::with_observer(inner, O::default())
    }

    /// Decorates `inner`, a reference or an `Arc`.
    #[must_use]
    pub const fn with_observer(inner: G, observer: O) -> Self {
        Self { inner, observer }
    }

    /// The observer.
    #[must_use]
    pub const fn observer(&self) -> &O {
        &self.observer
    }

    fn observe<T>(&self, op: GroupOp, size_bytes: usize, run: impl FnOnce() -> T) -> T {
        self.observer.observe(GroupCall { op, size_bytes }, run)
    }
}

impl<G, O> Group for ObservedGroup<G, O>
where
    G: Deref + Send + Sync,
    G::Target: Group,
    O: GroupObserver,
{
    fn rank(&self) -> u32 {
        self.inner.rank()
    }

    fn size(&self) -> u32 {
        self.inner.size()
    }

    fn epoch(&self) -> u64 {
        self.inner.epoch()
    }

    fn all_reduce_sum(&self, values: &mut [f32], deadline: Deadline) -> Result<(), GroupError> {
        self.observe(GroupOp::AllReduce, size_of_val(values), || {
            self.inner.all_reduce_sum(values, deadline)
        })
    }

    fn all_gather(&self, mine: &[u8], deadline: Deadline) -> Result<Vec<Vec<u8>>, GroupError> {
        self.observe(GroupOp::AllGather, mine.len(), || self.inner.all_gather(mine, deadline))
    }

    fn broadcast(
        &self,
        root: u32,
        bytes: &mut Vec<u8>,
        deadline: Deadline,
    ) -> Result<(), GroupError> {
        self.observe(GroupOp::Broadcast, bytes.len(), || {
            self.inner.broadcast(root, bytes, deadline)
        })
    }

    fn barrier(&self, deadline: Deadline) -> Result<(), GroupError> {
        self.observe(GroupOp::Barrier, 0, || self.inner.barrier(deadline))
    }

    fn sum_among(
        &self,
        members: Range<u32>,
        values: &mut [f32],
        deadline: Deadline,
    ) -> Result<(), GroupError> {
        self.observe(GroupOp::AllReduce, size_of_val(values), || {
            self.inner.sum_among(members, values, deadline)
        })
    }

    fn sum_bf16_among(
        &self,
        members: Range<u32>,
        values: &mut [bf16],
        deadline: Deadline,
    ) -> Result<(), GroupError> {
        self.observe(GroupOp::AllReduce, size_of_val(values), || {
            self.inner.sum_bf16_among(members, values, deadline)
        })
    }

    fn send(&self, to: u32, bytes: &[u8], deadline: Deadline) -> Result<(), GroupError> {
        self.observe(GroupOp::Send, bytes.len(), || self.inner.send(to, bytes, deadline))
    }

    fn receive(
        &self,
        from: u32,
        bytes: &mut Vec<u8>,
        deadline: Deadline,
    ) -> Result<(), GroupError> {
        self.observe(GroupOp::Receive, 0, || self.inner.receive(from, bytes, deadline))
    }

    fn keep_alive(&self) -> Result<(), GroupError> {
        self.inner.keep_alive()
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{Arc, Mutex},
        time::Duration,
    };

    use super::*;
    use crate::linked::LinkedGroup;

    #[derive(Default)]
    struct Calls(Mutex<Vec<GroupCall>>);

    impl GroupObserver for Calls {
        fn observe<T>(&self, call: GroupCall, run: impl FnOnce() -> T) -> T {
            self.0.lock().unwrap().push(call);
            run()
        }
    }

    #[test]
    fn every_call_is_forwarded_once_through_the_observer() {
        let inner: Arc<dyn Group> = Arc::new(LinkedGroup::single(7));
        let group = ObservedGroup::<_, Calls>::new(inner);
        let deadline = Deadline::after(Duration::from_mins(10));
        assert_eq!((group.rank(), group.size(), group.epoch()), (0, 1, 7));
        let mut values = [1.5, 2.5];
        group.all_reduce_sum(&mut values, deadline).unwrap();
        group.sum_among(0..1, &mut values, deadline).unwrap();
        assert_eq!(group.all_gather(b"abc", deadline).unwrap(), [b"abc".to_vec()]);
        group.broadcast(0, &mut vec![1], deadline).unwrap();
        group.barrier(deadline).unwrap();
        group.keep_alive().unwrap();
        let call = |op, size_bytes| GroupCall { op, size_bytes };
        assert_eq!(
            *group.observer().0.lock().unwrap(),
            [
                call(GroupOp::AllReduce, 8),
                call(GroupOp::AllReduce, 8),
                call(GroupOp::AllGather, 3),
                call(GroupOp::Broadcast, 1),
                call(GroupOp::Barrier, 0),
            ]
        );
        group.abort("over");
        let ended = group.barrier(deadline).unwrap_err();
        assert_eq!(ended, GroupError::Aborted("over".to_owned()));
    }

    #[test]
    fn sending_and_receiving_are_forwarded_between_two_ranks() {
        let ranks = LinkedGroup::in_memory(2, 0).unwrap();
        let deadline = Deadline::after(Duration::from_mins(10));
        let [first, second] = [&ranks[0], &ranks[1]].map(ObservedGroup::<_, Calls>::new);
        std::thread::scope(|scope| {
            scope.spawn(|| first.send(1, b"hidden", deadline).unwrap());
            let mut bytes = Vec::new();
            second.receive(0, &mut bytes, deadline).unwrap();
            assert_eq!(bytes, b"hidden");
        });
        let op = |group: &ObservedGroup<&LinkedGroup, Calls>| {
            group.observer().0.lock().unwrap().iter().map(|it| it.op).collect::<Vec<_>>()
        };
        assert_eq!((op(&first), op(&second)), (vec![GroupOp::Send], vec![GroupOp::Receive]));
    }
}
