//! Unpacks interleaved 4-, 6- and 8-bit weights, eight spans at a time, and multiplies them with
//! activations.

#![expect(clippy::inline_always, reason = "compiled inside the function that has the features")]

use std::arch::x86_64::*;

macro_rules! value {
    ($instruction:expr) => {
        // SAFETY: called only within functions that have the instructions; no memory is touched.
        unsafe { $instruction }
    };
}
/// The unpacking of one bit width of interleaved weights. Its functions are called within functions
/// that have the instructions, and nowhere else.
///
/// A step is some words of eight spans, a vector for each word, which unpack to lines of four
/// weights of each span.
pub(super) trait Unpack {
    /// Words of a step, at most three.
    const WORDS: usize;
    /// Lines of a step.
    const LINES: usize;
    /// Lines of which products are added in 16 bits before they are widened.
    const TOGETHER: usize;
    /// Whether weights are taken less 128.
    const LESS_128: bool;
    /// Whether a span's first lines come before its second ones in tiles.
    const APART: bool = false;

    /// A line of a step.
    fn line(words: [__m256i; 3], line: usize) -> __m256i;

    /// Products of a line with activations, added in pairs.
    #[inline(always)]
    fn product(line: __m256i, x: __m256i) -> __m256i {
        value!(_mm256_maddubs_epi16(line, x))
    }
}

#[inline(always)]
fn masked(bytes: __m256i, mask: i8) -> __m256i {
    value!(_mm256_and_si256(bytes, _mm256_set1_epi8(mask)))
}

/// Two weights of 4 bits to a byte: those with even numbers, then those with odd ones.
pub(super) struct Nibbles;

impl Unpack for Nibbles {
    const WORDS: usize = 1;
    const LINES: usize = 2;
    // 8 · 2 · 15 · 127 fits 16 bits.
    const TOGETHER: usize = 8;
    const LESS_128: bool = false;
    const APART: bool = true;

    #[inline(always)]
    fn line([word, ..]: [__m256i; 3], line: usize) -> __m256i {
        let word = if line == 0 { word } else { value!(_mm256_srli_epi16::<4>(word)) };
        masked(word, 0b1111)
    }
}

/// Weights of 6 bits in planes ([`crate::repack::Packing::Planes`]): every fourth of sixteen, four
/// times.
pub(super) struct SixBits;

impl Unpack for SixBits {
    const WORDS: usize = 3;
    const LINES: usize = 4;
    // 2 · 2 · 63 · 127 fits 16 bits.
    const TOGETHER: usize = 2;
    const LESS_128: bool = false;

    /// A plane's bytes have the low bits of one weight and the high bits of the one before.
    #[inline(always)]
    fn line([first, second, third]: [__m256i; 3], line: usize) -> __m256i {
        match line {
            0 => masked(first, 0b11_1111),
            1 => {
                let low = masked(value!(_mm256_srli_epi16::<6>(first)), 0b11);
                let high = masked(value!(_mm256_slli_epi16::<2>(second)), 0b11_1100);
                value!(_mm256_or_si256(low, high))
            }
            2 => {
                let low = masked(value!(_mm256_srli_epi16::<4>(second)), 0b1111);
                let high = masked(value!(_mm256_slli_epi16::<4>(third)), 0b11_0000);
                value!(_mm256_or_si256(low, high))
            }
            _ => masked(value!(_mm256_srli_epi16::<2>(third)), 0b11_1111),
        }
    }
}

/// A weight to a byte. Less 128 it is a signed number, whose size meets the activation with its
/// sign, since there is no product of signed bytes.
pub(super) struct Bytes;

impl Unpack for Bytes {
    const WORDS: usize = 1;
    const LINES: usize = 1;
    // 2 · 128 · 127 fits 16 bits, twice as much does not.
    const TOGETHER: usize = 1;
    const LESS_128: bool = true;

    #[inline(always)]
    fn line([word, ..]: [__m256i; 3], _line: usize) -> __m256i {
        value!(_mm256_xor_si256(word, _mm256_set1_epi8(-128)))
    }

    #[inline(always)]
    fn product(line: __m256i, x: __m256i) -> __m256i {
        value!(_mm256_maddubs_epi16(_mm256_abs_epi8(line), _mm256_sign_epi8(x, line)))
    }
}
