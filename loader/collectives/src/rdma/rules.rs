//! Apple's rules for RDMA over Thunderbolt (TN3205, and what users measured on macOS 26), checked
//! before every call on every platform: other devices forgive what Apple's refuses or, worse,
//! answers with wrong bytes. Knows numbers and states, not devices.

use super::buffer::PAGE_BYTES;

/// Unit of a device's queues and of a message: 4 KiB.
pub(super) const FRAME_BYTES: usize = 4096;

/// Largest message: 4095 frames.
pub(super) const MAX_MESSAGE_BYTES: usize = 4095 * FRAME_BYTES;

/// Most frames that one queue may hold.
pub(super) const MAX_QUEUE_FRAMES: usize = 4095;

/// Most queue pairs of a device; the next one fails with EBUSY.
pub(super) const MAX_QUEUE_PAIRS: usize = 10;

/// Most registered regions of a device.
pub(super) const MAX_REGIONS: usize = 100;

/// A region of 4 GiB or more is registered, and then read and written at wrong places.
pub(super) const MAX_REGION_BYTES: usize = u32::MAX as usize;

/// A call that a rule forbids.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{rule}: found {found}, allowed {allowed}")]
pub struct RuleError {
    /// The rule's name.
    pub rule: &'static str,
    /// What the call would have done.
    pub found: String,
    /// What may be done.
    pub allowed: String,
}

#[expect(clippy::needless_pass_by_value, reason = "callers pass numbers and format_args!")]
fn check(
    holds: bool,
    rule: &'static str,
    found: impl ToString,
    allowed: impl ToString,
) -> Result<(), RuleError> {
    if holds {
        return Ok(());
    }
    Err(RuleError { rule, found: found.to_string(), allowed: allowed.to_string() })
}

/// Frames that a message of `bytes` bytes covers.
pub(super) const fn frames(bytes: usize) -> usize {
    bytes.div_ceil(FRAME_BYTES)
}

/// One more queue pair where there are `existing`.
pub(super) fn queue_pair(existing: usize) -> Result<(), RuleError> {
    check(
        existing < MAX_QUEUE_PAIRS,
        "queue pairs of one device",
        existing + 1,
        format_args!("at most {MAX_QUEUE_PAIRS}"),
    )
}

/// One more region where there are `existing`.
pub(super) fn region(existing: usize, address: usize, bytes: usize) -> Result<(), RuleError> {
    check(
        existing < MAX_REGIONS,
        "registered regions of one device",
        existing + 1,
        format_args!("at most {MAX_REGIONS}"),
    )?;
    check(
        bytes <= MAX_REGION_BYTES,
        "bytes of a registered region",
        bytes,
        format_args!("at most {MAX_REGION_BYTES}"),
    )?;
    check(
        bytes > 0 && address.is_multiple_of(PAGE_BYTES) && bytes.is_multiple_of(PAGE_BYTES),
        "alignment of a registered region",
        format_args!("{bytes} bytes at {address:#x}"),
        format_args!("whole pages of {PAGE_BYTES} bytes"),
    )
}

/// What a queue pair is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct QueueShape {
    /// Bytes of every message's slot: both sides have the same.
    pub(super) slot_bytes: usize,
    /// Messages that may be in each of both queues.
    pub(super) slots: usize,
    /// Scatter-gather entries of a message.
    pub(super) sges: usize,
}

impl QueueShape {
    /// Frames of one message.
    pub(super) const fn frames(&self) -> usize {
        frames(self.slot_bytes)
    }

    /// Checks what is asked for.
    pub(super) fn check(&self) -> Result<(), RuleError> {
        check(self.sges == 1, "scatter-gather entries of a message", self.sges, 1)?;
        check(
            self.slot_bytes.is_multiple_of(FRAME_BYTES) && self.slot_bytes > 0,
            "size of a message's slot",
            self.slot_bytes,
            format_args!("whole frames of {FRAME_BYTES} bytes"),
        )?;
        check(
            self.slot_bytes <= MAX_MESSAGE_BYTES,
            "bytes of a message",
            self.slot_bytes,
            format_args!("at most {MAX_MESSAGE_BYTES}"),
        )?;
        let depth = self.slots * self.frames();
        check(
            depth <= MAX_QUEUE_FRAMES,
            "depth of a queue in frames",
            depth,
            format_args!("at most {MAX_QUEUE_FRAMES}"),
        )
    }
}

