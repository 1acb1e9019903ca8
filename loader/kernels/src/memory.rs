//! Plain reads of memory: what decoding can at best be measured against; and what the allocator
//! does with memory that is free.

use std::sync::atomic::{AtomicU64, Ordering};

#[cfg(target_arch = "x86_64")]
use shardpack_quantize::Platform;
use zerocopy::FromBytes;

use crate::{
    platform::{self, Task},
    team,
};

/// How memory is read. Which is faster depends on the processor; the limit is the faster one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    /// By loads alone.
    Plain,
    /// By loads, with fetches ahead of them as kernels make them, where the platform has them.
    Fetched,
}

/// Bytes of one load of every accumulator.
const BLOCK: usize = 512;

/// Reads all bytes on the threads of the team, in as many parts; returns something that depends
/// on all of them, so that no load is left out. A rest shorter than a block is not read.
#[must_use]
pub fn read(bytes: &[u8], how: Read) -> u64 {
    read_all(&[bytes], how)
}

/// [`read`] of several pieces, of each of which every thread has a part; none waits between them.
#[must_use]
pub fn read_all(pieces: &[&[u8]], how: Read) -> u64 {
    let on = team::current();
    let found = AtomicU64::new(0);
    let part = |piece: &&'_ [u8], thread: usize| {
        let length = piece.len().div_ceil(on.threads).next_multiple_of(BLOCK);
        (thread * length).min(piece.len())..((thread + 1) * length).min(piece.len())
    };
    let mut threads: Vec<usize> = (0..on.threads).collect();
    team::chunks(&on, &mut threads, 1, |_, thread| {
        for piece in pieces {
            let part = &piece[part(piece, thread[0])];
            let sum = match (on.platform, how) {
                #[cfg(target_arch = "x86_64")]
                (Platform::Avx512, Read::Fetched) => crate::avx512::read(part),
                (platform, _) => platform::run(platform, Plain { bytes: part }),
            };
            found.fetch_xor(sum, Ordering::Relaxed);
        }
    });
    found.into_inner()
}

/// Has the system take back pieces of a mebibyte and more as soon as they are free, where that is
/// not so anyway.
///
/// glibc stops doing so for pieces like one that has been freed, up to 32 MiB: the results of steps
/// of changing sizes then leave gaps that nothing fits, and a process comes to hold a tenth more
/// than is planned for it. What steps use again is kept by [`crate::pool`].
pub fn give_back_large_pieces() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        const LARGE: libc::c_int = 1 << 20;
        // SAFETY: sets a number of the allocator's, under its own lock.
        #[expect(unsafe_code, reason = "the allocator is C")]
        let _ = unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE) };
    }
}

/// Has the line of an address brought to the L2 cache, where the platform can; nothing is read,
/// so the address need not be one of ours.
#[inline]
pub(crate) fn fetch(address: usize) {
    #[cfg(target_arch = "x86_64")]
    crate::avx2::fetch(address);
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// The same to the L1 cache.
#[inline]
pub(crate) fn fetch_near(address: usize) {
    #[cfg(target_arch = "x86_64")]
    crate::avx2::fetch_near(address);
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

struct Plain<'a> {
    bytes: &'a [u8],
}

impl Task for Plain<'_> {
    type Output = u64;

    #[inline(always)]
    fn run(self) -> u64 {
        const WORDS: usize = BLOCK / size_of::<u64>();
        let (skipped, words) =
            <[u64]>::ref_from_suffix_with_elems(self.bytes, self.bytes.len() / size_of::<u64>())
                .map_or((self.bytes, &[][..]), |(skipped, words)| (skipped, words));
        let mut all = [0; WORDS];
        for block in words.as_chunks::<WORDS>().0 {
            for (all, word) in all.iter_mut().zip(block) {
                *all |= word;
            }
        }
        all.iter().fold(skipped.len() as u64, |sum, word| sum ^ word)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardpack_quantize::Platform;

    use crate::{Activations, Team, TeamOptions};

    #[test]
    fn every_whole_block_is_read_on_all_platforms() {
        for platform in Platform::available() {
            let options = TeamOptions { threads: 2, platform, activations: Activations::F32 };
            let team = Team::new(&options).unwrap();
            let words = vec![0_u64; 4 * BLOCK];
            let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            for how in [Read::Plain, Read::Fetched] {
                let nothing = team.run(|| read(&bytes, how));
                for at in [0, BLOCK - 1, bytes.len() / 2, bytes.len() - 1] {
                    bytes[at] = 1;
                    assert_ne!(team.run(|| read(&bytes, how)), nothing, "{platform} {how:?} {at}");
                    bytes[at] = 0;
                }
            }
        }
    }
}
