//! Rows interleaved by shuffles: what [`crate::repack`] defines unit by unit, at a speed at which
//! loading hardly waits for it.

use std::arch::x86_64::*;

use crate::{
    quantized::SPANS,
    repack::{QUAD, READ_BEYOND, Repack},
};

/// Units that are turned at a time.
const WORDS: usize = 4;

/// Spans of a vector.
const HALF: usize = SPANS / 2;

/// Interleaves four rows; `from` are they as they are stored, and any [`READ_BEYOND`] bytes.
pub(crate) fn interleave(repack: &Repack, from: &[u8], to: &mut [u8]) {
    assert!(super::is_available(), "the caller has asked");
    assert_eq!([from.len() - READ_BEYOND, to.len()], [repack.quad_bytes(); 2], "four rows");
    // SAFETY: the processor has just been asked.
    unsafe {
        match repack.unit {
            3 => rows::<3>(repack, from, to),
            _ => rows::<4>(repack, from, to),
        }
    }
}

/// Rows whose units have `UNIT` bytes. The last run may have fewer spans than others.
#[target_feature(enable = "avx2")]
fn rows<const UNIT: usize>(repack: &Repack, from: &[u8], to: &mut [u8]) {
    let (span, row_bytes) = (repack.units * UNIT, to.len() / QUAD);
    for (run, to) in to.chunks_mut(QUAD * repack.run_bytes()).enumerate() {
        let held = to.len() / QUAD / span;
        for row in 0..QUAD {
            let from = &from[row * row_bytes + run * repack.run_bytes()..];
            for first in (0..held - held % HALF).step_by(HALF) {
                for word in (0..repack.units).step_by(WORDS) {
                    let words = four_words::<UNIT>(&from[first * span + word * UNIT..], span);
                    for (index, words) in words.into_iter().enumerate() {
                        let at = (((word + index) * QUAD + row) * held + first) * UNIT;
                        store::<UNIT>(words, &mut to[at..][..HALF * UNIT]);
                    }
                }
            }
            for span_number in held - held % HALF..held {
                for (unit, from) in
                    from[span_number * span..][..span].chunks_exact(UNIT).enumerate()
                {
                    let at = ((unit * QUAD + row) * held + span_number) * UNIT;
                    to[at..at + UNIT].copy_from_slice(from);
                }
            }
        }
    }
}

/// Four units of each of eight spans of `span` bytes, turned: a vector for each, with a lane for
/// each span.
#[inline]
#[target_feature(enable = "avx2")]
fn four_words<const UNIT: usize>(from: &[u8], span: usize) -> [__m256i; WORDS] {
    assert!(from.len() >= (HALF - 1) * span + 16, "the caller has looked");
    let mut spans = [_mm256_setzero_si256(); 4];
    for (number, spans) in spans.iter_mut().enumerate() {
        // SAFETY: 16 bytes from the last span on are there, as has just been asserted.
        let [low, high] = [number, number + 4].map(|span_number| unsafe {
            _mm_loadu_si128(from[span_number * span..].as_ptr().cast())
        });
        *spans = _mm256_set_m128i(high, low);
        if UNIT == 3 {
            let spread = _mm_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1);
            *spans = _mm256_shuffle_epi8(*spans, _mm256_broadcastsi128_si256(spread));
        }
    }
    let [a, b, c, d] = spans;
    let low = [_mm256_unpacklo_epi32(a, b), _mm256_unpacklo_epi32(c, d)];
    let high = [_mm256_unpackhi_epi32(a, b), _mm256_unpackhi_epi32(c, d)];
    [
        _mm256_unpacklo_epi64(low[0], low[1]),
        _mm256_unpackhi_epi64(low[0], low[1]),
        _mm256_unpacklo_epi64(high[0], high[1]),
        _mm256_unpackhi_epi64(high[0], high[1]),
    ]
}

/// The lanes side by side, of units of three bytes without the fourth.
#[inline]
#[target_feature(enable = "avx2")]
fn store<const UNIT: usize>(words: __m256i, to: &mut [u8]) {
    assert_eq!(to.len(), HALF * UNIT, "eight units");
    if UNIT == 4 {
        // SAFETY: the place is as long as the vector.
        return unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), words) };
    }
    let close = _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
    let words = _mm256_shuffle_epi8(words, _mm256_broadcastsi128_si256(close));
    let high = _mm256_extracti128_si256::<1>(words);
    // SAFETY: 16, 8 and 4 bytes end within the place; the first are twelve and what the others
    // then overwrite.
    unsafe {
        _mm_storeu_si128(to.as_mut_ptr().cast(), _mm256_castsi256_si128(words));
        _mm_storeu_si64(to.as_mut_ptr().add(12).cast(), high);
        _mm_storeu_si32(to.as_mut_ptr().add(20).cast(), _mm_srli_si128::<8>(high));
    }
}
