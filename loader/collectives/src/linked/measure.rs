//! Measures latency and bandwidth of every link of a group.
//!
//! Each pair measures by itself, in the order of its ranks, which is the same everywhere: a rank never
//! waits for one that waits for it. The lower one sends a message and takes the time until the answer of
//! the same size is there. The least of some times counts, as whatever else goes on only adds to it.

use std::{
    sync::PoisonError,
    time::{Duration, Instant},
};

use super::{
    LinkedGroup,
    exchange::{Exchange, Outgoing, Scratch},
    speeds::{LinkSpeed, LinkSpeeds},
};
use crate::{
    frame::Op,
    group::{Deadline, Group as _, GroupError},
};

/// Messages of each size. The first two only show that the other rank is there, and that nothing on
/// its way is cold.
const WARM_UPS: usize = 2;
const SMALL_ROUNDS: usize = 8;
const LARGE_ROUNDS: usize = 3;

/// A large message: some times what leaves in one latency, and 2 ms at 1 Gbit/s.
const LARGE_BYTES: usize = 256 << 10;

impl LinkedGroup {
    /// Measures every link and chooses the algorithms of later all-reduces by it. A collective call;
    /// takes some round trips for each pair, about a millisecond over TCP on one machine.
    ///
    /// # Errors
    /// As every call of a group; the group has ended then.
    pub fn measure(&self, deadline: Deadline) -> Result<(), GroupError> {
        self.call(|scratch| {
            let mut mine = Vec::new();
            for low in 0..self.size() {
                for high in low + 1..self.size() {
                    if self.rank == low {
                        mine.extend_from_slice(&self.probe(scratch, high, deadline)?.encode());
                    } else if self.rank == high {
                        self.probe(scratch, low, deadline)?;
                    }
                }
            }
            let found = self.gather(scratch, &mine, deadline)?;
            let speeds = self.table(&found)?;
            let mut known = self.speeds.lock().unwrap_or_else(PoisonError::into_inner);
            *known = Some(speeds.clone());
            scratch.speeds = Some(speeds);
            Ok(())
        })
    }

    /// What [`LinkedGroup::measure`] found; none before.
    #[must_use]
    pub fn link_speeds(&self) -> Option<LinkSpeeds> {
        self.speeds.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The link to `peer`, as the lower one of both sees it.
    fn probe(
        &self,
        scratch: &mut Scratch,
        peer: u32,
        deadline: Deadline,
    ) -> Result<LinkSpeed, GroupError> {
        let small = (WARM_UPS, SMALL_ROUNDS, 0);
        let mut sequence = 0;
        let mut least = [Duration::MAX; 2];
        for ((skipped, rounds, bytes), least) in
            [small, (0, LARGE_ROUNDS, LARGE_BYTES)].into_iter().zip(&mut least)
        {
            for round in 0..skipped + rounds {
                let exchange = Exchange::of_pair(Op::Probe, sequence, deadline);
                sequence += 1;
                let start = Instant::now();
                self.round_trip(scratch, exchange, peer, bytes)?;
                if round >= skipped {
                    *least = start.elapsed().min(*least);
                }
            }
        }
        let [small, large] = least.map(|time| (time / 2).as_nanos() as u64);
        // Where a large message takes no longer, the clock is too coarse to tell.
        let transfer_ns = large.saturating_sub(small).max(1);
        let bytes_per_s = LARGE_BYTES as u64 * 1_000_000_000 / transfer_ns;
        Ok(LinkSpeed { latency_ns: small, bytes_per_s })
    }

    /// One message from the lower rank, and its answer.
    fn round_trip(
        &self,
        scratch: &mut Scratch,
        exchange: Exchange,
        peer: u32,
        bytes: usize,
    ) -> Result<(), GroupError> {
        let Scratch { outgoing, incoming, .. } = scratch;
        let frame = &mut outgoing[0];
        self.frame(exchange, frame, bytes);
        let message = [Outgoing { to: peer, frame: frame.as_slice() }];
        if self.rank < peer {
            self.exchange(exchange, &message, incoming, None.into_iter(), |_| None)?;
        }
        self.exchange(exchange, &[], incoming, Some(peer).into_iter(), |_| Some(bytes))?;
        if self.rank > peer {
            self.exchange(exchange, &message, incoming, None.into_iter(), |_| None)?;
        }
        Ok(())
    }

    /// The table of what all ranks found.
    fn table(&self, found: &[Vec<u8>]) -> Result<LinkSpeeds, GroupError> {
        let mut rows = Vec::new();
        for (rank, bytes) in (0..).zip(found) {
            let (row, rest) = bytes.as_chunks::<{ LinkSpeed::ENCODED_BYTES }>();
            let links = (self.size() - 1 - rank) as usize;
            if row.len() != links || !rest.is_empty() {
                let expected = format!("the speeds of {links} links");
                let found = format!("{} bytes", bytes.len());
                return Err(GroupError::OutOfStep { rank, expected, found });
            }
            rows.push(row.iter().map(|speed| LinkSpeed::parse(*speed)).collect());
        }
        Ok(LinkSpeeds { rows })
    }
}
