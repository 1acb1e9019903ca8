//! Eight words of four weights each, one of each of eight spans, in the forms in which they lie
//! interleaved, and their products with as many activations.

#![expect(clippy::inline_always, reason = "compiled inside the function that has the features")]

use std::arch::x86_64::*;

macro_rules! value {
    ($instruction:expr) => {
        // SAFETY: called only within functions that have the instructions; no memory is touched.
        unsafe { $instruction }
    };
}
/// A form of interleaved weights. Its functions are called by [`super::words`], and nowhere else.
pub(super) trait Form {
    /// Bytes of a span's weights in a unit.
    const UNIT: usize;
    /// Lines of activations that a unit meets.
    const LINES: usize;
    /// Units of which products are added in 16 bits before they are widened.
    const TOGETHER: usize;
    /// Whether weights are taken less 128.
    const LESS_128: bool;
    /// Bytes that are read for eight spans.
    const READ: usize = 8 * Self::UNIT;

    /// A unit of eight spans.
    ///
    /// # Safety
    /// There are [`Self::READ`] bytes from `from` on.
    #[inline(always)]
    unsafe fn load(from: *const u8) -> __m256i {
        // SAFETY: as the caller says.
        unsafe { _mm256_loadu_si256(from.cast()) }
    }

    /// The same where there may be fewer bytes; zeros behind them.
    #[inline(always)]
    fn load_some(from: &[u8]) -> __m256i {
        let mut bytes = [0; 32];
        let held = from.len().min(Self::READ);
        bytes[..held].copy_from_slice(&from[..held]);
        // SAFETY: the array is as long as the longest unit.
        unsafe { Self::load(bytes.as_ptr()) }
    }

    /// A word of each span.
    #[inline(always)]
    fn words(block: __m256i) -> __m256i {
        block
    }

    /// Four weights of each word, and the other four.
    #[inline(always)]
    fn lines(words: __m256i) -> [__m256i; 2] {
        [words; 2]
    }

    /// What products are computed with.
    #[inline(always)]
    fn prepared(block: __m256i) -> [__m256i; 2] {
        Self::lines(Self::words(block))
    }

    /// Products with the activations of a line, added in pairs.
    #[inline(always)]
    fn product(weights: [__m256i; 2], _line: usize, x: __m256i) -> __m256i {
        value!(_mm256_maddubs_epi16(weights[0], x))
    }
}

/// Two weights of 4 bits to a byte: those with even numbers, then those with odd ones.
pub(super) struct Nibbles;

impl Form for Nibbles {
    const UNIT: usize = 4;
    const LINES: usize = 2;
    // 8 · 2 · 15 · 127 fits 16 bits.
    const TOGETHER: usize = 4;
    const LESS_128: bool = false;

    #[inline(always)]
    fn lines(block: __m256i) -> [__m256i; 2] {
        let low = value!(_mm256_set1_epi8(15));
        let odd = value!(_mm256_and_si256(_mm256_srli_epi16::<4>(block), low));
        [value!(_mm256_and_si256(block, low)), odd]
    }

    #[inline(always)]
    fn product(weights: [__m256i; 2], line: usize, x: __m256i) -> __m256i {
        value!(_mm256_maddubs_epi16(weights[line], x))
    }
}

/// Four weights of 6 bits to three bytes.
pub(super) struct SixBits;

impl Form for SixBits {
    const UNIT: usize = 3;
    const LINES: usize = 1;
    // 2 · 2 · 63 · 127 fits 16 bits.
    const TOGETHER: usize = 2;
    const LESS_128: bool = false;

    /// Twelve bytes stand at the beginning of the first half, and at the end of the second.
    #[inline(always)]
    unsafe fn load(from: *const u8) -> __m256i {
        // SAFETY: as the caller says; both end within the 24 bytes.
        unsafe {
            let (low, high) = (_mm_loadu_si128(from.cast()), _mm_loadu_si128(from.add(8).cast()));
            _mm256_set_m128i(high, low)
        }
    }

    /// Three bytes go to each word. Its upper half is moved so far that two fields begin either
    /// half; then the second of each two is moved to a byte of its own.
    #[inline(always)]
    fn words(block: __m256i) -> __m256i {
        let spread = value!(_mm256_setr_epi8(
            0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1, // from byte 0
            4, 5, 6, -1, 7, 8, 9, -1, 10, 11, 12, -1, 13, 14, 15, -1, // from byte 12
        ));
        let words = value!(_mm256_shuffle_epi8(block, spread));
        let moved = value!(_mm256_slli_epi32::<4>(words));
        let halves = value!(_mm256_blend_epi16::<0b1010_1010>(words, moved));
        let first = value!(_mm256_and_si256(halves, _mm256_set1_epi16(0x3f)));
        let second = value!(_mm256_slli_epi16::<2>(halves));
        let second = value!(_mm256_and_si256(second, _mm256_set1_epi16(0x3f00)));
        value!(_mm256_or_si256(first, second))
    }
}

/// Weights of 6 bits that have been unpacked.
pub(super) struct Unpacked;

impl Form for Unpacked {
    const UNIT: usize = 4;
    const LINES: usize = 1;
    const TOGETHER: usize = SixBits::TOGETHER;
    const LESS_128: bool = false;
}

/// A weight to a byte. Less 128 it is a signed number, whose size meets the activation with its
/// sign, since there is no product of signed bytes.
pub(super) struct Bytes;

impl Form for Bytes {
    const UNIT: usize = 4;
    const LINES: usize = 1;
    // 2 · 128 · 127 fits 16 bits, twice as much does not.
    const TOGETHER: usize = 1;
    const LESS_128: bool = true;

    #[inline(always)]
    fn words(block: __m256i) -> __m256i {
        value!(_mm256_xor_si256(block, _mm256_set1_epi8(-128)))
    }

    /// The weights and their sizes.
    #[inline(always)]
    fn prepared(block: __m256i) -> [__m256i; 2] {
        let words = Self::words(block);
        [words, value!(_mm256_abs_epi8(words))]
    }

    #[inline(always)]
    fn product([signed, size]: [__m256i; 2], _line: usize, x: __m256i) -> __m256i {
        value!(_mm256_maddubs_epi16(size, _mm256_sign_epi8(x, signed)))
    }
}
