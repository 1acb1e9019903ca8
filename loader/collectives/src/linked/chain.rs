//! All-reduce along a chain of neighbours, for machines that are cabled in a ring.
//!
//! The vector goes in segments. Partial sums of a segment go up, from the first rank to the last, and
//! each adds its values: so they are added in rank order, and have the bits of every other way. The
//! sums go down again, from the last rank to the first. Both directions of a cable are in use at the
//! same time, and each carries the vector once, where the two halves of a usual ring all-reduce carry
//! `2 (N-1) / N` of it in one direction. The ring's last cable, between the last rank and the first,
//! carries nothing. No message passes between ranks that are not neighbours.
//!
//! All ranks count ticks. Segment `k` goes up from the member of index `i` at tick `k + i`, and down
//! from it at tick `k + 2 (N-1) - i`, in each case the tick after it came. A tick is one exchange, in
//! which a rank sends what came in the tick before: so no two ranks wait for each other.

use std::ops::Range;

use super::{
    LinkedGroup,
    exchange::{Outgoing, Scratch},
};
use crate::{
    frame::{HEADER_BYTES, Op},
    group::{Deadline, GroupError},
    sum::{self, Element, PARTIAL_BYTES},
};

/// Elements of a segment, 64 KiB of partial sums: they fit a socket's buffer and the cache, and a
/// latency of some microseconds is short beside them.
pub(super) const SEGMENT_LEN: usize = 16 << 10;

/// Ticks of an all-reduce along `members` ranks.
pub(super) const fn ticks(members: usize, segments: usize) -> usize {
    segments + 2 * members - 3
}

/// What one rank does in one tick, by number of the segment.
struct Tick {
    sent_up: Option<usize>,
    taken_up: Option<usize>,
    sent_down: Option<usize>,
    taken_down: Option<usize>,
}

impl Tick {
    fn new(tick: usize, index: usize, members: usize, segments: usize) -> Self {
        let (last, down) = (members - 1, 2 * (members - 1));
        let segment = |start: usize| tick.checked_sub(start).filter(|it| *it < segments);
        Self {
            sent_up: (index < last).then(|| segment(index)).flatten(),
            taken_up: (index > 0).then(|| segment(index - 1)).flatten(),
            sent_down: (index > 0).then(|| segment(down - index)).flatten(),
            taken_down: (index < last).then(|| segment(down - (index + 1))).flatten(),
        }
    }
}

impl LinkedGroup {
    pub(super) fn sum_chain<T: Element>(
        &self,
        scratch: &mut Scratch,
        members: &Range<u32>,
        values: &mut [T],
        deadline: Deadline,
    ) -> Result<(), GroupError> {
        let (scope, size) = (self.scope(members), members.len());
        let index = (self.rank - members.start) as usize;
        let (below, above) = (self.rank.wrapping_sub(1), self.rank + 1);
        let (len, segments) = (values.len(), values.len().div_ceil(SEGMENT_LEN));
        let range = |segment: usize| segment * SEGMENT_LEN..((segment + 1) * SEGMENT_LEN).min(len);
        for tick in 0..ticks(size, segments) {
            let exchange = scratch.begin(Op::SumChain, scope, deadline);
            let Tick { sent_up, taken_up, sent_down, taken_down } =
                Tick::new(tick, index, size, segments);
            let Scratch { outgoing, incoming, .. } = &mut *scratch;
            let [up, down, ..] = outgoing.as_mut_slice() else {
                unreachable!("a chain has at least two ranks, and a frame for each")
            };
            let mut sent = Vec::with_capacity(2);
            if let Some(segment) = sent_up {
                let values = &values[range(segment)];
                let partial = self.frame(exchange, up, values.len() * PARTIAL_BYTES);
                if index == 0 {
                    sum::start_partial(partial, values);
                } else {
                    let before = &incoming[below as usize][HEADER_BYTES..];
                    sum::extend_partial(partial, before, values);
                }
                sent.push(Outgoing { to: above, frame: up.as_slice() });
            }
            if let Some(segment) = sent_down {
                let values = &values[range(segment)];
                T::store(self.frame(exchange, down, values.len() * T::BYTES), values);
                sent.push(Outgoing { to: below, frame: down.as_slice() });
            }
            let senders = [taken_up.map(|_| below), taken_down.map(|_| above)];
            let size_of = |from| {
                let (segment, bytes) =
                    if from == below { (taken_up, PARTIAL_BYTES) } else { (taken_down, T::BYTES) };
                segment.map(|segment| range(segment).len() * bytes)
            };
            self.exchange(exchange, &sent, incoming, senders.into_iter().flatten(), size_of)?;
            if let Some(segment) = taken_up.filter(|_| index == size - 1) {
                let before = &incoming[below as usize][HEADER_BYTES..];
                sum::finish_partial(&mut values[range(segment)], before);
            }
            if let Some(segment) = taken_down {
                T::load(&mut values[range(segment)], &incoming[above as usize][HEADER_BYTES..]);
            }
        }
        Ok(())
    }
}
