//! Bytes that begin on a page boundary.

use std::{fmt, sync::Arc};

#[cfg(target_os = "linux")]
use memmap2::Advice;
use memmap2::MmapMut;

/// Page size of Apple silicon; memory that begins and ends on such boundaries can be handed to
/// the GPU without a copy. A multiple of every other page size in use.
pub const PAGE_BYTES: usize = 16 << 10;

/// Size and boundary of the large pages that Linux gives where it is asked: weights on them cost
/// a thousandth of the page faults while loading, and fewer look-ups of addresses while decoding.
pub(super) const LARGE_PAGE_BYTES: usize = 2 << 20;

/// Memory for several runs of bytes, each of which begins on a boundary of [`PAGE_BYTES`] and owns
/// its last page whole. Asked for at once, so that short runs lie on large pages too.
pub(super) struct Region {
    storage: Storage,
    /// Of the first run.
    start: usize,
    lens: Vec<usize>,
}

enum Storage {
    Heap(Vec<u8>),
    /// Memory of the system's, not of a file.
    Mapped(MmapMut),
}

impl Storage {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Heap(all) => all,
            Self::Mapped(all) => all,
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Heap(all) => all,
            Self::Mapped(all) => all,
        }
    }
}

impl Region {
    /// Runs of zeros.
    pub(super) fn zeroed(lens: Vec<usize>) -> Self {
        let len = lens.iter().map(|len| len.next_multiple_of(PAGE_BYTES)).sum();
        let mapped = if len < LARGE_PAGE_BYTES { None } else { on_large_pages(len) };
        let (storage, start) = mapped.unwrap_or_else(|| on_heap(len));
        Self { storage, start, lens }
    }

    /// The runs, to be written.
    pub(super) fn runs_mut(&mut self) -> Vec<&mut [u8]> {
        let mut rest = &mut self.storage.bytes_mut()[self.start..];
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
        let (storage, mut start) = (Arc::new(self.storage), self.start);
        let run = |len: usize| {
            let run = PageBytes { storage: Arc::clone(&storage), start, len };
            start += len.next_multiple_of(PAGE_BYTES);
            run
        };
        self.lens.into_iter().map(run).collect()
    }
}

fn on_heap(len: usize) -> (Storage, usize) {
    // Zeroed memory comes from the system untouched, so its pages are first written by the
    // reading threads. It never moves: `storage` is not resized.
    let storage = vec![0; len + PAGE_BYTES];
    let start = storage.as_ptr().align_offset(PAGE_BYTES);
    assert!(start <= PAGE_BYTES, "a byte can be aligned to a page");
    (Storage::Heap(storage), start)
}

/// The same on a boundary of large pages, in address space that is not touched elsewhere. None
/// where the system refuses.
fn on_large_pages(len: usize) -> Option<(Storage, usize)> {
    let storage = MmapMut::map_anon(len + LARGE_PAGE_BYTES).ok()?;
    let start = storage.as_ptr().align_offset(LARGE_PAGE_BYTES);
    assert!(start <= LARGE_PAGE_BYTES, "a byte can be aligned to a large page");
    // Only whole large pages: the rest of the last one would be memory for nothing.
    let whole = len / LARGE_PAGE_BYTES * LARGE_PAGE_BYTES;
    #[cfg(target_os = "linux")]
    {
        // A kernel without them gives small pages.
        let _ = storage.advise_range(Advice::HugePage, start, whole);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = whole;
    Some((Storage::Mapped(storage), start))
}

/// A run of a [`Region`].
pub(super) struct PageBytes {
    storage: Arc<Storage>,
    start: usize,
    len: usize,
}

impl PageBytes {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.storage.bytes()[self.start..self.start + self.len]
    }

    /// The bytes with the rest of their last page, which is zeros.
    pub(super) fn whole_pages(&self) -> &[u8] {
        &self.storage.bytes()[self.start..self.start + self.len.next_multiple_of(PAGE_BYTES)]
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
