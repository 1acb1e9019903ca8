//! One queue pair of a link: slots of one size, numbered messages, and credits.
//!
//! A SEND needs a RECV that waits on the other side: Apple's device lets it wait for one, others
//! drop it. So a side sends only what the other one has receives for. Every message carries how
//! many receives its sender has posted on each lane since the beginning; the difference to what was
//! sent there is the credit.

use std::collections::VecDeque;

use super::{
    buffer::PAGE_BYTES,
    device::{Device, DeviceError, Done, Path, QueuePair},
    rules::{FRAME_BYTES, QueueShape},
    slot::{self, Kind, SLOT_HEADER_BYTES, SlotError, SlotHeader},
};
use std::sync::Arc;

/// Why a lane carries nothing any more.
#[derive(Debug, thiserror::Error)]
pub(super) enum LaneError {
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error("{device}")]
    Slot { device: String, source: SlotError },
    #[error("{device}: a message was lost on the way: expected number {expected}, found {found}")]
    Lost { device: String, expected: u32, found: u32 },
    #[error("{device}: a message came twice, number {found} where {expected} was expected")]
    Twice { device: String, expected: u32, found: u32 },
    #[error("{device}: a message is of {what} {found}, expected {expected}")]
    Foreign { device: String, what: &'static str, expected: u64, found: u64 },
    #[error(
        "{device}: a queue failed with status {status} (vendor's number {vendor_error}); the \
         messages of both sides may differ in their frames, or the cable was pulled"
    )]
    Queue { device: String, status: u32, vendor_error: u32 },
    #[error("{device}: the peer states {posted} receives, and at most {most} can be")]
    Credit { device: String, posted: u32, most: u32 },
}

/// A data message that came and was not taken yet.
pub(super) struct Arrived {
    slot: usize,
    pub(super) sequence: u64,
    payload_bytes: usize,
    checksum: u64,
}

/// What a poll found, beside data.
pub(super) struct Polled {
    /// Counts of receives that messages carried.
    pub(super) posted: Vec<[u32; slot::MAX_LANES]>,
    /// Whether a probe was among the messages.
    pub(super) has_probe: bool,
}

/// The numbers that a message carries beside its payload.
#[derive(Clone, Copy)]
pub(super) struct Envelope {
    pub(super) kind: Kind,
    pub(super) epoch: u64,
    pub(super) sequence: u64,
    pub(super) posted: [u32; slot::MAX_LANES],
}

/// A queue pair with its slots: receive slots first, then as many send slots.
pub(super) struct Lane {
    queue: QueuePair,
    shape: QueueShape,
    /// Its number in headers.
    pub(super) number: u16,
    /// Send slots that the device does not read from.
    free: Vec<usize>,
    /// Messages sent, and receives that the peer has posted for them.
    sent: u32,
    granted: u32,
    /// Receives posted, and how many the peer knows of.
    pub(super) posted: u32,
    told: u32,
    /// Number of the next message.
    expected: u32,
    arrived: VecDeque<Arrived>,
    done: Vec<Done>,
}

impl Lane {
    /// A lane on `device`, not connected yet.
    pub(super) fn new(
        device: &Arc<Device>,
        number: u16,
        shape: QueueShape,
    ) -> Result<Self, DeviceError> {
        let bytes = 2 * shape.slots * shape.slot_bytes;
        let piece = device.lend(bytes.next_multiple_of(PAGE_BYTES))?;
        let queue = device.queue_pair(shape, piece)?;
        let (free, slots) = ((0..shape.slots).rev().collect(), shape.slots as u32);
        let (arrived, done) = (VecDeque::new(), Vec::new());
        let (sent, posted, expected) = (0, 0, 0);
        Ok(Self {
            queue,
            shape,
            number,
            free,
            sent,
            granted: slots,
            posted,
            told: slots,
            expected,
            arrived,
            done,
        })
    }

    pub(super) const fn queue_number(&self) -> u32 {
        self.queue.number()
    }

    /// Bytes of a message's payload.
    pub(super) const fn payload_bytes(&self) -> usize {
        self.shape.slot_bytes - SLOT_HEADER_BYTES
    }

    /// Connects it and posts every receive. The peer may send once it has been told.
    pub(super) fn connect(&mut self, path: &Path) -> Result<(), DeviceError> {
        self.queue.connect(path)?;
        (0..self.shape.slots).try_for_each(|slot| self.post_recv(slot))
    }

    fn post_recv(&mut self, slot: usize) -> Result<(), DeviceError> {
        let bytes = self.shape.slot_bytes;
        self.queue.post_recv(slot, slot * bytes, bytes)?;
        self.posted = self.posted.wrapping_add(1);
        Ok(())
    }

    /// Messages that may be sent now.
    pub(super) fn credit(&self) -> usize {
        let credit = self.granted.wrapping_sub(self.sent) as usize;
        credit.min(self.free.len())
    }

    /// Whether the peer should be told of receives: half of them are unknown to it.
    pub(super) fn owes_credit(&self) -> bool {
        self.posted.wrapping_sub(self.told) as usize >= self.shape.slots.div_ceil(2)
    }

    /// The counts of receives were sent.
    pub(super) fn has_told(&mut self) {
        self.told = self.posted;
    }

    /// The peer has posted so many receives. Counts of several lanes may overtake each other.
    pub(super) fn grant(&mut self, posted: u32) -> Result<(), LaneError> {
        let most = self.sent.wrapping_add(self.shape.slots as u32);
        if most.wrapping_sub(posted) > u32::MAX / 2 {
            return Err(LaneError::Credit { device: self.device(), posted, most });
        }
        if posted.wrapping_sub(self.granted) < u32::MAX / 2 {
            self.granted = posted;
        }
        Ok(())
    }

