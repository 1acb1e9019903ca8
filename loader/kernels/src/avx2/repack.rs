//! Rows interleaved by shuffles: what [`crate::repack`] defines unit by unit, at a speed at which
//! loading hardly waits for it.

use std::arch::x86_64::*;

use crate::{
    quantized::SPANS,
    repack::{QUAD, READ_BEYOND, Repack},
};

/// Bytes of a word.
const UNIT: usize = 4;

/// Spans of a vector.
const HALF: usize = SPANS / 2;

/// Interleaves four rows; `from` are they as they are stored, and any [`READ_BEYOND`] bytes.
pub(crate) fn interleave(repack: &Repack, from: &[u8], to: &mut [u8]) {
    assert!(super::is_available(), "the caller has asked");
    assert_eq!([from.len() - READ_BEYOND, to.len()], [repack.quad_bytes(); 2], "four rows");
    // SAFETY: the processor has just been asked.
    unsafe {
        if repack.has_planes() { rows::<3>(repack, from, to) } else { rows::<4>(repack, from, to) }
    }
}

/// Rows of words, of which so many are transposed at a time: three where bytes are put to planes. The
/// last run may have fewer spans than others.
#[target_feature(enable = "avx2")]
fn rows<const WORDS: usize>(repack: &Repack, from: &[u8], to: &mut [u8]) {
    assert!(repack.unit == UNIT && repack.units.is_multiple_of(WORDS), "words");
    let (span, row_bytes) = (repack.units * UNIT, to.len() / QUAD);
    for (run, to) in to.chunks_mut(QUAD * repack.run_bytes()).enumerate() {
        let held = to.len() / QUAD / span;
        for row in 0..QUAD {
            let from = &from[row * row_bytes + run * repack.run_bytes()..];
            for first in (0..held - held % HALF).step_by(HALF) {
                for word in (0..repack.units).step_by(WORDS) {
                    let words = some_words::<WORDS>(&from[first * span + word * UNIT..], span);
                    for (index, words) in words.into_iter().enumerate() {
                        let at = (((word + index) * QUAD + row) * held + first) * UNIT;
                        store(words, &mut to[at..][..HALF * UNIT]);
                    }
                }
            }
            for number in held - held % HALF..held {
                let from = &from[number * span..][..span];
                for unit in 0..repack.units {
                    let word = if WORDS == 3 {
                        let bytes = &from[unit / 3 * 12..][..12];
                        [0, 3, 6, 9].map(|byte| bytes[byte + unit % 3])
                    } else {
                        from.as_chunks().0[unit]
                    };
                    let at = ((unit * QUAD + row) * held + number) * UNIT;
                    to[at..at + UNIT].copy_from_slice(&word);
                }
            }
        }
    }
}

/// Some words of each of eight spans of `span` bytes, transposed: a vector for each, with a lane for
/// each span.
#[inline]
#[target_feature(enable = "avx2")]
fn some_words<const WORDS: usize>(from: &[u8], span: usize) -> [__m256i; WORDS] {
    assert!(from.len() >= (HALF - 1) * span + 16, "the caller has looked");
    let planes = _mm_setr_epi8(0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11, -1, -1, -1, -1);
    let mut spans = [_mm256_setzero_si256(); 4];
    for (number, spans) in spans.iter_mut().enumerate() {
        // SAFETY: 16 bytes from the last span on are there, as has just been asserted.
        let [low, high] = [number, number + 4]
            .map(|number| unsafe { _mm_loadu_si128(from[number * span..].as_ptr().cast()) });
        *spans = _mm256_set_m128i(high, low);
        if WORDS == 3 {
            *spans = _mm256_shuffle_epi8(*spans, _mm256_broadcastsi128_si256(planes));
        }
    }
    *transpose_four(spans).first_chunk().expect("four words at most")
}

/// Word `j` of each half of vector `i` to word `i` of that half of vector `j`.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn transpose_four([a, b, c, d]: [__m256i; 4]) -> [__m256i; 4] {
    let low = [_mm256_unpacklo_epi32(a, b), _mm256_unpacklo_epi32(c, d)];
    let high = [_mm256_unpackhi_epi32(a, b), _mm256_unpackhi_epi32(c, d)];
    [
        _mm256_unpacklo_epi64(low[0], low[1]),
        _mm256_unpackhi_epi64(low[0], low[1]),
        _mm256_unpacklo_epi64(high[0], high[1]),
        _mm256_unpackhi_epi64(high[0], high[1]),
    ]
}

#[inline]
#[target_feature(enable = "avx2")]
fn store(words: __m256i, to: &mut [u8]) {
    assert_eq!(to.len(), HALF * UNIT, "eight words");
    // SAFETY: the place is as long as the vector.
    unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), words) };
}
