//! Bytes that begin on a page boundary.

use std::fmt;

/// Page size of Apple silicon; memory that begins and ends on such boundaries can be handed to
/// the GPU without a copy. A multiple of every other page size in use.
pub const PAGE_BYTES: usize = 16 << 10;

/// Bytes that begin on a boundary of [`PAGE_BYTES`] and own their last page whole.
pub(super) struct PageBytes {
    storage: Vec<u8>,
    start: usize,
    len: usize,
}

impl PageBytes {
    /// `len` zeros.
    pub(super) fn zeroed(len: usize) -> Self {
        // Zeroed memory comes from the system untouched, so its pages are first written by the
        // reading threads. It never moves: `storage` is not resized.
        let storage = vec![0; len.next_multiple_of(PAGE_BYTES) + PAGE_BYTES];
        let start = storage.as_ptr().align_offset(PAGE_BYTES);
        assert!(start <= PAGE_BYTES, "a byte can be aligned to a page");
        Self { storage, start, len }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.storage[self.start..self.start + self.len]
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.storage[self.start..self.start + self.len]
    }
}

impl fmt::Debug for PageBytes {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} bytes", self.len)
    }
}
