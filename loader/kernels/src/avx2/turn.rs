//! Interleaved weights unpacked and turned for tiles ([`crate::tiles`]): eight rows by eight spans
//! at a time, a unit of each.

use std::arch::x86_64::*;

use super::forms::{Bytes, Form, Nibbles, SixBits};
use crate::{
    quantized::{Packed, SPANS},
    repack::QUAD,
};

/// Weight rows, and spans, of a vector.
const EIGHT: usize = 8;

/// Puts word `w` of span `s` of `held` weight rows from `first` on to `[visits[s]][w][row]` of
/// `words`, where there are places for `outputs` rows.
///
/// # Safety
/// The processor has AVX2.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn turn(
    weights: &Packed<'_>,
    rows: [usize; 3],
    visits: &[usize],
    words: &mut [u32],
) {
    match weights.bits {
        4 => turn_all::<Nibbles>(weights, rows, visits, words),
        6 => turn_all::<SixBits>(weights, rows, visits, words),
        8 => turn_all::<Bytes>(weights, rows, visits, words),
        other => unreachable!("the constructor admits no {other} bits"),
    }
}

#[target_feature(enable = "avx2")]
fn turn_all<F: Form>(
    weights: &Packed<'_>,
    [first, held, outputs]: [usize; 3],
    visits: &[usize],
    words: &mut [u32],
) {
    assert!(first.is_multiple_of(QUAD) && held.is_multiple_of(QUAD), "rows by fours");
    assert!(outputs.is_multiple_of(EIGHT) && held <= outputs, "places for rows");
    let units = weights.span / 4 / F::LINES;
    let quad_bytes = QUAD * weights.row_bytes();
    for (run, visits) in visits.chunks(SPANS).enumerate() {
        let size = visits.len() * F::UNIT;
        let of_run = first * weights.row_bytes() + run * QUAD * SPANS * units * F::UNIT;
        for (half, visits) in visits.chunks(EIGHT).enumerate() {
            for rows in (0..held).step_by(EIGHT) {
                for unit in 0..units {
                    let mut blocks = [_mm256_setzero_si256(); EIGHT];
                    for (row, block) in blocks.iter_mut().enumerate().take(held - rows) {
                        let row = rows + row;
                        let at = of_run
                            + row / QUAD * quad_bytes
                            + (unit * QUAD + row % QUAD) * size
                            + half * EIGHT * F::UNIT;
                        *block = F::words(read::<F>(&weights.bytes[at..]));
                    }
                    let turned = turned(blocks);
                    for (visit, block) in visits.iter().zip(turned) {
                        let of_span = visit * units * F::LINES * outputs + rows;
                        for (line, block) in F::lines(block).into_iter().enumerate().take(F::LINES)
                        {
                            let at = of_span + (line * units + unit) * outputs;
                            store(block, &mut words[at..]);
                        }
                    }
                }
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn read<F: Form>(from: &[u8]) -> __m256i {
    if from.len() < F::READ {
        return F::load_some(from);
    }
    // SAFETY: they are there, as has just been asked.
    unsafe { F::load(from.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store(words: __m256i, to: &mut [u32]) {
    let to = &mut to[..EIGHT];
    // SAFETY: the slice above is as long as the vector.
    unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), words) };
}

/// Word `j` of vector `i` to word `i` of vector `j`.
#[inline]
#[target_feature(enable = "avx2")]
fn turned([a, b, c, d, e, f, g, h]: [__m256i; EIGHT]) -> [__m256i; EIGHT] {
    let pairs = |a, b, c, d| {
        let low = [_mm256_unpacklo_epi32(a, b), _mm256_unpacklo_epi32(c, d)];
        let high = [_mm256_unpackhi_epi32(a, b), _mm256_unpackhi_epi32(c, d)];
        [
            _mm256_unpacklo_epi64(low[0], low[1]),
            _mm256_unpackhi_epi64(low[0], low[1]),
            _mm256_unpacklo_epi64(high[0], high[1]),
            _mm256_unpackhi_epi64(high[0], high[1]),
        ]
    };
    let (left, right) = (pairs(a, b, c, d), pairs(e, f, g, h));
    let mut turned = [_mm256_setzero_si256(); EIGHT];
    for (index, (left, right)) in left.into_iter().zip(right).enumerate() {
        turned[index] = _mm256_permute2x128_si256::<0x20>(left, right);
        turned[4 + index] = _mm256_permute2x128_si256::<0x31>(left, right);
    }
    turned
}