/// How far a queue pair has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum QueueState {
    Init,
    ReadyToReceive,
    ReadyToSend,
}

/// What is known of one queue pair.
#[derive(Debug)]
pub(super) struct QueueBook {
    shape: QueueShape,
    state: QueueState,
    /// Frames that the device granted to each queue.
    granted: usize,
    sending: usize,
    receiving: usize,
}

impl QueueBook {
    /// A queue pair whose queues were granted `granted` frames.
    pub(super) fn new(shape: QueueShape, granted: usize) -> Result<Self, RuleError> {
        shape.check()?;
        let depth = shape.slots * shape.frames();
        check(
            depth <= granted,
            "depth of a queue in frames, as granted by the device",
            depth,
            format_args!("at most {granted}"),
        )?;
        Ok(Self { shape, state: QueueState::Init, granted, sending: 0, receiving: 0 })
    }

    /// The queue pair has come to `next`.
    pub(super) fn enter(&mut self, next: QueueState) -> Result<(), RuleError> {
        let follows = next as u8 == self.state as u8 + 1;
        let rule = "order of a queue pair's states";
        check(follows, rule, format_args!("{:?} to {next:?}", self.state), "one after the other")?;
        self.state = next;
        Ok(())
    }

    /// Counts a RECV of a slot of `bytes` bytes at `offset` of a region of `region` bytes.
    pub(super) fn receive(
        &mut self,
        offset: usize,
        bytes: usize,
        region: usize,
    ) -> Result<(), RuleError> {
        self.post("RECV", bytes)?;
        inside(offset, bytes, region)?;
        Self::count(&mut self.receiving, self.granted, self.shape.frames())
    }

    /// Counts a SEND.
    pub(super) fn send(
        &mut self,
        offset: usize,
        bytes: usize,
        region: usize,
    ) -> Result<(), RuleError> {
        self.post("SEND", bytes)?;
        inside(offset, bytes, region)?;
        Self::count(&mut self.sending, self.granted, self.shape.frames())
    }

    /// A RECV has completed.
    pub(super) fn received(&mut self) {
        self.receiving = self.receiving.saturating_sub(self.shape.frames());
    }

    /// A SEND has completed.
    pub(super) fn sent(&mut self) {
        self.sending = self.sending.saturating_sub(self.shape.frames());
    }

    fn post(&self, what: &str, bytes: usize) -> Result<(), RuleError> {
        let found = format_args!("a {what} in state {:?}", self.state);
        check(
            self.state == QueueState::ReadyToSend,
            "state of a queue pair that is posted to",
            found,
            "ReadyToSend",
        )?;
        check(
            frames(bytes) == self.shape.frames(),
            "frames of a message",
            format_args!("a {what} of {bytes} bytes, {} frames", frames(bytes)),
            format_args!("{} frames, as the peer's", self.shape.frames()),
        )
    }

    fn count(used: &mut usize, granted: usize, more: usize) -> Result<(), RuleError> {
        let found = *used + more;
        check(found <= granted, "frames in a queue", found, format_args!("at most {granted}"))?;
        *used = found;
        Ok(())
    }
}

