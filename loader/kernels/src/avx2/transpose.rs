//! Interleaved weights unpacked and transposed for tiles ([`crate::tiles`]): eight rows by eight spans
//! at a time, a unit of each.

use std::arch::x86_64::*;

use super::{
    load_some,
    repack::transpose_four,
    unpack::{Bytes, Nibbles, SixBits, Unpack},
};
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
pub(super) unsafe fn transpose(
    weights: &Packed<'_>,
    rows: [usize; 3],
    visits: &[usize],
    words: &mut [u32],
) {
    match weights.bits {
        4 => transpose_all::<Nibbles>(weights, rows, visits, words),
        6 => transpose_all::<SixBits>(weights, rows, visits, words),
        8 => transpose_all::<Bytes>(weights, rows, visits, words),
        other => unreachable!("the constructor admits no {other} bits"),
    }
}

#[target_feature(enable = "avx2")]
fn transpose_all<F: Unpack>(
    weights: &Packed<'_>,
    [first, held, outputs]: [usize; 3],
    visits: &[usize],
    words: &mut [u32],
) {
    assert!(first.is_multiple_of(QUAD) && held.is_multiple_of(QUAD), "rows by fours");
    assert!(outputs.is_multiple_of(EIGHT) && held <= outputs, "places for rows");
    let lines = weights.span / 4;
    let words_of_span = lines / F::LINES * F::WORDS;
    let quad_bytes = QUAD * weights.row_bytes();
    for (run, visits) in visits.chunks(SPANS).enumerate() {
        let size = visits.len() * 4;
        let of_run = first * weights.row_bytes() + run * QUAD * SPANS * words_of_span * 4;
        for (half, visits) in visits.chunks(EIGHT).enumerate() {
            for rows in (0..held).step_by(EIGHT) {
                for step in 0..lines / F::LINES {
                    let mut all = [[_mm256_setzero_si256(); 3]; EIGHT];
                    for word in 0..F::WORDS {
                        let mut blocks = [_mm256_setzero_si256(); EIGHT];
                        for (row, block) in blocks.iter_mut().enumerate().take(held - rows) {
                            let row = rows + row;
                            let of_row = of_run + row / QUAD * quad_bytes;
                            let word = (step * F::WORDS + word) * QUAD + row % QUAD;
                            let at = of_row + word * size + half * EIGHT * 4;
                            *block = load_some(&weights.bytes[at..]);
                        }
                        for (all, transposed) in all.iter_mut().zip(transposed(blocks)) {
                            all[word] = transposed;
                        }
                    }
                    for (visit, words_of_rows) in visits.iter().zip(all) {
                        for index in 0..F::LINES {
                            let line = F::line(words_of_rows, index);
                            let line_number = if F::APART {
                                index * lines / F::LINES + step
                            } else {
                                step * F::LINES + index
                            };
                            let at = (visit * lines + line_number) * outputs + rows;
                            store(line, &mut words[at..]);
                        }
                    }
                }
            }
        }
    }
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
fn transposed([a, b, c, d, e, f, g, h]: [__m256i; EIGHT]) -> [__m256i; EIGHT] {
    let (left, right) = (transpose_four([a, b, c, d]), transpose_four([e, f, g, h]));
    let mut transposed = [_mm256_setzero_si256(); EIGHT];
    for (index, (left, right)) in left.into_iter().zip(right).enumerate() {
        transposed[index] = _mm256_permute2x128_si256::<0x20>(left, right);
        transposed[4 + index] = _mm256_permute2x128_si256::<0x31>(left, right);
    }
    transposed
}
