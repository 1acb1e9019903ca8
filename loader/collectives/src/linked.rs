//! The one implementation of [`Group`], over any links.
//!
//! An all-reduce uses one of two algorithms. Up to [`DIRECT_MAX_BYTES`] (every decode step) each
//! rank sends its vector to every other one: one hop, the least latency. Longer vectors (prefill)
//! use reduce-scatter and all-gather: each rank reduces one part of the vector and sends the result
//! to the others, so a rank sends `2 (N-1) / N` vectors instead of `N-1`. Both algorithms add the
//! partial sums in rank order with the same loop, so the result has the same bits.

mod exchange;
mod pass;

use std::{
    io, mem,
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
    thread::{self, JoinHandle},
    time::Instant,
};

use half::bf16;

use crate::{
    fate::Fate,
    frame::{HEADER_BYTES, Op, Scope},
    group::{Deadline, Group, GroupError},
    link::{Link, MemoryLink},
    sum::{self, Element},
};
use exchange::{Outgoing, Scratch};

/// Largest vector that goes directly to every rank: the hidden vectors of a decode step.
const DIRECT_MAX_BYTES: usize = 64 << 10;

/// Longest vector reduced at once, in elements (4 MiB): bounds the frames' memory, and one piece
/// stays in the cache while it is reduced.
const PIECE_LEN: usize = 1 << 20;

/// Most ranks of one group; a frame's rank is checked against the links, so this only bounds
/// what a caller may ask for.
const MAX_RANKS: usize = 64;

/// A group over links.
pub struct LinkedGroup {
    rank: u32,
    epoch: u64,
    fate: Arc<Fate>,
    scratch: Mutex<Scratch>,
    /// When this rank last sent a keep-alive.
    last_keep_alive: Mutex<Option<Instant>>,
    watchers: Vec<JoinHandle<()>>,
}

impl LinkedGroup {
    /// The group over `links`, indexed by rank; this rank's own entry is `None`. One thread per link
    /// waits for the link to close; a group of one rank starts none.
    pub fn new(rank: u32, epoch: u64, links: Vec<Option<Box<dyn Link>>>) -> io::Result<Self> {
        assert!(links.len() <= MAX_RANKS, "a group has at most {MAX_RANKS} ranks");
        for (other, link) in links.iter().enumerate() {
            assert_eq!(link.is_none(), other == rank as usize, "one link to every other rank");
        }
        assert!((rank as usize) < links.len(), "rank {rank} of {}", links.len());
        let size = links.len();
        let fate = Arc::new(Fate::new(rank, epoch, links));
        let scratch = Mutex::new(Scratch::new(size));
        let (last_keep_alive, watchers) = (Mutex::default(), Vec::new());
        let mut group = Self { rank, epoch, fate, scratch, last_keep_alive, watchers };
        for other in group.others() {
            let fate = Arc::clone(&group.fate);
            let watch = move || fate.watch(other, fate.link(other));
            let name = format!("watch-rank-{other}");
            group.watchers.push(thread::Builder::new().name(name).spawn(watch)?);
        }
        Ok(group)
    }

    /// The group of one rank: every call returns at once.
    #[must_use]
    pub fn single(epoch: u64) -> Self {
        Self::new(0, epoch, vec![None]).expect("a group of one starts no threads")
    }

    /// The `size` ranks of a group within this process, in rank order.
    pub fn in_memory(size: u32, epoch: u64) -> io::Result<Vec<Self>> {
        let mut links: Vec<Vec<Option<Box<dyn Link>>>> = Vec::new();
        for _ in 0..size {
            let mut to_lower: Vec<Option<Box<dyn Link>>> = Vec::new();
            for row in &mut links {
                let (low, high) = MemoryLink::pair();
                row.push(Some(Box::new(low)));
                to_lower.push(Some(Box::new(high)));
            }
            to_lower.push(None);
            links.push(to_lower);
        }
        (0..size).zip(links).map(|(rank, links)| Self::new(rank, epoch, links)).collect()
    }

    /// The other ranks, the next one first, so that not all begin with rank 0.
    fn others(&self) -> impl Iterator<Item = u32> + use<> {
        self.others_of(&self.all())
    }

    /// The other ranks of a part, in such an order.
    fn others_of(&self, members: &Range<u32>) -> impl Iterator<Item = u32> + use<> {
        let (first, size) = (members.start, members.len() as u32);
        let own = self.rank - first;
        (1..size).map(move |step| first + (own + step) % size)
    }

    fn all(&self) -> Range<u32> {
        0..self.size()
    }

