//! A read loop with the fetches of the kernels.

use std::arch::x86_64::*;

use super::block::{FAR, NEAR};

/// Something that depends on all whole blocks of 512 bytes.
pub(crate) fn read(bytes: &[u8]) -> u64 {
    assert!(super::is_available(), "the caller chose a platform of this machine");
    // SAFETY: the processor has just been asked.
    unsafe { blocks(bytes) }
}

#[target_feature(enable = "avx512f")]
fn blocks(bytes: &[u8]) -> u64 {
    let mut all = [_mm512_setzero_si512(); 8];
    for block in bytes.as_chunks::<512>().0 {
        for (index, all) in all.iter_mut().enumerate() {
            let line = block[index * 64..][..64].as_ptr();
            _mm_prefetch::<_MM_HINT_T1>(line.wrapping_add(FAR).cast());
            _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(NEAR).cast());
            // SAFETY: the slice above is as long as the vector.
            let line = unsafe { _mm512_loadu_si512(line.cast()) };
            *all = _mm512_or_si512(*all, line);
        }
    }
    let mut found = 0;
    for all in all {
        found ^= _mm512_reduce_or_epi64(all);
    }
    found as u64
}
