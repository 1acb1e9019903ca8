//! Zeroed bytes on a boundary, on large pages where there are enough: what weights and the keys and
//! values of long sequences lie in.

use std::fmt;

use memmap2::MmapMut;

/// Size and boundary of the large pages that Linux gives where it is asked. Weights on them cost a
/// thousandth of the page faults while loading. Attention over 4096 keys is a tenth faster on them,
/// on one thread a fifth: addresses are looked up less often, and fetches ahead do not end at every
/// small page.
pub(super) const LARGE_PAGE_BYTES: usize = 2 << 20;

/// Bytes that are read and written and do not move.
pub(crate) struct Memory {
    storage: Storage,
    start: usize,
    len: usize,
    boundary: usize,
}

enum Storage {
    Heap(Vec<u8>),
    /// Memory of the system's, not of a file.
    Mapped(MmapMut),
}

impl Memory {
    /// Zeros that begin on a multiple of `boundary`.
    pub(crate) fn zeroed(len: usize, boundary: usize) -> Self {
        // Zeroed memory comes from the system untouched, so its pages are cleared by whoever writes
        // to them first. It never moves: `storage` is not resized.
        let storage = vec![0; len + boundary];
        let start = storage.as_ptr().align_offset(boundary);
        assert!(start <= boundary, "a byte can be aligned to {boundary}");
        Self { storage: Storage::Heap(storage), start, len, boundary }
    }

    /// The same on large pages, in address space that is not touched elsewhere, where there are
    /// enough for one and the system gives them; the boundary is at most theirs.
    pub(crate) fn on_large_pages(len: usize, boundary: usize) -> Self {
        let mapped = if len < LARGE_PAGE_BYTES { None } else { mapped(len, boundary) };
        mapped.unwrap_or_else(|| Self::zeroed(len, boundary))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        let all: &[u8] = match &self.storage {
            Storage::Heap(all) => all,
            Storage::Mapped(all) => all,
        };
        &all[self.start..self.start + self.len]
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        let all: &mut [u8] = match &mut self.storage {
            Storage::Heap(all) => all,
            Storage::Mapped(all) => all,
        };
        &mut all[self.start..self.start + self.len]
    }
}

/// None where the system refuses.
fn mapped(len: usize, boundary: usize) -> Option<Memory> {
    let storage = MmapMut::map_anon(len + LARGE_PAGE_BYTES).ok()?;
    let start = storage.as_ptr().align_offset(LARGE_PAGE_BYTES);
    assert!(start <= LARGE_PAGE_BYTES, "a byte can be aligned to a large page");
    #[cfg(target_os = "linux")]
    {
        // Only whole large pages: the rest of the last one would be memory for nothing. A kernel
        // without them gives small pages.
        let whole = len / LARGE_PAGE_BYTES * LARGE_PAGE_BYTES;
        let _ = storage.advise_range(memmap2::Advice::HugePage, start, whole);
    }
    Some(Memory { storage: Storage::Mapped(storage), start, len, boundary })
}

impl Clone for Memory {
    fn clone(&self) -> Self {
        let mut copy = Self::zeroed(self.len, self.boundary);
        copy.bytes_mut().copy_from_slice(self.bytes());
        copy
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} bytes", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: usize = 64;

    #[test]
    fn bytes_are_zeros_on_a_line_and_copies_are_their_own() {
        let lens = [0, 1, 1000, LARGE_PAGE_BYTES, 2 * LARGE_PAGE_BYTES + 5];
        let all = lens.map(|len| [Memory::zeroed(len, LINE), Memory::on_large_pages(len, LINE)]);
        for (mut memory, len) in
            all.into_iter().zip(lens).flat_map(|([a, b], len)| [(a, len), (b, len)])
        {
            assert_eq!((memory.bytes().len(), memory.bytes().as_ptr().addr() % LINE), (len, 0));
            assert!(memory.bytes().iter().all(|byte| *byte == 0));
            memory.bytes_mut().fill(7);
            let copy = memory.clone();
            memory.bytes_mut().fill(8);
            assert!(copy.bytes().iter().all(|byte| *byte == 7));
        }
    }
}
