//! Links between threads of one process. Frames pass as bytes, so that every check that guards
//! a socket is exercised here too.

use std::{
    collections::VecDeque,
    hint, mem,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicIsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use super::{Link, LinkEnd, LinkError};
use crate::{
    frame::{FrameError, HEADER_BYTES, Header, Notice},
    group::Deadline,
};

/// Frames that may wait unread. One exchange puts at most one frame on a link, so two would do;
/// more let a broadcasting rank run ahead.
const MAX_WAITING_FRAMES: usize = 16;

/// How long a receiver spins before it blocks: about what waking a thread costs.
const SPIN: Duration = Duration::from_micros(20);

/// One end of a pair.
pub struct MemoryLink {
    outgoing: Arc<Pipe>,
    incoming: Arc<Pipe>,
}

#[derive(Default)]
struct Pipe {
    state: Mutex<PipeState>,
    /// Frames waiting, readable without the lock while spinning; counts one more once closed.
    /// A reader may take a frame before it is counted, so it can be -1 for a moment.
    ready: AtomicIsize,
    filled: Condvar,
    drained: Condvar,
    ended: Condvar,
}

#[derive(Default)]
struct PipeState {
    frames: VecDeque<Vec<u8>>,
    spare: Vec<Vec<u8>>,
    end: Option<LinkEnd>,
}

impl Pipe {
    fn lock(&self) -> MutexGuard<'_, PipeState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a frame. Both the copy and the call to the reader happen without the lock: a reader
    /// that found it taken would go to sleep.
    fn push(&self, mut state: MutexGuard<'_, PipeState>, frame: &[u8]) {
        let mut buffer = state.spare.pop().unwrap_or_default();
        drop(state);
        buffer.clear();
        buffer.extend_from_slice(frame);
        self.lock().frames.push_back(buffer);
        self.ready.fetch_add(1, Ordering::Release);
        self.filled.notify_one();
    }

    fn end(&self, end: LinkEnd) {
        let mut state = self.lock();
        if state.end.is_none() {
            state.end = Some(end);
            self.ready.fetch_add(1, Ordering::Release);
        }
        self.filled.notify_all();
        self.drained.notify_all();
        self.ended.notify_all();
    }
}

impl MemoryLink {
    /// Both ends of a new link.
    #[must_use]
    pub fn pair() -> (Self, Self) {
        let (there, back) = (Arc::<Pipe>::default(), Arc::<Pipe>::default());
        let first = Self { outgoing: Arc::clone(&there), incoming: Arc::clone(&back) };
        (first, Self { outgoing: back, incoming: there })
    }
}

fn closed() -> LinkError {
    LinkError::Closed("the link was closed".to_owned())
}

impl Link for MemoryLink {
    fn send_now(&self, frame: &[u8]) -> Result<usize, LinkError> {
        let state = self.outgoing.lock();
        if state.end.is_some() {
            return Err(closed());
        }
        if state.frames.len() >= MAX_WAITING_FRAMES {
            return Ok(0);
        }
        self.outgoing.push(state, frame);
        Ok(frame.len())
    }

    fn send_rest(&self, rest: &[u8], deadline: Deadline) -> Result<(), LinkError> {
        let pipe = &self.outgoing;
        let full =
            |state: &mut PipeState| state.end.is_none() && state.frames.len() >= MAX_WAITING_FRAMES;
        let (mut state, wait) = pipe
            .drained
            .wait_timeout_while(pipe.lock(), deadline.left(), full)
            .unwrap_or_else(PoisonError::into_inner);
        if state.end.is_some() {
            return Err(closed());
        }
        if wait.timed_out() && full(&mut state) {
            return Err(LinkError::Timeout);
        }
        pipe.push(state, rest);
        Ok(())
    }

    fn receive_header(&self, frame: &mut Vec<u8>, deadline: Deadline) -> Result<Header, LinkError> {
        let pipe = &self.incoming;
        let spin_end = Instant::now() + SPIN.min(deadline.left());
        let mut turns = 0_u32;
        while pipe.ready.load(Ordering::Acquire) <= 0 && Instant::now() < spin_end {
            turns += 1;
            // With more ranks than cores the one waited for may need this core.
            if turns.is_multiple_of(16) { thread::yield_now() } else { hint::spin_loop() }
        }
        let empty = |state: &mut PipeState| state.frames.is_empty() && state.end.is_none();
        let (mut state, _) = pipe
            .filled
            .wait_timeout_while(pipe.lock(), deadline.left(), empty)
            .unwrap_or_else(PoisonError::into_inner);
        let Some(next) = state.frames.pop_front() else {
            return Err(if state.end.is_some() { closed() } else { LinkError::Timeout });
        };
        pipe.ready.fetch_sub(1, Ordering::Release);
        if state.spare.len() < MAX_WAITING_FRAMES {
            state.spare.push(mem::take(frame));
        }
        drop(state);
        pipe.drained.notify_one();
        *frame = next;
        let header = frame.first_chunk::<HEADER_BYTES>();
        let header = header.ok_or_else(|| LinkError::Closed("a frame was truncated".to_owned()))?;
        Ok(Header::parse(header)?)
    }

    fn receive_payload(
        &self,
        header: &Header,
        frame: &mut Vec<u8>,
        _: Deadline,
    ) -> Result<(), LinkError> {
        if frame.len() - HEADER_BYTES == header.payload_bytes as usize {
            Ok(())
        } else {
            Err(LinkError::Closed("a frame was truncated".to_owned()))
        }
    }

    fn watch(&self) -> LinkEnd {
        let pipe = &self.incoming;
        let state = pipe
            .ended
            .wait_while(pipe.lock(), |state| state.end.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        let end = state.end.clone();
        end.expect("the wait ends only when there is an end")
    }

    fn abort(&self, frame: &[u8]) {
        let end = match frame.split_first_chunk::<HEADER_BYTES>() {
            Some((header, payload)) => {
                Header::parse(header).and_then(|header| Ok((header.epoch, Notice::parse(payload)?)))
            }
            None => Err(FrameError::Abort),
        };
        self.outgoing.end(match end {
            Ok((epoch, notice)) => LinkEnd::Notice { epoch, notice },
            Err(error) => LinkEnd::Closed(error.to_string()),
        });
        self.close();
    }

    fn close(&self) {
        self.outgoing.end(LinkEnd::Closed("it closed the link".to_owned()));
        self.incoming.end(LinkEnd::Closed("the link was closed here".to_owned()));
    }
}

impl Drop for MemoryLink {
    fn drop(&mut self) {
        self.close();
    }
}
