//! Rows interleaved by shuffles: what [`crate::repack`] defines unit by unit, at a speed at which
//! loading hardly waits for it.

use std::arch::x86_64::*;

use super::block::line;
use crate::{
    quantized::Line,
    repack::{QUAD, Repack},
};

/// Interleaves four rows; `from` are they as they are stored.
pub(crate) fn interleave(repack: &Repack, from: &[u8], to: &mut [u8]) {
    assert!(super::is_available(), "the caller has asked");
    assert_eq!([from.len(), to.len()], [repack.quad_bytes(); 2], "four rows");
    match (repack.unit, repack.units) {
        // SAFETY: the processor has just been asked.
        (4, 4) => unsafe { rows::<4, 64>(from, to) },
        // SAFETY: as above.
        (4, 8) => unsafe { rows::<8, 64>(from, to) },
        // SAFETY: as above.
        (4, 16) => unsafe { rows::<16, 64>(from, to) },
        // SAFETY: as above.
        (3, 8) => unsafe { rows::<8, 48>(from, to) },
        // SAFETY: as above.
        (3, 16) => unsafe { rows::<16, 48>(from, to) },
        other => unreachable!("no kernels for units of {other:?}"),
    }
}

/// Runs have `UNITS` units of each of 16 spans, of which 16 are `BYTES`; the last one of a row may
/// have fewer spans.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn rows<const UNITS: usize, const BYTES: usize>(from: &[u8], to: &mut [u8]) {
    for (row, from) in from.chunks_exact(from.len() / QUAD).enumerate() {
        let places = to.chunks_mut(QUAD * UNITS * BYTES);
        for (from, to) in from.chunks(UNITS * BYTES).zip(places) {
            words::<UNITS, BYTES>(from, row, to);
        }
    }
}

/// Bytes of units of three as words of four, whose last byte does not matter.
const SPREAD: Line = {
    let mut line = Line([0; 64]);
    let mut to = 0;
    while to < 64 {
        line.0[to] = (to / 4 * 3 + to % 4) as i8;
        to += 1;
    }
    line
};

/// The other way round: 48 bytes, after which nothing matters.
const CLOSE: Line = {
    let mut line = Line([0; 64]);
    let mut to = 0;
    while to < 48 {
        line.0[to] = (to / 3 * 4 + to % 3) as i8;
        to += 1;
    }
    line
};

/// Puts a run of row `row` of four into its places of theirs.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn words<const UNITS: usize, const BYTES: usize>(from: &[u8], row: usize, to: &mut [u8]) {
    const { assert!(UNITS == 4 || UNITS == 8 || UNITS == 16) };
    let mut words = [_mm512_setzero_si512(); UNITS];
    for (words, bytes) in words.iter_mut().zip(from.chunks(BYTES)) {
        // SAFETY: the mask admits what there is.
        *words = unsafe { _mm512_maskz_loadu_epi8(first(bytes.len()), bytes.as_ptr().cast()) };
        if BYTES == 48 {
            *words = _mm512_permutexvar_epi8(line(&SPREAD), *words);
        }
    }
    // Of each span held, so many units.
    let size = from.len() / UNITS;
    let places = to.chunks_exact_mut(size).skip(row).step_by(QUAD);
    for (words, bytes) in turned(words).iter().zip(places) {
        let words =
            if BYTES == 48 { _mm512_permutexvar_epi8(line(&CLOSE), *words) } else { *words };
        // SAFETY: the mask admits what there is.
        unsafe { _mm512_mask_storeu_epi8(bytes.as_mut_ptr().cast(), first(size), words) };
    }
}

/// The mask of the first bytes of 64, of which there is one at least.
const fn first(count: usize) -> __mmask64 {
    u64::MAX >> (64 - count)
}

/// The words of 16 spans, span after span, turned: a vector for each word of a span, with a lane
/// for each span.
#[inline]
#[target_feature(enable = "avx512f")]
fn turned<const UNITS: usize>(words: [__m512i; UNITS]) -> [__m512i; UNITS] {
    // Of every four vectors: word `w` of each quarter of all four.
    let mut fours = words;
    for quad in 0..UNITS / 4 {
        let [a, b, c, d] = [0, 1, 2, 3].map(|index| 4 * quad + index);
        let low =
            [_mm512_unpacklo_epi32(words[a], words[b]), _mm512_unpacklo_epi32(words[c], words[d])];
        let high =
            [_mm512_unpackhi_epi32(words[a], words[b]), _mm512_unpackhi_epi32(words[c], words[d])];
        fours[a] = _mm512_unpacklo_epi64(low[0], low[1]);
        fours[b] = _mm512_unpackhi_epi64(low[0], low[1]);
        fours[c] = _mm512_unpacklo_epi64(high[0], high[1]);
        fours[d] = _mm512_unpackhi_epi64(high[0], high[1]);
    }
    let mut out = fours;
    match UNITS {
        // A quarter is a span: quarter q, word i is span 4i + q.
        4 => {
            let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            for (out, four) in out.iter_mut().zip(&fours) {
                *out = _mm512_permutexvar_epi32(order, *four);
            }
        }
        // Two quarters are a span: quarter 2 · quad + half, word i is span 8 · quad + 2i + half.
        8 => {
            let order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
            for word in 0..4 {
                let (a, b) = (fours[word], fours[4 + word]);
                let even = _mm512_shuffle_i32x4::<0b10_00_10_00>(a, b);
                let odd = _mm512_shuffle_i32x4::<0b11_01_11_01>(a, b);
                out[word] = _mm512_permutexvar_epi32(order, even);
                out[4 + word] = _mm512_permutexvar_epi32(order, odd);
            }
        }
        // Four quarters are a span.
        _ => {
            for word in 0..4 {
                let [a, b] = [fours[word], fours[4 + word]];
                let [c, d] = [fours[8 + word], fours[12 + word]];
                let even = _mm512_shuffle_i32x4::<0b10_00_10_00>(a, b);
                let odd = _mm512_shuffle_i32x4::<0b11_01_11_01>(a, b);
                let even_high = _mm512_shuffle_i32x4::<0b10_00_10_00>(c, d);
                let odd_high = _mm512_shuffle_i32x4::<0b11_01_11_01>(c, d);
                out[word] = _mm512_shuffle_i32x4::<0b10_00_10_00>(even, even_high);
                out[4 + word] = _mm512_shuffle_i32x4::<0b10_00_10_00>(odd, odd_high);
                out[8 + word] = _mm512_shuffle_i32x4::<0b11_01_11_01>(even, even_high);
                out[12 + word] = _mm512_shuffle_i32x4::<0b11_01_11_01>(odd, odd_high);
            }
        }
    }
    out
}
