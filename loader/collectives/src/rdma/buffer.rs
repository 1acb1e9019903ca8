//! Page-aligned memory that a device reads and writes by itself. Bytes are copied in and out and
//! never borrowed: what a device may write at any moment has no Rust reference to it.
#![expect(unsafe_code, reason = "memory that a device shares")]

use std::{
    alloc::{self, Layout},
    ptr::{self, NonNull},
};

/// Page size of Apple silicon; a multiple of that of every other machine that serves.
pub(super) const PAGE_BYTES: usize = 16 << 10;

/// Memory on pages of its own, zeroed at first.
pub(super) struct Buffer {
    memory: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it owns its memory, whose address says nothing about a thread.
unsafe impl Send for Buffer {}
// SAFETY: bytes are only copied, through raw pointers. Who may touch which range when is ruled by
// the link: a slot that is posted belongs to the device, any other one to who holds the link's lock.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// At least `bytes` bytes, in whole pages; `None` where there is no memory.
    pub(super) fn new(bytes: usize) -> Option<Self> {
        let bytes = bytes.max(1).checked_next_multiple_of(PAGE_BYTES)?;
        let layout = Layout::from_size_align(bytes, PAGE_BYTES).ok()?;
        // SAFETY: the size is not zero.
        let memory = NonNull::new(unsafe { alloc::alloc_zeroed(layout) })?;
        Some(Self { memory, layout })
    }

    pub(super) fn len(&self) -> usize {
        self.layout.size()
    }

    pub(super) fn address(&self) -> *mut u8 {
        self.memory.as_ptr()
    }

    /// Copies `bytes` to `offset`.
    pub(super) fn write(&self, offset: usize, bytes: &[u8]) {
        self.check(offset, bytes.len());
        // SAFETY: the range is within the memory, as checked; a caller's slice lies elsewhere.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.address().add(offset), bytes.len()) }
    }

    /// Copies from `offset` into `bytes`.
    pub(super) fn read(&self, offset: usize, bytes: &mut [u8]) {
        self.check(offset, bytes.len());
        let from = self.address().wrapping_add(offset);
        // SAFETY: the range is within the memory, as checked; a caller's slice lies elsewhere.
        unsafe { ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) }
    }

    /// Appends the `len` bytes from `offset` to `bytes`.
    pub(super) fn append(&self, offset: usize, len: usize, bytes: &mut Vec<u8>) {
        self.check(offset, len);
        bytes.reserve(len);
        let from = self.address().wrapping_add(offset);
        // SAFETY: the range is within the memory, as checked, and the vector has room for it, which
        // the copy initialises.
        unsafe {
            ptr::copy_nonoverlapping(from, bytes.as_mut_ptr().add(bytes.len()), len);
            bytes.set_len(bytes.len() + len);
        }
    }

    fn check(&self, offset: usize, len: usize) {
        let end = offset.checked_add(len);
        assert!(
            end.is_some_and(|end| end <= self.len()),
            "{len} bytes at {offset} of {}",
            self.len()
        );
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: it was allocated with this layout, and nothing refers to it any more.
        unsafe { alloc::dealloc(self.address(), self.layout) }
    }
}
