//! One exchange of frames: what all ranks send and await at one sequence number.

use std::{
    sync::PoisonError,
    thread,
    time::{Duration, Instant},
};

use super::{LinkSpeeds, LinkedGroup};
use crate::{
    fate::Fate,
    frame::{HEADER_BYTES, Header, MAX_PAYLOAD_BYTES, Op, Scope},
    group::{Deadline, GroupError},
    link::{Link, LinkError},
};

/// Point-to-point messages exchanged with one rank.
#[derive(Clone, Copy, Default)]
pub(super) struct Passes {
    /// Sent to it.
    pub(super) sent: u64,
    /// Received from it.
    pub(super) received: u64,
}

/// Buffers kept between calls, so that a step allocates nothing.
pub(super) struct Scratch {
    /// Exchanges of all ranks so far.
    sequence: u64,
    /// Exchanges of this rank's subgroup.
    part_sequence: u64,
    /// Point-to-point messages so far, by the other rank.
    pub(super) passes: Vec<Passes>,
    /// By receiver; only the first is used where all receive the same.
    pub(super) outgoing: Vec<Vec<u8>>,
    /// By sender.
    pub(super) incoming: Vec<Vec<u8>>,
    /// What the links were measured to do, the same on every rank.
    pub(super) speeds: Option<LinkSpeeds>,
}

/// Least time between two keep-alives of one rank.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(1);

/// Keep-alives extend the wait of a call to at most this many times its timeout: 15 minutes for
/// the 20 seconds of a step. A step that takes longer counts as a failure.
const MAX_TIMEOUT_EXTENSION: u32 = 45;

/// One exchange of frames, which all its ranks do alike.
#[derive(Clone, Copy)]
pub(super) struct Exchange {
    op: Op,
    scope: Scope,
    sequence: u64,
    deadline: Deadline,
    pub(super) start: Instant,
}

/// A frame, and the rank that it is sent to.
#[derive(Clone, Copy)]
pub(super) struct Outgoing<'a> {
    pub(super) to: u32,
    pub(super) frame: &'a [u8],
}

impl Scratch {
    pub(super) fn new(size: usize) -> Self {
        Self {
            sequence: 0,
            part_sequence: 0,
            passes: vec![Passes::default(); size],
            outgoing: vec![Vec::new(); size],
            incoming: vec![Vec::new(); size],
            speeds: None,
        }
    }

    pub(super) fn begin(&mut self, op: Op, scope: Scope, deadline: Deadline) -> Exchange {
        let counter = match scope {
            Scope::All => &mut self.sequence,
            Scope::Subgroup => &mut self.part_sequence,
        };
        let sequence = *counter;
        *counter += 1;
        Exchange { op, scope, sequence, deadline, start: Instant::now() }
    }
}

impl Exchange {
    /// One step between two ranks, which count them.
    pub(super) fn of_pair(op: Op, sequence: u64, deadline: Deadline) -> Self {
        Self { op, scope: Scope::Subgroup, sequence, deadline, start: Instant::now() }
    }

    /// A deadline with the same timeout, counted from now.
    pub(super) fn restarted(&self) -> Deadline {
        Deadline::after(self.deadline.moment().saturating_duration_since(self.start))
    }

    /// The deadline for a rank that has just sent a keep-alive.
    pub(super) fn extended(&self) -> Deadline {
        let wait = self.deadline.moment().saturating_duration_since(self.start);
        let last = self.start + wait * MAX_TIMEOUT_EXTENSION;
        Deadline::at((Instant::now() + wait).min(last))
    }
}

impl Fate {
    pub(super) fn link(&self, rank: u32) -> &dyn Link {
        self.links[rank as usize].as_deref().expect("no rank sends to itself")
    }
}

