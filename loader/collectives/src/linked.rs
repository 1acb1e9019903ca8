//! The one implementation of [`Group`], over any links.
//!
//! An all-reduce uses one of three algorithms, which add the partial sums in rank order and so give
//! the same bits (`all_reduce`, `chain`); `speeds` says which. The links' latency and bandwidth decide
//! where the group has measured them ([`LinkedGroup::measure`]), and [`DIRECT_MAX_BYTES`] where not.

mod all_reduce;
mod chain;
mod exchange;
mod measure;
mod pass;
mod speeds;

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
};
use exchange::{Outgoing, Scratch};
pub use speeds::{LinkSpeed, LinkSpeeds, Topology};

/// Largest vector that goes directly to every rank, where no link was measured: the hidden vectors of a
/// decode step.
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
    topology: Topology,
    /// What the links were measured to do.
    speeds: Mutex<Option<LinkSpeeds>>,
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
        let (topology, speeds) = (Topology::Mesh, Mutex::default());
        let mut group =
            Self { rank, epoch, fate, scratch, last_keep_alive, watchers, topology, speeds };
        for other in group.others() {
            let fate = Arc::clone(&group.fate);
            let watch = move || fate.watch(other, fate.link(other));
            let name = format!("watch-rank-{other}");
            group.watchers.push(thread::Builder::new().name(name).spawn(watch)?);
        }
        Ok(group)
    }

    /// The same group on other cables: every rank must say the same.
    #[must_use]
    pub fn with_topology(mut self, topology: Topology) -> Self {
        self.topology = topology;
        self
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

    fn gather(
        &self,
        scratch: &mut Scratch,
        mine: &[u8],
        deadline: Deadline,
    ) -> Result<Vec<Vec<u8>>, GroupError> {
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
            if rank == self.rank as usize { mine.to_vec() } else { theirs[HEADER_BYTES..].to_vec() }
        });
        Ok(gathered.collect())
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
        self.call(|scratch| self.gather(scratch, mine, deadline))
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
