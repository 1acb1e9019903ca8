//! All-reduce by the ways that use every link.
//!
//! Directly: each rank sends its vector to every other one, one hop and the least latency. By
//! reduce-scatter and all-gather: each rank reduces one part of the vector and sends the result to the
//! others, two hops, and a rank sends `2 (N-1) / N` vectors instead of `N-1`.

use std::ops::Range;

use super::{
    LinkedGroup, PIECE_LEN,
    exchange::{Outgoing, Scratch},
    speeds::{Algorithm, Vector, choose},
};
use crate::{
    frame::{HEADER_BYTES, Op, Scope},
    group::{Deadline, Group as _, GroupError},
    sum::{self, Element},
};

impl LinkedGroup {
    pub(super) fn sum<T: Element>(
        &self,
        scratch: &mut Scratch,
        members: &Range<u32>,
        values: &mut [T],
        deadline: Deadline,
    ) -> Result<(), GroupError> {
        assert!(
            members.contains(&self.rank) && members.end <= self.size(),
            "rank among {members:?}"
        );
        if members.len() == 1 {
            return Ok(());
        }
        if values.is_empty() {
            // Ranks stay in step even where there is nothing to add.
            return self.sum_direct(scratch, members, values, deadline);
        }
        for piece in values.chunks_mut(PIECE_LEN) {
            let vector = Vector { len: piece.len(), element_bytes: T::BYTES };
            match choose(self.topology, scratch.speeds.as_ref(), members, vector) {
                Algorithm::Direct => self.sum_direct(scratch, members, piece, deadline)?,
                Algorithm::ScatterGather => {
                    self.sum_scatter_gather(scratch, members, piece, deadline)?;
                }
                Algorithm::Chain => self.sum_chain(scratch, members, piece, deadline)?,
            }
        }
        Ok(())
    }

    pub(super) fn scope(&self, members: &Range<u32>) -> Scope {
        if *members == self.all() { Scope::All } else { Scope::Subgroup }
    }

    fn sum_direct<T: Element>(
        &self,
        scratch: &mut Scratch,
        members: &Range<u32>,
        values: &mut [T],
        deadline: Deadline,
    ) -> Result<(), GroupError> {
        let exchange = scratch.begin(Op::SumDirect, self.scope(members), deadline);
        let Scratch { outgoing, incoming, .. } = scratch;
        let mine = &mut outgoing[0];
        T::store(self.frame(exchange, mine, values.len() * T::BYTES), values);
        let mine = mine.as_slice();
        let to_all: Vec<_> =
            self.others_of(members).map(|to| Outgoing { to, frame: mine }).collect();
        let others = self.others_of(members);
        self.exchange(exchange, &to_all, incoming, others, |_| Some(values.len() * T::BYTES))?;
        self.add_up(members, values, mine, incoming);
        Ok(())
    }

    /// Adds `mine` and every other member's frame in rank order.
    fn add_up<T: Element>(
        &self,
        members: &Range<u32>,
        values: &mut [T],
        mine: &[u8],
        incoming: &[Vec<u8>],
    ) {
        let frame =
            |rank| if rank == self.rank { mine } else { incoming[rank as usize].as_slice() };
        T::add_up(values, members.clone().map(|rank| &frame(rank)[HEADER_BYTES..]));
    }

    fn sum_scatter_gather<T: Element>(
        &self,
        scratch: &mut Scratch,
        members: &Range<u32>,
        values: &mut [T],
        deadline: Deadline,
    ) -> Result<(), GroupError> {
        let (len, scope) = (values.len(), self.scope(members));
        let part = |rank| sum::part(len, rank - members.start, members.len() as u32);
        let own = part(self.rank);
        let exchange = scratch.begin(Op::SumScatter, scope, deadline);
        let Scratch { outgoing, incoming, .. } = scratch;
        for rank in members.clone() {
            let values = &values[part(rank)];
            let frame = &mut outgoing[rank as usize];
            T::store(self.frame(exchange, frame, values.len() * T::BYTES), values);
        }
        let others = || self.others_of(members);
        let to_each: Vec<_> =
            others().map(|to| Outgoing { to, frame: outgoing[to as usize].as_slice() }).collect();
        self.exchange(exchange, &to_each, incoming, others(), |_| Some(own.len() * T::BYTES))?;
        let mine = &outgoing[self.rank as usize];
        self.add_up(members, &mut values[own.clone()], mine, incoming);

        let exchange = scratch.begin(Op::SumGather, scope, deadline);
        let Scratch { outgoing, incoming, .. } = scratch;
        let mine = &mut outgoing[0];
        T::store(self.frame(exchange, mine, own.len() * T::BYTES), &values[own]);
        let mine = mine.as_slice();
        let to_all: Vec<_> = others().map(|to| Outgoing { to, frame: mine }).collect();
        let size = |rank| Some(part(rank).len() * T::BYTES);
        self.exchange(exchange, &to_all, incoming, others(), size)?;
        for rank in others() {
            T::load(&mut values[part(rank)], &incoming[rank as usize][HEADER_BYTES..]);
        }
        Ok(())
    }
}
