//! A link over the queue pairs of one or more cables between two machines.
//!
//! A frame is sent in messages, each in a slot: in small slots (a decode step's hidden vector) on
//! the first cable, or in large ones that go round all cables. Every lane has slots of one size, so
//! a SEND and the RECV that waits for it cover the same number of frames, as Apple's devices want.
//! Data messages are numbered over all lanes and taken in that order.
//!
//! **Credits.** Every message carries the counts of posted receives. Where only one side sends, the
//! other one answers with a credit message for each half of a lane's receives. These go on the small
//! lane, on which data leaves [`Lanes::reserve`] credits: two messages for every lane, more than can
//! be on their way before the other side must have read one, so none waits for another.
//!
//! **Waiting.** A wait polls for [`SPIN`], yielding its core in between, and from then on sleeps a
//! sixteenth of the time waited so far, between [`SHORTEST_SLEEP`] and [`LONGEST_SLEEP`]. So a
//! wait is at most a sixteenth longer than it must be, and one that lasts polls 200 times a second.
//! A group that waits for nothing polls nothing.
//!
//! **The end.** A queue pair does not tell that its peer has died. The control channel does, as for
//! TCP: whoever watches it wakes every wait. A message that is lost is found by the next one's
//! number, or by the deadline.

use std::{
    io::Write as _,
    net::Shutdown,
    sync::{
        Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use shardpack_identity::Channel;

use super::{
    lane::{Envelope, Lane, LaneError},
    slot::{Kind, MAX_LANES},
};
use crate::{
    frame::{HEADER_BYTES, Header},
    group::Deadline,
    link::{Link, LinkEnd, LinkError, SPIN, prepare, read_notice},
};

const SHORTEST_SLEEP: Duration = Duration::from_micros(20);
const LONGEST_SLEEP: Duration = Duration::from_millis(5);

/// How long a side that closes waits until its last messages have left.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(100);

/// How long after the end of the control channel messages may still come that were sent before it:
/// both take different ways.
const LATE_MESSAGES: Duration = Duration::from_millis(20);

/// A frame that takes more small slots than this goes in large ones.
const MAX_SMALL_MESSAGES: usize = 4;

/// The lanes of a link: small slots on the first, large ones on the others, one for each cable.
pub(super) struct Lanes {
    all: Vec<Lane>,
    epoch: u64,
    next_sent: u64,
    next_taken: u64,
    /// Lane of the next large message.
    turn: usize,
    failure: Option<String>,
}

impl Lanes {
    /// Of the small lane and the large ones, in the same order on both sides.
    pub(super) fn new(mut lanes: Vec<Lane>, epoch: u64) -> Self {
        assert!((2..=MAX_LANES).contains(&lanes.len()), "a small lane and a few large ones");
        for (number, lane) in (0..).zip(&mut lanes) {
            lane.number = number;
        }
        Self { all: lanes, epoch, next_sent: 0, next_taken: 0, turn: 0, failure: None }
    }

    /// Credits of the small lane that only credit messages use.
    fn reserve(&self) -> usize {
        2 * self.all.len() + 1
    }

    fn posted(&self) -> [u32; MAX_LANES] {
        let mut posted = [0; MAX_LANES];
        for (count, lane) in posted.iter_mut().zip(&self.all) {
            *count = lane.posted;
        }
        posted
    }

    /// Keeps the first failure: a lane that has failed carries nothing any more.
    fn keep<T>(&mut self, result: Result<T, LaneError>) -> Result<T, LinkError> {
        result.map_err(|error| {
            let reason = with_sources(&error);
            LinkError::Broken(self.failure.get_or_insert(reason).clone())
        })
    }

    fn check(&self) -> Result<(), LinkError> {
        self.failure.clone().map_or(Ok(()), |reason| Err(LinkError::Broken(reason)))
    }

    /// Takes what the devices have done.
    fn progress(&mut self) -> Result<(), LinkError> {
        self.check()?;
        let result = self.poll();
        self.keep(result)
    }

    fn poll(&mut self) -> Result<(), LaneError> {
        for index in 0..self.all.len() {
            let polled = self.all[index].poll(self.epoch)?;
            for posted in polled.posted {
                for (lane, count) in self.all.iter_mut().zip(posted) {
                    lane.grant(count)?;
                }
            }
        }
        self.return_credit()
    }

    /// Tells the peer of receives, if it knows too few and nothing else carries the counts.
    fn return_credit(&mut self) -> Result<(), LaneError> {
        if self.all[0].credit() > 0 && self.all.iter().any(Lane::owes_credit) {
            self.send(0, Kind::Credit, &[])?;
        }
        Ok(())
    }

    fn send(&mut self, lane: usize, kind: Kind, payload: &[u8]) -> Result<(), LaneError> {
        let sequence = if kind == Kind::Data { self.next_sent } else { 0 };
        let envelope = Envelope { kind, epoch: self.epoch, sequence, posted: self.posted() };
        self.all[lane].send(envelope, payload)?;
        self.all.iter_mut().for_each(Lane::has_told);
        self.next_sent += u64::from(kind == Kind::Data);
        Ok(())
    }

    /// Sends as much of `bytes` as there is credit for; returns how much.
    fn send_some(&mut self, bytes: &[u8]) -> Result<usize, LinkError> {
        let mut sent = 0;
        while sent < bytes.len() {
            let rest = &bytes[sent..];
            let Some(lane) = self.lane_for(rest.len()) else { break };
            let payload = &rest[..rest.len().min(self.all[lane].payload_bytes())];
            let result = self.send(lane, Kind::Data, payload);
            self.keep(result)?;
            sent += payload.len();
        }
        Ok(sent)
    }

    /// The lane that the next message of `bytes` bytes goes on, if it has credit.
    fn lane_for(&mut self, bytes: usize) -> Option<usize> {
        if bytes <= MAX_SMALL_MESSAGES * self.all[0].payload_bytes() {
            return (self.all[0].credit() > self.reserve()).then_some(0);
        }
        let large = self.all.len() - 1;
        let turn = (0..large).map(|step| (self.turn + step) % large);
        let lane = turn.into_iter().find(|lane| self.all[1 + lane].credit() > 0)?;
        self.turn = (lane + 1) % large;
        Some(1 + lane)
    }

    /// Appends the next message to `into`, if it has come.
    fn take(&mut self, into: &mut Vec<u8>) -> Result<bool, LinkError> {
        let next = Some(self.next_taken);
        let Some(lane) = self.all.iter_mut().find(|lane| lane.next() == next) else {
            return Ok(false);
        };
        let taken = lane.take(into);
        self.next_taken += 1;
        let result = taken.and_then(|()| self.return_credit());
        self.keep(result)?;
        Ok(true)
    }

    fn is_sending(&self) -> bool {
        self.failure.is_none() && self.all.iter().any(Lane::is_sending)
    }
}

/// An error and what caused it, as one sentence.
pub(super) fn with_sources(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

/// A link over RDMA, with a control channel over TCP.
pub struct RdmaLink {
    lanes: Mutex<Lanes>,
    data: Channel,
    control: Channel,
    has_ended: AtomicBool,
    /// When that was seen.
    ended: OnceLock<Instant>,
    cables: Vec<String>,
}

impl RdmaLink {
    /// Over connected lanes; `data` carries nothing, and its end is the link's.
    pub(super) fn new(
        lanes: Lanes,
        (data, control): (Channel, Channel),
        cables: Vec<String>,
    ) -> std::io::Result<Self> {
        prepare(&data, &control)?;
        let (has_ended, ended) = (AtomicBool::new(false), OnceLock::new());
        Ok(Self { lanes: Mutex::new(lanes), data, control, has_ended, ended, cables })
    }

    /// The devices of this side that the link uses.
    #[must_use]
    pub fn cables(&self) -> &[String] {
        &self.cables
    }

    fn lock(&self) -> MutexGuard<'_, Lanes> {
        // A panic in between leaves numbers that the next message's check finds.
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn mark_ended(&self) {
        self.ended.get_or_init(Instant::now);
        self.has_ended.store(true, Ordering::Release);
    }

    /// Polls until `look` finds something.
    fn wait<T>(
        &self,
        deadline: Deadline,
        mut look: impl FnMut(&mut Lanes) -> Result<Option<T>, LinkError>,
    ) -> Result<T, LinkError> {
        let start = Instant::now();
        loop {
            let has_ended = self.has_ended.load(Ordering::Acquire);
            {
                let mut lanes = self.lock();
                // What came before a lane failed is still taken.
                let progress = lanes.progress();
                if let Some(found) = look(&mut lanes)? {
                    return Ok(found);
                }
                progress?;
            }
            if has_ended && self.ended.get().is_none_or(|at| at.elapsed() > LATE_MESSAGES) {
                return Err(LinkError::Closed("the link was closed".to_owned()));
            }
            let left = deadline.left();
            if left.is_zero() {
                return Err(LinkError::Timeout);
            }
            match pause(start.elapsed()) {
                None => thread::yield_now(),
                Some(pause) => thread::sleep(pause.min(left)),
            }
        }
    }

    /// Appends the next message to `frame`.
    fn receive(&self, frame: &mut Vec<u8>, deadline: Deadline) -> Result<(), LinkError> {
        self.wait(deadline, |lanes| Ok(lanes.take(frame)?.then_some(())))
    }

    fn shut(&self) {
        self.mark_ended();
        for stream in [&self.control, &self.data] {
            // It may be closed from the other side already.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// How long a wait that has lasted so long sleeps before it polls again; none while it spins.
fn pause(waited: Duration) -> Option<Duration> {
    (waited >= SPIN).then(|| (waited / 16).clamp(SHORTEST_SLEEP, LONGEST_SLEEP))
}

impl Link for RdmaLink {
    fn send_now(&self, frame: &[u8]) -> Result<usize, LinkError> {
        if self.has_ended.load(Ordering::Acquire) {
            return Err(LinkError::Closed("the link was closed".to_owned()));
        }
        let mut lanes = self.lock();
        lanes.progress()?;
        lanes.send_some(frame)
    }

    fn send_rest(&self, rest: &[u8], deadline: Deadline) -> Result<(), LinkError> {
        let mut sent = 0;
        while sent < rest.len() {
            sent += self.wait(deadline, |lanes| {
                lanes.check()?;
                let count = lanes.send_some(&rest[sent..])?;
                Ok((count > 0).then_some(count))
            })?;
        }
        Ok(())
    }

    fn receive_header(&self, frame: &mut Vec<u8>, deadline: Deadline) -> Result<Header, LinkError> {
        frame.clear();
        self.receive(frame, deadline)?;
        let header = frame.first_chunk::<HEADER_BYTES>().ok_or_else(truncated)?;
        Ok(Header::parse(header)?)
    }

    fn receive_payload(
        &self,
        header: &Header,
        frame: &mut Vec<u8>,
        deadline: Deadline,
    ) -> Result<(), LinkError> {
        let end = HEADER_BYTES + header.payload_bytes as usize;
        while frame.len() < end {
            self.receive(frame, deadline)?;
        }
        // A message holds bytes of one frame only.
        if frame.len() == end { Ok(()) } else { Err(truncated()) }
    }

    fn watch(&self) -> LinkEnd {
        let end = read_notice(&mut &self.control);
        self.mark_ended();
        end.unwrap_or_else(|error| LinkEnd::Closed(error.to_string()))
    }

    fn abort(&self, frame: &[u8]) {
        // A rank that cannot be notified sees the connection close.
        let _ = (&self.control).write_all(frame);
        self.shut();
    }

    fn close(&self) {
        let deadline = Deadline::after(DRAIN_TIMEOUT);
        if !self.has_ended.load(Ordering::Acquire) {
            // Whether they left or not, the link closes.
            let _ = self.wait(deadline, |lanes| Ok((!lanes.is_sending()).then_some(())));
        }
        self.shut();
    }
}

impl Drop for RdmaLink {
    fn drop(&mut self) {
        self.close();
    }
}

fn truncated() -> LinkError {
    LinkError::Broken("a frame's messages do not make up the frame".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_polls_seldom_and_is_a_sixteenth_longer_at_most() {
        assert_eq!(pause(SPIN / 2), None, "at first it spins");
        let (mut waited, mut polls) = (SPIN, 0);
        while waited < Duration::from_secs(2) {
            let pause = pause(waited).unwrap();
            assert!(pause <= SHORTEST_SLEEP.max(waited / 16), "{pause:?} after {waited:?}");
            waited += pause;
            polls += 1;
        }
        assert!(polls <= 2 * 200 + 100, "{polls} polls in two seconds");
    }
}