impl LinkedGroup {
    /// Makes `frame` a frame of `payload_bytes`, whose payload the caller fills.
    pub(super) fn frame<'a>(
        &self,
        exchange: Exchange,
        frame: &'a mut Vec<u8>,
        payload_bytes: usize,
    ) -> &'a mut [u8] {
        let size = u32::try_from(payload_bytes).ok().filter(|size| *size <= MAX_PAYLOAD_BYTES);
        let size = size.unwrap_or_else(|| panic!("a message of {payload_bytes} bytes"));
        let Exchange { op, scope, sequence, .. } = exchange;
        let (from, epoch) = (self.rank, self.epoch);
        let header = Header { op, scope, from, payload_bytes: size, epoch, sequence };
        frame.resize(HEADER_BYTES + payload_bytes, 0);
        frame[..HEADER_BYTES].copy_from_slice(&header.encode());
        &mut frame[HEADER_BYTES..]
    }

    /// Sends a frame to each rank of `outgoing` while it receives one from each rank of
    /// `senders`, whose payloads have `size(rank)` bytes where that is known beforehand.
    pub(super) fn exchange(
        &self,
        exchange: Exchange,
        outgoing: &[Outgoing<'_>],
        incoming: &mut [Vec<u8>],
        senders: impl Iterator<Item = u32>,
        size: impl Fn(u32) -> Option<usize>,
    ) -> Result<(), GroupError> {
        let mut rests = Vec::new();
        for &Outgoing { to, frame } in outgoing {
            let sent = self.fate.link(to).send_now(frame);
            let sent = sent.map_err(|error| self.failed(exchange, to, error))?;
            if sent < frame.len() {
                rests.push(Outgoing { to, frame: &frame[sent..] });
            }
        }
        // A keep-alive between the halves of a frame would corrupt it.
        let relays = rests.is_empty();
        let receive = || {
            for from in senders {
                self.receive(exchange, from, &mut incoming[from as usize], size(from), relays)?;
            }
            Ok(())
        };
        if rests.is_empty() {
            return receive();
        }
        thread::scope(|scope| {
            for Outgoing { to, frame: rest } in rests {
                scope.spawn(move || {
                    let sent = self.fate.link(to).send_rest(rest, exchange.deadline);
                    if let Err(error) = sent {
                        self.fate.end(self.failed(exchange, to, error));
                    }
                });
            }
            // The end of the group closes the links, which wakes the senders.
            receive().map_err(|error| self.fate.end(error))
        })?;
        self.fate.cause().map_or(Ok(()), Err)
    }

    /// Sends a keep-alive to every rank except `heard_from`, unless one was sent within the last
    /// [`KEEP_ALIVE_INTERVAL`].
    pub(super) fn send_keep_alive(&self, heard_from: Option<u32>) -> Result<(), GroupError> {
        let mut last = self.last_keep_alive.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_some_and(|sent| sent.elapsed() < KEEP_ALIVE_INTERVAL) {
            return Ok(());
        }
        *last = Some(Instant::now());
        let exchange = Exchange {
            op: Op::Alive,
            scope: Scope::All,
            sequence: 0,
            deadline: Deadline::after(KEEP_ALIVE_INTERVAL),
            start: Instant::now(),
        };
        let mut frame = Vec::new();
        self.frame(exchange, &mut frame, 0);
        for to in self.others().filter(|to| Some(*to) != heard_from) {
            let link = self.fate.link(to);
            let failed = |error| self.failed(exchange, to, error);
            // A link whose buffer is full still holds keep-alives that were not read.
            let sent = link.send_now(&frame).map_err(failed)?;
            if (1..frame.len()).contains(&sent) {
                link.send_rest(&frame[sent..], exchange.deadline).map_err(failed)?;
            }
        }
        Ok(())
    }

    /// Receives `from`'s frame of this exchange. A keep-alive from that rank is passed on to the
    /// ranks that wait for this one, if `relays` says that the links are free.
    fn receive(
        &self,
        exchange: Exchange,
        from: u32,
        frame: &mut Vec<u8>,
        size: Option<usize>,
        relays: bool,
    ) -> Result<(), GroupError> {
        let mut deadline = exchange.deadline;
        let link = self.fate.link(from);
        let failed = |error| self.failed(exchange, from, error);
        loop {
            let header = link.receive_header(frame, deadline).map_err(failed)?;
            let stale = header.epoch < self.epoch;
            let alive = Header { op: Op::Alive, scope: Scope::All, sequence: 0, ..header };
            if !stale && header == alive && header.payload_bytes == 0 && header.from == from {
                link.receive_payload(&header, frame, deadline).map_err(failed)?;
                deadline = exchange.extended();
                if relays {
                    self.send_keep_alive(Some(from))?;
                }
                continue;
            }
            if !stale && !self.fits(exchange, from, size, &header) {
                return Err(self.out_of_step(exchange, from, size, header.to_string()));
            }
            link.receive_payload(&header, frame, deadline).map_err(failed)?;
            if !stale {
                return Ok(());
            }
        }
    }

    fn fits(&self, exchange: Exchange, from: u32, size: Option<usize>, found: &Header) -> bool {
        found.epoch == self.epoch
            && (found.op, found.scope) == (exchange.op, exchange.scope)
            && found.sequence == exchange.sequence
            && found.from == from
            && size.is_none_or(|size| size == found.payload_bytes as usize)
    }

    fn out_of_step(
        &self,
        exchange: Exchange,
        rank: u32,
        size: Option<usize>,
        found: String,
    ) -> GroupError {
        let Exchange { op, scope, sequence, .. } = exchange;
        let payload_bytes = size.unwrap_or(0) as u32;
        let (from, epoch) = (rank, self.epoch);
        let header = Header { op, scope, from, payload_bytes, epoch, sequence };
        let expected = match size {
            Some(_) => header.to_string(),
            None => header.to_string().replace(", 0 bytes", ""),
        };
        GroupError::OutOfStep { rank, expected, found }
    }

    fn failed(&self, exchange: Exchange, rank: u32, error: LinkError) -> GroupError {
        match error {
            LinkError::Timeout => GroupError::Timeout { rank, waited: exchange.start.elapsed() },
            LinkError::Closed(reason) => {
                self.fate.cause_soon().unwrap_or(GroupError::Lost { rank, reason })
            }
            LinkError::Broken(reason) => {
                self.fate.cause_soon().unwrap_or(GroupError::Link { rank, reason })
            }
            LinkError::Frame(error) => self.out_of_step(exchange, rank, None, error.to_string()),
        }
    }
}
