//! Rows interleaved by shuffles: what [`crate::repack`] defines unit by unit, at a speed at which
//! loading hardly waits for it.

use std::arch::x86_64::*;

use super::block::line;
use crate::{
    quantized::{Line, SPANS},
    repack::{QUAD, READ_BEYOND, Repack},
};

/// Interleaves four rows; `from` are they as they are stored, and any [`READ_BEYOND`] bytes.
pub(crate) fn interleave(repack: &Repack, from: &[u8], to: &mut [u8]) {
    assert!(super::is_available(), "the caller has asked");
    assert_eq!([from.len() - READ_BEYOND, to.len()], [repack.quad_bytes(); 2], "four rows");
    match (repack.unit, repack.units) {
        // SAFETY: the processor has just been asked.
        (4, 4) => unsafe { rows::<4, 4>(from, to) },
        // SAFETY: as above.
        (4, 8) => unsafe { rows::<8, 4>(from, to) },
        // SAFETY: as above.
        (4, 16) => unsafe { rows::<16, 4>(from, to) },
        // SAFETY: as above.
        (3, 8) => unsafe { rows::<8, 3>(from, to) },
        // SAFETY: as above.
        (3, 16) => unsafe { rows::<16, 3>(from, to) },
        other => unreachable!("no kernels for units of {other:?}"),
    }
}

/// Runs have `UNITS` units of `UNIT` bytes of each of 16 spans; the last one of a row may have
/// fewer spans.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn rows<const UNITS: usize, const UNIT: usize>(from: &[u8], to: &mut [u8]) {
    let run = SPANS * UNITS * UNIT;
    let row_bytes = to.len() / QUAD;
    for (number, to) in to.chunks_mut(QUAD * run).enumerate() {
        let start = number * run;
        if to.len() == QUAD * run {
            whole::<UNITS, UNIT>(&from[start..], row_bytes, to);
            continue;
        }
        for row in 0..QUAD {
            let from = &from[row * row_bytes..(row + 1) * row_bytes];
            part::<UNITS, UNIT>(&from[start..], row, to);
        }
    }
}

/// Puts a whole run of four rows into its place; `from` begins with that of the first.
///
/// Words are transposed by fours: few enough for the registers, and half of the work is loads, which
/// go beside the shuffles.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn whole<const UNITS: usize, const UNIT: usize>(from: &[u8], row_bytes: usize, to: &mut [u8]) {
    let (lines, _) = to.as_chunks_mut::<64>();
    for (words, lines) in lines.chunks_exact_mut(4 * UNIT).enumerate() {
        let at = words * 4 * UNIT;
        let a = four_words::<UNITS, UNIT>(&from[at..]);
        let b = four_words::<UNITS, UNIT>(&from[at + row_bytes..]);
        let c = four_words::<UNITS, UNIT>(&from[at + 2 * row_bytes..]);
        let d = four_words::<UNITS, UNIT>(&from[at + 3 * row_bytes..]);
        for (word, lines) in lines.chunks_exact_mut(UNIT).enumerate() {
            let rows = [a[word], b[word], c[word], d[word]];
            for (number, line) in lines.iter_mut().enumerate() {
                let bytes = if UNIT == 4 { rows[number] } else { closed(rows, number) };
                // SAFETY: the place is as long as the vector.
                unsafe { _mm512_storeu_si512(line.as_mut_ptr().cast(), bytes) };
            }
        }
    }
}

/// What four rows have of a unit of three bytes are three lines: this one of them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn closed(rows: [__m512i; QUAD], number: usize) -> __m512i {
    _mm512_permutex2var_epi8(rows[number], line(&CLOSE[number]), rows[number + 1])
}