    fn device(&self) -> String {
        self.queue.device().to_owned()
    }

    /// Whether a SEND is still on its way to the wire.
    pub(super) fn is_sending(&self) -> bool {
        self.free.len() < self.shape.slots
    }

    /// Sends a message, for which there is credit.
    pub(super) fn send(&mut self, envelope: Envelope, payload: &[u8]) -> Result<(), LaneError> {
        let slot = self.free.pop().expect("the caller has asked for credit");
        let Envelope { kind, epoch, sequence, posted } = envelope;
        let header = SlotHeader {
            kind,
            lane: self.number,
            epoch,
            sequence,
            lane_sequence: self.sent,
            payload_bytes: payload.len() as u32,
            posted,
            checksum: slot::checksum(payload),
        };
        let offset = (self.shape.slots + slot) * self.shape.slot_bytes;
        let (memory, at) = self.queue.memory(offset);
        memory.write(at, &header.encode());
        memory.write(at + SLOT_HEADER_BYTES, payload);
        // As many frames as the receive's, and no more bytes than that needs.
        let least = (self.shape.frames() - 1) * FRAME_BYTES + 1;
        let bytes = (SLOT_HEADER_BYTES + payload.len()).max(least);
        self.queue.post_send(slot, offset, bytes)?;
        self.sent = self.sent.wrapping_add(1);
        Ok(())
    }

    /// Takes what the device has done.
    pub(super) fn poll(&mut self, epoch: u64) -> Result<Polled, LaneError> {
        let mut done = std::mem::take(&mut self.done);
        done.clear();
        let mut polled = Polled { posted: Vec::new(), has_probe: false };
        let result =
            self.queue.poll(&mut done).map_err(LaneError::from).and_then(|()| {
                done.iter().try_for_each(|done| self.handle(*done, epoch, &mut polled))
            });
        self.done = done;
        result.map(|()| polled)
    }

    fn handle(&mut self, done: Done, epoch: u64, polled: &mut Polled) -> Result<(), LaneError> {
        let (slot, bytes) = match done {
            Done::Sent { slot } => {
                self.free.push(slot);
                return Ok(());
            }
            Done::Failed { status, vendor_error } => {
                return Err(LaneError::Queue { device: self.device(), status, vendor_error });
            }
            Done::Received { slot, bytes } => (slot, bytes.min(self.shape.slot_bytes)),
        };
        let header = self.header(slot, bytes)?;
        self.check(&header, epoch)?;
        self.expected = self.expected.wrapping_add(1);
        polled.posted.push(header.posted);
        match header.kind {
            Kind::Data => self.arrived.push_back(Arrived {
                slot,
                sequence: header.sequence,
                payload_bytes: header.payload_bytes as usize,
                checksum: header.checksum,
            }),
            Kind::Credit => self.post_recv(slot)?,
            Kind::Probe => {
                let mut payload = Vec::new();
                let checksum = header.checksum;
                self.copy(slot, header.payload_bytes as usize, checksum, &mut payload)?;
                self.post_recv(slot)?;
                polled.has_probe = true;
            }
        }
        Ok(())
    }

    fn header(&self, slot: usize, bytes: usize) -> Result<SlotHeader, LaneError> {
        let bad = |source| LaneError::Slot { device: self.device(), source };
        let room = bytes.checked_sub(SLOT_HEADER_BYTES);
        let room = room.ok_or_else(|| bad(SlotError::Truncated(bytes)))?;
        let mut header = [0; SLOT_HEADER_BYTES];
        let (memory, at) = self.queue.memory(slot * self.shape.slot_bytes);
        memory.read(at, &mut header);
        SlotHeader::parse(&header, room).map_err(bad)
    }

    fn check(&self, header: &SlotHeader, epoch: u64) -> Result<(), LaneError> {
        let device = || self.device();
        let foreign =
            |what, expected, found| LaneError::Foreign { device: device(), what, expected, found };
        if header.epoch != epoch {
            return Err(foreign("epoch", epoch, header.epoch));
        }
        if header.lane != self.number {
            return Err(foreign("lane", u64::from(self.number), u64::from(header.lane)));
        }
        let (expected, found) = (self.expected, header.lane_sequence);
        match found.wrapping_sub(expected) {
            0 => Ok(()),
            ahead if ahead < u32::MAX / 2 => {
                Err(LaneError::Lost { device: device(), expected, found })
            }
            _ => Err(LaneError::Twice { device: device(), expected, found }),
        }
    }

    /// Appends a payload to `into` and checks it there, where no device writes.
    fn copy(
        &self,
        slot: usize,
        bytes: usize,
        checksum: u64,
        into: &mut Vec<u8>,
    ) -> Result<(), LaneError> {
        let (memory, at) = self.queue.memory(slot * self.shape.slot_bytes);
        let start = into.len();
        memory.append(at + SLOT_HEADER_BYTES, bytes, into);
        slot::verify(checksum, &into[start..])
            .map_err(|source| LaneError::Slot { device: self.device(), source })
    }

    /// Number of the next data message that has come.
    pub(super) fn next(&self) -> Option<u64> {
        Some(self.arrived.front()?.sequence)
    }

    /// Appends the next data message to `into` and posts its slot again.
    pub(super) fn take(&mut self, into: &mut Vec<u8>) -> Result<(), LaneError> {
        let Some(Arrived { slot, payload_bytes, checksum, .. }) = self.arrived.pop_front() else {
            return Ok(());
        };
        self.copy(slot, payload_bytes, checksum, into)?;
        Ok(self.post_recv(slot)?)
    }
}