    /// Runs one call; whatever goes wrong ends the group.
    fn call<T>(
        &self,
        call: impl FnOnce(&mut Scratch) -> Result<T, GroupError>,
    ) -> Result<T, GroupError> {
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cause) = self.fate.cause() {
            return Err(cause);
        }
        call(&mut scratch).map_err(|error| self.fate.end(error))
    }

    fn sum<T: Element>(
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
            // Between two ranks both algorithms send the same bytes, and the direct one takes one
            // hop less.
            if members.len() == 2 || size_of_val(piece) <= DIRECT_MAX_BYTES {
                self.sum_direct(scratch, members, piece, deadline)?;
            } else {
                self.sum_scatter_gather(scratch, members, piece, deadline)?;
            }
        }
        Ok(())
    }

    fn scope(&self, members: &Range<u32>) -> Scope {
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

impl Group for LinkedGroup {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.fate.links.len() as u32
    }

    fn epoch(&self) -> u64 {
        self.epoch
    }

    fn all_reduce_sum(&self, values: &mut [f32], deadline: Deadline) -> Result<(), GroupError> {
        self.sum_among(self.all(), values, deadline)
    }

    fn sum_among(
        &self,
        members: Range<u32>,
        values: &mut [f32],
        deadline: Deadline,
    ) -> Result<(), GroupError> {
        self.call(|scratch| self.sum(scratch, &members, values, deadline))
    }

    fn sum_bf16_among(
        &self,
        members: Range<u32>,
        values: &mut [bf16],
        deadline: Deadline,
    ) -> Result<(), GroupError> {
        self.call(|scratch| self.sum(scratch, &members, values, deadline))
    }

    fn send(&self, to: u32, bytes: &[u8], deadline: Deadline) -> Result<(), GroupError> {
        self.call(|scratch| self.send_to(scratch, to, bytes, deadline))
    }

    fn receive(
        &self,
        from: u32,
        bytes: &mut Vec<u8>,
        deadline: Deadline,
    ) -> Result<(), GroupError> {
        self.call(|scratch| self.recv_from(scratch, from, bytes, deadline))
    }

    fn keep_alive(&self) -> Result<(), GroupError> {
        self.call(|_| self.send_keep_alive(None))
    }

    fn all_gather(&self, mine: &[u8], deadline: Deadline) -> Result<Vec<Vec<u8>>, GroupError> {
        self.call(|scratch| {
            if self.size() == 1 {
                return Ok(vec![mine.to_vec()]);
            }
            let exchange = scratch.begin(Op::Gather, Scope::All, deadline);
            let Scratch { outgoing, incoming, .. } = scratch;
            let frame = &mut outgoing[0];
            self.frame(exchange, frame, mine.len()).copy_from_slice(mine);
            let frame = frame.as_slice();
            let to_all: Vec<_> = self.others().map(|to| Outgoing { to, frame }).collect();
            self.exchange(exchange, &to_all, incoming, self.others(), |_| None)?;
            let gathered = incoming.iter().enumerate().map(|(rank, theirs)| {
                if rank == self.rank as usize {
                    mine.to_vec()
                } else {
                    theirs[HEADER_BYTES..].to_vec()
                }
            });
            Ok(gathered.collect())
        })
    }

    fn broadcast(
        &self,
        root: u32,
        bytes: &mut Vec<u8>,
        deadline: Deadline,
    ) -> Result<(), GroupError> {
        assert!(root < self.size(), "rank {root} of {}", self.size());
        self.call(|scratch| {
            if self.size() == 1 {
                return Ok(());
            }
            let exchange = scratch.begin(Op::Broadcast, Scope::All, deadline);
            let Scratch { outgoing, incoming, .. } = scratch;
            if self.rank != root {
                self.exchange(exchange, &[], incoming, Some(root).into_iter(), |_| None)?;
                bytes.clear();
                bytes.extend_from_slice(&incoming[root as usize][HEADER_BYTES..]);
                return Ok(());
            }
            let frame = &mut outgoing[0];
            self.frame(exchange, frame, bytes.len()).copy_from_slice(bytes);
            let frame = frame.as_slice();
            let to_all: Vec<_> = self.others().map(|to| Outgoing { to, frame }).collect();
            self.exchange(exchange, &to_all, incoming, None.into_iter(), |_| None)
        })
    }

    fn barrier(&self, deadline: Deadline) -> Result<(), GroupError> {
        self.call(|scratch| {
            if self.size() == 1 {
                return Ok(());
            }
            let exchange = scratch.begin(Op::Barrier, Scope::All, deadline);
            let Scratch { outgoing, incoming, .. } = scratch;
            let frame = &mut outgoing[0];
            self.frame(exchange, frame, 0);
            let frame = frame.as_slice();
            let to_all: Vec<_> = self.others().map(|to| Outgoing { to, frame }).collect();
            self.exchange(exchange, &to_all, incoming, self.others(), |_| Some(0))
        })
    }

    fn abort(&self, reason: &str) {
        self.fate.end(GroupError::Aborted(reason.to_owned()));
    }
}

impl Drop for LinkedGroup {
    fn drop(&mut self) {
        self.fate.close();
        for watcher in mem::take(&mut self.watchers) {
            // A watcher holds nothing that its panic could leave half done.
            let _ = watcher.join();
        }
    }
}

#[cfg(test)]
mod tests;
