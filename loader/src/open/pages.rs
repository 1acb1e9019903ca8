//! Bytes that begin on a page boundary.

use std::fmt;

#[cfg(target_os = "linux")]
use memmap2::Advice;
use memmap2::MmapMut;

/// Page size of Apple silicon; memory that begins and ends on such boundaries can be handed to
/// the GPU without a copy. A multiple of every other page size in use.
pub const PAGE_BYTES: usize = 16 << 10;

/// Size and boundary of the large pages that Linux gives where it is asked: weights on them cost
/// a thousandth of the page faults while loading, and fewer look-ups of addresses while decoding.
const LARGE_PAGE_BYTES: usize = 2 << 20;

/// Bytes that begin on a boundary of [`PAGE_BYTES`] and own their last page whole.
pub(super) struct PageBytes {
    storage: Storage,
    start: usize,
    len: usize,
}

enum Storage {
    Heap(Vec<u8>),
    /// Memory of the system's, not of a file.
    Mapped(MmapMut),
}

impl PageBytes {
    /// `len` zeros.
    pub(super) fn zeroed(len: usize) -> Self {
        let mapped = if len < LARGE_PAGE_BYTES { None } else { Self::on_large_pages(len) };
        mapped.unwrap_or_else(|| Self::on_heap(len))
    }

    fn on_heap(len: usize) -> Self {
        // Zeroed memory comes from the system untouched, so its pages are first written by the
        // reading threads. It never moves: `storage` is not resized.
        let storage = vec![0; len.next_multiple_of(PAGE_BYTES) + PAGE_BYTES];
        let start = storage.as_ptr().align_offset(PAGE_BYTES);
        assert!(start <= PAGE_BYTES, "a byte can be aligned to a page");
        Self { storage: Storage::Heap(storage), start, len }
    }

    /// The same on a boundary of large pages, in address space that is not touched elsewhere.
    /// None where the system refuses.
    fn on_large_pages(len: usize) -> Option<Self> {
        let storage =
            MmapMut::map_anon(len.next_multiple_of(PAGE_BYTES) + LARGE_PAGE_BYTES).ok()?;
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
        Some(Self { storage: Storage::Mapped(storage), start, len })
    }

    pub(super) fn bytes(&self) -> &[u8] {
        let all: &[u8] = match &self.storage {
            Storage::Heap(all) => all,
            Storage::Mapped(all) => all,
        };
        &all[self.start..self.start + self.len]
    }

    /// The bytes with the rest of their last page, which is zeros.
    pub(super) fn whole_pages(&self) -> &[u8] {
        let all: &[u8] = match &self.storage {
            Storage::Heap(all) => all,
            Storage::Mapped(all) => all,
        };
        &all[self.start..self.start + self.len.next_multiple_of(PAGE_BYTES)]
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        let all: &mut [u8] = match &mut self.storage {
            Storage::Heap(all) => all,
            Storage::Mapped(all) => all,
        };
        &mut all[self.start..self.start + self.len]
    }
}

impl fmt::Debug for PageBytes {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} bytes", self.len)
    }
}
