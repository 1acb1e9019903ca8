//! Prefetch of what the next job will read first, by threads that wait for it.
//!
//! Between two products of a step one thread computes what lies between them, and memory would
//! stand still. The others then fetch the beginning of their own shares of the next matrices.

use std::{
    ops::Range,
    sync::atomic::{AtomicU32, AtomicUsize, Ordering},
};

use crate::memory;

/// Runs of bytes of one thread's beginning: words, scales and biases of three matrices.
const RUNS: usize = 9;

/// Lines that are fetched between two looks at whether there is work.
const LINES_AT_ONCE: usize = 8;

/// Bytes of a cache line.
const LINE: usize = 64;

/// One thread's next bytes: addresses, of which nothing is read. Fetching cannot fail, whatever
/// they point to, so they need not be of one moment.
#[repr(align(128))]
#[derive(Default)]
pub(super) struct Prefetch {
    number: AtomicU32,
    runs: [[AtomicUsize; 2]; RUNS],
}

impl Prefetch {
    /// Names the bytes that the thread will read next.
    pub(super) fn announce(&self, runs: &[Range<usize>]) {
        for (index, place) in self.runs.iter().enumerate() {
            let run = runs.get(index).cloned().unwrap_or_default();
            place[0].store(run.start, Ordering::Relaxed);
            place[1].store(run.end, Ordering::Relaxed);
        }
        self.number.fetch_add(1, Ordering::Release);
    }
}

/// How far a thread has come with what was announced.
#[derive(Default)]
pub(super) struct Cursor {
    number: u32,
    run: usize,
    rest: Range<usize>,
}

impl Cursor {
    /// Fetches some lines of what was announced; whether there were any left.
    pub(super) fn fetch(&mut self, prefetch: &Prefetch) -> bool {
        let number = prefetch.number.load(Ordering::Acquire);
        if self.number != number {
            *self = Self { number, run: 0, rest: 0..0 };
        }
        if self.rest.is_empty() {
            let Some([start, end]) = prefetch.runs.get(self.run) else { return false };
            self.run += 1;
            self.rest = start.load(Ordering::Relaxed)..end.load(Ordering::Relaxed);
        }
        let end = self.rest.end.min(self.rest.start + LINES_AT_ONCE * LINE);
        for address in (self.rest.start..end).step_by(LINE) {
            memory::fetch(address);
        }
        self.rest.start = end;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How often a cursor finds something to fetch.
    fn fetches(cursor: &mut Cursor, prefetch: &Prefetch) -> usize {
        (0..100).take_while(|_| cursor.fetch(prefetch)).count()
    }

    #[test]
    fn what_is_announced_is_fetched_once() {
        const AT_ONCE: usize = LINES_AT_ONCE * LINE;
        let bytes = vec![0_u8; 8 * AT_ONCE];
        let start = bytes.as_ptr().addr();
        let (prefetch, mut cursor) = (Prefetch::default(), Cursor::default());
        assert_eq!(fetches(&mut cursor, &prefetch), RUNS, "nothing but empty runs");
        for runs in 1..=2 {
            let run = |index: usize| start + index..start + index + 3 * AT_ONCE;
            prefetch.announce(&(0..runs).map(run).collect::<Vec<_>>());
            assert_eq!(fetches(&mut cursor, &prefetch), 3 * runs + RUNS - runs);
            assert_eq!(fetches(&mut cursor, &prefetch), 0);
        }
    }
}
