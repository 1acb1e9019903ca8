//! Software prefetch of what is read next, cache line by cache line, since more at once would fill
//! the processor's line fill buffers.

#![expect(clippy::inline_always, reason = "compiled within the function of each platform")]

use std::ops::Range;

use crate::memory;

/// Bytes of a cache line.
pub(super) const LINE: usize = 64;

/// How far ahead of what is read is fetched to the L2 cache.
const DISTANCE: usize = 16 << 10;

/// How far ahead of what is read is fetched to the L1 cache.
const NEAR: usize = 2 << 10;

/// Addresses that are fetched while rows are read: the first run, then the other.
#[derive(Default)]
pub(super) struct Prefetch {
    next: usize,
    end: usize,
    other: Range<usize>,
}

/// Where the lines of one stretch are fetched.
#[derive(Clone, Copy)]
pub(super) struct Fetch(Option<[usize; 2]>);

/// The same, to the L2 cache alone: what is read from beginning to end comes from there by
/// itself.
#[derive(Clone, Copy)]
pub(super) struct FetchFar(Option<usize>);

impl Prefetch {
    /// What follows in the rows themselves, then the beginning of what is read after them.
    pub(super) fn new(rows: &Range<usize>, after: &Range<usize>) -> Self {
        let next = rows.end.min(rows.start + DISTANCE);
        let other = after.start..after.end.min(after.start + DISTANCE);
        Self { next, end: rows.end, other }
    }

    /// As many bytes further on as are read now, from `here` on.
    #[inline(always)]
    pub(super) fn stretch(&mut self, here: usize, bytes: usize) -> Fetch {
        let FetchFar(far) = self.far(bytes);
        Fetch(far.map(|far| [far, here + NEAR]))
    }

    /// As many bytes further on as are read now.
    #[inline(always)]
    pub(super) fn far(&mut self, bytes: usize) -> FetchFar {
        if self.next >= self.end {
            let Range { start, end } = std::mem::take(&mut self.other);
            (self.next, self.end) = (start, end);
        }
        let next = self.next;
        self.next += bytes;
        FetchFar((next < self.end).then_some(next))
    }
}

impl FetchFar {
    /// Fetches the lines that begin within the first `bytes` of the stretch.
    #[inline(always)]
    pub(super) fn lines(self, bytes: usize) {
        if let Self(Some(far)) = self {
            for at in (0..bytes).step_by(LINE) {
                memory::fetch(far + at);
            }
        }
    }
}

impl Fetch {
    /// Nothing.
    pub(super) const NONE: Self = Self(None);

    /// Fetches the lines that begin within `bytes` of the stretch.
    #[inline(always)]
    pub(super) fn lines(self, bytes: Range<usize>) {
        if let Self(Some([far, near])) = self {
            for at in (bytes.start.next_multiple_of(LINE)..bytes.end).step_by(LINE) {
                memory::fetch(far + at);
                memory::fetch_near(near + at);
            }
        }
    }
}
