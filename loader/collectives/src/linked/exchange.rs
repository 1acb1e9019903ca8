//! One exchange of frames: what all ranks send and await at one sequence number.

use std::{thread, time::Instant};

use super::LinkedGroup;
use crate::{
    fate::Fate,
    frame::{HEADER_BYTES, Header, MAX_PAYLOAD_BYTES, Op},
    group::{Deadline, GroupError},
    link::{Link, LinkError},
};

/// Frames kept between calls, so that a step allocates nothing.
pub(super) struct Scratch {
    pub(super) sequence: u64,
    /// By receiver; only the first is used where all receive the same.
    pub(super) outgoing: Vec<Vec<u8>>,
    /// By sender.
    pub(super) incoming: Vec<Vec<u8>>,
}

/// One exchange of frames, which all ranks do alike.
#[derive(Clone, Copy)]
pub(super) struct Exchange {
    op: Op,
    sequence: u64,
    deadline: Deadline,
    start: Instant,
}

impl Scratch {
    pub(super) fn begin(&mut self, op: Op, deadline: Deadline) -> Exchange {
        let sequence = self.sequence;
        self.sequence += 1;
        Exchange { op, sequence, deadline, start: Instant::now() }
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
        let Exchange { op, sequence, .. } = exchange;
        let header =
            Header { op, from: self.rank, payload_bytes: size, epoch: self.epoch, sequence };
        frame.resize(HEADER_BYTES + payload_bytes, 0);
        frame[..HEADER_BYTES].copy_from_slice(&header.encode());
        &mut frame[HEADER_BYTES..]
    }

    /// Sends a frame to each rank of `outgoing` while it receives one from each rank of
    /// `senders`, whose payloads have `size(rank)` bytes where that is known beforehand.
    pub(super) fn exchange(
        &self,
        exchange: Exchange,
        outgoing: &[(u32, &[u8])],
        incoming: &mut [Vec<u8>],
        senders: impl Iterator<Item = u32>,
        size: impl Fn(u32) -> Option<usize>,
    ) -> Result<(), GroupError> {
        let mut rests = Vec::new();
        for &(to, frame) in outgoing {
            let sent = self.fate.link(to).send_now(frame);
            let sent = sent.map_err(|error| self.failed(exchange, to, error))?;
            if sent < frame.len() {
                rests.push((to, &frame[sent..]));
            }
        }
        let receive = || {
            for from in senders {
                self.receive(exchange, from, &mut incoming[from as usize], size(from))?;
            }
            Ok(())
        };
        if rests.is_empty() {
            return receive();
        }
        thread::scope(|scope| {
            for (to, rest) in rests {
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

    /// Receives `from`'s frame of this exchange.
    fn receive(
        &self,
        exchange: Exchange,
        from: u32,
        frame: &mut Vec<u8>,
        size: Option<usize>,
    ) -> Result<(), GroupError> {
        let link = self.fate.link(from);
        let failed = |error| self.failed(exchange, from, error);
        loop {
            let header = link.receive_header(frame, exchange.deadline).map_err(failed)?;
            let stale = header.epoch < self.epoch;
            if !stale && !self.fits(exchange, from, size, &header) {
                return Err(self.out_of_step(exchange, from, size, header.to_string()));
            }
            link.receive_payload(&header, frame, exchange.deadline).map_err(failed)?;
            if !stale {
                return Ok(());
            }
        }
    }

    fn fits(&self, exchange: Exchange, from: u32, size: Option<usize>, found: &Header) -> bool {
        found.epoch == self.epoch
            && found.op == exchange.op
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
        let Exchange { op, sequence, .. } = exchange;
        let payload_bytes = size.unwrap_or(0) as u32;
        let header = Header { op, from: rank, payload_bytes, epoch: self.epoch, sequence };
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
            LinkError::Frame(error) => self.out_of_step(exchange, rank, None, error.to_string()),
        }
    }
}