fn inside(offset: usize, bytes: usize, region: usize) -> Result<(), RuleError> {
    let holds = offset.checked_add(bytes).is_some_and(|end| end <= region);
    let found = format_args!("{bytes} bytes at {offset}");
    check(holds, "place of a message", found, format_args!("within {region} bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: QueueShape = QueueShape { slot_bytes: 2 * FRAME_BYTES, slots: 4, sges: 1 };

    fn check_broken<T: std::fmt::Debug>(result: Result<T, RuleError>, rule: &str, found: &str) {
        let error = result.unwrap_err();
        assert_eq!((error.rule, error.found.as_str()), (rule, found));
    }

    fn ready() -> QueueBook {
        let mut book = QueueBook::new(SHAPE, 8).unwrap();
        book.enter(QueueState::ReadyToReceive).unwrap();
        book.enter(QueueState::ReadyToSend).unwrap();
        book
    }

    #[test]
    fn a_device_has_ten_queue_pairs() {
        assert_eq!(queue_pair(9), Ok(()));
        check_broken(queue_pair(10), "queue pairs of one device", "11");
    }

    #[test]
    fn a_device_has_a_hundred_regions_on_whole_pages_below_4_gib() {
        assert_eq!(region(99, PAGE_BYTES, PAGE_BYTES), Ok(()));
        check_broken(region(100, 0, PAGE_BYTES), "registered regions of one device", "101");
        let alignment = "alignment of a registered region";
        check_broken(region(0, 4096, PAGE_BYTES), alignment, "16384 bytes at 0x1000");
        check_broken(region(0, 0, 4096), alignment, "4096 bytes at 0x0");
        check_broken(region(0, 0, 1 << 32), "bytes of a registered region", "4294967296");
    }

    #[test]
    fn messages_have_at_most_4095_frames_and_one_entry() {
        let most = QueueShape { slot_bytes: 16_773_120, slots: 1, sges: 1 };
        assert_eq!(most.check(), Ok(()));
        let above = QueueShape { slot_bytes: 16_773_120 + FRAME_BYTES, ..most };
        check_broken(above.check(), "bytes of a message", "16777216");
        let odd = QueueShape { slot_bytes: 5000, ..most };
        check_broken(odd.check(), "size of a message's slot", "5000");
        let two = QueueShape { sges: 2, ..most };
        check_broken(two.check(), "scatter-gather entries of a message", "2");
    }

    #[test]
    fn queues_are_counted_in_frames_and_as_granted() {
        let deep = QueueShape { slots: 2048, ..SHAPE };
        check_broken(deep.check(), "depth of a queue in frames", "4096");
        let rule = "depth of a queue in frames, as granted by the device";
        check_broken(QueueBook::new(SHAPE, 7), rule, "8");
        let mut book = ready();
        for _ in 0..4 {
            book.receive(0, 8192, 8192).unwrap();
            book.send(0, 8192, 8192).unwrap();
        }
        check_broken(book.receive(0, 8192, 8192), "frames in a queue", "10");
        check_broken(book.send(0, 8192, 8192), "frames in a queue", "10");
        book.received();
        book.sent();
        book.receive(0, 8192, 8192).unwrap();
        book.send(0, 8192, 8192).unwrap();
    }

    #[test]
    fn nothing_is_posted_before_a_queue_pair_can_send() {
        let mut book = QueueBook::new(SHAPE, 8).unwrap();
        let rule = "state of a queue pair that is posted to";
        check_broken(book.receive(0, 8192, 8192), rule, "a RECV in state Init");
        book.enter(QueueState::ReadyToReceive).unwrap();
        check_broken(book.send(0, 8192, 8192), rule, "a SEND in state ReadyToReceive");
        let rule = "order of a queue pair's states";
        check_broken(
            book.enter(QueueState::ReadyToReceive),
            rule,
            "ReadyToReceive to ReadyToReceive",
        );
    }

    #[test]
    fn both_sides_of_a_message_have_the_same_frames() {
        let mut book = ready();
        // The last frame need not be full.
        book.send(0, 4097, 8192).unwrap();
        let rule = "frames of a message";
        check_broken(book.send(0, 4096, 8192), rule, "a SEND of 4096 bytes, 1 frames");
        check_broken(book.receive(0, 8193, 16384), rule, "a RECV of 8193 bytes, 3 frames");
    }

    #[test]
    fn messages_lie_within_their_region() {
        check_broken(ready().send(8192, 8192, 12_288), "place of a message", "8192 bytes at 8192");
    }
}
