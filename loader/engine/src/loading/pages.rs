//! Bytes that begin on a page boundary.

use std::{fmt, sync::Arc};

use super::memory::Memory;

/// Page size of Apple silicon; memory that begins and ends on such boundaries can be handed to
/// the GPU without a copy. A multiple of every other page size in use.
pub const PAGE_BYTES: usize = 16 << 10;

/// Memory for several runs of bytes, each of which begins on a boundary of [`PAGE_BYTES`] and owns
/// its last page whole. Asked for at once, so that short runs lie on large pages too.
pub(super) struct Region {
    memory: Memory,
    lens: Vec<usize>,
}

impl Region {
    /// Runs of zeros.
    pub(super) fn zeroed(lens: Vec<usize>) -> Self {
        let len = lens.iter().map(|len| len.next_multiple_of(PAGE_BYTES)).sum();
        Self { memory: Memory::on_large_pages(len, PAGE_BYTES), lens }
    }

    /// The runs, to be written.
    pub(super) fn runs_mut(&mut self) -> Vec<&mut [u8]> {
        let mut rest = self.memory.bytes_mut();
        let mut runs = Vec::with_capacity(self.lens.len());
        for len in &self.lens {
            let (run, others) = rest.split_at_mut(len.next_multiple_of(PAGE_BYTES));
            runs.push(&mut run[..*len]);
            rest = others;
        }
        runs
    }

    /// The runs, written; the memory lives as long as one of them.
    pub(super) fn share(self) -> Vec<PageBytes> {
        let (memory, mut start) = (Arc::new(self.memory), 0);
        let run = |len: usize| {
            let run = PageBytes { memory: Arc::clone(&memory), start, len };
            start += len.next_multiple_of(PAGE_BYTES);
            run
        };
        self.lens.into_iter().map(run).collect()
    }
}

/// A run of a [`Region`].
pub(super) struct PageBytes {
    memory: Arc<Memory>,
    start: usize,
    len: usize,
}

impl PageBytes {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.memory.bytes()[self.start..self.start + self.len]
    }

    /// The bytes with the rest of their last page, which is zeros.
    pub(super) fn whole_pages(&self) -> &[u8] {
        &self.memory.bytes()[self.start..self.start + self.len.next_multiple_of(PAGE_BYTES)]
    }
}

impl fmt::Debug for PageBytes {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} bytes", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loading::memory::LARGE_PAGE_BYTES;

    #[test]
    fn runs_begin_on_pages_and_own_their_last_one() {
        for lens in [vec![0], vec![1, 0, PAGE_BYTES, 5], vec![LARGE_PAGE_BYTES + 1, PAGE_BYTES + 1]]
        {
            let mut region = Region::zeroed(lens.clone());
            for (index, run) in region.runs_mut().into_iter().enumerate() {
                run.fill(index as u8 + 1);
            }
            for (index, (run, len)) in region.share().iter().zip(&lens).enumerate() {
                let (bytes, pages) = (run.bytes(), run.whole_pages());
                assert_eq!((bytes.len(), bytes.as_ptr().addr() % PAGE_BYTES), (*len, 0));
                assert!(bytes.iter().all(|byte| *byte == index as u8 + 1));
                assert_eq!(pages.len(), len.next_multiple_of(PAGE_BYTES));
                assert!(pages[*len..].iter().all(|byte| *byte == 0));
            }
        }
    }
}