/// Four words of each of 16 spans, transposed: a vector for each, with a lane for each span. `from`
/// begins with those of the first.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn four_words<const UNITS: usize, const UNIT: usize>(from: &[u8]) -> [__m512i; 4] {
    let span = UNITS * UNIT;
    assert!(from.len() >= 15 * span + 16, "the caller has looked");
    // Quarter q of the first has span 4q, of the second span 4q + 1.
    let mut spans = [_mm512_setzero_si512(); 4];
    for (number, spans) in spans.iter_mut().enumerate() {
        let at = |quarter: usize| from[(4 * quarter + number) * span..].as_ptr().cast();
        // SAFETY: 16 bytes from the last span on are there, as has just been asserted.
        let [a, b, c, d] = unsafe {
            [
                _mm_loadu_si128(at(0)),
                _mm_loadu_si128(at(1)),
                _mm_loadu_si128(at(2)),
                _mm_loadu_si128(at(3)),
            ]
        };
        let ab = _mm512_mask_broadcast_i32x4(_mm512_castsi128_si512(a), 0x00f0, b);
        *spans = _mm512_mask_broadcast_i32x4(_mm512_mask_broadcast_i32x4(ab, 0x0f00, c), 0xf000, d);
        if UNIT == 3 {
            *spans = _mm512_shuffle_epi8(*spans, line(&SPREAD_QUARTERS));
        }
    }
    let [a, b, c, d] = spans;
    let low = [_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d)];
    let high = [_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d)];
    [
        _mm512_unpacklo_epi64(low[0], low[1]),
        _mm512_unpackhi_epi64(low[0], low[1]),
        _mm512_unpacklo_epi64(high[0], high[1]),
        _mm512_unpackhi_epi64(high[0], high[1]),
    ]
}

/// Bytes of units of three as words of four, within each quarter of a vector.
const SPREAD_QUARTERS: Line = {
    let mut line = Line([0; 64]);
    let mut to = 0;
    while to < 64 {
        line.0[to] = (to % 16 / 4 * 3 + to % 4) as i8;
        to += 1;
    }
    line
};

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

/// The other way round: of the units of two vectors side by side, 64 bytes from byte `skip` on.
const fn close(skip: usize) -> Line {
    let mut line = Line([0; 64]);
    let mut to = 0;
    while to < 64 {
        let byte = skip + to;
        let of_vector = byte % 48;
        line.0[to] = (byte / 48 * 64 + of_vector / 3 * 4 + of_vector % 3) as i8;
        to += 1;
    }
    line
}

/// 48 bytes of one vector, and what follows of the next.
const CLOSE: [Line; 3] = [close(0), close(16), close(32)];

/// Puts the last run of row `row` of four into its places of theirs.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn part<const UNITS: usize, const UNIT: usize>(from: &[u8], row: usize, to: &mut [u8]) {
    const { assert!(UNITS == 4 || UNITS == 8 || UNITS == 16) };
    let mut words = [_mm512_setzero_si512(); UNITS];
    for (words, bytes) in words.iter_mut().zip(from.chunks(16 * UNIT)) {
        // SAFETY: the mask admits what there is.
        *words = unsafe { _mm512_maskz_loadu_epi8(first(bytes.len()), bytes.as_ptr().cast()) };
        if UNIT == 3 {
            *words = _mm512_permutexvar_epi8(line(&SPREAD), *words);
        }
    }
    // Of each span held, so many units.
    let size = from.len() / UNITS;
    let places = to.chunks_exact_mut(size).skip(row).step_by(QUAD);
    for (words, bytes) in transposed(words).iter().zip(places) {
        let words =
            if UNIT == 3 { _mm512_permutexvar_epi8(line(&CLOSE[0]), *words) } else { *words };
        // SAFETY: the mask admits what there is.
        unsafe { _mm512_mask_storeu_epi8(bytes.as_mut_ptr().cast(), first(size), words) };
    }
}

/// The mask of the first bytes of 64, of which there is one at least.
const fn first(count: usize) -> __mmask64 {
    u64::MAX >> (64 - count)
}

/// The words of 16 spans, span after span, transposed: a vector for each word of a span, with a lane
/// for each span.
#[inline]
#[target_feature(enable = "avx512f")]
fn transposed<const UNITS: usize>(words: [__m512i; UNITS]) -> [__m512i; UNITS] {
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
